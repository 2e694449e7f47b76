"""Membership epochs: which hosts train together until the next change, and the files of their agents and ranks.

Only the hosts of an epoch can decide the next one, by a quorum. Elastic here means that the surviving ranks keep their
process and state across epochs, as in Horovod Elastic and torchft; torchelastic restarts all ranks instead.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from evener.core.base.errors import CheckpointError
from evener.core.base.file_io import read_file, write_atomic
from evener.core.base.json_files import read_json

AGENT_SPEC_FILE = "host/agent.json"  # an AgentSpec
# the run's key, in hexadecimal: what agents and store tunnels authenticate each other by; EVENER_KEY_FILE is its path
RUN_KEY_FILE = "host/key"
RUN_KEY_BYTES = 32
HOST_TIMEOUT_S = 12.0  # heartbeat timeout where the loss of a host restarts the ranks of all
CONSENSUS_STATE_FILE = "host/kept.json"  # the agent's durable consensus state
RENDEZVOUS_FILE = "host/world.json"  # a Rendezvous, in the run's folder on each host; EVENER_WORLD is its path
RANK_STATUS_FOLDER = "host/sayings"  # the RankStatus of each local rank, by its number on the host
HEARTBEAT_FOLDER = "host/pulse"  # the heartbeat of each local rank; see worker/record/heartbeat.py
JOIN_PENDING_FILE = "host/waiting"  # exists while hosts wait to join
KILLED_RANKS_FILE = "host/killed.json"  # the local ranks that were killed last, and when
EXCLUDED_FILE = "host/kept-out"  # the reason why this host is excluded from the run, until the file is removed
NEEDED_BYTES_FILE = "host/needs"  # free bytes that ranks need whose disk was too full
CHECKPOINT_REQUEST_FILE = "host/save"  # exists from a request for a checkpoint until one is written
# Exit statuses of ranks, for their agent; any other is a failure that may be transient.
EXIT_REGROUP = 75  # all ranks leave together, for another epoch (sysexits.h: EX_TEMPFAIL)
EXIT_PEER_FAILED = 74  # a peer failed, and this rank could not continue (sysexits.h: EX_IOERR)
EXIT_HOST_NOT_RETRYABLE = 2  # an error of this host alone, which would recur in any epoch
EXIT_DISK_FULL = 73  # the disk is too full (sysexits.h: EX_CANTCREAT)
EXIT_RUN_FAILED = 77  # the run has failed and would fail in any epoch; an agent exits with it on all hosts
EXIT_HOST_LEFT = 76  # agents only: the host has left the run, which continues; other failures are the host's alone
EXIT_TERMINATED = 143  # 128 + SIGTERM: a torchrun that was asked to stop, or whose peers on another host failed
MAX_ANCESTORS = 64  # epochs of history in each epoch: two histories that split earlier are not recognized as two
PEER_LOST = "lost"  # the `regroup_reason` of a rank that cannot continue in its epoch


class MembershipEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts whose ranks train together until the next membership epoch begins."""

    number: int  # 0, 1, 2 …
    hosts: list[str]  # in the order of the ranks; the first one runs the store
    # standby hosts: they vote on the next epoch and have no ranks in this one
    standby_hosts: list[str] = msgspec.field(default_factory=list, name="others")
    # the ranks start from the newest checkpoint; else they keep their state in memory
    is_cold_start: bool = msgspec.field(default=True, name="is_fresh")
    why: str = ""  # the reason for the change from the previous epoch
    step: int = -1  # the last saved step when the epoch was decided; of an elastic run, the last step taken
    failures: int = 0  # consecutive failures that began an epoch without a newly saved step in between
    is_over: bool = False  # no epoch follows: the run has failed too often
    # Who proposed it, "HOST:START OF ITS AGENT"; "" for the first epoch. Number and proposer identify an epoch: of one
    # number there are two if disks lost what they had confirmed as written, so that a host broke a promise.
    proposer: str = ""
    ancestors: list[str] = []  # the proposers of the epochs before it, oldest first; at most MAX_ANCESTORS

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError("a membership epoch without hosts")

    @property
    def voters(self) -> list[str]:
        """The hosts that decide the next epoch: first those that train, then the standby hosts."""
        return [*self.hosts, *self.standby_hosts]

    def is_quorum(self, hosts: Iterable[str]) -> bool:
        """Return whether these hosts can decide the next epoch: over half of the voters, or half including the first.

        At most one side of a network partition is a quorum.

        >>> (MembershipEpoch(number=0, hosts=["a", "b"]).is_quorum(["a"]),
        ...  MembershipEpoch(number=0, hosts=["a", "b"]).is_quorum(["b", "c"]))
        (True, False)
        """
        votes = set(self.voters).intersection(hosts)
        return 2 * len(votes) > len(self.voters) or (2 * len(votes) == len(self.voters) and self.hosts[0] in votes)

    @property
    def identity(self) -> str:
        """Number and proposer, which ranks and agents must agree on to meet."""
        return f"{self.number}-{self.proposer}"

    @property
    def lineage(self) -> list[str]:
        """The proposers of the epochs up to this one, the newest last: the `ancestors` of the epoch that follows."""
        return [*self.ancestors, self.proposer][-MAX_ANCESTORS:]

    def split_number(self, other: MembershipEpoch) -> int | None:
        """Return the number of the first epoch that was decided twice, or None if one history continues the other.

        >>> first = MembershipEpoch(number=0, hosts=["a", "b", "c"])
        >>> one = MembershipEpoch(number=1, hosts=["a", "b"], proposer="a:1", ancestors=first.lineage)
        >>> two = MembershipEpoch(number=1, hosts=["b", "c"], proposer="c:1", ancestors=first.lineage)
        >>> three = MembershipEpoch(number=2, hosts=["c"], proposer="c:1", ancestors=two.lineage)
        >>> first.split_number(one), two.split_number(three), one.split_number(two), one.split_number(three)
        (None, None, 1, 1)
        """
        if self == other:
            return None
        own, theirs = self._proposers_by_number(), other._proposers_by_number()
        return min((number for number in own.keys() & theirs.keys() if own[number] != theirs[number]), default=None)

    def _proposers_by_number(self) -> dict[int, str]:
        return {self.number - age: proposer for age, proposer in enumerate([self.proposer, *reversed(self.ancestors)])}


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """The meeting place of the ranks of a membership epoch, as a host's agent writes it for its ranks."""

    epoch: MembershipEpoch
    address: str = ""  # of the epoch's store
    port: int = 0
    first_rank: int = 0  # the rank of this host's first process
    world_size: int = 0


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a rank of an elastic run to its agent."""

    pid: int
    epoch_number: int = -1  # number of the epoch in which the rank has trained; -1: none yet, but it is ready to join
    step: int = -1  # the last step it has taken
    # why the rank wants another epoch: hosts join or leave; or PEER_LOST: it cannot continue in this one
    regroup_reason: str = ""


class HostEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A host's address and number of ranks."""

    address: str  # reachable from the other hosts, and the only one on which the host listens
    num_ranks: int


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one host's agent in a run."""

    run: str  # the run's id
    host: str  # the host of this agent
    hosts: dict[str, HostEntry]  # all hosts that may take part, in the order of their ranks
    version: int = msgspec.field(default=0, name="edition")  # version of `hosts`: the highest one is valid
    first: list[str]  # the hosts of the first epoch; the others were added during the run
    port: int  # on which the agents listen for each other, or on a spare one: see node/remote/sockets.py, agent_ports
    program: list[str]  # ["-m", "evener.worker", …] or ["train.py", …]
    # heartbeat timeout: a host that sends nothing for so long is lost
    host_timeout_s: float = msgspec.field(default=HOST_TIMEOUT_S, name="silent_s")
    join_s: float = 180.0  # how long hosts wait for each other at the start: Python may load from a cold, slow disk
    # elastic: ranks keep their process and state across epochs, so survivors lose no work
    is_elastic: bool = msgspec.field(default=False, name="lives")
    # of a user's program: the arguments added at every start but the first; None: evener's own worker
    resume_args: list[str] | None = None

    @property
    def is_user_program(self) -> bool:
        """Return whether the ranks run a user's program, whose exit codes and checkpoints evener does not know."""
        return self.resume_args is not None

    def program_in(self, epoch: MembershipEpoch) -> list[str]:
        """Return the words of the program in a membership epoch."""
        return [*self.program, *((self.resume_args or []) if epoch.number > 0 else [])]

    def __post_init__(self) -> None:
        if not self.first or not self.hosts.keys() >= {self.host, *self.first}:
            raise ValueError("hosts that are not part of the run")


def torchrun_program(words: Sequence[str]) -> list[str]:
    """Return the last arguments of torchrun, which takes none of the program's options for its own after `--`.

    >>> torchrun_program(["-m", "nanochat", "--depth", "4"]), torchrun_program(["train.py"])
    (['-m', '--', 'nanochat', '--depth', '4'], ['--', 'train.py'])
    """
    return [words[0], "--", *words[1:]] if words[0] in ("-m", "--no-python") else ["--", *words]


def make_run_key() -> str:
    """Return a new key for a run, in hexadecimal."""
    return secrets.token_hex(RUN_KEY_BYTES)


def read_run_key(path: Path | None) -> bytes:
    """Read the run's key. Raise CheckpointError if the file is absent or holds no key."""
    make = f"(umask 077; openssl rand -hex {RUN_KEY_BYTES} > run.key)"
    hint = f"{make}, a copy of that file on each host, and EVENER_KEY_FILE=run.key"
    if path is None:
        raise CheckpointError("EVENER_KEY_FILE is not set: it must name the file with the run's key", hint=hint)
    try:
        key = bytes.fromhex(read_file(path).decode())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}: the key of this run", hint=hint) from None
    except ValueError:
        key = b""
    if len(key) != RUN_KEY_BYTES:
        raise CheckpointError(f"{path}: not a key of {RUN_KEY_BYTES} bytes in hexadecimal", hint=hint)
    return key


def has_dynamic_membership() -> bool:
    """Return whether this process belongs to a run whose hosts may leave and join."""
    return "EVENER_WORLD" in os.environ


def is_elastic() -> bool:
    """Return whether this rank keeps its process and state across membership epochs."""
    return "EVENER_SAYINGS" in os.environ


def agent_pid() -> int:
    """Return the process id of the agent that announces epochs to this rank of an elastic run."""
    return int(os.environ["EVENER_AGENT"])


def memory_limit_file(local_rank: int) -> str:
    """Return the file for a rank's micro-batch limit by memory; one per rank, as all may be killed at once."""
    return f"host/memory-{local_rank}.json"


def read_rendezvous() -> Rendezvous:
    """Read the newest rendezvous of this host. Raise CheckpointError if the file is damaged."""
    return read_json(Path(os.environ["EVENER_WORLD"]), Rendezvous)


def has_waiting_hosts() -> bool:
    """Return whether a host waits to join."""
    return host_file_path(JOIN_PENDING_FILE).exists()


def is_host_excluded() -> bool:
    """Return whether this process's host is excluded from the next epoch."""
    return host_file_path(EXCLUDED_FILE).exists()


def exclude_host(reason: str) -> None:
    """Exclude this process's host from the run after the current epoch."""
    write_atomic(host_file_path(EXCLUDED_FILE), reason.encode())


def host_file_path(file: str) -> Path:
    """Return the path of one of this module's files (host/…) in the run's folder on this host."""
    return Path(os.environ["EVENER_WORLD"]).with_name(os.path.basename(file))
