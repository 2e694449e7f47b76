"""Read the variables that a user passes to a program: `--env NAME=VALUE`, `--env NAME` and `--env-file FILE`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from evener.core.base.errors import UsageError
from evener.core.base.shell import quote_word
from evener.node.remote.environment import is_secret_variable

NAME = re.compile(r"[A-Za-z_]\w*")
# What evener and torchrun set on every rank.
SET_BY_EVENER = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|EVENER_\w+"
)
QUOTED = re.compile(r"""(?P<quote>["'])(?P<value>.*?)(?P=quote)(\s+#.*)?""")


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
                name, value = _parse_line(text, environment, f"--env-file {quote_word(file)}, line {number}")
                variables[name] = value
    for text in given:
        name, value = _parse(text, environment, "--env")
        variables[name] = value
        variables.shown.pop(name, None)
        if "=" in text and not is_secret_variable(name, value):
            variables.shown[name] = value
    return variables


def _parse(text: str, environment: Mapping[str, str], where: str) -> tuple[str, str]:
    """Return (name, value) of NAME=VALUE, or of NAME, which is set in `environment`. No message shows a value."""
    name, is_given, value = text.partition("=")
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{where}: {name!r} is no name of a variable" if is_given else f"{where}: expected NAME or NAME=VALUE",
            hint="--env NAME=VALUE, or --env NAME for one that is set here",
        )
    if SET_BY_EVENER.fullmatch(name):
        raise UsageError(f"{where}: {name} is set by evener on every rank", hint="leave it out")
    if not is_given and name not in environment:
        raise UsageError(f"{where}: {name} is not set here", hint=f"export {name}=…, or --env {name}=VALUE")
    value = value if is_given else environment[name]
    if "\0" in value:
        raise UsageError(f"{where}: the value of {name} has a NUL")
    return name, value


def _parse_line(text: str, environment: Mapping[str, str], where: str) -> tuple[str, str]:
    """Return (name, value) of a line of a file. No message shows any of it: what is no name may be a secret."""
    name, is_given, value = (part.strip() for part in text.partition("="))
    if not NAME.fullmatch(name) or (not is_given and name not in environment):
        raise UsageError(f"{where}: expected NAME=VALUE, or the NAME of a variable that is set here")
    if value[:1] in ("'", '"'):
        quoted = QUOTED.fullmatch(value)
        if quoted is None:
            raise UsageError(f"{where}: a quote is not closed on its line", hint="one line a variable")
        value = quoted["value"]
    else:
        value = re.sub(r"\s+#.*", "", value)
    return _parse(f"{name}={value}" if is_given else name, environment, where)


def _read_lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UsageError(f"--env-file {quote_word(file)}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--env-file {quote_word(file)}: byte {error.start} is not UTF-8") from None
