"""Which packages does a worker need on a host, and from which wheels? evener's own, and those that evener depends on.

Versions are those of this very environment (in a source checkout the ones of constraints.txt), so that all hosts train
with the same. What a host needs is worked out for that host: its system, processor and python decide which dependencies
apply, as in the markers of the packages' own metadata.
"""

from __future__ import annotations

import email
import importlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import evener
from evener.core.errors import EvenerError, UsageError
from evener.launch.tree import cache_folder

if TYPE_CHECKING:
    from packaging.requirements import Requirement

CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's builds without CUDA, for Linux
OLDEST_GLIBC = 5  # 2.5, that of manylinux1
_remote: Any = importlib.import_module("evener.hosts.remote.setup")  # untyped: it runs on python 3.8 too
_downloading = threading.Lock()


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What decides which wheel fits a host."""

    markers: dict[str, str]  # PEP 508's
    libc: tuple[str, str]  # ("glibc", "2.36"); ("", "") on macOS
    mac: str  # "15.1"
    wants_cuda: bool

    @classmethod
    def of(cls, installed: Mapping[str, Any], *, wants_cuda: bool) -> Target:
        """From what `hosts/remote/setup.py` found of an interpreter."""
        name, version = installed["libc"]
        return cls(markers=installed["markers"], libc=(name, version), mac=installed["mac"], wants_cuda=wants_cuda)

    @property
    def is_linux(self) -> bool:
        """Linux has torch in two builds; elsewhere there is one."""
        return self.markers["sys_platform"] == "linux"

    @property
    def key(self) -> str:
        """A folder's name: wheels for one are wheels for all others of this key."""
        machine, system = self.markers["platform_machine"], self.markers["sys_platform"]
        level = "".join(self.libc) or self.mac
        return f"py{self.markers['python_version']}-{system}{level}-{machine}-{'cuda' if self.wants_cuda else 'cpu'}"

    def pip_flags(self) -> list[str]:
        """What `pip download` must be told to find wheels for this host rather than for this machine."""
        here = Target.of(_remote.installed(sys.executable), wants_cuda=self.wants_cuda)
        if here.key == self.key:
            return ["--only-binary=:all:"]
        version = self.markers["python_version"]
        flags = ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}"]
        flags += [f"--abi={abi}" for abi in ("cp" + version.replace(".", ""), "abi3", "none")]
        return flags + [f"--platform={platform}" for platform in self.platforms()]

    def platforms(self) -> list[str]:
        """Platform tags, the best first.   [PEP 600; packaging.tags]

        >>> linux = {"sys_platform": "linux", "platform_machine": "x86_64"}
        >>> Target(markers=linux, libc=("glibc", "2.28"), mac="", wants_cuda=False).platforms()[:2]
        ['manylinux_2_28_x86_64', 'manylinux_2_27_x86_64']
        """
        machine = self.markers["platform_machine"]
        if self.is_linux:
            major, minor = (int(part) for part in (self.libc[1] or "2.17").split(".")[:2])
            if self.libc[0] != "glibc":
                return [f"musllinux_1_{level}_{machine}" for level in (2, 1)] + [f"linux_{machine}"]
            tags = [f"manylinux_{major}_{level}_{machine}" for level in range(minor, OLDEST_GLIBC - 1, -1)]
            return [*tags, *(f"manylinux{year}_{machine}" for year in ("2014", "2010", "1")), f"linux_{machine}"]
        major = int(self.mac.split(".")[0] or 11)
        return [f"macosx_{level}_0_{kind}" for level in range(major, 10, -1) for kind in (machine, "universal2")]


def evener_wheel(folder: Path) -> Path:
    """A wheel in `folder` of the evener that runs: built from its source tree, or packed from what is installed."""
    source = Path(evener.__file__).parents[2]
    is_source = (source / "pyproject.toml").exists() and (source / "src" / "evener").is_dir()
    return _built(source, folder) if is_source else _repacked(folder)


def content_hash(wheel: Path) -> str:
    """blake2b over the files of the wheel's package, as `hosts/remote/setup.py` takes it of an installed one."""
    import hashlib

    digest = hashlib.blake2b(digest_size=16)
    with zipfile.ZipFile(wheel) as archive:
        names = {name.removeprefix("evener/"): name for name in archive.namelist() if name.startswith("evener/")}
        for short in sorted(names):
            digest.update(short.encode() + b"\0" + hashlib.blake2b(archive.read(names[short])).digest())
    return digest.hexdigest()


def closure(wheel: Path, target: Target) -> dict[str, str]:
    """What evener needs on a host, by name: the version that is installed here, or "" where it is not needed here."""
    found: dict[str, str] = {}
    extras: dict[str, set[str]] = {}
    waiting = _requirements(_metadata(wheel), target)
    while waiting:
        requirement = waiting.pop()
        name = _canonical(requirement.name)
        seen = extras.setdefault(name, set())
        if name in found and requirement.extras <= seen:
            continue
        seen |= requirement.extras
        try:
            dist = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
            continue
        found[name] = _public(dist.version)
        waiting += _requirements(dist.requires or [], target, seen)
    return dict(sorted(found.items()))


def lacking(wanted: Mapping[str, str], installed: Mapping[str, str]) -> dict[str, str]:
    """What is not there in the wanted version. Builds of one version are equal: "2.13.0" and "2.13.0+cpu".

    >>> lacking({"torch": "2.13.0", "rich": "15.0.0", "x": ""}, {"torch": "2.13.0+cpu", "rich": "14.0"})
    {'rich': '15.0.0', 'x': ''}
    """
    return {
        name: version
        for name, version in wanted.items()
        if name not in installed or (version and _public(installed[name]) != _public(version))
    }


def pinned(packages: Mapping[str, str]) -> list[str]:
    """As pip is told."""
    return [f"{name}=={version}" if version else name for name, version in packages.items()]


def fetch_wheels(
    target: Target, packages: Mapping[str, str], known: Mapping[str, str], tell: Callable[[str], None]
) -> dict[str, Path]:
    """Wheels of these packages by file name, and of what they need on that host beside the `known`; kept here.

    Torch's builds differ in what they need: that is read from the wheel itself.

    Raises:
        EvenerError: pip found no wheel, or reaches no registry from here either.
    """
    folder = cache_folder() / "wheels" / target.key
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {name: (version, *pinned({name: version})) for name, version in packages.items()}
    extras: dict[str, set[str]] = {}
    found: dict[str, Path] = {}
    with _downloading:
        while missing := [name for name in wanted if name not in found]:
            if absent := [name for name in missing if _cached(folder, name, wanted[name][0]) is None]:
                tell(f"downloading {len(absent)} wheels ({target.key})")
                _download(target, [wanted[name][1] for name in absent], folder)
            for name in missing:
                path = _cached(folder, name, wanted[name][0])
                if path is None:
                    raise EvenerError(f"pip downloaded no {wanted[name][1]} for {target.key}", hint="pip cache purge")
                found[name] = path
                for requirement in _requirements(_metadata(path), target, extras.get(name, ())):
                    other = _canonical(requirement.name)
                    extras.setdefault(other, set()).update(requirement.extras)
                    if other not in wanted and other not in known:
                        pin = [one.version for one in requirement.specifier if one.operator == "=="]
                        wanted[other] = (pin[0] if pin else "", f"{other}{requirement.specifier}")
    return {path.name: path for path in found.values()}


def requirements(words: Iterable[str]) -> list[str]:
    """What pip is to install: packages as they are given, and those that a requirements file names.

    UsageError for what is neither.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    found: list[str] = []
    for word in words:
        is_file = word.endswith(".txt") or Path(word).is_file()
        try:
            lines = Path(word).read_text().splitlines() if is_file else [word]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--with {word}: {getattr(error, 'strerror', None) or 'not text'}") from None
        for number, line in enumerate(lines, 1):
            text = re.sub(r"(^|\s)#.*", "", line).strip()
            if text:
                try:
                    found.append(str(Requirement(text)))
                except InvalidRequirement:
                    where = f"{word}, line {number}" if is_file else word
                    raise UsageError(
                        f"--with {where}: not a package: {text}",
                        hint="such as tiktoken or 'datasets>=2.0'; another file has a --with of its own",
                    ) from None
    return found


def resolve_wheels(
    target: Target,
    wanted: Sequence[str],
    pins: Sequence[str],
    there: Mapping[str, str],
    index: Sequence[str],
    tell: Callable[[str], None],
) -> dict[str, Path]:
    """Wheels by file name of what is wanted on a host, and of all that it needs and that is not `there`, as pip chooses
    them beside what is pinned. `index` are pip's flags for another registry, where it can be reached.
    """
    tell(f"asking what {', '.join(wanted)} need ({target.key})")
    with tempfile.TemporaryDirectory() as temporary:
        constraints, report = Path(temporary) / "constraints.txt", Path(temporary) / "report.json"
        reached = index if index and _remote.opens(f"{CPU_INDEX}/torch/") else []
        constraints.write_text("\n".join(pins if reached else map(_public, pins)))
        cached = cache_folder() / "wheels" / target.key
        _pip_here(["install", "--dry-run", "--ignore-installed", f"--target={temporary}", f"--report={report}",
                   f"--constraint={constraints}", f"--find-links={cached}", *reached, *wanted], target)  # fmt: skip
        chosen = {_canonical(one["metadata"]["name"]): one["metadata"]["version"]
                  for one in json.loads(report.read_bytes())["install"]}  # fmt: skip
    lacks = lacking(chosen, there)
    return fetch_wheels(target, lacks, chosen, tell) if lacks else {}


def _download(target: Target, specifiers: list[str], folder: Path) -> None:
    index = []
    if target.is_linux and not target.wants_cuda and any(one.startswith("torch") for one in specifiers):
        index = ["--extra-index-url", CPU_INDEX] if _remote.opens(f"{CPU_INDEX}/torch/") else []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary:
        _pip_here(["download", "--no-deps", *index, "--dest", temporary, *specifiers], target)
        for wheel in Path(temporary).glob("*.whl"):
            wheel.replace(folder / wheel.name)


def _pip_here(arguments: list[str], target: Target) -> None:
    """Run this environment's pip for a host."""
    if importlib.util.find_spec("pip") is None:
        raise EvenerError(
            "this environment has no pip to download wheels with",
            hint=f"{sys.executable} -m ensurepip, or: uv pip install pip",
        )
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    argv += [arguments[0], *target.pip_flags(), *arguments[1:]]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        is_conflict = any(line.startswith("ResolutionImpossible") for line in said)
        raise EvenerError(
            f"no wheels for {target.key} from here: {said[0 if is_conflict else -1] if said else 'pip failed'}",
            hint="other versions: what evener itself needs is the same on all hosts"
            if is_conflict
            else "does this machine reach its registry? `pip download` by hand says more",
            output="\n".join(done.stderr.splitlines()[-15:]),
        )


def _built(source: Path, folder: Path) -> Path:
    """By the project's own build backend; through pip, which fetches it, where it is not installed."""
    if importlib.util.find_spec("hatchling") is not None:
        code = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"
        argv = [sys.executable, "-c", code, str(folder)]
    else:
        argv = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(argv, cwd=source, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("evener-*.whl"))
    if done.returncode or len(wheels) != 1:
        raise EvenerError(
            f"{source}: no wheel could be built of it",
            hint=f"{sys.executable} -m pip install hatchling",
            output="\n".join((done.stdout + done.stderr).splitlines()[-15:]),
        )
    return wheels[0]


def _repacked(folder: Path) -> Path:
    """The installed package as the wheel that it came from: its files, its metadata, without what pip added."""
    dist = importlib.metadata.distribution("evener")
    files = {str(file): Path(str(dist.locate_file(file))) for file in dist.files or []}
    if "evener/__init__.py" not in files:
        raise UsageError(
            f"evener at {Path(evener.__file__).parent} is neither a source tree nor an installed package",
            hint="pip install it, or run it from its source tree",
        )
    info = f"evener-{dist.version}.dist-info"
    added = {f"{info}/{name}" for name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")}
    wheel = folder / f"evener-{dist.version}-py3-none-any.whl"
    date = (2020, 2, 2, 0, 0, 0)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        rows = []
        for name in sorted(files):
            if name in added or "__pycache__" in name or not name.startswith(("evener/", info)):
                continue
            content = files[name].read_bytes()
            archive.writestr(zipfile.ZipInfo(name, date), content)
            rows.append(f"{_csv(name)},sha256={_sha256(content)},{len(content)}")
        archive.writestr(
            zipfile.ZipInfo(f"{info}/RECORD", (2020, 2, 2, 0, 0, 0)), "\n".join([*rows, f"{info}/RECORD,,", ""])
        )
    return wheel


def _csv(name: str) -> str:
    return f'"{name}"' if "," in name else name


def _sha256(content: bytes) -> str:
    import base64
    import hashlib

    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _metadata(wheel: Path) -> list[str]:
    """The Requires-Dist of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        message = email.message_from_bytes(archive.read(name))
    return [str(value) for value in message.get_all("Requires-Dist") or []]


def _requirements(texts: Iterable[str], target: Target, extras: Iterable[str] = ()) -> list[Requirement]:
    """Those that apply on that host."""
    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, texts):
        environments = [target.markers | {"extra": extra} for extra in ("", *extras)]
        if requirement.marker is None or any(requirement.marker.evaluate(one) for one in environments):
            found.append(requirement)
    return found


def _cached(folder: Path, name: str, version: str) -> Path | None:
    """The newest wheel of a package, in any build of this version or, without one, in any version."""
    from packaging.utils import parse_wheel_filename

    found = []
    for path in folder.glob("*.whl"):
        of, built, _, _ = parse_wheel_filename(path.name)
        if of == name and (not version or built.public == _public(version)):
            found.append((built, path))
    return max(found)[1] if found else None


def _public(version: str) -> str:
    return version.partition("+")[0]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
