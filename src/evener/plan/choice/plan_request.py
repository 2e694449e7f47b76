"""Plan requests: which job is to be predicted, on which machines, and where their rates come from.

fleet file ───────┐
machine flags ────┼──▶ PlanRequest ──predict──▶ Prediction
records of a run ─┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from evener.core.base.errors import UsageError, did_you_mean
from evener.core.base.shell import quote_word
from evener.core.base.units import pluralize
from evener.core.cluster.fleet_file import Fleet, HostConfig, HostLink, ModelRate, Rates, fleet_flag
from evener.core.cluster.hardware import parse_hardware
from evener.core.cluster.link import parse_link
from evener.core.model.corpus import Corpus
from evener.core.model.fine_tuning import FineTuning, ModelShape, read_lengths
from evener.core.model.gradients import ProgramModel
from evener.core.model.pretrained import TrainedModel
from evener.core.model.shape import PRESETS, GPTShape, shape_of_size
from evener.core.run.prediction import Cluster, Job, PlanOption, Prediction
from evener.core.run.resolve import check_sync_for_shape, make_job, model_shape, trained_model, with_model_defaults
from evener.core.run.roster import RankSlot, parse_shares, requested_sync, weighted_shares
from evener.core.run.run_spec import RunSpec, make_spec
from evener.core.run.rundir import Manifest
from evener.core.run.step_cost import StepRecord, noise_scale
from evener.plan.choice.advice import format_throughput
from evener.plan.choice.calibration import calibrate_cluster, cluster_of_run, has_ranks_of, measured_option
from evener.plan.choice.cluster import build_cluster, subcluster, with_uniform_link
from evener.plan.choice.options import MAX_RANKS, with_best_ring_order
from evener.plan.choice.program_request import PROGRAM_FLAGS, program_job
from evener.plan.choice.search import predict, reasons_left_out
from evener.plan.choice.training_cost import RentalOffer

# of a run that was fine-tuned, what its records do not tell about another one
FIXED_FINE_TUNING_FLAGS = {
    "model",
    "lora",
    "block_size",
    "packing",
    "data",
    "num_layers",
    "num_heads",
    "width",
    "dora",
    "quantize",
}


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A job, the machines, and where their rates come from."""

    job: Job
    cluster: Cluster
    source: str
    price_per_kwh: float | None = None  # of electricity
    wants_fabrics: bool = False  # predict over other links, too
    measured: PlanOption | None = None  # the run as it was measured; None for a changed run
    budget: str = ""  # a sentence: what was chosen for a budget of time
    changes: list[str] = []  # sentences: rates that calibration changed


def request_from_fleet(fleet: Fleet, spec: RunSpec, corpus: Corpus | None, link: str | None, source: str,
             params: str | None = None) -> PlanRequest:  # fmt: skip
    """Return a request with the rates of the fleet file; without a corpus the vocabulary is the preset's own."""
    job, assumed = _requested_job(spec, corpus, params)
    parsed = parse_link(link) if link is not None else None
    cluster = build_cluster(fleet, job, parsed.wire if parsed else None)
    if parsed is not None:
        assumed.append(parsed.assumption)
    return PlanRequest(
        job=job, cluster=with_assumptions(cluster, assumed), source=source, price_per_kwh=fleet.price_per_kwh
    )


def predict_launch(fleet: Fleet, job: Job, slots: Sequence[RankSlot] | None = None, *, may_leave_out: bool = True,
                   resumed: Job | None = None) -> Prediction:  # fmt: skip
    """Predict what `train` is about to do on these rank slots, by default on those of the fleet file.

    Raise NotMeasuredError if too little was measured.
    With --shares auto, hosts that make the run no faster are left out if `may_leave_out`. `resumed` is the job with the
    strategy that a run with --sync auto used last: it is predicted, on the hosts that `job` would take.
    """
    prediction = predict(job, build_cluster(fleet, job, slots=slots), keep_order=True, may_leave_out=may_leave_out)
    left_out = reasons_left_out(prediction) if may_leave_out and job.spec.machine.shares == "auto" else {}
    if not left_out and resumed is None:
        return prediction
    cluster = subcluster(prediction.cluster, [name for name in prediction.cluster.host_names if name not in left_out])
    return msgspec.structs.replace(predict(resumed or job, cluster, keep_order=True), left_out=left_out)


def host_ring_order(fleet: Fleet, job: Job) -> list[str]:
    """Return the hosts in the order of their ranks in `train`: the file's, or that of the fastest ring."""
    try:
        return with_best_ring_order(job, build_cluster(fleet, job)).host_names
    except UsageError:  # too little was measured; other errors of the run are reported when it starts
        return list(fleet.hosts)


class MachineFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Hypothetical machines, as described by flags."""

    nodes: int | None = None  # default: as many as rates, GPUs or memory sizes are listed
    rates: str | None = None  # tokens/s of one rank alone: one for all nodes, or one for each
    gpus: str | None = None  # hardware by name, "h100" or "4090,3090": one for all nodes, or one for each
    per_node: int = 1  # ranks on each node; several ranks are GPUs
    link: str | None = None  # between nodes
    node_link: str | None = None  # between the ranks of a node
    memory: str | None = None  # of each GPU, or of a host without any: one for all nodes, or one for each
    watts: float | None = None  # of a node
    price_per_h: float | None = None  # of a node


def request_from_flags(
    flags: MachineFlags, spec: RunSpec, corpus: Corpus | None, params: str | None = None
) -> PlanRequest:
    """Return a request for hypothetical machines, as if a fleet file declared the same values."""
    if flags.rates is None and flags.gpus is None:
        raise UsageError(
            "how fast is one rank alone? --compute-tokens-per-s N, or --gpu NAME",
            hint="evener probe host measures it on a machine that you have",
        )
    job, assumed = _requested_job(spec, corpus, params)
    fleet = fleet_from_flags(flags, job)
    if flags.per_node > 1 and flags.gpus is None and spec.machine.device == "auto":
        assumed.append("several ranks on a node are GPUs, with NCCL and bf16")
    return PlanRequest(job=job, cluster=with_assumptions(build_cluster(fleet, job), assumed), source="the command line",
                    wants_fabrics=len(fleet.hosts) > 1)  # fmt: skip


def request_on_hosts(request: PlanRequest, names: str | None) -> PlanRequest:
    """Return the request restricted to these hosts ("node1,node3"), or unchanged if None."""
    if names is None:
        return request
    host_names = request.cluster.host_names
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in host_names:
            raise UsageError(f"--hosts {names}: there is no host {name}", hint=did_you_mean(name, host_names[:20]))
    if not wanted:
        raise UsageError(f"--hosts {names!r}: it names no host", hint=f"--hosts {host_names[0]}")
    return msgspec.structs.replace(request, cluster=subcluster(request.cluster, wanted))


def request_for_rental(request: PlanRequest, offer: RentalOffer) -> PlanRequest:
    """Return a request for the same job on a rented machine."""
    words = MachineFlags(gpus=offer.gpu, per_node=offer.num_gpus, price_per_h=offer.price_per_h)
    machine = msgspec.structs.replace(request.job.spec.machine, shares="auto", device="auto", ranks=1, threads=None)
    job = msgspec.structs.replace(request.job, spec=msgspec.structs.replace(request.job.spec, machine=machine))
    return PlanRequest(job=job, cluster=build_cluster(fleet_from_flags(words, job), job), source=f"--rent {offer}")


def _check_ranks(num_ranks: int, job: Job) -> None:
    """Raise UsageError for more ranks than MAX_RANKS or, without explicit shares, than sequences in a batch."""
    if num_ranks > MAX_RANKS:
        raise UsageError(f"{num_ranks} ranks, more than {MAX_RANKS}", hint="--scale 1,8,…,65536 goes as far")
    if num_ranks > job.spec.train.batch and not job.spec.machine.has_explicit_shares:
        raise UsageError(
            f"{num_ranks} ranks, more than the {job.spec.train.batch} sequences of one batch",
            hint=f"--batch {num_ranks} or more gives every rank something to do",
        )


def _requested_job(spec: RunSpec, corpus: Corpus | None, params: str | None) -> tuple[Job, list[str]]:
    """Return the job and the assumptions about it. `params`, a number of parameters, replaces the model preset."""
    model, vocab_size = spec.model, corpus.vocab_size if corpus else None
    assumed: list[str] = []
    if model.pretrained is not None:
        if corpus is None:
            raise UsageError(f"--model {model.model}: how long a step takes depends on the lengths of what it reads",
                             hint=f"evener plan FILE --model {quote_word(model.model)}")  # fmt: skip
        pretrained = trained_model(spec, corpus)
        return _checked_job(with_model_defaults(spec, pretrained), pretrained, corpus), assumed
    if params is None:
        shape = model_shape(spec, vocab_size)
    else:
        base = msgspec.structs.replace(PRESETS["gpt2"], vocab_size=vocab_size or PRESETS["gpt2"].vocab_size,
                                       block_size=model.block_size or PRESETS["gpt2"].block_size)  # fmt: skip
        shape = shape_of_size(params, base)
        spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(model, model=params))
        assumed = [f"{params} parameters: {shape.num_layers} layers of {shape.width}, otherwise like GPT-2"]
    job = _checked_job(spec, shape, corpus)
    if shape.has_sparse_embeddings and not job.distinct_tokens:
        assumed.append("with +sparse each token of a step sends a row, as there is no corpus to count distinct tokens")
    return job, assumed


def _checked_job(spec: RunSpec, shape: TrainedModel, corpus: Corpus | None) -> Job:
    """Return the job. Raise UsageError if `train` would refuse it."""
    check_sync_for_shape(requested_sync(spec), shape)
    return make_job(spec, shape, corpus)


def fleet_from_flags(flags: MachineFlags, job: Job) -> Fleet:
    """Return the fleet that the flags describe. Raise UsageError if they contradict each other or say too little."""
    node_rates = parse_rates(flags.rates) if flags.rates is not None else [None]
    gpus = flags.gpus.split(",") if flags.gpus is not None else [None]
    memory = flags.memory.split(",") if flags.memory is not None else [None]
    lists = {"--compute-tokens-per-s": (node_rates, "rate"), "--gpu": (gpus, "name"), "--memory": (memory, "size")}
    nodes = flags.nodes if flags.nodes is not None else max(len(values) for values, _ in lists.values())
    for flag, (values, noun) in lists.items():
        if len(values) not in (1, nodes):
            raise UsageError(f"{flag}: {pluralize(len(values), noun)} for {pluralize(nodes, 'node')}",
                             hint="one for all of them, or one for each")  # fmt: skip
    if nodes > 1 and flags.link is None:
        raise UsageError("which link is between the nodes? --link 1GbE", hint="100Mbit, 2.5GbE, 400G, wifi, wan, …")
    _check_ranks(nodes * flags.per_node, job)
    device = job.spec.machine.device
    is_gpu = device == "cuda" or (flags.per_node > 1 and device == "auto")
    rates_by_value: dict[tuple[float, str], dict[str, Rates]] = {}
    hosts, rates = {}, {}
    for i in range(nodes):
        rate, gpu = node_rates[i % len(node_rates)], gpus[i % len(gpus)]
        kind = parse_hardware(gpu).kind if gpu is not None else "cuda" if is_gpu else "cpu"
        has_gpus = kind != "cpu"
        name = f"node{i + 1}"
        hosts[name] = HostConfig(
            address=name,
            gpu=gpu,
            gpus=flags.per_node if has_gpus and gpu is not None else None,
            ranks=None if has_gpus else flags.per_node,
            memory=memory[i % len(memory)],
            node_link=flags.node_link,
            watts=flags.watts,
            price_per_h=flags.price_per_h,
        )
        if rate is not None:
            model_rate = ModelRate(tokens_per_s=rate)
            devices = [f"{kind}:{k}" for k in range(flags.per_node)] if has_gpus else ["cpu"]
            device_rates = Rates(models={job.rate_name: model_rate})
            rates[name] = rates_by_value.setdefault((rate, kind), dict.fromkeys(devices, device_rates))
    if flags.link is not None:
        parse_link(flags.link)  # also where one node has no use for it
    return Fleet(hosts=hosts, link=flags.link, rates=rates)


def request_from_run(run: str, manifest: Manifest, records: Sequence[Sequence[StepRecord]],
           prediction: Prediction | None, fleet: Fleet | None = None) -> PlanRequest:  # fmt: skip
    """Return a request for a finished run, with the cluster calibrated to its `records` (by rank).

    `prediction` is what was predicted for the run, `fleet` what probing measured of the hosts of a user's program.
    """
    if manifest.shape is None and manifest.program is None:
        raise UsageError(
            f"{run} trained a custom model, whose layers are not known",
            hint=f"evener report {quote_word(run)} shows its steps",
        )
    if not all(records):
        raise UsageError(f"{run}: not every rank has recorded a step", hint=f"evener report {quote_word(run)}")
    if manifest.shape is None:
        job, manifest = program_job(run, manifest, records)
        prior = prediction.cluster if prediction else None
        if prior is None or not has_ranks_of(prior, manifest.roster.renumber_ranks()):
            prior = cluster_of_run(manifest, fleet)
        cluster = calibrate_cluster(job, manifest, records, prior)
        return PlanRequest(job=job, cluster=cluster, source=f"the records of {run}",
                           measured=measured_option(job, manifest, records, cluster))  # fmt: skip
    shape = _shape_of_run(run, manifest, prediction)
    spec = manifest.spec
    dtypes = {member.host: member.dtype for member in manifest.roster.members}
    if prediction is None and len(set(dtypes.values())) == 1:  # the rates of other dtypes are not known
        dtype = manifest.roster.members[0].dtype
        spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, dtype=dtype))
    job = Job(spec=spec, shape=shape, noise_tokens=noise_scale(records[0]),
              distinct_tokens=prediction.job.distinct_tokens if prediction else [])  # fmt: skip
    cluster = calibrate_cluster(job, manifest, records, prediction.cluster if prediction else None)
    changes = [
        f"{name}: {format_throughput(cluster.hosts[name].tokens_per_s[dtype])} a rank, predicted with "
        f"{format_throughput(prediction.cluster.hosts[name].tokens_per_s[dtype])}"
        for name, dtype in dtypes.items()
        if prediction and dtype in getattr(prediction.cluster.hosts.get(name), "tokens_per_s", {})
    ]
    return PlanRequest(job=job, cluster=cluster, source=f"the records of {run}", changes=changes,
                    measured=measured_option(job, manifest, records, cluster))  # fmt: skip


def _shape_of_run(run: str, manifest: Manifest, prediction: Prediction | None) -> ModelShape:
    """Return what the planner knows of the model that a run trained.

    Raise UsageError for a fine-tuning whose layers, or the lengths of whose sequences, are not known.
    """
    shape = manifest.shape
    if isinstance(shape, GPTShape):
        return shape
    if prediction is not None and isinstance(prediction.job.shape, FineTuning):
        return prediction.job.shape
    assert shape is not None
    report, corpus = f"evener report {quote_word(run)} shows its steps", manifest.corpus
    if shape.layers is None:
        raise UsageError(f"{run}: evener does not know the layers of a {shape.architecture}", hint=report)
    if corpus is None or not corpus.flags_path("train").is_file():
        where = "" if corpus is None else f" {corpus.path}"
        raise UsageError(f"{run}: its samples{where} are not here, and with them how long they are", hint=report)
    lengths = read_lengths(corpus, shape.block_size, packing=manifest.spec.train.packing)
    return FineTuning(model=shape, lengths=lengths)


def answer_request(request: PlanRequest) -> Prediction:
    """Predict all options of the request."""
    is_program = isinstance(request.job.shape, ProgramModel)  # whose ranks are in the order of the fleet file
    return predict(request.job, request.cluster, measured=request.measured, keep_order=is_program)


def change_request(request: PlanRequest, flags: Mapping[str, str], link: str | None) -> PlanRequest:
    """Return the request with changed flags (as text), or with another link between the machines."""
    job, cluster = request.job, request.cluster
    if flags:
        spec = make_spec(None, dict(flags), job.spec)
        new_job = _changed_fine_tuning(job, spec, flags) or _changed_program(job, spec, flags)
        if new_job is None:
            vocab_size = job.gpt_shape.vocab_size if "model" not in flags else None
            new_job = _checked_job(spec, model_shape(spec, vocab_size), None)
        if spec.model == job.spec.model:
            new_job = msgspec.structs.replace(new_job, noise_tokens=job.noise_tokens)
        if (spec.data, new_job.shape.block_size) == (job.spec.data, job.shape.block_size):
            new_job = msgspec.structs.replace(new_job, distinct_tokens=job.distinct_tokens)
        cluster = _rescale_to_dtype(_rescale_to_shape(cluster, job, new_job), job, new_job)
        job = new_job
    if link is not None:
        parsed = parse_link(link)
        cluster = with_assumptions(with_uniform_link(cluster, parsed.wire), [parsed.assumption])
    measured = None if flags or link is not None else request.measured
    return msgspec.structs.replace(request, job=job, cluster=cluster, measured=measured)


def _changed_fine_tuning(job: Job, spec: RunSpec, flags: Mapping[str, str]) -> Job | None:
    """Return the job of a fine-tuning with these flags; None if it is none."""
    if not isinstance(job.shape, FineTuning):
        return None
    for name in flags:
        if name in FIXED_FINE_TUNING_FLAGS:
            raise UsageError(f"--{name.replace('_', '-')}: the run shows how fast its own model is, on its own data",
                             hint="without --from it is planned by what was probed")  # fmt: skip
    check_sync_for_shape(requested_sync(spec), job.shape)
    return msgspec.structs.replace(job, spec=spec)


def _changed_program(job: Job, spec: RunSpec, flags: Mapping[str, str]) -> Job | None:
    """Return the job of a user's program with these flags; None if it trains a model of evener's own."""
    if not isinstance(job.shape, ProgramModel):
        return None
    for name in flags:
        if name not in PROGRAM_FLAGS:
            raise UsageError(
                f"--{name.replace('_', '-')}: {job.model} decides that itself", hint="--sync, --shares or --link"
            )
    check_sync_for_shape(requested_sync(spec), job.shape)
    weights, batch = parse_shares(spec.machine.shares), spec.train.batch
    if weights is not None and not all(weighted_shares(batch, weights)):
        raise UsageError(f"--shares {spec.machine.shares}: a rank would have none of {batch} {job.shape.unit}",
                         hint="a larger number for that rank")  # fmt: skip
    return msgspec.structs.replace(job, spec=spec)


def calibrated_rates(request: PlanRequest, fleet: Fleet, path: str,
            measured_at: str) -> tuple[dict[str, dict[str, Rates]], dict[str, dict[str, HostLink]]]:  # fmt: skip
    """Return a run's calibrated (rates, links) for the fleet file, converted to the shape of the job's preset.

    `measured_at` is the time that the file will show. Raise UsageError if the file lacks a host of the run.
    """
    job, cluster = request.job, request.cluster
    if isinstance(job.shape, ProgramModel):
        raise UsageError(f"{path} has no place for how fast {job.model} is: its runs keep that",
                         hint=f"without {fleet_flag(path)}")  # fmt: skip
    missing = [name for name in cluster.host_names if name not in fleet.hosts]
    if missing:
        raise UsageError(f"{path} does not name all hosts of the run: {', '.join(missing)} missing")
    is_pretrained = isinstance(job.shape, FineTuning)
    shape = job.shape if is_pretrained else PRESETS.get(job.model, job.shape)
    work, params = job.shape.flops_per_token() / shape.flops_per_token(), shape.num_params() / job.shape.num_params()
    rates, links = {}, {}
    for member in job.initial_roster(cluster.slots).members:
        name, host = member.host, cluster.hosts[member.host]
        num_ranks = 1 if member.is_gpu else sum(slot.host == name for slot in cluster.slots)
        model = ModelRate(
            tokens_per_s=cluster.tokens_per_s(member) * num_ranks * work,
            flops_per_token=shape.flops_per_token() if is_pretrained else None,
            pass_s=host.pass_s * params / num_ranks,
            update_s=host.update_s * params / num_ranks,
            dtype=member.dtype,
            cpus=host.cpus and host.cpus * num_ranks,
        )
        gpus = [device for device in fleet.rates.get(name, {}) if device.startswith("cuda")]
        devices = (gpus or ["cuda:0"]) if member.is_gpu else ["cpu"]
        rates[name] = {device: Rates(models={job.rate_name: model}) for device in devices}
        known_links = fleet.links.get(name, {})
        links[name] = {
            target: msgspec.structs.replace(known_links[target], duplex_Bps=wire.bandwidth_Bps, measured=measured_at)
            for target in known_links
            if target in cluster.host_names
            for wire in [cluster.link_between(name, target)]
        }
    return rates, links


def with_assumptions(cluster: Cluster, assumed: Sequence[str]) -> Cluster:
    """Return the cluster with more assumptions."""
    return msgspec.structs.replace(cluster, assumed=[*assumed, *cluster.assumed])


def _rescale_to_shape(cluster: Cluster, old: Job, new: Job) -> Cluster:
    """Rescale the cluster's rates to the new job's shape: compute by FLOPs, the update by parameters."""
    if new.shape == old.shape:  # as with any flags of a fine-tuning
        return cluster
    slower = new.gpt_shape.flops_per_token() / old.gpt_shape.flops_per_token()
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
    return with_assumptions(msgspec.structs.replace(cluster, hosts=hosts), [assumed])


def _rescale_to_dtype(cluster: Cluster, old: Job, new: Job) -> Cluster:
    """Where a host's tokens/s in the new job's dtype was not measured, assume its tokens/s in the old job's dtype."""
    hosts, assumed = dict(cluster.hosts), []
    members = [job.initial_roster(cluster.slots).members for job in (old, new)]
    for before, after in zip(*members, strict=True):
        host = hosts[after.host]
        if after.dtype not in host.tokens_per_s:
            rates = host.tokens_per_s | {after.dtype: host.tokens_per_s[before.dtype]}
            hosts[after.host] = msgspec.structs.replace(host, tokens_per_s=rates)
            assumed.append(f"the run's rates are of {before.dtype}; {after.dtype} is taken to be as fast")
    return with_assumptions(msgspec.structs.replace(cluster, hosts=hosts), list(dict.fromkeys(assumed)))


def parse_rates(text: str) -> list[float]:
    """Parse tokens/s, one value for all nodes or one for each.

    >>> parse_rates("60,30")
    [60.0, 30.0]
    """
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(1e-6 <= rate < 1e15 for rate in rates):
        raise UsageError(
            f"--compute-tokens-per-s {text}: expected a rate above 0, or one for each node", hint="for example 60,30"
        )
    return rates
