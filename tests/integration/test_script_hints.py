"""Give hints for failed scripts, tested with errors exactly as Python and PyTorch printed them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evener.core.cluster.fleet_file import Fleet, HostConfig
from evener.launch.script.script_hints import gpu_required_line, script_failure_hint

FLEET = Fleet(hosts={"b": HostConfig(address="b")}, file="lab.toml")


def last_words(code: str) -> list[str]:
    """What this interpreter says of a program that fails."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr.splitlines()


def test_file_only_on_local_machine_gets_hint(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.bin").touch()
    lines = last_words("open('data/train.bin')")
    assert script_failure_hint(lines, "b", str(tmp_path), FLEET) == (
        "data/train.bin is here, and was not sent to b: evener launch --include data -- …"
    )
    said = script_failure_hint(lines, "b", str(tmp_path / "data"), FLEET)
    assert said is not None
    assert said.startswith("data/train.bin is not on b: what a script writes stays on the host where it ran")
    assert script_failure_hint(lines, "b", None, None) is None
    elsewhere = last_words(f"open('{tmp_path}/data/train.bin' + '')".replace("data", "nowhere"))
    assert script_failure_hint(elsewhere, "b", str(tmp_path), FLEET) is None
    said = script_failure_hint([f"No such file or directory: '{tmp_path}/data/train.bin'"], "b", "/", FLEET)
    assert said is not None
    assert "is on this machine, and not on b" in said


def test_missing_module_gets_install_hint(tmp_path):
    lines = last_words("import no_such.part")
    assert script_failure_hint(lines, "b", str(tmp_path), FLEET) == (
        "evener setup --fleet lab.toml --with PACKAGE installs it on the hosts, the package that has no_such"
    )
    assert script_failure_hint(lines, "b", None, None) == "pip install PACKAGE, the package that has no_such"
    known = ["ModuleNotFoundError: No module named 'yaml'"]
    assert (
        script_failure_hint(known, "b", str(tmp_path), FLEET)
        == "evener setup --fleet lab.toml --with PyYAML installs it on the hosts"
    )
    (tmp_path / "no_such").mkdir()
    (tmp_path / "no_such" / "log.txt").touch()  # a folder is not yet a package
    assert "--include" not in str(script_failure_hint(lines, "b", str(tmp_path), FLEET))
    (tmp_path / "no_such" / "__init__.py").touch()
    said = script_failure_hint(lines, "b", str(tmp_path), FLEET)
    assert said is not None
    assert "evener launch --include no_such" in said


@pytest.mark.parametrize(
    "line",
    [
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a "
        "driver from http://www.nvidia.com/Download/index.aspx",
        "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        "RuntimeError: Distributed package doesn't have NCCL built in",
        "RuntimeError: No CUDA GPUs are available",
        "ValueError: DistributedDataParallel device_ids and output_device arguments only work with "
        "single-device/multiple-device GPU modules or CPU modules, but got device_ids [0], output_device None, and "
        "module parameters {device(type='cpu')}.",
    ],
)
def test_script_requiring_gpu_gets_hint(line):
    said = script_failure_hint(["Traceback", line, "ValueError: later"], "b", None, FLEET)
    assert said is not None
    assert "asks for a GPU, and b has none" in said


def test_clean_exit_for_lack_of_gpus_is_detected():
    """pytorch/examples' own line, and lines of healthy scripts."""
    line = "Unable to locate sufficient 2 gpus to run this example. Exiting."
    assert gpu_required_line(["begin", line, ""]) == line
    for healthy in (
        "No GPU found, training on CPU",
        "epoch 3 | loss 0.12 | GPU memory 0",
        "using device: cpu",
        "[GPU0] Epoch 1 | Batchsize: 32 | Steps: 8",
    ):
        assert gpu_required_line([healthy]) is None
