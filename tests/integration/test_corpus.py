"""A killed corpus preparation leaves nothing that loads, and preparation does not import torch."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.base.errors import DataError
from evener.core.model.corpus import load_corpus
from evener.corpus.prepare_corpus import prepare

from ..unit.test_corpus import splits

BLOCKED_CHILD = """
import sys
from pathlib import Path
from evener.corpus.documents import Document, split_by_fraction
from evener.corpus.prepare_corpus import prepare

def block(doing, done, total):
    if doing == "encoding" and done > total // 2:
        print("half", flush=True)
        sys.stdin.read()

text = b"horse " * 1_000_000
splits = split_by_fraction([Document("t", len(text), text)], 0.1)
prepare(Path(sys.argv[1]), splits, tokenizer="byte", force=True, progress=block)
"""


@pytest.mark.parametrize("existing", [False, True])
def test_killed_prepare_leaves_nothing_loadable(tmp_path: Path, existing: bool) -> None:
    out = tmp_path / "c"
    before = prepare(out, splits(), tokenizer="char").corpus if existing else None
    child = subprocess.Popen(
        [sys.executable, "-c", BLOCKED_CHILD, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout
    try:
        assert child.stdout.readline() == b"half\n"
        with pytest.raises(DataError, match="c is being prepared by another process"):
            prepare(out, splits(), tokenizer="char", force=True)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    partial = tmp_path / ".c.partial"
    assert (partial / "train.bin").stat().st_size > 1_000_000
    with pytest.raises(DataError, match="is unfinished: its preparation was interrupted"):
        load_corpus(partial)
    if before:
        assert load_corpus(out) == before
    else:
        with pytest.raises(DataError, match="no such folder"):
            load_corpus(out)
    assert prepare(out, splits(), tokenizer="char").was_written == (before is None)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_prepare_does_not_import_torch() -> None:
    program = (
        "import sys, evener.corpus.prepare_corpus, evener.corpus.verbs, evener.corpus.stdlib_source, "
        "evener.corpus.token_check;"
        "assert not {'torch', 'tokenizers', 'tiktoken'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
