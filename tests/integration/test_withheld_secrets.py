"""Secrets stay on this machine: files and variables are withheld from the hosts unless the user names them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from evener.core.cluster.fleet_file import load_fleet
from evener.core.run.trust import trust_fleet
from evener.transfer.file_tree import describe_data, describe_project

from ..in_process import run_verb
from .test_file_transfer import git, write

KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjE=\n-----END OPENSSH PRIVATE KEY-----\n"
SECRET_FILES = {
    ".env": b"A=sesame", "sub/.env.local": b"A=sesame", "server.pem": b"x", "tls/server.key": b"x", "id_rsa": b"x",
    "credentials.json": b"{}", ".aws/config": b"x", "kaggle.json": b"{}", "deploy": KEY, "gcp.txt": b"x\n" + KEY,
    "service.json": json.dumps({"private_key": KEY.decode()}).encode(), ".netrc": b"x",
}  # fmt: skip
CODE_FILES = {"train.py": b"print(1)", "id_rsa.pub": b"x", "rule.py": b"X = '-----BEGIN PRIVATE KEY-----'"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("repository", ["none", "tracked", "untracked", "ignored"])
def test_secret_files_of_project_are_withheld_and_named(tmp_path: Path, repository: str) -> None:
    root = write(tmp_path / "p", SECRET_FILES | CODE_FILES)
    withheld = set(SECRET_FILES)
    if repository != "none":
        git(root, "init")
        if repository == "ignored":
            write(root, {".gitignore": "\n".join(SECRET_FILES).encode()})
            withheld -= {"deploy", "gcp.txt", "service.json"}  # named among what git ignores
        git(root, "add", "--force", *(SECRET_FILES if repository == "tracked" else []), "train.py")
    tree = describe_project(root)
    assert set(tree.files) - {".gitignore"} == set(CODE_FILES)
    assert set(tree.withheld) == withheld


def test_only_a_secret_file_that_is_named_itself_is_included(tmp_path: Path) -> None:
    root = write(tmp_path / "p", SECRET_FILES | CODE_FILES)
    sent = set(CODE_FILES)
    assert set(describe_project(root, ["tls", "sub"]).files) == sent  # their folders are no folders for secrets
    tree = describe_project(root, [".env", "tls/server.key", "deploy", ".aws"])
    assert set(tree.files) == sent | {".env", "tls/server.key", "deploy", ".aws/config"}
    assert set(tree.withheld) == set(SECRET_FILES) - set(tree.files)


def test_key_in_a_virtual_environment_is_not_mentioned(tmp_path: Path) -> None:
    files = {"venv/pyvenv.cfg": b"", "venv/certifi/cacert.pem": b"", ".tox/a/x.key": b"", "runs/1/a.key": b""}
    assert describe_project(write(tmp_path / "p", files | CODE_FILES)).withheld == []


def test_hidden_and_secret_data_are_withheld_and_named(tmp_path: Path) -> None:
    write(tmp_path, {"keys/id_rsa": KEY, "my.key": b"x"})
    root = write(tmp_path / "d", {"train.bin": b"12", ".cache/a/b": b"x", ".notes": b"x", "s/.h": b"", "deploy": KEY})
    (root / "link").symlink_to("../keys/id_rsa")
    (root / "named").symlink_to("../my.key")
    tree = describe_data(root)
    assert set(tree.files) == {"train.bin"}
    assert tree.withheld == [".cache/", ".notes", "deploy", "link", "named", "s/.h"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with secrets and a fleet of one host, which is this machine."""
    there = "os.path.exists('.env'), os.path.exists('server.pem')"
    script = f"import os; print(os.getenv('HF_TOKEN') == 'open' + 'sesame', {there})"
    fleet = f'[hosts.here]\naddress = "local"\nworkdir = "{tmp_path}/host"\n'
    root = write(tmp_path / "p", SECRET_FILES | {"train.py": script.encode(), "fleet.toml": fleet.encode()})
    trust_fleet(load_fleet(str(root / "fleet.toml")))
    for name, value in {"HF_TOKEN": "opensesame", "HF_ENDPOINT": "https://me:opensesame@lan", "HF_HUB_X": "1"}.items():
        monkeypatch.setenv(name, value)
    return root


def files_with(text: str, folder: Path) -> list[str]:
    found = subprocess.run(["grep", "-rl", text, str(folder)], capture_output=True, text=True, check=False)
    return found.stdout.splitlines()


def test_launch_names_once_what_it_withholds(project: Path, tmp_path: Path) -> None:
    done = run_verb("launch", "--dry-run", "--json", "--env", "HF_TOKEN", "--", "train.py", cwd=project)
    assert done.stderr.count("not sent, as they may hold secrets: .aws/config, .env, .netrc, credentials.json, deploy "
                             "and 7 more; --include PATH sends one\n") == 1, done.stderr  # fmt: skip
    assert done.stderr.count("may hold secrets: HF_ENDPOINT; --env NAME passes one\n") == 1
    assert "opensesame" not in done.stdout + done.stderr
    [host] = json.loads(done.stdout)["hosts"]
    assert (host["env"]["HF_HUB_X"], host["passed_env"]) == ("1", ["HF_TOKEN"])


def test_passed_variable_and_included_file_reach_the_host_alone(project: Path, tmp_path: Path) -> None:
    flags = ("--env", "HF_TOKEN", "--include", ".env", "--out", "runs/x")
    done = run_verb("launch", *flags, "--", "train.py", cwd=project, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert "True True False" in done.stdout
    assert [Path(path).name for path in files_with("opensesame", tmp_path / "host")] == []
    assert files_with("opensesame", project / "runs") == []


@pytest.mark.parametrize(
    ("given", "told"),
    [("NOT_SET", "--env: NOT_SET is not set here"), ("hf-token=opensesame", "--env: 'hf-token' is no name of a")],
)
def test_env_takes_the_name_of_a_variable_that_is_set(project: Path, given: str, told: str) -> None:
    done = run_verb("launch", "--env", given, "--", "train.py", cwd=project)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {told}")
    assert "opensesame" not in done.stderr
