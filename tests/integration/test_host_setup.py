"""Host setup installs what each host lacks and changes nothing that is not evener's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.core.base.errors import EvenerError, HostError, UsageError
from evener.core.cluster.fleet_file import Fleet, HostConfig
from evener.core.model.pretrained import fine_tuning_packages
from evener.node.remote import facts
from evener.node.remote import venv_setup as remote
from evener.ssh.session import Session, open_session
from evener.transfer import host_setup, wheels
from evener.transfer.host_setup import EvenerWheel, _HostInstaller, set_up_hosts
from evener.transfer.wheels import (
    WheelTarget,
    content_hash,
    dependency_closure,
    evener_wheel,
    fetch_wheels,
    parse_requirements,
)

from ..tiers import exhaustive

ROOT = Path(__file__).parents[2]
LINUX = {
    "sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.11", "platform_system": "Linux",
    "python_full_version": "3.11.2", "os_name": "posix", "implementation_name": "cpython",
    "implementation_version": "3.11.2", "platform_release": "", "platform_version": "",
    "platform_python_implementation": "CPython",
}  # fmt: skip


def target(
    libc: tuple[str, str] = ("glibc", "2.36"), mac: str = "", *, cuda: bool = False, **markers: str
) -> WheelTarget:
    return WheelTarget(markers=LINUX | markers, libc=libc, macos_version=mac, wants_cuda=cuda)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return evener_wheel(tmp_path_factory.mktemp("wheel"))


# -- evener's own wheel --


def test_wheel_contains_running_code(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.endswith(".py")}
        assert (
            archive.read("evener/core/cluster/fleet_file.py")
            == (ROOT / "src/evener/core/cluster/fleet_file.py").read_bytes()
        )
    assert packed == {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/evener").rglob("*.py")}


def test_wheel_hash_equals_installed_hash(wheel):
    assert content_hash(wheel) == remote.inspect_interpreter(sys.executable)["evener_hash"]


@exhaustive
def test_installed_evener_can_be_repackaged(wheel, tmp_path):
    """From a folder that looks as pip leaves it, without a source tree."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, capture_output=True)
    code = (
        "import sys, pathlib; from evener.transfer import wheels; print(wheels.evener_wheel(pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"PYTHONPATH": str(site)}, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    again = Path(done.stdout.strip())
    assert again.parent == tmp_path
    assert content_hash(again) == content_hash(wheel)
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert set(first.namelist()) == set(second.namelist())
        for name in first.namelist():
            assert name.endswith("RECORD") or first.read(name) == second.read(name), name
    subprocess.run([*pip, "--target", str(tmp_path / "site2"), str(again)], check=True, capture_output=True)


# -- What a host needs --


def test_dependency_versions_equal_constraints_file(wheel):
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    canonical = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    here = WheelTarget.from_interpreter(remote.inspect_interpreter(sys.executable), wants_cuda=False)
    found = dependency_closure(wheel, here)
    assert {"torch", "msgspec", "numpy", "filelock", "jinja2"} < set(found)
    assert not {"pytest", "ruff", "pip", "evener"} & set(found)
    assert {name: canonical.get(name) for name in found} == found
    fine_tuning = dependency_closure(wheel, here, ["hf"])  # evener setup --extra hf
    assert {*fine_tuning_packages("nf4"), "accelerate", *found} <= set(fine_tuning)
    assert not {"transformers", "pytest"} & set(found)
    assert {name: canonical.get(name) for name in fine_tuning} == fine_tuning


def test_preflight_knows_packages_that_a_host_lacks():
    versions = facts._collect_versions(sys.executable, ["transformers", "no_such_package"])
    assert versions["missing_packages"] == ["no_such_package"]
    assert versions["torch_version"] is not None


def test_wheel_platforms_follow_libc_and_os_of_target():
    assert target().platforms()[0] == "manylinux_2_36_x86_64"
    assert "manylinux2014_x86_64" in target().platforms()
    assert target(("", "")).platforms()[:2] == ["musllinux_1_2_x86_64", "musllinux_1_1_x86_64"]
    mac = target(("", ""), "14.2", sys_platform="darwin", platform_machine="arm64")
    assert mac.platforms()[:3] == ["macosx_14_0_arm64", "macosx_14_0_universal2", "macosx_13_0_arm64"]
    assert "--python-version=3.12" in target(python_version="3.12").pip_flags()
    here = WheelTarget.from_interpreter(remote.inspect_interpreter(sys.executable), wants_cuda=False)
    assert here.pip_flags() == ["--only-binary=:all:"]


def tiny_wheel(folder: Path, name: str, version: str, *requires: str, files: dict[str, str] | None = None) -> Path:
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {r}" for r in requires),
        ]
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        for path_in_wheel, text in (files or {}).items():
            archive.writestr(path_in_wheel, text)
    return path


@exhaustive
def test_dependencies_only_the_target_needs_are_read_from_wheels(tmp_path, monkeypatch):
    """As torch's build for CUDA needs packages that its build for processors does not."""
    shop = tmp_path / "shop"
    shop.mkdir()
    tiny_wheel(shop, "torch", "9.0", 'toolkit[blas]==1.0; platform_system == "Linux"', 'wine; os_name == "nt"', "rich")
    tiny_wheel(shop, "toolkit", "1.0", 'nv_blas==3.1; extra == "blas"', 'nv_fft==3.1; extra == "fft"')
    tiny_wheel(shop, "toolkit", "2.0")
    tiny_wheel(shop, "nv_blas", "3.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # whatever a machine allows its pip
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    monkeypatch.setattr(wheels.venv_setup, "can_open_url", lambda url: False)
    there, told = target(cuda=True), []
    found = fetch_wheels(there, {"torch": "9.0"}, {"torch": "9.0", "rich": "15.0.0"}, told.append)
    names = {"torch-9.0-py3-none-any.whl", "toolkit-1.0-py3-none-any.whl", "nv_blas-3.1-py3-none-any.whl"}
    assert set(found) == names
    assert len(told) == 3
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert set(fetch_wheels(there, {"torch": "9.0"}, {"rich": "15.0.0"}, told.append)) == names
    assert len(told) == 3  # nothing was downloaded again
    with pytest.raises(EvenerError, match=r"No matching distribution found for torch==9\.1"):
        fetch_wheels(there, {"torch": "9.1"}, {}, told.append)
    mac = target(("", ""), "14.2", sys_platform="darwin", platform_machine="arm64", platform_system="Darwin")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    assert set(fetch_wheels(mac, {"torch": "9.0"}, {"rich": ""}, told.append)) == {"torch-9.0-py3-none-any.whl"}


# -- What is there --


def script(folder: Path, name: str, says: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / name).chmod(0o755)


def base_of(monkeypatch, folder: Path, preferred: list[str]) -> dict[str, Any]:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(remote, "PROGRAM_FOLDERS", ())
    return remote.inspect_setup(str(folder / "work"), preferred=preferred)["base"]


def test_newest_python_with_venv_is_chosen_unless_one_is_preferred(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    script(folder, "python3", '[[3, 9, 2], true, "/usr/bin/python3"]')
    script(folder, "python3.14", "a shim of a version that is not there")
    assert base_of(monkeypatch, folder, []) == {"python": None, "seen": ["python3 is 3.9.2"]}
    script(folder, "python3.12", '[[3, 12, 1], false, "/usr/bin/python3.12"]')
    lacks = {"python": None, "version": "3.12.1", "lacks_venv": "/usr/bin/python3.12"}
    assert base_of(monkeypatch, folder, []) == lacks
    script(folder, "python3.13", '[[3, 13, 0], true, "/opt/python3.13"]')
    script(folder, "python3.11", '[[3, 11, 2], true, "/opt/python3.11"]')
    assert base_of(monkeypatch, folder, [])["python"] == "/opt/python3.13"
    assert base_of(monkeypatch, folder, ["python3.11"])["python"] == "/opt/python3.11"


@pytest.mark.parametrize(
    ("base", "check", "text", "hint"),
    [
        ({"python": None, "seen": ["python3 is 3.9.2"]}, "version.python", "installed: python3 is 3.9.2", "uv"),
        (
            {"python": None, "version": "3.12.1", "lacks_venv": "/usr/bin/python3.12"},
            "setup.venv", "ensurepip is missing", "sudo apt install python3.12-venv",
        ),
    ],
)  # fmt: skip
def test_failed_venv_creation_gives_reason(session, wheel, base, check, text, hint):
    ours = EvenerWheel(wheel=wheel, version="0", hash="0")
    one = _HostInstaller(session, HostConfig(address="local"), ours, lambda *_: None, [], [], sends_wheels=False)
    with pytest.raises(HostError, match=text) as caught:
        one._make_venv({"base": base, "now": None})
    assert (caught.value.check, caught.value.host) == (check, "here")
    assert hint in caught.value.hint


def test_half_installed_package_counts_as_missing(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "v")], check=True)
    [site] = (tmp_path / "v/lib").glob("python*/site-packages")
    for name, whole in (("rich", True), ("torch", False)):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        if whole:
            (info / "INSTALLER").write_text("pip\n")
    found = remote.inspect_interpreter(str(tmp_path / "v/bin/python"))
    assert found["packages"] == {"rich": "1.0"}
    assert found["half"] == [str(site / "torch-1.0.dist-info")]
    assert (found["is_venv"], found["evener_hash"]) == (True, None)


# -- What is done --


@pytest.fixture
def session():
    opened = open_session("here", HostConfig(address="local"))
    yield opened
    opened.close()


def test_only_one_setup_runs_at_a_time(session, tmp_path):
    other = open_session("other", HostConfig(address="local"))
    assert other.call("venv_setup", "lock_setup", workdir=str(tmp_path)) is None
    assert re.match(r"process \d+, which began at ", session.call("venv_setup", "lock_setup", workdir=str(tmp_path)))
    other.close()  # as a controller that crashes
    assert session.call("venv_setup", "lock_setup", workdir=str(tmp_path)) is None


@exhaustive
def test_up_to_date_environment_needs_no_setup(tmp_path):
    fleet = Fleet(hosts={"here": HostConfig(address="local", workdir=str(tmp_path))})
    found = run_setup(fleet)["here"]
    assert found.summary.startswith("here: nothing to do: torch 2")
    assert (found.actions, found.sent_bytes, found.python) == ([], 0, sys.executable)
    assert not list(tmp_path.iterdir())


@exhaustive
def test_non_venv_python_is_unchanged_and_used_to_create_venv(tmp_path):
    base = f"{sys.base_prefix}/bin/python3"
    found = remote.inspect_setup(str(tmp_path), python=base)
    assert (found["python"], found["is_own"], found["now"]["is_venv"]) == (base, False, False)
    assert os.path.realpath(found["base"]["python"]) == os.path.realpath(base)
    for item in remote.make_venv(str(tmp_path), found["base"]["python"], named=base):
        assert item.get("status", 0) == 0
    made = str(tmp_path / "venv/bin/python")
    found = remote.inspect_setup(str(tmp_path), python=base)
    assert (found["python"], found["is_own"], found["now"]["is_venv"]) == (made, True, True)
    assert facts._find_training_python(str(tmp_path), base) == made  # which is then the one that trains
    # another venv of the same python is not it
    assert facts._find_training_python(str(tmp_path), sys.executable) == sys.executable


def run_setup(fleet: Fleet, *extra_packages: str, extras: Sequence[str] = ()) -> dict[str, Any]:
    sessions: dict[str, Session] = {name: open_session(name, host) for name, host in fleet.hosts.items()}
    try:
        return set_up_hosts(fleet, sessions, lambda *_: None, extra_packages, extras=extras)
    finally:
        for one in sessions.values():
            one.close()


@exhaustive
@pytest.mark.parametrize("source", ["registry", "carried"])
def test_bare_host_gets_evener_its_dependencies_and_extra_packages(tmp_path, monkeypatch, source):
    """The packages are tiny ones; the host's pip reaches them as a folder, or gets them as wheels from here."""
    shop, ours = tmp_path / "shop", tmp_path / "ours"
    shop.mkdir()
    ours.mkdir()
    cuda = "class cuda:\n    is_available = staticmethod(lambda: False)\n"
    tiny_wheel(shop, "torch", "9.0", "tiny==1.0", files={"torch/__init__.py": f"__version__ = '9.0'\n{cuda}"})
    for args in (("tiny", "1.0"), ("tiny", "2.0"), ("extra", "3.0", "tiny"), ("hf", "3.0"), ("wrong", "1.0", "tiny>1")):
        tiny_wheel(shop, *args)
    packages = ("evener", "evener/worker", "evener/worker/train")
    files = dict.fromkeys((*(f"{name}/__init__.py" for name in packages), "evener/worker/train/run.py"), "")
    evener = tiny_wheel(ours, "evener", "0.0", "torch", files=files)
    monkeypatch.setattr(host_setup, "evener_wheel", lambda folder: evener)
    monkeypatch.setattr(
        host_setup,
        "dependency_closure",
        lambda _, __, extras: {"torch": "9.0", "tiny": "1.0"} | dict.fromkeys(extras, "3.0"),
    )
    if source == "registry":
        monkeypatch.setattr(_HostInstaller, "_reaches_registry", lambda *_: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the venv imports its own packages
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    monkeypatch.setattr(wheels.venv_setup, "can_open_url", lambda url: False)
    host = HostConfig(
        address="local", workdir=str(tmp_path / "work"), python=f"{sys.base_prefix}/bin/python3", devices="cpu"
    )
    fleet = Fleet(hosts={"here": host})
    first = run_setup(fleet)["here"]
    assert not isinstance(first, EvenerError), f"{first} {first.output}"
    assert (first.source, first.packages, first.torch, first.evener) == (source, 2, "9.0", "0.0"), first
    assert first.actions[1].startswith("torch 9.0 and tiny installed from")
    assert first.actions[2:] == [f"evener 0.0 ({first.evener_hash[:8]}) installed"]
    assert (first.sent_bytes > evener.stat().st_size) == (source == "carried")
    assert not list((tmp_path / "work/blobs").iterdir())
    again = run_setup(fleet, "extra")["here"]
    assert (again.source, again.packages, len(again.actions)) == (source, 1, 1), again
    assert again.actions[0].startswith("extra installed from")
    assert run_setup(fleet, "extra")["here"].actions == []
    tuning = run_setup(fleet, extras=["hf"])["here"]
    assert (tuning.packages, len(tuning.actions)) == (1, 1), tuning
    assert run_setup(fleet, extras=["hf"])["here"].actions == []
    refused = run_setup(fleet, "wrong")["here"]
    assert isinstance(refused, HostError)
    assert refused.check == ("setup.pip" if source == "registry" else "setup.registry")
    assert "try other versions" in refused.hint


@exhaustive
def test_setup_reports_each_host(tmp_path):
    (tmp_path / "fleet.toml").write_text(
        '[hosts.here]\naddress = "local"\n[hosts.gone]\naddress = "127.0.0.1"\nport = 1\n'
    )
    code = "from evener.cli.main import main; main()"
    argv = [sys.executable, "-c", code, "setup", "--fleet", str(tmp_path / "fleet.toml")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("here: nothing to do")
    assert "error: gone: ssh cannot reach 127.0.0.1 -p 1" in done.stderr
    done = subprocess.run([*argv, "--json"], capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert [one["host"] for one in told["hosts"]] == ["here"]
    assert [(one["host"], one["check"]) for one in told["findings"]] == [("gone", "ssh.unreachable")]
    done = subprocess.run([*argv, "--host", "hree"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert 'did you mean "here"?' in done.stderr


def test_wheel_target_round_trips_as_json():
    assert msgspec.json.decode(msgspec.json.encode(target()), type=WheelTarget) == target()


def test_requirements_are_parsed_like_pip(tmp_path):
    file = tmp_path / "requirements.txt"
    file.write_text("# all of it\nhumanize >= 4  # sizes\n\ntiktoken[extra]==0.8 ; python_version > '3'\n")
    asked = parse_requirements(["datasets", str(file)])
    assert asked == ["datasets", "humanize>=4", 'tiktoken[extra]==0.8; python_version > "3"']
    for bad, told in (("no package!", "not a package"), ("missing.txt", "No such file"), ("-r other", "not a package")):
        with pytest.raises(UsageError, match=told):
            parse_requirements([bad])
    file.write_text("fine\n--index-url x\n")
    with pytest.raises(UsageError, match="line 2"):
        parse_requirements([str(file)])
