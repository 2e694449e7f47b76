"""Set up a bare host that reaches no registry until it can train, then send only what changed.

evener is run from a copy of its source tree, so that its code can be changed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evener.core.cluster.fleet_file import load_fleet
from evener.core.run.trust import trust_fleet
from evener.lab.emulated_lab import EmulatedLab, LabHost
from evener.lab.lab_spec import HostSpec
from tests.lab.conftest import command_lines, wait_until
from tests.tiers import exhaustive

ROOT = Path(__file__).parents[2]
SETUP_S = 900
pytestmark = exhaustive


class Controller:
    """evener on this machine, from a source tree of its own, and one bare host of a lab."""

    def __init__(self, lab: EmulatedLab, folder: Path) -> None:
        self.host: LabHost = lab.host("a")
        self.home = self.host.home
        self.source = folder / "evener"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src", self.source / "src", ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.source)
        self.fleet = folder / "fleet.toml"
        text = "".join(line for line in lab.state.fleet_text.splitlines(True) if not line.startswith("python = "))
        self.fleet.write_text(text)
        trust_fleet(load_fleet(self.fleet))
        # A setup that is killed leaves its temporary files.
        self.env = os.environ | {"PYTHONPATH": str(self.source / "src"), "TMPDIR": str(folder)}

    def start(self, *flags: str) -> subprocess.Popen[str]:
        code = "from evener.cli.main import main; main()"
        argv = [sys.executable, "-c", code, "setup", "--fleet", str(self.fleet), "--json", *flags]
        return subprocess.Popen(argv, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def setup(self, *flags: str) -> dict[str, Any]:
        process = self.start(*flags)
        out, err = process.communicate(timeout=SETUP_S)
        assert out, err
        told = json.loads(out)
        assert process.returncode == (1 if told["findings"] else 0), err
        return told

    def python(self, code: str) -> str:
        """What the host's own interpreter says."""
        python = str(self.home / ".evener/venv/bin/python")
        return self.host.exec([python, "-c", code], timeout_s=120).stdout.strip()


def test_setup_makes_a_bare_host_able_to_train(make_lab: Callable[..., EmulatedLab], tmp_path: Path) -> None:
    """One story, for its beginning takes a minute: each chapter finds the machine as the one before has left it."""
    lab = make_lab(a=HostSpec())
    try:
        controller = Controller(lab, tmp_path)
        first = begin(controller)
        for chapter in (
            a_killed_setup_is_completed_from_wheels_that_are_there,
            it_trains_there,
            a_second_run_changes_nothing,
            when_evener_changes_evener_alone_is_installed,
            what_is_missing_alone_is_sent,
            what_a_script_needs_comes_along,
            a_small_disk_is_told_before_it_is_full,
        ):
            chapter(controller, first)
    finally:
        lab.down()  # 1.3 GB


def begin(controller: Controller) -> dict[str, Any]:
    """A setup that is killed while pip installs torch, and the next one, which completes it."""
    store, killed = controller.home / ".evener", controller.start()

    def installs_torch() -> bool:
        assert killed.poll() is None, killed.communicate()
        return bool(list(store.glob("venv/lib/python*/site-packages/torch/lib")))

    wait_until(installs_torch, "pip does not come to torch", SETUP_S)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert (store / "venv/evener-unfinished").read_text() == "packages"
    wait_until(lambda: not any(b"-m\0pip" in line for line in command_lines(controller.host)), "pip goes on alone")
    told = controller.setup()
    assert told["findings"] == []
    return told["hosts"][0]


def a_killed_setup_is_completed_from_wheels_that_are_there(controller: Controller, first: dict[str, Any]) -> None:
    assert first["source"] == "carried"
    assert first["packages"] >= 1  # torch at least: what it depends on was whole before the kill
    assert first["sent_bytes"] < 2_000_000  # evener: all else had arrived
    store = controller.home / ".evener"
    assert sorted(path.name for path in store.iterdir()) == ["blobs", "projects", "runs", "setup.lock", "trees", "venv"]
    assert not list((store / "blobs").iterdir())
    assert not list((store / "trees").iterdir())
    assert not (store / "venv/evener-unfinished").exists()


def it_trains_there(controller: Controller, first: dict[str, Any]) -> None:
    code = "import evener, torch; print(evener.__file__, torch.__version__, torch.ones(3).sum().item())"
    file, torch, total = controller.python(code).split()
    assert file.startswith(str(controller.home / ".evener/venv/lib"))
    assert (torch.split("+")[0], total) == (first["torch"].split("+")[0], "3.0")
    hash_there = controller.python("from evener.core.run.rundir import code_hash; print(code_hash())")
    code = "from evener.core.run.rundir import code_hash; print(code_hash())"
    here = subprocess.run([sys.executable, "-c", code], env=controller.env, capture_output=True, text=True, check=True)
    assert hash_there == here.stdout.strip()
    assert controller.host.exec([str(controller.home / ".evener/venv/bin/evener"), "--version"]).stdout.startswith(
        "evener"
    )


def a_second_run_changes_nothing(controller: Controller, first: dict[str, Any]) -> None:
    def state() -> dict[str, int]:
        paths = [path for path in controller.home.rglob("*") if "__pycache__" not in path.parts]
        return {str(path): path.lstat().st_mtime_ns for path in paths if path.name != "setup.lock"}

    before = state()
    [found] = controller.setup()["hosts"]
    assert (found["actions"], found["sent_bytes"], found["evener_hash"]) == ([], 0, first["evener_hash"])
    assert state() == before


def when_evener_changes_evener_alone_is_installed(controller: Controller, first: dict[str, Any]) -> None:
    with (controller.source / "src/evener/core/base/units.py").open("a") as file:
        file.write("\nANSWER = 42\n")
    [found] = controller.setup()["hosts"]
    assert (found["packages"], found["source"], len(found["actions"])) == (0, "none", 1)
    assert found["evener_hash"] != first["evener_hash"]
    assert 0 < found["sent_bytes"] < 2_000_000
    assert controller.python("from evener.core.base.units import ANSWER; print(ANSWER)") == "42"
    assert controller.setup()["hosts"][0]["actions"] == []


def what_is_missing_alone_is_sent(controller: Controller, first: dict[str, Any]) -> None:
    controller.python("import shutil, rich, pathlib; shutil.rmtree(pathlib.Path(rich.__file__).parent)")
    [info] = controller.home.glob(".evener/venv/lib/python*/site-packages/rich-*.dist-info")
    shutil.rmtree(info)
    [found] = controller.setup()["hosts"]
    assert found["packages"] == 1
    assert found["actions"][0].startswith("rich installed from wheels sent from here")
    assert found["sent_bytes"] < 2_000_000


def what_a_script_needs_comes_along(controller: Controller, first: dict[str, Any]) -> None:
    """With all that it needs itself, once, and never another torch."""
    needs = controller.home / "requirements.txt"
    needs.write_text("humanize>=4  # sizes\ninflect\n")
    [found] = controller.setup("--with", str(needs))["hosts"]
    assert (found["source"], found["torch"]) == ("carried", first["torch"])
    said = controller.python(
        "import humanize, inflect; print(humanize.naturalsize(5e9), inflect.engine().plural('ox'))"
    )
    assert said == "5.0 GB oxen"
    [found] = controller.setup("--with", str(needs))["hosts"]
    assert (found["actions"], found["packages"]) == ([], 0)
    [refused] = controller.setup("--with", "torch==2.0")["findings"]
    assert "torch==2.0" in refused["evidence"] + refused["fix"]
    assert controller.python("import torch; print(torch.__version__)") == first["torch"]


def a_small_disk_is_told_before_it_is_full(controller: Controller, first: dict[str, Any]) -> None:
    controller.host.exec(["mkdir", "-p", "small"])
    controller.host.exec(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(controller.home / "small")])
    text = controller.fleet.read_text()
    controller.fleet.write_text(f'{text}workdir = "~/small"\n')
    trust_fleet(load_fleet(controller.fleet))
    try:
        told = controller.setup()
    finally:
        controller.fleet.write_text(text)
    assert [(one["check"], one["host"]) for one in told["findings"]] == [("disk.full", "a")]
    assert "a: ~/small has 31" in told["findings"][0]["evidence"]
    assert told["hosts"] == []
