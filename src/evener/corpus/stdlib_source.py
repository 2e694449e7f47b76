"""Read the source of Python's standard library as documents: real text that every machine has.

A full CPython 3.11 has about 31 MB of it, a Linux distribution's without the test packages about 10 MB.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from evener.core.base.errors import DataError
from evener.corpus.documents import Document, find_documents, read_text, whole_document

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
_BUILD_SPECIFIC_PREFIX = "_sysconfigdata"  # paths and compiler flags of one build


def stdlib_documents() -> tuple[list[Document], int]:
    """Return the library's modules, and the number of files skipped because they are not UTF-8 (as some tests are)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise DataError(f"the files of Python's standard library are missing: {root} is not a folder")
    documents, num_skipped = [], 0
    for document in find_documents([root], skip=lambda folder: folder.name in _SKIPPED_FOLDERS):
        path = Path(document.name)
        if path.suffix != ".py" or path.name.startswith(_BUILD_SPECIFIC_PREFIX):
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
        for _ in read_text(whole_document(document)):
            pass
    except DataError:
        return False
    return True
