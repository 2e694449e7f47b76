"""The error of an encoded value is bounded, and decoded value plus error equals the input exactly."""

from __future__ import annotations

import pytest
import torch

from evener.core.run.roster import parse_sync
from evener.plan.cost.penalty import CompressionErrorMonitor
from evener.worker.sync import codecs
from evener.worker.sync.codecs import FRAME_NUMEL, Bf16Codec, BlockwiseIntCodec

from ..tiers import exhaustively

CODES = {"bf16": Bf16Codec(), "int8": BlockwiseIntCodec(8), "int4": BlockwiseIntCodec(4)}
NUM = (1 << 18) + 3 * 256  # a piece and a bit


def coded(code, values):
    payload = torch.zeros(code.payload_bytes(len(values)), dtype=torch.uint8)
    left, told = values.clone(), torch.zeros_like(values)
    code.encode(left, payload)
    code.decode_add(payload, told)
    return told, left


@pytest.mark.parametrize("name", CODES)
def test_decoded_value_plus_error_equals_input(name):
    values = torch.randn(NUM, generator=torch.Generator().manual_seed(1)) * 1e-4
    told, left = coded(CODES[name], values)
    assert torch.allclose(told + left, values, rtol=0, atol=2e-11)
    assert told.count_nonzero() > 0.8 * NUM


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
def test_quantization_error_is_at_most_half_a_step(name, largest):
    """A block's scale is its largest number / largest code, at most 1 + 2^-7 + 2^-8 times as much for its rounding."""
    code = CODES[name]
    values = torch.randn(NUM, generator=torch.Generator().manual_seed(2))
    _, left = coded(code, values)
    for start in range(0, NUM, 1 << 18):
        rows = values[start : start + (1 << 18)].view(code.block, -1)
        bound = rows.abs().amax(0) / largest * (1 + 2**-7) * (1 + 2**-8) / 2
        assert (left[start : start + (1 << 18)].view(code.block, -1).abs() <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("num", [3 * 256, FRAME_NUMEL, *exhaustively(5 * FRAME_NUMEL, 4 * FRAME_NUMEL + 512)])
def test_encoding_does_not_depend_on_chunk_size(name, num, monkeypatch):
    """A GPU works on many frames at a time, and what it sends is read by a processor that works on one."""
    values = torch.randn(num, generator=torch.Generator().manual_seed(3))
    told, left = coded(CODES[name], values)
    payload = torch.zeros(CODES[name].payload_bytes(num), dtype=torch.uint8)
    monkeypatch.setitem(codecs.CHUNK_NUMEL, "cpu", codecs.CHUNK_NUMEL["cuda"])
    assert all(torch.equal(one, other) for one, other in zip(coded(CODES[name], values), (told, left), strict=True))
    kept = torch.zeros(num)
    CODES[name].encode(values, payload, decoded_out=kept)
    monkeypatch.setitem(codecs.CHUNK_NUMEL, "cpu", FRAME_NUMEL)
    read = torch.zeros(num)
    CODES[name].decode_add(payload, read)
    assert torch.equal(read, told)
    assert torch.equal(kept, told)


@pytest.mark.parametrize(("name", "bits"), [("bf16", 16), ("int8", 8 + 16 / 256), ("int4", 4 + 16 / 64)])
def test_payload_size_matches_stated_bits(name, bits):
    assert CODES[name].payload_bytes(1 << 20) == bits / 8 * (1 << 20)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_exact_multiples_of_scale_and_zeros_are_lossless(name):
    """Numbers k·s with the largest code among them; s·(1 + 2^-7) is a bf16, so nothing is rounded but the codes."""
    code, largest = CODES[name], {"int8": 127, "int4": 7}[name]
    zeros = torch.zeros(NUM)
    told, left = coded(code, zeros)
    assert not told.any()
    assert not left.any()
    tiny, _ = coded(code, torch.full((NUM,), 1e-38))
    assert tiny.isfinite().all()
    codes = torch.arange(NUM).remainder(2 * largest + 1) - largest
    told, _ = coded(code, codes * 0.5)
    assert (told - codes * 0.5).abs().max() <= 0.26  # half a step, and the scale's 1 %


@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_error_stays_within_its_limit(ranks):
    """What each rank's coding lost is added to its next gradient, and of more than two to the next sums as well."""
    draw, watch = torch.Generator().manual_seed(4), CompressionErrorMonitor(parse_sync("bf16"), 2)
    left, left_of_sums, errors = [torch.zeros(NUM) for _ in range(ranks)], torch.zeros(NUM), []
    for _ in range(6):
        exact, total = torch.zeros(NUM), torch.zeros(NUM)
        for rank in range(ranks):
            gradient = torch.randn(NUM, generator=draw)
            exact += gradient
            told, left[rank] = coded(CODES["bf16"], left[rank] + gradient)
            total += told
        if ranks > 2:
            total, left_of_sums = coded(CODES["bf16"], left_of_sums + total)
        errors.append(float((total - exact).norm() / exact.norm()))
    assert min(errors) > 1e-3
    assert all(watch.add_sample(error) is None for error in errors)
    assert any(watch.add_sample(2 * error) is not None for error in errors)


def test_bf16_rounding_equals_torch():
    values = torch.randn(NUM, generator=torch.Generator().manual_seed(3))
    told, left = coded(CODES["bf16"], values)
    assert torch.equal(told, values.bfloat16().float())
    assert torch.equal(left, values - told)


@pytest.mark.parametrize("name", CODES)
def test_sender_decodes_same_bits_as_receivers(name):
    """Else two replicas would add up other numbers. A NaN and an infinity too: the loss tells of them."""
    code = CODES[name]
    values = torch.randn(NUM, generator=torch.Generator().manual_seed(3)) * 10.0 ** torch.randint(-30, 5, (NUM,))
    values[7], values[70_000] = float("nan"), float("inf")
    payload, left, kept = torch.zeros(code.payload_bytes(NUM), dtype=torch.uint8), values.clone(), torch.empty(NUM)
    code.encode(left, payload, decoded_out=kept)
    told = torch.zeros(NUM)
    code.decode_add(payload, told)
    assert torch.equal(told.isfinite(), kept.isfinite())
    finite = kept.isfinite()
    assert torch.equal(told[finite], kept[finite])
