"""Verbs given damaged or hostile files succeed or report an error that the user can fix, and touch nothing else.

10,000 of them: python -m tests.unit.test_damaged_files 10000 [seed]
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import random
import re
import shutil
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import typer

from evener.cli import main as cli
from evener.core.base.errors import EvenerError, HostError, file_error
from evener.core.base.file_io import file_digest, write_atomic
from evener.core.cluster.fleet_file import HostConfig
from evener.core.run.run_plan import HostPlan, Plan, read_plan_if_present, write_plan
from evener.core.run.rundir import Checkpoint, RunDir
from evener.core.run.step_spans import (
    BetweenStepsSpan,
    BucketSpan,
    LayerGroupSpan,
    PhaseSpan,
    ProfilerClockSync,
    StepSpans,
)
from evener.corpus.prepare_corpus import prepare
from evener.corpus.verbs import make_verb_corpus
from evener.launch import prepare_hosts, torch_subprocess
from evener.report.export.dataframes import read_run
from evener.ssh.fake import FakeSession
from evener.watch.run_reader import RunReader
from tests.in_process import time_limit
from tests.sample_runs import write_run
from tests.tiers import num_examples

NUM, SEED = num_examples(150, 2_000), 20261123
HANGS_S = 60  # by the clock, of a machine as busy as it likes
LONG = 600  # times the median processor time of a verb: 2 s where that is 3 ms
RECORD = Path(__file__).parent / "records" / "two-hosts"
FLEET = """
link = "1GbE"
price_per_kwh = 0.3
[hosts.attic]
address = "192.168.1.36"
port = 22
gpu = "3090"
memory = "24GB"
[hosts.laptop]
address = "local"
ranks = 2
watts = 60.0
[links.attic.laptop]
goodput_Bps = 117e6
rtt_s = 3e-4
[rates.attic.cpu]
matmul_flops = { fp32 = 1e12 }
[rates.attic.cpu.models.tiny]
tokens_per_s = 500.0
[rates.laptop.cpu.models.tiny]
tokens_per_s = 400.0
"""
SPEC = """
[data]
data = "data/verbs"
[model]
model = "tiny"
[train]
steps = 20
lr = 1e-3
[machine]
ranks = 1
"""
WATCH, READ = "(the live page)", "(read_run)"  # no verbs, but they read a run, too
RUN_VERBS = [["report", "RUN"], ["report", "RUN", "--json"], ["runs", "--json"], ["logs", "RUN"], ["verify", "RUN"],
             ["verify", "RUN", "--replay", "2"], ["sample", "RUN"], ["export", "RUN"], ["stop", "RUN"],
             ["fetch", "RUN"], ["plan", "--from", "RUN"], ["train", "--resume", "RUN"], ["trace", "RUN"],
             ["runs", "--prune", "--json"], ["runs", "runs"], ["report", "RUN", "--format", "md"], [WATCH, "RUN"],
             [READ, "RUN"]]  # fmt: skip
FLEET_VERBS = [["plan", "--model", "tiny"], ["train", "--data", "data/verbs", "--model", "tiny", "--hosts", "laptop"],
               ["train", "--data", "data/verbs", "--model", "tiny", "--hosts", "nobody"]]  # fmt: skip
TARGETS: list[tuple[str, list[list[str]]]] = [
    *((f"runs/here/{name}", RUN_VERBS) for name in (
        "manifest.json", "plan.json", "events.jsonl", "steps/rank-0.jsonl", "steps/rank-1.jsonl", "spans/rank-1.jsonl",
        "profile/rank-1.json", "tokenizer.json",
        "host/state.json", "host/spec.json", "host/lock", "host/attached", "host/ranks/begun.json", "report.html",
        "trace.json", "watch.summary", "loggers/tensorboard.json", "loggers/tensorboard.lock", "export/config.json",
        "logs/here.0.log", "checkpoints/step-000003/state.json",
        "checkpoints/step-000003/weights.safetensors")),
    *((f"runs/away/{name}", RUN_VERBS) for name in (
        "manifest.json", "plan.json", "events.jsonl", "steps/rank-1.jsonl", "hosts/attic/state.json",
        "hosts/attic/events.jsonl", "hosts/attic/mirror.json", "hosts/carry.lock", "hosts/laptop/mirror.lock",
        "hosts/.controller/events.jsonl", "files/attic/out.txt")),
    ("runs/bench/compare.json", [["report", "runs/bench"], ["report", "runs/bench", "--json"]]),
    ("runs/lab01/bench.json", [["report", "runs/lab01"]]),
    ("fleet.toml", FLEET_VERBS),
    ("run.toml", [["plan", "run.toml"], ["train", "run.toml", "--fleet", "local"]]),
    *((f"data/verbs/{name}", [["train", "run.toml", "--fleet", "local"]]) for name in (
        "meta.json", "tokenizer.json", "train.bin")),
]  # fmt: skip

EVENTS: dict[str, dict[str, Any]] = {
    "start": {"ranks": 2, "sync": "ddp"}, "checkpoint": {}, "rebalanced": {"shares": [3, 1], "why": "slow"},
    "rechosen": {"sync": "int8", "was": "ddp", "why": "slow"}, "run.goes-on": {"after_s": 3.0}, "finished": {},
    "compared": {"chosen": "ddp", "why": "measured", "measured": [
        {"sync": "ddp", "predicted_s": 1.0, "measured_s": 1.1, "error_s": 0.1, "num_steps": 8}]},
    "run.nonfinite": {"ranks": [0]}, "failure": {"rank": 0, "host": "h", "error": "it broke", "hint": "mend it"},
    "replicas.agree": {"tensors": 3, "relative": 0.0}, "cpu.throttled": {"host": "h", "evidence": "hot", "fix": "fan"},
}  # fmt: skip


EVENER = typer.main.get_command(cli.app)


class Started(Exception):
    """The input was taken for good, and work would begin."""


def open_here(name: str, host: HostConfig, *_: object) -> FakeSession:
    """Open a host that is this process. Others cannot be reached."""
    if not host.is_local:
        raise HostError(f"{name}: cannot be reached", check="ssh.unreachable", host=name, hint="is it on?")
    return FakeSession(name)


def make_world(folder: Path) -> None:
    """Small and whole examples of all files that TARGETS names."""
    splits, files = make_verb_corpus(0, 300, 0.1)
    prepare(folder / "data" / "verbs", splits, tokenizer="byte", extra=files)
    (folder / "fleet.toml").write_text(FLEET)
    (folder / "run.toml").write_text(SPEC)
    shutil.copytree(RECORD, folder / "runs" / "away")
    away = folder / "runs" / "away" / "hosts" / "attic"
    write_atomic(away / "state.json", msgspec.json.encode(STATE))
    write_atomic(away / "events.jsonl", b'{"event":"checkpoint","step":50,"time":1.5}\n')
    write_atomic(away / "mirror.json", b'{"steps/rank-1.jsonl":["1:2",3]}')
    run = RunDir(folder / "runs" / "away")
    plan = read_plan_if_present(run)
    assert plan is not None
    parts = [HostPlan(name=name, host=HostConfig(address=address), node_rank=rank, first_rank=rank, num_ranks=1, env={},
                      address=f"10.0.0.{rank}", interface="lan", run="/nowhere", code=None, cwd="/", argv=["python"])
             for rank, (name, address) in enumerate([("attic", "192.168.1.36"), ("laptop", "local")])]  # fmt: skip
    write_plan(run, msgspec.structs.replace(plan, hosts=parts, spec=run.manifest().spec, roster=run.manifest().roster))
    alone = write_run(folder / "runs" / "here", [{}, {}], sync_s=0.01, evaluations={9: 2.0, 19: 1.5}, steps=12)
    for rank in range(2):
        spans = [
            StepSpans(
                step=step,
                epoch=0,
                clock=1.8e9,
                begun_s=5.0 + step,
                laps=[PhaseSpan("compute_s", 0.0, 0.1)],
                exchanges=[BucketSpan(0, 0.05, 0.1, 8, 8)],
                passes=[LayerGroupSpan("blocks", False, 0.0, 0.05)],
                asides=[BetweenStepsSpan("checkpoint", 0.2, 0.3)],
                news=[(0.3, 0.4)],
            )
            for step in (3, 4, 9)
        ]
        write_atomic(alone.spans_path(rank), b"".join(msgspec.json.encode(one) + b"\n" for one in spans))
    joint = ProfilerClockSync(mark="evener: clock 1", clock=1.8e9, at_s=7.0, error_s=1e-6, steps=[3, 4])
    profiled = [{"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "thread"}},
                *({"ph": "X", "name": name, "cat": "cpu_op", "ts": ts, "dur": 9.5, "pid": 1, "tid": 2}
                  for name, ts in (("evener: clock 1", 5e6), ("aten::mm", 6.01e6), ("aten::mul", 6.02e6)))]  # fmt: skip
    write_atomic(alone.profile_path(1), msgspec.json.encode({"evener": joint, "traceEvents": profiled}))
    for event, facts in EVENTS.items():
        alone.add_event(event, step=3, **facts)
    shutil.copy(folder / "data" / "verbs" / "tokenizer.json", alone.path)
    saved = alone.checkpoint_path(3)
    write_atomic(saved / "weights.safetensors", b"weights")
    digests = {"weights.safetensors": file_digest(saved / "weights.safetensors")}
    checkpoint = Checkpoint(step=3, world_size=2, val_loss=None, tensor_names=["a"], states={}, files=digests,
                            replica_hashes=[["x"], ["x"]])  # fmt: skip
    write_atomic(saved / "state.json", msgspec.json.encode(checkpoint))
    part = HostPlan(name="here", host=HostConfig(address="local"), node_rank=0, first_rank=0, num_ranks=2, env={},
                    address="127.0.0.1", interface="lo", run=None, code=None, cwd="/", argv=["python"])  # fmt: skip
    manifest = alone.manifest()
    write_plan(alone, Plan(id="1234", kind="train", roster=manifest.roster, spec=manifest.spec, hosts=[part]))
    write_atomic(alone.path / "host" / "state.json", msgspec.json.encode(STATE))
    write_atomic(alone.path / "host" / "spec.json", b'{"id":"1234","first_rank":0,"is_rank":false,"grace_s":0.1}')
    write_atomic(alone.path / "host" / "supervisor.py", b"def end_all(run):\n    return []\n")
    write_atomic(alone.path / "host" / "lock", b"1")
    write_atomic(alone.log_path("here", 0), b"2026-11-23T19:31:10.123 O hello\n2026-11-23T19:31:11.123 E world\n")
    compared = {
        "format": 1,
        "kind": "fleet",
        "base": "a",
        "runs": {"a": "here", "b": "away"},
        "failed": {"c": "why"},
    }
    for bench in ("bench", "lab01"):
        for name in ("here", "away"):
            shutil.copytree(folder / "runs" / name, folder / "runs" / bench / name)
    write_atomic(folder / "runs" / "bench" / "compare.json", json.dumps(compared).encode())
    write_atomic(folder / "runs" / "lab01" / "bench.json", b'{"format":1,"series":{"verbs":["here","away"]}}')


STATE = {"state": "ended", "supervisor": 1, "pid": 2, "started": 1.5, "ended": 2.5, "status": 0, "signal": None,
         "stopped": False, "failures": [], "left": [], "oom_at": None, "full_at": None}  # fmt: skip
ODD: list[Any] = [None, True, False, 0, 1, -1, 2**31, 2**63, -(2**64), 10**30, 1e300, -1e300, 0.5, 1e-320, "", "x",
                  "../..", "\0", "nan", "é" * 300, "../../../outside/file", "/dev/zero", "\x1b]0;title\x07", "[link=http://host]text[/]",
                  "\u202e", [], [[]], {}, {"a": 1}, [1, "a", None]]  # fmt: skip


def swap(tree: Any, dice: random.Random) -> Any:
    """One value of a JSON tree is another one, is gone, or is there twice."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            places.append((node, key))
            if isinstance(value, (dict, list)):
                walk(value)

    if not isinstance(tree, (dict, list)) or not tree:
        return dice.choice(ODD)
    walk(tree)
    node, key = dice.choice(places)
    how = dice.random()
    if how < 0.15:
        del node[key]
    elif how < 0.25 and isinstance(node, list):
        node.insert(key, node[key])
    elif how < 0.5 and isinstance(node[key], (int, float)) and not isinstance(node[key], bool):
        node[key] = dice.choice([-node[key], node[key] + 1, node[key] * 1e6, 0, 0.0, -1, 2**40])
    else:
        node[key] = dice.choice(ODD)
    return tree


def swap_json(content: bytes, dice: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    try:
        return json.dumps(swap(json.loads(content), dice)).encode() + b"\n"
    except ValueError:
        pass
    num = dice.randrange(len(lines)) if lines else 0
    try:
        lines[num] = json.dumps(swap(json.loads(lines[num]), dice)).encode() + b"\n"
    except (ValueError, IndexError):
        return swap_word(content, dice)
    return b"".join(lines)


def swap_word(content: bytes, dice: random.Random) -> bytes:
    """A number or a word of a text is another one: of TOML, and of what is no JSON."""
    words = content.split(b" ")
    words[dice.randrange(len(words))] = dice.choice(
        [b"-1", b"nan", b"inf", b"1e400", b"0", b"9" * 400, b'""', b"[]", b"{}", b"true", b'"x"', b"=", b"[[a]]", b"\0",
         b"1979-05-27"]
    )  # fmt: skip
    return b" ".join(words)


def flip(content: bytes, dice: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(dice.choice([1, 1, 2, 20])):
        if damaged:
            damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
    return bytes(damaged)


def move_lines(content: bytes, dice: random.Random) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    num = dice.randrange(len(lines))
    how = dice.randrange(3)
    if how == 0:
        del lines[num]
    elif how == 1:
        lines.insert(num, lines[num])
    else:
        dice.shuffle(lines)
    return b"".join(lines)


def insert(content: bytes, dice: random.Random) -> bytes:
    where = dice.randrange(len(content) + 1)
    what = dice.choice([b"\xff\xfe", b"\0" * 9, b"x" * 200_000, b"[" * 100_000, b'{"a":' * 5_000, b"\n\n\n",
                        b"\xed\xa0\x80", b"9" * 5_000, b"NaN", b"\xef\xbb\xbf"])  # fmt: skip
    return content[:where] + what + content[where:]


def whole(content: bytes, dice: random.Random) -> bytes:
    return dice.choice([b"", b"\n", b"null", b"[]", b"{}", b"[" * 100_000, b"\0", b"NaN\n", b"1", b'{"format":3}\n',
                        b'{"format":1e3}', b"\xff", b"{}\n{}\n", b'"x"\n'])  # fmt: skip


def cut(content: bytes, dice: random.Random) -> bytes:
    return content[: dice.randrange(len(content) + 1)]


CHANGES = [flip, move_lines, insert, whole, cut, swap_word, *[swap_json] * 5]


def damage(path: Path, dice: random.Random, outside: Path) -> str:
    """How it was damaged. Links lead to the folder `outside`, and to the file in it."""
    if path.exists() and dice.random() > 0.25:
        change = dice.choice(CHANGES)
        path.write_bytes(change(path.read_bytes(), dice))
        return change.__name__
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = outside / "file"
    kinds: dict[str, Callable[[], object]] = {
        "folder": path.mkdir, "FIFO": lambda: os.mkfifo(path), "socket": lambda: bind(path),
        "loop": lambda: path.symlink_to(path), "device": lambda: path.symlink_to("/dev/zero"),
        "dangling": lambda: path.symlink_to("/nowhere"), "gone": lambda: None,
        "link": lambda: path.symlink_to(target), "hard link": lambda: path.hardlink_to(target),
        "new file": lambda: path.symlink_to(outside / "new"),
    }  # fmt: skip
    if path.suffix not in (".bin", ".safetensors"):  # those may be as large as a disk
        kinds["terabyte"] = lambda: (path.touch(), os.truncate(path, 1 << 40))
    folders = [folder for folder in path.parents if "runs" in folder.parent.parent.parts[-2:]]
    if folders:
        kinds["linked folder"] = lambda: link_folder(dice.choice(folders), outside)
    kind = dice.choice([*kinds])
    kinds[kind]()
    return kind


def bind(path: Path) -> None:
    """Make a socket file. Its name is longer than an address may be."""
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def link_folder(folder: Path, outside: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(outside)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def look_of(path: Path) -> object:
    """What a person who wants to mend a file would find."""
    if path.is_symlink():
        return os.readlink(path)
    if path.is_file() and path.stat().st_size > 1 << 30:
        return path.stat().st_size
    return path.read_bytes() if path.is_file() else path.exists() and path.lstat().st_mode


def is_kept(path: Path, before: object) -> bool:
    """Is a file as it was? Events are put in the order of their time; none goes. What a verb writes is new."""
    after = look_of(path)
    if path.name in ("report.html", "trace.json", "watch.summary", "config.json") or before is False:
        return True
    if path.name == "events.jsonl" and isinstance(after, bytes):
        return not isinstance(before, bytes) or set(before.split(b"\n")[:-1]) <= set(after.split(b"\n"))
    return after == before


def outcome(args: list[str]) -> tuple[str, str]:
    """How `evener args` ended, and what it said."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if args[0] == WATCH:
                status: Any = RunReader(RunDir(args[1])).read_new(1.0) and 0
            elif args[0] == READ:
                status = read_run(args[1]) and 0
            else:
                status = EVENER(args, standalone_mode=False, prog_name="evener")
            raw = re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out.getvalue() + err.getvalue())
            return f"status {status or 0}", err.getvalue() if raw is None else f"Traceback: {raw[0]!r} is printed"
        except EvenerError as error:
            return "refused", f"error: {error}\n{error.hint}\n{error.output}"
        except typer.TyperException as error:
            return "refused", error.format_message()
        except OSError as error:  # as `main` does
            if (problem := file_error(error)) is None:
                raise
            return "refused", f"error: {problem}"
        except Started:
            return "taken", ""


@contextlib.contextmanager
def nothing_begins() -> Iterator[None]:
    """Hosts are this process, and what would train, load weights or end a process does not."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("evener.ssh.session.open_session", open_here))
        stack.enter_context(mock.patch("evener.core.base.trusted.is_trusted", return_value=True))  # what a person wrote
        stack.enter_context(mock.patch("evener.ssh.session.connect", side_effect=Started))
        stack.enter_context(mock.patch.object(prepare_hosts, "connect", side_effect=Started))
        stack.enter_context(mock.patch.object(torch_subprocess, "program_lines", side_effect=Started))
        stack.enter_context(mock.patch.object(os, "kill", side_effect=Started))
        yield


def fuzz(folder: Path, num: int, seed: int) -> tuple[collections.Counter[str], list[str]]:
    """How so many damaged files were taken, and what was wrong with that."""
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    took_s: dict[str, float] = {}
    make_world(folder)
    outside = folder.with_name("outside")
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_bytes(b"precious\nunfinished")
    (outside / "state.json").write_bytes(b"{}")
    before_all = snapshot(outside)
    pristine = folder.with_name(f"{folder.name}-whole")
    shutil.copytree(folder, pristine)
    with contextlib.chdir(folder), nothing_begins():
        for case in range(num):
            dice = random.Random(f"{seed} {case}")
            name, verbs = dice.choice(TARGETS)
            how = damage(folder / name, dice, outside)
            run = "/".join(name.split("/")[:2])
            args = [run if word == "RUN" else word for word in dice.choice(verbs)]
            before, began = look_of(folder / name), time.process_time()
            told_case = f"case {case}: {name} ({how}), evener {' '.join(args)}"
            try:
                with time_limit(HANGS_S):
                    ended, said = outcome(args)
            except BaseException as error:
                ended, said = type(error).__name__, ""
                if isinstance(error, KeyboardInterrupt):
                    raise
                wrong.append(f"{told_case}\n{traceback.format_exc()}")
            counts[ended] += 1
            if "Traceback" in said:
                wrong.append(f"{told_case}: {said}")
            took_s[told_case] = time.process_time() - began
            if not is_kept(folder / name, before):
                wrong.append(f"{told_case}: the file is another one now")
            if snapshot(outside) != before_all:
                wrong.append(f"{told_case}: the files outside are others now")
                break
            restore(folder, pristine)
    median_s = statistics.median(took_s.values())
    wrong += [f"{told_case}: took {one:.1f} s" for told_case, one in took_s.items() if one > LONG * median_s]
    return counts, wrong


def snapshot(folder: Path) -> dict[str, object]:
    """What a folder holds."""
    return {str(path.relative_to(folder)): look_of(path) for path in sorted(folder.rglob("*"))}


def written(path: Path) -> tuple[int, int]:
    """Size and time, by which a file that was changed is known."""
    return path.stat().st_size, path.stat().st_mtime_ns


def restore(folder: Path, pristine: Path) -> None:
    """As it was before the case."""
    for path in sorted(folder.rglob("*"), reverse=True):
        twin = pristine / path.relative_to(folder)
        is_plain = not path.is_symlink() and (path.is_dir() or (path.is_file() and path.stat().st_nlink == 1))
        if not is_plain or not twin.exists() or twin.is_dir() != path.is_dir():
            remove(path)
    for twin in pristine.rglob("*"):
        path = folder / twin.relative_to(pristine)
        if twin.is_dir():
            path.mkdir(exist_ok=True)
        elif not path.exists() or written(path) != written(twin):
            shutil.copy2(twin, path)


def test_damaged_files_are_read_or_refused_with_a_fixable_error(tmp_path):
    counts, wrong = fuzz(tmp_path / "world", NUM, SEED)
    assert not wrong, "\n".join(wrong[:5])
    assert counts["refused"] > NUM // 3
    assert counts["status 0"] + counts["taken"] > NUM // 10


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        counts, wrong = fuzz(Path(place) / "world", int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else SEED)
    print(*wrong, counts, f"{len(wrong)} wrong", sep="\n\n")
