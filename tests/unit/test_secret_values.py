"""One rule says what may hold a secret: what is copied to hosts and what is shown follow it."""

from __future__ import annotations

import pytest

from evener.launch.commands import FORWARDED_ENV_PATTERN, ScriptProject, script_plan
from evener.node.remote import facts
from evener.node.remote.environment import hide_secrets, is_secret_variable
from evener.transfer.secret_files import has_secret_name

from .test_commands import place, prepared

SECRET_VARIABLES = {
    "HF_TOKEN": "x", "HF_PAT": "x", "HF_KEY": "x", "WANDB_KEY": "x", "WANDB_PW": "x", "WANDB_API_KEY": "x",
    "WANDB_APIKEY": "x", "HF_PASSWD": "x", "HF_PASSWORD2": "x", "hf_token_1": "x", "HF_AUTH": "x",
    "HF_CREDENTIALS": "x", "NCCL_SECRET": "x", "HFTOKEN": "x", "PGPASSWORD": "x", "HF_ENDPOINT": "https://me:sesame@mirror.lan/hf",
    "HF_PROXY": "http://:sesame@proxy:3128", "HF_X1": "hf_AbCdEfGhIjKlMnOp", "HF_X2": "ghp_0123456789abcdef",
    "HF_X3": "sk-proj-0123456789ab", "HF_X4": "AKIAIOSFODNN7EXAMPLE", "HF_X5": "xoxb-123456-abcdef",
    "HF_X6": "-----BEGIN RSA PRIVATE KEY-----\nMIIE", "HF_X7": "--auth github_pat_11ABCDEFG",
}  # fmt: skip
OTHER_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false", "WANDB_KEYBOARD": "us", "HF_HUB_OFFLINE": "1", "NCCL_IB_PKEY": "0",
    "TORCH_AUTHOR": "ann", "HF_MAX_TOKENS": "100", "HF_ENDPOINT": "https://mirror.lan:8443/hf@main",
    "HF_X": "hf_transfer", "PYTORCH_KERNEL_CACHE_PATH": "/k", "WANDB_MODE": "offline", "TORCH_X": "scikit sk-learn",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SECRET_VARIABLES.items())
def test_secret_variable_is_neither_copied_nor_shown(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_secret_variable(name, value)
    forwarded = name if FORWARDED_ENV_PATTERN.match(name) else f"HF_{name}"
    plan = script_plan(prepared([place("a")]), ["t.py"], {forwarded: value}, ScriptProject("/h", "c0de", "m"), key="")
    assert forwarded not in plan.hosts[0].env
    monkeypatch.setenv(f"TORCH_{name}", value)
    assert facts.collect_environment()["environment"][f"TORCH_{name}"] == "(hidden)"


@pytest.mark.parametrize(("name", "value"), OTHER_VARIABLES.items())
def test_other_variable_is_copied_and_shown(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = script_plan(prepared([place("a")]), ["t.py"], {name: value}, ScriptProject("/h", "c0de", "m"), key="")
    assert plan.hosts[0].env[name] == value
    monkeypatch.setenv(f"TORCH_{name}", value)
    assert facts.collect_environment()["environment"][f"TORCH_{name}"] == value


def test_plan_holds_the_name_of_a_passed_variable_and_not_its_value() -> None:
    environment = {"HF_TOKEN": "sesame", "HF_HOME2": "sesame"}
    project = ScriptProject("/h", "c0de", "m")
    [host] = script_plan(
        prepared([place("a")]), ["t.py"], environment, project, {}, ["HF_TOKEN", "HF_HOME2"], key=""
    ).hosts
    assert host.passed_env == ["HF_TOKEN", "HF_HOME2"]
    assert "sesame" not in repr(host)
    assert 'HF_TOKEN="$HF_TOKEN" HF_HOME2="$HF_HOME2" /a/python' in host.shell_command()


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("train.py --hf-token abc --lr 1", "train.py --hf-token (hidden) --lr 1"),
        ("env WANDB_KEY=abc PATH=/bin train.py", "env WANDB_KEY=(hidden) PATH=/bin train.py"),
        ("train.py https://me:pw@lan/x hf_AbCdEfGhIjKlMn", "train.py https://(hidden)@lan/x (hidden)"),
        ("train.py --tokenizer bpe --keys", "train.py --tokenizer bpe --keys"),
    ],
)
def test_command_of_other_process_is_shown_without_secrets(command: str, shown: str) -> None:
    assert hide_secrets(command) == shown
    assert facts._describe_process(1, command.split())["command"] == shown


@pytest.mark.parametrize(
    "path",
    [".env", "a/.env.local", "prod.env", "server.PEM", "tls/server.key", "credentials", "credentials.json", "id_rsa",
     "keys/id_ed25519", ".netrc", ".npmrc", ".pypirc", ".aws/config", "x/.ssh/known_hosts", ".git-credentials",
     "kaggle.json"],
)  # fmt: skip
def test_file_is_withheld_by_its_name(path: str) -> None:
    assert has_secret_name(path)


@pytest.mark.parametrize(
    "path", ["train.py", "id_rsa.pub", "keys.py", "environment.yml", "monkey", "token.py", ".github/x"]
)
def test_other_file_is_not_withheld_by_its_name(path: str) -> None:
    assert not has_secret_name(path)
