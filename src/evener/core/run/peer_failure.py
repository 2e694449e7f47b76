"""Distinguish the failure of a rank from the failures of other ranks that then lose their connection to it."""

from __future__ import annotations

import re

# Gloo, NCCL and torch's store report a lost peer by these texts, mostly in a RuntimeError without a type of its own.
TORCH_TEXTS = (
    r"closed by peer|reset by peer|Broken pipe|recvValue failed|Timed out waiting|pair closure"
    r"|TCPStore.*(closed|failed)|DistStoreError|DistNetworkError|NCCL.*(remote|aborted)"
)
TORCH_PATTERN = re.compile(TORCH_TEXTS, re.IGNORECASE)
# in a log or an event: also our own error, and what the agent prints
PEER_FAILURE_PATTERN = re.compile(rf"{TORCH_TEXTS}|PeersLostError|evener: ending the ranks", re.IGNORECASE)


class PeersLostError(RuntimeError):
    """This rank cannot continue in its membership epoch, as peers are gone or the epoch is over. A regroup may help."""


def is_peer_failure(error: BaseException, *, is_joining: bool = False) -> bool:
    """Return whether this rank failed only because a peer was lost.

    With `is_joining` any error of Gloo counts: a peer that is lost while an epoch is joined causes many.

    >>> is_peer_failure(RuntimeError("[gloo/transport/tcp/pair.cc:542] Connection closed by peer [10.0.0.2]:41"))
    True
    >>> is_peer_failure(ValueError("Broken pipe"))
    False
    """
    if isinstance(error, PeersLostError):
        return True
    text = f"{type(error).__name__}: {error}"
    is_match = TORCH_PATTERN.search(text) is not None or (is_joining and "gloo" in text.lower())
    return isinstance(error, RuntimeError) and is_match
