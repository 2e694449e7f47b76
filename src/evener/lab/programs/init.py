"""The controller of a lab and the first process of each host. Run as a program; standard library only.

The controller owns the network namespace that joins the hosts, reaps children, and boots a host again on request: a
file `boot` in the host's folder and a SIGCHLD. Its reply is a file `pid` there. Each host's first process has its own
namespaces of network, hostname, processes, mounts and cgroups; when it ends, the kernel kills the host's processes.
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
    """Read `desk.json` in this directory, start every host, print their pids as JSON, and keep running."""
    with open(f"{state}/desk.json") as file:
        config = json.load(file)
    if os.fork():  # the caller does not wait for the controller
        os._exit(0)
    libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    if config["rootless"]:
        new_user(0, 0, os.getuid(), os.getgid())
    unshare(NEWNET)
    starting = {name: start_host(f"{state}/hosts/{name}", name, config, host) for name, host in config["hosts"].items()}
    pids = {}
    for name, pipe in starting.items():
        with open(pipe) as reader:
            pids[name] = int(reader.read() or 0)
    print(json.dumps({"desk": os.getpid(), "hosts": pids}), flush=True)
    redirect_output(f"{state}/desk.log")
    reap(lambda: boot_requested_hosts(state, config))


def boot_requested_hosts(state: str, controller: dict[str, Any]) -> None:
    """Start every host whose folder has a file `boot`; write its pid, or 0, to the file `pid`."""
    for name, host in controller["hosts"].items():
        folder = f"{state}/hosts/{name}"
        try:
            if os.path.exists(f"{folder}/boot"):
                os.unlink(f"{folder}/boot")
                with open(start_host(folder, name, controller, host)) as reader:
                    write(f"{folder}/pid.draft", reader.read() or "0")
                os.replace(f"{folder}/pid.draft", f"{folder}/pid")
        except OSError:  # a full disk, for example: the other hosts need the controller
            traceback.print_exc()


def start_host(folder: str, name: str, controller: dict[str, Any], host: dict[str, Any]) -> int:
    """Fork a host's first process; return the pipe from which its pid can be read."""
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        redirect_output(f"{folder}/init.log")
        try:
            for procs in host["cgroups"]:
                with open(procs, "w") as file:
                    file.write("0")
            if host["cores"]:
                os.sched_setaffinity(0, host["cores"])
            unshare(NEWNET | NEWUTS | NEWIPC | NEWNS | NEWCGROUP | NEWPID)
            if pid := os.fork():
                os.write(write_fd, str(pid).encode())
            else:
                os.close(write_fd)
                become_host(folder, name, controller, host)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write_fd)
    return read_fd


def become_host(folder: str, name: str, controller: dict[str, Any], host: dict[str, Any]) -> NoReturn:
    """Become pid 1 of a host: set its hostname and mounts, start its services and sshd, then reap children."""
    socket.sethostname(name)
    mount_all(f"{folder}/etc", controller, host["etc"])
    for setting, value in (("ip_unprivileged_port_start", "0"), ("ping_group_range", "0 0")) * controller["rootless"]:
        write(f"/proc/sys/net/ipv4/{setting}", value)
    for argv in host["services"]:
        start_service(argv)
    if controller["rootless"]:
        start_service(host["sshd"], controller["uid"], controller["gid"])
    else:
        start_service(host["sshd"])
    reap()


def mount_all(etc: str, controller: dict[str, Any], files: dict[str, str]) -> None:
    """Mount the host's own /proc, /sys, /tmp, /run, /dev/shm, /dev/pts, and a writable overlay of /etc."""
    with open("/proc/self/mounts") as file:
        cgroups = [line.split() for line in file if line.split()[2] in ("cgroup", "cgroup2")]
    mount(None, "/", None, REC | PRIVATE)
    visible = [(path, os.open(path, os.O_PATH)) for path in controller["visible"]]
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    mount("sysfs", "/sys", "sysfs", NOSUID | NODEV | NOEXEC)
    if any(kind == "cgroup" for _, _, kind, *_ in cgroups):
        mount("tmpfs", "/sys/fs/cgroup", "tmpfs", NOSUID | NODEV | NOEXEC, "mode=755")
    for source, mount_point, kind, options, *_ in cgroups:
        named = [o for o in options.split(",") if o.startswith("name=")]
        controllers = named or [os.path.basename(mount_point)] if kind == "cgroup" else []
        os.makedirs(mount_point, exist_ok=True)
        try:
            mount(source, mount_point, kind, NOSUID | NODEV | NOEXEC, ",".join(controllers) or None)
        except OSError:  # a cgroup controller that only the machine's root may mount
            traceback.print_exc()
    for folder, mode in (("/tmp", "1777"), ("/run", "755"), ("/var/log", "755"), ("/dev/shm", "1777")):  # noqa: S108
        mount("tmpfs", folder, "tmpfs", NOSUID | NODEV, f"mode={mode}")
    os.makedirs("/run/sshd", mode=0o755)
    mount("devpts", "/dev/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    if not os.path.islink("/dev/ptmx"):
        mount("/dev/pts/ptmx", "/dev/ptmx", None, BIND)
    for path, fd in visible:
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
    mount("overlay", "/etc", "overlay", NOSUID | NODEV, layers + ",userxattr" * controller["rootless"])


def start_service(argv: list[str], uid: int | None = None, gid: int = 0) -> None:
    """Start a program; with a uid, as an ordinary user."""
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


def reap(on_child_exit: Callable[[], None] = lambda: None) -> NoReturn:
    """Reap children for ever; call `on_child_exit` at each SIGCHLD."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        on_child_exit()
        signal.sigwait({signal.SIGCHLD})


def new_user(uid: int, gid: int, outer_uid: int, outer_gid: int) -> None:
    """Enter a user namespace that maps the caller's `outer_uid` to `uid`."""
    unshare(NEWUSER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{uid} {outer_uid} 1")
    write("/proc/self/gid_map", f"{gid} {outer_gid} 1")


def unshare(flags: int) -> None:
    """Enter new namespaces of these kinds; raise OSError on failure."""
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), f"unshare {flags:#x}: {os.strerror(ctypes.get_errno())}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call mount(2); raise OSError on failure."""
    args = [arg.encode() if arg is not None else None for arg in (source, target, kind, data)]
    if libc.mount(args[0], args[1], args[2], ctypes.c_ulong(flags), args[3]) != 0:
        raise OSError(ctypes.get_errno(), f"mount {kind or source} on {target}: {os.strerror(ctypes.get_errno())}")


def write(path: str, text: str) -> None:
    """Write a file with a single write, as kernel files require."""
    with open(path, "w") as file:
        file.write(text)


def redirect_output(path: str) -> None:
    """Redirect stdout and stderr to a file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1])
