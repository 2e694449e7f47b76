"""The compute bench: where the time of one rank's training step goes, operation by operation, beside what bounds it."""

from __future__ import annotations

import msgspec

from evener.core.base.decoding import from_json
from evener.core.base.units import format_seconds
from evener.core.model.compute_profile import ComputeBenchSpec, ComputeProfile
from evener.core.model.operations import Operation, step_operations
from evener.launch.torch_subprocess import program_lines


class OperationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of the step: what it took, and the least that it could take."""

    name: str
    phase: str
    time_s: float
    flops: int
    bytes: int
    roof_s: float  # the longer of its arithmetic at the peak of matrix products and its bytes at the memory's best rate

    @property
    def gain_s(self) -> float:
        """Return what the operation takes beyond its roof."""
        return self.time_s - self.roof_s


class ComputeTable(msgspec.Struct, frozen=True, kw_only=True):
    """The operations of a step in their order."""

    profile: ComputeProfile
    rows: list[OperationRow]
    flops: int  # a step, as `GPTShape.flops_per_token` counts them

    @property
    def unattributed_s(self) -> float:
        """Return what no operation has of a step with the profiler: Python between operations, an idle GPU."""
        return self.profile.profiled_step_s - sum(row.time_s for row in self.rows)

    @property
    def mfu(self) -> float:
        """Return the share of the peak of matrix products that the whole step reaches."""
        return self.flops / self.profile.step_s / self.profile.matmul_flops

    @property
    def largest_gain(self) -> OperationRow:
        """Return the operation that takes most beyond its roof."""
        return max(self.rows, key=lambda row: row.gain_s)


def compute_table(spec: ComputeBenchSpec) -> ComputeTable:
    """Profile a training step on this machine, in a process of its own."""
    (line,) = program_lines("evener.worker.probe.compute_bench", msgspec.json.encode(spec).decode())
    return table_of(spec, from_json(line, ComputeProfile))


def table_of(spec: ComputeBenchSpec, profile: ComputeProfile) -> ComputeTable:
    """Join the measured times with the FLOPs and bytes of each operation."""
    times = {(one.name, one.phase): one.time_s for one in profile.operations}
    operations = step_operations(spec.shape, spec.batch, 4 if profile.dtype == "fp32" else 2)
    known = {(one.name, one.phase) for one in operations}
    operations += [Operation(name=name, phase=phase) for name, phase in times if (name, phase) not in known]
    rows = [
        OperationRow(
            name=one.name,
            phase=one.phase,
            time_s=times.get((one.name, one.phase), 0.0),
            flops=one.flops,
            bytes=one.bytes,
            roof_s=max(one.needed_flops / profile.matmul_flops, one.bytes / profile.memory_Bps),
        )
        for one in operations
    ]
    return ComputeTable(profile=profile, rows=rows, flops=spec.shape.flops_per_token() * profile.tokens)


def explain_table(table: ComputeTable) -> str:
    """Return one sentence about the largest thing left to win."""
    row, step_s = table.largest_gain, table.profile.profiled_step_s
    phase = {"both": ", forward and backward", "update": ""}.get(row.phase, f", {row.phase}")
    return (
        f"Most is left to win in {row.name}{phase}: it takes {format_seconds(row.time_s)} and its roof is "
        f"{format_seconds(row.roof_s)}; at its roof a step would take {row.gain_s / step_s:.0%} less."
    )
