"""Read the source of Python's standard library as documents: real text that every machine has.

A full CPython 3.11 has about 31 MB of it, a Linux distribution's without the test packages about 10 MB.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from evener.core.errors import DataError
from evener.corpus.text import Document, find_files, read_text, whole

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
_OF_THIS_MACHINE = "_sysconfigdata"  # paths and compiler flags of one build


def library_documents() -> tuple[list[Document], int]:
    """Return the library's modules, and the number of files skipped because they are not UTF-8 (as some tests are)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise DataError(f"the files of Python's standard library are missing: {root} is not a folder")
    documents, num_skipped = [], 0
    for document in find_files([root], skip=lambda folder: folder.name in _NOT_THE_LIBRARY):
        path = Path(document.name)
        if path.suffix != ".py" or path.name.startswith(_OF_THIS_MACHINE):
            continue
        if _is_utf8(document):
            documents.append(document)
        else:
            num_skipped += 1
    if not documents:
        raise DataError(
            f"{root} holds no Python source", hint="install the source of Python's library, or use data text"
        )
    return documents, num_skipped


def _is_utf8(document: Document) -> bool:
    try:
        for _ in read_text(whole(document)):
            pass
    except DataError:
        return False
    return True
