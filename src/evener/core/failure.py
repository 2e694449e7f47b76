"""Which failure was first? One rank fails for a reason of its own; the others then fail because it is gone."""

from __future__ import annotations

import re

# How Gloo, NCCL, torch's store and our own agent tell that somebody else is gone.
CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|Broken pipe|recvValue failed|Timed out waiting|pair closure"
    r"|TCPStore.*(closed|failed)|DistStoreError|DistNetworkError"
    r"|NCCL.*(remote|aborted)|remote process exit|evener: ending the ranks",
    re.IGNORECASE,
)


def is_consequence(error: BaseException) -> bool:
    """Did this rank fail only because another was gone?

    >>> is_consequence(RuntimeError("[gloo/transport/tcp/pair.cc:542] Connection closed by peer [10.0.0.2]:41"))
    True
    >>> is_consequence(ValueError("Broken pipe"))
    False
    """
    return isinstance(error, RuntimeError) and bool(CONSEQUENCE.search(f"{type(error).__name__}: {error}"))
