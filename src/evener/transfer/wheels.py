"""Resolve and download the wheels that a host needs: evener's own, and those of its dependencies.

Versions are those of this environment (in a source checkout those of constraints.txt), so that all hosts train with the
same. Dependencies are resolved for each host: its system, processor and python decide which apply, by the markers in
the packages' metadata.
"""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

import evener
from evener.core.base.errors import EvenerError, UsageError
from evener.node.remote import venv_setup
from evener.transfer.file_tree import cache_folder

CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's builds without CUDA, for Linux
MIN_GLIBC_MINOR = 5  # 2.5, that of manylinux1
_download_lock = threading.Lock()


class WheelTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a host that decide which wheels fit it."""

    markers: dict[str, str]  # PEP 508
    libc: tuple[str, str]  # ("glibc", "2.36"); ("", "") on macOS
    macos_version: str  # "15.1"
    wants_cuda: bool

    @classmethod
    def from_interpreter(cls, installed: Mapping[str, Any], *, wants_cuda: bool) -> WheelTarget:
        """Build a target from the description of an interpreter by `node/remote/venv_setup.py`."""
        name, version = installed["libc"]
        return cls(
            markers=installed["markers"], libc=(name, version), macos_version=installed["mac"], wants_cuda=wants_cuda
        )

    @property
    def is_linux(self) -> bool:
        """Return whether it is Linux, where torch has two builds (CPU and CUDA); elsewhere there is one."""
        return self.markers["sys_platform"] == "linux"

    @property
    def key(self) -> str:
        """Return a folder name; targets with one key share their wheels."""
        machine, system = self.markers["platform_machine"], self.markers["sys_platform"]
        level = "".join(self.libc) or self.macos_version
        return f"py{self.markers['python_version']}-{system}{level}-{machine}-{'cuda' if self.wants_cuda else 'cpu'}"

    def pip_flags(self) -> list[str]:
        """Return the flags that make pip choose wheels for this target rather than for this machine."""
        installed = venv_setup.inspect_interpreter(sys.executable)
        assert installed is not None  # it is the interpreter that runs this
        if WheelTarget.from_interpreter(installed, wants_cuda=self.wants_cuda).key == self.key:
            return ["--only-binary=:all:"]
        version = self.markers["python_version"]
        flags = ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}"]
        flags += [f"--abi={abi}" for abi in ("cp" + version.replace(".", ""), "abi3", "none")]
        return flags + [f"--platform={platform}" for platform in self.platforms()]

    def platforms(self) -> list[str]:
        """Return the platform tags, best first.   [PEP 600; packaging.tags]

        >>> linux = {"sys_platform": "linux", "platform_machine": "x86_64"}
        >>> WheelTarget(markers=linux, libc=("glibc", "2.28"), macos_version="", wants_cuda=False).platforms()[:2]
        ['manylinux_2_28_x86_64', 'manylinux_2_27_x86_64']
        """
        machine = self.markers["platform_machine"]
        if self.is_linux:
            major, minor = (int(part) for part in (self.libc[1] or "2.17").split(".")[:2])
            if self.libc[0] != "glibc":
                return [f"musllinux_1_{level}_{machine}" for level in (2, 1)] + [f"linux_{machine}"]
            tags = [f"manylinux_{major}_{level}_{machine}" for level in range(minor, MIN_GLIBC_MINOR - 1, -1)]
            return [*tags, *(f"manylinux{year}_{machine}" for year in ("2014", "2010", "1")), f"linux_{machine}"]
        major = int(self.macos_version.split(".")[0] or 11)
        return [f"macosx_{level}_0_{kind}" for level in range(major, 10, -1) for kind in (machine, "universal2")]


def evener_wheel(folder: Path) -> Path:
    """Write a wheel of the running evener to `folder`: built from its source tree, or repacked if it is installed."""
    source = Path(evener.__file__).parents[2]
    is_source = (source / "pyproject.toml").exists() and (source / "src" / "evener").is_dir()
    return _build_wheel(source, folder) if is_source else _repack_wheel(folder)


def content_hash(wheel: Path) -> str:
    """Return a blake2b over the files of the wheel's package, equal to that of the installed package on a host."""
    digest = hashlib.blake2b(digest_size=16)
    with zipfile.ZipFile(wheel) as archive:
        names = {name.removeprefix("evener/"): name for name in archive.namelist() if name.startswith("evener/")}
        for short in sorted(names):
            digest.update(short.encode() + b"\0" + hashlib.blake2b(archive.read(names[short])).digest())
    return digest.hexdigest()


def dependency_closure(wheel: Path, target: WheelTarget, extras: Iterable[str] = ()) -> dict[str, str]:
    """Return the dependencies of evener and these extras of it on a host, by name.

    Each has the version installed here, or "" if it is not needed here.
    """
    versions: dict[str, str] = {}
    seen: dict[str, set[str]] = {}
    queue = _applicable_requirements(_requires_dist(wheel), target, extras)
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        seen_extras = seen.setdefault(name, set())
        if name in versions and requirement.extras <= seen_extras:
            continue
        seen_extras |= requirement.extras
        try:
            dist = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
            continue
        versions[name] = _public_version(dist.version)
        queue += _applicable_requirements(dist.requires or [], target, seen_extras)
    return dict(sorted(versions.items()))


def missing_packages(wanted: Mapping[str, str], installed: Mapping[str, str]) -> dict[str, str]:
    """Return the wanted packages not installed in their version. "2.13.0" and "2.13.0+cpu" count as the same.

    >>> missing_packages({"torch": "2.13.0", "rich": "15.0.0", "x": ""}, {"torch": "2.13.0+cpu", "rich": "14.0"})
    {'rich': '15.0.0', 'x': ''}
    """
    return {
        name: version
        for name, version in wanted.items()
        if name not in installed or (version and _public_version(installed[name]) != _public_version(version))
    }


def pinned_specifiers(packages: Mapping[str, str]) -> list[str]:
    """Return the packages as pip specifiers."""
    return [f"{name}=={version}" if version else name for name, version in packages.items()]


def fetch_wheels(
    target: WheelTarget, packages: Mapping[str, str], known: Mapping[str, str], notify: Callable[[str], None]
) -> dict[str, Path]:
    """Download wheels of these packages and of their dependencies that are not `known`; return paths by file name.

    Wheels are cached. Dependencies are read from the wheels themselves, as those of torch's builds differ.

    Raises:
        EvenerError: pip finds no wheel, or this machine reaches no registry either.
    """
    folder = cache_folder() / "wheels" / target.key
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {name: (version, *pinned_specifiers({name: version})) for name, version in packages.items()}
    extras: dict[str, set[str]] = {}
    wheels: dict[str, Path] = {}
    with _download_lock:
        while missing := [name for name in wanted if name not in wheels]:
            if absent := [name for name in missing if _cached_wheel(folder, name, wanted[name][0]) is None]:
                notify(f"downloading {len(absent)} wheels ({target.key})")
                _download_wheels(target, [wanted[name][1] for name in absent], folder)
            for name in missing:
                path = _cached_wheel(folder, name, wanted[name][0])
                if path is None:
                    raise EvenerError(f"pip downloaded no {wanted[name][1]} for {target.key}", hint="pip cache purge")
                wheels[name] = path
                for requirement in _applicable_requirements(_requires_dist(path), target, extras.get(name, ())):
                    other = canonicalize_name(requirement.name)
                    extras.setdefault(other, set()).update(requirement.extras)
                    if other not in wanted and other not in known:
                        pin = [clause.version for clause in requirement.specifier if clause.operator == "=="]
                        wanted[other] = (pin[0] if pin else "", f"{other}{requirement.specifier}")
    return {path.name: path for path in wheels.values()}


def parse_requirements(arguments: Iterable[str]) -> list[str]:
    """Return the pip requirements of --with: packages, and the content of requirements files.

    UsageError for anything else.
    """
    specifiers: list[str] = []
    for argument in arguments:
        is_file = argument.endswith(".txt") or Path(argument).is_file()
        try:
            lines = Path(argument).read_text().splitlines() if is_file else [argument]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--with {argument}: {getattr(error, 'strerror', None) or 'not text'}") from None
        for number, line in enumerate(lines, 1):
            text = re.sub(r"(^|\s)#.*", "", line).strip()
            if text:
                try:
                    specifiers.append(str(Requirement(text)))
                except InvalidRequirement:
                    where = f"{argument}, line {number}" if is_file else argument
                    raise UsageError(
                        f"--with {where}: not a package: {text}",
                        hint="such as tiktoken or 'datasets>=2.0'; name each file by its own --with",
                    ) from None
    return specifiers


def resolve_wheels(
    target: WheelTarget,
    wanted: Sequence[str],
    pins: Sequence[str],
    installed: Mapping[str, str],
    notify: Callable[[str], None],
) -> dict[str, Path]:
    """Return wheels, by file name, of the wanted packages and of their dependencies that are not installed on a host.

    pip chooses the versions, with `pins` as constraints; from PyTorch's CPU builds, too, if the host has one of them.
    """
    notify(f"resolving {', '.join(wanted)} ({target.key})")
    with tempfile.TemporaryDirectory() as temporary:
        constraints, report = Path(temporary) / "constraints.txt", Path(temporary) / "report.json"
        index_flags = _cpu_index_flags() if installed.get("torch", "").endswith("+cpu") else []
        constraints.write_text("\n".join(pins if index_flags else map(_public_version, pins)))
        cached = cache_folder() / "wheels" / target.key
        _run_local_pip(["install", "--dry-run", "--ignore-installed", f"--target={temporary}", f"--report={report}",
                   f"--constraint={constraints}", f"--find-links={cached}", *index_flags, *wanted], target)  # fmt: skip
        installs = [entry["metadata"] for entry in json.loads(report.read_bytes())["install"]]
    chosen: dict[str, str] = {canonicalize_name(entry["name"]): entry["version"] for entry in installs}
    missing = missing_packages(chosen, installed)
    return fetch_wheels(target, missing, chosen, notify) if missing else {}


def _cpu_index_flags() -> list[str]:
    """Return pip's flags for PyTorch's CPU builds, if this machine reaches them."""
    return ["--extra-index-url", CPU_INDEX] if venv_setup.can_open_url(f"{CPU_INDEX}/torch/") else []


def _download_wheels(target: WheelTarget, specifiers: list[str], folder: Path) -> None:
    index = []
    if target.is_linux and not target.wants_cuda and any(specifier.startswith("torch") for specifier in specifiers):
        index = _cpu_index_flags()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary:
        _run_local_pip(["download", "--no-deps", *index, "--dest", temporary, *specifiers], target)
        for wheel in Path(temporary).glob("*.whl"):
            wheel.replace(folder / wheel.name)


def _run_local_pip(arguments: list[str], target: WheelTarget) -> None:
    """Run this environment's pip with the flags of a target."""
    if importlib.util.find_spec("pip") is None:
        raise EvenerError(
            "this environment has no pip to download wheels with",
            hint=f"{sys.executable} -m ensurepip, or: uv pip install pip",
        )
    argv = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    argv += [arguments[0], *target.pip_flags(), *arguments[1:]]
    result = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode:
        pip_errors = [line.removeprefix("ERROR: ") for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        is_conflict = any(line.startswith("ResolutionImpossible") for line in pip_errors)
        raise EvenerError(
            f"no wheels for {target.key}: {pip_errors[0 if is_conflict else -1] if pip_errors else 'pip failed'}",
            hint="try other versions: those that evener itself needs are fixed"
            if is_conflict
            else "check that this machine reaches its registry, with `pip download`",
            output="\n".join(result.stderr.splitlines()[-15:]),
        )


def _build_wheel(source: Path, folder: Path) -> Path:
    """Build a wheel with the project's build backend, or with pip, which downloads the backend, if it is missing."""
    if importlib.util.find_spec("hatchling") is not None:
        code = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"
        argv = [sys.executable, "-P", "-c", code, str(folder)]
    else:
        pip = [sys.executable, "-P", "-m", "pip"]
        argv = [*pip, "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(source)]
    result = subprocess.run(argv, cwd=source, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("evener-*.whl"))
    if result.returncode or len(wheels) != 1:
        raise EvenerError(
            f"{source}: building its wheel failed",
            hint=f"{sys.executable} -m pip install hatchling",
            output="\n".join((result.stdout + result.stderr).splitlines()[-15:]),
        )
    return wheels[0]


def _repack_wheel(folder: Path) -> Path:
    """Repack the installed package as a wheel: its files and metadata, without the files that pip added."""
    dist = importlib.metadata.distribution("evener")
    files = {str(file): Path(str(dist.locate_file(file))) for file in dist.files or []}
    if "evener/__init__.py" not in files:
        raise UsageError(
            f"evener at {Path(evener.__file__).parent} is neither a source tree nor an installed package",
            hint="pip install it, or run it from its source tree",
        )
    info = f"evener-{dist.version}.dist-info"
    added = {f"{info}/{name}" for name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")}
    names = [name for name in sorted(files)
             if name.startswith(("evener/", info)) and name not in added and "__pycache__" not in name]  # fmt: skip
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    wheel = folder / f"evener-{dist.version}-py3-none-any.whl"
    date = (2020, 2, 2, 0, 0, 0)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            content = files[name].read_bytes()
            archive.writestr(zipfile.ZipInfo(name, date), content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.writerow([name, f"sha256={digest}", len(content)])
        rows.writerow([f"{info}/RECORD", "", ""])
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD", date), record.getvalue())
    return wheel


def _requires_dist(wheel: Path) -> list[str]:
    """Return the Requires-Dist entries of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        message = email.message_from_bytes(archive.read(name))
    return [str(value) for value in message.get_all("Requires-Dist") or []]


def _applicable_requirements(
    texts: Iterable[str], target: WheelTarget, extras: Iterable[str] = ()
) -> list[Requirement]:
    """Return the requirements that apply to the target."""
    applicable = []
    for requirement in map(Requirement, texts):
        environments = [target.markers | {"extra": extra} for extra in ("", *extras)]
        if requirement.marker is None or any(requirement.marker.evaluate(environment) for environment in environments):
            applicable.append(requirement)
    return applicable


def _cached_wheel(folder: Path, name: str, version: str) -> Path | None:
    """Return the newest cached wheel of a package: any build of `version` or, if that is empty, any version."""
    matches = []
    for path in folder.glob("*.whl"):
        package, wheel_version, _, _ = parse_wheel_filename(path.name)
        if package == name and (not version or wheel_version.public == _public_version(version)):
            matches.append((wheel_version, path))
    return max(matches)[1] if matches else None


def _public_version(version: str) -> str:
    return version.partition("+")[0]
