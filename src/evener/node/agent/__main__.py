"""The host agent: keep a run alive while hosts come and go. One process a host joins epochs and manages the ranks.

    python -m evener.node.agent FOLDER     the run's folder on this host; its host/agent.json holds an AgentSpec

The agent decides each epoch with the other agents, starts its host's ranks in it, monitors them and, when they end,
starts again. In an elastic run (`AgentSpec.is_elastic`) ranks survive from epoch to epoch, and the agent gives them the
rendezvous of the next one; a host outside the epoch keeps standby ranks, so that it can be admitted at once.

It needs no controller and no torch. Exit status 0: the run has finished; EXIT_RUN_FAILED: the run has failed, and no
further epoch would help; EXIT_HOST_LEFT: the run continues without this host; 1: this host's disk or files failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.errors import CheckpointError
from evener.core.base.file_io import fsync_path, read_file, write_atomic
from evener.core.base.json_files import read_json
from evener.core.base.shell import quote_word
from evener.core.run.hang_detector import describe_hang
from evener.core.run.membership_epoch import (
    AGENT_SPEC_FILE,
    CONSENSUS_STATE_FILE,
    EXCLUDED_FILE,
    EXIT_DISK_FULL,
    EXIT_HOST_LEFT,
    EXIT_HOST_NOT_RETRYABLE,
    EXIT_PEER_FAILED,
    EXIT_REGROUP,
    EXIT_RUN_FAILED,
    EXIT_TERMINATED,
    JOIN_PENDING_FILE,
    KILLED_RANKS_FILE,
    NEEDED_BYTES_FILE,
    PEER_LOST,
    RUN_KEY_FILE,
    AgentSpec,
    HostEntry,
    MembershipEpoch,
    Rendezvous,
    read_run_key,
)
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.node.agent.consensus import (
    TICK_INTERVAL_S,
    Consensus,
    ConsensusState,
    EpochConflict,
    HostPhase,
    HostStatus,
)
from evener.node.agent.hang_monitor import HangMonitor
from evener.node.agent.peer_links import PeerLinks
from evener.node.agent.rank_processes import RankProcesses, first_rank_of, make_rendezvous
from evener.node.remote.sockets import agent_ports, free_port

WRITE_ERROR_TIMEOUT_S = 600.0  # that writes may fail before the agent gives up
# After the disk was too full for checkpoints: delay before the next try, doubling up to a limit; and the free space to
# wait for beyond today's, when a rank could not even write down how much it needs.
DISK_RETRY_S, MAX_DISK_RETRY_S, DISK_MARGIN_BYTES = 2.0, 300.0, 32 << 20
PORT_TIMEOUT_S, PORT_RETRY_S = 10.0, 0.2  # that the run's port may be taken before a spare one is; between two tries
LINGER_S = 10.0  # that an agent stays for others that may not know yet that the run has ended
# Delay before standby ranks that exited are restarted, doubling up to a limit; reset after they trained for this long.
RESTART_BACKOFF_S, MAX_RESTART_BACKOFF_S, BACKOFF_RESET_S = 1.0, 60.0, 2.0
SPLIT_BRAIN_HINT = (
    "a disk lost in a power loss what it had confirmed as written: turn off its volatile write cache (hdparm -W 0, "
    "nvme set-feature -f 6 -v 0), or give the hosts a UPS"
)
RECORDS_TAIL_BYTES = 1 << 16  # of a rank's newest steps
STEPS_AHEAD = 20  # steps of a start of a user's program that gets ahead: it may take the first ones at every start
MAX_HOST_FAILURES = 3  # epochs in a row that the ranks of one host may break; after one more it leaves


class HostAgent:
    """The agent of one host in one run."""

    def __init__(
        self, spec: AgentSpec, folder: Path, *, clock: Callable[[], float] = time.monotonic,
        start_ranks: Callable[[AgentSpec, Path, Rendezvous], RankProcesses] = RankProcesses,
    ) -> None:  # fmt: skip
        """Load the consensus state of the run in `folder`; a simulation replaces `clock` and `start_ranks`.

        CheckpointError if that state is damaged: this host could then break a promise that it made.
        """
        self._spec, self._folder, self._state_path = spec, folder, folder / CONSENSUS_STATE_FILE
        self._clock, self._start_ranks = clock, start_ranks
        self._spec_path, self._spec_mtime_ns = folder / AGENT_SPEC_FILE, 0  # the file's modification time
        self._is_spec_unsaved = False  # another host sent a newer one, and it is not written to disk yet
        self._exclusion_path, self._leave_reason = folder / EXCLUDED_FILE, ""  # why the agent decided to leave
        self._required_bytes: int | None = None  # free bytes to wait for, after its ranks had no room for checkpoints
        self._disk_retry_at, self._num_disk_retries = 0.0, 0  # time of the next check; number of retries so far
        saved = (
            read_json(self._state_path, ConsensusState)
            if self._state_path.exists()
            else ConsensusState(MembershipEpoch(number=0, hosts=spec.first))
        )
        if unknown := sorted({*saved.epoch.voters} - spec.hosts.keys()):
            mismatch = f"{self._state_path} names {', '.join(unknown)}, but {self._spec_path} does not"
            raise CheckpointError(f"{mismatch}: one of the two files is damaged")
        is_restart = saved.incarnation > 0
        # the wall clock: higher than in its last start even if a power loss took that from a disk that lies
        saved = ConsensusState(saved.epoch, saved.vote, max(saved.incarnation + 1, int(time.time() * 1000)))
        join_by = self._clock() + (spec.host_timeout_s if is_restart else spec.join_s)
        self._consensus = Consensus(
            spec.host, saved, host_timeout_s=spec.host_timeout_s, join_deadline=join_by, is_elastic=spec.is_elastic
        )
        if is_restart and self._consensus.is_member:
            self._consensus.phase, self._consensus.reason = self._regroup_phase(), "its agent was restarted"
        self._broadcast_version, self._port = -1, 0  # of the hosts in the last status; on which this agent listens
        self._status_received = asyncio.Event()  # a status with news arrived
        self._write_error, self._write_error_since = "", 0.0  # while state cannot be written, nothing is broadcast
        self._saved_state: ConsensusState | None = None  # as on the disk
        self._ranks: RankProcesses | None = None
        self._failures: list[dict[str, Any]] = []  # of the last epoch that failed here
        # epochs that failed here without a save after this step
        self._num_consecutive_failures, self._last_failure_step = 0, -1
        self._killed_at: dict[int, float] = {}  # when a rank was killed by SIGKILL, by local rank
        self._ended_at: float | None = None
        self._have_ranks_joined = False  # this host's ranks have been in an epoch
        self._restart_at, self._num_failed_starts = 0.0, 0  # when standby ranks may be started; starts that failed
        self._training_since = math.inf  # since when this host's ranks have been training
        self._hang_monitor = HangMonitor(spec, folder, saved.epoch.hosts)

    async def run(self) -> int:
        """Take part until the run ends or continues without this host; return the exit status."""
        key, began = read_run_key(self._folder / RUN_KEY_FILE), self._clock()
        peer_links, ports = PeerLinks(key, self.on_status), agent_ports(self._spec.port, key)
        self._port = await self._listen(peer_links, ports)
        self._consensus.delay_join(self._clock() - began)
        try:
            while (status := self.tick()) is None:
                host_status = self.make_status()
                if host_status is not None:
                    others = {name: [(other.address, port) for port in ports]
                              for name, other in self._spec.hosts.items() if name != self._spec.host}  # fmt: skip
                    peer_links.broadcast(host_status, others)
                self._status_received.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_INTERVAL_S):
                        await self._status_received.wait()
            return status
        finally:
            await peer_links.close()
            self.close()

    async def _listen(self, peer_links: PeerLinks, ports: list[int]) -> int:
        """Listen on the first of `ports` or, if that stays taken, on the next free one; return the port.

        Wait for this host's address to appear, as after a power failure. OSError if it does not within `join_s`.
        """
        spec, began, reported = self._spec, self._clock(), ""
        address = spec.hosts[spec.host].address
        while True:
            waited_s = self._clock() - began
            for port in ports if waited_s >= PORT_TIMEOUT_S else ports[:1]:
                try:
                    await peer_links.listen((address, port))
                except OSError as error:
                    is_missing = error.errno == errno.EADDRNOTAVAIL
                    if error.errno != errno.EADDRINUSE and not (is_missing and waited_s < spec.join_s):
                        raise
                    problem = f"{address} is not an address of this host" if is_missing else f"port {port} is taken"
                    if problem != reported and port == spec.port:
                        print(f"evener: {problem}: trying again", flush=True)
                        reported = problem
                    continue
                if port != spec.port:
                    moved = f"this agent listens on port {port}, and the others connect to it there"
                    print(f"evener: port {spec.port} stays taken: {moved}", flush=True)
                return port
            await asyncio.sleep(PORT_RETRY_S)

    def close(self) -> None:
        """Kill this host's remaining ranks."""
        if self._ranks is not None:
            self._ranks.kill()

    def on_status(self, status: HostStatus) -> None:
        """Receive another host's status."""
        # First the list of hosts: one may have been added while this host was unreachable, and the status may name it.
        self._is_spec_unsaved |= self._apply_hosts(status.hosts, status.version)
        if status.host in self._spec.hosts and self._consensus.receive(status, self._clock()):
            self._status_received.set()

    def make_status(self) -> HostStatus | None:
        """Return the status to broadcast now; None if no broadcast is due, or while the disk fails."""
        now, spec = self._clock(), self._spec
        if self._write_error or not (self._consensus.is_broadcast_due(now) or self._broadcast_version != spec.version):
            return None
        self._broadcast_version = spec.version
        return msgspec.structs.replace(
            self._consensus.make_status(now), hosts=spec.hosts, version=spec.version, port=self._port
        )

    def tick(self) -> int | None:
        """Run one iteration; return the exit status once the agent is finished.

        While the disk fails, this host broadcasts nothing, as it could not keep a promise: the others continue without
        it. OSError once the disk has failed for `WRITE_ERROR_TIMEOUT_S`.
        """
        try:
            status, write_error = self._tick(), ""
        except OSError as error:
            status, write_error, consensus = None, f"{self._folder}: {error.strerror}", self._consensus
            self._kill_ranks()
            if consensus.phase not in (HostPhase.DONE, HostPhase.FATAL):
                consensus.phase = self._regroup_phase() if consensus.is_member else HostPhase.WAITING
            self._write_error_since = self._write_error_since if self._write_error else self._clock()
            if self._clock() - self._write_error_since > WRITE_ERROR_TIMEOUT_S:
                raise
        if write_error != self._write_error:
            print(f"evener: {write_error or 'this host can take part again'}", flush=True)
        self._write_error = write_error
        return status

    def _tick(self) -> int | None:
        """Run one iteration; OSError if the disk fails."""
        now, consensus = self._clock(), self._consensus
        self._check_disk_space(now)
        self._reload_spec()
        self._advance_consensus(now)
        if consensus.epoch.is_over:
            return self._report_failed_run() if self._can_exit(now) else None
        if self._spec.is_user_program and consensus.is_run_finished and consensus.phase == HostPhase.FAILED:
            consensus.phase = HostPhase.FATAL  # a rank failed after others had ended: they do not come back
        if consensus.is_run_finished and consensus.phase not in (HostPhase.RUNNING, HostPhase.FATAL, HostPhase.DONE):
            consensus.phase = HostPhase.DONE  # by then all members had taken the last step
            self._kill_ranks()
        match consensus.phase:
            case HostPhase.WAITING | HostPhase.READY if self._regroup_phase() == HostPhase.LEAVING:
                consensus.phase = HostPhase.LEAVING
            case HostPhase.LEAVING if not consensus.is_member and self._required_bytes is None and self._can_exit(now):
                reason = self._leave_reason or read_file(self._exclusion_path).decode(errors="replace")
                print(f"evener: this host has left the run: {reason}", flush=True)
                return EXIT_HOST_LEFT
            case HostPhase.WAITING if consensus.is_member and not consensus.has_lost_quorum(now):
                self._join_epoch()
            case HostPhase.WAITING | HostPhase.READY if self._spec.is_elastic and not consensus.is_member:
                self._run_standby_ranks(now)
            case HostPhase.REGROUPING | HostPhase.PEER_LOST | HostPhase.LEAVING if self._ranks is not None:
                self._monitor_ranks(now)
            case HostPhase.RUNNING:
                waiting = self._folder / JOIN_PENDING_FILE
                if not consensus.waiting_hosts(now):
                    waiting.unlink(missing_ok=True)
                elif not waiting.exists():
                    write_atomic(waiting, b"", is_durable=False)
                self._monitor_ranks(now)
                # A user's rank may do anything while others wait for it.
                is_watched = consensus.phase == HostPhase.RUNNING and not self._spec.is_user_program
                if is_watched and self._hang_monitor.is_sample_due(now):
                    self._detect_hang(now)
            case HostPhase.DONE if self._can_exit(now):
                return 0
        return None

    def _advance_consensus(self, now: float) -> None:
        """Take part in the decision on the next epoch; write changed consensus state to disk before it is broadcast."""
        consensus = self._consensus
        if self._is_spec_unsaved:  # before any epoch that names these hosts is saved
            write_atomic(self._spec_path, msgspec.json.encode(self._spec))
            self._is_spec_unsaved = False
        num_conflicts = len(consensus.conflicts)
        has_new_epoch = consensus.tick(now)
        for conflict in consensus.conflicts[num_conflicts:]:
            self._handle_conflict(conflict)
        if has_new_epoch:
            epoch = consensus.epoch
            print(f"evener: {epoch.why}: membership epoch {epoch.number} is {', '.join(epoch.hosts)}", flush=True)
            if epoch.is_cold_start or (self._have_ranks_joined and not consensus.is_member):
                self._kill_ranks()
            self._hang_monitor.set_members(epoch.hosts)
        if consensus.state != self._saved_state:
            write_atomic(self._state_path, msgspec.json.encode(consensus.state))
            self._saved_state = consensus.state

    def _handle_conflict(self, conflict: EpochConflict) -> None:
        """Report that two histories met. If this host's was abandoned, so are its ranks and its later checkpoints."""
        error, run = str(conflict), RunWriter(self._folder)
        if not conflict.is_own_kept:
            self._kill_ranks()
            step = conflict.other.step
            error += f"; {self._spec.host} had reached step {conflict.step} and rolls back to theirs, from step {step}"
            for saved in run.checkpoint_steps():
                if saved > step:  # else all hosts could restart from it
                    run.drop_checkpoint(saved)
            if run.checkpoints_path.exists():
                fsync_path(run.checkpoints_path)
        print(f"evener: {error}", flush=True)
        with contextlib.suppress(OSError):  # a full disk
            run.add_event(
                "run.split-brain",
                host=self._spec.host,
                number=conflict.number,
                sides=[conflict.own_hosts, conflict.other_hosts],
                kept=conflict.is_own_kept,
                step=conflict.step,
                error=error,
                hint=SPLIT_BRAIN_HINT,
            )

    def _report_failed_run(self) -> int:
        """Pass the failures of this host's ranks on to the supervisor; return the exit status."""
        if "EVENER_FAILURES" in os.environ:
            os.write(int(os.environ["EVENER_FAILURES"]), json.dumps(self._failures).encode())
        return EXIT_RUN_FAILED

    def _leave_for_disk_space(self) -> None:
        """Leave the run until the disk has room for the ranks' checkpoints; the others continue meanwhile."""
        needs_path, free = self._folder / NEEDED_BYTES_FILE, shutil.disk_usage(self._folder).free
        self._required_bytes = free + DISK_MARGIN_BYTES
        with contextlib.suppress(OSError, ValueError):
            self._required_bytes = int(read_file(needs_path))
            needs_path.unlink()
        self._disk_retry_at = self._clock() + min(DISK_RETRY_S * 2 ** min(self._num_disk_retries, 10), MAX_DISK_RETRY_S)
        self._num_disk_retries += 1
        self._consensus.phase, self._consensus.reason = HostPhase.LEAVING, ""  # no reason: it will return
        error = (
            f"{self._spec.host} has {free / 1e9:.2f} GB free, its checkpoints need {self._required_bytes / 1e9:.2f} GB"
        )
        print(f"evener: {error}", flush=True)
        with contextlib.suppress(OSError):
            RunWriter(self._folder).add_event("run.no-room", host=self._spec.host, error=error,
                                              hint="it rejoins when it has enough free space")  # fmt: skip

    def _check_disk_space(self, now: float) -> None:
        if (
            self._required_bytes is None
            or now < self._disk_retry_at
            or shutil.disk_usage(self._folder).free < self._required_bytes
        ):
            return
        self._required_bytes, consensus = None, self._consensus
        print("evener: this host has enough disk space again", flush=True)
        if consensus.phase == HostPhase.LEAVING:
            consensus.phase = self._regroup_phase() if consensus.is_member else HostPhase.WAITING

    def _reload_spec(self) -> None:
        """Read the spec again if its file changed: `evener add` writes the new host into it on all hosts."""
        with contextlib.suppress(OSError, CheckpointError):  # keep the one read before
            modified_ns = self._spec_path.stat().st_mtime_ns
            if modified_ns != self._spec_mtime_ns:
                self._spec_mtime_ns, spec = modified_ns, read_json(self._spec_path, AgentSpec)
                self._apply_hosts(spec.hosts, spec.version)

    def _apply_hosts(self, hosts: dict[str, HostEntry], version: int) -> bool:
        """Adopt this list of the hosts that may take part if it is newer and complete; return whether it is."""
        needed = {self._spec.host, *self._spec.first, *self._consensus.epoch.voters}
        if version <= self._spec.version or not hosts.keys() >= needed:
            return False
        self._spec = msgspec.structs.replace(self._spec, hosts=hosts, version=version)
        self._hang_monitor.set_hosts(hosts, self._consensus.epoch.hosts)
        return True

    def _join_epoch(self) -> None:
        """Start this host's ranks in the epoch, or move them into it, once the port of the epoch's store is known."""
        consensus, spec = self._consensus, self._spec
        first = consensus.epoch.hosts[0]
        if first == spec.host:
            port = consensus.store_port = free_port(spec.hosts[first].address)
        else:
            status = consensus.peer_status(first)
            port = status.store_port if status else 0
        if not port:
            return
        rendezvous = make_rendezvous(spec, consensus.epoch, port)
        if self._ranks is not None:
            self._ranks.set_rendezvous(rendezvous)
        elif consensus.epoch.is_cold_start:
            self._ranks, self._failures = self._start_ranks(spec, self._folder, rendezvous), []
        else:  # they ended while the epoch was decided
            consensus.phase, consensus.reason = HostPhase.FAILED, "its ranks have ended"
            return
        consensus.phase, self._have_ranks_joined = HostPhase.RUNNING, True
        self._training_since = min(self._training_since, self._clock())

    def _run_standby_ranks(self, now: float) -> None:
        """Keep standby ranks running, and set phase READY once all of them can be admitted to the next epoch."""
        consensus = self._consensus
        if self._ranks is None:
            if now >= self._restart_at:
                self._restart_at = now + min(
                    RESTART_BACKOFF_S * 2 ** min(self._num_failed_starts, 10), MAX_RESTART_BACKOFF_S
                )
                self._num_failed_starts += 1
                rendezvous = Rendezvous(epoch=consensus.epoch)
                self._ranks, self._failures = self._start_ranks(self._spec, self._folder, rendezvous), []
        elif self._ranks.poll() is not None:
            failures = self._ranks.failures()
            fatal = [failure for failure in failures if failure["exitcode"] == EXIT_HOST_NOT_RETRYABLE]
            self._kill_ranks()
            consensus.phase = HostPhase.WAITING
            if EXIT_DISK_FULL in {failure["exitcode"] for failure in failures}:
                self._leave_for_disk_space()
            elif fatal:
                rank = first_rank_of(self._spec) + fatal[0]["local_rank"]
                self._leave_run(f"rank {rank} ended with exit code {EXIT_HOST_NOT_RETRYABLE}")
        elif len(self._ranks.rank_statuses()) == self._spec.hosts[self._spec.host].num_ranks:
            consensus.phase = HostPhase.READY

    def _monitor_ranks(self, now: float) -> None:
        """Check whether the ranks still run, and set this host's phase accordingly."""
        assert self._ranks is not None
        consensus, status = self._consensus, self._ranks.poll()
        if status is None:
            if consensus.has_lost_quorum(now):
                print("evener: no quorum of the hosts is reachable: the ranks are killed until one is", flush=True)
                self._kill_ranks()
                consensus.phase = self._regroup_phase()
            elif self._spec.is_elastic:
                self._read_rank_statuses()
            return
        failures, first = self._ranks.failures(), first_rank_of(self._spec)
        for failure in failures:
            failure["rank"] = first + failure["local_rank"]  # its number in the run, not its global rank in this epoch
        self._kill_ranks()
        consensus.step = max(consensus.step, self._saved_step())
        killed = {one["local_rank"]: one["time"] for one in failures if one["exitcode"] == -signal.SIGKILL}
        if killed:
            self._killed_at |= killed
            with contextlib.suppress(OSError):  # a full disk
                write_atomic(self._folder / KILLED_RANKS_FILE, msgspec.json.encode({"at": self._killed_at}))
        codes = {failure["exitcode"] for failure in failures}
        if EXIT_DISK_FULL in codes and not self._spec.is_user_program:
            self._leave_for_disk_space()
        elif status == 0:
            consensus.phase = HostPhase.DONE
        elif codes == {EXIT_REGROUP} or status == EXIT_TERMINATED:
            consensus.phase = self._regroup_phase()
        else:
            self._on_rank_failure(failures, codes)

    def _saved_step(self) -> int:
        """Return the last step in the checkpoints, or that a user's program took after some others; -1: none."""
        run, number = RunDir(self._folder), self._consensus.epoch.number
        if not self._spec.is_user_program:
            return max([-1, *run.checkpoint_steps()[-1:]])
        with contextlib.suppress(CheckpointError):
            records = run.records(first_rank_of(self._spec), RECORDS_TAIL_BYTES)
            taken = [record.step for record in records if record.epoch == number]  # not before the ranks restarted
            return taken[-1] if len(taken) >= STEPS_AHEAD else -1
        return -1

    def _on_rank_failure(self, failures: list[dict[str, Any]], codes: set[int]) -> None:
        """Handle ranks that exited with an error: leave if a retry would fail again and others can continue."""
        consensus, me = self._consensus, self._spec.host
        if self._spec.is_user_program:
            codes = codes & {EXIT_RUN_FAILED} or {1}  # others are the program's own, and mean nothing here
        # a rank killed for lack of memory will use less of it
        own_codes = codes - {EXIT_PEER_FAILED, EXIT_REGROUP, -signal.SIGKILL}
        if consensus.epoch.is_cold_start and own_codes:  # else the other hosts' ranks kept their training state
            self._num_consecutive_failures = (
                self._num_consecutive_failures + 1 if consensus.step == self._last_failure_step else 1
            )
            self._last_failure_step = consensus.step
        self._failures = failures
        if failures:
            consensus.reason = f"rank {failures[0]['rank']} ended with exit code {failures[0]['exitcode']}"
        is_alone = consensus.epoch.hosts == [me]
        # Which host's ranks break a user's program, nobody can tell: all of them fail.
        is_hopeless = not self._spec.is_user_program and (
            EXIT_HOST_NOT_RETRYABLE in codes or (bool(own_codes) and self._num_consecutive_failures > MAX_HOST_FAILURES)
        )
        if EXIT_RUN_FAILED in codes or (EXIT_HOST_NOT_RETRYABLE in codes and is_alone):
            consensus.phase = HostPhase.FATAL
        elif is_hopeless and not is_alone:
            count = (
                ""
                if EXIT_HOST_NOT_RETRYABLE in codes
                else f" {self._num_consecutive_failures} times, and nothing was saved in between"
            )
            self._leave_run(f"{consensus.reason}{count}")
        else:
            consensus.phase = HostPhase.FAILED

    def _leave_run(self, reason: str) -> None:
        """Leave the run, until the user adds this host again."""
        consensus, me = self._consensus, self._spec.host
        consensus.phase, consensus.reason, self._leave_reason = HostPhase.LEAVING, reason, reason
        hint = f"evener logs RUN shows why; once it is fixed, evener add RUN --host {quote_word(me)} adds {me} again"
        with contextlib.suppress(OSError):  # a full disk
            write_atomic(self._exclusion_path, reason.encode())
            RunWriter(self._folder).add_event("run.leaves", host=me, error=f"{me} leaves the run: {reason}", hint=hint)

    def _read_rank_statuses(self) -> None:
        """Read the ranks' statuses: the step they reached, and whether they request a new epoch."""
        assert self._ranks is not None
        consensus, number = self._consensus, self._consensus.epoch.number
        statuses = self._ranks.rank_statuses().values()
        in_epoch = [status for status in statuses if status.epoch_number >= 0]
        consensus.has_training_state = len(in_epoch) == self._spec.hosts[self._spec.host].num_ranks
        consensus.step = max([consensus.step, *(status.step for status in in_epoch)])
        requests = {status.regroup_reason for status in in_epoch if status.epoch_number == number} - {""}
        if PEER_LOST in requests:
            consensus.phase = HostPhase.PEER_LOST
        elif requests:
            consensus.phase = self._regroup_phase()

    def _detect_hang(self, now: float) -> None:
        """Sample this host's ranks, and kill them if one hangs and blocks the others for too long."""
        assert self._ranks is not None
        consensus, first = self._consensus, first_rank_of(self._spec)
        consensus.process_samples = {first + local: sample for local, sample in self._ranks.sample_processes().items()}
        consensus.sampled_at = now
        if (hang := self._hang_monitor.observe(now, consensus)) is not None:
            self._kill_ranks()
            consensus.phase, consensus.reason = HostPhase.FAILED, describe_hang(hang)

    def _regroup_phase(self) -> HostPhase:
        """Return the phase that requests a new epoch: with this host, or without it if it is to leave."""
        is_leaving = self._leave_reason or self._required_bytes is not None or self._exclusion_path.exists()
        return HostPhase.LEAVING if is_leaving else HostPhase.REGROUPING

    def _kill_ranks(self) -> None:
        if self._clock() - self._training_since > BACKOFF_RESET_S:
            self._num_failed_starts = 0
        self._training_since = math.inf
        if self._ranks is not None:
            self._ranks.kill()
            self._ranks = None
            self._hang_monitor.forget_hang()
        self._have_ranks_joined = self._consensus.has_training_state = False

    def _can_exit(self, now: float) -> bool:
        """Return whether the others know that the run has ended, or had enough time to learn it."""
        self._ended_at = self._ended_at or now
        consensus = self._consensus
        statuses = [consensus.peer_status(host) for host in consensus.epoch.hosts if host != consensus.host]
        is_done = consensus.epoch.is_over or not consensus.is_member
        all_know = all(status is not None and (is_done or status.phase == HostPhase.DONE) for status in statuses)
        all_know = all_know and (is_done or not consensus.waiting_hosts(now))
        # Without this agent, the others would begin anew while a user's rank works on alone, to evaluate or to save.
        if self._spec.is_user_program and not is_done and consensus.has_running_peer(now):
            return False
        return all_know or now - self._ended_at > LINGER_S


def main() -> int:
    folder = Path(sys.argv[1])
    try:
        return asyncio.run(HostAgent(read_json(folder / AGENT_SPEC_FILE, AgentSpec), folder).run())
    except CheckpointError as error:
        reason = str(error)
    except OSError as error:  # a host cannot promise what it cannot write down
        reason = f"{error.filename or folder}: {error.strerror}"
    hint = "the others continue without this host; the run's next start, evener train --resume RUN, includes it again"
    print(f"error: {reason}\nhint:  {hint}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
