"""How are one host's ranks started and watched? torchrun itself, with five things that it leaves open settled.

    python -m evener.worker.torchrun --nnodes=2 --rdzv-backend=evener --rdzv-endpoint=ADDRESS:PORT
                                     --rdzv-conf=rank=1 -m X

- The rendezvous is static (node rank = rank in --rdzv-conf), and its store listens on ADDRESS alone, where torch's own
  listens on every interface.
- Exit codes of ranks are written to the descriptor $EVENER_FAILURES as JSON, not only into a log.
- When a host has failed, whatever the way, the agents of the others hear it through the store and end their ranks:
  nobody waits half an hour for a rank that is gone, and no controller is needed for it.
- The first host, which has the store, stays until nobody needs it, however much longer the others' ranks take.
- Where torch has no accelerator accelerate hears it, as `accelerate launch --cpu` has it: else each rank would be a
  world of its own, train a model alone, and say nothing.

What the store says, under evener/RUN:

    node/RANK        how many agents came as this node           beat/RANK   grows as long as the agent runs
    node/RANK/host   the name of the (first) host that did       left/RANK   the agent has ended, or heard of a failure
    failed           the first failure: whose it is, and why
"""

from __future__ import annotations

import contextlib
import datetime
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
from typing import Any

import psutil
import torch
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.registry import handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_args, run

from evener.worker.group import leave

FAILED = "failed"
LOOK_EVERY_S = 0.5
JOIN_S = 180.0  # that hosts wait for each other at the start: Python and torch may come from a cold, slow disk
REFUSED_S = 10.0  # the first host's agent is gone when its port has refused for so long
# A peer that says nothing may only be out of reach. A run must outlive 30 s without a link. TCP waits twice as long
# between attempts each time, so that such a peer can take 60 s to be heard again; and half as much for good measure.
SILENT_S = 90.0
END_S = 15.0  # for torchrun to end its ranks, which takes its --shutdown-timeout at most
LINGER_S = 5.0  # that the first host keeps its store after a failure, so that the others can hear of it
LATE_S = 30.0  # the same while there are hosts that have not come yet
EXIT_STATUS_STOPPED = 128 + signal.SIGTERM


class Rendezvous(StaticTCPRendezvous):
    """torch's static rendezvous with a store that listens on one address, and that knows who failed.

    torch's calls to a store whose host has vanished never return. Hence three threads: torchrun's own; one that looks
    into the store; and one that judges by what the other saw, and when.
    """

    def __init__(self, address: str, port: int, rank: int, num_nodes: int, run_id: str, timeout_s: int) -> None:
        super().__init__(address, port, rank, num_nodes, run_id, timeout_s)
        self._ended = False
        self._hear_by = 0.0  # when the store must have been heard again
        self._refused_since: float | None = None
        self._failure: str | None = None  # that was heard of
        self.verdict: str | None = None  # why this host's ranks are ended
        self._beats: dict[int, tuple[int, float]] = {}  # on the first host, of the others: the last one, and when

    def get_backend(self) -> str:
        return "evener"

    def open(self) -> None:
        """Start the store, or find it, and look into it from now on."""
        self._hear_by = time.monotonic() + self.timeout.total_seconds() + REFUSED_S
        threading.Thread(target=self._judge, daemon=True).start()
        server = self.rank == 0
        listener = _listen(self.master_addr, self.master_port) if server else None
        if listener is not None:
            self.master_port = listener.getsockname()[1]  # a host that is alone asks for 0: any that is free
        try:
            store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                server,
                self.timeout,
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        except RuntimeError as error:
            told = f"the first host's store does not answer on {self.master_addr}:{self.master_port}"
            raise SystemExit(f"error: net.no-store: {told}: {str(error).splitlines()[0]}") from None
        self._store = store
        self._introduce(self._ours(store))
        self._hear_by = time.monotonic() + SILENT_S
        threading.Thread(target=self._look, daemon=True).start()

    def next_rendezvous(self) -> RendezvousInfo:
        assert self._store is not None
        return RendezvousInfo(
            PrefixStore(self.run_id, self._store),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )

    def stay(self) -> None:
        """On the first host, return when no other needs the store any more. torchrun itself waits 300 s at most."""
        assert self._store is not None
        while self.rank == 0 and self._remaining(self._ours(self._store)):
            time.sleep(LOOK_EVERY_S / 5)

    def close(self, why: str | None) -> None:
        """Let the other hosts know that this one leaves, and why if it failed; the first stays until they do."""
        self._ended = True
        keeps_store = self.rank == 0 and self._store is not None
        is_early = self.rank > 0 and self._store is None and why is not None  # perhaps earlier than the store
        leaving = threading.Thread(target=self._leave, args=(why, keeps_store, is_early), daemon=True)
        leaving.start()
        leaving.join(LATE_S if keeps_store or is_early else LINGER_S)

    def _leave(self, why: str | None, keeps_store: bool, is_early: bool) -> None:
        began, store = time.monotonic(), None
        with contextlib.suppress(OSError, RuntimeError):
            while store is None:
                try:
                    store = self._connect(LINGER_S)
                except ConnectionRefusedError:
                    if not is_early:
                        return
                    time.sleep(LOOK_EVERY_S)
            if why is not None:
                _fail(store, _host(), why)
            store.set(f"left/{self.rank}", "")
            while keeps_store and (remaining := self._remaining(store)):
                all_came = all(store.check([f"node/{rank}"]) for rank in remaining)
                if all_came and time.monotonic() - began > LINGER_S:
                    return
                time.sleep(LOOK_EVERY_S / 10)

    def _remaining(self, store: Store) -> list[int]:
        """Other nodes that may still need the store."""
        return [rank for rank in range(self.world_size) if rank != self.rank and not store.check([f"left/{rank}"])]

    def _ours(self, store: Store) -> Store:
        """Should another run's store be on this port, neither will mistake the other's failures for its own."""
        return PrefixStore(f"evener/{self.run_id}", store)

    def _connect(self, timeout_s: float) -> Store:
        """A connection of a thread's own. OSError or RuntimeError, torch's name for a store that is gone."""
        socket.create_connection((self.master_addr, self.master_port), timeout_s).close()  # torch insists, and loudly
        return self._ours(
            TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                False,
                datetime.timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        )

    def _introduce(self, store: Store) -> None:
        """Two agents with one node rank would both start the same ranks and hang: name both instead."""
        if store.add(f"node/{self.rank}", 1) > 1:
            other = store.get(f"node/{self.rank}/host").decode()
            raise SystemExit(f"error: rank.duplicate: {_host()} and {other} were both started as node {self.rank}")
        store.set(f"node/{self.rank}/host", _host())
        try:
            store.wait(["node/0/host"], datetime.timedelta(seconds=REFUSED_S))
        except RuntimeError:
            where = f"{self.master_addr}:{self.master_port}"
            raise SystemExit(f"error: port.in-use: the store on {where} is that of another run") from None

    def _look(self) -> None:
        """Beat, and hear of failures; the first host also listens to the others' beats."""
        store = None
        while not self._ended:
            try:
                store = store or self._connect(REFUSED_S)
                store.add(f"beat/{self.rank}", 1)
                if self.rank == 0:
                    self._find_silent(store)
                if store.check([FAILED]):
                    first = _failure_in(store.get(FAILED))
                    store.set(f"left/{self.rank}", "")
                    self._failure = first
                    return
                self._hear_by, self._refused_since = time.monotonic() + SILENT_S, None
            except ConnectionRefusedError:
                self._refused_since = self._refused_since or time.monotonic()
            except (OSError, RuntimeError):
                store = None
            time.sleep(LOOK_EVERY_S)

    def _find_silent(self, store: Store) -> None:
        now = time.monotonic()
        for rank in self._remaining(store):
            beat = store.add(f"beat/{rank}", 0)
            if beat and beat != self._beats.get(rank, (0, now))[0]:
                self._beats[rank] = beat, now
            elif beat and now - self._beats[rank][1] > SILENT_S:
                host = store.get(f"node/{rank}/host").decode(errors="replace")
                _fail(store, host, f"nothing was heard of it for {SILENT_S:.0f} s")

    def _judge(self) -> None:
        """End this host's ranks when another host has failed, or when the first host is gone."""
        where = f"the store on {self.master_addr}:{self.master_port}"
        while self.verdict is None:
            time.sleep(LOOK_EVERY_S / 5)
            now = time.monotonic()
            if self._ended:
                return
            if self._failure is not None:
                self.verdict = self._failure
            elif self._refused_since is not None and now - self._refused_since > REFUSED_S:
                self.verdict = f"{where} is gone"
            elif now > self._hear_by:
                self.verdict = f"nothing was heard of {where}"
        self._end_ranks(self.verdict)

    def _end_ranks(self, why: str) -> None:
        """SIGTERM makes torchrun end its ranks. Then it may itself wait for the other hosts, deaf to signals."""
        print(f"evener: ending the ranks on {_host()}: {why}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while psutil.Process().children() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)  # the usual way out is the better one
        self.close(None)
        leave(EXIT_STATUS_STOPPED)


def main() -> int:
    """torchrun's main; the exit status is 0, 1 for a rank or an agent that failed, 143 when told to stop."""
    args = parse_args(sys.argv[1:])
    address, port = parse_rendezvous_endpoint(args.rdzv_endpoint, -1)
    settings = dict(one.split("=", 1) for one in args.rdzv_conf.split(","))
    timeout_s = int(settings.get("timeout", JOIN_S))
    rendezvous = Rendezvous(address, port, int(settings["rank"]), int(args.nnodes), args.rdzv_id, timeout_s)
    handler_registry.register("evener", lambda parameters: rendezvous)
    if not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    _let_signals_through_logging()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _stop)  # until torchrun does the same
    try:
        status, why = _take_part(rendezvous, args)
    except SignalException:
        status, why = EXIT_STATUS_STOPPED, rendezvous.verdict or "it was told to stop"
    except SystemExit as error:
        print(error, file=sys.stderr)
        status, why = 1, str(error).removeprefix("error: ")
    except BaseException as error:
        traceback.print_exc()
        status, why = 1, f"{type(error).__name__}: {error}".splitlines()[0]
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # it is ending
    rendezvous.close(why)
    return status


def _take_part(rendezvous: Rendezvous, args: Namespace) -> tuple[int, str | None]:
    """Exit status, and why the others must end, too."""
    try:
        rendezvous.open()
        run(args)
        rendezvous.stay()
    except ChildFailedError as error:
        failures: list[dict[str, Any]] = [
            {
                "rank": rank,
                "local_rank": one.local_rank,
                "pid": one.pid,
                "exitcode": one.exitcode,
                "time": one.timestamp,
            }
            for rank, one in sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        ]
        if "EVENER_FAILURES" in os.environ:
            os.write(int(os.environ["EVENER_FAILURES"]), json.dumps(failures).encode())  # no file: a disk may be full
        return 1, f"rank {failures[0]['rank']} ended with exit code {failures[0]['exitcode']}"
    return 0, None


def _stop(signum: int, frame: Any) -> None:
    raise SignalException(f"got signal {signum}", signal.Signals(signum))


def _let_signals_through_logging() -> None:
    """logging prints an exception that comes while it writes a line, and goes on. One that a signal raises is an order:
    printed it is 37 lines that look like a failure, and nobody obeys it.
    """
    tell = logging.Handler.handleError

    def handle_error(handler: logging.Handler, record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), SignalException):
            raise  # what emit() caught
        tell(handler, record)

    logging.Handler.handleError = handle_error  # type: ignore[method-assign, assignment]


def _fail(store: Store, host: str, why: str) -> None:
    """Only the first failure is kept."""
    store.compare_set(FAILED, "", json.dumps({"host": host, "why": why}))


def _failure_in(told: bytes) -> str:
    """What `_fail` wrote. The store has no password: it may be anything."""
    try:
        first = json.loads(told)
        return f"{first['host']} failed: {first['why']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"the store says that a host failed, in words that are none of ours: {told[:80]!r}"


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            told = f"{_host()} was started as node 0, whose address {address} is not its own"
            raise SystemExit(f"error: rank.duplicate: {told}") from None
        raise SystemExit(f"error: port.in-use: {address}:{port}: {error.strerror}") from None
    listener.listen(1024)
    return listener


def _host() -> str:
    return os.environ.get("EVENER_HOST") or socket.gethostname()


if __name__ == "__main__":
    leave(main())
