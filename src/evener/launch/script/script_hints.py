"""Derive a hint from the last output lines of a user's script that failed.

A script knows nothing of hosts: a file that was not sent, a package that is not installed there, a missing GPU. Python
and PyTorch report each by a known message, and each has a remedy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

from evener.core.base.shell import quote_word
from evener.core.cluster.fleet_file import Fleet

FILE_NOT_FOUND_PATTERN = re.compile(r"No such file or directory: '([^'\n]+)'")
MODULE_NOT_FOUND_PATTERN = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
GPU_NOT_FOUND_PATTERN = re.compile(
    r"not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device"
    r"|only supported with GPUs, no GPUs found|no attribute '_cuda_|doesn't have NCCL built in|CUDA is not available"
    r"|device_ids and output_device arguments only work with",
    re.IGNORECASE,
)
GPU_REQUIRED_PATTERN = re.compile(
    r"\b(requires?|needs?|at least|sufficient|insufficient)\b.*\b(gpus?|cuda|nccl)\b|\b(gpus?|cuda|nccl)\b.*\bexit",
    re.IGNORECASE,
)


def script_failure_hint(lines: Sequence[str], host: str, project: str | None, fleet: Fleet | None) -> str | None:
    """Return a hint for a script that failed on a host with these last lines; None if the cause is unknown.

    `project` is its folder on this machine. For a script on this machine alone `fleet` is None: no file is missing.
    """
    text = "\n".join(lines)
    text = text[max(0, text.rfind("Traceback (most recent call last)")) :]  # earlier output is not the failure
    if GPU_NOT_FOUND_PATTERN.search(text):
        return f"the script asks for a GPU, and {host} has none that its torch can use; has it an option without one?"
    if fleet is not None and project is not None:
        if (matches := MODULE_NOT_FOUND_PATTERN.findall(text)) and (
            hint := _missing_module_hint(matches[-1], host, Path(project))
        ):
            return hint
        if (matches := FILE_NOT_FOUND_PATTERN.findall(text)) and (
            hint := _missing_file_hint(matches[-1], host, Path(project))
        ):
            return hint
    if matches := MODULE_NOT_FOUND_PATTERN.findall(text):
        module = matches[-1].partition(".")[0]
        packages = packages_distributions().get(module)  # cv2 belongs to opencv-python
        package = packages[0] if packages else "PACKAGE"
        what = "" if packages else f", the package that has {module}"
        if fleet is None:
            return f"pip install {quote_word(package)}{what}"
        return f"evener setup{fleet.cli_flag} --with {quote_word(package)} installs it on the hosts{what}"
    return None


def gpu_required_line(lines: Sequence[str]) -> str | None:
    """Return the line in which a successful script reports that it did nothing for lack of GPUs."""
    return next((line.strip() for line in reversed(lines) if GPU_REQUIRED_PATTERN.search(line)), None)


def _missing_module_hint(name: str, host: str, project: Path) -> str | None:
    """Return a hint for a module of the project that was not sent; None if the project has no such module."""
    for path in (name.replace(".", "/"), name.partition(".")[0]):
        for candidate in (f"{path}.py", path):
            if (project / candidate).is_file() or any((project / candidate).glob("*.py")):
                command = f"evener launch --include {quote_word(candidate)} -- …"
                return f"{candidate} is here, and was not sent to {host}: {command}"
    return None


def _missing_file_hint(path: str, host: str, project: Path) -> str | None:
    """Return a hint for a missing file: git ignores it, it is outside the project, or it is on another host."""
    if not Path(path).is_absolute() and (project / path).exists():
        folder = Path(path).parent  # the files beside it will be needed next
        include = path if folder == Path() else folder
        return f"{path} is here, and was not sent to {host}: evener launch --include {quote_word(include)} -- …"
    if Path(path).is_absolute() and Path(path).exists():
        return f"{path} is on this machine, and not on {host}: only files in the project's folder are sent"
    if not Path(path).is_absolute():
        return (
            f"{path} is not on {host}: what a script writes stays on the host where it ran; evener fetch RUN copies "
            "it here, and from the project's folder --include sends it to all"
        )
    return None
