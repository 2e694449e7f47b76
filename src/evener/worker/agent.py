"""How are one host's ranks started and watched? torchrun itself, with three things that it leaves open settled.

    python -m evener.worker.agent --nnodes=2 --rdzv-backend=evener --rdzv-endpoint=ADDRESS:PORT --rdzv-conf=rank=1 -m X

- The rendezvous is static (node rank = rank in --rdzv-conf), and its store listens on ADDRESS alone, where torch's own
  listens on every interface.
- Exit codes of ranks are written to $EVENER_FAILURES as JSON, not only into a log.
- When the ranks of one host have failed, the agents of the others hear it through the store and end theirs: nobody
  waits half an hour for a rank that is gone, and no controller is needed for it.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.registry import handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_args, run

from evener.worker.group import leave

FAILED = "evener/failed"  # key of the first failure
LOOK_EVERY_S = 0.5
STORE_LOST_S = 10.0  # the first host is gone when its store has been silent for so long
END_S = 15.0  # for torchrun to end its ranks, which takes its --shutdown-timeout at most
LINGER_S = 5.0  # that the first host keeps its store, so that the others can hear of a failure
EXIT_STATUS_STOPPED = 128 + signal.SIGTERM


class Rendezvous(StaticTCPRendezvous):
    """torch's static rendezvous with a store that listens on one address, and that knows who failed."""

    def __init__(self, address: str, port: int, rank: int, num_nodes: int, run_id: str, timeout_s: int) -> None:
        super().__init__(address, port, rank, num_nodes, run_id, timeout_s)
        self.ended = False

    def get_backend(self) -> str:
        return "evener"

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            server = self.rank == 0
            listener = _listen(self.master_addr, self.master_port) if server else None
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                server,
                self.timeout,
                wait_for_workers=False,
                **({"master_listen_fd": listener.detach()} if listener else {}),
            )
            self._introduce(self._store)
            threading.Thread(target=self._watch, daemon=True).start()
        return RendezvousInfo(
            PrefixStore(self.run_id, self._store),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )

    def tell_failure(self, failures: list[dict[str, Any]]) -> None:
        """Let the other hosts know; on the first host, keep the store until they do."""
        if self._store is None:
            return
        try:
            if self._store.add("evener/failures", 1) == 1:
                self._store.set(FAILED, json.dumps({"host": _host(), "failures": failures}))
            deadline = time.monotonic() + LINGER_S
            while self.rank == 0 and time.monotonic() < deadline:
                if self._store.add("evener/heard", 0) >= self.world_size - 1:
                    return
                time.sleep(0.05)
        except RuntimeError:  # torch's name for a store that is gone
            pass

    def _introduce(self, store: Store) -> None:
        """Two agents with one node rank would both start the same ranks and hang: name both instead."""
        if store.add(f"evener/node/{self.rank}", 1) > 1:
            other = store.get(f"evener/node/{self.rank}/host").decode()
            raise SystemExit(f"error: rank.duplicate: {_host()} and {other} were both started as node {self.rank}")
        store.set(f"evener/node/{self.rank}/host", _host())

    def _watch(self) -> None:
        """End this host's ranks when another host's have failed, or when the first host is gone."""
        store = TCPStore(self.master_addr, self.master_port, self.world_size, False,
                         datetime.timedelta(seconds=STORE_LOST_S), wait_for_workers=False)  # fmt: skip
        silent_since = None
        while not self.ended:
            try:
                if store.check([FAILED]):
                    store.add("evener/heard", 1)
                    first = json.loads(store.get(FAILED))
                    if first["host"] != _host():
                        _end_ranks(f"a rank on {first['host']} failed first")
                    return
                silent_since = None
            except RuntimeError:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > STORE_LOST_S:
                    _end_ranks(f"the store on {self.master_addr}:{self.master_port} is gone")
                    return
            time.sleep(LOOK_EVERY_S)


def main() -> int:
    """torchrun's main; the exit status is 0, 1 for a rank that failed, 143 when told to stop."""
    rendezvous: list[Rendezvous] = []

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        address, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
        timeout_s = int(parameters.get("timeout", 600))
        rank = parameters.get_as_int("rank")
        assert rank is not None, "--rdzv-conf rank=N"
        rendezvous.append(Rendezvous(address, port, rank, parameters.max_nodes, parameters.run_id, timeout_s))
        return rendezvous[0]

    handler_registry.register("evener", create)
    status, failures = 0, []
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        failures = [
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
            Path(os.environ["EVENER_FAILURES"]).write_text(json.dumps(failures))
        status = 1
    except SignalException:
        status = EXIT_STATUS_STOPPED
    for one in rendezvous:
        one.ended = True
        if failures:
            one.tell_failure(failures)
    return status


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


def _end_ranks(why: str) -> None:
    """SIGTERM makes torchrun end its ranks. When they are gone it may itself wait for the other hosts, deaf to signals."""
    print(f"evener: ending the ranks on {_host()}: {why}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + END_S
    while psutil.Process().children() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)  # the usual way out is the better one
    leave(EXIT_STATUS_STOPPED)


def _host() -> str:
    return os.environ.get("EVENER_HOST") or socket.gethostname()


if __name__ == "__main__":
    leave(main())
