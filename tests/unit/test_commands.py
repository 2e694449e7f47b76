"""A plan gives each rank its host, command, environment and dtype."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from evener.cli import add_leave
from evener.cli.run_output import print_plan
from evener.core.base.errors import CheckpointError, UsageError
from evener.core.cluster.fleet_file import HostConfig
from evener.core.run.membership_epoch import RUN_KEY_FILE, make_run_key, read_run_key
from evener.core.run.roster import RankSlot, Roster, initial_roster
from evener.core.run.run_plan import Plan, read_plan, write_plan
from evener.core.run.run_spec import RunSpec, parse_args
from evener.core.run.rundir import RunDir
from evener.launch.commands import (
    PreparedFleet,
    PreparedHost,
    ScriptProject,
    choose_membership,
    plan_with_added_host,
    script_plan,
    train_plan,
)


def place(name: str, *, gpus: list[str] | None = None, cores: int = 8, bf16: bool = True,
          old: bool = False, **host: Any) -> PreparedHost:  # fmt: skip
    return PreparedHost(
        name=name,
        host=HostConfig(address=name, **host),
        address=f"10.0.0.{ord(name) - 96}",
        interface="eth0",
        python=f"/{name}/python",
        workdir=f"/{name}",
        run_dir=f"/{name}/runs/x",
        cores=cores,
        gpus=gpus or [],
        gpus_have_bf16=not old,
        has_bf16=bf16,
    )


def train(places: list[PreparedHost], *flags: str) -> Plan:
    data = {one.name: f"{one.workdir}/trees/d" for one in places}
    spec = parse_args(["--membership=fixed", *flags])
    return train_plan(prepared(places), spec, roster_of(places, spec), data, {}, resume=False, key="k")


def prepared(places: list[PreparedHost], port: int = 29500) -> PreparedFleet:
    return PreparedFleet(id="1d", hosts=places, port=port, findings=[])


def roster_of(places: list[PreparedHost], spec: RunSpec) -> Roster:
    return initial_roster(spec, [slot for one in places for slot in one.rank_slots(spec.machine)], 256)


def flag(plan: Plan, host: str, name: str) -> str | None:
    argv = next(one.argv for one in plan.hosts if one.name == host)
    return next((word.partition("=")[2] for word in argv if word.startswith(f"--{name}=")), None)


def test_ranks_are_numbered_in_host_order() -> None:
    plan = train([place("a", ranks=2), place("b"), place("c", ranks=3)], "--batch=8")
    assert [(host.name, host.node_rank, host.first_rank, host.num_ranks) for host in plan.hosts] == [
        ("a", 0, 0, 2),
        ("b", 1, 2, 1),
        ("c", 2, 3, 3),
    ]
    assert plan.world_size == 6
    assert [plan.host_of_rank(rank).name for rank in range(6)] == ["a", "a", "b", "c", "c", "c"]
    assert [flag(plan, host, "rdzv-conf") for host in "abc"] == ["rank=0", "rank=1", "rank=2"]
    assert {flag(plan, host, "rdzv-endpoint") for host in "abc"} == {"10.0.0.1:29500"}
    assert [flag(plan, host, "data") for host in "abc"] == ["/a/trees/d", "/b/trees/d", "/c/trees/d"]


def test_omp_threads_are_cores_divided_by_ranks() -> None:
    plan = train([place("a", ranks=2, cores=9), place("b", threads=3), place("c", cores=1)])
    assert [host.env["OMP_NUM_THREADS"] for host in plan.hosts] == ["4", "3", "1"]


def test_each_host_gets_its_exact_interface_name() -> None:
    plan = train([place("a"), place("b")])
    assert [(host.env["GLOO_SOCKET_IFNAME"], host.env["NCCL_SOCKET_IFNAME"]) for host in plan.hosts] == [
        ("eth0", "=eth0")
    ] * 2


GPU, OTHER = ["NVIDIA H200"] * 2, ["NVIDIA GeForce RTX 4070"]


@pytest.mark.parametrize(
    ("places", "flags", "backend", "dtypes", "devices"),
    [
        ([place("a", gpus=GPU), place("b", gpus=GPU)], [], "nccl", ["bf16"] * 4, ["cuda:0", "cuda:1"] * 2),
        ([place("a", gpus=GPU), place("b", gpus=OTHER)], [], "nccl", ["bf16"] * 3, ["cuda:0", "cuda:1", "cuda:0"]),
        ([place(name, gpus=OTHER, old=True) for name in "ab"], [], "nccl", ["fp16"] * 2, ["cuda:0"] * 2),
        ([place("a", gpus=OTHER, old=True), place("b", gpus=OTHER)], [], "nccl", ["fp32", "bf16"], ["cuda:0"] * 2),
        ([place("a", gpus=OTHER), place("b", bf16=False)], [], "gloo", ["bf16", "fp32"], ["cuda:0", "cpu"]),
        ([place("a", gpus=OTHER, old=True), place("b")], [], "gloo", ["fp32", "bf16"], ["cuda:0", "cpu"]),
        ([place("a", gpus=OTHER, devices="cpu"), place("b")], [], "gloo", ["bf16"] * 2, ["cpu", "cpu"]),
        ([place("a"), place("b", bf16=False)], [], "gloo", ["bf16", "fp32"], ["cpu", "cpu"]),
        ([place("a", gpus=GPU), place("b", gpus=GPU)], ["--device=cpu"], "gloo", ["bf16"] * 2, ["cpu", "cpu"]),
        ([place("a", gpus=GPU), place("b")], ["--device=cpu", "--dtype=fp32"], "gloo", ["fp32"] * 2, ["cpu", "cpu"]),
    ],
)
def test_backend_is_common_and_dtype_is_per_rank(
    places: Any, flags: list[str], backend: str, dtypes: list[str], devices: list[str]
) -> None:
    plan = train(places, *flags)
    assert plan.roster is not None
    assert (plan.roster.backend, plan.world_size) == (backend, len(devices))
    assert [member.device for member in plan.roster.members] == devices
    assert [member.dtype for member in plan.roster.members] == dtypes
    assert [member.host for member in plan.roster.members] == [
        plan.host_of_rank(rank).name for rank in range(len(devices))
    ]
    told = {flag(plan, host.name, name) for host in plan.hosts for name in ("backend", "dtype")}
    assert told <= {None, *(word.partition("=")[2] for word in flags)}  # the Roster says it, and nobody else
    kinds = [devices[host.first_rank].partition(":")[0] for host in plan.hosts]
    assert [flag(plan, host.name, "device") for host in plan.hosts] == kinds


def test_every_rank_gets_the_roster_path() -> None:
    plan = train([place("a"), place("b")], "--batch=6", "--shares=2:1")
    assert plan.roster is not None
    assert plan.roster.shares == [4, 2]
    assert [host.env["EVENER_ROSTER"] for host in plan.hosts] == ["/a/runs/x/roster.json", "/b/runs/x/roster.json"]


def test_more_ranks_than_sequences_are_refused() -> None:
    with pytest.raises(UsageError, match="5 ranks, more than the 4 sequences"):
        train([place("a", ranks=4), place("b")], "--batch=4")


def test_missing_requested_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="b: ranks asked for GPUs, and it has none"):
        train([place("a"), place("b", devices="cuda")])


def here(ranks: int, **more: Any) -> PreparedHost:
    one = place("a", ranks=ranks, **more)
    return msgspec.structs.replace(one, is_local_run=True, run_dir="/home/me/runs/x", cwd="/home/me", python="/python")


def test_local_run_uses_run_directory_and_given_paths() -> None:
    """The run's folder is the run directory, data and corpus are where they were named, and any port will do."""
    flags = parse_args(["--out=runs/x", "--data=data/verbs"])
    places = [here(2)]
    plan = train_plan(
        prepared(places, port=0), flags, roster_of(places, flags), {"a": flags.data.data}, {}, resume=False, key="k"
    )
    (host,) = plan.hosts
    assert plan.is_local_run
    assert (host.run, host.cwd, host.is_rank) == (None, "/home/me", False)
    assert host.argv[:4] == ["/python", "-P", "-m", "evener.worker.torchrun"]
    assert flag(plan, "a", "rdzv-endpoint") == "10.0.0.1:0"
    assert (flag(plan, "a", "out"), flag(plan, "a", "log-dir")) == ("runs/x", "/home/me/runs/x/host/ranks")


def test_single_local_rank_runs_without_torchrun() -> None:
    flags = parse_args(["--out=runs/x"])
    places = [here(1)]
    (host,) = train_plan(
        prepared(places, port=0), flags, roster_of(places, flags), {"a": "data/verbs"}, {}, resume=False, key="k"
    ).hosts
    assert host.argv[:3] == ["/python", "-m", "evener.worker"]
    assert host.is_rank
    (elsewhere,) = train([place("a")]).hosts
    assert not elsewhere.is_rank


def test_local_script_runs_in_its_own_folder() -> None:
    plan = script_plan(prepared([here(2)], port=0), ["train.py", "a b"], {}, None, key="")
    assert plan.hosts[0].code is None
    assert (plan.hosts[0].cwd, plan.hosts[0].argv[-2:]) == ("/home/me", ["train.py", "a b"])


ENVIRONMENT = {
    "NCCL_DEBUG": "INFO",
    "NCCL_SOCKET_IFNAME": "wlan0",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "OMP_NUM_THREADS": "2",
    "HF_TOKEN": "hf_x",
    "WANDB_API_KEY": "k",
    "HF_HOME": "/here",
    "PATH": "/bin",
    "AWS_SECRET_ACCESS_KEY": "s",
    "HFX": "no",
    "TORCH_COMPILER_COLLECTIVES": "1",
}


def test_only_listed_environment_variables_are_copied() -> None:
    plan = script_plan(
        prepared([place("a")]),
        ["train.py", "it's", "$x"],
        ENVIRONMENT,
        ScriptProject("/here/mine", "c0de", "mine-1234"),
        key="",
    )
    assert plan.hosts[0].env == {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "EVENER_HOST": "a",
        "EVENER_JOINED": "/a/runs/x/host/joined",
        "EVENER_PULSE": "/a/runs/x/host/pulse",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    assert plan.hosts[0].argv[-4:] == ["--", "train.py", "it's", "$x"]
    assert (plan.hosts[0].code, plan.hosts[0].cwd) == ("/a/trees/c0de", "/a/projects/mine-1234")
    assert plan.hosts[0].shell_command().endswith("""train.py 'it'"'"'s' '$x'""")


def test_plan_round_trips_through_file(tmp_path: Any) -> None:
    plan = train([place("a"), place("b", user="me", ssh_options=["Port=2"])], "--steps=7")
    write_plan(RunDir(tmp_path), plan)
    assert read_plan(RunDir(tmp_path)) == plan
    assert (tmp_path / "plan.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("asked", "hosts", "device", "are_linux", "membership"),
    [
        ("auto", "ab", "cpu", True, "live"),
        ("auto", "ab", "cuda:0", True, "restart"),
        ("auto", "ab", "cpu", False, "restart"),
        ("auto", "aa", "cpu", True, "fixed"),
        ("live", "a", "cpu", True, "fixed"),
        ("live", "ab", "cuda:0", True, "NCCL's communicators do not survive a member"),
        ("live", "ab", "cpu", False, "only on Linux"),
        ("restart", "ab", "cpu", True, "restart"),
        ("fixed", "ab", "cpu", True, "fixed"),
        ("auto fsdp", "ab", "cpu", True, "restart"),
        ("live zero1", "ab", "cpu", True, "with zero1 a lost rank's part of the weights is in the checkpoint alone"),
    ],
)
def test_membership_mode_follows_devices_hosts_and_strategy(
    asked: str, hosts: str, device: str, are_linux: bool, membership: str
) -> None:
    slots = [RankSlot(host=name, device=device) for name in hosts]
    mode, _, sync = asked.partition(" ")
    spec = parse_args(["--batch", "4", "--sync", sync or "int8+sparse", "--membership", mode])
    roster = initial_roster(spec, slots, 256)
    if " " in membership:
        with pytest.raises(UsageError, match=f"--membership live: .*{membership}"):
            choose_membership(spec, roster, are_linux=are_linux)
    else:
        assert choose_membership(spec, roster, are_linux=are_linux) == membership


def test_agents_run_only_with_several_hosts() -> None:
    places = [place("a"), place("b")]
    spec = parse_args([])
    for of_run, outlives in ((places, True), (places[:1], False)):
        data = dict.fromkeys("ab", "d")
        plan = train_plan(prepared(of_run), spec, roster_of(of_run, spec), data, {}, resume=False, key="k")
        assert (plan.has_dynamic_membership, [host.agent is not None for host in plan.hosts]) == (
            outlives,
            [outlives] * len(of_run),
        )
        assert all(host.agent.is_elastic for host in plan.hosts if host.agent is not None)


def test_joining_host_is_appended_and_known_to_all_agents() -> None:
    places = [place("a", ranks=2), place("b")]
    spec = parse_args(["--batch", "12", "--data", "d"])
    plan = train_plan(
        prepared(places), spec, roster_of(places, spec), dict.fromkeys("ab", "d"), {}, resume=False, key="k"
    )
    joined = plan_with_added_host(plan, place("c", ranks=2), "/c/trees/d", 7)
    assert joined.roster is not None
    assert [(one.rank, one.host) for one in joined.roster.members] == [(0, "a"), (1, "a"), (2, "b"), (3, "c"), (4, "c")]
    assert (joined.roster.shares, joined.roster.batch) == ([3, 3, 2, 2, 2], 12)
    assert [(one.name, one.node_rank, one.first_rank, one.num_ranks) for one in joined.hosts][2:] == [("c", 2, 3, 2)]
    agents = [one.agent for one in joined.hosts]
    assert all(agent is not None and (agent.first, [*agent.hosts]) == (["a", "b"], ["a", "b", "c"]) for agent in agents)
    assert [(agent.host, agent.version) for agent in agents if agent is not None] == [("a", 7), ("b", 7), ("c", 7)]
    assert joined.hosts[2].env["EVENER_ROSTER"] == "/c/runs/x/roster.json"
    assert "--data=/c/trees/d" in joined.hosts[2].agent.program  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="c would train on its GPU"):
        plan_with_added_host(plan, place("c", gpus=["A100"]), "/c/trees/d", 8)


def test_every_host_finds_the_pretrained_model_where_it_was_sent() -> None:
    places = [place("a"), place("b")]
    spec = parse_args(["--batch", "12", "--data", "d", "--model", "hf:/home/me/llama", "--lora", "4"])
    data, models = dict.fromkeys("ab", "d"), {name: f"hf:/{name}/trees/m/llama" for name in "ab"}
    plan = train_plan(prepared(places), spec, roster_of(places, spec), data, {}, models, resume=False, key="k")
    joined = plan_with_added_host(plan, place("c"), "/c/trees/d", 7, "hf:/c/trees/m/llama")
    programs = [host.agent.program for host in joined.hosts if host.agent is not None]
    assert [[word for word in words if word.startswith("--model")] for words in programs] == [
        [f"--model=hf:/{name}/trees/m/llama"] for name in "abc"
    ]
    assert joined.spec is not None
    assert joined.spec.model.model == "hf:/home/me/llama"  # where it is here, for export and the next start


def test_key_is_in_no_command_environment_or_printed_plan(capsys: pytest.CaptureFixture[str]):
    key = make_run_key()
    places = [place("a"), place("b")]
    for membership in ("live", "restart", "fixed"):
        spec = parse_args([f"--membership={membership}"])
        plan = train_plan(
            prepared(places), spec, roster_of(places, spec), dict.fromkeys("ab", "d"), {}, resume=False, key=key
        )
        assert key not in repr(plan.hosts)
        for host in plan.hosts:
            assert plan.membership_files(host.name)[RUN_KEY_FILE] == key
            assert host.env["EVENER_KEY_FILE"] == f"/{host.name}/runs/x/host/key"
        for as_json in (False, True):
            print_plan(plan, as_json)
    printed = capsys.readouterr()
    assert key not in printed.out + printed.err
    assert "EVENER_KEY_FILE=/a/runs/x/host/key" in printed.out


@pytest.mark.parametrize("text", ["", "5e" * 31, "5e" * 33, "zz" * 32, "\xff"])
def test_file_without_key_is_an_error_that_says_how_to_make_one(tmp_path: Path, text: str):
    path = tmp_path / "key"
    with pytest.raises(CheckpointError, match="No such file") as absent:
        read_run_key(path)
    path.write_text(text)
    with pytest.raises(CheckpointError, match="not a key of 32 bytes") as damaged:
        read_run_key(path)
    with pytest.raises(CheckpointError, match="EVENER_KEY_FILE is not set") as unset:
        read_run_key(None)
    assert {error.value.hint for error in (absent, damaged, unset)} == {
        "(umask 077; openssl rand -hex 32 > run.key), a copy of that file on each host, and EVENER_KEY_FILE=run.key"
    }


def test_keys_have_256_random_bits(tmp_path: Path):
    keys = {make_run_key() for _ in range(100)}
    assert len(keys) == 100
    (tmp_path / "key").write_text(keys.pop() + "\n")
    assert len(read_run_key(tmp_path / "key")) == 32


def test_no_host_is_added_to_a_run_with_sharded_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slots = [RankSlot(host=name, device="cpu") for name in "ab"]
    roster = initial_roster(parse_args(["--batch", "4", "--sync", "zero1"]), slots, 256)
    plan = SimpleNamespace(roster=roster, hosts=[])
    monkeypatch.setattr(add_leave, "_load_elastic_run", lambda run, trust: (RunDir(tmp_path), plan))
    with pytest.raises(UsageError, match=r"shards its weights \(zero1\): no host joins it while it runs") as refused:
        add_leave.add("runs/x", "c", None, False)
    assert "evener train --resume" in refused.value.hint
