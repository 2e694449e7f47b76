"""evener bench: measure how training scales with processes, hosts and sync strategies."""

from __future__ import annotations

import typer

from evener.cli.trust import TRUST

EXAMPLES = "evener bench --seconds 20\nevener bench --fleet fleet.toml\nevener bench --preset compute --dtype fp32"
PRESETS = ["scaling", "compute", "fleet", "strategies"]
COMPUTE_FLAGS = ("dtype", "device", "threads", "dropout", "vocab_size")


def bench(
    preset: str | None = typer.Option(
        None,
        metavar="scaling|compute|fleet|strategies",
        help="scaling: 1, 2, … processes on this machine; compute: the operations of one process's step; fleet: hosts "
        "alone and together; strategies: sync strategies [scaling; with --fleet fleet]",
    ),
    fleet: str | None = typer.Option(None, metavar="FILE", help="hosts to measure [strategies: fleet.toml]"),
    hosts: str | None = typer.Option(None, metavar="NAME,…", help="only these hosts of the fleet [all]"),
    data: list[str] | None = typer.Option(None, help="a corpus; may be given again [data/verbs and data/python]"),
    out: str | None = typer.Option(None, help="folder of the results [runs/bench, runs/fleet, runs/strategies]"),
    seconds: float = typer.Option(45.0, min=1.0, max=3600.0, help="training time of each set-up"),
    steps: int = typer.Option(500, min=1, help="strategies: steps with each sync strategy"),
    syncs: str | None = typer.Option(None, metavar="NAME,…", help="strategies: only these [all that suit the model]"),
    ranks: list[int] | None = typer.Option(None, min=1, max=1024, help="scaling: numbers of processes [1, 2, … cores]"),
    model: str = typer.Option("char", help="model to train"),
    batch: int | None = typer.Option(None, min=1, help="sequences in the global batch [8; strategies: 16]"),
    dtype: str | None = typer.Option(None, metavar="auto|fp32|bf16", help="compute: of the arithmetic [auto]"),
    device: str | None = typer.Option(None, metavar="auto|cpu|cuda", help="compute: what to measure [auto]"),
    threads: int | None = typer.Option(None, min=1, max=1024, help="compute: threads on a CPU [cores]"),
    dropout: float | None = typer.Option(None, min=0.0, max=0.99, help="compute: share of activations dropped [0]"),
    vocab_size: int | None = typer.Option(None, min=1, help="compute: vocabulary [of --data, else the preset's]"),
    force: bool = typer.Option(False, "--force", help="scaling: replace an existing folder"),
    trust: bool = TRUST,
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Measure the effect of more processes, more hosts or another sync strategy, and explain it.

    On this machine: the same global batches with 1, 2, … processes, on the verb corpus and on Python's own source
    (prepared first if missing). With --fleet: each host alone (in one process, one per core, on its GPU) and all hosts
    together: tokens/s and all-reduce time. With --preset strategies: all hosts with each sync strategy, for the same
    steps: tokens/s against loss. Prints a table and an explanation, and writes a picture and a page. On a fleet a
    stopped bench continues where it was.

    With --preset compute: each operation of one process's training step beside the least time that it could take, by
    the rates of matrix products and memory measured in the same minutes; writes nothing.
    """
    from evener.bench.setups import compute_bench_spec, fleet_bench_spec, scaling_bench_spec, strategies_bench_spec
    from evener.cli import bench_local
    from evener.core.base.errors import UsageError, did_you_mean

    preset = preset or ("scaling" if fleet is None else "fleet")
    if preset not in PRESETS:
        raise UsageError(f"--preset {preset}: no such preset", hint=did_you_mean(preset, PRESETS))
    flags = dict(zip(COMPUTE_FLAGS, (dtype, device, threads, dropout, vocab_size), strict=True))
    given = {name: value for name, value in flags.items() if value is not None}
    if preset == "compute":
        others = {"fleet": fleet, "hosts": hosts, "out": out, "syncs": syncs, "ranks": ranks, "force": force}
        if unused := next((name for name, value in others.items() if value), None):
            raise UsageError(f"--{unused}: --preset compute measures one process here", hint=f"without --{unused}")
        from evener.cli.bench_compute import run_compute_bench

        return run_compute_bench(compute_bench_spec(model, batch or 8, seconds, data, given), as_json)
    if given:
        flag = next(iter(given)).replace("_", "-")
        raise UsageError(f"--{flag}: --preset {preset} has its own", hint="only --preset compute takes it")
    if preset == "scaling":
        spec = scaling_bench_spec(model, batch or 8, seconds)
        return bench_local.run_scaling_bench(spec, data, out, ranks, force, as_json)
    from evener.cli import bench_fleet
    from evener.cli.trust import approve_fleet
    from evener.core.cluster.fleet_file import fleet_path, load_fleet, select_hosts

    path = fleet_path(fleet)
    if path is None:
        raise UsageError(f"--preset {preset} needs a fleet", hint="--fleet FILE; evener lab up makes one")
    if data and len(data) > 1:
        raise UsageError(f"--preset {preset} takes one corpus")
    chosen = approve_fleet(select_hosts(load_fleet(path), hosts), trust)  # report mistakes before preparing a corpus
    corpus = data[0] if data else bench_local.ensure_corpus(bench_local.DEFAULT_CORPORA[0])
    if preset == "fleet":
        spec = fleet_bench_spec(corpus, model, batch or 8, seconds)
        return bench_fleet.run_fleet_bench(chosen, spec, out, trust, as_json)
    spec = strategies_bench_spec(corpus, model, batch or 16, steps)
    return bench_fleet.run_strategies_bench(chosen, spec, syncs, out, trust, as_json)
