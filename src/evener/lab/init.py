"""How does a process become the desk of a lab, and its children hosts? Run as a program; standard library only.

The desk owns the network that joins the hosts, reaps, and boots a host again that is asked for: by a file `boot` in the
host's folder and a SIGCHLD; its answer is a file `pid` there. Each host's first process sees its own network, hostname,
processes, mounts and cgroups; when it ends, the kernel ends every process of the host.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, NOEXEC, BIND, REC, PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
SET_CHILD_SUBREAPER = 36
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

libc = ctypes.CDLL(None, use_errno=True)


def main(state: str) -> None:
    """Read `desk.json` in this directory, start every host, print their pids as JSON, and stay."""
    with open(f"{state}/desk.json") as file:
        desk = json.load(file)
    if os.fork():  # whoever called us need not wait for the desk
        os._exit(0)
    libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    if desk["rootless"]:
        new_user(0, 0, os.getuid(), os.getgid())
    unshare(NEWNET)
    starting = {name: start_host(f"{state}/hosts/{name}", name, desk, host) for name, host in desk["hosts"].items()}
    pids = {}
    for name, pipe in starting.items():
        with open(pipe) as told:
            pids[name] = int(told.read() or 0)
    print(json.dumps({"desk": os.getpid(), "hosts": pids}), flush=True)
    log_to(f"{state}/desk.log")
    reap(lambda: boot_asked(state, desk))


def boot_asked(state: str, desk: dict[str, Any]) -> None:
    """Start every host whose folder has a file `boot`; its pid, or 0, is then in the file `pid`."""
    for name, host in desk["hosts"].items():
        folder = f"{state}/hosts/{name}"
        try:
            if os.path.exists(f"{folder}/boot"):
                os.unlink(f"{folder}/boot")
                with open(start_host(folder, name, desk, host)) as told:
                    write(f"{folder}/pid.draft", told.read() or "0")
                os.replace(f"{folder}/pid.draft", f"{folder}/pid")
        except OSError:  # a full disk, say: the other hosts need their desk
            traceback.print_exc()


def start_host(folder: str, name: str, desk: dict[str, Any], host: dict[str, Any]) -> int:
    """Fork a host's first process. The pipe from which its pid can be read."""
    told, tell = os.pipe()
    if os.fork() == 0:
        log_to(f"{folder}/init.log")
        try:
            for procs in host["cgroups"]:
                with open(procs, "w") as file:
                    file.write("0")
            if host["cores"]:
                os.sched_setaffinity(0, host["cores"])
            unshare(NEWNET | NEWUTS | NEWIPC | NEWNS | NEWCGROUP | NEWPID)
            if pid := os.fork():
                os.write(tell, str(pid).encode())
            else:
                os.close(tell)
                become_host(folder, name, desk, host)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(tell)
    return told


def become_host(folder: str, name: str, desk: dict[str, Any], host: dict[str, Any]) -> NoReturn:
    """Pid 1 of a host: its mounts and its name; then sshd, and whatever else runs there from the start."""
    socket.sethostname(name)
    mount_all(f"{folder}/etc", desk, host["etc"])
    for setting, value in (("ip_unprivileged_port_start", "0"), ("ping_group_range", "0 0")) * desk["rootless"]:
        write(f"/proc/sys/net/ipv4/{setting}", value)
    for argv in host["services"]:
        start_service(argv)
    if desk["rootless"]:
        start_service(host["sshd"], desk["uid"], desk["gid"])
    else:
        start_service(host["sshd"])
    reap()


def mount_all(etc: str, desk: dict[str, Any], files: dict[str, str]) -> None:
    """Its own /proc, /sys, /tmp, /run, /dev/shm, /dev/pts, and an /etc that it may change."""
    with open("/proc/self/mounts") as file:
        cgroups = [line.split() for line in file if line.split()[2] in ("cgroup", "cgroup2")]
    mount(None, "/", None, REC | PRIVATE)
    kept = [(path, os.open(path, os.O_PATH)) for path in desk["visible"]]
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    mount("sysfs", "/sys", "sysfs", NOSUID | NODEV | NOEXEC)
    if any(kind == "cgroup" for _, _, kind, *_ in cgroups):
        mount("tmpfs", "/sys/fs/cgroup", "tmpfs", NOSUID | NODEV | NOEXEC, "mode=755")
    for source, place, kind, options, *_ in cgroups:
        named = [o for o in options.split(",") if o.startswith("name=")]
        controllers = named or [os.path.basename(place)] if kind == "cgroup" else []
        os.makedirs(place, exist_ok=True)
        try:
            mount(source, place, kind, NOSUID | NODEV | NOEXEC, ",".join(controllers) or None)
        except OSError:  # a controller that only the machine's root may see
            traceback.print_exc()
    for place, mode in (("/tmp", "1777"), ("/run", "755"), ("/var/log", "755"), ("/dev/shm", "1777")):  # noqa: S108
        mount("tmpfs", place, "tmpfs", NOSUID | NODEV, f"mode={mode}")
    os.makedirs("/run/sshd", mode=0o755)
    mount("devpts", "/dev/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    if not os.path.islink("/dev/ptmx"):
        mount("/dev/pts/ptmx", "/dev/ptmx", None, BIND)
    for path, fd in kept:
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{fd}", path, None, BIND | REC)
        os.close(fd)
    os.makedirs(etc, exist_ok=True)
    mount("tmpfs", etc, "tmpfs", NOSUID | NODEV, "mode=755")
    for folder in ("upper", "work"):
        os.mkdir(f"{etc}/{folder}", 0o755)
    for name, text in files.items():
        write(f"{etc}/upper/{name}", text)
        os.chmod(f"{etc}/upper/{name}", 0o600 if name == "shadow" else 0o644)
    layers = f"lowerdir=/etc,upperdir={etc}/upper,workdir={etc}/work"
    mount("overlay", "/etc", "overlay", NOSUID | NODEV, layers + ",userxattr" * desk["rootless"])


def start_service(argv: list[str], uid: int | None = None, gid: int = 0) -> None:
    """Run a program; with a uid, as an ordinary user."""
    if os.fork():
        return
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.setsid()
        if uid is not None:
            new_user(uid, gid, 0, 0)
        os.chdir("/")
        os.execve(argv[0], argv, {"PATH": PATH, "LANG": "C.UTF-8"})  # noqa: S606  no shell between
    except BaseException:
        traceback.print_exc()
        os._exit(127)


def reap(then: Callable[[], None] = lambda: None) -> NoReturn:
    """Wait for children for ever; `then` is what else there is to do at each SIGCHLD."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        then()
        signal.sigwait({signal.SIGCHLD})


def new_user(uid: int, gid: int, outer_uid: int, outer_gid: int) -> None:
    """Enter a user namespace in which the caller, `outer_uid` so far, is `uid`."""
    unshare(NEWUSER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{uid} {outer_uid} 1")
    write("/proc/self/gid_map", f"{gid} {outer_gid} 1")


def unshare(flags: int) -> None:
    """Leave these namespaces for new ones."""
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), f"unshare {flags:#x}: {os.strerror(ctypes.get_errno())}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2)."""
    words = [word.encode() if word is not None else None for word in (source, target, kind, data)]
    if libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) != 0:
        raise OSError(ctypes.get_errno(), f"mount {kind or source} on {target}: {os.strerror(ctypes.get_errno())}")


def write(path: str, text: str) -> None:
    """Write a file of the kernel's, in one write."""
    with open(path, "w") as file:
        file.write(text)


def log_to(path: str) -> None:
    """Send stdout and stderr there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1])
