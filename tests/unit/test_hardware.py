"""Look up hardware by the names that people and PyTorch use; its rates match published ones."""

from __future__ import annotations

import re

import pytest

from evener.core.base.errors import UsageError
from evener.core.cluster.hardware import HARDWARE, MEASURE_INSTEAD, SHORT_NAME_BY_KEY, parse_hardware

# What torch.cuda.get_device_name prints, as public repositories have it.
BY_TORCH = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "A100-SXM4-80GB": "a100-80",
    "NVIDIA A100-PCIE-40GB": "a100-40-pcie",
    "NVIDIA A100 80GB PCIe": "a100-80-pcie",
    "Tesla V100-SXM2-16GB": "v100-16",
    "Tesla V100-SXM2-32GB": "v100-32",
    "Tesla V100-PCIE-16GB": "v100-16-pcie",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
    "NVIDIA A10": "a10",
    "Tesla T4": "t4",
    "NVIDIA RTX A6000": "rtx-a6000",
    "NVIDIA GeForce RTX 5090": "5090",
    "NVIDIA GeForce RTX 4090": "4090",
    "NVIDIA GeForce RTX 4080": "4080",
    "NVIDIA GeForce RTX 4070": "4070",
    "NVIDIA GeForce RTX 3090": "3090",
    "NVIDIA GeForce RTX 3060": "3060",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI300X OAM": "mi300x",
    "AMD Instinct MI250X/MI250": "mi250",
    "AMD Radeon RX 7900 XTX": "7900-xtx",
    "AMD Radeon RX 6800 XT": "6800-xt",
    "NVIDIA GeForce RTX 4060 Ti": "4060-ti",  # of 8 and of 16 GB
    "NVIDIA GeForce RTX 2080 Ti": "2080-ti",
    "Intel(R) Arc(TM) A770 Graphics": "a770",
}
TYPED = {
    "RTX 4090": "4090",
    "rtx4090": "4090",
    " GeForce-RTX-4090 24 GB ": "4090",
    "a6000": "rtx-a6000",
    "RTX A6000": "rtx-a6000",
    "H100 SXM5": "h100",
    "h100 80gb": "h100",
    "H100-PCIe-80GB": "h100-pcie",
    "a100 40 gb": "a100-40",
    "a100sxm40gb": "a100-40",
    "A100 PCIe 80GB": "a100-80-pcie",
    "V100-32GB": "v100-32",
    "MI300X": "mi300x",
    "Apple M2 Max": "m2-max",
    "m2max": "m2-max",
    "RTX 3080 12GB": "3080-12gb",
    "RTX 3080 10GB": "3080",
    "RX 7900 XTX 24GB": "7900-xtx",
    "Arc A770 16GB": "a770",
    "rx 9070 xt": "9070-xt",
    "Arc B580": "b580",
}


@pytest.mark.parametrize(("text", "short"), [*BY_TORCH.items(), *TYPED.items(), *((name, name) for name in HARDWARE)])
def test_hardware_name_lookup_ignores_spelling(text, short):
    assert parse_hardware(text) is HARDWARE[short]
    assert parse_hardware(text.upper()) is HARDWARE[short]


def test_hardware_aliases_are_unique():
    assert len({*SHORT_NAME_BY_KEY.values()}) == len(HARDWARE)
    assert all(parse_hardware(row.name) is row for row in HARDWARE.values())


@pytest.mark.parametrize(("text", "hint"), [
    ("a100", "--gpu a100-40 or --gpu a100-80"),
    ("NVIDIA A100 PCIe", "--gpu a100-40-pcie or --gpu a100-80-pcie"),
    ("V100", "--gpu v100-16 or --gpu v100-32"),
])  # fmt: skip
def test_ambiguous_hardware_name_is_refused_with_candidates(text, hint):
    with pytest.raises(UsageError, match=f"--gpu {text}: there are several") as raised:
        parse_hardware(text)
    assert raised.value.hint == hint


# Devices of their own, each slower or smaller than the one whose name theirs begins or ends with.
OTHERS = ["NVIDIA H100 NVL", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "RTX 4080 SUPER Max-Q",
          "NVIDIA GeForce RTX 3060 Laptop GPU", "Radeon RX 7900M", "NVIDIA A10G", "NVIDIA L40", "NVIDIA GH200 480GB",
          "NVIDIA GB200", "H100 96GB",
          "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "Tesla V100S-PCIE-32GB", "MI300A", "m9 ultra", "Tesla M4",
          "RTX 3080 11GB", "2x4091"]  # fmt: skip
JUNK = ["", " ", "-", "nvidia", "gb", "pcie", "gpu", "cpu", "cpu:", "cpu:x", "cpu:-1", "cpu:1.5", "cpu:٣", "h1.00",
        "cpu:" + "9" * 5000, "\0", "4090\n4090"]  # fmt: skip


@pytest.mark.parametrize("text", [*OTHERS, *JUNK], ids=lambda text: text[:20])
def test_unknown_hardware_is_refused_with_hint(text):
    with pytest.raises(UsageError, match="expected a device's name, or cpu:8") as raised:
        parse_hardware(text)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("h1000", "h100"),
        ("rtx 509", "5090"),
        ("4090ti", "4090"),
        ("RTX 4090 SUPER", "4090"),
        ("m3 utra", "m3-ultra"),
        ("m2 mxa", "m2-max"),
        ("7900 xtz", "7900-xt"),
        ("4070 sper", "4070-super"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "3060"),
        ("RTX 4080 SUPER Max-Q", "4080-super"),
        ("RTX 3080 11GB", "3080"),
        ("MI300A", "mi300x"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA L40", "l40s"),
        ("Tesla V100S-PCIE-32GB", "v100-16-pcie"),
    ],
)
def test_misspelt_hardware_gets_the_nearest_with_its_number(text, short):
    assert hint_for(text) == f'did you mean "{short}"? {MEASURE_INSTEAD}'


@pytest.mark.parametrize(
    "text",
    ["rx 580", "gtx1080 ti", "GTX 1660 SUPER", "1080", "gt 1030", "Tesla P100", "K80", "NVIDIA A40", "RX 5700 XT",
     "arc a310", "radeon pro w7900", "MI210", "780m", "m9 ultra", "Tesla M4", "RTX 5000"],
)  # fmt: skip
def test_another_device_gets_no_name_of_a_different_one(text):
    assert hint_for(text) == MEASURE_INSTEAD


def hint_for(text):
    with pytest.raises(UsageError) as raised:
        parse_hardware(text)
    return raised.value.hint


@pytest.mark.parametrize("text", ["4x3090", "4 × RTX 3090", "4*nvidia geforce rtx 3090"])
def test_count_in_hardware_name_is_refused_with_flag_hint(text):
    with pytest.raises(UsageError, match="without their number") as raised:
        parse_hardware(text)
    assert raised.value.hint.startswith("--gpu 3090 --per-node 4 for 4 in each machine, --gpu 3090 --nodes 4 for 4 ")


@pytest.mark.parametrize("text", ["cpu:0", "cpu:1025", "cpu:999999999"])
def test_core_count_outside_1_to_1024_is_refused(text):
    with pytest.raises(UsageError, match="expected 1 to 1024 cores"):
        parse_hardware(text)


def test_cpu_rates_grow_linearly_with_cores():
    one, eight = parse_hardware("cpu:1"), parse_hardware("CPU: 8")
    assert (one.name, eight.name) == ("1 processor core", "8 processor cores")
    assert one.memory_bytes is None
    for dtype, rate in one.matmul_flops.items():
        assert eight.matmul_flops[dtype] == pytest.approx(8 * rate)
    assert eight.copy_Bps == pytest.approx(8 * one.copy_Bps)
    assert eight.watts == 30


ROWS = [*HARDWARE.items(), ("cpu:4", parse_hardware("cpu:4"))]


@pytest.mark.parametrize(("short", "row"), ROWS, ids=[short for short, _ in ROWS])
def test_hardware_row_has_source_and_plausible_rates(short, row):
    assert len(row.source) > 20
    assert row.kind == "cuda" or row.intra_node_Bps is None
    assert row.matmul_flops.keys() <= {"fp32", "bf16", "fp16"}
    assert all(rate >= row.matmul_flops["fp32"] > 1e10 for rate in row.matmul_flops.values())
    assert row.matmul_flops or "no rate" in row.source
    if row.kind != "cpu" and row.matmul_flops:  # operations a byte, 26 of Apple's to 419 of the L40S
        assert 20 < max(row.matmul_flops.values()) / row.copy_Bps < 450
    if row.kind == "cuda":
        assert row.copy_Bps > row.intra_node_Bps >= 15e9
        assert 0.01 < row.watts / (row.copy_Bps / 1e9) < 0.7
        assert row.memory_bytes >= 6e9


def test_half_precision_rates_exist_only_with_hardware_units():
    without = {short for short, row in HARDWARE.items() if "bf16" not in row.matmul_flops}
    turing_and_rdna2 = re.compile(r"RTX 20\d0|RX 6\d\d\d")
    assert without == {"t4", "v100-16", "v100-32", "v100-16-pcie", "v100-32-pcie"} | {
        short for short, row in HARDWARE.items() if row.kind == "mps" or turing_and_rdna2.search(row.name)
    }
    for row in HARDWARE.values():
        assert row.matmul_flops.get("bf16", row.matmul_flops.get("fp16")) == row.matmul_flops.get("fp16")


# TFLOP/s in 16 bits without sparsity, fp32 accumulation on NVIDIA's, as the manufacturers publish them.
PUBLISHED_HALF = {"2080-ti": 53.8, "3090-ti": 80, "6900-xt": 46.1, "7900-xtx": 123, "7800-xt": 74.6, "9070-xt": 195}


@pytest.mark.parametrize(("short", "tflops"), PUBLISHED_HALF.items())
def test_computed_rates_of_cards_match_published_ones(short, tflops):
    assert HARDWARE[short].matmul_flops["fp16"] / 1e12 == pytest.approx(tflops, rel=0.02)


# total_memory of torch's _CudaDeviceProperties or of deviceQuery in public repositories, MiB: the least that was found.
REPORTED_MIB = {
    "h100": 81082, "h100-pcie": 81008, "h200": 143156, "b200": 182631, "a100-40": 40339, "a100-80": 81920,
    "v100-16": 16130, "l40s": 45589, "t4": 14930, "rtx-a6000": 48676, "4090": 24563, "4080": 16049, "3090": 24259,
    "3060": 11931, "5090": 32117, "mi300x": 196592, "mi250": 65520,
    "l4": 22.03 * 1024, "a10": 22587,  # the L4's in GiB; an A10G's, which has the memory of an A10
}  # fmt: skip


@pytest.mark.parametrize("short", REPORTED_MIB)
def test_listed_memory_does_not_exceed_reported_memory(short):
    assert 0.87 < HARDWARE[short].memory_bytes / (REPORTED_MIB[short] * 2**20) <= 1


# karpathy/nanochat, common.py at 92d63d4 (2026-07): get_peak_flops (dense bf16) and get_peak_bandwidth.
NANOCHAT = {
    "h100": (989e12, 3.35e12), "h100-pcie": (756e12, 2.0e12), "h200": (989e12, 4.8e12), "b200": (2.25e15, 8.0e12),
    "a100-80": (312e12, 2.0e12), "l40s": (362e12, 864e9), "l4": (121e12, 300e9), "mi300x": (1.3074e15, 5.3e12),
    "5090": (209.5e12, 1.79e12), "4090": (165.2e12, 1.01e12), "3090": (71e12, 936e9),
}  # fmt: skip
# Others' for what it leaves out: mosaicml/composer, speed_monitor.py at 6405188 (2026-04); pytorch/torchtitan, utils.py
# at b5bcd76 (2026-08). All dense, in bf16, or in fp16 where there is none.
OTHER_PEAKS = {"a10": 125e12, "v100-16": 125e12, "v100-32-pcie": 112e12, "t4": 65e12, "rtx-a6000": 154.85e12,
               "a100-40": 312e12, "a100-40-pcie": 312e12}  # fmt: skip
# In fp32: composer again, and Lightning's fabric/utilities/throughput.py at 7f0c343 (2026-07).
FP32_PEAKS = {
    "h100": 67e12, "h100-pcie": 51e12, "h200": 67e12, "a100-40": 19.5e12, "a10": 31.2e12, "v100-16": 15.7e12,
    "v100-16-pcie": 14e12, "t4": 8.1e12, "4090": 82.6e12, "4080": 48.7e12, "l4": 30.3e12, "rtx-a6000": 38.7e12,
    "3090": 35.6e12,
}  # fmt: skip


def test_peak_flops_match_nanochat_and_others():
    for short, (flops, bandwidth) in NANOCHAT.items():
        row = HARDWARE[short]
        assert row.matmul_flops["bf16"] == pytest.approx(flops, rel=0.001), short
        assert row.copy_Bps == pytest.approx(bandwidth, rel=0.04), short  # it rounds, and has 8 TB/s for a B200
    for short, flops in OTHER_PEAKS.items():
        assert HARDWARE[short].matmul_flops["fp16"] == pytest.approx(flops, rel=0.001), short
    for short, flops in FP32_PEAKS.items():
        assert HARDWARE[short].matmul_flops["fp32"] == pytest.approx(flops, rel=0.001), short
    # both give a whole board of two dies, or a die of the next faster one: 362.1, and 191.5 of an MI250X
    assert 2 * HARDWARE["mi250"].matmul_flops["bf16"] == pytest.approx(362.1e12, rel=0.001)


def test_operations_per_byte_match_published_values():
    def intensity(short: str, dtype: str) -> float:
        return HARDWARE[short].matmul_flops[dtype] / HARDWARE[short].copy_Bps

    # NVIDIA, Matrix Multiplication Background User's Guide (DU-09799-001, 2023-02): 138.9 FLOPS:B of a V100
    assert intensity("v100-16", "fp16") == pytest.approx(138.9, abs=0.05)
    # mikasenghaas, Accelerator Intensity (gist d63ded0): 163, 200, 295 of 4090, A100 and H100
    assert [int(intensity(short, "bf16")) for short in ("4090", "a100-40", "h100")] == [163, 200, 295]


# TFLOP/s that PyTorch's products of up to 10240 × 10240 reached on others' devices, fp32 and bf16 (T4, M3 Max: fp16):
# zzc0721/torch-performance-test-data, database.md at 0785868; the 3060 and the L4 in its issues 131 and 120.
REACHED = {
    "b200": (66.24, 1696.03), "h100": (52.11, 783.66), "h200": (51.34, 790.29), "a100-40": (18.11, 246.33),
    "a100-80": (19.18, 264.53), "l40s": (46.88, 269.15), "rtx-a6000": (23.92, 123.34), "t4": (4.17, 41.91),
    "5090": (67.57, 242.18), "4090": (54.77, 173.31), "3090": (24.84, 76.68), "3060": (8.16, 25.47),
    "l4": (15.38, 70.89), "m3-max": (11.50, 12.84),
}  # fmt: skip


@pytest.mark.parametrize("short", REACHED)
def test_measured_rates_are_close_to_listed_peak(short):
    """A rate with sparsity, or of sums in fp16, would be twice as high; boost clocks go beyond the printed ones."""
    fp32, half = (1e12 * reached for reached in REACHED[short])
    flops = HARDWARE[short].matmul_flops
    assert 0.5 < fp32 / flops["fp32"] < 1.05
    assert 0.55 < half / flops.get("bf16", flops["fp16"]) < 1.2
