"""How long, and in how much memory, does 100 MB of text become a corpus?

    python bench/corpus_preparation.py [--mb 100] [--json]

The text is made here: the source of Python's standard library, over and over, with other names and numbers in each
round, so that no cache of words profits from the repetition. Each tokenizer runs as a process of its own, as a user
would run it; the last column is a second run, which finds nothing to do. CPU seconds tell a slow machine from a busy
one. Exit status 1 above 60 s or 500 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evener.corpus.stdlib_source import stdlib_documents

LIMIT_S, LIMIT_MB = 60.0, 500.0
PREPARE_SCRIPT = """
import sys
from pathlib import Path
from evener.corpus.documents import find_documents, split_by_fraction
from evener.corpus.prepare_corpus import prepare
splits = split_by_fraction(find_documents([sys.argv[1]], skip=lambda folder: False), 0.1)
corpus = prepare(Path(sys.argv[2]), splits, tokenizer=sys.argv[3]).corpus
print(corpus.train_tokens + corpus.val_tokens)
"""


def write_text(path: Path, num_bytes: int) -> None:
    documents, _ = stdlib_documents()
    written, number = 0, 0
    with path.open("wb") as file:
        while written < num_bytes:
            content = documents[number % len(documents)].open_at(0).read().decode()
            lap = number // len(documents)
            if lap:
                content = re.sub(r"[a-z]{4,}(?=_)|\d+", rf"\g<0>{lap}", content)
            written += file.write(content.encode())
            number += 1
        file.truncate(num_bytes)
    cut_inside_character = True
    while cut_inside_character:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            cut_inside_character = file.read(1) >= b"\x80"
        if cut_inside_character:
            os.truncate(path, path.stat().st_size - 1)


def measure_preparation(text: Path, out: Path, tokenizer: str) -> tuple[float, float, float, int]:
    """Seconds, CPU seconds of all threads, peak RSS in MB, tokens."""
    started = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", PREPARE_SCRIPT, str(text), str(out), tokenizer], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout
    num_tokens = int(child.stdout.read())
    _, status, usage = os.wait4(child.pid, 0)
    assert status == 0
    peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime, peak_bytes / 1e6, num_tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="evener-bench-") as folder:
        text = Path(folder) / "text.txt"
        write_text(text, int(options.mb * 1e6))
        for tokenizer in ("byte", "char", "bpe"):
            out = Path(folder) / tokenizer
            seconds, cpu_s, peak_mb, num_tokens = measure_preparation(text, out, tokenizer)
            again_s, _, _, _ = measure_preparation(text, out, tokenizer)
            rows.append(
                {
                    "tokenizer": tokenizer,
                    "text_mb": text.stat().st_size / 1e6,
                    "prepare_s": round(seconds, 2),
                    "cpu_s": round(cpu_s, 2),
                    "peak_rss_mb": round(peak_mb, 1),
                    "tokens": num_tokens,
                    "unchanged_s": round(again_s, 2),
                }
            )
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "rows": rows}))
    else:
        print(f"{options.mb:g} MB of text, {os.cpu_count()} cores")
        print(f"{'tokenizer':<10}{'prepare s':>10}{'CPU s':>8}{'peak MB':>10}{'tokens':>14}{'unchanged s':>13}")
        for row in rows:
            print(
                f"{row['tokenizer']:<10}{row['prepare_s']:>10}{row['cpu_s']:>8}{row['peak_rss_mb']:>10}{row['tokens']:>14,}"
                f"{row['unchanged_s']:>13}"
            )
    return int(any(row["prepare_s"] > LIMIT_S or row["peak_rss_mb"] > LIMIT_MB for row in rows))


if __name__ == "__main__":
    sys.exit(main())
