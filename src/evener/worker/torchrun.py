"""Start and monitor one host's ranks: torchrun with a failure detector and five other additions.

    EVENER_KEY_FILE=FILE python -m evener.worker.torchrun --nnodes=2 --rdzv-backend=evener
                                     --rdzv-endpoint=ADDRESS:PORT --rdzv-conf=rank=1 -m X

- The rendezvous is static (node rank = rank in --rdzv-conf). Its store listens on 127.0.0.1 of the first host, where
  torch's own listens on every interface. Other hosts reach it through a gate on ADDRESS:PORT, which lets in who has the
  run's key, the content of FILE (`evener.node.agent.store_tunnel`). The ranks of all hosts get MASTER_ADDR=127.0.0.1.
- Exit codes of ranks are written to the descriptor $EVENER_FAILURES as JSON, not only into a log.
- When a host has failed, for whatever reason, the agents of the others learn it from the store and end their ranks:
  they do not wait half an hour for a lost rank, and need no controller.
- The first host, which hosts the store, stays until no other needs it, however much longer the others' ranks take.
- If torch has no accelerator, accelerate is told to use the CPU, as by `accelerate launch --cpu`: otherwise each rank
  would silently train a model alone, in a world of size 1.
- The ranks of a user's program are instrumented (`evener.worker.script`). When they wait in different collectives, all
  are ended with what each called.

Keys in the store, under evener/RUN:

    node/RANK        number of agents that joined as this node   beat/RANK   heartbeat: a counter, as long as it runs
    node/RANK/host   name of the (first) host that did           left/RANK   the agent has ended, or knows of a failure
    calls/RANK      the newest collectives of its ranks      failed      the first failure: host and reason
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.registry import handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_args, run

from evener.core.base.errors import CheckpointError
from evener.core.run.membership_epoch import EXIT_TERMINATED, has_dynamic_membership, read_run_key
from evener.core.script.variables import FIRST_RANK_VARIABLE, OPTIONS_VARIABLE
from evener.node.agent.store_tunnel import LOOPBACK, StoreGate, StoreProxy
from evener.node.remote.sockets import listen
from evener.worker.rank.process_groups import exit_immediately, open_store
from evener.worker.script.collective_watch import CollectiveWatch
from evener.worker.script.report import run_folder

STARTUP_FOLDER = Path(__file__).with_name("script") / "startup"
FAILURE_KEY = "failed"
NODE_HEARTBEAT_INTERVAL_S = 0.5
JOIN_TIMEOUT_S = 180.0  # for all hosts to join: Python and torch may load from a cold, slow disk
REFUSED_TIMEOUT_S = 10.0  # the first host's agent is dead when its port has refused connections this long
# A silent peer may only be unreachable. A run must survive 30 s without a link. TCP doubles its wait between attempts,
# so that such a peer can take 60 s to be reachable again; half as much is added as a margin.
HEARTBEAT_TIMEOUT_S = 90.0
SHUTDOWN_TIMEOUT_S = 15.0  # for torchrun to end its ranks, which takes at most its --shutdown-timeout
STORE_LINGER_S = 5.0  # that the first host keeps the store after a failure, so that the others can read it
LATE_NODE_LINGER_S = 30.0  # the same while some hosts have not joined yet


class FailureDetectingRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous with a store on one address, heartbeats and a failure detector.

    torch's calls to a store whose host has vanished never return. Hence there are three threads: torchrun's own; one
    that reads and writes the store; and one that ends the ranks if the second has read a failure or no longer reaches
    the store.
    """

    def __init__(
        self, address: str, port: int, rank: int, num_nodes: int, run_id: str, timeout_s: int, key: bytes
    ) -> None:
        super().__init__(address, port, rank, num_nodes, run_id, timeout_s)
        self._key = key  # of the run; a single host needs none
        self._proxy = StoreProxy((address, port), key, run_id) if rank > 0 else None
        self._store_port = 0 if self._proxy is None else self._proxy.port  # of 127.0.0.1
        self._has_ended = False
        self._store_deadline = 0.0  # deadline for the next successful store operation
        self._refused_since: float | None = None
        self._reported_failure: str | None = None  # of another host, from the store
        self.stop_reason: str | None = None  # why this host's ranks are ended
        self.collective_watch: CollectiveWatch | None = None  # of a user's program
        self.stopped_status = EXIT_TERMINATED  # exit status when this host's ranks are ended
        # on the first host: the others' last counter, and when it grew
        self._heartbeats: dict[int, tuple[int, float]] = {}

    def get_backend(self) -> str:
        return "evener"

    def watch_collectives(self, num_ranks: int) -> None:
        """Watch the collectives of this host's ranks, of which every host has as many; on the first host, of all."""
        if (folder := run_folder()) is not None:
            first_rank = int(os.environ.get(FIRST_RANK_VARIABLE, "0"))
            self.collective_watch = CollectiveWatch(folder, first_rank, num_ranks, self.rank, self.world_size)

    def start(self) -> None:
        """Start the store or connect to it, then start the heartbeats and the failure detector."""
        self._store_deadline = time.monotonic() + self.timeout.total_seconds() + REFUSED_TIMEOUT_S
        threading.Thread(target=self._failure_detector_loop, daemon=True).start()
        try:
            self._store = self._serve_store() if self._proxy is None else self._join_store(self._proxy)
        except RuntimeError as error:
            raise self._no_store_error(str(error).splitlines()[0]) from None
        self._register_node(self._namespaced(self._store))
        self._store_deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S
        threading.Thread(target=self._heartbeat_loop, daemon=True).start()

    def _serve_store(self) -> Store:
        """Start the store and, if there are other hosts, the gate to it."""
        gate_listener = _listen(self.master_addr, self.master_port) if self.world_size > 1 else None
        listener = listen(LOOPBACK, 0)
        self._store_port = listener.getsockname()[1]
        store = self._open_store(self.timeout.total_seconds(), listener)
        if gate_listener is not None:
            StoreGate(gate_listener, self._key, self.run_id, self._store_port)
        return store

    def _join_store(self, proxy: StoreProxy) -> Store:
        """Wait for the first host's gate, and connect to its store. SystemExit if it lets nothing through in time."""
        if not proxy.wait_ready(self.timeout.total_seconds()):
            raise self._no_store_error(proxy.problem)
        return self._open_store(self.timeout.total_seconds(), None)

    def _no_store_error(self, reason: str) -> SystemExit:
        problem = f"cannot reach the first host's store through {self.master_addr}:{self.master_port}"
        return SystemExit(f"error: net.no-store: {problem}: {reason}")

    def next_rendezvous(self) -> RendezvousInfo:
        assert self._store is not None
        return RendezvousInfo(
            PrefixStore(self.run_id, self._store),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(LOOPBACK, self._store_port),
        )

    def wait_for_other_nodes(self) -> None:
        """On the first host, wait until no other node needs the store. torchrun itself waits at most 300 s."""
        assert self._store is not None
        while self.rank == 0 and self._remaining_nodes(self._namespaced(self._store)):
            time.sleep(NODE_HEARTBEAT_INTERVAL_S / 5)

    def flush(self) -> None:
        """Wait until the store has received what torchrun sent: the proxy ends with this process."""
        with contextlib.suppress(RuntimeError):  # it is gone
            _flush(self._store)

    def close(self, why: str | None) -> None:
        """Announce that this host leaves, and why if it failed; the first host then waits for the others to leave."""
        self._has_ended = True
        keeps_store = self.rank == 0 and self._store is not None
        is_early = self.rank > 0 and self._store is None and why is not None  # the store may not be up yet
        leaving = threading.Thread(target=self._announce_exit, args=(why, keeps_store, is_early), daemon=True)
        leaving.start()
        leaving.join(LATE_NODE_LINGER_S if keeps_store or is_early else STORE_LINGER_S)

    def _announce_exit(self, why: str | None, keeps_store: bool, is_early: bool) -> None:
        began, store = time.monotonic(), None
        with contextlib.suppress(OSError, RuntimeError):
            while store is None:
                try:
                    store = self._connect(STORE_LINGER_S)
                except ConnectionRefusedError:
                    if not is_early:
                        return
                    time.sleep(NODE_HEARTBEAT_INTERVAL_S)
            if why is not None:
                _publish_failure(store, _host_name(), why)
            store.set(f"left/{self.rank}", "")
            _flush(store)
            while keeps_store and (remaining := self._remaining_nodes(store)):
                all_came = all(store.check([f"node/{rank}"]) for rank in remaining)
                if all_came and time.monotonic() - began > STORE_LINGER_S:
                    return
                time.sleep(NODE_HEARTBEAT_INTERVAL_S / 10)

    def _remaining_nodes(self, store: Store) -> list[int]:
        """Return the other nodes that may still need the store."""
        return [rank for rank in range(self.world_size) if rank != self.rank and not store.check([f"left/{rank}"])]

    def _namespaced(self, store: Store) -> Store:
        """Return a view of the store with this run's prefix: another run's store may be on this port."""
        return PrefixStore(f"evener/{self.run_id}", store)

    def _connect(self, timeout_s: float) -> Store:
        """Connect to the store, once per thread. Raise OSError, or RuntimeError where torch finds the store gone."""
        # torch would retry a refused connection, and log each attempt; a proxy does not refuse when the store is gone.
        first_host = (LOOPBACK, self._store_port) if self._proxy is None else (self.master_addr, self.master_port)
        socket.create_connection(first_host, timeout_s).close()
        if self._proxy is not None and not self._proxy.wait_ready(timeout_s):
            raise TimeoutError(self._proxy.problem)
        return self._namespaced(self._open_store(timeout_s, None))

    def _open_store(self, timeout_s: float, listener: socket.socket | None) -> Store:
        return open_store(LOOPBACK, self._store_port, self.world_size, timeout_s, listener)

    def _register_node(self, store: Store) -> None:
        """Register this node; raise SystemExit if another has its node rank, as both would start the same ranks."""
        if store.add(f"node/{self.rank}", 1) > 1:
            other = store.get(f"node/{self.rank}/host").decode()
            raise SystemExit(f"error: rank.duplicate: {_host_name()} and {other} were both started as node {self.rank}")
        store.set(f"node/{self.rank}/host", _host_name())

    def _heartbeat_loop(self) -> None:
        """Send heartbeats and read failures; the first host also checks the others' heartbeats."""
        store = None
        while not self._has_ended:
            try:
                store = store or self._connect(REFUSED_TIMEOUT_S)
                store.add(f"beat/{self.rank}", 1)
                if self.rank == 0:
                    self._detect_silent_nodes(store)
                if self.collective_watch is not None and (mismatch := self.collective_watch.observe(store)):
                    self.collective_watch.record_mismatch(mismatch)
                    if has_dynamic_membership():
                        self.stopped_status = 1  # a failure, which is not repeated for ever
                    _publish_failure(store, _host_name(), f"rank {mismatch.rank} {mismatch.describe()}")
                if store.check([FAILURE_KEY]):
                    first = _parse_failure(store.get(FAILURE_KEY))
                    store.set(f"left/{self.rank}", "")
                    self._reported_failure = first
                    return
                self._store_deadline, self._refused_since = time.monotonic() + HEARTBEAT_TIMEOUT_S, None
            except ConnectionRefusedError:
                self._refused_since = self._refused_since or time.monotonic()
            except (OSError, RuntimeError):
                store = None
            time.sleep(NODE_HEARTBEAT_INTERVAL_S)

    def _detect_silent_nodes(self, store: Store) -> None:
        now = time.monotonic()
        for rank in self._remaining_nodes(store):
            beat = store.add(f"beat/{rank}", 0)
            if beat and beat != self._heartbeats.get(rank, (0, now))[0]:
                self._heartbeats[rank] = beat, now
            elif beat and now - self._heartbeats[rank][1] > HEARTBEAT_TIMEOUT_S:
                host = store.get(f"node/{rank}/host").decode(errors="replace")
                _publish_failure(store, host, f"nothing was heard of it for {HEARTBEAT_TIMEOUT_S:.0f} s")

    def _failure_detector_loop(self) -> None:
        """End this host's ranks when another host has failed or the store is gone."""
        where = f"the store on {self.master_addr}:{self.master_port}"
        while self.stop_reason is None:
            time.sleep(NODE_HEARTBEAT_INTERVAL_S / 5)
            now = time.monotonic()
            if self._has_ended:
                return
            if self._reported_failure is not None:
                self.stop_reason = self._reported_failure
            elif self._refused_since is not None and now - self._refused_since > REFUSED_TIMEOUT_S:
                self.stop_reason = f"{where} is gone"
            elif now > self._store_deadline:
                self.stop_reason = f"nothing was heard of {where}"
        self._end_ranks(self.stop_reason)

    def _end_ranks(self, why: str) -> None:
        """End the ranks by SIGTERM to torchrun, then exit: torchrun may wait for other hosts and ignore signals."""
        print(f"evener: ending the ranks on {_host_name()}: {why}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        while psutil.Process().children() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)  # prefer the regular exit
        self.close(None)
        exit_immediately(self.stopped_status)


def main() -> int:
    """Run torchrun. Return 0, 1 if a rank or this agent failed, or 143 (128 + SIGTERM) if it was asked to stop."""
    args = parse_args(sys.argv[1:])
    address, port = parse_rendezvous_endpoint(args.rdzv_endpoint, -1)
    settings = dict(setting.split("=", 1) for setting in args.rdzv_conf.split(","))
    timeout_s, num_nodes = int(settings.get("timeout", JOIN_TIMEOUT_S)), int(args.nnodes)
    try:
        key_file = os.environ.get("EVENER_KEY_FILE")
        key = read_run_key(Path(key_file) if key_file else None) if num_nodes > 1 else b""
    except CheckpointError as error:
        print(f"error: {error}\nhint:  {error.hint}", file=sys.stderr)
        return 1
    rendezvous = FailureDetectingRendezvous(
        address, port, int(settings["rank"]), num_nodes, args.rdzv_id, timeout_s, key
    )
    handler_registry.register("evener", lambda parameters: rendezvous)
    if OPTIONS_VARIABLE in os.environ:
        python_path = [str(STARTUP_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(python_path)
        # A shell script's `python` is the one that has torch, as on a terminal where its environment is active.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        if "independent" not in os.environ[OPTIONS_VARIABLE].split(","):
            rendezvous.watch_collectives(int(args.nproc_per_node))
    if not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    _let_signals_through_logging()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _raise_signal)  # until torchrun does the same
    try:
        status, why = _run_torchrun(rendezvous, args)
    except SignalException:
        status, why = rendezvous.stopped_status, rendezvous.stop_reason or "it was asked to stop"
    except SystemExit as error:
        print(error, file=sys.stderr)
        status, why = 1, str(error).removeprefix("error: ")
    except BaseException as error:
        traceback.print_exc()
        status, why = 1, f"{type(error).__name__}: {error}".splitlines()[0]
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # it is ending
    if status and rendezvous.collective_watch is not None:
        with contextlib.suppress(OSError):  # a full disk
            rendezvous.collective_watch.record_calls()
    rendezvous.close(why)
    return status


def _run_torchrun(rendezvous: FailureDetectingRendezvous, args: Namespace) -> tuple[int, str | None]:
    """Run torchrun; return the exit status and, if a rank failed, the reason why the other hosts must end too."""
    try:
        rendezvous.start()
        run(args)
        rendezvous.flush()
        rendezvous.wait_for_other_nodes()
    except ChildFailedError as error:
        failures: list[dict[str, Any]] = [
            {
                "rank": rank,
                "local_rank": failure.local_rank,
                "pid": failure.pid,
                "exitcode": failure.exitcode,
                "time": failure.timestamp,
            }
            for rank, failure in sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        ]
        if "EVENER_FAILURES" in os.environ:
            os.write(int(os.environ["EVENER_FAILURES"]), json.dumps(failures).encode())  # no file: a disk may be full
        return 1, f"rank {failures[0]['rank']} ended with exit code {failures[0]['exitcode']}"
    return 0, None


def _raise_signal(signum: int, frame: Any) -> None:
    raise SignalException(f"got signal {signum}", signal.Signals(signum))


def _let_signals_through_logging() -> None:
    """Make logging re-raise SignalException instead of printing it.

    logging prints an exception raised while it writes a line, and continues: a stop signal would become 37 lines that
    look like a failure, and be ignored.
    """
    default_handle_error = logging.Handler.handleError

    def handle_error(handler: logging.Handler, record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), SignalException):
            raise  # what emit() caught
        default_handle_error(handler, record)

    logging.Handler.handleError = handle_error  # type: ignore[method-assign, assignment]


def _flush(store: Store | None) -> None:
    """Wait until the store has received what was sent to it: only some operations wait for a reply, as `check` does."""
    assert store is not None
    store.check([FAILURE_KEY])


def _publish_failure(store: Store, host: str, why: str) -> None:
    """Publish a failure; the store keeps the first one only."""
    store.compare_set(FAILURE_KEY, "", json.dumps({"host": host, "why": why}))


def _parse_failure(payload: bytes) -> str:
    """Describe what `_publish_failure` wrote. Ranks can write into the store, too: the payload may be anything."""
    try:
        first = json.loads(payload)
        return f"{first['host']} failed: {first['why']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"the store holds a failure in an unknown format: {payload[:80]!r}"


def _listen(address: str, port: int) -> socket.socket:
    try:
        return listen(address, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            problem = f"{_host_name()} was started as node 0, whose address {address} is not its own"
            raise SystemExit(f"error: rank.duplicate: {problem}") from None
        raise SystemExit(f"error: port.in-use: {address}:{port}: {error.strerror}") from None


def _host_name() -> str:
    return os.environ.get("EVENER_HOST") or socket.gethostname()


if __name__ == "__main__":
    exit_immediately(main())
