"""Parse untrusted YAML into dicts, lists and text: no text, however crafted, costs more than its size.

Scalars stay text (`on`, `010`, `2222`): the caller converts numbers. Tags are ignored (Ansible's `!vault`). An alias
counts each time as much as what it stands for, so a small text that expands to a large tree is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 64
MAX_NODES = 200_000

YamlTree = Any  # dict[str, YamlTree], list[YamlTree], str; None if empty


class YamlError(Exception):
    """The text is not valid; `line` is where, if that is known."""

    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(what)
        self.line = line


def read_yaml(text: str) -> YamlTree:
    """Return the tree of a text's only document; YamlError if it is not valid.

    >>> read_yaml("all: {hosts: {gpu-1: {ansible_port: 2222}, gpu-2: }}")
    {'all': {'hosts': {'gpu-1': {'ansible_port': '2222'}, 'gpu-2': None}}}
    """
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _YamlTreeBuilder(yaml).build(yaml.parse(text, Loader=loader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise YamlError(str(problem), mark.line + 1 if mark else None) from None
    except (RecursionError, ValueError) as error:  # PyYAML's own scanner raises it for an invalid number
        raise YamlError(str(error)) from None


class _YamlTreeBuilder:
    """Builds the tree from the parser's events, without recursion."""

    def __init__(self, yaml: Any) -> None:
        self._yaml = yaml
        self._open: list[tuple[YamlTree, str | None, int]] = []  # incomplete: (node, its anchor, nodes before it)
        self._keys: list[str | None] = []  # for each incomplete node, the key that waits for its value
        self._anchors: dict[str, tuple[YamlTree, int]] = {}
        self._nodes = 0
        self._root: YamlTree = None

    def build(self, events: Iterator[Any]) -> YamlTree:
        yaml, documents = self._yaml, 0
        for event in events:
            line = event.start_mark.line + 1
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise YamlError("a second document begins", line)
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                if len(self._open) == MAX_DEPTH:
                    raise YamlError(f"nested deeper than {MAX_DEPTH} times", line)
                self._open.append(({} if isinstance(event, yaml.MappingStartEvent) else [], event.anchor, self._nodes))
                self._keys.append(None)
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                tree, anchor, before = self._open.pop()
                self._keys.pop()
                self._add(tree, anchor, self._nodes - before, line)
            elif isinstance(event, yaml.ScalarEvent):
                is_empty = event.implicit[0] and event.value in ("", "~", "null") and not self._expects_key
                self._add(None if is_empty else event.value, event.anchor, 0, line)
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in self._anchors:
                    raise YamlError(f"*{event.anchor} is not defined above", line)
                tree, nodes = self._anchors[event.anchor]
                self._nodes += nodes
                self._add(tree, None, 0, line)
        return self._root

    def _add(self, tree: YamlTree, anchor: str | None, nodes: int, line: int) -> None:
        """Add a complete value that has so many nodes besides itself."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise YamlError(f"more than {MAX_NODES} values, counting those that its aliases repeat", line)
        if anchor is not None:
            self._anchors[anchor] = (tree, nodes)
        if not self._open:
            self._root = tree
            return
        parent = self._open[-1][0]
        if isinstance(parent, list):
            parent.append(tree)
        elif self._expects_key:
            if not isinstance(tree, str):
                raise YamlError("a key that is not text", line)
            self._keys[-1] = tree
        else:
            key, self._keys[-1] = self._keys[-1], None
            self._put(parent, key, tree)

    @property
    def _expects_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1][0], dict) and self._keys[-1] is None

    @staticmethod
    def _put(parent: YamlTree, key: str | None, tree: YamlTree) -> None:
        """Set a key. `<<: *others` only adds missing keys; another key that is repeated replaces the earlier value."""
        if key != "<<":
            parent[key] = tree
            return
        for other in tree if isinstance(tree, list) else [tree]:
            if isinstance(other, dict):
                for name, value in other.items():
                    parent.setdefault(name, value)
