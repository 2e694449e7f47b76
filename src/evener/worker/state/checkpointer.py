"""Checkpointing and replica verification: save and restore a run, and check by hashes that all replicas are equal.

With fixed membership rank 0 alone writes a checkpoint, with dynamic membership one rank on each host. It contains the
hashes that every rank took of its own replica.

Where replicas drift (DiLoCo), a checkpoint contains the last synchronized weights, and the optimizer states of the rank
that writes it or, where that rank has no share of the batch, of the first rank that has one. Each replica also saves
its present weights and optimizer states, as per-rank state (see rank_state.py). From these the same ranks resume bit
for bit; any others resume from the synchronized weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from evener.core.base.errors import CheckpointError, DivergedError, NonFiniteError
from evener.core.base.shell import quote_word
from evener.core.cluster.host_info import local_host_info
from evener.core.run.membership_epoch import CHECKPOINT_REQUEST_FILE
from evener.core.run.roster import NO_SYNC
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import Checkpoint, read_checkpoint
from evener.core.run.runwriter import RunWriter
from evener.worker.rank.precision import rounding_class
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.rank.sharded_tensors import full_tensor
from evener.worker.record.span_recorder import SpanRecorder
from evener.worker.state import checkpoint as checkpoints
from evener.worker.state import rng
from evener.worker.state.rank_state import (
    assign_orphaned_states,
    delete_rank_states_after,
    load_rank_state,
    ranks_with_state,
    save_rank_state,
)
from evener.worker.state.replica_hashes import (
    copy_from_rank0,
    gather_hashes,
    hash_tensors,
    minority_ranks,
    replica_mismatches,
)
from evener.worker.state.send_states import send_states
from evener.worker.state.state_serialization import flatten_state
from evener.worker.state.training_state import TrainingState
from evener.worker.sync import Sync

# relative to a tensor's largest number; replicas that differ by more since they were equal differ not by rounding alone
ROUNDING_TOLERANCE = 0.01
# step of the last checkpoint; loss and step of the best one
CheckpointHistory = tuple[int | None, float | None, int | None]


class Checkpointer:
    """One rank's side of checkpointing and of replica verification. Every method is collective: all ranks call it."""

    def __init__(
        self,
        rundir: RunWriter,
        spec: RunSpec,
        group: ProcessGroups,
        training_state: TrainingState,
        spans: SpanRecorder,
    ) -> None:
        self._dir, self._spec, self._group, self._training_state = rundir, spec, group, training_state
        self._spans = spans
        self._rank_state_step: int | None = None  # of the newest per-rank state that this rank saved
        self._saved_step: int | None = None  # equal on all ranks, whatever is on their disks: not every rank writes
        self._verified_step: int | None = None
        self._best: tuple[float, int] | None = None
        self._restored: Checkpoint | None = None

    @property
    def _sync(self) -> Sync:
        return self._training_state.sync

    @property
    def history(self) -> CheckpointHistory:
        """The last checkpoint and the best one; equal on all ranks."""
        return self._saved_step, *(self._best or (None, None))

    def reset_after_regroup(self, history: CheckpointHistory) -> None:
        """Adopt the checkpoint history on which the ranks of the new membership epoch agreed.

        The per-rank state that this rank saved does not belong to the new group of ranks. Its weights count as
        unverified, because the regroup may have interrupted a verification.
        """
        self._rank_state_step = self._verified_step = None
        self._saved_step, loss, step = history
        self._best = None if loss is None or step is None else (loss, step)

    @property
    def run_folder(self) -> Path:
        """The run directory on this host."""
        return self._dir.path

    def restore_checkpoint(self, resume_from: Checkpoint | None) -> None:
        """Load the checkpoint, if any, and drop the records of later steps, which the run will write again.

        Half-written checkpoints of an earlier start are removed. Restore this rank's RNG states if the world size is
        the checkpoint's, else seed its generators anew.
        """
        step = resume_from.step if resume_from else 0
        if self._group.local_rank == 0:
            self._dir.remove_partial_checkpoints()
            for rank in self._dir.recorded_ranks():
                self._dir.truncate_records(rank, step)
        self._restored = resume_from
        if resume_from is not None:
            folder = self._dir.checkpoint_path(step)
            self._training_state.load_checkpoint(folder)
            self._saved_step = step
            losses = [
                (saved.val_loss, saved.step) for saved in self._readable_checkpoints() if saved.val_loss is not None
            ]
            self._best = min(losses, default=None)
            if resume_from.world_size == self._group.world_size:
                rng.set_states(rng.load_rank_states(folder / "rng.safetensors", self._group.rank), self._group.device)
                return
        rng.seed_generators(self._spec.train.seed, step, self._group.member_rank)

    def _readable_checkpoints(self) -> Iterator[Checkpoint]:
        """Yield the checkpoints that can be read: a damaged older one must not end the run."""
        for step in self._dir.checkpoint_steps():
            with contextlib.suppress(CheckpointError):
                yield read_checkpoint(self._dir.checkpoint_path(step))

    def restore_rank_state(self, resume_from: Checkpoint | None) -> None:
        """Load the per-rank state of this rank and of departed ranks; call it after the Sync has wrapped the model.

        Drifting replicas load their states only if all ranks have one of the same strategy. Otherwise a rank loads its
        own state and those of departed ranks, whose unsent gradients any rank may send.
        """
        if resume_from is None:
            return
        group, step = self._group, resume_from.step
        if group.local_rank == 0:
            delete_rank_states_after(self._dir, step)
        on_this_host = ranks_with_state(self._dir, step)
        available = group.all_gather(on_this_host, list[int])
        mine = load_rank_state(self._dir, group.member_rank, step) if group.member_rank in on_this_host else None
        if self._sync.drifts:
            strategy = self._sync.state_dict()["way"]
            lacks_state = group.any_rank(not mine or mine["sync"].get("way") != strategy)
            if mine and not lacks_state and resume_from.world_size == group.world_size:
                self._training_state.load_state_dicts(mine["states"])
                self._sync.load_rank_state_dict(mine["sync"], [])
            elif group.rank == 0:
                self._dir.add_event("own.dropped", step=step)
            return
        orphaned = [
            load_rank_state(self._dir, number, step)
            for number in assign_orphaned_states(group.member_ranks, available)[group.rank]
        ]
        others = [state["sync"] for state in orphaned if state]
        self._sync.load_rank_state_dict((mine or {}).get("sync", {}), others)
        drifted = any("states" in state for state in (mine, *orphaned) if state)
        if group.any_rank(drifted) and group.rank == 0:
            self._dir.add_event("own.dropped", step=step)
        num_missing = resume_from.num_own - len({number for numbers in available for number in numbers})
        if group.rank == 0 and num_missing > 0:
            self._dir.add_event("own.missing", step=step, num=num_missing)

    def save(self, step: int, val_loss: float | None, finalize: bool = False) -> None:
        """Save the checkpoint of `step` unless it exists. Raise RunError on all ranks if it cannot be written.

        With dynamic membership verify all replicas first, as any set of hosts may restart from the checkpoint.
        `finalize`: other ranks are about to restart from it, so merge drifting replicas first, or what each has learned
        would be lost. `val_loss` was measured on the replicas; if they have drifted from the weights that are saved, it
        is not saved.
        """
        if step != self._saved_step:
            if finalize and self._sync.needs_merge():
                # Before the merge: afterwards nobody knows which rank was not finite.
                self._check_finite(step, self._sync.synced_weights(self._training_state.named_weights()))
                self.finalize_replicas(step)
                val_loss = None
            with self._spans.record_span("checkpoint"):
                self._save(step, val_loss)
            self._spans.flush()  # so that it is not lost if the rank dies now

    def _save(self, step: int, val_loss: float | None) -> None:
        val_loss = val_loss if self._sync.is_synced() else None
        weights = self._sync.synced_weights(self._training_state.named_weights())
        self._check_finite(step, weights)
        if self._group.has_dynamic_membership and step != self._verified_step:
            self.verify_replicas(step)
        whole = ((name, full_tensor(tensor)) for name, tensor in weights.items())
        replica_hashes = gather_hashes(hash_tensors(whole), self._group.world_size, self._group.control_group)
        generators = self._group.all_gather_bytes(safetensors.torch.save(rng.get_states(self._group.device)))
        own, states = self._collect_rank_state(), self._states_to_save()
        num_own = sum(self._group.all_gather(bool(own), bool))
        sync, bucket_bytes = self._sync.spec, self._sync.roster_bucket_bytes
        if sync == NO_SYNC and self._restored is not None:  # alone for a while: the others will come back
            sync, bucket_bytes = self._restored.sync, self._restored.bucket_bytes

        def write() -> None:
            self._save_rank_state(step, own)
            if self._group.is_writer:
                checkpoints.save(
                    self._dir,
                    weights,
                    states,
                    step=step,
                    val_loss=val_loss,
                    rng_states=[safetensors.torch.load(state) for state in generators],
                    replica_hashes=replica_hashes,
                    num_rank_states=num_own,
                    sync=sync,
                    bucket_bytes=bucket_bytes,
                    is_strategy_on_trial=self._training_state.is_strategy_on_trial,
                )
            else:
                checkpoints.gather(weights, states)

        self._group.run_or_raise_on_all(write)  # also keeps all from timing the next step while one still writes
        self._saved_step = step
        if self._group.local_rank == 0:
            with contextlib.suppress(OSError):
                self._dir.inside(CHECKPOINT_REQUEST_FILE).unlink()
        if self._group.is_writer:
            if val_loss is not None and (self._best is None or val_loss < self._best[0]):
                self._best = (val_loss, step)
            self._dir.prune_checkpoints(self._spec.checkpoint.keep, self._best[1] if self._best else None)
        if self._group.rank == 0:
            self._dir.add_event("checkpoint", step=step, val_loss=val_loss)

    def _check_finite(self, step: int, weights: dict[str, Tensor]) -> None:
        """Raise NonFiniteError on all ranks if any has a non-finite weight; the step before produced it."""
        # these go into the per-rank state
        local = {} if self._sync.is_synced() else self._training_state.named_weights()
        bad = checkpoints.describe_non_finite(weights) or checkpoints.describe_non_finite(local)
        problems = self._group.all_gather(bad, str)
        ranks = [rank for rank, text in zip(self._group.member_ranks, problems, strict=True) if text]
        if ranks:
            raise NonFiniteError(f"after step {step}: {next(filter(None, problems))}; it is not saved", step=step - 1,
                            ranks=ranks, hint="--resume goes on from the last checkpoint; ")  # fmt: skip

    def needs_finalize(self, step: int) -> bool:
        """Return whether ending the run at `step` would change the replicas' weights."""
        return self._sync.needs_merge() and step != self._saved_step

    def finalize_replicas(self, step: int) -> None:
        """Merge drifting replicas into one model at the end of the run.

        Each replica is saved as per-rank state first, so that a stopped run resumes bit for bit. A run that has taken
        all its steps and is extended resumes from the merged model.
        """
        self._group.run_or_raise_on_all(lambda: self._save_rank_state(step, self._collect_rank_state()))
        self._sync.merge_replicas()

    def verify_replicas(self, step: int) -> bool | None:
        """Return True if the synchronized weights and states are equal on all ranks; None for a single rank.

        They are equal if all bits are. If ranks may round differently, a difference by rounding alone is removed: all
        ranks take rank 0's numbers. Raise DivergedError for any other difference. If bits had to be equal and
        membership is fixed, each rank first writes its weights to RUN/replicas for `evener verify`.
        """
        if self._group.world_size == 1:
            return None
        with self._spans.record_span("comparison"):
            return self._verify_replicas(step)

    def _verify_replicas(self, step: int) -> bool:
        self._verified_step = step
        weights = (
            self._sync.synced_weights(self._training_state.named_weights())
            | flatten_state(self._sync.state_dict(), "sync")[1]
        )
        hashes = hash_tensors(self._sync.comparable_tensors(weights))
        replica_hashes = gather_hashes(hashes, self._group.world_size, self._group.control_group)
        mismatches = replica_mismatches(list(hashes), replica_hashes)
        is_sharded = self._sync.spec.is_sharded  # no rank has whole weights, to reconcile or to keep
        if mismatches and not is_sharded and self._has_mixed_rounding():
            return self._reconcile(step, weights)
        if mismatches:
            self._check_finite(step, weights)  # NaN has many bit patterns
            if not self._group.has_dynamic_membership and not is_sharded:
                folder = self._dir.inside("replicas")
                folder.mkdir(exist_ok=True)
                checkpoints.write_safetensors(folder / f"rank-{self._group.member_rank}.safetensors", weights)
                self._group.barrier()
            numbers = self._group.member_ranks
            raise DivergedError(
                f"after step {step}: the replicas differ: rank {numbers[mismatches[0].rank]} in {mismatches[0].tensor}"
                + (f" and {len(mismatches) - 1} more tensors" if len(mismatches) > 1 else ""),
                hint=("" if is_sharded else f"evener verify {quote_word(self._dir)} shows by how much; ")
                + "--resume goes back to the last checkpoint",
                step=step,
                outlier_ranks=[numbers[rank] for rank in minority_ranks(replica_hashes)],
                differences=[{"rank": numbers[one.rank], "tensor": one.tensor} for one in mismatches],
            )
        if self._group.rank == 0:
            self._dir.add_event("replicas.agree", step=step, tensors=len(hashes))
        return True

    def _has_mixed_rounding(self) -> bool:
        """Return whether ranks may round differently, by device or by the threads that split a sum."""
        cpu = f"{local_host_info().cpu} {torch.get_num_threads()}" if self._sync.rounding_depends_on_cpu_model else ""
        return len(set(self._group.all_gather(f"{rounding_class(self._group.device)} {cpu}", str))) > 1

    def _reconcile(self, step: int, weights: dict[str, Tensor]) -> bool:
        """Copy rank 0's weights to all ranks, as devices that round differently have made them differ.

        Raise DivergedError if a rank differs from rank 0 by more than ROUNDING_TOLERANCE.
        """
        at, difference = copy_from_rank0(weights, self._group.control_group, is_source=self._group.rank == 0)
        by_rank = [float(text) for text in self._group.all_gather_bytes(str(difference).encode())]
        difference, rank = max((value, rank) for rank, value in enumerate(by_rank))
        if not difference < ROUNDING_TOLERANCE:
            where, numbers = self._group.all_gather(at, str)[rank], self._group.member_ranks
            # from rank 0
            far = [number for number, diff in zip(numbers, by_rank, strict=True) if not diff < ROUNDING_TOLERANCE]
            raise DivergedError(
                f"after step {step}: the replicas differ by more than rounding: rank {numbers[rank]} by "
                f"{difference:.1e} of the largest number of {where}",
                hint="--resume goes back to the last checkpoint",
                step=step,
                outlier_ranks=far if 2 * len(far) < len(numbers) else [],
                differences=[{"rank": numbers[rank], "tensor": where}],
                relative=difference,
            )
        if self._group.rank == 0:
            self._dir.add_event("replicas.reconciled", step=step, tensors=len(weights), relative=difference)
        return True

    def _states_to_save(self) -> dict[str, Any]:
        """Return the states to save with the weights; a writer that does not train receives another rank's."""
        states, group = self._training_state.state_dicts(), self._group
        if not self._sync.drifts:
            return states
        roles = group.all_gather((self._training_state.is_learning, group.is_writer), tuple[bool, bool])
        learners = [rank for rank, (learns, _) in enumerate(roles) if learns]
        lacks = [rank for rank, (learns, keeps) in enumerate(roles) if keeps and not learns]
        return send_states(states, group, source=learners[0], receivers=lacks) if learners and lacks else states

    def _collect_rank_state(self) -> dict[str, Any]:
        """Return the state that this rank alone has; empty if there is none."""
        rank_state: dict[str, Any] = {"sync": self._sync.rank_state_dict()}
        if self._sync.drifts:
            states = self._training_state.state_dicts()
            rank_state["states"] = {name: state for name, state in states.items() if name != "sync"}
        return rank_state if any(rank_state.values()) else {}

    def _save_rank_state(self, step: int, rank_state: dict[str, Any]) -> None:
        """Save the per-rank state, at most once a step."""
        if rank_state and step != self._rank_state_step:
            save_rank_state(self._dir, self._group.member_rank, step, rank_state)
        self._rank_state_step = step
