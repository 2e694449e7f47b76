"""Settings of a run are read from flags and files, or refused in one line."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.core.base.errors import UsageError
from evener.core.run.run_spec import FLAGS, RunSpec, TrainSpec, make_spec, parse_args, to_flags


def test_every_setting_is_a_flag_with_help():
    assert FLAGS["steps"].name == "--steps"
    assert FLAGS["micro_batch"].section == "train"
    assert all(flag.help for flag in FLAGS.values())


def test_file_overrides_the_base_and_flags_override_both(tmp_path):
    file, base = tmp_path / "run.toml", RunSpec(train=TrainSpec(sync="auto", steps=3, batch=9))
    file.write_text("[train]\nsteps = 7\n")
    train = make_spec(file, {"batch": "5"}, base).train
    assert (train.sync, train.steps, train.batch) == ("auto", 7, 5)
    file.write_text('[train]\nsync = "ddp"\n')
    assert make_spec(file, {}, base).train.sync == "ddp"


@pytest.mark.parametrize(("text", "steps"), [("5k", 5000), ("2.5K", 2500), ("1e4", 10_000), ("1M", 10**6), ("20", 20)])
def test_whole_numbers_may_have_suffixes(text, steps):
    assert parse_args(["--steps", text]).train.steps == steps


def test_flags_override_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('out = "runs/x"\n[train]\nsteps = 7\nlr = 0.5\n[model]\nmodel = "tiny"\n')
    spec = parse_args([str(file), "--steps", "9", "--recompute", "--ranks=2"])
    assert (spec.out, spec.train.steps, spec.train.lr, spec.model.model) == ("runs/x", 9, 0.5, "tiny")
    assert spec.model.recompute
    assert spec.machine.ranks == 2


@given(
    st.builds(
        lambda steps, batch, micro, lr, name, dropout, switch, out: msgspec.structs.replace(
            RunSpec(),
            out=out,
            model=msgspec.structs.replace(RunSpec().model, model=name, dropout=dropout, recompute=switch),
            train=msgspec.structs.replace(RunSpec().train, steps=steps, batch=batch, micro_batch=micro, lr=lr),
        ),
        st.integers(1, 2**31),
        st.integers(1, 2**31),
        st.none() | st.integers(1, 2**31),
        st.floats(0, 1e6),
        st.text(min_size=1).filter(lambda text: text.strip() and "\0" not in text),
        st.none() | st.floats(0, 1, exclude_max=True),
        st.booleans(),
        st.none() | st.text(min_size=1).filter(lambda text: text.strip() and "\0" not in text),
    )
)
def test_spec_round_trips_through_flags(spec):
    assert parse_args(to_flags(spec)) == spec


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["--profile-ranks", "1,x"], "--profile-ranks 1,x: expected ranks such as 0,2; or all", ""),
        (["--stesp", "3"], "--stesp: no such flag", 'did you mean "--steps"?'),
        (["--batch", "0"], "--batch '0': expected a whole number >= 1", ""),
        (["--lr", "-1"], "--lr '-1': expected a number >= 0.0", ""),
        (["--loss-budget", "-1"], "--loss-budget '-1': expected a number >= 0.0", ""),
        (["--lr", "inf"], "--lr inf: expected a finite number", ""),
        (["--steps", "many"], "--steps 'many': expected a whole number, got text", ""),
        (["--block-size=NULL"], "--block-size 'NULL': expected a whole number", ""),
        (["--steps"], "--steps: expected a value after it: whole number", ""),
        (["--compile", "maybe"], "--compile 'maybe': expected auto or on or off", ""),
        (
            ["--ranks", "5", "--batch", "2"],
            "--ranks 5: more ranks than the 2 sequences of one batch",
            "--batch 5 or more",
        ),
        (["--lr", "1", "--min-lr", "2"], "--min-lr 2: greater than --lr 1", ""),
        (["--warmup", "300"], "--warmup 300: longer than --steps 200", ""),
        (["--backend", "nccl", "--device", "cpu"], "--backend nccl: NCCL moves GPU memory only", "--backend gloo"),
        (["nowhere.toml"], "nowhere.toml: No such file or directory", "flags begin with --"),
        (["--steps", "3", "stray"], "stray: expected a flag", ""),
    ],
)
def test_invalid_flag_is_a_one_line_error(args, message, hint):
    with pytest.raises(UsageError) as caught:
        parse_args(args)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[train]\nstesp = 3", "no key stesp in [train]", 'did you mean "steps"?'),
        ("[trian]\nsteps = 3", "no key trian", 'did you mean "train"?'),
        ("[model]\nsteps = 3", "no key steps in [model]", "steps belongs in [train]"),
        ("steps = 3", "no key steps", "steps belongs in [train]"),
        ("[train]\nsteps = 'x'", "expected a whole number, got text, at train.steps", ""),
        ("[train]\nsteps = true", "expected a whole number, got true or false, at train.steps", ""),
        ("train = 3", "expected object, got a whole number, at train", ""),
        ("[train", "not TOML", ""),
    ],
)
def test_invalid_file_is_a_one_line_error(tmp_path, text, message, hint):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        make_spec(file, {})
    assert str(caught.value).startswith(f"{file}: {message}")
    assert caught.value.hint.startswith(hint)


def test_nan_is_refused():
    with pytest.raises(UsageError):
        parse_args(["--lr", str(math.nan)])
