"""Tell the first failure from the failures that follow it."""

from __future__ import annotations

import traceback

import pytest

from evener.core.base.errors import RunError
from evener.core.run.peer_failure import PEER_FAILURE_PATTERN, PeersLostError, is_peer_failure

AFTER = [
    "[../gloo/transport/tcp/pair.cc:542] Connection closed by peer [10.77.0.2]:41234",
    "[../gloo/transport/tcp/pair.cc:547] Read error [10.77.0.2]:41234: Connection reset by peer",
    "[../gloo/transport/tcp/pair.cc:395] writev [10.77.0.2]:41234: Broken pipe",
    "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation to complete",
    "Application timeout caused pair closure",
    "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error, NCCL version 2.27",
    "NCCL communicator was aborted on rank 1.",
    "failed to recv, got 0 bytes: recvValue failed on SocketImpl(fd=7)",
]
OWN = ["peer pressure", "CUDA out of memory", "mat1 and mat2 shapes cannot be multiplied", "the TCP store is open"]


@pytest.mark.parametrize("text", AFTER)
def test_errors_after_peer_loss_are_peer_failures(text: str) -> None:
    assert is_peer_failure(RuntimeError(text))
    assert not is_peer_failure(RunError(text))  # ours say what they mean


@pytest.mark.parametrize("text", OWN)
def test_errors_of_the_rank_itself_are_not_peer_failures(text: str) -> None:
    assert not is_peer_failure(RuntimeError(text))


def test_torch_errors_are_recognized_by_class_name() -> None:
    class DistNetworkError(RuntimeError):
        """As torch's, which is not imported here."""

    assert is_peer_failure(DistNetworkError("anything at all"))


def test_peers_lost_error_is_recognized_by_type_and_in_a_traceback():
    error = PeersLostError("another membership epoch has begun")
    assert is_peer_failure(error)
    assert not is_peer_failure(RuntimeError(str(error)))
    assert PEER_FAILURE_PATTERN.search("".join(traceback.format_exception(error)))
