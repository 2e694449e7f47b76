"""Read the variables that a user passes to a program: `--env NAME=VALUE`, `--env NAME` and `--env-file FILE`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from evener.core.base.errors import UsageError
from evener.core.base.shell import quote_word
from evener.node.remote.environment import is_secret_variable, launcher_variables

NAME = re.compile(r"[A-Za-z_]\w*")


class PassedVariables(dict[str, str]):
    """Variables by name; `shown` are those whose values may be written to the run directory and printed.

    These were typed, and look like no secret. The value of any other reaches the hosts alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[str, str] = {}


def read_passed_variables(
    given: Sequence[str], files: Sequence[str], environment: Mapping[str, str]
) -> PassedVariables:
    """Return the variables of --env-file and --env; the latter override the former, and later ones earlier ones.

    Raise UsageError for a name that is none, that is not set here or that evener sets itself, and for a damaged file.
    """
    variables = PassedVariables()
    for file in files:
        for number, line in enumerate(_read_lines(file), start=1):
            text = line.strip().removeprefix("export ").strip()
            if text and not text.startswith("#"):
                name, value = _parse(text, environment, f"--env-file {quote_word(file)}, line {number}", unquote=True)
                variables[name] = value
    for text in given:
        name, value = _parse(text, environment, "--env")
        variables[name] = value
        variables.shown.pop(name, None)
        if "=" in text and not is_secret_variable(name, value):
            variables.shown[name] = value
    return variables


def _parse(text: str, environment: Mapping[str, str], where: str, *, unquote: bool = False) -> tuple[str, str]:
    """Return (name, value) of NAME=VALUE, or of NAME, which is set in `environment`. No message shows a value."""
    name, is_given, value = text.partition("=")
    name = name.strip() if unquote else name
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{where}: {name!r} is no name of a variable" if is_given else f"{where}: expected NAME or NAME=VALUE",
            hint="--env NAME=VALUE, or --env NAME for one that is set here",
        )
    if launcher_variables({name: ""}):
        raise UsageError(f"{where}: {name} is set by evener on every rank", hint="leave it out")
    if not is_given and name not in environment:
        raise UsageError(f"{where}: {name} is not set here", hint=f"export {name}=…, or --env {name}=VALUE")
    value = value if is_given else environment[name]
    if unquote and is_given:
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
    if "\0" in value:
        raise UsageError(f"{where}: the value of {name} has a NUL")
    return name, value


def _read_lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--env-file {quote_word(file)}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--env-file {quote_word(file)}: byte {error.start} is not UTF-8") from None
