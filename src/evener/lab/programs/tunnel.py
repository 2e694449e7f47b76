"""Emulate an overlay network (Tailscale, WireGuard): a tun device, run as a program in the host.

Packets for another host of the overlay are sent as UDP over the host's interface, so they cross the emulated link.
Received packets can be delayed, as on a long path: many kernels lack netem for that.
"""

import collections
import fcntl
import json
import os
import select
import socket
import struct
import sys
import time

UDP_PORT = 41641
MTU = 1280  # Tailscale's
RECEIVE_BYTES = 1 << 22
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU = 0x8914, 0x8916, 0x891C, 0x8922
IFF_UP, IFF_RUNNING = 0x1, 0x40


def main(interface: str, address: str, peers: dict[str, str], delay_s: float = 0.0) -> None:
    """Forward packets between the device and the peers ({overlay address: real address}) for ever."""
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    udp.bind(("0.0.0.0", UDP_PORT))  # noqa: S104  the host's own network
    tun = open_tun(interface, address)
    outer = {socket.inet_aton(inner): (real, UDP_PORT) for inner, real in peers.items()}
    held: collections.deque[tuple[float, bytes]] = collections.deque()  # (delivery time, packet)
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        for ready in select.select([tun, udp.fileno()], [], [], wait_s)[0]:
            try:
                if ready != tun:
                    held.append((time.monotonic() + delay_s, udp.recv(65536)))
                elif (packet := os.read(tun, 65536))[16:20] in outer:
                    udp.sendto(packet, outer[packet[16:20]])
            except OSError as error:  # the link is down: packets are lost, as on any network
                print(f"{interface}: {error}", file=sys.stderr)
        while held and held[0][0] <= time.monotonic():
            os.write(tun, held.popleft()[1])


def open_tun(interface: str, address: str) -> int:
    """Create the tun device with its address, and bring it up; return its file descriptor."""
    tun = os.open("/dev/net/tun", os.O_RDWR)
    name = interface.encode()
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name, IFF_TUN | IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def set_address(request: int, dotted: str) -> None:
            fcntl.ioctl(control, request, struct.pack("16sHH4s16x", name, socket.AF_INET, 0, socket.inet_aton(dotted)))

        set_address(SIOCSIFADDR, address)
        set_address(SIOCSIFNETMASK, "255.192.0.0")
        fcntl.ioctl(control, SIOCSIFMTU, struct.pack("16si20x", name, MTU))
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", name, IFF_UP | IFF_RUNNING))
    return tun


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), *map(float, sys.argv[4:]))
