"""Output of the verbs fits the width of a terminal and is colored only where that is wanted."""

from __future__ import annotations

import functools
import json
import re
import subprocess

import pytest

from evener.launch import torch_subprocess

from ..sample_runs import write_run
from ..tiers import exhaustive, exhaustively, thinned
from .pseudo import COLOUR, ESCAPE, argv, environment, in_pipe, in_terminal
from .test_plan_verb import FLEET, ONE, WORDS

PLANS = {
    "nodes": WORDS,
    "one way": (*WORDS, "--sync", "ddp"),
    "fleet": ("--fleet", "fleet.toml", "--model", "d8", "--block-size", "512", "--batch", "8"),
    "from": ("--from", "runs/one"),
}

SCALE = ("--model", "gpt2", "--scale", "1,2,4,8", "--per-node", "8", *ONE)


@pytest.fixture(scope="module", name="place")
def _place(tmp_path_factory):
    place = tmp_path_factory.mktemp("place")
    (place / "fleet.toml").write_text(FLEET)
    write_run(place / "runs" / "one", [{}])
    write_run(place / "runs" / "20261122-174207-gpt2-medium-verbs", [{}, {}])
    return place


piped = functools.cache(in_pipe)  # as often as a terminal of another width is compared with it


@functools.cache
def told(*args, cwd):
    done = subprocess.run(argv(*args), capture_output=True, text=True, check=False, cwd=cwd, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def fits(text, whole, columns):
    """No line is longer; every word is one that the pipe got, or of the line that names what is left out."""
    assert max(map(len, text.splitlines())) <= columns
    words = {word for word in text.split() if not set(word) <= {"─"}}
    missing = re.findall(r"not shown in \d+ columns: (?:.*,\n)*.*", text)
    assert words <= {*whole.split(), *" ".join(missing).split()}


@pytest.mark.parametrize("columns", [60, *exhaustively(80, 120)])
@pytest.mark.parametrize("form", thinned([*PLANS], 3))
def test_plan_verdict_is_shown_at_any_width(place, form, columns):
    asked = ("plan", *PLANS[form])
    short = ESCAPE.sub("", in_terminal(*asked, columns=columns, cwd=place))
    fits(short, piped(*asked, cwd=place), columns)
    text = ESCAPE.sub("", in_terminal(*asked, "--all", columns=columns, cwd=place))
    fits(text, piped(*asked, "--all", cwd=place), columns)
    words = " ".join(text.split())
    found = json.loads(told("plan", *PLANS[form], "--json", cwd=place))
    head = next(line.split() for line in text.splitlines() if line.startswith("strategy"))
    assert {"step", "tokens/s", "×"} <= set(head)
    for option in found["options"]:
        assert re.search(rf"^{re.escape(option['name'])}\s+[\d.]+ m?s .*  [\d.]+k? +(\d\.\d\d|–)$", text, re.M)
        assert (option["rejected_because"] or "← recommended") in words
    assert found["verdict"] in words
    assert found["verdict"] in " ".join(short.split())
    assert re.search(rf"^{re.escape(found['recommended'])}\s.* +(\d\.\d\d|–) +\S", short, re.M)


@pytest.mark.parametrize("columns", [60, *exhaustively(80, 120)])
def test_scale_verdict_is_shown_at_any_width(place, columns):
    text = ESCAPE.sub("", in_terminal("plan", *SCALE, columns=columns, cwd=place))
    fits(text, piped("plan", *SCALE, cwd=place), columns)
    head = next(line.split() for line in text.splitlines() if line.startswith("ranks"))
    assert {"tokens/s", "effic.", "step", "with"} <= set(head)
    for point in json.loads(told("plan", *SCALE, "--json", cwd=place))["points"]:
        assert re.search(rf"^{point['ranks']} .*  {point['efficiency']:.1%}  .*  {point['goodput']:.1%}$", text, re.M)


@pytest.mark.parametrize("columns", [60, *exhaustively(80, 120)])
def test_listed_run_takes_one_line_at_any_width(place, columns):
    text = ESCAPE.sub("", in_terminal("runs", columns=columns, cwd=place))
    whole = piped("runs", cwd=place)
    fits(text, whole, columns)
    for run in ("runs/one", "runs/20261122-174207-gpt2-medium-verbs"):
        assert re.search(rf"^{run}\s.*finished .* 20 .* 0.1500 .* 9.8k", text, re.M)
        row = "finished char verbs h [12] 20 0.1500 1.2500 1.2500 9.8k [0-9]+ [a-z]+ [0-9.]+ kB".replace(" ", " +")
        assert re.search(rf"^{run} +{row}$", whole, re.M)


def test_columns_variable_sets_pipe_width(place):
    assert in_pipe("runs", cwd=place, COLUMNS="60") == in_terminal("runs", columns=60, cwd=place, TERM="dumb")


@pytest.mark.parametrize("columns", [60, *exhaustively(80, 120)])
def test_drill_names_are_not_truncated_at_any_width(columns):
    text = ESCAPE.sub("", in_terminal("lab", "drill", "--list", columns=columns))
    fits(text, piped("lab", "drill", "--list"), columns)
    assert re.search(r"^net.rendezvous-loopback-name +b ↔ a", text, re.M)


PREPARE = ("data", "verbs", "--sentences", "3000", "--force", "--out")  # draws bars while it works


def test_terminal_output_has_color_unless_disabled(tmp_path):
    assert COLOUR.search(in_terminal(*PREPARE, tmp_path))
    for refused in ({"NO_COLOR": "1"}, {"NO_COLOR": "0"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}):
        text = in_terminal(*PREPARE, tmp_path, **refused)
        assert "written" in text
        assert not COLOUR.search(text)
    assert COLOUR.search(in_terminal(*PREPARE, tmp_path, NO_COLOR=""))  # as no-color.org has it


@exhaustive
def test_dumb_terminal_gets_plain_text(tmp_path, place):
    for args in ((*PREPARE, tmp_path), ("plan", *WORDS), ("runs",), ("plan", "--help"), ("doctor", "--fleet", "local")):
        text = in_terminal(*args, columns=60, cwd=place, TERM="dumb")
        assert text.strip()
        assert "\x1b" not in text


def test_a_pipe_gets_no_escape_codes(tmp_path, place):
    for args in ((*PREPARE, tmp_path), ("plan", *WORDS), ("plan", *SCALE), ("runs",), ("lab", "drill", "--list"),
                 ("--help",), ("train", "--help"), ("plan", "--nodes", "x")):  # fmt: skip
        text = in_pipe(*args, cwd=place)
        assert text.strip()
        assert "\x1b" not in text


def test_stderr_of_a_worker_program_is_escaped(tmp_path, monkeypatch, capfd):
    (tmp_path / "talking.py").write_text(r"import sys; print('out'); print('a\x1b]0;title\x07b', file=sys.stderr)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert list(torch_subprocess.program_lines("talking")) == ["out"]
    assert capfd.readouterr().err == r"a\x1b]0;title\x07b" + "\n"


def test_color_can_be_forced_on_pipe():
    assert ESCAPE.search(in_pipe("plan", *WORDS, FORCE_COLOR="1"))
