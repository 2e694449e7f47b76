"""Do all ranks run the same program, on the same data, for the same model? Asked before the first step.

Ranks that differ do not fail: they hang in a collective that the others never enter, or train a model of nonsense.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from evener.core.resolve import Resolved
from evener.core.rundir import code_hash
from evener.core.spec import RunSpec

NOT_COMPARED = ("out", "machine", "data")  # places and processes may differ; the data is compared by its content
PLACES = ("model.init_from",)  # the host's own path; whatever it holds, DDP hands out rank 0's weights


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on all ranks; None where this rank cannot tell."""

    rank: int
    host: str
    code: str
    torch: str
    spec: dict[str, object]
    data: str | None
    tokenizer: str | None
    shapes: str


def identity(
    rank: int, host: str, spec: RunSpec, resolved: Resolved | None, parameters: Iterable[tuple[str, Tensor]]
) -> Identity:
    """This rank's."""
    tree = msgspec.to_builtins(spec)
    flat = {f"{section}.{field}": value for section, fields in tree.items() if section not in NOT_COMPARED
            for field, value in fields.items() if f"{section}.{field}" not in PLACES}  # fmt: skip
    shapes = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in parameters)
    return Identity(
        rank=rank,
        host=host,
        code=code_hash(),
        torch=str(torch.__version__).partition("+")[0],
        spec=flat,
        data=resolved.corpus.content_hash if resolved else None,
        tokenizer=resolved.corpus.tokenizer_hash if resolved else None,
        shapes=hashlib.blake2b(shapes.encode(), digest_size=16).hexdigest(),
    )


def mismatch(ranks: Sequence[Identity]) -> tuple[str, str, str] | None:
    """(check, what differs, where it differs from) of the first mismatch with rank 0, or None."""
    first = ranks[0]
    questions: list[tuple[str, str, Callable[[Identity], object]]] = [
        ("version.torch", "torch", lambda one: one.torch),
        ("code.mismatch", "evener's code", lambda one: one.code),
        ("data.mismatch", "the corpus", lambda one: one.data),
        ("tokenizer.mismatch", "the tokenizer", lambda one: one.tokenizer),
        ("spec.mismatch", "the spec", lambda one: one.spec),
        ("spec.mismatch", "the parameters' shapes", lambda one: one.shapes),
    ]
    for check, what, question in questions:
        for other in ranks[1:]:
            if question(other) != question(first):
                if what == "the spec":
                    what = ", ".join(_differences(first.spec, other.spec))
                return check, what, f"rank {other.rank} on {other.host} and rank {first.rank} on {first.host}"
    return None


def _differences(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    return [f"{name} ({ours.get(name)} and {theirs.get(name)})" for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)]  # fmt: skip
