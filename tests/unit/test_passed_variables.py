"""Pass variables to a program: which reach it, and which values may be shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.core.base.errors import UsageError
from evener.launch.script.passed_variables import read_passed_variables

SET = {"HF_TOKEN": "hf_abcDEF123456", "HOME": "/root"}


def test_later_ones_override_and_only_typed_ones_that_are_no_secret_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "env"
    lines = ["# of the run", "", "export A=file", "B = 'two words'", 'C="x=y"', "HOME", "LR=1e-3  # warm"]
    file.write_text("\ufeff" + "\n".join([*lines, 'FLUX_API_KEY="k" # a key', ""]))
    given = ["A=typed", "PASSWORD=1", "HF_TOKEN", "NANOCHAT_BASE_DIR=/data", "EMPTY="]
    passed = read_passed_variables(given, [str(file)], SET)
    assert passed == {
        "A": "typed", "B": "two words", "C": "x=y", "HOME": "/root", "LR": "1e-3", "FLUX_API_KEY": "k", "PASSWORD": "1",
        "HF_TOKEN": SET["HF_TOKEN"], "NANOCHAT_BASE_DIR": "/data", "EMPTY": "",
    }  # fmt: skip
    assert passed.shown == {"A": "typed", "NANOCHAT_BASE_DIR": "/data", "EMPTY": ""}


def test_value_given_again_by_name_is_not_shown() -> None:
    assert read_passed_variables(["HOME=/x", "HOME"], [], SET).shown == {}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["NOWHERE"], "--env: NOWHERE is not set here"),
        (["a-b=secret"], "--env: 'a-b' is no name of a variable"),
        (["a b"], "--env: expected NAME or NAME=VALUE"),
        (["RANK=0"], "--env: RANK is set by evener on every rank"),
    ],
)
def test_wrong_name_is_refused_without_its_value(given: list[str], error: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_passed_variables(given, [], SET)
    assert str(raised.value) == error
    assert "secret" not in raised.value.hint


def test_damaged_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text("A=1\n=2\n")
    with pytest.raises(UsageError, match="env, line 2: expected NAME=VALUE"):
        read_passed_variables([], [str(file)], SET)
    for text, error in (
        ("hf_abcDEF123456\n", "line 1: expected NAME=VALUE"),
        ('KEY="-----BEGIN\nabc+/def==\n', "line 1: a quote is not closed"),
        ("abc+/def==\n", "line 1: expected NAME=VALUE"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=error) as raised:
            read_passed_variables([], [str(file)], SET)
        assert not any(part in f"{raised.value} {raised.value.hint}" for part in ("hf_abc", "abc+"))
    file.write_bytes(b"A=\xff\n")
    with pytest.raises(UsageError, match="byte 2 is not UTF-8"):
        read_passed_variables([], [str(file)], SET)
    with pytest.raises(UsageError, match="No such file"):
        read_passed_variables([], [str(tmp_path / "none")], SET)
