"""Distinguish the first failure from the peer failures that follow, when other ranks lose their connection to it."""

from __future__ import annotations

import re

# Messages of Gloo, NCCL, torch's store and our own agent for a lost peer.
PEER_FAILURE_PATTERN = re.compile(
    r"closed by peer|reset by peer|Broken pipe|recvValue failed|Timed out waiting|pair closure"
    r"|TCPStore.*(closed|failed)|DistStoreError|DistNetworkError"
    r"|NCCL.*(remote|aborted)|remote process exit|evener: ending the ranks",
    re.IGNORECASE,
)


def is_peer_failure(error: BaseException) -> bool:
    """Return whether this rank failed only because a peer was lost.

    >>> is_peer_failure(RuntimeError("[gloo/transport/tcp/pair.cc:542] Connection closed by peer [10.0.0.2]:41"))
    True
    >>> is_peer_failure(ValueError("Broken pipe"))
    False
    """
    return isinstance(error, RuntimeError) and bool(PEER_FAILURE_PATTERN.search(f"{type(error).__name__}: {error}"))
