"""Control characters in what came from a run or a host reach no terminal, on plain streams or through rich."""

from __future__ import annotations

import ast
import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from evener.cli.doctor import print_preflight
from evener.cli.terminal import make_console, print_table
from evener.core.base.escaped_output import escape_controls, print_escaped
from evener.core.base.file_io import write_atomic
from evener.core.cluster.finding import Finding
from evener.core.run.run_plan import read_plan, write_plan
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.doctor.interfaces import SocketInterface
from evener.doctor.preflight import PreflightReport

from ..in_process import run_verb
from ..source_code import syntax_nodes
from .test_damaged_files import make_world, nothing_begins

SOURCE = Path(__file__).parents[2] / "src" / "evener"
HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b1m\r\u202eb [link=https://example.org]text[/] [red]c\udcff"
ESCAPED = r"a\x1b]0;title\x07\x1b[2J\x9b1m\r\u202eb [link=https://example.org]text[/] [red]c\udcff"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    make_world(folder)
    return folder


@pytest.fixture
def world(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(pristine, tmp_path / "world")
    monkeypatch.chdir(tmp_path / "world")
    with nothing_begins():
        yield tmp_path / "world"


def test_every_control_character_but_newline_and_tab_is_escaped() -> None:
    shown = escape_controls("".join(map(chr, range(0x110000))))
    assert not RAW.search(shown)
    assert escape_controls("line\n\ttab é → 漢 👩\u200d💻\u00a0│") == "line\n\ttab é → 漢 👩\u200d💻\u00a0│"


def test_plain_streams_get_escapes() -> None:
    out = io.StringIO()
    print_escaped(HOSTILE, 1, file=out)
    assert out.getvalue() == f"{ESCAPED} 1\n"


def test_consoles_escape_text_and_keep_their_own_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = make_console()
    screen.file = out = io.StringIO()
    screen.print(HOSTILE, style="red", soft_wrap=True)
    print_table(screen, ("run", "why"), [(HOSTILE, HOSTILE)])
    shown = out.getvalue()
    assert "\x1b[31m" in shown  # of rich
    assert ESCAPED in shown
    assert not RAW.search(re.sub(r"\x1b\[[\d;]*m", "", shown))
    assert "\x1b]8;" not in shown  # no link


def test_doctor_prints_reasons_and_evidence_verbatim() -> None:
    interface = SocketInterface(interface="lan", address="10.0.0.1", kind="wired", why=HOSTILE)
    finding = Finding(check="disk.full", severity="error", host=HOSTILE, evidence=HOSTILE, fix=HOSTILE)
    lan = {"a": interface}
    preflight = PreflightReport(hosts=["a"], facts={}, interfaces=lan, pairs=[], findings=[finding], took_s=1.0)
    screen = make_console()
    screen.file = out = io.StringIO()
    print_preflight(screen, preflight)
    assert out.getvalue().count("[link=https://example.org]text[/]") == 4
    assert not RAW.search(out.getvalue())


@pytest.mark.parametrize("verb", [["logs"], ["report"], ["fetch"], ["stop"], ["trace"], ["export"], ["runs"],
                                  ["report", "--format", "md"], ["train", "--resume"]], ids=" ".join)  # fmt: skip
def test_verbs_escape_control_characters_of_a_run(world: Path, verb: list[str]) -> None:
    """Its log, its events, its model's name and the name, address and folder of its host."""
    hostile = HOSTILE.replace("\udcff", "")
    run = RunDir("runs/here")
    plan = read_plan(run)
    host = msgspec.structs.replace(plan.hosts[0], name=hostile, address=hostile, cwd=hostile)
    write_plan(run, msgspec.structs.replace(plan, hosts=[host]))
    manifest = run.manifest()
    model = msgspec.structs.replace(manifest.spec.model, model=hostile)
    spec = msgspec.structs.replace(manifest.spec, model=model)
    RunWriter(run.path).write_manifest(msgspec.structs.replace(manifest, spec=spec, versions={hostile: hostile}))
    for rank in (0, 1):
        write_atomic(run.log_path(hostile.replace("/", ""), rank), f"2026 O {hostile}\n".encode())
    for event in ("failure", "cpu.throttled", "rebalanced", "run.leaves"):
        RunWriter(run.path).add_event(event, host=hostile, rank=0, error=hostile, hint=hostile, evidence=hostile,
                                      why=hostile, shares=[1, 1], fix=hostile, step=1)  # fmt: skip
    words = [*verb, "runs" if verb == ["runs"] else "runs/here"]
    try:
        done = run_verb(*words)
    except BaseException as error:
        assert type(error).__name__ == "Started"  # noqa: PT017  the input was taken, and nothing was printed
        return
    assert not RAW.search(done.stdout + done.stderr)
    assert "Traceback" not in done.stderr


def test_log_content_is_printed_with_visible_escapes(world: Path) -> None:
    content = "progress 1\rprogress 2\x1b[31m red \x1b[0m"
    write_atomic(RunDir("runs/here").log_path("here", 0), f"2026-11-23T19:31:10.123Z O {content}\n".encode())
    assert r"progress 2\x1b[31m red \x1b[0m" in run_verb("logs", "runs/here").stdout


def test_nothing_is_printed_but_through_the_two_places() -> None:
    """Ranks print to their logs, and the programs of hosts to a pipe."""
    allowed = ("worker/", "node/", "lab/", "core/base/escaped_output.py", "core/base/errors.py",
               "report/export/logger_feed.py", "watch/terminal_dashboard.py: Console")  # fmt: skip
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in syntax_nodes(path):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout.write", "sys.stderr.write"):
                name = "print"
            place = f"{path.relative_to(SOURCE)}: {name}"
            if name in ("print", "Console", "input") and not place.startswith(allowed):
                found.append(f"{place}, line {getattr(node, 'lineno', 0)}")
    assert not found
