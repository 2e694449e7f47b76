"""Find the program in what people type after `evener launch --`: `python x.py`, `torchrun …`, `bash run.sh`, `x.py`.

evener takes the place of torchrun, accelerate and deepspeed, so their names and options are taken out. `trl sft` starts
accelerate with the module trl.scripts.sft: that is the program. Another name that is no file is a console script of the
environment, which every host has to have. A shell script
runs once a rank, with the variables that torchrun sets; one that calls such a launcher itself would start ranks of its
own in every rank, and is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evener.core.base.errors import UsageError
from evener.core.base.shell import quote_command, quote_word
from evener.core.base.units import join_names

PYTHON = re.compile(r"python(w|\d(\.\d+)?t?)?")
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
PYTHON_FLAGS = {"-u", "-B", "-O", "-OO", "-s", "-E", "-I", "-P", "-q", "-v", "-b", "-d", "-i"}
PYTHON_OPTIONS = {"-W", "-X"}  # with a value
RUN_PREFIXES = (("uv", "run"), ("poetry", "run"), ("pipenv", "run"), ("hatch", "run"), ("nohup",), ("time",), ("env",))
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")
TRL_TRAININGS = ("sft", "dpo", "grpo", "kto", "reward", "rloo")  # of trl 1.16, modules of trl.scripts
OTHER_LAUNCHERS = ("mpirun", "mpiexec", "srun", "horovodrun", "colossalai", "ray", "jsrun")
MAX_SCRIPT_BYTES = 1 << 20


@dataclass(frozen=True)
class LauncherProgram:
    """How a launcher's command line is read; its other options take a value."""

    module: str  # `python -m` runs it by this name
    flags: frozenset[str]  # options without a value, in the form of `_canonical`
    ranks: frozenset[str] = frozenset()  # options that give the ranks of each host


LAUNCHERS = {
    "torchrun": LauncherProgram(
        "torch.distributed.run",
        frozenset({"standalone", "run-path", "virtual-local-rank", "use-env"}),
        frozenset({"nproc-per-node"}),
    ),
    "accelerate": LauncherProgram(
        "accelerate.commands.launch",
        frozenset(
            {
                "cpu", "multi-gpu", "tpu", "ipex", "quiet", "q", "debug", "use-deepspeed", "use-fsdp", "use-xpu",
                "use-megatron-lm", "use-parallelism-config", "same-network", "dynamo-use-fullgraph",
                "dynamo-use-dynamic", "dynamo-use-regional-compilation", "tpu-cluster", "no-tpu-cluster",
                "tpu-use-sudo", "downcast-bf16", "enable-cpu-affinity", "fp8-use-autocast-during-eval",
            }
        ),
    ),
    "deepspeed": LauncherProgram(
        "deepspeed.launcher.runner",
        frozenset(
            {"no-local-rank", "no-ssh", "no-ssh-check", "bind-cores-to-rank", "force-multi", "elastic-training",
             "save-pid"}
        ),
        frozenset({"num-gpus", "num-accelerators"}),
    ),
}  # fmt: skip
MODULES = {one.module: name for name, one in LAUNCHERS.items()} | {
    "torch.distributed.launch": "torchrun",
    "deepspeed": "deepspeed",
}
# Options that change how the program trains, and that evener does not follow.
UNFOLLOWED = ("use-fsdp", "use-deepspeed", "gradient-accumulation-steps", "config-file", "hostfile")
# The variables by which accelerate's launcher passes an option on to the program.
FOLLOWED = {"mixed-precision": "ACCELERATE_MIXED_PRECISION"}
# A launcher where a shell takes a command: at the start of one, after variables, and as a module of Python.
LAUNCHER_CALL = re.compile(
    r"(?:^|[;&|(]|\b(?:then|do|else|exec|time|nohup)\b)\s*(?:[A-Za-z_]\w*=\S*\s+)*(?:uv\s+run\s+)?"
    r"(?P<call>(?:[\w./~-]*/)?(?:torchrun|deepspeed|mpirun|mpiexec|srun|horovodrun|accelerate-launch|accelerate\s+launch)"
    r"(?=[\s\\]|$)|\S*python[\d.]*\s+(?:-\S+\s+)*-m\s+"
    r"(?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch|deepspeed)\b).*"
)
COMMENT = re.compile(r"(^|\s)#.*")


@dataclass(frozen=True)
class Program:
    """A program as torchrun takes it, in its project's folder."""

    argv: list[str]  # "train.py …", "-m module …", or "--no-python bash run.sh …"
    name: str  # of its file or module
    project: Path
    ranks: int | None = None  # on each host, as the launcher that was typed would start
    left_out: list[str] = field(default_factory=list)  # the words that were taken out
    unfollowed: list[str] = field(default_factory=list)  # options among them that change how a program trains
    total_ranks: int | None = None  # on all hosts together, as the launcher that was typed would start
    variables: list[str] = field(default_factory=list)  # NAME=VALUE, as the launcher that was typed would set

    @property
    def is_translated(self) -> bool:
        """Return whether words were taken out."""
        return bool(self.left_out)

    def describe(self, ranks: int | None) -> str:
        """Return the translation for the user; `ranks`: of each host, None: by evener's own rule."""
        options = ["--ranks", str(ranks)] if ranks is not None else []
        options += [word for variable in self.variables for word in ("--env", variable)]
        words = self.argv[1:] if self.argv[0] == "--no-python" else self.argv
        command = quote_command(["evener", "launch", *options, "--", *words])
        text = f"evener starts the ranks itself, without {quote_command(self.left_out)}: {command}"
        if self.unfollowed:
            text += f"\nwarning: {join_names(self.unfollowed)}: not followed; the program has to set it itself"
        return text


def parse_program(words: Sequence[str], cwd: Path) -> Program:
    """Return the program that `words` name, relative to its project: `cwd`, or the script's folder if it is elsewhere.

    Raise UsageError if there is no such script, or if it starts ranks itself.
    """
    found = _without_launchers(list(words), cwd)
    rest = found.rest
    if not rest:
        raise UsageError(f"{quote_command(words)}: which program?", hint="evener launch -- SCRIPT.py ARGS")
    details = found.ranks, found.left_out, found.unfollowed, found.total_ranks, found.variables
    if rest[0] == "-m":
        if len(rest) < 2:
            raise UsageError("-m: expected a module after it", hint="evener launch -- -m package.module ARGS")
        return Program(rest, rest[1].rpartition(".")[2], cwd, *details)
    shell: list[str] = []
    if Path(rest[0]).name in SHELLS and not _is_of_project(rest[0], cwd):
        options = next((i for i, word in enumerate(rest[1:], start=1) if not word.startswith("-")), len(rest))
        if options == len(rest) or "c" in "".join(rest[1:options]):
            raise UsageError(
                f"{quote_command(rest)}: expected a shell script",
                hint="put the commands in a file: evener launch -- bash run.sh",
            )
        shell, rest = rest[:options], rest[options:]
    script = (cwd / rest[0]).resolve()
    if not script.is_file():
        if _is_console_script(rest[0]):
            return Program(["--no-python", *rest], rest[0], cwd, *details)
        raise UsageError(f"{rest[0]}: no such script", hint=_script_hint(rest[0], cwd))
    project = cwd if script.is_relative_to(cwd) else script.parent
    argv = [script.relative_to(project).as_posix(), *rest[1:]]
    interpreter = shell or _interpreter(script)
    if interpreter and Path(interpreter[0]).name in SHELLS:
        _check_starts_no_ranks(script, rest[0])
    if interpreter:
        argv = ["--no-python", *interpreter, *argv]
    elif found.is_command or _is_binary(script):
        argv = ["--no-python", f"./{argv[0]}", *argv[1:]]
    return Program(argv, script.stem, project, *details)


def _is_of_project(word: str, cwd: Path) -> bool:
    return (cwd / word).is_file() and (cwd / word).resolve().is_relative_to(cwd)


@dataclass
class _Reading:
    """Words that are read from the left."""

    rest: list[str]  # from the script, the command or -m on
    left_out: list[str] = field(default_factory=list)
    ranks: int | None = None  # on each host
    unfollowed: list[str] = field(default_factory=list)
    total_ranks: int | None = None  # on all hosts
    variables: list[str] = field(default_factory=list)
    is_command: bool = False  # the rest is no program of Python: --no-python

    def leave_out(self, num: int) -> None:
        """Leave out the next words."""
        self.left_out, self.rest = self.left_out + self.rest[:num], self.rest[num:]


def _without_launchers(words: list[str], cwd: Path) -> _Reading:
    """Take out all before the script, the command or -m."""
    found = _Reading(words)
    while found.rest:
        name, rest = Path(found.rest[0]).name, found.rest
        if _is_of_project(rest[0], cwd):
            break
        taken = next((len(prefix) for prefix in RUN_PREFIXES if (name, *rest[1 : len(prefix)]) == prefix), 0)
        if taken:
            found.leave_out(taken)
        elif ASSIGNMENT.fullmatch(rest[0]):
            variable = rest[0].partition("=")[0]
            raise UsageError(
                f"{variable}=…: not a program", hint=f"evener launch --env {quote_word(variable)}=VALUE -- …"
            )
        elif PYTHON.fullmatch(name):
            found.leave_out(_num_python_words(rest))
        elif rest[0] == "-m" and len(rest) > 1 and rest[1] in MODULES:
            _leave_out_launcher(found, MODULES[rest[1]], 2)
        elif name in ("torchrun", "deepspeed", "accelerate-launch"):
            _leave_out_launcher(found, name.partition("-")[0], 1)
        elif (name, *rest[1:2]) == ("accelerate", "launch"):
            _leave_out_launcher(found, name, 2)
        elif name == "trl" and rest[1:2] and rest[1] in TRL_TRAININGS:
            _leave_out_trl(found)
        elif name in OTHER_LAUNCHERS:
            script = next((i for i, word in enumerate(rest) if word.endswith(".py")), None)
            hint = ["SCRIPT.py", "ARGS"] if script is None else rest[script:]
            raise UsageError(
                f"{name} starts ranks of its own, as evener does", hint=f"evener launch -- {quote_command(hint)}"
            )
        else:
            break
    return found


def _num_python_words(words: list[str]) -> int:
    """Return the number of words of Python and its options, before the script or -m."""
    i = 1
    while i < len(words) and words[i].startswith("-") and words[i] != "-m":
        if words[i] == "-c" or words[i] == "-":
            raise UsageError(
                f"{quote_command(words[: i + 1])}: evener launch starts files and modules",
                hint="put the program in a file: evener launch -- SCRIPT.py",
            )
        if words[i] not in PYTHON_FLAGS and words[i][:2] not in PYTHON_OPTIONS:
            raise UsageError(f"{words[0]} {words[i]}: an unknown option of Python", hint="evener launch -- SCRIPT.py")
        i += 2 if words[i] in PYTHON_OPTIONS else 1
    return i


def _leave_out_launcher(found: _Reading, name: str, start: int) -> None:
    """Leave out a launcher, of so many words, and its options."""
    launcher, words, i, is_module = LAUNCHERS[name], found.rest, start, False
    while i < len(words) and words[i].startswith("-"):
        option, has_value, value = words[i].partition("=")
        canonical = option.lstrip("-").replace("_", "-")
        if words[i] == "--":
            i += 1
            break
        i += 1
        if canonical in ("m", "module"):
            is_module = True
        elif canonical == "no-python":
            found.is_command = True
        elif canonical not in launcher.flags and not has_value and not re.fullmatch(r"-[tr]\d+", option):
            value, i = words[i] if i < len(words) else "", i + 1
        if canonical in launcher.ranks and value.isdecimal() and int(value):
            found.ranks = int(value)
        if canonical == "num-processes" and value.isdecimal() and int(value):
            found.total_ranks = int(value)
        if canonical in FOLLOWED:
            found.variables.append(f"{FOLLOWED[canonical]}={value}")
        if canonical in UNFOLLOWED:
            found.unfollowed.append(option)
    found.leave_out(i)
    if is_module and found.rest:
        found.rest = ["-m", *found.rest]


def _leave_out_trl(found: _Reading) -> None:
    """Replace `trl sft` by the module that it starts, and leave out what it would pass on to accelerate."""
    training = found.rest[1]
    found.leave_out(2)
    kept, words = ["-m", f"trl.scripts.{training}"], iter(found.rest)
    for word in words:
        option, has_value, value = word.partition("=")
        if option not in ("--accelerate_config", "--num_processes"):
            kept.append(word)
            continue
        given = [word] if has_value else [word, next(words, "")]
        found.left_out += given
        if option == "--accelerate_config":
            found.unfollowed.append(option)
        elif (number := value if has_value else given[1]).isdecimal() and int(number):
            found.total_ranks = int(number)
    found.rest = kept


def _is_console_script(name: str) -> bool:
    """Return whether the environment of evener has a program of this name."""
    return Path(name).name == name and Path(sys.executable).with_name(name).is_file()


def _is_binary(script: Path) -> bool:
    try:
        with script.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def _interpreter(script: Path) -> list[str]:
    """Return the words that a script's first line names, or bash for its suffix; [] for Python."""
    try:
        with script.open("rb") as file:
            first = file.readline(256).decode(errors="replace")
    except OSError:
        first = ""
    if first.startswith("#!") and script.suffix != ".py":
        words = first[2:].split()
        if words and Path(words[0]).name == "env":
            words = words[2:] if words[1:2] == ["-S"] else words[1:]
        if words and not PYTHON.fullmatch(Path(words[0]).name):
            return [Path(words[0]).name, *words[1:]] if Path(words[0]).name in SHELLS else words
        return []
    return ["bash"] if script.suffix in (".sh", ".bash") else []


def _check_starts_no_ranks(script: Path, given: str) -> None:
    """Raise UsageError if a shell script calls a launcher: each rank would start ranks of its own."""
    try:
        with script.open(errors="replace") as file:
            text = file.read(MAX_SCRIPT_BYTES)
    except OSError as error:
        raise UsageError(f"{given}: {error.strerror}") from None
    lines, number = text.splitlines(), 0
    while number < len(lines):
        first, code = number, COMMENT.sub("", lines[number])
        while code.rstrip().endswith("\\") and number + 1 < len(lines):  # continued on the next line
            number += 1
            code = f"{code.rstrip()[:-1]} {COMMENT.sub('', lines[number]).strip()}"
        number += 1
        if (match := LAUNCHER_CALL.search(code)) is not None:
            command = re.split(r"[;&|<>]", code[match.start("call") :])[0]
            raise UsageError(
                f"{given}, line {first + 1}: {match['call']} starts ranks of its own in every rank",
                hint="type that line after `evener launch --`, with the script's variables filled in"
                if "$" in command
                else f"evener launch -- {quote_command(command.split())}",
            )


def _script_hint(word: str, cwd: Path) -> str:
    """Return the command to type where a script was not found: with the most similar one, if there is one."""
    import difflib

    names = [path.relative_to(cwd).as_posix() for pattern in ("*.py", "*/*.py", "*.sh") for path in cwd.glob(pattern)]
    similar = difflib.get_close_matches(word, names, n=1)
    return f"evener launch -- {quote_command(similar or ['SCRIPT.py'])} ARGS"
