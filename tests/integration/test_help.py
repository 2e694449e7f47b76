"""`--help` answers within 0.2 s, and a mistyped argument is a one-line error."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from ..in_process import run_verb
from ..integration.pseudo import argv, environment


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("verify", "Missing argument 'RUN'"),
        ("plan --nodes x", "--nodes: expected a whole number"),
        ("plan --jitter x", "--jitter: expected a number"),
        ("sample runs/x --temperature -1", "--temperature: expected at least 0"),
        ("rums", "No such verb 'rums'. Did you mean 'runs'?"),
        ("train --stepz 3", "No such option: --stepz; there are --keep, --seed, --steps"),
    ],
)
def test_mistyped_argument_is_a_one_line_error_with_help_hint(line, told):
    done = run_verb(*line.split())
    verb = "" if line == "rums" else f"{line.split()[0]} "
    assert done.stderr == f"error: {told}\nhint:  evener {verb}--help\n"


def test_help_takes_a_fifth_of_a_second_at_most():
    """Where python starts with asyncio in 0.03: processor time, the least of some, side by side."""

    def least_s(*command):
        def once():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment())
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        return min(once() for _ in range(5))

    plain_s = least_s(sys.executable, "-c", "import asyncio")
    assert least_s(*argv("train", "--help")) < 7 * plain_s  # with the boxes of typer it was 10
    heavy = "import sys; from evener.cli.main import app; app(['train', '--help'], standalone_mode=False); "
    heavy += "assert not {'torch', 'numpy', 'rich', 'markdown_it'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", heavy], check=True, stdout=subprocess.DEVNULL, env=environment())
