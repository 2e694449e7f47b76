"""What can be said of a script that did not do what its user wanted, from its own last words?

A script of somebody else's knows nothing of hosts: a file that did not travel, a package that is not installed there, a
GPU that is not there. Each has words of Python's or PyTorch's own, and each has a remedy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

NO_FILE = re.compile(r"No such file or directory: '([^'\n]+)'")
NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
NO_GPU = re.compile(
    r"not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device"
    r"|only supported with GPUs, no GPUs found|no attribute '_cuda_|doesn't have NCCL built in|CUDA is not available"
    r"|device_ids and output_device arguments only work with",
    re.IGNORECASE,
)
WANTS_GPU = re.compile(
    r"\b(requires?|needs?|at least|sufficient|insufficient)\b.*\b(gpus?|cuda|nccl)\b|\b(gpus?|cuda|nccl)\b.*\bexit",
    re.IGNORECASE,
)


def hint_of(lines: Sequence[str], host: str, project: str | None, fleet: bool) -> str | None:
    """What to do about a script that failed on a host with these last lines; None where nobody knows.

    `project` is the folder here that it came from. Of a script on this machine alone (no `fleet`) every file is here.
    """
    text = "\n".join(lines)
    text = text[max(0, text.rfind("Traceback (most recent call last)")) :]  # what was said before is no failure
    if NO_GPU.search(text):
        return f"the script asks for a GPU, and {host} has none that its torch can use; has it an option without?"
    if fleet and project is not None:
        if (found := NO_MODULE.findall(text)) and (hint := _of_module(found[-1], host, Path(project))):
            return hint
        if (found := NO_FILE.findall(text)) and (hint := _of_file(found[-1], host, Path(project))):
            return hint
    if found := NO_MODULE.findall(text):
        module = found[-1].partition(".")[0]
        here = packages_distributions().get(module)  # cv2 is opencv-python's
        if here is None:
            what = f"the package that has {module}"
            return f"evener setup --with installs {what} on the hosts" if fleet else f"pip install {what}"
        return f"evener setup --with {here[0]} installs it on the hosts" if fleet else f"pip install {here[0]}"
    return None


def wants_gpu(lines: Sequence[str]) -> str | None:
    """The line in which a script that ended well says that it did nothing for want of GPUs."""
    return next((line.strip() for line in reversed(lines) if WANTS_GPU.search(line)), None)


def _of_module(name: str, host: str, project: Path) -> str | None:
    """A module of the project's own that did not travel."""
    for path in (name.replace(".", "/"), name.partition(".")[0]):
        for place in (f"{path}.py", path):
            if (project / place).is_file() or any((project / place).glob("*.py")):
                return f"{place} is here, and did not travel to {host}: evener launch --include {place} -- …"
    return None


def _of_file(path: str, host: str, project: Path) -> str | None:
    """A file that is here and did not travel, for git ignores it or it is elsewhere."""
    if not Path(path).is_absolute() and (project / path).exists():
        folder = Path(path).parent  # what lies beside it is needed next
        include = path if folder == Path() else folder
        return f"{path} is here, and did not travel to {host}: evener launch --include {include} -- …"
    if Path(path).is_absolute() and Path(path).exists():
        return f"{path} is on this machine, and not on {host}: what is in the project's folder travels"
    if not Path(path).is_absolute():
        return (
            f"{path} is not on {host}: what a script writes stays on the host where it ran; evener fetch RUN brings it "
            "here, and from the project's folder --include sends it to all"
        )
    return None
