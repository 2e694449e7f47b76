"""Flags, fleet file and hardware names describe the same machines alike; three typical questions are answered."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path

import msgspec
import pytest

from evener.core.base.errors import UsageError
from evener.core.cluster.fleet_file import HostLink, load_fleet
from evener.core.cluster.fleet_update import update_fleet_file
from evener.core.cluster.hardware import HARDWARE
from evener.core.cluster.link import parse_link
from evener.core.model.corpus import load_corpus
from evener.core.model.shape import PRESETS, shape_of_size
from evener.core.run.prediction import HostRates, Prediction
from evener.core.run.roster import parse_sync
from evener.core.run.run_spec import parse_args
from evener.corpus.prepare_corpus import prepare
from evener.corpus.verbs import make_verb_corpus
from evener.plan.choice.advice import collect_advice
from evener.plan.choice.options import candidate_host_sets, explain_memory_shortage
from evener.plan.choice.plan_request import (
    MachineFlags,
    PlanRequest,
    answer_request,
    change_request,
    request_for_rental,
    request_from_flags,
    request_from_fleet,
    request_on_hosts,
)
from evener.plan.choice.training_cost import RentalOffer, estimate_training_cost, parse_offers, parse_tokens
from evener.plan.cost.cost_model import predict_step

from ..tiers import num_examples
from .planner import cluster_of, job_of


def asked(words: MachineFlags, *flags: str, params: str | None = None) -> PlanRequest:
    return request_from_flags(words, parse_args(list(flags)), None, params)


def lines(found: Prediction) -> list[str]:
    return [advice.text for advice in collect_advice(found)]


def told(found: Prediction) -> str:
    return " ".join(lines(found))


# --- three people's questions -----------------------------------------------------------------------------------------


def test_laptop_and_desktop_on_wifi_get_correct_advice():
    """The learner: do my desktop of 8 cores and my laptop of 4 help each other tonight?"""
    home = MachineFlags(gpus="cpu:8,cpu:4", memory="32GB,16GB", link="wifi:200Mbit")
    flags = ["--model=char", "--batch=16", "--steps=2000"]
    exact = answer_request(asked(home, *flags, "--loss-budget=0"))
    assert exact.verdict == "Leave node2 out: with it 579 tokens/s, without 5.3k tokens/s."
    assert lines(exact) == [
        "A step on all hosts takes 7.08 s, of which 6.54 s (92%) is communication that computing does not hide.",
        "With ddp several hosts break even at 750Mbit between them; their links carry 100 Mbit/s of payload. "
        "With --link 1GbE both would train 1.25 times as much as node1 alone.",
        "Or with --batch 512, 32 times as many sequences a step: both would train 1.13 times as much as node1 alone: "
        "another training run.",
    ]
    cautious = answer_request(asked(home, *flags))
    assert cautious.verdict == "Leave node2 out: with it 2.1k tokens/s, without 5.3k tokens/s."  # with int8
    assert lines(cautious)[-1] == (
        "With --sync diloco:10:int8:streamed, node1 and node2 would train 7.8k tokens/s, 1.49 times as much; loss "
        "+1.5% ± 1.0% at equal tokens (training loss, text read once, 10.9M parameters, 2 ranks, 1 seed). --sync auto "
        "takes it with --loss-budget 2.6."
    )  # 12 cores beside 8: no more than 1.5 times
    lossy = answer_request(asked(home, *flags, "--loss-budget=2.6"))
    assert lossy.verdict.startswith(
        "Train on both hosts with diloco:10:int8:streamed, shares 10.7 : 5.3: 7.8k tokens/s, 1.49 times the "
        "fastest host alone; loss +1.5%"
    )
    # By hand: 42.6 MB go each way through the air twice, two hosts send: 4 · 42.6 MB at 25 MB/s.
    assert exact.option(exact.chosen).ranks[0].sync_s == pytest.approx(4 * 42.57e6 / 25e6, rel=0.01)


def test_four_unequal_gpus_on_home_network_get_correct_advice():
    """The home-lab owner: 20k, 12k, 12k and 3k tokens/s over 2.5GbE."""
    home = MachineFlags(rates="20000,12000,12000,3000", link="2.5GbE")
    found = answer_request(asked(home, "--model=gpt2", "--batch=64", "--device=cuda", "--loss-budget=0"))
    assert found.verdict == "Don't distribute this: node1 alone trains 20.0k tokens/s, all 4 hosts 16.8k tokens/s."
    assert lines(found)[1:3] == [
        "With ddp several hosts break even at 3.1Gbit between them; their links carry 2.12 Gbit/s of payload. "
        "With --link 10GbE all 4 would train 1.80 times as much as node1 alone.",
        "Or with --batch 128 --hosts node1,node2,node3, 2 times as many sequences a step: node1, node2 and node3 would "
        "train 1.27 times as much as node1 alone: another training run.",
    ]
    # By hand, --batch 256 without node4: 117, 70 and 69 sequences at 1024 tokens take 6.0 s. 4/3 of 498 MB at 266 MB/s
    # are 2.5 s, of which the last backward, 2/3 of 16 sequences, hides 0.6 s: 262,144 tokens in 7.9 s are 33k.
    question = asked(home, "--model=gpt2", "--batch=256", "--device=cuda", "--sync=ddp")
    at_256 = answer_request(request_on_hosts(question, "node1,node2,node3"))
    assert at_256.option(at_256.chosen).tokens_per_s == pytest.approx(33e3, rel=0.05)


def test_eight_h100_nodes_with_eight_adapters_get_correct_advice():
    """The engineer with rented nodes: does it scale, and does it fit?"""
    rented_nodes = MachineFlags(nodes=8, per_node=8, gpus="h100", link="8x400Gbit")
    found = answer_request(asked(rented_nodes, "--model=gpt2-xl", "--batch=1024", "--loss-budget=0"))
    assert found.verdict == "Train on all 8 hosts with ddp: 2.8M tokens/s, 7.44 times the fastest host alone."
    sharded = answer_request(asked(rented_nodes, "--batch=512", "--loss-budget=0", params="13b"))
    assert sharded.verdict.startswith("Train on all 8 hosts with fsdp: ")
    large = answer_request(asked(rented_nodes, "--batch=512", "--sync=ddp", params="13b"))
    assert large.verdict.startswith(
        "This cannot be trained here: does not fit: node1 has 80.0 GB, a run may fill 72.0 GB"
    )
    (fits,) = [line for line in lines(large) if "No micro-batch fits" in line]
    assert fits.startswith(
        "No micro-batch fits: weights, gradients and AdamW's moments alone are 205.6 GB on every rank. "
    )
    assert " --sync fsdp --micro-batch " in fits
    assert 16 * large.job.shape.num_params() == pytest.approx(205.6e9, rel=1e-3)


# --- flags, a file and names say the same -----------------------------------------------------------------------------


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_fleet_file_and_flags_give_same_answer(tmp_path):
    """8 × 8 GPUs were 929k tokens/s by flags and 579k by a file."""
    hosts = "".join(f'[hosts.node{i}]\naddress = "node{i}"\ngpu = "h100"\ngpus = 8\n' for i in range(1, 9))
    file = write(tmp_path / "fleet.toml", f'link = "400GbE"\n{hosts}')
    spec = parse_args(["--model=gpt2", "--batch=512"])
    by_file = answer_request(request_from_fleet(load_fleet(file), spec, None, None, "fleet.toml"))
    by_flags = answer_request(
        request_from_flags(MachineFlags(nodes=8, per_node=8, gpus="h100", link="400GbE"), spec, None)
    )
    assert by_file.verdict == by_flags.verdict
    assert {one.name: one.step_s for one in by_file.options} == {one.name: one.step_s for one in by_flags.options}
    assert collect_advice(by_file) == collect_advice(by_flags)
    assert by_file.cluster.assumed == by_flags.cluster.assumed


def test_measured_values_override_hardware_table(tmp_path):
    file = write(tmp_path / "fleet.toml", """
[hosts.a]
address = "a"
gpu = "4090"
[rates.a."cuda:0"]
name = "NVIDIA GeForce RTX 4090"
memory_bytes = 20000000000
measured = "2026-11-20"
[rates.a."cuda:0".models.gpt2]
tokens_per_s = 90000
dtype = "bf16"
""")  # fmt: skip
    question = request_from_fleet(load_fleet(file), parse_args(["--model=gpt2"]), None, None, "fleet.toml")
    host = question.cluster.hosts["a"]
    assert (host.tokens_per_s, host.memory_bytes, host.basis) == ({"bf16": 90000}, 20_000_000_000, "measured")
    assert host.watts == HARDWARE["4090"].watts


def test_link_resolution_follows_precedence_rules(tmp_path):
    file = write(tmp_path / "fleet.toml", """
link = "10GbE"
[hosts.a]
address = "a"
gpu = "4090"
[hosts.b]
address = "b"
gpu = "4090"
[hosts.shed]
address = "c"
gpu = "3060"
[links.a]
shed = "200Mbit,6ms"
""")  # fmt: skip
    cluster = request_from_fleet(load_fleet(file), parse_args(["--model=gpt2"]), None, None, "fleet.toml").cluster
    assert cluster.link_between("a", "b") == cluster.link_between("b", "shed") == parse_link("10GbE").wire
    for source, target in (("a", "shed"), ("shed", "a")):
        assert cluster.link_between(source, target).bandwidth_Bps == pytest.approx(
            parse_link("200Mbit").wire.bandwidth_Bps
        )
        assert cluster.link_between(source, target).latency_s == pytest.approx(3e-3)
    assert not any("way back" in line for line in cluster.assumed)


def test_hosts_with_measured_links_still_share_one_wifi(tmp_path):
    """Between two hosts nothing shows that a third one has to wait."""
    file = write(tmp_path / "fleet.toml", """
link = "wifi"
[hosts.a]
address = "a"
[hosts.b]
address = "b"
[hosts.c]
address = "c"
[links.a]
c = "1GbE"
""")  # fmt: skip
    measured = HostLink(goodput_Bps=2e7, duplex_Bps=1.1e7, rtt_s=4e-3)
    update_fleet_file(file, links={"a": {"b": measured, "c": measured}, "b": {"a": measured}})
    links = load_fleet(file).links
    assert [links[a][b].is_shared for a, b in ("ab", "ba", "ac")] == [True, True, False]
    assert (links["a"]["b"].bandwidth_Bps, links["a"]["c"].bandwidth_Bps) == (2e7, 1.1e7)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[hosts.a]\naddress = "a"\n[rates.b.cpu.models.char]\ntokens_per_s = 1', "rates.b: the fleet has no host b"),
        ('[hosts.a]\naddress = "a"\n[links.a]\nb = "1GbE"', "links.a.b: the fleet has no host b"),
        ('[hosts.a]\naddress = "a"\n[links.b.a]\ngoodput_Bps = 1e8\nrtt_s = 0', "links.b: the fleet has no host b"),
        ('link = "fast"\n[hosts.a]\naddress = "a"', "link: link fast: expected a rate"),
        ('[hosts.a]\naddress = "a"\ngpu = "h1000"', "hosts.a.gpu: --gpu h1000"),
        ('[hosts.a]\naddress = "a"\nmemory = "24"', "hosts.a.memory: memory 24: expected a size"),
        ('[hosts.a]\naddress = "a"\nwatts = inf', "hosts.a: watts: expected float <= "),
        ('[hosts.a]\naddress = "a"\n[rates.a.cpu.models.char]\ntokens_per_s = inf', "cpu.models.char: tokens_per_s"),
        ('[hosts.a]\naddress = "a"\n[rates.a.cpu.matmul_flops]\nfp32 = inf', "rates.a.cpu: matmul_flops"),
        ('[hosts.a]\naddress = "a"\n[links.a.a]\ngoodput_Bps = 1e-300\nrtt_s = 0', "links.a.a: goodput_Bps"),
        ('[hosts.a]\naddress = "a"\n[links.a.a]\ngoodput_Bps = 1e8\nrtt_s = inf', "links.a.a: rtt_s"),
        ('[hosts."bür"]\naddress = "a"', "host 'bür': a name has a-z"),
    ],
)  # fmt: skip
def test_invalid_fleet_file_is_reported_with_position(tmp_path, text, said):
    file = write(tmp_path / "fleet.toml", text)
    with pytest.raises(UsageError) as error:
        load_fleet(file)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_byte_order_mark_is_ignored(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_bytes(b'\xef\xbb\xbf[hosts.a]\naddress = "a"\n')
    assert list(load_fleet(file).hosts) == ["a"]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_is_not_recommended():
    """A model of 873 GB was recommended for a GPU, and one of 22 GB for a laptop, without a word."""
    found = answer_request(asked(MachineFlags(gpus="4090", memory=None), "--batch=8", params="13b"))
    assert found.recommended == ""
    assert "No micro-batch fits" in told(found)
    unknown = answer_request(asked(MachineFlags(rates="500"), "--model=gpt2-xl", "--batch=8"))
    assert "Does it fit? A rank needs" in told(unknown)
    assert "but the memory of node1 is not known" in told(unknown)


def test_advised_micro_batch_fits_in_memory():
    words = MachineFlags(gpus="3060,3060", link="10GbE")
    found = answer_request(asked(words, "--model=gpt2-medium", "--batch=32", "--micro-batch=16"))
    assert found.recommended == ""
    (advice,) = [one for one in collect_advice(found) if one.flags]
    texts = {name.removeprefix("--").replace("-", "_"): value or "true" for name, value in advice.flags.items()}
    again = answer_request(
        change_request(asked(words, "--model=gpt2-medium", "--batch=32", "--micro-batch=16"), texts, None)
    )
    chosen = again.option(again.chosen)
    assert explain_memory_shortage(chosen, again.cluster) == ""
    assert chosen.tokens_per_s == pytest.approx(advice.tokens_per_s, rel=0.01)


# --- bills ------------------------------------------------------------------------------------------------------------


def test_training_hours_energy_and_cost_match_hand_calculation():
    """1e9 tokens at 1,000 a second are 277.8 hours; 500 W make 138.9 kWh; at 0.40 that is 55.56."""
    question = asked(MachineFlags(rates="1000", watts=500.0), "--model=gpt2", "--batch=8")
    found = answer_request(question)
    one = estimate_training_cost(found.option(found.recommended), found.cluster, parse_tokens("1B"), 0.40)
    assert one.hours == pytest.approx(1e9 / 1000 / 3600)
    assert one.kwh == pytest.approx(138.9, rel=1e-3)
    assert one.money == pytest.approx(55.56, rel=1e-3)
    assert one.spread == pytest.approx(0.15)  # a rate that was declared


def test_rented_gpu_cost_matches_hand_calculation():
    question = asked(MachineFlags(rates="1000"), "--model=gpt2", "--batch=8")
    (offer,) = parse_offers("8xh100@20")
    assert offer == RentalOffer(num_gpus=8, gpu="h100", price_per_h=20.0)
    there = answer_request(request_for_rental(question, offer))
    assert there.cluster.host_names == ["node1"]
    assert len(there.cluster.slots) == 8
    option = there.option(there.recommended)
    one = estimate_training_cost(option, there.cluster, 1e9, 0.40)
    assert one.money == pytest.approx(20 * 1e9 / option.tokens_per_s / 3600)  # its owner pays for its electricity
    assert one.spread > 0.3  # nobody measured it


# --- a model by its size ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "num_params"), [("350M", 3.5e8), ("7B", 7e9), ("72b", 7.2e10), ("1.5T", 1.5e12)])
def test_params_option_gives_shape_of_that_size(text, num_params):
    shape = shape_of_size(text, PRESETS["gpt2"])
    shape.check()
    assert shape.num_params() == pytest.approx(num_params, rel=0.02)
    assert 60 < shape.width / shape.num_layers < 200


@pytest.mark.parametrize("text", ["", "7", "7X", "-7B", "0B", "1e9", "99999T"])
def test_invalid_model_size_is_a_one_line_error(text):
    with pytest.raises(UsageError, match="--params"):
        shape_of_size(text, PRESETS["gpt2"])


# --- many ranks -------------------------------------------------------------------------------------------------------


def test_identical_hosts_cost_the_same_as_when_priced_one_by_one():
    """Each rank of many is priced as the same ranks one by one: a host's figures copied are another object."""
    job = job_of(PRESETS["gpt2"], batch=96, model="gpt2")
    same = cluster_of(*[100.0] * 6, wire=parse_link("1GbE").wire)
    copied = {name: msgspec.structs.replace(host) for name, host in same.hosts.items()}
    one_by_one = msgspec.structs.replace(same, hosts=copied)
    for sync in ("ddp", "int8", "fsdp", "diloco:10"):
        roster = msgspec.structs.replace(job.initial_roster(same.slots), sync=parse_sync(sync))
        assert predict_step(job, same, roster) == predict_step(job, one_by_one, roster)


@pytest.mark.parametrize("gpu", ["4090", "a770", "m4-pro"])
def test_described_rate_is_that_of_each_gpu(gpu):
    """An Arc was two devices, one with the given rate and one from the table."""
    found = answer_request(asked(MachineFlags(nodes=2, gpus=gpu, link="10GbE", rates="500"), "--model=gpt2"))
    assert found.option("node1 alone").tokens_per_s == pytest.approx(500, rel=0.05)


def test_at_most_16_host_sets_are_evaluated():
    for num in (4, 16, 64, 1000):
        machines = cluster_of(*[100.0] * num, wire=parse_link("1GbE").wire, names=[f"h{i}" for i in range(num)])
        job = job_of(PRESETS["char"], batch=4096)
        assert len(candidate_host_sets(job, machines)) <= 16


# --- what a hostile reader found --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["fsdp", "hsdp", "zero1", "int8", "powersgd:4", "diloco:10"])
def test_nothing_slower_than_one_host_is_recommended(sync):
    """Where train cannot run what was asked for, or nobody may: one host of eight GPUs by ddp."""
    words = MachineFlags(nodes=2, per_node=8, gpus="4090", link="1GbE")
    found = answer_request(asked(words, "--model=gpt2", "--batch=64", f"--sync={sync}"))
    best = found.option(found.recommended)
    assert best.speedup_vs_best_host is not None
    assert best.speedup_vs_best_host >= 1
    for advice in collect_advice(found):
        if "--link" in advice.flags:
            texts = {"sync": advice.flags["--sync"]} if "--sync" in advice.flags else {}
            again = answer_request(change_request(asked(words, "--model=gpt2", "--batch=64", f"--sync={sync}"), texts,
                                   advice.flags["--link"]))  # fmt: skip
            assert len(again.option(again.recommended).roster.hosts) == 2


def test_hsdp_speed_does_not_depend_on_host_order():
    speeds = []
    for gpus in ("h100,4090", "4090,h100"):
        words = MachineFlags(per_node=8, gpus=gpus, link="400GbE")
        found = answer_request(asked(words, "--batch=64", "--loss-budget=0", "--sync=hsdp", params="1b"))
        speeds.append(found.option("hsdp").tokens_per_s)
    assert speeds[0] == pytest.approx(speeds[1])


def test_break_even_link_is_slower_than_worthwhile_link():
    """The hosts' link is worthwhile; the slowest named link is not, for its latency."""
    found = answer_request(asked(MachineFlags(rates="8000", nodes=2, link="100Mbit"), "--model=tiny", "--batch=16",
                                "--sync=ddp"))  # fmt: skip
    (line,) = [line for line in lines(found) if "ddp breaks even at" in line]
    assert float(line.split("even at ")[1].split("Mbit")[0]) < 100


def test_thousand_host_fleet_with_link_override_is_planned(tmp_path):
    hosts = "".join(f'[hosts.n{i}]\naddress = "n{i}"\ngpu = "4090"\n' for i in range(1200))
    file = write(tmp_path / "fleet.toml", f'link = "10GbE"\n{hosts}[links.n0]\nn1 = "1GbE"\n')
    question = request_from_fleet(
        load_fleet(file), parse_args(["--model=tiny", "--batch=1200"]), None, None, "fleet.toml"
    )
    assert len({id(host) for host in question.cluster.hosts.values()}) == 1
    assert answer_request(question).recommended


def test_hosts_with_equal_values_share_one_object(tmp_path):
    rates = "".join(f"[rates.n{i}.cpu.models.char]\ntokens_per_s = 500\n" for i in range(3))
    hosts = "".join(f'[hosts.n{i}]\naddress = "n{i}"\n' for i in range(3))
    file = write(tmp_path / "fleet.toml", f'link = "1GbE"\n{hosts}{rates}')
    question = request_from_fleet(
        load_fleet(file), parse_args(["--model=char", "--batch=24"]), None, None, "fleet.toml"
    )
    assert len({id(host) for host in question.cluster.hosts.values()}) == 1


def test_sparse_cost_uses_distinct_tokens_of_corpus(tmp_path):
    """With nobody's corpus no two tokens of a step are alike, and the answer says so; other flags change neither."""
    prepare(tmp_path / "verbs", make_verb_corpus(0, 2000, 0.1)[0], tokenizer="byte")
    corpus, words = load_corpus(tmp_path / "verbs"), MachineFlags(rates="500", nodes=2, link="1GbE")
    spec = parse_args(["--model=d4", "--block-size=64", "--batch=16", "--sync=ddp+sparse"])
    known, unknown = (request_from_flags(words, spec, one, None) for one in (corpus, None))
    assert [any("+sparse" in told for told in one.cluster.assumed) for one in (known, unknown)] == [False, True]
    assert (unknown.job.embedding_rows(8), known.job.embedding_rows(8)) == (
        8 * 64,
        pytest.approx(known.job.distinct_tokens[3]),
    )
    assert known.job.embedding_rows(8) < len(set(bytes(range(32, 127))))  # of bytes that are text
    assert change_request(known, {"batch": "32"}, None).job.distinct_tokens == known.job.distinct_tokens
    assert change_request(known, {"block_size": "32"}, None).job.distinct_tokens == []


def test_missing_price_is_not_treated_as_free():
    one, two = (
        HostRates(tokens_per_s={"bf16": 1e5}, watts=500.0),
        HostRates(tokens_per_s={"bf16": 1e5}, price_per_h=2.0),
    )
    job = job_of(PRESETS["gpt2"], batch=64, model="gpt2")
    machines = cluster_of(1e5, 1e5, wire=parse_link("400GbE").wire, devices=("cuda:0",))
    both = msgspec.structs.replace(machines, hosts={"a": one, "b": two})
    option = predict_step(job, both, job.initial_roster(both.slots))
    found = estimate_training_cost(option, both, 1e9, 0.30)
    assert found.money == pytest.approx((2.0 + 0.5 * 0.30) * found.hours)
    assert estimate_training_cost(option, both, 1e9, None).money is None
    assert found.kwh is None  # of b nobody knows


def test_rank_count_is_checked_before_ranks_are_created():
    with pytest.raises(UsageError, match="4194304 ranks, more than 65536"):
        asked(MachineFlags(nodes=4096, per_node=1024, gpus="4090", link="400GbE"))
    with pytest.raises(UsageError, match="512 ranks, more than the 16 sequences"):
        asked(MachineFlags(nodes=64, per_node=8, gpus="4090", link="400GbE"))


# --- the sweep --------------------------------------------------------------------------------------------------------


def test_planner_properties_hold_in_random_cases():
    """`bench/planner_properties.py` looks at thousands of them."""
    path = Path(__file__).parents[2] / "bench" / "planner_properties.py"
    spec = util.spec_from_file_location("evener_planner_sweep", path)
    assert spec is not None
    assert spec.loader is not None
    sweep = util.module_from_spec(spec)
    sys.modules[spec.name] = sweep
    spec.loader.exec_module(sweep)
    violations: list[str] = []
    looked, violated = sweep.run_cases(70_000, num_examples(4, 30), violations.append)
    assert not violated, violations
    assert len(looked) >= num_examples(3, 12)
