"""Fault drills on one machine: interpreters, limits, memory, disk, CPU, GPU, environment."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import sys
from pathlib import Path

import evener
from evener.lab.drill import Drill, Raw, Stage, Step, doctor, fleet_line, lab_step, on
from evener.lab.drills_network import HALF_AN_HOUR, IS_ROOT, PLAIN, QUICK, TEN_MINUTES, all_reduce, torchrun
from evener.lab.faults import (
    another_python,
    firewall,
    grow,
    in_terminal,
    limit,
    set_env,
    start,
    unset_env,
    without_bf16,
    write,
)
from evener.lab.scripts import ALL_REDUCE, BF16, BIG, BUSY, HOG, LOADER, SAVE, WAIT
from evener.lab.spec import HostSpec

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
BATTERY = {"BAT0/type": "Battery", "BAT0/status": "Discharging", "AC/type": "Mains", "AC/online": "0"}
FREQUENCY = {"cpuinfo_max_freq": "4200000", "scaling_max_freq": "800000"}
SUPPLY, FREQUENCIES = "/sys/class/power_supply", "/sys/devices/system/cpu/cpu0/cpufreq"
DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
ONE_TORCH = (
    "nothing yet: all ranks start, and later a collective or a pickle fails far from the cause (a lab has one torch)"
)
MEMLOCK = 2**30  # what RDMA needs


def needs_root() -> str | None:
    """Return why a memory limit is not possible here, if it is not: only root may create cgroups."""
    return None if os.geteuid() == 0 else "a memory limit is a cgroup, which only root may make"


OLD_PYTHON = f"""#!{sys.executable}
import sys

sys.version_info, sys.version = (3, 6, 9), "3.6.9 (a lab's)"
exec(sys.argv[-1])
"""


def _lock_more() -> Step:
    """Raise the memlock limit; if this machine's hard limit is lower, remove the InfiniBand card instead."""
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard == resource.RLIM_INFINITY or hard >= MEMLOCK:
        return limit("b", memlock=MEMLOCK)
    return on("b", "umount /sys/class  # the hard limit of this machine is lower: remove the card")


def needs_no_gpu() -> str | None:
    """Return why the drill is not possible here, if it is not: this machine has a GPU."""
    return "this machine has an NVIDIA driver" if shutil.which("nvidia-smi") else None


def _no_driver(stage: Stage) -> None:
    script = shlex.quote(f'#!/bin/sh\necho "{DRIVER}"\nexit 9\n')
    tool = "/usr/local/sbin/nvidia-smi"
    make = f"mount -t tmpfs tmpfs /usr/local/sbin; printf %s {script} > {tool}; chmod +x {tool}"
    stage.host("b").exec(["sh", "-ec", make])


def _other_evener(stage: Stage) -> None:
    site = next((stage.host("b").home / "older" / "lib").glob("python*/site-packages"))
    shutil.copytree(Path(evener.__file__).parent, site / "evener", ignore=shutil.ignore_patterns("__pycache__"))
    with (site / "evener" / "core" / "units.py").open("a") as file:
        file.write("# as it was last week\n")


def _launch(stage: Stage) -> None:
    for process in stage.started:
        process.kill()
        process.wait()
    (stage.folder / "wait.py").write_text(WAIT)
    result = stage.evener("launch", "--fleet", "fleet.toml", "--out", "run", "--detach", "--", "wait.py")
    assert result.returncode == 0, result.stderr


DRILLS = [
    Drill(
        name="version.python", check="version.python", host="b",
        says="the fleet file names an interpreter that b does not have",
        why="Status 127 comes from the shell, not from ssh: the machine was reached, the program was not found.",
        fault=[fleet_line("b", "python", "/opt/miniconda3/bin/python")],
        mend=[fleet_line("b", "python", sys.executable)],
        raw=Raw(commands={"b": "/opt/miniconda3/bin/python train.py"}, typed="$ ssh {host} {command}"),
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="version.python-old", check="version.python", host="b",
        says="the interpreter in the fleet file reports version 3.6.9",
        why="The python3 of an old desktop. It starts, and fails at the first syntax that it does not know.",
        fault=[write("b", "python3.6", OLD_PYTHON), on("b", "chmod +x ~/python3.6"),
               fleet_line("b", "python", "~/python3.6")],
        mend=[fleet_line("b", "python", sys.executable)],
        silence="an error at the first thing that 3.6 does not support (the lab's python only reports that version)",
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="env.shadowed", check="env.shadowed", host="b",
        says="PYTHONPATH in b's ~/.ssh/environment has a folder that contains a torch.py",
        why="Python imports the first match on the path. The launch dies before a rank reports it; the others wait.",
        fault=[on("b", "mkdir ~/mine; echo 'raise SystemExit(\"notes on torch\")' > ~/mine/torch.py; mkdir -p ~/.ssh; "
                       "echo PYTHONPATH=$HOME/mine >> ~/.ssh/environment")],
        raw=all_reduce(TEN_MINUTES), look=doctor(), hosts=PLAIN,
    ),
    Drill(
        name="version.torch", check="version.torch", host="b",
        says="b has torch 2.12.1, a has another version",
        why="Ranks exchange bytes whose layout depends on the version. Check for equal versions first.",
        fault=[another_python("b", "older", {"torch": "2.12.1"}), fleet_line("b", "python", "~/older/bin/python")],
        mend=[fleet_line("b", "python", sys.executable)],
        silence=ONE_TORCH, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="version.torch-missing", check="version.torch", host="b",
        says="b's interpreter in the fleet file is a fresh venv without torch",
        why="In your terminal the right venv is active; an ssh session starts without one.",
        fault=[on("b", f"{sys.executable} -m venv --without-pip ~/fresh"),
               fleet_line("b", "python", "~/fresh/bin/python")],
        mend=[fleet_line("b", "python", sys.executable)],
        raw=Raw(commands={"b": "~/fresh/bin/python -m torch.distributed.run train.py"}, typed="$ ssh {host} {command}"),
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="version.evener", check="version.evener", host="b",
        says="b has the evener of last week",
        why="One different line makes two programs. A hash of the source detects it; the version number does not.",
        fault=[another_python("b", "older", {}), lab_step("on b: one line of its evener differs", _other_evener),
               fleet_line("b", "python", "~/older/bin/python")],
        mend=[fleet_line("b", "python", sys.executable)],
        silence="nothing: the different replicas continue to train, with a useless result (see code.mismatch)",
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="proc.stale", check="proc.stale", host="b",
        says="yesterday's torchrun still runs on b; its ssh session is gone",
        why="It still waits for a rendezvous on a:29500, and joins the next one: today's.",
        fault=[write("b", "allreduce.py", ALL_REDUCE),
               start("b", torchrun()["b"], ready="pgrep -f 'torchrun --nnodes'")],
        raw=all_reduce(), look=QUICK, hosts=PLAIN, used_up=True,
    ),
    Drill(
        name="tty.attached", check="tty.attached", host="b",
        says="a user has started torchrun on b in an ssh session",
        why="When the session ends, the kernel sends SIGHUP, and torchrun passes it on to every rank.",
        fault=[write("b", "wait.py", WAIT), in_terminal("b", "torchrun wait.py", ready="test -e /tmp/waiting")],
        mend=[lab_step("close that session; evener launch --detach -- wait.py", _launch)],
        raw=Raw(
            commands={"b": "torchrun --master_port 29511 wait.py & sleep 5; kill -HUP $!; wait $!  # the session ends"},
            files={"wait.py": WAIT},
        ),
        look=QUICK, hosts=PLAIN, may_also=("port.in-use",),  # by the run that is the fix, once it listens
    ),
    Drill(
        name="limit.nofile", check="limit.nofile", host="b",
        says="a session on b may open 48 files",
        why="Every peer and every process group needs sockets; every DataLoader worker needs pipes.",
        fault=[limit("b", nofile=48)], mend=[limit("b", nofile=4096)],
        raw=Raw(commands={"b": "python -c 'files = [open(\"/dev/null\") for _ in range(100)]'"},
                typed="$ ssh {host} {command}"),
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="limit.memlock", check="limit.memlock", host="b",
        says="b has InfiniBand, and a session may lock 64 KiB of memory",
        why="An RDMA card reads memory without the CPU: the pages must be pinned.",
        fault=[grow("b", "/sys/class/infiniband", {"mlx5_0/node_type": "1: CA"}), limit("b", memlock=65536)],
        mend=[_lock_more()],
        silence="ibv_reg_mr fails with 'Cannot allocate memory' though memory is free (a lab has no card to show it)",
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="mem.space", check="mem.space", host="b",
        says="another program has taken 1.2 of b's 1.5 GB",
        why="The kernel kills the largest program with SIGKILL, which leaves no message: a rank is just gone.",
        fault=[write("b", "hog.py", HOG),
               start("b", "python hog.py", ready="ps -C python -o rss= | awk '{ s += $1 } END { exit s < 1100000 }'")],
        mend=[on("b", "pkill -f 'hog.p[y]'; while pgrep -f 'hog.p[y]' >/dev/null; do sleep 0.05; result")],
        raw=Raw(commands=torchrun(script="big.py"), files={"big.py": BIG}, waits=HALF_AN_HOUR, works_when_mended=True),
        look=QUICK, hosts={"a": HostSpec(), "b": HostSpec(memory="1500MB")}, lacks=needs_root,
    ),
    Drill(
        name="disk.space", check="disk.space", host="b",
        says="200 MB are free where b keeps its runs",
        why="The first checkpoint fails after an hour, and all progress until then is lost.",
        fault=[on("b", "mkdir -p ~/.evener && mount -t tmpfs -o size=200M tmpfs ~/.evener")],
        mend=[on("b", "umount ~/.evener")],
        raw=Raw(commands={"b": "python save.py"}, files={"save.py": SAVE}), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="shm.size", check="shm.size", host="b",
        says="b has 64 MB of shared memory, as in a Docker container",
        why="DataLoader workers pass their batches in shared memory. When it is full, they die of a bus error.",
        fault=[on("b", "mount -o remount,size=64M /dev/shm")], mend=[on("b", "mount -o remount,size=1G /dev/shm")],
        raw=Raw(commands={"b": "python loader.py"}, files={"loader.py": LOADER}), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="cpu.oversubscribed", check="cpu.oversubscribed", host="b",
        says=f"two ranks on b, each with as many threads as there are cores ({CORES})",
        why="Waiting threads keep their core busy, and working threads wait for a core: more threads do less work.",
        fault=[fleet_line("b", "ranks", 2), fleet_line("b", "threads", CORES)],
        raw=Raw(
            commands={"b": f"for n in {CORES} {max(1, CORES // 2)}; do "
                           "OMP_NUM_THREADS=$n torchrun --nproc-per-node 2 busy.py; result"},
            files={"busy.py": BUSY}, within_s=30,
        ),
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="cpu.throttled", check="cpu.throttled", host="b",
        says="b's CPU is limited to 800 of 4200 MHz",
        why="A power-saving profile, or heat. The machine looks healthy, and all others wait for it at each step.",
        fault=[grow("b", FREQUENCIES, FREQUENCY)],
        mend=[on("b", f"echo 4200000 > {FREQUENCIES}/scaling_max_freq")],
        silence="nothing but a slow rank (the lab only shows the frequency, it does not slow down)",
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="power.sleep", check="power.sleep", host="b",
        says="b is a laptop on its battery",
        why="It suspends when the lid closes, and the others wait for a machine that is not even off.",
        fault=[grow("b", SUPPLY, BATTERY)],
        mend=[on("b", f"echo 1 > {SUPPLY}/AC/online; echo Charging > {SUPPLY}/BAT0/status"),
              on("b", "mkdir -p /etc/systemd/system; cd /etc/systemd/system; ln -sf /dev/null sleep.target; "
                      "ln -sf /dev/null suspend.target")],
        silence=f"nothing until the lid closes; after that, no message: {HALF_AN_HOUR}",
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="dtype.slow", check="dtype.slow", host="b",
        says="b's CPU has no bf16 units, a's has",
        why="It still computes, but converts each number in software: a dtype that all hosts support is faster.",
        fault=[without_bf16("a", has_it=True), without_bf16("b")], mend=[without_bf16("b", has_it=True)],
        raw=Raw(commands={"b": "ONEDNN_MAX_CPU_ISA=AVX2 python bf16.py"}, files={"bf16.py": BF16}),
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="gpu.missing", check="gpu.missing", host="b",
        says="the fleet file requests GPUs on b, which has none",
        why="Creating the first tensor fails on one rank, while the others wait for it in a collective.",
        fault=[fleet_line("b", "devices", "cuda")],
        raw=Raw(commands={"b": "python -c \"import torch; torch.ones(1, device='cuda')\""},
                typed="$ ssh {host} {command}"),
        look=QUICK, hosts=PLAIN, lacks=needs_no_gpu,
    ),
    Drill(
        name="gpu.driver", check="gpu.driver", host="b",
        says="b's NVIDIA driver does not answer, as after an update without a reboot",
        why="The program and the kernel module have different versions until the machine reboots.",
        fault=[lab_step(f"on b: nvidia-smi says: {DRIVER}", _no_driver), fleet_line("b", "devices", "cuda")],
        mend=[on("b", "umount /usr/local/sbin"), fleet_line("b", "devices", "cpu")],
        raw=Raw(commands={"b": "nvidia-smi"}, typed="$ ssh {host} {command}"), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="env.ineffective", check="env.ineffective", host="a",
        says="a's firewall opens ports 50000-50100, and GLOO_PORT_RANGE names them, as many guides recommend",
        why="Gloo ignores that variable without a warning. Its ports come from net.ipv4.ip_local_port_range.",
        fault=[set_env("a", "GLOO_PORT_RANGE", "50000-50100"),
               firewall("a", "tcp dport { 22, 29500, 50000-50100 } accept", "meta l4proto { tcp, udp } drop")],
        mend=None if IS_ROOT else [unset_env("a", "GLOO_PORT_RANGE"), firewall("a")],
        raw=all_reduce(HALF_AN_HOUR), look=QUICK, hosts=PLAIN, may_also=("net.firewall",),
    ),
    Drill(
        name="env.ineffective-nccl", check="env.ineffective", host="b",
        says="b's environment has NCCL_DEBUG and NCCL_SOCKET_IFNAME, and the fleet runs on Gloo",
        why="A recipe for GPUs. It does no harm, and has no effect.",
        fault=[set_env("b", "NCCL_DEBUG", "INFO"), set_env("b", "NCCL_SOCKET_IFNAME", "eth0")],
        mend=[unset_env("b", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME")],
        raw=all_reduce(), look=QUICK, hosts=PLAIN, lacks=needs_no_gpu,
    ),
    Drill(
        name="env.interface-syntax", check="env.interface-syntax", host="b",
        says="b's environment has GLOO_SOCKET_IFNAME=^lo, which is NCCL's syntax for any interface but lo",
        why="Gloo expects one exact name, and looks for an interface called ^lo.",
        fault=[set_env("b", "GLOO_SOCKET_IFNAME", "^lo")],
        raw=all_reduce(), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="rank.duplicate", check="rank.duplicate", host="b", peer="a",
        says="the fleet file lists one machine under two names",
        why="Two addresses of one machine look like two machines. The ranks share its cores, so nothing is gained.",
        fault=[fleet_line("b", "address", "10.77.0.1")], mend=[fleet_line("b", "address", "10.77.0.2")],
        silence="nothing: it runs at half the expected speed",
        look=QUICK, hosts=PLAIN,
    ),
]  # fmt: skip
