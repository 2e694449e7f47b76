"""What is asked: which job, on which machines, and where do their figures come from?

a fleet's file ─┐
a few words ────┼──▶ Question ──predict──▶ Prediction
a run's records ┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from evener.core.errors import UsageError
from evener.core.fleet import Fleet, Host, Link, ModelRate, Rates
from evener.core.link import FABRICS, parse_link
from evener.core.prediction import Cluster, Job, Option, Prediction
from evener.core.resolve import shape_of
from evener.core.roster import Seat, SyncSpec, devices_of
from evener.core.rundir import Manifest
from evener.core.shape import PRESETS, GPTShape
from evener.core.spec import RunSpec, make_spec
from evener.core.step import StepRecord, noise_scale
from evener.core.units import plural
from evener.plan.advice import rate
from evener.plan.cluster import cluster_of, only, uniform, with_wire
from evener.plan.cost import price
from evener.plan.fit import as_it_was, fit
from evener.plan.options import in_best_ring
from evener.plan.search import predict, why_left_out


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A job, the machines, and where their figures come from."""

    job: Job
    cluster: Cluster
    source: str
    asks_fabrics: bool = False  # what other links would bring
    measured: Option | None = None  # a run as it was; None where it is asked what another would be
    changes: list[str] = []  # sentences: what a run's records changed in what was measured before


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """What a link would bring."""

    link: str
    payload_Bps: float
    ddp: Option
    bf16: Option  # with gradients in 16 bit


def of_fleet(fleet: Fleet, spec: RunSpec, vocab_size: int | None, link: str | None, source: str) -> Question:
    """What was measured, in the fleet's file; `vocab_size` of the corpus, the preset's own if None."""
    job = Job(spec=spec, shape=shape_of(spec, vocab_size))
    known = parse_link(link) if link is not None else None
    cluster = cluster_of(fleet, job, known.wire if known else None)
    return Question(job=job, cluster=assuming(cluster, [known.assumed] if known else []), source=source)


def of_training(fleet: Fleet, spec: RunSpec, shape: GPTShape, seats: Sequence[Seat], *,
                leaves_out: bool = True) -> Prediction:  # fmt: skip
    """What `train` is about to do on these seats, by rank; NotMeasuredError where too little was measured.

    With --shares auto the hosts that make it no faster are left out, unless all are to take part.
    """
    job = Job(spec=spec, shape=shape)
    found = predict(job, cluster_of(fleet, job, seats=seats), keep_order=True)
    left_out = why_left_out(found) if leaves_out and spec.machine.shares == "auto" else {}
    if not left_out:
        return found
    cluster = only(found.cluster, [name for name in found.cluster.names if name not in left_out])
    return msgspec.structs.replace(predict(job, cluster, keep_order=True), left_out=left_out)


def ring_order(fleet: Fleet, spec: RunSpec, shape: GPTShape) -> list[str]:
    """The hosts in the order in which `train` counts their ranks: the file's, or that of the fastest ring."""
    job = Job(spec=spec, shape=shape)
    try:
        return in_best_ring(job, cluster_of(fleet, job)).names
    except UsageError:  # too little was measured; what stands in the run's own way is told by those who start it
        return list(fleet.hosts)


def of_words(spec: RunSpec, vocab_size: int | None, nodes: int | None, rates: str | None, link: str | None,
             per_node: int, node_link: str | None) -> Question:  # fmt: skip
    """Machines that nobody has yet. Several ranks on a node are GPUs."""
    if rates is None:
        raise UsageError(
            "how fast is one rank alone? --compute-tokens-per-s N",
            hint="evener probe host measures it on a machine that you have",
        )
    each = parse_rates(rates)
    if nodes is None:
        nodes = len(each)
    if len(each) not in (1, nodes):
        raise UsageError(
            f"--compute-tokens-per-s {rates}: {plural(len(each), 'rate')} for {plural(nodes, 'node')}",
            hint="one rate for all of them, or one for each",
        )
    links = []
    if nodes > 1:
        if link is None:
            raise UsageError("which link is between the nodes? --link 1GbE", hint="100Mbit, 2.5GbE, 400G, wifi, wan, …")
        links.append(parse_link(link))
    if per_node > 1:
        links.append(parse_link(node_link or "nvlink"))
    num_gpus = per_node if per_node > 1 or spec.machine.device == "cuda" else 0
    cluster = uniform(
        {f"node{i + 1}": each[i % len(each)] for i in range(nodes)},
        links[0].wire if links else parse_link("1GbE").wire,
        devices_of("node1", Host(address="node1", ranks=per_node), num_gpus, spec.machine),
        local=links[-1].wire if per_node > 1 else None,
    )
    assumed = [one.assumed for one in links]
    if per_node > 1:
        assumed.append("several ranks on a node are GPUs, with NCCL and bf16")
    job = Job(spec=spec, shape=shape_of(spec, vocab_size))
    return Question(job=job, cluster=assuming(cluster, assumed), source="what you said", asks_fabrics=nodes > 1)


def of_run(run: str, manifest: Manifest, records: Sequence[Sequence[StepRecord]],
           prediction: Prediction | None) -> Question:  # fmt: skip
    """A run's own records, by rank; `prediction`: what was predicted of it."""
    if manifest.shape is None:
        raise UsageError(
            f"{run}: a model of the user's own: its parts are not known", hint="evener report shows its steps"
        )
    if not all(records):
        raise UsageError(f"{run}: not every rank has recorded a step", hint=f"evener report {run}")
    spec = manifest.spec
    dtypes = {member.host: member.dtype for member in manifest.roster.members}
    if prediction is None and len(set(dtypes.values())) == 1:  # in what else they could compute nobody knows
        dtype = manifest.roster.members[0].dtype
        spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, dtype=dtype))
    job = Job(spec=spec, shape=manifest.shape, noise_tokens=noise_scale(records[0]))
    cluster = fit(job, manifest, records, prediction.cluster if prediction else None)
    changes = [
        f"{name}: {rate(cluster.hosts[name].tokens_per_s[dtype])} a rank, predicted with "
        f"{rate(prediction.cluster.hosts[name].tokens_per_s[dtype])}"
        for name, dtype in dtypes.items()
        if prediction and dtype in getattr(prediction.cluster.hosts.get(name), "tokens_per_s", {})
    ]
    return Question(job=job, cluster=cluster, source=f"the records of {run}", changes=changes,
                    measured=as_it_was(job, manifest, records, cluster))  # fmt: skip


def answer(question: Question) -> Prediction:
    """What the planner says to it."""
    return predict(question.job, question.cluster, measured=question.measured)


def changed(question: Question, texts: Mapping[str, str], link: str | None) -> Question:
    """The same machines with flags changed, still written as text, or with another link between them."""
    job, cluster = question.job, question.cluster
    if texts:
        spec = make_spec(None, dict(texts), job.spec)
        vocab_size = job.shape.vocab_size if "model" not in texts else None
        noise_tokens = job.noise_tokens if spec.model == job.spec.model else None
        new = Job(spec=spec, shape=shape_of(spec, vocab_size), noise_tokens=noise_tokens)
        cluster = _for_dtype(_for_shape(cluster, job, new), job, new)
        job = new
    if link is not None:
        known = parse_link(link)
        cluster = assuming(with_wire(cluster, known.wire), [known.assumed])
    measured = None if texts or link is not None else question.measured
    return msgspec.structs.replace(question, job=job, cluster=cluster, measured=measured)


def fabrics(question: Question, chosen: Option) -> list[Fabric]:
    """What the chosen option would do over every link that has a name."""
    narrow = chosen.roster.agreeing_by(SyncSpec(kind="bf16"))
    found = []
    for name in FABRICS:
        wire = parse_link(name).wire
        cluster = with_wire(question.cluster, wire)
        ddp, bf16 = (price(question.job, cluster, roster) for roster in (chosen.roster, narrow))
        found.append(Fabric(link=name, payload_Bps=wire.bandwidth_Bps, ddp=ddp, bf16=bf16))
    return found


def figures(question: Question, fleet: Fleet, path: str,
            measured: str) -> tuple[dict[str, dict[str, Rates]], dict[str, dict[str, Link]]]:  # fmt: skip
    """A run's refitted figures as a fleet's file has them, (rates, links): of the preset's own shape, at a time.

    UsageError where the run had a host that the file does not name.
    """
    job, cluster = question.job, question.cluster
    strangers = [name for name in cluster.names if name not in fleet.hosts]
    if strangers:
        raise UsageError(f"{path}: the run had a host that it does not name: {', '.join(strangers)}")
    shape = PRESETS.get(job.model, job.shape)
    work, params = job.shape.flops_per_token() / shape.flops_per_token(), shape.num_params() / job.shape.num_params()
    rates, links = {}, {}
    for member in job.roster(cluster.seats).members:
        name, host = member.host, cluster.hosts[member.host]
        of_host = 1 if member.is_gpu else sum(seat.host == name for seat in cluster.seats)
        model = ModelRate(
            tokens_per_s=cluster.tokens_per_s(member) * of_host * work,
            pass_s=host.pass_s * params / of_host,
            update_s=host.update_s * params / of_host,
            dtype=member.dtype,
            cpus=host.cpus and host.cpus * of_host,
        )
        gpus = [device for device in fleet.rates.get(name, {}) if device.startswith("cuda")]
        devices = (gpus or ["cuda:0"]) if member.is_gpu else ["cpu"]
        rates[name] = {device: Rates(models={job.model: model}) for device in devices}
        known = fleet.links.get(name, {})
        links[name] = {
            target: msgspec.structs.replace(known[target], duplex_Bps=wire.bandwidth_Bps, measured=measured)
            for target, wire in cluster.wires[name].items()
            if target in known
        }
    return rates, links


def assuming(cluster: Cluster, assumed: Sequence[str]) -> Cluster:
    """The same cluster, with more that was assumed of it."""
    return msgspec.structs.replace(cluster, assumed=[*assumed, *cluster.assumed])


def _for_shape(cluster: Cluster, old: Job, new: Job) -> Cluster:
    """Rates of another shape, by FLOPs; the update, by parameters."""
    if new.shape == old.shape:
        return cluster
    slower = new.shape.flops_per_token() / old.shape.flops_per_token()
    params = new.shape.num_params() / old.shape.num_params()
    hosts = {
        name: msgspec.structs.replace(
            host,
            tokens_per_s={dtype: rate / slower for dtype, rate in host.tokens_per_s.items()},
            pass_s=host.pass_s * params,
            update_s=host.update_s * params,
        )
        for name, host in cluster.hosts.items()
    }
    assumed = f"the rates of {new.model} follow from the run's {old.model}, by FLOPs"
    return assuming(msgspec.structs.replace(cluster, hosts=hosts), [assumed])


def _for_dtype(cluster: Cluster, old: Job, new: Job) -> Cluster:
    """Rates in another arithmetic, where nobody knows them: the same."""
    hosts, assumed = dict(cluster.hosts), []
    members = [job.roster(cluster.seats).members for job in (old, new)]
    for before, after in zip(*members, strict=True):
        host = hosts[after.host]
        if after.dtype not in host.tokens_per_s:
            rates = host.tokens_per_s | {after.dtype: host.tokens_per_s[before.dtype]}
            hosts[after.host] = msgspec.structs.replace(host, tokens_per_s=rates)
            assumed.append(f"the run's rates are of {before.dtype}; {after.dtype} is taken to be as fast")
    return assuming(msgspec.structs.replace(cluster, hosts=hosts), list(dict.fromkeys(assumed)))


def parse_rates(text: str) -> list[float]:
    """Tokens/s, one for all nodes or one for each.

    >>> parse_rates("60,30")
    [60.0, 30.0]
    """
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < one < 1e15 for one in found):
        raise UsageError(
            f"--compute-tokens-per-s {text}: expected a rate above 0, or one for each node", hint="for example 60,30"
        )
    return found
