"""State serialization: convert any state_dict to JSON plus a table of tensors, and back, without pickle.

A state is a tree of dicts, lists and tuples; its leaves are tensors, numpy arrays, numbers, text and None. Tensors and
arrays go into a table of their own; the rest becomes JSON that preserves types: an int stays an int, a tuple a tuple,
and 0 and "0" are two keys. Unlike a pickle, reading it executes no code.

    null, true, 1, 1.5, "text"     themselves
    [NODE, …]                      a list
    {"dict": [[NODE, NODE], …]}    keys and values in order; likewise Counter and OrderedDict
    {"tuple": [NODE, …]}
    {"float": "nan"}               a number that JSON cannot represent
    {"tensor": KEY}                a torch tensor, under this key of the table; for numpy: array, scalar
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evener.core.base.errors import UsageError

TreePath = tuple[object, ...]  # keys and indices from the root to a node
# what a safetensors file can hold, by the names that it has there
SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
DICT_TYPES: dict[str, type[dict[Any, Any]]] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
KEY_TYPES = (str, int, float, bool, tuple, type(None))


def flatten_state(state: object, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Convert `state` to JSON (builtins that msgspec writes) and a table of its tensors, with keys prefixed by `name`.

    Tensors are not copied; one that occurs twice comes back as two. Raise UsageError for the first leaf or key that
    cannot be stored.

    >>> flatten_state({"last_epoch": 3, "base_lrs": (0.1,)}, "scheduler")
    ({'dict': [['last_epoch', 3], ['base_lrs', {'tuple': [0.1]}]]}, {})
    """
    tensors: dict[str, Tensor] = {}
    return _flatten_node(state, name, (), tensors), tensors


def unflatten_state(node: Any, tensors: dict[str, Tensor]) -> Any:
    """Convert JSON and tensors back to the state; the inverse of `flatten_state`.

    >>> unflatten_state(*flatten_state({0: [1, 1.0, True], "0": (None, float("inf"))}, "mine"))
    {0: [1, 1.0, True], '0': (None, inf)}
    """
    if isinstance(node, list):
        return [unflatten_state(child, tensors) for child in node]
    if not isinstance(node, dict):
        return node
    [(kind, content)] = node.items()
    if kind in DICT_TYPES:
        return DICT_TYPES[kind](
            {unflatten_state(key, tensors): unflatten_state(value, tensors) for key, value in content}
        )
    match kind:
        case "tuple":
            return tuple(unflatten_state(child, tensors) for child in content)
        case "float":
            return float(content)
        case "tensor":
            return tensors[content]
        case "array":
            return tensors[content].numpy()
        case "scalar":
            return tensors[content].numpy()[()]
    raise AssertionError(f"no state has a {kind}")


def _flatten_node(value: object, name: str, path: TreePath, tensors: dict[str, Tensor]) -> Any:
    kind = type(value)  # exactly: a subclass would not come back as itself
    if isinstance(value, str | int | bool | None) and kind in KEY_TYPES:
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list | tuple) and kind in (list, tuple):
        nodes = [_flatten_node(child, name, (*path, i), tensors) for i, child in enumerate(value)]
        return nodes if kind is list else {"tuple": nodes}
    if isinstance(value, dict) and kind in DICT_TYPES.values():
        if bad_key := next((key for key in value if type(key) not in KEY_TYPES), None):
            raise _not_storable(name, (*path, bad_key), f"the key {bad_key!r}")
        return {
            kind.__name__: [
                [_flatten_node(key, name, path, tensors), _flatten_node(child, name, (*path, key), tensors)]
                for key, child in value.items()
            ]
        }
    if isinstance(value, Tensor) and kind in (Tensor, nn.Parameter, nn.Buffer, DTensor):
        check_storable(value, name, path)
        return {"tensor": _add_tensor(value.detach(), name, path, tensors)}
    if isinstance(value, np.ndarray | np.generic):
        try:
            tensor = torch.from_numpy(np.array(value))
        except (TypeError, ValueError):
            raise _not_storable(name, path, f"{_with_article(kind.__name__)} of {value.dtype}") from None
        check_storable(tensor, name, path)
        return {"array" if isinstance(value, np.ndarray) else "scalar": _add_tensor(tensor, name, path, tensors)}
    raise _not_storable(name, path, _with_article(kind.__name__))


def check_storable(tensor: Tensor, name: str, path: TreePath = ()) -> None:
    """Raise UsageError if a checkpoint cannot hold this tensor."""
    if tensor.layout != torch.strided or tensor.dtype not in SAFETENSORS_DTYPES:
        problem = tensor.layout if tensor.dtype in SAFETENSORS_DTYPES else tensor.dtype
        raise _not_storable(name, path, f"a tensor of {problem}")


def _add_tensor(tensor: Tensor, name: str, path: TreePath, tensors: dict[str, Tensor]) -> str:
    key = "/".join([name, *map(str, path)])
    while key in tensors:  # 0 and "0" are two keys of a dict
        key += "'"
    tensors[key] = tensor
    return key


def _not_storable(name: str, path: TreePath, what: str) -> UsageError:
    where = "".join(f".{part}" if isinstance(part, str) else f"[{part}]" for part in path).removeprefix(".")
    return UsageError(
        f"state of {name.removeprefix('user/')!r} holds {what}" + (f" at {where}" if where else ""),
        hint="checkpoints hold tensors, numbers, text, None, and lists, tuples and dicts of them",
    )


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"
