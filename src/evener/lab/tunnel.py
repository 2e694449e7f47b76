"""How does an overlay (Tailscale, WireGuard) look to its host? A real tun device; run as a program in the host.

Packets for another host of the overlay go out as UDP over the host's interface, so they cross the emulated link.
"""

import fcntl
import json
import os
import select
import socket
import struct
import sys

UDP_PORT = 41641
MTU = 1280  # Tailscale's
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU = 0x8914, 0x8916, 0x891C, 0x8922
IFF_UP, IFF_RUNNING = 0x1, 0x40


def main(interface: str, address: str, peers: dict[str, str]) -> None:
    """Carry packets between the device and the peers ({overlay address: real address}) for ever."""
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("0.0.0.0", UDP_PORT))  # noqa: S104  the host's own network
    tun = open_tun(interface, address)
    outer = {socket.inet_aton(inner): (real, UDP_PORT) for inner, real in peers.items()}
    while True:
        for ready in select.select([tun, udp.fileno()], [], [])[0]:
            try:
                if ready != tun:
                    os.write(tun, udp.recv(65536))
                elif (packet := os.read(tun, 65536))[16:20] in outer:
                    udp.sendto(packet, outer[packet[16:20]])
            except OSError as error:  # the link is down: packets are lost, as on any network
                print(f"{interface}: {error}", file=sys.stderr)


def open_tun(interface: str, address: str) -> int:
    """The device, with its address, up."""
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
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
