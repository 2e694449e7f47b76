"""Change modules of libraries right after each was imported, before the program can take a name from it."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

ModuleChange = Callable[[ModuleType], None]


def collect_instances(init: Callable[..., None], instances: weakref.WeakSet[Any]) -> Callable[..., None]:
    """Return a class's __init__ that adds each new object to `instances`, which does not keep it alive."""

    @functools.wraps(init)
    def collected(instance: Any, *args: Any, **kwargs: Any) -> None:
        init(instance, *args, **kwargs)
        instances.add(instance)

    return collected


def _change_module(module: ModuleType, change: ModuleChange) -> None:
    try:
        change(module)
    except AttributeError as error:  # another version than evener knows: the program runs as it is
        print(f"evener: {module.__name__} is not instrumented: {error}", file=sys.stderr)


class ModuleChanger(importlib.abc.MetaPathFinder):
    """Calls functions with a module right after it was executed, when nobody has imported a name of it yet."""

    def __init__(self) -> None:
        self._changes: dict[str, list[ModuleChange]] = {}

    def add(self, name: str, change: ModuleChange) -> None:
        """Have `change` called with the module of this name, after the functions that were added before.

        A module that was imported is changed at once: what takes effect are changes of its classes.
        """
        if name in sys.modules:
            _change_module(sys.modules[name], change)
        else:
            self._changes.setdefault(name, []).append(change)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module that is to be changed as Python does, and return it with a loader that changes it."""
        if name not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        changes, execute = self._changes.pop(name), spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for change in changes:
                _change_module(module, change)

        loader: Any = spec.loader
        loader.exec_module = exec_module
        return spec
