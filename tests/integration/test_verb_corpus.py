"""The verb corpus is the same in every process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

from evener.corpus.verbs import generate_sentences


def test_corpus_depends_only_on_seed() -> None:
    program = (
        "import hashlib; from evener.corpus.verbs import generate_sentences;"
        "print(hashlib.sha256(repr(list(generate_sentences(3, 500))).encode()).hexdigest())"
    )
    here = hashlib.sha256(repr(list(generate_sentences(3, 500))).encode()).hexdigest()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        there = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert there.stdout.strip() == here, there.stderr
    assert list(generate_sentences(3, 500)) == list(generate_sentences(3, 800))[:500]
    assert list(generate_sentences(4, 500)) != list(generate_sentences(3, 500))
