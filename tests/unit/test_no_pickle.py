"""No source file unpickles data from a network: a pickle may run any program.

docs/listening.md says what torch does on the paths that we use.
"""

from __future__ import annotations

import ast
import io
import pickle
from collections.abc import Iterable
from pathlib import Path

import pytest

from evener.core.model import corpus

from ..source_code import module_file, syntax_nodes

ROOT = Path(__file__).parents[2]
PATHS = sorted(path for folder in ("src/evener", "examples") for path in (ROOT / folder).rglob("*.py"))
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "xmlrpc",
           "socketserver", "multiprocessing", "torch.multiprocessing", "torch.distributed.rpc",
           "torch.distributed.collective_utils"}  # fmt: skip
LAST_NAMES = {name.rpartition(".")[2] for name in MODULES}
OBJECTS = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list",
           "recv_object_list", "_tensor_to_object", "_object_to_tensor", "rpc_sync", "rpc_async"}  # fmt: skip
# A file on this machine that its user names, by an unpickler that finds no class; see below.
MAY = {"src/evener/core/model/corpus.py": {"pickle"}}


def unpickles(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of what may unpickle among the nodes of a source."""
    found = set()
    for node in nodes:
        names: set[str] = set()
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {alias.name for alias in node.names} & OBJECTS
        elif isinstance(node, ast.Attribute):
            names = {ast.unparse(node)} if node.attr in LAST_NAMES else set()
            found |= {node.attr} & OBJECTS
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "load":
            called = ast.unparse(node.func)
            values = {key.arg: ast.unparse(key.value) for key in node.keywords}
            if called == "torch.load" and values.get("weights_only") != "True":
                found.add("torch.load")
            if called in ("np.load", "numpy.load") and values.get("allow_pickle", "False") != "False":
                found.add("np.load")
        found |= names & MODULES
        found |= {name for name in names if name == "torch.load" and isinstance(node, ast.ImportFrom)}
    return found


def test_no_source_file_unpickles_except_listed_ones():
    found = {str(path.relative_to(ROOT)): unpickles(syntax_nodes(path)) for path in PATHS}
    assert {name: what for name, what in found.items() if what} == MAY


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", {"pickle"}),
        ("from pickle import loads", {"pickle"}),
        ("from multiprocessing.managers import BaseManager\nimport multiprocessing", {"multiprocessing"}),
        ("import torch\ntorch.multiprocessing.spawn(f)", {"torch.multiprocessing"}),
        ("torch.load(path)", {"torch.load"}),
        ("torch.load(path, weights_only=False)", {"torch.load"}),
        ("torch.load(path, weights_only=True)", set()),
        ("from torch import load", {"torch.load"}),
        ("np.load(path, allow_pickle=True)", {"np.load"}),
        ("dist.all_gather_object(everyone, mine)", {"all_gather_object"}),
        ("from torch.distributed import broadcast_object_list as share", {"broadcast_object_list"}),
        ("torch.distributed.rpc.rpc_sync('b', f)", {"rpc_sync", "torch.distributed.rpc"}),
    ],
)
def test_unpickling_is_detected_in_source(source, what):
    assert unpickles(ast.walk(ast.parse(source))) == what


class Attack:
    """Its pickle calls a function as it is read."""

    def __reduce__(self):
        return print, ("it ran",)


def test_nanogpt_meta_pickle_is_loaded_without_calling_code(capsys):
    with pytest.raises(pickle.UnpicklingError):
        corpus._RestrictedUnpickler(io.BytesIO(pickle.dumps(Attack()))).load()
    assert capsys.readouterr().out == ""


def test_torch_launcher_exchanges_json():
    """The modules of torch that read from the store and from ranks' error files, on the path of our launcher."""
    at = "torch.distributed.elastic."
    for name in ("agent.server.api", "agent.server.local_elastic_agent", "utils.store", "rendezvous.api",
                 "rendezvous.static_tcp_rendezvous", "multiprocessing.errors", "multiprocessing.errors.error_handler",
                 "multiprocessing.subprocess_handler.subprocess_handler"):  # fmt: skip
        path = module_file(at + name)
        assert path is not None
        assert unpickles(syntax_nodes(path)) == set(), name
