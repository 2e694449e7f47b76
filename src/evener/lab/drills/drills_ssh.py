"""Fault drills of ssh: the login fails, or it succeeds and no command runs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

from evener.core.cluster.fleet_file import load_fleet
from evener.lab.drills.drill_runner import (
    Drill,
    DrillContext,
    DrillStep,
    ManualReproduction,
    make_lab_step,
    on_host,
    run_locally,
    set_fleet_line,
)
from evener.lab.drills.drills_network import QUICK_DOCTOR, TWO_HOSTS
from evener.lab.host_files import sshd_config

KEYGEN_ARGV = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f")
PERMISSION_DENIED = "Permission denied (publickey), which a host answers to any key that it does not accept"
HOSTNAME_OVER_SSH = ManualReproduction(commands={"b": "hostname"}, prompt="$ ssh {host} {command}")
RELOAD_SSHD = ("sh", "-c", "kill -HUP $(pgrep -o sshd)")
GUARD_BASHRC = on_host("b", "sed -i '1i [[ $- == *i* ]] || return' ~/.bashrc")  # the fix that the finding gives


def _remove_key(stage: DrillContext) -> None:
    stage.host("b").override_file(f"{stage.lab.path}/id_ed25519.pub", "")


def _make_key(passphrase: str = "", mode: int = 0o600) -> Callable[[DrillContext], None]:
    def make(stage: DrillContext) -> None:
        key = stage.folder / "id_mine"
        shutil.copy(stage.lab.path / "id_ed25519", key)
        subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", passphrase, "-f", str(key)], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        key.chmod(mode)

    return make


def _set_right_key(stage: DrillContext) -> None:
    stage.set_fleet_value("b", "identity_file", str(stage.lab.path / "id_ed25519"))


def _set_sshd_options(*lines: str) -> DrillStep:
    """Return the step that puts lines at the top of sshd_config, where they take precedence; none: restores it."""

    def do(stage: DrillContext) -> None:
        folder = stage.lab.path / "hosts" / "b"
        (folder / "sshd_config").write_text("".join(f"{line}\n" for line in lines) + sshd_config(folder))
        stage.host("b").exec(RELOAD_SSHD)

    return make_lab_step(f"on b: {'; '.join(lines) or 'without that'} in sshd_config; systemctl reload ssh", do)


def _set_remote_command(stage: DrillContext) -> None:
    options = load_fleet(stage.fleet_file).hosts["b"].ssh_options
    stage.set_fleet_value("b", "ssh_options", ["RemoteCommand=tmux", *options])


def _restore_key(stage: DrillContext) -> None:
    stage.host("b").override_file(f"{stage.lab.path}/id_ed25519.pub", None)


def _replace_host_key(stage: DrillContext) -> None:
    key = stage.lab.path / "hosts" / "b" / "host_key"
    key.unlink()
    stage.host("b").exec([*KEYGEN_ARGV, str(key)])
    stage.host("b").exec(RELOAD_SSHD)


def _trust_host_key(stage: DrillContext) -> None:
    known, b = stage.lab.path / "known_hosts", stage.host("b")
    lines = [line for line in known.read_text().splitlines() if not line.startswith(f"{b.address} ")]
    new = (stage.lab.path / "hosts" / "b" / "host_key.pub").read_text().rpartition(" ")[0]
    known.write_text("\n".join([*lines, f"{b.address} {new}"]) + "\n")


SSH_DRILLS = [
    Drill(
        name="ssh.auth",
        check="ssh.auth",
        host="b",
        description="b does not have your key",
        lesson="Also status 255. A launcher that asked for a password would hang where nobody can type one.",
        fault=[make_lab_step("on b: remove the key from authorized_keys", _remove_key)],
        fix=[make_lab_step("on b: add the key to authorized_keys again, as ssh-copy-id does", _restore_key)],
        manual=HOSTNAME_OVER_SSH,
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.key",
        check="ssh.key",
        host="b",
        description="other users of this machine may read your key, as after a copy from a USB stick",
        lesson="The host denies permission because it got no key. ssh warned before that it ignored the key.",
        fault=[
            make_lab_step("chmod 644 id_mine, which opens b", _make_key(mode=0o644)),
            set_fleet_line("b", "identity_file", "id_mine"),
        ],
        silence_reason=PERMISSION_DENIED,
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.key-passphrase",
        check="ssh.key",
        host="b",
        description="your key has a passphrase, and no agent runs",
        lesson="In a terminal ssh asks for it. A launcher runs where nobody can answer.",
        fault=[
            make_lab_step("ssh-keygen -p -f id_mine, which opens b: a passphrase", _make_key("horses")),
            set_fleet_line("b", "identity_file", "id_mine"),
        ],
        fix=[run_locally("ssh-keygen -q -p -P horses -N '' -f id_mine")],
        silence_reason=PERMISSION_DENIED,
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.key-missing",
        check="ssh.key",
        host="b",
        description="the fleet file names a key that does not exist",
        lesson="ssh reports it in a line that is easily overlooked, and then, as for every key: permission denied.",
        fault=[set_fleet_line("b", "identity_file", "~/.ssh/id_of_the_old_laptop")],
        fix=[make_lab_step("[hosts.b] identity_file = the key's own file", _set_right_key)],
        silence_reason=PERMISSION_DENIED,
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.key-server",
        check="ssh.key",
        host="b",
        description="b's sshd accepts only passwords",
        lesson="ssh-copy-id works, with the password, but changes nothing.",
        fault=[_set_sshd_options("PubkeyAuthentication no", "PasswordAuthentication yes")],
        fix=[_set_sshd_options()],
        manual=HOSTNAME_OVER_SSH,
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.shell",
        check="ssh.shell",
        host="b",
        description="b's ~/.bashrc starts another shell: exec sh",
        lesson="ssh logs in, and the shell reads this file before its command: it never runs the command.",
        fault=[on_host("b", "echo 'exec sh' > ~/.bashrc")],
        fix=[on_host("b", "rm ~/.bashrc")],
        manual=HOSTNAME_OVER_SSH,
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.shell-exits",
        check="ssh.shell",
        host="b",
        description="b's ~/.bashrc calls exit 3 when something that it needs is missing",
        lesson="Its status looks like that of the command. No command ever ran, and python is not missing.",
        fault=[on_host("b", "echo 'exit 3' > ~/.bashrc")],
        fix=[GUARD_BASHRC],
        manual=HOSTNAME_OVER_SSH,
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.shell-reads",
        check="ssh.shell",
        host="b",
        description="b's ~/.bashrc asks a question and reads the answer",
        lesson="It reads the input that ssh should pass to the program.",
        fault=[on_host("b", "echo 'read answer' > ~/.bashrc")],
        fix=[GUARD_BASHRC],
        manual=ManualReproduction(commands={"b": "cat"}, prompt="$ echo 1 + 2 | ssh {host} {command}"),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.shell-sleeps",
        check="ssh.shell",
        host="b",
        description="b's ~/.bashrc waits for something that never happens",
        lesson="A mount that hangs, a module system over NFS. The login succeeded, which only ssh -v shows.",
        fault=[on_host("b", "echo 'sleep 600' > ~/.bashrc")],
        fix=[GUARD_BASHRC],
        manual=ManualReproduction(
            commands={"b": "hostname"}, prompt="$ ssh {host} {command}", hang_description="as long as ~/.bashrc does"
        ),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.shell-nologin",
        check="ssh.shell",
        host="b",
        description="the account on b has the shell /usr/sbin/nologin, like a service account",
        lesson="The host accepts the key, and then runs no command.",
        fault=[on_host("b", "sed -i '1s,[^:]*$,/usr/sbin/nologin,' /etc/passwd")],
        manual=HOSTNAME_OVER_SSH,
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.shell-forced",
        check="ssh.shell",
        host="b",
        description="b's sshd_config forces another command on every login",
        lesson="A menu, or rsync for a backup. The requested command is only stored in a variable.",
        fault=[_set_sshd_options("ForceCommand echo the menu")],
        fix=[_set_sshd_options()],
        manual=HOSTNAME_OVER_SSH,
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.shell-remote",
        check="ssh.shell",
        host="b",
        description="this machine's ssh settings start tmux on b for every login: RemoteCommand",
        lesson="The setting is meant for people, but applies to programs too: ssh then refuses to run another command.",
        fault=[make_lab_step('[hosts.b] ssh_options = […, "RemoteCommand=tmux"]', _set_remote_command)],
        silence_reason="one message of ssh, and status 255, as if b could not be reached",
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.hostkey",
        check="ssh.hostkey",
        host="b",
        description="b was reinstalled, and has another host key",
        lesson="Status 255 again. evener never fixes this for you: an attack looks the same.",
        fault=[
            make_lab_step("on b: rm host_key; ssh-keygen -t ed25519 -f host_key; kill -HUP sshd", _replace_host_key)
        ],
        fix=[make_lab_step("ssh-keygen -R 10.77.0.2; accept its new key", _trust_host_key)],
        manual=HOSTNAME_OVER_SSH,
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
]
