"""One host of an emulated lab: run programs in it, change its link, disk and firewall, power it off and on."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from evener.core.base.errors import EvenerError, UsageError
from evener.core.base.shell import quote_word
from evener.lab import disk, power, state, writeback
from evener.lab.create_lab import wiring_config
from evener.lab.lab_requirements import find_programs
from evener.lab.lab_spec import HostSpec
from evener.lab.network_process import NetworkProcess
from evener.lab.programs.init import PATH
from evener.lab.state import HostState, LabFolder

HEADER_BYTES = 14 + 20 + 32  # bytes of a packet: Ethernet, IPv4, TCP with time stamps
TIMEOUT_EXIT_STATUS = 124  # what timeout(1) exits with


class LinkCounters(NamedTuple):
    """The kernel's counters of an interface since it was created."""

    tx_bytes: int
    rx_bytes: int
    tx_packets: int

    @property
    def payload_bytes(self) -> int:
        """Bytes sent without the headers of Ethernet, IPv4 and TCP; nearly none if only ACKs were sent."""
        return self.tx_bytes - HEADER_BYTES * self.tx_packets


class LabHost:
    """One host of a lab: run things in it, and break it."""

    def __init__(self, lab: LabFolder, name: str) -> None:
        self._lab = lab
        self.name = name

    @property
    def spec(self) -> HostSpec:
        """The current spec, which `set_rate` and `set_mtu` change."""
        return self._lab.state.spec.hosts[self.name]

    @property
    def _state(self) -> HostState:
        return self._lab.state.hosts[self.name]

    @property
    def address(self) -> str:
        """IPv4 address of its main interface."""
        return self._state.address

    @property
    def address6(self) -> str:
        """IPv6 address of its main interface."""
        return self._state.address6

    @property
    def pid(self) -> int:
        """Pid of its first process, in this machine's pid namespace."""
        return self._state.init.pid

    @property
    def home(self) -> Path:
        """The user's home directory in the host, as a path of this machine."""
        return self._lab.host_folder(self.name) / "home"

    def is_alive(self) -> bool:
        """Return whether the host runs."""
        return self._state.init.is_alive()

    def is_off(self) -> bool:
        """Return whether the host was powered off; one that neither runs nor is off has crashed."""
        return self._state.is_off and not self.is_alive()

    def kill(self) -> None:
        """Kill every process of the host at once. Peers see its connections close, unlike after `power_off`."""
        self._state.init.kill()
        state.wait_until(lambda: not self.is_alive(), f"host {self.name} did not end")

    def power_off(self) -> None:
        """Cut the power: peers receive nothing from now on, no FIN and no RST, and every process is killed at once.

        Its home stays; with `writeback_s` without the writes that were not flushed. What a lab keeps in memory is reset
        by the next boot: /tmp, /run, /etc, overridden files.
        """
        self._change_network("unplug", host=wiring_config(self.spec, self._state))
        with state.lock_labs():
            self._lab.update_host(self.name, is_off=True)
            self.kill()
            if self.spec.writeback_s is not None:
                writeback.lose_unsynced(self._lab.host_folder(self.name))

    def boot(self) -> None:
        """Boot the host with its former addresses, home, host key and limits; raise UsageError if it is on."""
        power.boot(self._lab, self.name)
        self.apply_spec()

    def apply_spec(self) -> None:
        """Apply what only a running host can get: the marks of Wi-Fi cards and the firewall of its spec."""
        for name in (self.spec.interface, *self.spec.more_interfaces):
            if name.startswith("wl"):
                self.mark_wireless(name)
        if self.spec.firewall:
            self.set_firewall(self.spec.firewall)

    def argv(self, command: Sequence[str]) -> list[str]:
        """Return the command line that enters the host: its limits, namespaces, and its user's home and environment."""
        folder = self._lab.host_folder(self.name)
        limits = "".join(f"echo $$ >{shlex.quote(procs)}; " for procs in json.loads((folder / "cgroups").read_text()))
        nsenter, setpriv, taskset = find_programs("nsenter", "setpriv", "taskset")
        pin = [taskset, "-c", ",".join(map(str, self.spec.cores))] if self.spec.cores else []
        user = ["--user", "--preserve-credentials"] if self._lab.state.rootless else []
        enter = [nsenter, "-t", str(self.pid), *user, "-m", "-u", "-i", "-n", "-p", "-C", "--"]
        environment = [f"PATH={PATH}", f"HOME={self.home}", "LANG=C.UTF-8", f"TERM={os.environ.get('TERM', 'dumb')}"]
        inside = [setpriv, "--pdeathsig", "KILL", "env", "-i", "-C", str(self.home), *environment, *command]
        return ["sh", "-c", limits + 'exec "$@"', "sh", *pin, *enter, *inside]

    def exec(
        self, command: Sequence[str], *, stdin: str | None = None, check: bool = True, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the host directly, without ssh, and wait for it.

        Raises EvenerError on a timeout, and with `check` on an exit status other than 0.
        """
        self.check_alive()
        result = subprocess.run(
            self.argv(["timeout", "--kill-after=2", str(timeout_s), *command]),
            input=stdin or "",
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if result.returncode == TIMEOUT_EXIT_STATUS:
            raise EvenerError(
                f"host {self.name}: {shlex.join(command)}: timed out after {timeout_s:.0f} s",
                output=result.stdout + result.stderr,
            )
        if check and result.returncode:
            raise EvenerError(
                f"host {self.name}: {shlex.join(command)}: exit status {result.returncode}",
                output=result.stdout + result.stderr,
            )
        return result

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program in the host; `options` are those of subprocess.Popen, whose `kill` ends the program."""
        self.check_alive()
        return subprocess.Popen(self.argv(command), **options)

    def set_rate(self, rate: str | None = None, *, up: str | None = None, down: str | None = None,
                 policed: bool = False) -> None:  # fmt: skip
        """Change the rate of its link; None: no limit. Policed: packets above `down` are dropped, not queued."""
        spec = self._update_spec(rate=rate, rate_up=up, rate_down=down, policed=policed)
        self._change_network("set_rate", pid=self.pid, interface=spec.interface, port=self._state.port,
                      up_bps=spec.up_bps, down_bps=spec.down_bps, policed=policed)  # fmt: skip

    def set_mtu(self, mtu: int, path_mtu: int | None = None) -> None:
        """Change the largest packet that it sends, and the largest that its path lets through."""
        self._update_spec(mtu=mtu, path_mtu=path_mtu)
        self._change_network("set_mtus", hosts=power.running_hosts(self._lab.state))

    def fill_disk(self, full: bool) -> None:
        """Fill its disk (True), or restore its size; raise EvenerError if it shares this machine's disk."""
        size = self.spec.disk_bytes
        if size is None:
            raise EvenerError(f"the disk of {self.name} is this machine's", hint="evener lab up --disk 2GB")
        disk.resize(self.home, None if full else size)

    def set_link_up(self, up: bool) -> None:
        """Pull its cable out of the switch (False), or plug it in again."""
        self._change_network("set_link", port=self._state.port, up=up)

    def set_firewall(self, rules: Sequence[str]) -> None:
        """Replace the nftables rules for incoming packets, such as `["tcp dport 29500 drop"]`; none: no firewall.

        Replies to connections that the host opened always pass, and so does its loopback.
        """
        table = "table inet evener"
        text = f"{table}\ndelete {table}\n"
        if rules:
            body = ["iifname lo accept", "ct state established,related accept", *rules]
            hook = "type filter hook input priority 0; policy accept;"
            text += f"{table} {{\n chain input {{\n  {hook}\n" + "".join(f"  {rule}\n" for rule in body) + " }\n}\n"
        [nft] = find_programs("nft")
        self.exec([nft, "-f", "-"], stdin=text)

    def override_file(self, path: str, content: str | None) -> None:
        """Mount a file over a path of the host (/sys/class/net/eth0/speed, /proc/cpuinfo); None unmounts it."""
        if content is None:
            self.exec(["umount", path])
            return
        folder = self._lab.host_folder(self.name) / "faces"
        folder.mkdir(exist_ok=True)
        file = folder / f"{len(list(folder.iterdir()))}"
        file.write_text(content)
        self.exec(["mount", "--bind", str(file), path])

    def mark_wireless(self, interface: str) -> None:
        """Create the folder by which programs recognize a Wi-Fi card: /sys/class/net/wlan0/wireless."""
        layers = f"/run/evener-lab/{interface}"
        options = f"lowerdir=$D,upperdir={layers}/upper,workdir={layers}/work" + ",userxattr" * self._lab.state.rootless
        make = f"mkdir -p {layers}/upper/wireless {layers}/work; D=$(readlink -f /sys/class/net/{interface})"
        self.exec(["sh", "-ec", f"{make}; mount -t overlay -o {options} overlay $D"])

    def pids(self) -> list[int]:
        """Return the pids of all processes of the host, in this machine's pid namespace."""
        return state.host_pids(self._state.init)

    def interface_counters(self, interface: str | None = None) -> LinkCounters:
        """Return the kernel's counters of an interface, by default the main one.

        A veth counts a large segment with one header: 0.1 % more than the payload, where a NIC counts 4.5 % more.
        """
        name = interface or self.spec.interface
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            title, _, numbers = line.partition(":")
            if title.strip() == name:
                fields = numbers.split()
                return LinkCounters(tx_bytes=int(fields[8]), rx_bytes=int(fields[0]), tx_packets=int(fields[9]))
        raise UsageError(f"host {self.name} has no interface {name}")

    def _update_spec(self, **values: Any) -> HostSpec:
        """Check and record a changed spec of this host; return it."""
        self.check_alive()
        lab = self._lab.state
        spec = msgspec.structs.replace(self.spec, **values)
        lab_spec = msgspec.structs.replace(lab.spec, hosts={**lab.spec.hosts, self.name: spec})
        lab_spec.check()
        self._lab.write(msgspec.structs.replace(lab, spec=lab_spec))
        return spec

    def _change_network(self, call: str, **arguments: Any) -> None:
        self.check_alive()
        with NetworkProcess() as switch:
            switch.call(self._lab.state.controller.pid, self._lab.state.rootless, **{call: arguments})

    def check_alive(self) -> None:
        if not self.is_alive():
            name, lab = self.name, self._lab.state.spec.name
            if self.is_off():
                raise EvenerError(
                    f"host {name} of lab {lab} is off",
                    hint=f"evener lab boot {quote_word(name)} --name {quote_word(lab)}",
                )
            raise EvenerError(f"host {name} of lab {lab} is dead", hint=f"evener lab down {quote_word(lab)}")
