"""Build the exact command and environment of each host of a run. Pure: the resulting plan can be printed.

torchrun runs on every host with a static rendezvous and explicit node ranks, so that the placement of ranks is known
beforehand: host after host in the fleet's order. A run of one rank needs no torchrun, and starts in half the time. In
an elastic training on several hosts each host's agent (`evener.node.agent`) starts the ranks instead.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

from evener.core.base.errors import UsageError
from evener.core.cluster.finding import Finding
from evener.core.cluster.fleet_file import HostConfig
from evener.core.run.membership_epoch import (
    HOST_TIMEOUT_S,
    RUN_KEY_FILE,
    AgentSpec,
    HostEntry,
    make_run_key,
    torchrun_program,
)
from evener.core.run.resolve import ResolvedRun
from evener.core.run.roster import (
    Member,
    RankSlot,
    Roster,
    choose_dtypes,
    equal_shares,
    initial_roster,
    rank_devices,
    weighted_shares,
)
from evener.core.run.run_plan import JOINED_RUN_FILE, ROSTER_FILE, HostPlan, Plan
from evener.core.run.run_spec import MachineSpec, RunSpec, to_flags
from evener.core.script.variables import FIRST_RANK_VARIABLE, OPTIONS_VARIABLE, PROGRAM_VARIABLE
from evener.node.remote.environment import is_secret_variable

TRAIN_GRACE_S = 600.0  # for a step, which may take minutes, and a checkpoint; stop --now does not wait
ELASTIC_HOST_TIMEOUT_S = 3.0  # short: a host that was only slow to answer rejoins, so a false alarm is cheap
SCRIPT_GRACE_S = 0.0  # a user's script gets SIGTERM through torchrun, and 5 s
# Variables that users set for torchrun and expect to reach the ranks. Interfaces and folders differ by host.
FORWARDED_ENV_PATTERN = re.compile(
    r"^(NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|KMP|CUBLAS|HF|ACCELERATE|TRANSFORMERS|TOKENIZERS|WANDB|CUDA_LAUNCH)_"
)
# Of evener's own programs: nothing is imported from the folder in which they run, which may be anybody's.
OWN_PROGRAM_ENV = {"PYTHONSAFEPATH": "1"}
NOT_FORWARDED_ENV = {
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "TORCH_HOME",
    "TRANSFORMERS_CACHE",
    "TORCH_COMPILER_COLLECTIVES",
}  # the last one makes ranks unpickle data of their peers


class ScriptProject(msgspec.Struct, frozen=True):
    """A user's project folder that is sent to the hosts: its current content, and its fixed name there."""

    folder: str  # on this machine
    tree: str  # digest
    name: str


class PreparedHost(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a host that determine its command."""

    name: str
    host: HostConfig
    address: str  # of the interface that the other hosts reach
    interface: str
    python: str  # the interpreter of the ranks
    workdir: str  # absolute
    run_dir: str  # the run's folder on the host, absolute
    cwd: str | None = None  # of its processes; None: the run's folder
    is_local_run: bool = False  # this machine alone: the folder is the run directory, and nothing is sent
    cores: int
    shares_cores_with: list[str] = []  # hosts on the same cores of one machine
    gpus: list[str]  # names
    gpus_have_bf16: bool  # all GPUs, in hardware
    has_bf16: bool  # the CPU, in hardware
    is_linux: bool = True

    def rank_slots(self, machine: MachineSpec) -> list[RankSlot]:
        """Return the rank slots (device, numeric support), by rank."""
        return [self._rank_slot(device) for device in rank_devices(self.name, self.host, len(self.gpus), machine)]

    def _rank_slot(self, device: str) -> RankSlot:
        if device == "cpu":
            return RankSlot(host=self.name, device=device, has_bf16=self.has_bf16)
        name = self.gpus[int(device.removeprefix("cuda:"))]
        return RankSlot(host=self.name, device=device, name=name, has_bf16=self.gpus_have_bf16)


class PreparedFleet(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts that can train together."""

    id: str
    hosts: list[PreparedHost]
    port: int
    findings: list[Finding]  # warnings, which do not prevent the launch
    fleet_file: str | None = None  # that lists the hosts; None: this machine alone

    @property
    def is_local_run(self) -> bool:
        """Return whether the run is on this machine alone, with the run directory as its folder."""
        return all(place.is_local_run for place in self.hosts)

    @property
    def rank_counts(self) -> list[tuple[str, int]]:
        """The hosts, and how many ranks of a user's program each has."""
        return [(place.name, len(place.rank_slots(MachineSpec()))) for place in self.hosts]

    def new_key(self) -> str:
        """Return a key for a run, or "" if it has a single host, which authenticates itself to no other."""
        return make_run_key() if len(self.hosts) > 1 else ""

    def rank_slots(self, machine: MachineSpec) -> list[RankSlot]:
        """Return the rank slots (device, numeric support), by rank."""
        return [slot for place in self.hosts for slot in place.rank_slots(machine)]

    def initial_roster(self, resolved: ResolvedRun) -> Roster:
        """Return the initial roster, for hosts of unknown speed. UsageError if they cannot train together."""
        return initial_roster(resolved.spec, self.rank_slots(resolved.spec.machine), resolved.shape.block_size)


def train_plan(
    prepared: PreparedFleet,
    spec: RunSpec,
    roster: Roster,
    data: Mapping[str, str],
    init_from: Mapping[str, str],
    models: Mapping[str, str] = MappingProxyType({}),
    *,
    resume: bool,
    key: str,
) -> Plan:
    """Plan evener's own worker on every host of the roster.

    `data` and `init_from` are the paths of the corpus and weights on each host, `models` are `--model` on the hosts to
    which a pretrained model is sent; the hosts authenticate each other with
    `key`. UsageError if the requested membership is not possible.
    """
    places, port = prepared.hosts, prepared.port
    slots = [place.rank_slots(spec.machine) for place in places]
    counts = [len(of_host) for of_host in slots]
    membership = choose_membership(spec, roster, are_linux=all(place.is_linux for place in places))
    hosts = []
    for i, place in enumerate(places):
        program, env = _worker_command(
            place, slots[i], spec, data[place.name], init_from.get(place.name), models.get(place.name), resume=resume
        )
        host = _host_plan(prepared, counts, i, program, env)
        if membership != "fixed":
            parts = _host_entries(places, counts)
            is_elastic = membership == "live"
            agent = AgentSpec(run=prepared.id, host=place.name, hosts=parts, first=[*parts], port=port,
                              program=program, is_elastic=is_elastic,
                              host_timeout_s=ELASTIC_HOST_TIMEOUT_S if is_elastic else HOST_TIMEOUT_S)  # fmt: skip
            host = _with_agent(agent, host)
        hosts.append(without_torchrun(host, program) if place.is_local_run and counts == [1] else host)
    return Plan(id=prepared.id, kind="train", address=places[0].address, port=port, key=key, roster=roster,
                grace_s=TRAIN_GRACE_S, spec=spec, fleet_file=prepared.fleet_file, hosts=hosts)  # fmt: skip


def plan_with_added_host(plan: Plan, newcomer: PreparedHost, data: str, version: int, model: str | None = None) -> Plan:
    """Return the plan of a running run with one host added. Its ranks are numbered after the present ones, and each has
    their mean share of the batch. UsageError if its ranks could not communicate with the others.
    """
    spec, roster, slots = plan.spec, plan.roster, newcomer.rank_slots(plan.spec.machine if plan.spec else MachineSpec())
    assert spec is not None
    assert roster is not None
    agents = [host.agent for host in plan.hosts if host.agent is not None]
    if agents[0].is_elastic and not newcomer.is_linux:
        raise UsageError(f"{newcomer.name} does not run Linux: its ranks cannot survive the loss of a host",
                         hint="--membership restart, from the run's next start on")  # fmt: skip
    if any(slot.device != "cpu" for slot in slots) and (agents[0].is_elastic or roster.backend != "nccl"):
        raise UsageError(f"{newcomer.name} would train on its GPU, and the run, on CPUs, cannot admit such a rank",
                         hint=f'devices = "cpu" under [hosts.{newcomer.name}] in the fleet file')  # fmt: skip
    if any(slot.device == "cpu" for slot in slots) and roster.backend == "nccl":
        raise UsageError(f"{newcomer.name} has no GPU, and the run uses NCCL, which needs one on every host")
    program, env = _worker_command(newcomer, slots, spec, data, None, model, resume=False)
    alone = PreparedFleet(id=plan.id, hosts=[newcomer], port=plan.port, findings=[])
    host = msgspec.structs.replace(_host_plan(alone, [len(slots)], 0, program, env),
                                   node_rank=len(plan.hosts), first_rank=plan.world_size)  # fmt: skip
    dtypes, present = choose_dtypes(slots, spec.model.dtype), {member.dtype for member in roster.members}
    if "fp16" in {*dtypes, *present} and {*dtypes} != present:
        raise UsageError(
            f"{newcomer.name} would compute in {dtypes[0]}, the others in {' and '.join(sorted(present))}: "
            "with another loss scale",
            hint="--dtype fp32, from the run's next start on",
        )
    largest = max(member.micro_batch for member in roster.members)
    newcomers = [Member(rank=0, host=slot.host, device=slot.device, dtype=dtype, share=0, micro_batch=largest)
                 for slot, dtype in zip(slots, dtypes, strict=True)]  # fmt: skip
    parts = agents[0].hosts | {newcomer.name: HostEntry(address=newcomer.address, num_ranks=len(slots))}
    weights = roster.mean_shares + [roster.batch / roster.world_size] * len(newcomers)
    members = [msgspec.structs.replace(member, rank=rank) for rank, member in enumerate([*roster.members, *newcomers])]
    new_roster = msgspec.structs.replace(roster, members=members, round_shares=[])
    shares = (
        equal_shares(roster.batch, len(members)) if roster.has_equal_shares else weighted_shares(roster.batch, weights)
    )
    if not all(shares[roster.world_size :]):
        raise UsageError(f"{roster.batch} sequences a batch, for {len(members)} ranks: {newcomer.name} would get none",
                         hint="a larger --batch, from the run's next start on")  # fmt: skip
    new_roster = new_roster.replace_shares(shares)
    updated = plan_with_hosts(plan, parts, version)
    agent = updated.hosts[0].agent
    assert agent is not None
    agent_spec = msgspec.structs.replace(agent, host=newcomer.name, program=program)
    return msgspec.structs.replace(updated, roster=new_roster, hosts=[*updated.hosts, _with_agent(agent_spec, host)])


def plan_with_hosts(plan: Plan, hosts: Mapping[str, HostEntry], version: int) -> Plan:
    """Return the plan of a running run with these hosts as the possible members in every agent's spec."""
    agents = [msgspec.structs.replace(host.agent, hosts=dict(hosts), version=version)
              for host in plan.hosts if host.agent is not None]  # fmt: skip
    updated_hosts = [msgspec.structs.replace(host, agent=agent) for host, agent in zip(plan.hosts, agents, strict=True)]
    return msgspec.structs.replace(plan, hosts=updated_hosts)


def _worker_command(place: PreparedHost, slots: Sequence[RankSlot], spec: RunSpec, data: str, init_from: str | None,
            model: str | None, *, resume: bool) -> tuple[list[str], dict[str, str]]:  # fmt: skip
    """Return (program, environment) of evener's own worker, given the host's paths of corpus and weights."""
    device = "cpu" if slots[0].device == "cpu" else "cuda"
    threads = place.host.threads or spec.machine.threads or max(1, place.cores // len(slots))
    worker_spec = msgspec.structs.replace(
        spec,
        out=spec.out if place.is_local_run else place.run_dir,
        data=msgspec.structs.replace(spec.data, data=data),
        model=msgspec.structs.replace(spec.model, init_from=init_from, model=model or spec.model.model),
        machine=msgspec.structs.replace(spec.machine, ranks=1, threads=threads, device=device),
    )
    program = ["-m", "evener.worker", *to_flags(worker_spec), *(["--resume"] if resume else [])]
    return program, _host_env(place, threads, OWN_PROGRAM_ENV) | {
        "EVENER_ROSTER": posixpath.join(place.run_dir, ROSTER_FILE)
    }


def script_plan(
    prepared: PreparedFleet,
    program: Sequence[str],
    environment: Mapping[str, str],
    project: ScriptProject | None,
    shown_env: Mapping[str, str] = MappingProxyType({}),
    passed_env: Sequence[str] = (),
    *,
    script_options: Sequence[str] | None = None,
    resume_args: Sequence[str] | None = None,
    key: str,
) -> Plan:
    """Plan a user's program on all hosts, in its project's folder: its words as in `Program.argv`.

    `project` is None on this machine alone, where the program runs in place. Of `environment`, the controller's
    variables, only a few are forwarded, and no secrets; of those that the user passes, the plan holds the values in
    `shown_env` and the names in `passed_env`. With `script_options`, which may be empty, the program is instrumented
    (see `evener.worker.script`). With `resume_args`, which may be empty, all ranks restart with these arguments when a
    host is lost. The hosts authenticate each other with `key`.
    """
    places = prepared.hosts
    counts = [num for _, num in prepared.rank_counts]
    withheld = {*withheld_variables(environment), *passed_env}
    forwarded = {name: value for name, value in _forwarded_variables(environment).items() if name not in withheld}
    hosts = []
    for i, place in enumerate(places):
        env = _host_env(place, place.host.threads or max(1, place.cores // counts[i]), forwarded)
        env |= {"EVENER_JOINED": posixpath.join(place.run_dir, JOINED_RUN_FILE), **shown_env}
        if script_options is not None:
            env |= {
                OPTIONS_VARIABLE: ",".join([*script_options, *([] if any(p.gpus for p in places) else ["no-gpu"])]),
                PROGRAM_VARIABLE: msgspec.json.encode(list(program)).decode(),
                FIRST_RANK_VARIABLE: str(sum(counts[:i])),
            }
        env = {name: value for name, value in env.items() if name not in passed_env}
        host = _host_plan(prepared, counts, i, list(program), env, project)
        if resume_args is not None:
            parts = _host_entries(places, counts)
            agent = AgentSpec(run=prepared.id, host=place.name, hosts=parts, first=[*parts], port=prepared.port,
                              program=list(program), resume_args=list(resume_args))  # fmt: skip
            host = _with_agent(agent, host)
        hosts.append(msgspec.structs.replace(host, passed_env=list(passed_env)))
    return Plan(id=prepared.id, kind="launch", address=places[0].address, port=prepared.port, key=key,
                roster=None, grace_s=SCRIPT_GRACE_S, spec=None, project=project.folder if project else None,
                fleet_file=prepared.fleet_file, hosts=hosts)  # fmt: skip


def withheld_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that would be forwarded to the hosts if they could not hold secrets."""
    return [name for name, value in _forwarded_variables(environment).items() if is_secret_variable(name, value)]


def _forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items()
            if FORWARDED_ENV_PATTERN.match(name) and name not in NOT_FORWARDED_ENV}  # fmt: skip


def _host_plan(
    prepared: PreparedFleet,
    counts: Sequence[int],
    i: int,
    program: list[str],
    env: dict[str, str],
    project: ScriptProject | None = None,
) -> HostPlan:
    place, master = prepared.hosts[i], prepared.hosts[0].address
    endpoint = f"[{master}]:{prepared.port}" if ":" in master else f"{master}:{prepared.port}"
    argv = [
        place.python,
        "-P",  # a queue.py of the project may shadow modules of its ranks only
        "-m",
        "evener.worker.torchrun",
        f"--nnodes={len(prepared.hosts)}",
        f"--nproc-per-node={counts[i]}",
        "--rdzv-backend=evener",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-conf=rank={i}",
        f"--rdzv-id={prepared.id}",
        f"--local-addr={place.address}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        "--shutdown-timeout=5",
        "--redirects=3",
        f"--log-dir={posixpath.join(place.run_dir, 'host', 'ranks')}",
        *torchrun_program(program),
    ]
    if len(prepared.hosts) > 1:
        env = env | {"EVENER_KEY_FILE": posixpath.join(place.run_dir, RUN_KEY_FILE)}
    return HostPlan(
        name=place.name,
        host=place.host,
        node_rank=i,
        first_rank=sum(counts[:i]),
        num_ranks=counts[i],
        address=place.address,
        interface=place.interface,
        run=None if place.is_local_run else place.run_dir,
        code=posixpath.join(place.workdir, "trees", project.tree) if project else None,
        cwd=posixpath.join(place.workdir, "projects", project.name) if project else place.cwd or place.run_dir,
        argv=argv,
        env=env,
    )


def _host_entries(places: Sequence[PreparedHost], counts: Sequence[int]) -> dict[str, HostEntry]:
    """Return what the hosts' agents know of each other."""
    return {
        place.name: HostEntry(address=place.address, num_ranks=num) for place, num in zip(places, counts, strict=True)
    }


def _with_agent(agent: AgentSpec, host: HostPlan) -> HostPlan:
    """Return the host's plan with its command replaced by that of the agent, which starts the ranks."""
    assert host.run is not None
    argv = [host.argv[0], "-P", "-m", "evener.node.agent", host.run]
    return msgspec.structs.replace(host, argv=argv, agent=agent)


def choose_membership(spec: RunSpec, roster: Roster, *, are_linux: bool) -> Literal["fixed", "restart", "live"]:
    """Return what the ranks do when a host is lost: as requested, or else what preserves the most progress.

    UsageError if live membership is requested and not possible. A single host's membership is always fixed.
    """
    requested = spec.machine.membership
    if len(roster.hosts) == 1:
        return "fixed"
    if requested in ("fixed", "restart"):
        return requested
    if any(member.is_gpu for member in roster.members) or roster.backend == "nccl":
        reason = "ranks on GPUs must restart: NCCL's communicators do not survive a member"
    elif roster.sync.is_sharded:
        reason = f"with {roster.sync} a lost rank's part of the weights is in the checkpoint alone"
    elif not are_linux:
        reason = "only on Linux can a rank that is blocked on a lost peer be released"
    else:
        return "live"
    if requested == "live":
        raise UsageError(f"--membership live: {reason}", hint="--membership restart")
    return "restart"


def without_torchrun(host: HostPlan, program: Sequence[str]) -> HostPlan:
    """Return the plan of a run of one rank, started without torchrun, which would import torch before the rank does."""
    return msgspec.structs.replace(host, argv=[host.argv[0], *program], is_rank=True)


def _host_env(place: PreparedHost, threads: int, forwarded: Mapping[str, str]) -> dict[str, str]:
    """Return a host's environment. Interfaces: Gloo takes one exact name, NCCL a prefix unless an = precedes it."""
    return {
        **forwarded,
        "EVENER_HOST": place.name,
        "EVENER_PULSE": posixpath.join(place.run_dir, "host", "pulse"),
        "GLOO_SOCKET_IFNAME": place.interface,
        "NCCL_SOCKET_IFNAME": f"={place.interface}",
        "OMP_NUM_THREADS": forwarded.get("OMP_NUM_THREADS", str(threads)),
        "PYTHONUNBUFFERED": "1",
        # Its warnings are about host names, which addresses at home do not have and nobody needs.
        "TORCH_CPP_LOG_LEVEL": forwarded.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
