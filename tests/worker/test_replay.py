"""Replaying a multi-rank run in one process gives its losses, and locates what was changed."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from evener.core.base.file_io import file_digest
from evener.core.run.rundir import RunDir

from ..conftest import ENV
from ..tiers import exhaustive, exhaustively, num_examples

FLAGS = ("--steps", "30", "--checkpoint-every", "10", "--eval-every", "0", "--lr", "0.001", "--keep", "3")


def start_run(server, out, corpus, *args, ranks=2):
    flags = ["--data", str(corpus), "--model", "tiny", "--eval-tokens", "2048", "--out", str(out), "--threads", "1",
             "--dtype", "fp32", "--shares", "equal", *FLAGS, *args]  # fmt: skip
    ended = server.run(out.with_name(f"{out.name}-said"), flags, ranks, module="evener.worker")
    assert not any(ended.statuses), ended.said("err")
    return RunDir(out)


@pytest.fixture(scope="module")
def original(tmp_path_factory, corpus, server):
    """Two ranks, on a corpus of their own, which tests copy and change."""
    place = tmp_path_factory.mktemp("replay")
    shutil.copytree(corpus, place / "corpus")
    return start_run(server, place / "run", place / "corpus")


@pytest.fixture
def run(original, tmp_path):
    """A copy to be changed."""
    return RunDir(shutil.copytree(original.path, tmp_path / "run"))


def verify(*args, status=0, cwd=None):
    argv = [sys.executable, "-m", "evener", "verify", *map(str, args)]
    done = subprocess.run(argv, capture_output=True, text=True, env=ENV, check=False, cwd=cwd)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def replay(run, *args, status=0):
    return json.loads(verify(run, "--replay", *args, "--json", status=status).stdout)


def files(folder):
    return {str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in Path(folder).rglob("*") if path.is_file()}  # fmt: skip


def tamper(run, rank, step, **values):
    """A record says something else."""
    path = run.steps_path(rank)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for name, value in values.items():
        lines[step][name] = value if value is None else lines[step][name] + value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@exhaustive
def test_replay_of_multi_rank_run_equals_single_process_run(original, tmp_path, corpus, server):
    """Beside it an uninterrupted run of one process, which is what a replay has to come to."""
    alone = start_run(server, tmp_path / "alone", corpus, ranks=1).records(0)
    before = files(original.path)
    replays = [(20, ("10",)), (10, ("5", "--from-step", "10")), (10, ("20",)), (0, ("30",))]
    for first, flags in replays[: num_examples(2, 4)]:
        found = replay(original, *flags)
        assert found["passes"] is True
        assert (found["first_step"], found["verdict"]["kind"]) == (first, "agree")
        assert len(found["steps"]) == int(flags[0])
        for step in found["steps"]:
            assert step["loss"] == pytest.approx(alone[step["step"]].loss, rel=1e-6)
            assert step["grad_norm"] == pytest.approx(alone[step["step"]].grad_norm, rel=1e-4)
        assert 0 <= found["verdict"]["largest_loss"] < 1e-6
    assert files(original.path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"alone", "alone-said"}


@exhaustive
def test_verify_replay_prints_tolerance_and_verdict(original, tmp_path):
    told = verify(original, "--replay", "10", cwd=tmp_path).stdout.splitlines()
    assert told[0] == "replayed steps 21 to 30 from its checkpoint of step 20, on cpu in fp32"
    assert re.match(
        r"largest relative difference: loss \S+ \(1e-05 allowed\), gradient norm \S+ \(1e-03 allowed\)", told[1]
    )
    assert told[2] == "agree: losses and gradient norms of 10 steps agree: the run can be trusted"
    assert not list(tmp_path.iterdir())


@exhaustive
@pytest.mark.parametrize(
    ("name", "by", "kind"),
    [
        ("loss", 1e-3, "record"),
        *exhaustively(("grad_norm", None, "nonfinite"), ("grad_norm", 1e-2, "record"), ("loss", None, "nonfinite")),
    ],
)
def test_changed_record_is_detected_with_its_step(run, name, by, kind):
    for rank in (0, 1):
        tamper(run, rank, 24, **{name: by})
    before = files(run.path)
    verdict = replay(run, "10", status=1)["verdict"]
    assert (verdict["kind"], verdict["step"]) == (kind, 24), verdict
    assert verdict["sentence"].startswith("step 25: ")
    assert files(run.path) == before


@exhaustive
def test_rank_with_differing_records_is_named(run):
    tamper(run, 1, 22, loss=1e-3)
    verdict = replay(run, "10", status=1)["verdict"]
    assert (verdict["kind"], verdict["step"], verdict["rank"]) == ("record", 22, 1)


@exhaustive
@pytest.mark.parametrize("hashed", [True, *exhaustively(False)])
def test_changed_weight_is_detected_in_first_step(run, hashed):
    """One that the ranks had hashed otherwise, and one that they had like that, too."""
    from evener.worker.state.replica_hashes import hash_tensors

    folder = run.checkpoint_path(20)
    weights = load_file(folder / "weights.safetensors")
    name = next(name for name in weights if name.endswith("mlp.up.weight"))
    weights[name] *= 1.1
    save_file(weights, folder / "weights.safetensors")
    state = json.loads((folder / "state.json").read_text())
    assert "damaged" in verify(run, "--replay", "10", status=2).stderr
    state["files"]["weights.safetensors"] = file_digest(folder / "weights.safetensors")
    if hashed:
        hashes = hash_tensors((one, weights[one]) for one in state["tensor_names"])
        state["replica_hashes"] = [list(hashes.values())] * 2
    (folder / "state.json").write_text(json.dumps(state))
    verdict = replay(run, "10", status=1)["verdict"]
    assert (verdict["kind"], verdict["step"]) == ("data" if hashed else "weights", 20), verdict
    assert hashed or name in verdict["sentence"]


@exhaustive
def test_changed_corpus_bytes_are_detected(run):
    data = Path(run.manifest().corpus.path) / "train.bin"
    content = data.read_bytes()
    try:
        data.write_bytes(bytes(byte ^ 1 if i % 2 == 0 else byte for i, byte in enumerate(content)))
        verdict = replay(run, "10", status=1)["verdict"]
    finally:
        data.write_bytes(content)
    assert (verdict["kind"], verdict["step"]) == ("data", 20)
    assert "the corpus does not have the bytes" in verdict["sentence"]


WRONG = """
import sys, torch
from evener.core.run.resolve import resolve
from evener.core.run.run_spec import parse_args
from evener.worker.train.loop import train
from evener.worker.sync.allreduce_hook import AllReduceHook

start = AllReduceHook.start
def wrong(self, bucket, **more):
    result = start(self, bucket, **more)
    if int(sys.argv[1]) and self.steps >= int(sys.argv[1]):
        result = result.then(lambda future: future.value() * torch.linspace(0, 2, len(future.value())))
    self.steps += not more["is_warmup"]
    return result
AllReduceHook.start, AllReduceHook.steps = wrong, 0
train(resolve(parse_args(sys.argv[2:])))
"""


@exhaustive
def test_wrong_reduction_is_detected(tmp_path, corpus, run_script):
    out = tmp_path / "run"
    flags = ["--data", str(corpus), "--model", "tiny", "--out", str(out), "--threads", "1", "--dtype", "fp32", *FLAGS]
    done = run_script(WRONG, "24", *flags, ranks=2)
    assert done.returncode == 0, done.stderr
    verdict = replay(out, "10", status=1)["verdict"]
    assert (verdict["kind"], verdict["step"]) == ("jump", 24), verdict
    assert "wrong reduction" in verdict["sentence"]
    assert replay(out, "4", "--from-step", "20")["passes"]


@exhaustive
@pytest.mark.parametrize(
    ("flags", "kind"), [(("--sync", "int8"), "--sync int8"), *exhaustively((("--dtype", "bf16"), "bf16 rounds"))]
)
def test_lossy_strategy_is_compared_with_wider_tolerance(tmp_path, corpus, flags, kind, server):
    found = replay(start_run(server, tmp_path / "run", corpus, *flags), "20")
    assert found["passes"]
    assert found["tolerance"]["why"].startswith(kind)
    assert found["tolerance"]["later"][0] > 2 * found["verdict"]["largest_loss"]


@exhaustive
def test_dropout_replays_on_one_rank_and_is_refused_on_two(tmp_path, corpus, server):
    alone = start_run(server, tmp_path / "one", corpus, "--dropout", "0.1", ranks=1)
    for num_steps in (10, 30):
        assert replay(alone, num_steps)["verdict"]["largest_loss"] == 0.0
    two = start_run(server, tmp_path / "two", corpus, "--dropout", "0.1", "--steps", "3")
    refused = verify(two, "--replay", "2", status=2).stderr
    assert "cannot be replayed: it trained with dropout, which each of its ranks drew for itself" in refused


@exhaustive
def test_impossible_replay_is_refused_with_reason(run, tmp_path, corpus, run_script, server, monkeypatch):
    far = verify(run, "--replay", "31", status=2).stderr
    assert "no checkpoint is followed by 31 recorded steps: 30 after step 0, 20 after step 10, 10 after step 20" in far
    assert "hint:  --replay 30" in far
    assert "no checkpoint of it" in verify(run, "--replay", "3", "--from-step", "7", status=2).stderr
    assert "compares a run with itself" in verify(run, run, "--replay", "3", status=2).stderr
    assert "--from-step" in verify(run, "--from-step", "3", status=2).stderr
    assert "not a run directory" in verify(tmp_path, "--replay", "3", status=2).stderr

    drifts = start_run(server, tmp_path / "drifts", corpus, "--sync", "diloco:2", "--steps", "4")
    assert "its replicas drift apart" in verify(drifts, "--replay", "2", status=2).stderr
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setitem(ENV, "TMPDIR", str(scratch))

    def manifest(**changes):
        tree = json.loads(run.manifest_path.read_text())
        run.manifest_path.write_text(json.dumps(tree | changes))
        told = verify(run, "--replay", "3", status=2).stderr
        run.manifest_path.write_text(json.dumps(tree))
        return told

    tree = json.loads(run.manifest_path.read_text())
    assert "a program of one's own" in manifest(sampler="own", shape=None, corpus=None)
    spec = tree["spec"]
    gone = str(tmp_path / "gone")
    moved = manifest(corpus=tree["corpus"] | {"path": gone}, spec=spec | {"data": {"data": gone}})
    assert "no such folder" in moved
    assert "its model's shape differs" in manifest(shape=tree["shape"] | {"width": 32})
    assert "had a learning rate of" in manifest(spec=spec | {"train": spec["train"] | {"lr": 0.1}})
    assert not list(scratch.iterdir())  # of a replay that is ended early
    assert "tokens, but --batch now gives" in manifest(spec=spec | {"train": spec["train"] | {"batch": 8}})
