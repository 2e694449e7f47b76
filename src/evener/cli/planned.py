"""What `plan` is asked about, and how its answer looks on a terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from evener.core.errors import UsageError
from evener.core.fleet import Fleet, load_fleet, only
from evener.core.link import FABRICS, Link, parse_link
from evener.core.prediction import Cluster, Job, Option, Prediction
from evener.core.resolve import Resolved, shape_of
from evener.core.shape import PRESETS
from evener.core.spec import RunSpec, make_spec
from evener.core.units import count, plural, seconds, size
from evener.plan.cluster import cluster_of, dtype_of, uniform, with_wire
from evener.plan.job import job_of
from evener.plan.search import predict, rate

LEGEND = (
    "exposed: communication that computing does not hide. ×: tokens/s beside the fastest host alone. sends: by one "
    "rank, of a step. loss: beside ddp; ?: nobody measured it."
)
MOST_HOSTS = 16  # that are listed one by one


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A job, the machines, and where their figures come from."""

    job: Job
    cluster: Cluster
    source: str
    fabrics: bool = False  # tell of other links, too
    changes: list[str] = []  # what a run's records changed in the probe's figures


# --- where the figures come from --------------------------------------------------------------------------------------


def from_fleet(path: str, hosts: str | None, spec: RunSpec, names_data: bool, link: str | None) -> Asked:
    """What was measured, in the fleet's file."""
    fleet = only(load_fleet(path), hosts)
    assumed: list[str] = []
    vocab_size = _vocab_size(spec)
    if vocab_size is None and names_data:
        assumed.append(f"{spec.data.data} is not here: the vocabulary is {spec.model.model}'s own")
    job = job_of(spec, shape_of(spec, vocab_size), dtype_of(fleet, spec.model.model, spec.machine.device))
    wire = None
    if link is not None:
        known = parse_link(link)
        wire = known.wire
        assumed.append(known.assumed)
    cluster = cluster_of(fleet, job, wire, spec.machine, any_dtype=spec.model.dtype == "auto")
    return Asked(job=job, cluster=_assuming(cluster, assumed), source=path)


def of_training(fleet: Fleet, resolved: Resolved, *, keep_order: bool = False) -> Prediction:
    """What `train` is about to do on these hosts; NotMeasuredError where too little was measured."""
    spec = resolved.spec
    job = job_of(spec, resolved.shape, dtype_of(fleet, spec.model.model, spec.machine.device))
    cluster = cluster_of(fleet, job, machine=spec.machine, any_dtype=spec.model.dtype == "auto")
    return predict(job, cluster, keep_order=keep_order)


def from_words(spec: RunSpec, names_data: bool, nodes: int | None, rates: str | None, link: str | None, per_node: int,
               node_link: str | None) -> Asked:  # fmt: skip
    """Machines that nobody has yet."""
    if rates is None:
        raise UsageError(
            "how fast is one rank alone? --compute-tokens-per-s N",
            hint="evener probe host measures it on a machine that you have",
        )
    each = _rates(rates)
    if nodes is None:
        nodes = len(each)
    if len(each) not in (1, nodes):
        raise UsageError(
            f"--compute-tokens-per-s {rates}: {plural(len(each), 'rate')} for {plural(nodes, 'node')}",
            hint="one rate for all of them, or one for each",
        )
    job = job_of(spec, shape_of(spec, _vocab_size(spec) if names_data else None), "bf16" if per_node > 1 else "fp32")
    links: list[Link] = []
    if nodes > 1:
        if link is None:
            raise UsageError("which link is between the nodes? --link 1GbE", hint="100Mbit, 2.5GbE, 400G, wifi, wan, …")
        links.append(parse_link(link))
    if per_node > 1:
        links.append(parse_link(node_link or "nvlink"))
    backend = spec.machine.backend if spec.machine.backend != "auto" else "nccl" if per_node > 1 else "gloo"
    cluster = uniform(
        [f"node{i + 1}" for i in range(nodes)],
        each * nodes if len(each) == 1 else each,
        links[0].wire if links else parse_link("1GbE").wire,
        num_ranks=per_node,
        local=links[-1].wire if per_node > 1 else None,
        backend=backend,
    )
    assumed = [one.assumed for one in links]
    if per_node > 1:
        assumed.append("several ranks on a node are GPUs, with NCCL and bf16")
    return Asked(job=job, cluster=_assuming(cluster, assumed), source="what you said", fabrics=nodes > 1)


def from_run(run: str, texts: dict[str, str], link: str | None, fleet: str | None) -> Asked:
    """A run's own records; the flags change what it trained. They go into the fleet's file if one is given."""
    from evener.core.plan import read_prediction
    from evener.core.rundir import RunDir
    from evener.plan.fit import fit

    rundir = RunDir(run)
    manifest = rundir.manifest()
    if manifest.shape is None:
        raise UsageError(
            f"{run}: a model of the user's own: its parts are not known", hint="evener report shows its steps"
        )
    records = [rundir.records(rank) for rank in range(manifest.world_size)]
    if not all(records):
        raise UsageError(f"{run}: not every rank has recorded a step", hint=f"evener report {run}")
    job = job_of(manifest.spec, manifest.shape, manifest.roster.dtypes)
    prediction = read_prediction(rundir)
    cluster = fit(job, manifest, records, prediction.cluster if prediction else None)
    changes = _changes(prediction.cluster, cluster) if prediction else []
    if fleet is not None:
        _write_into(fleet, job, cluster)
        changes.append(f"written to [rates] and [links] of {fleet}")
    if texts:
        spec = make_spec(None, texts, manifest.spec)
        vocab_size = manifest.shape.vocab_size if "model" not in texts else None
        new = job_of(spec, shape_of(spec, vocab_size), manifest.roster.dtypes)
        cluster = _for_job(cluster, job, new)
        if new.dtype != job.dtype:
            cluster = _assuming(cluster, [f"the run's rates are of {job.dtype}; {new.dtype} is taken to be as fast"])
        job = new
    if link is not None:
        known = parse_link(link)
        cluster = _assuming(with_wire(cluster, known.wire), [known.assumed])
    return Asked(job=job, cluster=cluster, source=f"the records of {run}", changes=changes)


def _write_into(path: str, job: Job, cluster: Cluster) -> None:
    """The refitted figures of the hosts that the file names, as a probe would write them: of the preset's own shape."""
    from evener.core.fleet import ModelRate, Rates
    from evener.core.measured import update_fleet

    fleet = load_fleet(path)
    strangers = [host.name for host in cluster.hosts if host.name not in fleet.hosts]
    if strangers:
        raise UsageError(f"{path}: the run had a host that it does not name: {', '.join(strangers)}")
    shape = PRESETS.get(job.model, job.shape)
    work, params = job.shape.flops_per_token() / shape.flops_per_token(), shape.num_params() / job.shape.num_params()
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    rates, links = {}, {}
    for host in cluster.hosts:
        of_host = host.num_ranks if host.device == "cpu" else 1
        model = ModelRate(
            tokens_per_s=host.tokens_per_s * of_host * work,
            pass_s=host.pass_s * params / of_host,
            update_s=host.update_s * params / of_host,
            dtype=job.dtype,
            cpus=host.cpus and host.cpus * of_host,
        )
        gpus = [device for device in fleet.rates.get(host.name, {}) if device.startswith("cuda")]
        devices = ["cpu"] if host.device == "cpu" else gpus or ["cuda:0"]
        rates[host.name] = {device: Rates(models={job.model: model}) for device in devices}
        known = fleet.links.get(host.name, {})
        links[host.name] = {
            target: msgspec.structs.replace(known[target], duplex_Bps=wire.bandwidth_Bps, measured=now)
            for target, wire in cluster.wires[host.name].items()
            if target in known
        }
    update_fleet(path, rates=rates, links=links)


def _for_job(cluster: Cluster, old: Job, new: Job) -> Cluster:
    """Rates of another shape, by FLOPs; the update, by parameters."""
    if new.shape == old.shape:
        return cluster
    slower = new.shape.flops_per_token() / old.shape.flops_per_token()
    params = new.shape.num_params() / old.shape.num_params()
    hosts = [
        msgspec.structs.replace(host, tokens_per_s=host.tokens_per_s / slower, pass_s=host.pass_s * params,
                                update_s=host.update_s * params)
        for host in cluster.hosts
    ]  # fmt: skip
    assumed = f"the rates of {new.model} follow from the run's {old.model}, by FLOPs"
    return _assuming(msgspec.structs.replace(cluster, hosts=hosts), [assumed])


def _changes(before: Cluster, after: Cluster) -> list[str]:
    found = []
    known = {host.name: host for host in before.hosts}
    for host in after.hosts:
        if host.name in known:
            old = known[host.name].tokens_per_s
            found.append(f"{host.name}: {rate(host.tokens_per_s)} a rank, predicted with {rate(old)}")
    return found


def _assuming(cluster: Cluster, assumed: list[str]) -> Cluster:
    return msgspec.structs.replace(cluster, assumed=[*assumed, *cluster.assumed])


def _vocab_size(spec: RunSpec) -> int | None:
    """Of the corpus, where it is here."""
    from evener.core.corpus import load_corpus

    path = Path(spec.data.data)
    return load_corpus(path).vocab_size if path.exists() else None


def _rates(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < one < 1e15 for one in found):
        raise UsageError(
            f"--compute-tokens-per-s {text}: expected a rate above 0, or one for each node", hint="for example 60,30"
        )
    return found


# --- the answer -------------------------------------------------------------------------------------------------------


def answer(asked: Asked, sync: str | None, loss_budget: float) -> Prediction:
    """The planner's answer."""
    return predict(asked.job, asked.cluster, loss_budget=loss_budget, also=[sync] if sync else [])


def fabrics(asked: Asked) -> list[tuple[str, float, Option, Option]]:
    """Every fabric: its name and payload, and ddp with gradients in fp32 and in bf16."""
    from evener.plan.cost import price

    found = []
    for name in FABRICS:
        wire = parse_link(name).wire
        cluster = with_wire(asked.cluster, wire)
        found.append((name, wire.bandwidth_Bps, price(asked.job, cluster, "ddp"), price(asked.job, cluster, "bf16")))
    return found


def as_json(found: Prediction, asked: Asked) -> dict[str, Any]:
    """What --json prints."""
    options = [
        msgspec.to_builtins(option) | {"cost": msgspec.to_builtins(option.slowest.cost)} for option in found.options
    ]
    told = {
        "verdict": found.verdict,
        "recommended": found.recommended,
        "chosen": found.chosen,
        "options": options,
        "advice": found.advice,
        "assumed": found.cluster.assumed,
        "source": asked.source,
        "job": msgspec.to_builtins(found.job),
        "cluster": msgspec.to_builtins(found.cluster),
    }
    if asked.fabrics:
        told["fabrics"] = [
            {"link": name, "payload_Bps": payload_Bps, "all_reduce_s": ddp.ranks[0].sync_s,
             "bf16_all_reduce_s": bf16.ranks[0].sync_s, "step_s": ddp.step_s, "tokens_per_s": ddp.tokens_per_s}
            for name, payload_Bps, ddp, bf16 in fabrics(asked)
        ]  # fmt: skip
    return told


def tell(found: Prediction, asked: Asked) -> None:
    """The verdict, the ways side by side, where a step goes, and what is not known."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False)
    job, shape = found.job, found.job.shape
    console.print(f"[bold]{found.verdict}[/bold]", soft_wrap=True)
    console.print(
        f"{job.model}: {count(shape.num_params())} parameters, {plural(job.batch, 'sequence')} of {shape.block_size} "
        f"tokens a step, {job.dtype}; figures from {asked.source}",
        style="dim", soft_wrap=True,
    )  # fmt: skip
    console.print()
    console.print(_speeds(found))
    console.print(LEGEND, style="dim", soft_wrap=True)
    console.print(_prices(found))
    if 1 < len(found.cluster.hosts) <= MOST_HOSTS:
        console.print(_hosts(found))
    if asked.fabrics:
        console.print("ddp over other links; 16 bit: its all-reduce of bf16, not in train yet", style="dim")
        console.print(_fabric_table(asked, found))
    console.print()
    for line in found.advice:
        console.print(line, soft_wrap=True)
    for line in asked.changes:
        console.print(f"refitted: {line}", soft_wrap=True)
    if found.cluster.assumed:
        console.print("\nassumed, not measured:", style="dim")
        for line in found.cluster.assumed:
            console.print(f"  {line}", style="dim", soft_wrap=True)


def _table(*columns: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(
            column, justify="left" if i == 0 or column == "why not" else "right", no_wrap=column != "why not"
        )
    return table


def _short(value: float | None) -> str:
    """Seconds in a narrow column.

    >>> _short(0.0), _short(0.0125), _short(18.79), _short(86.4), _short(None)
    ('–', '12.5 ms', '18.8 s', '86.4 s', '?')
    >>> _short(18.0), _short(252.4)
    ('18.0 s', '252 s')
    """
    if value is None:
        return "?"
    if value < 5e-7:
        return "–"
    return seconds(value) if value < 0.9995 or value >= 600 else f"{value:#.3g} s".replace(". ", " ")


def _rate(tokens_per_s: float) -> str:
    """With three digits, so that near ones can be told apart.

    >>> _rate(57.04), _rate(466.2), _rate(1617.0), _rate(566_900_000.0)
    ('57.0', '466', '1.62k', '567M')
    """
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens_per_s >= 0.9995 * factor:
            return f"{tokens_per_s / factor:#.3g}".rstrip(".") + prefix
    return f"{tokens_per_s:#.3g}".rstrip(".")


def _in_order(found: Prediction) -> list[Option]:
    """The recommended one, what train can run, the rest; the fastest first."""
    return sorted(
        found.options, key=lambda option: (option.name != found.recommended, not option.is_built, -option.tokens_per_s)
    )


def _speeds(found: Prediction) -> Any:
    """The step of each way, as its slowest rank sees it: that one waits for nobody."""
    table = _table("way", "step", "compute", "exposed", "update", "tokens/s", "×")
    for option in _in_order(found):
        cost = option.slowest.cost
        table.add_row(
            option.name,
            *map(_short, (option.step_s, cost.compute_s, cost.exposed_sync_s, cost.optimizer_s)),
            _rate(option.tokens_per_s),
            f"{option.speedup_vs_best_host:.2f}" if option.speedup_vs_best_host else "–",
            style="bold" if option.name == found.recommended else None,
        )
    return table


def _hosts(found: Prediction) -> Any:
    """The chosen option host by host: the last rank of each, which are equal."""
    option = found.option(found.chosen)
    known = {host.name: host.bound_by for host in found.cluster.hosts if host.bound_by}
    table = _table(
        f"{option.name}: host",
        "sequences",
        "compute",
        "exposed",
        "wait",
        "update",
        "memory",
        *(["bound by"] if known else []),
    )

    for rank in {rank.host: rank for rank in option.ranks}.values():
        cost = rank.cost
        parts = (cost.compute_s, cost.exposed_sync_s, cost.wait_s, cost.optimizer_s)
        bound = [known.get(rank.host, "?")] if known else []
        table.add_row(rank.host, str(rank.share), *map(_short, parts), size(rank.memory_bytes or 0), *bound)
    return table


def _prices(found: Prediction) -> Any:
    """What each way costs in bytes, memory and loss, and why it is not recommended."""
    table = _table("way", "sends", "memory", "loss", "why not")
    for option in _in_order(found):
        penalty = option.loss_penalty
        table.add_row(
            option.name,
            size(option.bytes_per_rank) if option.bytes_per_rank else "–",
            size(max(rank.memory_bytes or 0 for rank in option.ranks)),
            "same" if penalty == 0 else "?" if penalty is None else f"+{penalty:.1%}",
            option.rejected_because or "← recommended",
            style="bold" if option.name == found.recommended else None,
        )
    return table


def _fabric_table(asked: Asked, found: Prediction) -> Any:
    """What the network takes beside what computing takes, over faster and slower links."""
    table = _table("link", "all-reduce", "16 bit", "÷ computing", "step", "tokens/s", "×")
    alone = next((option.tokens_per_s for option in found.options if len(option.hosts) == 1), None)
    for name, _, ddp, bf16 in fabrics(asked):
        sync_s, compute_s = ddp.ranks[0].sync_s, ddp.slowest.cost.compute_s or 0.0
        table.add_row(
            name,
            _short(sync_s),
            _short(bf16.ranks[0].sync_s),
            f"{sync_s / compute_s:.2g}" if compute_s else "–",
            _short(ddp.step_s),
            _rate(ddp.tokens_per_s),
            f"{ddp.tokens_per_s / alone:.2f}" if alone else "–",
        )
    return table
