"""Invalid flags, files and arguments give a one-line error, never a traceback, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import string
import sys
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evener.core.base.errors import UsageError
from evener.core.base.file_io import file_digest, write_atomic
from evener.core.cluster.host_info import local_host_info
from evener.core.model.shape import preset_shape
from evener.core.run.resolve import resolve
from evener.core.run.roster import RankSlot, initial_roster
from evener.core.run.run_spec import FLAGS, RunSpec, parse_args
from evener.core.run.rundir import Checkpoint, Manifest, RankProcess
from evener.core.run.runwriter import RunWriter
from evener.launch import launcher
from evener.worker import __main__ as worker
from evener.worker.train import loop

from ..in_process import run_verb
from ..tiers import num_examples

SHARED_FOLDER = [HealthCheck.function_scoped_fixture]  # which each example leaves as it was

WORDS = st.text(string.ascii_letters + string.digits + "-_./ é\n$", min_size=1, max_size=12)
NUMBERS = [flag for flag in FLAGS.values() if "number" in flag.kind]
CHOICES = [flag for flag in FLAGS.values() if "|" in flag.kind]


SAVED = "checkpoints/step-000003"


class Launched(Exception):
    """The input was taken for good."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a good corpus and a finished run."""
    from evener.corpus.prepare_corpus import prepare
    from evener.corpus.verbs import make_verb_corpus

    folder = tmp_path_factory.mktemp("world")
    splits, files = make_verb_corpus(0, 300, 0.1)
    corpus = prepare(folder / "data" / "verbs", splits, tokenizer="byte", extra=files).corpus
    run = RunWriter(folder / "runs" / "good")
    shape = preset_shape("tiny", corpus.vocab_size)
    machine = local_host_info()
    spec = msgspec.structs.replace(RunSpec(), model=msgspec.structs.replace(RunSpec().model, model="tiny"))
    run.write_manifest(
        Manifest(
            verdict="stopped",
            started=0.0,
            argv=[],
            versions={},
            spec=spec,
            shape=shape,
            corpus=corpus,
            code_hash="",
            params_by_group=shape.params_by_group(),
            num_params=shape.num_params(),
            compiled=False,
            roster=initial_roster(spec, [RankSlot(host=machine.host, device="cpu")], shape.block_size),
            sampler="epochs-1",
            hosts=[machine],
            ranks=[RankProcess(rank=0, host=machine.host, device="cpu", threads=1, pid=0)],
        )
    )
    saved = run.checkpoint_path(3)
    write_atomic(saved / "weights.safetensors", b"weights")
    checkpoint = Checkpoint(
        step=3, world_size=1, val_loss=None, tensor_names=[], states={}, replica_hashes=[[]],
        files={"weights.safetensors": file_digest(saved / "weights.safetensors")},
    )  # fmt: skip
    write_atomic(saved / "state.json", msgspec.json.encode(checkpoint))
    return folder


def call(*args: str) -> tuple[int, str]:
    """Exit status and stderr of `evener args`."""
    with mock.patch.object(launcher, "start", side_effect=Launched):
        done = run_verb(*args)
    return done.returncode, done.stderr


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def assert_refused(folder: Path, *args: str) -> None:
    before = tree(folder)
    status, told = call(*args)
    assert status == 2, (args, status, told)
    assert told.startswith("error: "), (args, told)
    assert len(told.splitlines()) <= 2, (args, told)  # the error and its hint
    assert "Traceback" not in told
    assert tree(folder) == before


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return not text.strip()  # nothing at all means: the default


def is_known(word: str) -> bool:
    """Could this be the beginning of a flag, or no flag at all?"""
    names = [flag.name[2:] for flag in FLAGS.values()]
    others = ["help", "json", "dry-run", "resume", "no-recompute", "no-contention", "no-private"]
    return not word[0].isalpha() or any(name.startswith(word.split("=")[0]) for name in [*names, *others])


not_numbers = WORDS.filter(lambda text: not is_number(text)) | st.sampled_from(
    ["-1", "nan", "1e400", "--", "٣x", "1.5.2"]
)
bad_flags = st.one_of(
    st.builds(lambda flag, text: [f"{flag.name}={text}"], st.sampled_from(NUMBERS), not_numbers),
    st.builds(lambda flag, text: [f"{flag.name}={text}x"], st.sampled_from(CHOICES), WORDS),
    WORDS.filter(lambda word: not is_known(word)).map(lambda word: [f"--{word}", "3"]),
    st.sampled_from(["nonsense", "Char", "d99", "gpt5"]).map(lambda name: [f"--model={name}"]),
    st.integers(2, 40).filter(lambda heads: 64 % heads).map(lambda heads: ["--model=tiny", f"--num-heads={heads}"]),
    st.integers(2, 1024).map(lambda ranks: [f"--ranks={ranks}", f"--batch={ranks - 1}"]),
    st.integers(2**20, 2**31).map(lambda size: [f"--block-size={size}"]),
    st.sampled_from(
        [
            *("--data=nowhere", "--init-from=nowhere", "--resume=nowhere", "--resume=data/verbs"),
            *(
                "--out=data/verbs/train.bin",
                "--out=data/verbs/train.bin/x",
                "--out=runs/good",
                "--batch=0",
                "--steps=0",
                "--warmup=999",
                "--min-lr=5",
            ),
        ]
    ).map(lambda word: [word]),
)
words = WORDS.map(json.dumps)
values = words | st.integers(-5, 5).map(str) | st.booleans().map(json.dumps) | st.just("[1]")
bad_tomls = st.one_of(
    st.text(max_size=30).map(lambda text: f"[train\n{text}"),
    st.builds(lambda key, value: f"[train]\n{key} = {value}", words.filter(lambda key: key[1:-1] not in FLAGS), values),
    st.sampled_from([f for f in NUMBERS if f.section]).map(lambda f: f'[{f.section}]\n{f.field} = "many"'),
    st.sampled_from(["train = 3", "out = 3", "[tain]", "[model]\nsteps = 3", "\0", "[train]\nlr = nan"]),
)


@settings(max_examples=num_examples(40, 240), deadline=None, suppress_health_check=SHARED_FOLDER)
@given(args=bad_flags)
def test_invalid_flags_are_refused(world, args, monkeypatch):
    monkeypatch.chdir(world)
    assert_refused(world, "train", "--data=data/verbs", "--model=tiny", *args)


@settings(max_examples=num_examples(25, 160), deadline=None, suppress_health_check=SHARED_FOLDER)
@given(text=bad_tomls)
def test_invalid_toml_is_refused(world, text, monkeypatch):
    monkeypatch.chdir(world)
    Path("run.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert_refused(world, "train", "run.toml", "--data=data/verbs")


@settings(max_examples=num_examples(20, 120), deadline=None, suppress_health_check=SHARED_FOLDER)
@given(
    file=st.sampled_from(["meta.json", "tokenizer.json", "train.bin", "val.bin"]),
    how=st.sampled_from(["gone", "cut", "empty", "noise"]),
    where=st.floats(0, 1, exclude_max=True),
)
def test_damaged_corpus_is_refused(world, file, how, where, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("damaged")
    monkeypatch.chdir(folder)
    shutil.copytree(world / "data", "data")
    damage(Path("data/verbs") / file, how, where)
    before = tree(folder)
    try:
        status, told = call("train", "--data=data/verbs", "--model=tiny")
    except Launched:
        assert how == "noise"  # another token is a token; another character of a name is a name
        return
    assert status == 2
    assert told.startswith("error: ")
    assert "data/verbs" in told
    assert tree(folder) == before


@settings(max_examples=num_examples(8, 120), deadline=None, suppress_health_check=SHARED_FOLDER)
@given(
    file=st.sampled_from(["manifest.json", f"{SAVED}/state.json", f"{SAVED}/weights.safetensors"]),
    how=st.sampled_from(["gone", "cut", "empty", "noise"]),
    where=st.floats(0, 1, exclude_max=True),
)
def test_damaged_run_is_refused(world, file, how, where, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("damaged")
    monkeypatch.chdir(folder)
    shutil.copytree(world / "data", "data")
    shutil.copytree(world / "runs", "runs")
    damage(Path("runs/good") / file, how, where)
    before = tree(folder)
    for verb in (["train", "--resume", "runs/good"], ["sample", "runs/good", "--step", "3"]):
        with contextlib.suppress(Launched):
            status, told = call(*verb)
            assert status in (1, 2), (verb, told)
            assert told.startswith("error: ")
            assert "Traceback" not in told
        assert tree(folder) == before


@pytest.mark.parametrize(
    ("recorded", "flags", "told_of", "hint"),
    [
        ("uniform-2", [], "uniform-2, and epochs-1", "--sampling uniform"),
        ("epochs-1", ["--sampling=uniform"], "epochs-1, and uniform-2", "--sampling epochs"),
    ],
)
def test_run_with_other_sampler_is_refused(world, recorded, flags, told_of, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(world, ".", dirs_exist_ok=True)
    path = Path("runs/good/manifest.json")
    manifest = json.loads(path.read_text())
    manifest["sampler"] = recorded
    path.write_text(json.dumps(manifest))
    assert_refused(tmp_path, "train", "--resume", "runs/good", *flags)
    _, told = call("train", "--resume", "runs/good", *flags)
    assert f"its batches came from the sampler {told_of} would draw others" in told
    assert hint in told


@pytest.mark.parametrize("file", ["manifest.json", "plan.json"])
def test_run_of_first_format_is_refused_naming_its_sampler(world, file, tmp_path, monkeypatch):
    """What else such a file says is not looked at: it has fields that this evener does not know, and lacks others."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(world, ".", dirs_exist_ok=True)
    Path("runs/good", file).write_text('{"format":1,"verdict":"finished","sync":"ddp","spec":{"machine":{"probe":1}}}')
    for verb in (["train", "--resume"], ["report"]):
        if verb == ["report"] and file == "plan.json":
            continue
        assert_refused(tmp_path, *verb, "runs/good")
        _, told = call(*verb, "runs/good")
        assert f"{file}: format 1, this evener reads 3" in told
        assert "its batches came from the sampler uniform-1, which this evener no longer has" in told


def test_run_resumes_with_its_sampler(world, monkeypatch):
    monkeypatch.chdir(world)
    with pytest.raises(Launched):
        call("train", "--resume", "runs/good")


def damage(path: Path, how: str, where: float) -> None:
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[: int(len(content.rstrip()) * where)])  # a last newline is no loss
    elif how == "empty":
        path.write_bytes(b"")
    else:
        content[int(len(content) * where)] ^= 0x15
        path.write_bytes(content)


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["train", "--steps"],
        ["report", "nowhere"],
        ["report"],
        ["verify", "nowhere"],
        ["verify", "nowhere", "--tolerance", "-1"],
        ["sample", "nowhere"],
        ["sample", "runs/good", "--num-tokens", "0"],
        ["sample", "runs/good", "--step", "7"],
        ["bench", "--preset", "lab02"],
        ["bench", "--preset", "strategies"],
        ["bench", "--fleet", "nowhere.toml"],
        ["bench", "--preset", "strategies", "--fleet", "fleet.toml", "--syncs", "int9"],
        ["bench", "--preset", "strategies", "--fleet", "fleet.toml", "--hosts", "nobody"],
        ["bench", "--seconds", "0"],
        ["bench", "--model", "nonsense", "--data", "data/verbs"],
        ["bench", "--ranks", "0"],
        ["bench", "--batch", "1", "--ranks", "2", "--data", "data/verbs"],
        ["bench", "--data", "nowhere"],
        ["bench", "--data", "data/verbs", "--out", "runs"],
        ["data", "nonsense"],
        ["data", "text"],
        ["data", "text", "nowhere"],
        ["data", "verbs", "--tokenizer", "nonsense"],
        ["data", "verbs", "--val-fraction", "2"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_invalid_arguments_of_other_verbs_are_refused(world, args, monkeypatch):
    monkeypatch.chdir(world)
    assert_refused(world, *args)


def test_full_disk_is_refused_before_anything_is_written(world, monkeypatch):
    monkeypatch.chdir(world)
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert_refused(world, "train", "--data=data/verbs", "--model=tiny")


def test_per_rank_state_counts_toward_required_disk_space(world, monkeypatch):
    monkeypatch.chdir(world)
    usage = shutil.disk_usage(".")
    flags = ["--data=data/verbs", "--model=tiny", "--ranks=2", "--keep=1"]
    params = resolve(parse_args(flags)).shape.num_params()
    free = 12 * 3 * params + 10_000  # three checkpoints
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    resolve(parse_args(flags))
    for sync in ("int8", "diloco:10"):
        with pytest.raises(UsageError, match="GB free, the checkpoints need"):
            resolve(parse_args([*flags, f"--sync={sync}"]))


def test_required_disk_space_counts_local_ranks_and_roster_strategy(world, monkeypatch, tmp_path):
    """As the worker asks: of 4 ranks one is here, and --sync auto is what the launcher chose."""
    monkeypatch.chdir(world)
    usage = shutil.disk_usage(".")
    flags = ["--data=data/verbs", "--model=tiny", "--keep=1", "--out", str(tmp_path / "run"), "--sync"]
    params = resolve(parse_args([*flags, "ddp"])).shape.num_params()
    path = tmp_path / "roster.json"
    monkeypatch.setattr(sys, "argv", ["evener.worker", *flags, "auto"])
    monkeypatch.setattr(loop, "train", mock.Mock(side_effect=Launched))
    monkeypatch.setenv("WORLD_SIZE", "4")

    def start(sync: str, ranks_here: int, room: int) -> int:
        """The worker's exit status with room for three checkpoints and so much more a parameter."""
        slots = [RankSlot(host=name, device="cpu") for name in "abcd"]
        path.write_bytes(msgspec.json.encode(initial_roster(parse_args([*flags, sync]), slots, 64)))
        monkeypatch.setenv("EVENER_ROSTER", str(path))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=(36 + room) * params))
        try:
            return worker.main()
        except Launched:
            return 0

    diloco = 28 * 3
    assert start("ddp", 1, 0) == 0
    assert start("diloco:30", 1, diloco) == 0
    assert start("diloco:30", 1, diloco - 1) == UsageError.exit_status
    assert start("diloco:30", 2, diloco) == UsageError.exit_status
    assert start("diloco:30", 2, 2 * diloco) == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--model=gpt2", "--sync=ddp+sparse"), "no lookup-only embedding table: its tied head reads the table too"),
        (("--model=tiny", "--width=128", "--sync=powersgd:64"), "no matrix of this model has both sides above 128"),
    ],
)
def test_strategy_without_effect_is_refused_before_start(world, monkeypatch, flags, told):
    monkeypatch.chdir(world)
    data = ("--data=data/verbs", "--block-size=32")
    assert_refused(world, "train", *data, *flags)
    with pytest.raises(UsageError, match=told):
        resolve(parse_args([*data, *flags]))
    resolve(parse_args([*data, "--model=d4", "--sync=int8+sparse"]))
    resolve(parse_args([*data, "--model=tiny", "--width=132", "--sync=powersgd:64"]))


def test_unwritable_output_path_is_refused(world, monkeypatch):
    monkeypatch.chdir(world)
    assert_refused(world, "train", "--data=data/verbs", "--model=tiny", "--out=/proc/run")
