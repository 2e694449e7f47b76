"""Find the program in what people type after `evener launch --`: `python x.py`, `torchrun …`, `bash run.sh`, `x.py`.

evener takes the place of torchrun, accelerate and deepspeed, so their names and options are taken out. A shell script
runs once a rank, with the variables that torchrun sets; one that calls such a launcher itself would start ranks of its
own in every rank, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evener.core.base.errors import UsageError
from evener.core.base.shell import quote_command

PYTHON = re.compile(r"python(w|\d(\.\d+)?t?)?")
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
PYTHON_FLAGS = {"-u", "-B", "-O", "-OO", "-s", "-E", "-I", "-P", "-q", "-v", "-b", "-d", "-i"}
PYTHON_OPTIONS = {"-W", "-X"}  # with a value
RUN_PREFIXES = (("uv", "run"), ("poetry", "run"), ("pipenv", "run"), ("hatch", "run"), ("nohup",), ("time",))
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
        frozenset({"standalone", "run-path", "virtual-local-rank"}),
        frozenset({"nproc-per-node"}),
    ),
    "accelerate": LauncherProgram(
        "accelerate.commands.launch",
        frozenset(
            {
                "cpu", "multi-gpu", "tpu", "ipex", "quiet", "q", "debug", "use-deepspeed", "use-fsdp", "use-xpu",
                "use-megatron-lm", "use-parallelism-config", "same-network", "dynamo-use-fullgraph",
                "dynamo-use-dynamic", "dynamo-use-regional-compilation", "tpu-cluster", "no-tpu-cluster",
                "tpu-use-sudo", "downcast-bf16", "enable-cpu-affinity",
            }
        ),
    ),
    "deepspeed": LauncherProgram(
        "deepspeed.launcher.runner",
        frozenset(
            {"no-local-rank", "no-ssh", "no-ssh-check", "bind-cores-to-rank", "force-multi", "elastic-training",
             "save-pid"}
        ),
        frozenset({"num-gpus"}),
    ),
}  # fmt: skip
MODULES = {one.module: name for name, one in LAUNCHERS.items()} | {
    "torch.distributed.launch": "torchrun",
    "deepspeed": "deepspeed",
}
LAUNCHER_CALL = re.compile(
    r"(?<![\w/.-])((?:\S*/)?(?:torchrun|deepspeed|mpirun|mpiexec|srun|horovodrun)(?=\s)|accelerate\s+launch"
    r"|-m\s+torch\.distributed\.(?:run|launch)|-m\s+accelerate\.commands\.launch)"
)


@dataclass(frozen=True)
class Program:
    """A program as torchrun takes it, in its project's folder."""

    argv: list[str]  # "train.py …", "-m module …", or "--no-python bash run.sh …"
    name: str  # of its file or module
    project: Path
    ranks: int | None = None  # on each host, as the launcher that was typed would start
    left_out: list[str] = field(default_factory=list)  # the words that were taken out

    @property
    def is_translated(self) -> bool:
        """Return whether words were taken out."""
        return bool(self.left_out)

    def describe(self) -> str:
        """Return the translation as a sentence for the user."""
        ranks = ["--ranks", str(self.ranks)] if self.ranks is not None else []
        words = self.argv[1:] if self.argv[0] == "--no-python" else self.argv
        command = quote_command(["evener", "launch", *ranks, "--", *words])
        return f"evener starts the ranks itself, without {quote_command(self.left_out)}: {command}"


def parse_program(words: Sequence[str], cwd: Path) -> Program:
    """Return the program that `words` name, relative to its project: `cwd`, or the script's folder if it is elsewhere.

    Raise UsageError if there is no such script, or if it starts ranks itself.
    """
    rest, left_out, ranks = _without_launchers(list(words))
    if not rest:
        raise UsageError(f"{quote_command(words)}: which program?", hint="evener launch -- SCRIPT.py ARGS")
    if rest[0] == "-m":
        if len(rest) < 2:
            raise UsageError("-m: expected a module after it", hint="evener launch -- -m package.module ARGS")
        return Program(rest, rest[1].rpartition(".")[2], cwd, ranks, left_out)
    shell: list[str] = []
    if Path(rest[0]).name in SHELLS and not (cwd / rest[0]).is_file():
        if len(rest) < 2 or rest[1].startswith("-"):
            raise UsageError(
                f"{quote_command(rest)}: expected a shell script",
                hint="put the commands in a file: evener launch -- bash run.sh",
            )
        shell, rest = rest[:1], rest[1:]
    script = (cwd / rest[0]).resolve()
    if not script.is_file():
        raise UsageError(f"{rest[0]}: no such script", hint=_script_hint(rest[0], cwd))
    project = cwd if script.is_relative_to(cwd) else script.parent
    argv = [script.relative_to(project).as_posix(), *rest[1:]]
    shell = shell or _interpreter(script)
    if shell:
        _check_starts_no_ranks(script, rest[0])
        argv = ["--no-python", *shell, *argv]
    return Program(argv, script.stem, project, ranks, left_out)


def _without_launchers(words: list[str]) -> tuple[list[str], list[str], int | None]:
    """Return the words from the script or -m on, the words before them, and the ranks that these ask for."""
    rest, left_out, ranks = words, list[str](), None
    while rest:
        name = Path(rest[0]).name
        taken = next((len(prefix) for prefix in RUN_PREFIXES if (name, *rest[1 : len(prefix)]) == prefix), 0)
        if taken:
            rest, left_out = rest[taken:], left_out + rest[:taken]
        elif PYTHON.fullmatch(name):
            rest, taken_words = _without_python(rest)
            left_out += taken_words
        elif rest[0] == "-m" and len(rest) > 1 and rest[1] in MODULES:
            rest, taken_words, ranks = _without_launcher(MODULES[rest[1]], rest, 2)
            left_out += taken_words
        elif name in ("torchrun", "deepspeed") or (name, *rest[1:2]) == ("accelerate", "launch"):
            rest, taken_words, ranks = _without_launcher(name, rest, 2 if name == "accelerate" else 1)
            left_out += taken_words
        elif name in OTHER_LAUNCHERS:
            script = next((i for i, word in enumerate(rest) if word.endswith(".py")), None)
            hint = ["SCRIPT.py", "ARGS"] if script is None else rest[script:]
            raise UsageError(
                f"{name} starts ranks of its own, as evener does", hint=f"evener launch -- {quote_command(hint)}"
            )
        else:
            break
    return rest, left_out, ranks


def _without_python(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words from the script or -m on, and Python with its options."""
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
    return words[i:], words[:i]


def _without_launcher(name: str, words: list[str], start: int) -> tuple[list[str], list[str], int | None]:
    """Return the words from the script or -m on, those of the launcher, and the ranks on each host it would start."""
    launcher, i, is_module, ranks = LAUNCHERS[name], start, False, None
    while i < len(words) and words[i].startswith("-"):
        option, has_value, value = words[i].partition("=")
        canonical = option.lstrip("-").replace("_", "-")
        if words[i] == "--":
            i += 1
            break
        i += 1
        if canonical in ("m", "module"):
            is_module = True
        elif canonical not in launcher.flags and canonical != "no-python" and not has_value:
            value, i = words[i] if i < len(words) else "", i + 1
        if canonical in launcher.ranks and value.isdecimal() and int(value):
            ranks = int(value)
    rest = words[i:]
    return (["-m", *rest] if is_module and rest else rest), words[:i], ranks


def _interpreter(script: Path) -> list[str]:
    """Return the shell that a script names in its first line, or that its suffix means; [] for Python."""
    try:
        with script.open("rb") as file:
            first = file.readline(256).decode(errors="replace")
    except OSError:
        first = ""
    shebang = re.match(r"#!\s*(\S+)(?:\s+(\S+))?", first)
    if shebang is not None and script.suffix != ".py":
        name = Path(shebang[2] if shebang[1].endswith("/env") and shebang[2] else shebang[1]).name
        return [name] if name in SHELLS else []
    return ["bash"] if script.suffix in (".sh", ".bash") else []


def _check_starts_no_ranks(script: Path, given: str) -> None:
    """Raise UsageError if a shell script calls a launcher: each rank would start ranks of its own."""
    try:
        with script.open(errors="replace") as file:
            text = file.read(MAX_SCRIPT_BYTES)
    except OSError as error:
        raise UsageError(f"{given}: {error.strerror}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        code = line.split("#", 1)[0]
        if (call := LAUNCHER_CALL.search(code)) is not None:
            words = code[call.start(1) :].split()
            hint = "evener launch -- " + " ".join(words).rstrip("\\ ")
            raise UsageError(f"{given}, line {number}: {call[1]} starts ranks of its own in every rank", hint=hint)


def _script_hint(word: str, cwd: Path) -> str:
    """Return the command to type where a script was not found: with the most similar one, if there is one."""
    import difflib

    names = [path.relative_to(cwd).as_posix() for pattern in ("*.py", "*/*.py", "*.sh") for path in cwd.glob(pattern)]
    similar = difflib.get_close_matches(word, names, n=1)
    return f"evener launch -- {quote_command(similar or ['SCRIPT.py'])} ARGS"
