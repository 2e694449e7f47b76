"""Drills: a login that comes to nothing. The door stays shut, or nothing runs behind it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

from evener.core.fleet import load_fleet
from evener.lab.drill import Drill, Raw, Stage, Step, fleet_line, here, lab_step, on
from evener.lab.drills_network import PLAIN, QUICK
from evener.lab.files import sshd_config

KEY_TYPE = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f")
AS_ALWAYS = "Permission denied (publickey), which is what a host says to any key that it does not take"
HOSTNAME = Raw(commands={"b": "hostname"}, typed="$ ssh {host} {command}")
RELOAD = ("sh", "-c", "kill -HUP $(pgrep -o sshd)")
RETURNS = on("b", "sed -i '1i [[ $- == *i* ]] || return' ~/.bashrc")  # as the finding says


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
    """Other lines than its own at the top of its configuration, where they win; none: its own again."""

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
        why="Also status 255. A launcher that asks for a password would hang where nobody can type one.",
        fault=[lab_step("on b: the key is taken out of authorized_keys", _no_key)],
        mend=[lab_step("on b: the key stands in authorized_keys again, as after ssh-copy-id", _key_again)],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.key", check="ssh.key", host="b",
        says="others on this machine may read your key, as after a copy from a USB stick",
        why="The host says permission denied, and means it. ssh said before, in a warning, that it left the key out.",
        fault=[lab_step("chmod 644 id_mine, which opens b", _own_key(mode=0o644)),
               fleet_line("b", "identity_file", "id_mine")],
        silence=AS_ALWAYS, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.key-passphrase", check="ssh.key", host="b",
        says="your key has a passphrase, and no agent runs",
        why="By hand ssh asks for it. A launcher runs where nobody can answer.",
        fault=[lab_step("ssh-keygen -p -f id_mine, which opens b: a passphrase", _own_key("horses")),
               fleet_line("b", "identity_file", "id_mine")],
        mend=[here("ssh-keygen -q -p -P horses -N '' -f id_mine")],
        silence=AS_ALWAYS, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.key-missing", check="ssh.key", host="b",
        says="the fleet file names a key that is not there",
        why="ssh says so in a line that is easily overlooked, and then as for every key: permission denied.",
        fault=[fleet_line("b", "identity_file", "~/.ssh/id_of_the_old_laptop")],
        mend=[lab_step("[hosts.b] identity_file = the key's own file", _right_key)],
        silence=AS_ALWAYS, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.key-server", check="ssh.key", host="b",
        says="b's sshd takes passwords alone",
        why="ssh-copy-id works, with the password; and nothing is different afterwards.",
        fault=[_sshd("PubkeyAuthentication no", "PasswordAuthentication yes")], mend=[_sshd()],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell", check="ssh.shell", host="b",
        says="b's ~/.bashrc starts another shell: exec sh",
        why="ssh logs in, and the shell reads this file before the command that it was given: it never comes to it.",
        fault=[on("b", "echo 'exec sh' > ~/.bashrc")], mend=[on("b", "rm ~/.bashrc")],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell-exits", check="ssh.shell", host="b",
        says="b's ~/.bashrc ends with exit 3 where something it wants is not there",
        why="Its status looks like the command's own. No command ever ran, and python is not missing.",
        fault=[on("b", "echo 'exit 3' > ~/.bashrc")], mend=[RETURNS],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell-reads", check="ssh.shell", host="b",
        says="b's ~/.bashrc asks something, and reads the answer",
        why="What it reads is what ssh was to bring to the program.",
        fault=[on("b", "echo 'read answer' > ~/.bashrc")], mend=[RETURNS],
        raw=Raw(commands={"b": "cat"}, typed="$ echo 1 + 2 | ssh {host} {command}"), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell-sleeps", check="ssh.shell", host="b",
        says="b's ~/.bashrc waits for something that does not come",
        why="A mount that hangs, a module system over NFS. The login was good, which ssh -v alone tells.",
        fault=[on("b", "echo 'sleep 600' > ~/.bashrc")], mend=[RETURNS],
        raw=Raw(commands={"b": "hostname"}, typed="$ ssh {host} {command}", waits="as long as ~/.bashrc does"),
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell-nologin", check="ssh.shell", host="b",
        says="the account on b has no shell: /usr/sbin/nologin, as a service's account has",
        why="The key opens the door, and behind it nothing runs.",
        fault=[on("b", "sed -i '1s,[^:]*$,/usr/sbin/nologin,' /etc/passwd")],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell-forced", check="ssh.shell", host="b",
        says="b's sshd_config forces another command on whoever logs in",
        why="A menu, a backup's rsync. What was asked for is put into a variable, and that is all.",
        fault=[_sshd("ForceCommand echo the menu")], mend=[_sshd()],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.shell-remote", check="ssh.shell", host="b",
        says="this machine's ssh is told to start tmux on b, whatever it is asked for: RemoteCommand",
        why="A line for people that programs read, too: ssh then refuses to run another command.",
        fault=[lab_step('[hosts.b] ssh_options = […, "RemoteCommand=tmux"]', _remote_command)],
        silence="ssh's one sentence, and status 255, as if b could not be reached",
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.hostkey", check="ssh.hostkey", host="b",
        says="b was installed anew, and has another host key",
        why="Status 255 once more. This one is never mended for you: it is what an attack looks like, too.",
        fault=[lab_step("on b: rm host_key; ssh-keygen -t ed25519 -f host_key; kill -HUP sshd", _new_host_key)],
        mend=[lab_step("ssh-keygen -R 10.77.0.2, and its new key is known", _know_host_key)],
        raw=HOSTNAME, look=QUICK, hosts=PLAIN,
    ),
]  # fmt: skip
