"""Distinguish the first failure from the peer failures that follow, when other ranks lose their connection to it."""

from __future__ import annotations

import re

# Messages of Gloo, NCCL, torch's store and our own agent for a lost peer.
CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|Broken pipe|recvValue failed|Timed out waiting|pair closure"
    r"|TCPStore.*(closed|failed)|DistStoreError|DistNetworkError"
    r"|NCCL.*(remote|aborted)|remote process exit|evener: ending the ranks",
    re.IGNORECASE,
)


def is_consequence(error: BaseException) -> bool:
    """Return whether this rank failed only because a peer was lost.

    >>> is_consequence(RuntimeError("[gloo/transport/tcp/pair.cc:542] Connection closed by peer [10.0.0.2]:41"))
    True
    >>> is_consequence(ValueError("Broken pipe"))
    False
    """
    return isinstance(error, RuntimeError) and bool(CONSEQUENCE.search(f"{type(error).__name__}: {error}"))
