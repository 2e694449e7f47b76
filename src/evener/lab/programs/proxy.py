"""Connect ssh to a host of a lab: a ProxyCommand, run as a program, standard library only.

Enters the controller's network namespace, connects to HOST:PORT there and passes the connected socket to ssh
(ProxyUseFdpass): what ssh sends crosses the emulated link, without a relay.
"""

import ctypes
import os
import socket
import sys

CONNECT_TIMEOUT_S = 5.0


def main(state: str, address: str, port: str) -> None:
    """Connect from the controller of the lab in directory `state`."""
    try:
        with open(f"{state}/desk") as file:
            pid, start_ticks, rootless = map(int, file.read().split())
        with open(f"/proc/{pid}/stat") as file:
            if int(file.read().rpartition(")")[2].split()[19]) != start_ticks:
                raise ValueError("a later process with the controller's pid")
        for kind in ("user", "net") if rootless else ("net",):
            fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
            if ctypes.CDLL(None).setns(fd, 0) != 0:
                sys.exit(f"evener lab: cannot enter the namespaces of the lab in {state}")
    except (OSError, ValueError):
        sys.exit(f"evener lab: no lab is up in {state}")
    try:
        connection = socket.create_connection((address, int(port)), CONNECT_TIMEOUT_S)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else "Connection timed out"
        sys.exit(f"ssh: connect to host {address} port {port}: {reason}")  # as ssh itself words it
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a login takes 80 ms less
    with socket.socket(fileno=os.dup(1)) as ssh:
        socket.send_fds(ssh, [b"\0"], [connection.fileno()])


if __name__ == "__main__":
    main(*sys.argv[1:])
