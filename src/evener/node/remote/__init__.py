"""Modules that a session sends to a host's own Python: standard library only, Python 3.8 or newer, Linux or macOS.

A module may import names of its siblings, `from evener.node.remote.file_io import read_file`; the sender sends those
first. On a host there is no package: the modules stand in `sys.modules` under these names.
"""

from __future__ import annotations

import re
from pathlib import Path

REMOTE_DIR = Path(__file__).parent
SIBLING_IMPORT = re.compile(r"^from (evener\.node\.remote)\.(\w+) import ", re.MULTILINE)
FUTURE_IMPORT = "from __future__ import annotations\n"


def read_source(module: str) -> str:
    """Return the text of a module of this package."""
    return (REMOTE_DIR / f"{module}.py").read_text()


def siblings(source: str) -> list[str]:
    """Return the names of the modules of this package that a source text imports.

    >>> siblings("import os\\nfrom evener.node.remote.file_io import read_file\\n")
    ['file_io']
    """
    return [module for _, module in SIBLING_IMPORT.findall(source)]


def bundle(module: str) -> str:
    """Return one source text of a module and the siblings that it imports, for a host to run as a file of its own."""
    source, sources = read_source(module), dict[str, str]()

    def add(names: list[str]) -> None:
        for name in names:
            add(siblings(read_source(name)))
            sources[f"{__name__}.{name}"] = read_source(name)

    add(siblings(source))
    loader = (
        "import sys, types\n"
        f"for name, source in {sources!r}.items():\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        '    exec(compile(source, f"<{name}>", "exec"), sys.modules[name].__dict__)\n'
    )
    return FUTURE_IMPORT + loader + source.replace(FUTURE_IMPORT, "")
