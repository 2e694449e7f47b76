"""Fault drills on one machine: interpreters, limits, memory, disk, CPU, GPU, environment."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import sys
from pathlib import Path

import evener
from evener.lab.drills.drill_runner import (
    CORES,
    Drill,
    DrillContext,
    DrillStep,
    ManualReproduction,
    doctor_diagnosis,
    make_lab_step,
    on_host,
    set_fleet_line,
)
from evener.lab.drills.drill_scripts import (
    ALL_REDUCE,
    ALLOCATE_MODEL,
    BF16_MATMUL,
    BUSY_THREADS,
    DATA_LOADER,
    MEMORY_HOG,
    SAVE_CHECKPOINT,
    WAIT_FOREVER,
)
from evener.lab.drills.drill_steps import (
    create_venv,
    overlay_files,
    set_bf16_support,
    set_env,
    set_firewall,
    set_limits,
    start_in_terminal,
    start_program,
    unset_env,
    write_file,
)
from evener.lab.drills.drills_network import (
    GLOO_HANG,
    IS_ROOT,
    QUICK_DOCTOR,
    TORCHRUN_HANG,
    TWO_HOSTS,
    manual_all_reduce,
    torchrun_commands,
)
from evener.lab.lab_spec import HostSpec

BATTERY = {"BAT0/type": "Battery", "BAT0/status": "Discharging", "AC/type": "Mains", "AC/online": "0"}
CPUFREQ_VALUES = {"cpuinfo_max_freq": "4200000", "scaling_max_freq": "800000"}
POWER_SUPPLY, CPUFREQ = "/sys/class/power_supply", "/sys/devices/system/cpu/cpu0/cpufreq"
DRIVER_ERROR = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
SILENT_VERSION_MISMATCH = (
    "nothing yet: all ranks start, and later a collective or a pickle fails far from the cause (a lab has one torch)"
)
MEMLOCK_BYTES = 2**30  # what RDMA needs


def needs_root() -> str | None:
    """Return why a memory limit is impossible here, as only root may create cgroups; None if it is possible."""
    return None if os.geteuid() == 0 else "a memory limit is a cgroup, which only root may make"


OLD_PYTHON = f"""#!{sys.executable}
import sys

sys.version_info, sys.version = (3, 6, 9), "3.6.9 (a lab's)"
exec(sys.argv[-1])
"""


def _raise_memlock() -> DrillStep:
    """Return the step that raises the memlock limit or, if this machine forbids that, removes the InfiniBand card."""
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard == resource.RLIM_INFINITY or hard >= MEMLOCK_BYTES:
        return set_limits("b", memlock=MEMLOCK_BYTES)
    return on_host("b", "umount /sys/class  # the hard limit of this machine is lower: remove the card")


def needs_no_gpu() -> str | None:
    """Return why the drill is impossible here if this machine has a GPU; None if it has none."""
    return "this machine has an NVIDIA driver" if shutil.which("nvidia-smi") else None


def _break_driver(stage: DrillContext) -> None:
    script = shlex.quote(f'#!/bin/sh\necho "{DRIVER_ERROR}"\nexit 9\n')
    tool = "/usr/local/sbin/nvidia-smi"
    make = f"mount -t tmpfs tmpfs /usr/local/sbin; printf %s {script} > {tool}; chmod +x {tool}"
    stage.host("b").exec(["sh", "-ec", make])


def _install_other_evener(stage: DrillContext) -> None:
    site = next((stage.host("b").home / "older" / "lib").glob("python*/site-packages"))
    shutil.copytree(Path(evener.__file__).parent, site / "evener", ignore=shutil.ignore_patterns("__pycache__"))
    with (site / "evener" / "core" / "units.py").open("a") as file:
        file.write("# as it was last week\n")


def _launch_detached(stage: DrillContext) -> None:
    for process in stage.processes:
        process.kill()
        process.wait()
    (stage.folder / "wait.py").write_text(WAIT_FOREVER)
    result = stage.run_evener("launch", "--fleet", "fleet.toml", "--out", "run", "--detach", "--", "wait.py")
    assert result.returncode == 0, result.stderr


HOST_DRILLS = [
    Drill(
        name="version.python",
        check="version.python",
        host="b",
        description="the fleet file names an interpreter that b does not have",
        lesson="Status 127 comes from the shell, not from ssh: the machine was reached, the program was not found.",
        fault=[set_fleet_line("b", "python", "/opt/miniconda3/bin/python")],
        fix=[set_fleet_line("b", "python", sys.executable)],
        manual=ManualReproduction(
            commands={"b": "/opt/miniconda3/bin/python train.py"}, prompt="$ ssh {host} {command}"
        ),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="version.python-old",
        check="version.python",
        host="b",
        description="the interpreter in the fleet file reports version 3.6.9",
        lesson="The python3 of an old desktop. It starts, and fails at the first syntax that it does not know.",
        fault=[
            write_file("b", "python3.6", OLD_PYTHON),
            on_host("b", "chmod +x ~/python3.6"),
            set_fleet_line("b", "python", "~/python3.6"),
        ],
        fix=[set_fleet_line("b", "python", sys.executable)],
        silence_reason="an error at the first thing that 3.6 does not support (the lab's python only reports "
        "that version)",
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="env.shadowed",
        check="env.shadowed",
        host="b",
        description="PYTHONPATH in b's ~/.ssh/environment has a folder that contains a torch.py",
        lesson="Python imports the first match on the path. The launch dies before a rank reports it; the others wait.",
        fault=[
            on_host(
                "b",
                "mkdir ~/mine; echo 'raise SystemExit(\"notes on torch\")' > ~/mine/torch.py; mkdir -p ~/.ssh; "
                "echo PYTHONPATH=$HOME/mine >> ~/.ssh/environment",
            )
        ],
        manual=manual_all_reduce(TORCHRUN_HANG),
        diagnose=doctor_diagnosis(),
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="version.torch",
        check="version.torch",
        host="b",
        description="b has torch 2.12.1, a has another version",
        lesson="Ranks exchange bytes whose layout depends on the version. Check for equal versions first.",
        fault=[create_venv("b", "older", {"torch": "2.12.1"}), set_fleet_line("b", "python", "~/older/bin/python")],
        fix=[set_fleet_line("b", "python", sys.executable)],
        silence_reason=SILENT_VERSION_MISMATCH,
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="version.torch-missing",
        check="version.torch",
        host="b",
        description="b's interpreter in the fleet file is a fresh venv without torch",
        lesson="In your terminal the right venv is active; an ssh session starts without one.",
        fault=[
            on_host("b", f"{sys.executable} -m venv --without-pip ~/fresh"),
            set_fleet_line("b", "python", "~/fresh/bin/python"),
        ],
        fix=[set_fleet_line("b", "python", sys.executable)],
        manual=ManualReproduction(
            commands={"b": "~/fresh/bin/python -m torch.distributed.run train.py"}, prompt="$ ssh {host} {command}"
        ),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="version.evener",
        check="version.evener",
        host="b",
        description="b has the evener of last week",
        lesson="One different line makes two programs. A hash of the source detects it; the version number does not.",
        fault=[
            create_venv("b", "older", {}),
            make_lab_step("on b: one line of its evener differs", _install_other_evener),
            set_fleet_line("b", "python", "~/older/bin/python"),
        ],
        fix=[set_fleet_line("b", "python", sys.executable)],
        silence_reason="nothing: the different replicas continue to train, with a useless result (see code.mismatch)",
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="proc.stale",
        check="proc.stale",
        host="b",
        description="yesterday's torchrun still runs on b; its ssh session is gone",
        lesson="It still waits for a rendezvous on a:29500, and joins the next one: today's.",
        fault=[
            write_file("b", "allreduce.py", ALL_REDUCE),
            start_program("b", torchrun_commands()["b"], ready="pgrep -f 'torchrun --nnodes'"),
        ],
        manual=manual_all_reduce(),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
        manual_clears_fault=True,
    ),
    Drill(
        name="tty.attached",
        check="tty.attached",
        host="b",
        description="a user has started torchrun on b in an ssh session",
        lesson="When the session ends, the kernel sends SIGHUP, and torchrun passes it on to every rank.",
        fault=[
            write_file("b", "wait.py", WAIT_FOREVER),
            start_in_terminal("b", "torchrun wait.py", ready="test -e /tmp/waiting"),
        ],
        fix=[make_lab_step("close that session; evener launch --detach -- wait.py", _launch_detached)],
        manual=ManualReproduction(
            commands={"b": "torchrun --master_port 29511 wait.py & sleep 5; kill -HUP $!; wait $!  # the session ends"},
            files={"wait.py": WAIT_FOREVER},
        ),
        # by the run that is the fix, once it listens
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
        also_expected=("port.in-use",),
    ),
    Drill(
        name="limit.nofile",
        check="limit.nofile",
        host="b",
        description="a session on b may open 48 files",
        lesson="Every peer and every process group needs sockets; every DataLoader worker needs pipes.",
        fault=[set_limits("b", nofile=48)],
        fix=[set_limits("b", nofile=4096)],
        manual=ManualReproduction(
            commands={"b": "python -c 'files = [open(\"/dev/null\") for _ in range(100)]'"},
            prompt="$ ssh {host} {command}",
        ),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="limit.memlock",
        check="limit.memlock",
        host="b",
        description="b has InfiniBand, and a session may lock 64 KiB of memory",
        lesson="An RDMA card reads memory without the CPU: the pages must be pinned.",
        fault=[
            overlay_files("b", "/sys/class/infiniband", {"mlx5_0/node_type": "1: CA"}),
            set_limits("b", memlock=65536),
        ],
        fix=[_raise_memlock()],
        silence_reason="ibv_reg_mr fails with 'Cannot allocate memory' though memory is free (a lab has no card "
        "to show it)",
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="mem.space",
        check="mem.space",
        host="b",
        description="another program has taken 1.2 of b's 1.5 GB",
        lesson="The kernel kills the largest program with SIGKILL, which leaves no message: a rank is just gone.",
        fault=[
            write_file("b", "hog.py", MEMORY_HOG),
            start_program(
                "b", "python hog.py", ready="ps -C python -o rss= | awk '{ s += $1 } END { exit s < 1100000 }'"
            ),
        ],
        fix=[on_host("b", "pkill -f 'hog.p[y]'; while pgrep -f 'hog.p[y]' >/dev/null; do sleep 0.05; done")],
        manual=ManualReproduction(
            commands=torchrun_commands(script="big.py"),
            files={"big.py": ALLOCATE_MODEL},
            hang_description=GLOO_HANG,
            succeeds_after_fix=True,
        ),
        diagnose=QUICK_DOCTOR,
        hosts={"a": HostSpec(), "b": HostSpec(memory="1500MB")},
        unsupported_reason=needs_root,
    ),
    Drill(
        name="disk.space",
        check="disk.space",
        host="b",
        description="200 MB are free where b keeps its runs",
        lesson="The first checkpoint fails after an hour, and all progress until then is lost.",
        fault=[on_host("b", "mkdir -p ~/.evener && mount -t tmpfs -o size=200M tmpfs ~/.evener")],
        fix=[on_host("b", "umount ~/.evener")],
        manual=ManualReproduction(commands={"b": "python save.py"}, files={"save.py": SAVE_CHECKPOINT}),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="shm.size",
        check="shm.size",
        host="b",
        description="b has 64 MB of shared memory, as in a Docker container",
        lesson="DataLoader workers pass their batches in shared memory. When it is full, they die of a bus error.",
        fault=[on_host("b", "mount -o remount,size=64M /dev/shm")],
        fix=[on_host("b", "mount -o remount,size=1G /dev/shm")],
        manual=ManualReproduction(commands={"b": "python loader.py"}, files={"loader.py": DATA_LOADER}),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="cpu.oversubscribed",
        check="cpu.oversubscribed",
        host="b",
        description=f"two ranks on b, each with as many threads as there are cores ({CORES})",
        lesson="Waiting threads keep their core busy, and working threads wait for a core: more threads do less work.",
        fault=[set_fleet_line("b", "ranks", 2), set_fleet_line("b", "threads", CORES)],
        manual=ManualReproduction(
            commands={
                "b": f"for n in {CORES} {max(1, CORES // 2)}; do "
                "OMP_NUM_THREADS=$n torchrun --nproc-per-node 2 busy.py; done"
            },
            files={"busy.py": BUSY_THREADS},
            timeout_s=30,
        ),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="cpu.throttled",
        check="cpu.throttled",
        host="b",
        description="b's CPU is limited to 800 of 4200 MHz",
        lesson="A power-saving profile, or heat. The machine looks healthy, and all others wait for it at each step.",
        fault=[overlay_files("b", CPUFREQ, CPUFREQ_VALUES)],
        fix=[on_host("b", f"echo 4200000 > {CPUFREQ}/scaling_max_freq")],
        silence_reason="nothing but a slow rank (the lab only shows the frequency, it does not slow down)",
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="power.sleep",
        check="power.sleep",
        host="b",
        description="b is a laptop on its battery",
        lesson="It suspends when the lid closes, and the others wait for a machine that is not even off.",
        fault=[overlay_files("b", POWER_SUPPLY, BATTERY)],
        fix=[
            on_host("b", f"echo 1 > {POWER_SUPPLY}/AC/online; echo Charging > {POWER_SUPPLY}/BAT0/status"),
            on_host(
                "b",
                "mkdir -p /etc/systemd/system; cd /etc/systemd/system; ln -sf /dev/null sleep.target; "
                "ln -sf /dev/null suspend.target",
            ),
        ],
        silence_reason=f"nothing until the lid closes; after that, no message: {GLOO_HANG}",
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="dtype.slow",
        check="dtype.slow",
        host="b",
        description="b's CPU has no bf16 units, a's has",
        lesson="It still computes, but converts each number in software: a dtype that all hosts support is faster.",
        fault=[set_bf16_support("a", is_supported=True), set_bf16_support("b")],
        fix=[set_bf16_support("b", is_supported=True)],
        manual=ManualReproduction(
            commands={"b": "ONEDNN_MAX_CPU_ISA=AVX2 python bf16.py"}, files={"bf16.py": BF16_MATMUL}
        ),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="gpu.missing",
        check="gpu.missing",
        host="b",
        description="the fleet file requests GPUs on b, which has none",
        lesson="Creating the first tensor fails on one rank, while the others wait for it in a collective.",
        fault=[set_fleet_line("b", "devices", "cuda")],
        manual=ManualReproduction(
            commands={"b": "python -c \"import torch; torch.ones(1, device='cuda')\""}, prompt="$ ssh {host} {command}"
        ),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
        unsupported_reason=needs_no_gpu,
    ),
    Drill(
        name="gpu.driver",
        check="gpu.driver",
        host="b",
        description="b's NVIDIA driver does not answer, as after an update without a reboot",
        lesson="The program and the kernel module have different versions until the machine reboots.",
        fault=[
            make_lab_step(f"on b: nvidia-smi says: {DRIVER_ERROR}", _break_driver),
            set_fleet_line("b", "devices", "cuda"),
        ],
        fix=[on_host("b", "umount /usr/local/sbin"), set_fleet_line("b", "devices", "cpu")],
        manual=ManualReproduction(commands={"b": "nvidia-smi"}, prompt="$ ssh {host} {command}"),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="env.ineffective",
        check="env.ineffective",
        host="a",
        description="a's firewall opens ports 50000-50100, and GLOO_PORT_RANGE names them, as many guides recommend",
        lesson="Gloo ignores that variable without a warning. Its ports come from net.ipv4.ip_local_port_range.",
        fault=[
            set_env("a", "GLOO_PORT_RANGE", "50000-50100"),
            set_firewall("a", "tcp dport { 22, 29500, 50000-50100 } accept", "meta l4proto { tcp, udp } drop"),
        ],
        fix=None if IS_ROOT else [unset_env("a", "GLOO_PORT_RANGE"), set_firewall("a")],
        manual=manual_all_reduce(GLOO_HANG),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
        also_expected=("net.firewall",),
    ),
    Drill(
        name="env.ineffective-nccl",
        check="env.ineffective",
        host="b",
        description="b's environment has NCCL_DEBUG and NCCL_SOCKET_IFNAME, and the fleet runs on Gloo",
        lesson="A recipe for GPUs. It does no harm, and has no effect.",
        fault=[set_env("b", "NCCL_DEBUG", "INFO"), set_env("b", "NCCL_SOCKET_IFNAME", "eth0")],
        fix=[unset_env("b", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME")],
        manual=manual_all_reduce(),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
        unsupported_reason=needs_no_gpu,
    ),
    Drill(
        name="env.interface-syntax",
        check="env.interface-syntax",
        host="b",
        description="b's environment has GLOO_SOCKET_IFNAME=^lo, which is NCCL's syntax for any interface but lo",
        lesson="Gloo expects one exact name, and looks for an interface called ^lo.",
        fault=[set_env("b", "GLOO_SOCKET_IFNAME", "^lo")],
        manual=manual_all_reduce(),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="rank.duplicate",
        check="rank.duplicate",
        host="b",
        peer="a",
        description="the fleet file lists one machine under two names",
        lesson="Two addresses of one machine look like two machines. The ranks share its cores, so nothing is gained.",
        fault=[set_fleet_line("b", "address", "10.77.0.1")],
        fix=[set_fleet_line("b", "address", "10.77.0.2")],
        silence_reason="nothing: it runs at half the expected speed",
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
]
