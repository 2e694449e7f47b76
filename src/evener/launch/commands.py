"""With which exact command and environment does each host of a run take part? Pure: what it returns can be printed.

torchrun runs on every host with a static rendezvous and explicit node ranks, so that which rank is where is known
beforehand: host after host in the fleet's order. A world of one rank needs no torchrun, and starts in half the time. A
training on several hosts that may come and go is begun on each by its agent instead (`evener.agent`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from evener.core.errors import UsageError
from evener.core.fleet import Host
from evener.core.plan import JOINED_FILE, ROSTER_FILE, HostPlan, Plan
from evener.core.roster import Member, Roster, Seat, devices_of, dtypes_of, equal_shares, weighted_shares
from evener.core.spec import MachineSpec, RunSpec, to_flags
from evener.core.world import SILENT_S, AgentSpec, Part

TRAIN_GRACE_S = 600.0  # to finish a step, which may take minutes, and save; stop --now does not wait
LIVE_SILENT_S = 3.0  # nobody loses more than this by one who was only slow to answer, and comes back
SCRIPT_GRACE_S = 0.0  # a script of the user's own gets SIGTERM through torchrun, and 5 s
SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|AUTH|COOKIE", re.IGNORECASE)
# What a person writes in front of torchrun and expects to reach the ranks. Interfaces and folders are a host's own.
COPIED = re.compile(
    r"^(NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|KMP|CUBLAS|HF|ACCELERATE|TRANSFORMERS|TOKENIZERS|WANDB|CUDA_LAUNCH)_"
)
NOT_COPIED = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HF_HOME", "HF_HUB_CACHE", "TORCH_HOME", "TRANSFORMERS_CACHE",
              "TORCH_COMPILER_COLLECTIVES"}  # fmt: skip  # the last one has ranks unpickle what others send


class Project(msgspec.Struct, frozen=True):
    """A folder of the user's own that travels: as it is now, and where it lies on hosts, whatever is in it."""

    folder: str  # here
    tree: str  # digest
    name: str


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What must be known of a host for its command."""

    name: str
    host: Host
    address: str  # of the interface that the others reach
    interface: str
    python: str  # the interpreter that trains
    workdir: str  # absolute
    run: str  # the run's folder there, absolute
    cwd: str | None = None  # of its programs; None: the run's folder
    is_here: bool = False  # this machine alone: the folder is the run directory, and nothing need be sent
    cores: int
    gpus: list[str]  # names
    gpus_have_bf16: bool  # all of them, in hardware
    has_bf16: bool  # the processor, in hardware
    is_linux: bool = True

    def seats(self, machine: MachineSpec) -> list[Seat]:
        """What its ranks take, by rank."""
        return [self._seat(device) for device in devices_of(self.name, self.host, len(self.gpus), machine)]

    def _seat(self, device: str) -> Seat:
        if device == "cpu":
            return Seat(host=self.name, device=device, has_bf16=self.has_bf16)
        name = self.gpus[int(device.removeprefix("cuda:"))]
        return Seat(host=self.name, device=device, name=name, has_bf16=self.gpus_have_bf16)


def train_plan(run_id: str, places: Sequence[Place], port: int, spec: RunSpec, roster: Roster, data: Mapping[str, str],
               init_from: Mapping[str, str], *, resume: bool, key: str) -> Plan:  # fmt: skip
    """evener's own worker on every host of the roster; `data` and `init_from` say where each host has them, and by
    `key` agents know each other. UsageError where ranks can't live on as they were asked to.
    """
    seats = [place.seats(spec.machine) for place in places]
    counts = [len(of_host) for of_host in seats]
    membership = membership_of(spec, roster, are_linux=all(place.is_linux for place in places))
    hosts = []
    for i, place in enumerate(places):
        program, env = _worker(place, seats[i], spec, data[place.name], init_from.get(place.name), resume=resume)
        host = _host_plan(run_id, places, counts, i, port, program, env)
        if membership != "fixed":
            parts = {one.name: Part(address=one.address, num_ranks=num)
                     for one, num in zip(places, counts, strict=True)}  # fmt: skip
            lives = membership == "live"
            agent = AgentSpec(run=run_id, host=place.name, hosts=parts, first=[*parts], port=port, key=key,
                              program=program, lives=lives,
                              silent_s=LIVE_SILENT_S if lives else SILENT_S)  # fmt: skip
            host = _under(agent, host)
        hosts.append(alone(host, program) if place.is_here and counts == [1] else host)
    return Plan(id=run_id, kind="train", address=places[0].address, port=port, roster=roster, grace_s=TRAIN_GRACE_S,
                spec=spec, hosts=hosts)  # fmt: skip


def joined_plan(plan: Plan, place: Place, data: str, edition: int) -> Plan:
    """The plan of a run that goes on, with one host more: its ranks come behind those that are there, each with the
    mean of their shares. UsageError where they could not exchange with the others.
    """
    spec, roster, seats = plan.spec, plan.roster, place.seats(plan.spec.machine if plan.spec else MachineSpec())
    assert spec is not None
    assert roster is not None
    agents = [host.agent for host in plan.hosts if host.agent is not None]
    if agents[0].lives and not place.is_linux:
        raise UsageError(f"{place.name} is no Linux machine: its ranks can't live on with the others'",
                         hint="--membership restart, from the run's next start on")  # fmt: skip
    if any(seat.device != "cpu" for seat in seats) and (agents[0].lives or roster.backend != "nccl"):
        raise UsageError(f"{place.name} would train on its GPU, and the others' ranks, on processors, can't let one in",
                         hint=f'devices = "cpu" under [hosts.{place.name}] in the fleet file')  # fmt: skip
    if any(seat.device == "cpu" for seat in seats) and roster.backend == "nccl":
        raise UsageError(f"{place.name} has no GPU, and the others exchange by NCCL, which needs one in each")
    program, env = _worker(place, seats, spec, data, None, resume=False)
    host = msgspec.structs.replace(_host_plan(plan.id, [place], [len(seats)], 0, plan.port, program, env),
                                   node_rank=len(plan.hosts), first_rank=plan.world_size)  # fmt: skip
    dtypes, theirs = dtypes_of(seats, spec.model.dtype), {member.dtype for member in roster.members}
    if "fp16" in {*dtypes, *theirs} and {*dtypes} != theirs:
        raise UsageError(f"{place.name} would compute in {dtypes[0]}, the others in {' and '.join(sorted(theirs))}: of "
                         "another loss scale", hint="--dtype fp32, from the run's next start on")  # fmt: skip
    largest = max(member.micro_batch for member in roster.members)
    newcomers = [Member(rank=0, host=seat.host, device=seat.device, dtype=dtype, share=0, micro_batch=largest)
                 for seat, dtype in zip(seats, dtypes, strict=True)]  # fmt: skip
    parts = agents[0].hosts | {place.name: Part(address=place.address, num_ranks=len(seats))}
    weights = roster.mean_shares + [roster.batch / roster.world_size] * len(newcomers)
    members = [msgspec.structs.replace(one, rank=rank) for rank, one in enumerate([*roster.members, *newcomers])]
    whole = msgspec.structs.replace(roster, members=members, round_shares=[])
    shares = equal_shares(roster.batch, len(members)) if roster.is_equal else weighted_shares(roster.batch, weights)
    if not all(shares[roster.world_size :]):
        raise UsageError(f"{len(members)} ranks, and {roster.batch} sequences a batch: {place.name} would have none",
                         hint="a larger --batch, from the run's next start on")  # fmt: skip
    whole = whole.divided(shares)
    told = told_anew(plan, parts, edition)
    agent = told.hosts[0].agent
    assert agent is not None
    mine = msgspec.structs.replace(agent, host=place.name, program=program)
    return msgspec.structs.replace(told, roster=whole, hosts=[*told.hosts, _under(mine, host)])


def told_anew(plan: Plan, hosts: Mapping[str, Part], edition: int) -> Plan:
    """The plan of a run that goes on, whose agents hear that these may take part in it."""
    agents = [msgspec.structs.replace(host.agent, hosts=dict(hosts), edition=edition)
              for host in plan.hosts if host.agent is not None]  # fmt: skip
    whole = [msgspec.structs.replace(host, agent=agent) for host, agent in zip(plan.hosts, agents, strict=True)]
    return msgspec.structs.replace(plan, hosts=whole)


def _worker(place: Place, seats: Sequence[Seat], spec: RunSpec, data: str, init_from: str | None, *,
            resume: bool) -> tuple[list[str], dict[str, str]]:  # fmt: skip
    """(program, environment) of evener's own worker on a host that has its corpus and weights there."""
    device = "cpu" if seats[0].device == "cpu" else "cuda"
    threads = place.host.threads or spec.machine.threads or max(1, place.cores // len(seats))
    mine = msgspec.structs.replace(
        spec,
        out=spec.out if place.is_here else place.run,
        data=msgspec.structs.replace(spec.data, data=data),
        model=msgspec.structs.replace(spec.model, init_from=init_from),
        machine=msgspec.structs.replace(spec.machine, ranks=1, threads=threads, device=device),
    )
    program = ["-m", "evener.worker", *to_flags(mine), *(["--resume"] if resume else [])]
    return program, _env(place, threads, {}) | {"EVENER_ROSTER": posixpath.join(place.run, ROSTER_FILE)}


def script_plan(run_id: str, places: Sequence[Place], port: int, program: Sequence[str], environment: Mapping[str, str],
                project: Project | None) -> Plan:  # fmt: skip
    """A program of the user's own: ["train.py", …] or ["-m", "module", …], in its project; here (None) it runs in the
    project's own folder. Of `environment`, the controller's, little is copied.
    """
    counts = [len(place.seats(MachineSpec())) for place in places]
    copied = {name: value for name, value in environment.items()
              if COPIED.match(name) and name not in NOT_COPIED and not SECRET.search(name)}  # fmt: skip
    hosts = []
    for i, place in enumerate(places):
        env = _env(place, place.host.threads or max(1, place.cores // counts[i]), copied)
        env["EVENER_JOINED"] = posixpath.join(place.run, JOINED_FILE)
        hosts.append(_host_plan(run_id, places, counts, i, port, list(program), env, project))
    return Plan(id=run_id, kind="launch", address=places[0].address, port=port, roster=None, grace_s=SCRIPT_GRACE_S,
                spec=None, project=project.folder if project else None, hosts=hosts)  # fmt: skip


def _host_plan(run_id: str, places: Sequence[Place], counts: Sequence[int], i: int, port: int, program: list[str],
               env: dict[str, str], project: Project | None = None) -> HostPlan:  # fmt: skip
    place, master = places[i], places[0].address
    endpoint = f"[{master}]:{port}" if ":" in master else f"{master}:{port}"
    argv = [
        place.python,
        "-P",  # a queue.py of the project's own is its ranks' alone
        "-m",
        "evener.worker.torchrun",
        f"--nnodes={len(places)}",
        f"--nproc-per-node={counts[i]}",
        "--rdzv-backend=evener",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-conf=rank={i}",
        f"--rdzv-id={run_id}",
        f"--local-addr={place.address}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        "--shutdown-timeout=5",
        "--redirects=3",
        f"--log-dir={posixpath.join(place.run, 'host', 'ranks')}",
        *(["-m", "--", *program[1:]] if program[0] == "-m" else ["--", *program]),  # else torchrun takes its options
    ]
    return HostPlan(
        name=place.name,
        host=place.host,
        node_rank=i,
        first_rank=sum(counts[:i]),
        num_ranks=counts[i],
        address=place.address,
        interface=place.interface,
        run=None if place.is_here else place.run,
        code=posixpath.join(place.workdir, "trees", project.tree) if project else None,
        cwd=posixpath.join(place.workdir, "projects", project.name) if project else place.cwd or place.run,
        argv=argv,
        env=env,
    )


def _under(agent: AgentSpec, host: HostPlan) -> HostPlan:
    """The same, where an agent that agrees with the other hosts' starts what would be started at once."""
    assert host.run is not None
    argv = [host.argv[0], "-P", "-m", "evener.agent", host.run]
    return msgspec.structs.replace(host, argv=argv, agent=agent)


def membership_of(spec: RunSpec, roster: Roster, *, are_linux: bool) -> Literal["fixed", "restart", "live"]:
    """What these ranks do when a host of theirs is lost: as it was asked for, or what keeps most of what was learned.

    UsageError where they can't live on. One host's alone are lost together.
    """
    asked = spec.machine.membership
    if len(roster.hosts) == 1:
        return "fixed"
    if asked in ("fixed", "restart"):
        return asked
    if any(member.is_gpu for member in roster.members) or roster.backend == "nccl":
        why = "ranks on GPUs begin anew: NCCL's communicators do not survive a member"
    elif not are_linux:
        why = "elsewhere than under Linux a rank that waits for one that is gone can't be freed"
    else:
        return "live"
    if asked == "live":
        raise UsageError(f"--membership live: {why}", hint="--membership restart")
    return "restart"


def alone(host: HostPlan, program: Sequence[str]) -> HostPlan:
    """The same for a world of one rank, started as it is: torchrun would import torch before the rank does."""
    return msgspec.structs.replace(host, argv=[host.argv[0], *program], is_rank=True)


def _env(place: Place, threads: int, copied: Mapping[str, str]) -> dict[str, str]:
    """Of the interface the exact name: Gloo takes one name, NCCL a prefix unless an = stands before it."""
    return {
        **copied,
        "EVENER_HOST": place.name,
        "EVENER_PULSE": posixpath.join(place.run, "host", "pulse"),
        "GLOO_SOCKET_IFNAME": place.interface,
        "NCCL_SOCKET_IFNAME": f"={place.interface}",
        "OMP_NUM_THREADS": copied.get("OMP_NUM_THREADS", str(threads)),
        "PYTHONUNBUFFERED": "1",
        # Its warnings are of names that nobody needs: at home addresses have none.
        "TORCH_CPP_LOG_LEVEL": copied.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
