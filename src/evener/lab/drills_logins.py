"""Fault drills of ssh: the login fails, or it succeeds and no command runs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

from evener.core.fleet import load_fleet
from evener.lab.drill import Drill, Raw, Stage, Step, fleet_line, here, lab_step, on
from evener.lab.drills_network import PLAIN, QUICK
from evener.lab.files import sshd_config

KEY_TYPE = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f")
AS_ALWAYS = "Permission denied (publickey), which a host answers to any key that it does not accept"
HOSTNAME = Raw(commands={"b": "hostname"}, typed="$ ssh {host} {command}")
RELOAD = ("sh", "-c", "kill -HUP $(pgrep -o sshd)")
RETURNS = on("b", "sed -i '1i [[ $- == *i* ]] || return' ~/.bashrc")  # the fix that the finding gives


def _no_key(stage: Stage) -> None:
    stage.host("b").face(f"{stage.lab.path}/id_ed25519.pub", "")


def _own_key(passphrase: str = "", mode: int = 0o600) -> Callable[[Stage], None]:
    def make(stage: Stage) -> None:
        key = stage.folder / "id_mine"
        shutil.copy(stage.lab.path / "id_ed25519", key)
        subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", passphrase, "-f", str(key)], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        key.chmod(mode)

    return make


def _right_key(stage: Stage) -> None:
    stage.set_in_fleet("b", "identity_file", str(stage.lab.path / "id_ed25519"))


def _sshd(*lines: str) -> Step:
    """Put lines at the top of sshd_config, where they take precedence; none: restore it."""

    def do(stage: Stage) -> None:
        folder = stage.lab.path / "hosts" / "b"
        (folder / "sshd_config").write_text("".join(f"{line}\n" for line in lines) + sshd_config(folder))
        stage.host("b").exec(RELOAD)

    return lab_step(f"on b: {'; '.join(lines) or 'without that'} in sshd_config; systemctl reload ssh", do)


def _remote_command(stage: Stage) -> None:
    options = load_fleet(stage.fleet).hosts["b"].ssh_options
    stage.set_in_fleet("b", "ssh_options", ["RemoteCommand=tmux", *options])


def _key_again(stage: Stage) -> None:
    stage.host("b").face(f"{stage.lab.path}/id_ed25519.pub", None)


def _new_host_key(stage: Stage) -> None:
    key = stage.lab.path / "hosts" / "b" / "host_key"
    key.unlink()
    stage.host("b").exec([*KEY_TYPE, str(key)])
    stage.host("b").exec(RELOAD)


def _know_host_key(stage: Stage) -> None:
    known, b = stage.lab.path / "known_hosts", stage.host("b")
    lines = [line for line in known.read_text().splitlines() if not line.startswith(f"{b.address} ")]
    new = (stage.lab.path / "hosts" / "b" / "host_key.pub").read_text().rpartition(" ")[0]
    known.write_text("\n".join([*lines, f"{b.address} {new}"]) + "\n")


DRILLS = [
    Drill(
        name="ssh.auth", check="ssh.auth", host="b",
        says="b does not have your key",
        why="Also status 255. A launcher that asked for a password would hang where nobody can type one.",
        fault=[lab_step("on b: remove the key from authorized_keys", _no_key)],
        mend=[lab_step("on b: add the key to authorized_keys again, as ssh-copy-id does", _key_again)],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.key", check="ssh.key", host="b",
        says="other users of this machine may read your key, as after a copy from a USB stick",
        why="The host denies permission because it got no key. ssh warned before that it ignored the key.",
        fault=[lab_step("chmod 644 id_mine, which opens b", _own_key(mode=0o644)),
               fleet_line("b", "identity_file", "id_mine")],
        silence=AS_ALWAYS, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.key-passphrase", check="ssh.key", host="b",
        says="your key has a passphrase, and no agent runs",
        why="In a terminal ssh asks for it. A launcher runs where nobody can answer.",
        fault=[lab_step("ssh-keygen -p -f id_mine, which opens b: a passphrase", _own_key("horses")),
               fleet_line("b", "identity_file", "id_mine")],
        mend=[here("ssh-keygen -q -p -P horses -N '' -f id_mine")],
        silence=AS_ALWAYS, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.key-missing", check="ssh.key", host="b",
        says="the fleet file names a key that does not exist",
        why="ssh reports it in a line that is easily overlooked, and then, as for every key: permission denied.",
        fault=[fleet_line("b", "identity_file", "~/.ssh/id_of_the_old_laptop")],
        mend=[lab_step("[hosts.b] identity_file = the key's own file", _right_key)],
        silence=AS_ALWAYS, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.key-server", check="ssh.key", host="b",
        says="b's sshd accepts only passwords",
        why="ssh-copy-id works, with the password, but changes nothing.",
        fault=[_sshd("PubkeyAuthentication no", "PasswordAuthentication yes")], mend=[_sshd()],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell", check="ssh.shell", host="b",
        says="b's ~/.bashrc starts another shell: exec sh",
        why="ssh logs in, and the shell reads this file before its command: it never runs the command.",
        fault=[on("b", "echo 'exec sh' > ~/.bashrc")], mend=[on("b", "rm ~/.bashrc")],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell-exits", check="ssh.shell", host="b",
        says="b's ~/.bashrc calls exit 3 when something that it needs is missing",
        why="Its status looks like that of the command. No command ever ran, and python is not missing.",
        fault=[on("b", "echo 'exit 3' > ~/.bashrc")], mend=[RETURNS],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell-reads", check="ssh.shell", host="b",
        says="b's ~/.bashrc asks a question and reads the answer",
        why="It reads the input that ssh should pass to the program.",
        fault=[on("b", "echo 'read answer' > ~/.bashrc")], mend=[RETURNS],
        raw=Raw(commands={"b": "cat"}, typed="$ echo 1 + 2 | ssh {host} {command}"), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell-sleeps", check="ssh.shell", host="b",
        says="b's ~/.bashrc waits for something that never happens",
        why="A mount that hangs, a module system over NFS. The login succeeded, which only ssh -v shows.",
        fault=[on("b", "echo 'sleep 600' > ~/.bashrc")], mend=[RETURNS],
        raw=Raw(commands={"b": "hostname"}, typed="$ ssh {host} {command}", waits="as long as ~/.bashrc does"),
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell-nologin", check="ssh.shell", host="b",
        says="the account on b has the shell /usr/sbin/nologin, like a service account",
        why="The host accepts the key, and then runs no command.",
        fault=[on("b", "sed -i '1s,[^:]*$,/usr/sbin/nologin,' /etc/passwd")],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell-forced", check="ssh.shell", host="b",
        says="b's sshd_config forces another command on every login",
        why="A menu, or rsync for a backup. The requested command is only stored in a variable.",
        fault=[_sshd("ForceCommand echo the menu")], mend=[_sshd()],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell-remote", check="ssh.shell", host="b",
        says="this machine's ssh settings start tmux on b for every login: RemoteCommand",
        why="The setting is meant for people, but applies to programs too: ssh then refuses to run another command.",
        fault=[lab_step('[hosts.b] ssh_options = […, "RemoteCommand=tmux"]', _remote_command)],
        silence="one message of ssh, and status 255, as if b could not be reached",
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.hostkey", check="ssh.hostkey", host="b",
        says="b was reinstalled, and has another host key",
        why="Status 255 again. evener never fixes this for you: an attack looks the same.",
        fault=[lab_step("on b: rm host_key; ssh-keygen -t ed25519 -f host_key; kill -HUP sshd", _new_host_key)],
        mend=[lab_step("ssh-keygen -R 10.77.0.2; accept its new key", _know_host_key)],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
]  # fmt: skip
