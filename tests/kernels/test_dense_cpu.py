"""The C++ stages of the dense half, product by product against float64 arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from cloverinfer import _native
from cloverinfer.models.base import ModelArch
from cloverinfer.models.linear import Linear
from cloverinfer.models.native import LayerWeights, ModelWeights, NativeStages
from cloverinfer.models.packed import GROUP, Codes, Format, Packing, QuantizedLinear, pack
from cloverinfer.models.rope import rope_table

pytestmark = pytest.mark.usefixtures("one_torch_thread")

ISAS = _native.dense_isas()
BF16_STEP = 2.0**-8
"""Largest rounding error of bfloat16, relative."""


def make_arch(**fields: object) -> ModelArch:
    shape = {
        "family": "llama",
        "num_layers": 1,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 80,
        "max_position": 128,
        "norm_eps": 1e-5,
    }
    return ModelArch(**(shape | fields))  # type: ignore[arg-type]


ARCHES = {
    "whole vectors": make_arch(),
    "odd sizes": make_arch(
        hidden_size=75,
        num_heads=3,
        num_kv_heads=1,
        head_dim=10,
        intermediate_size=117,
        vocab_size=53,
    ),
    "smaller than a vector": make_arch(
        hidden_size=5, num_heads=1, num_kv_heads=1, head_dim=2, intermediate_size=3, vocab_size=7
    ),
    "many parts": make_arch(
        hidden_size=264, num_heads=9, num_kv_heads=3, head_dim=40, intermediate_size=600
    ),
}


def make_weights(arch: ModelArch, bias: bool, qk_norm: bool) -> ModelWeights:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul(shape[-1] ** -0.5).bfloat16()

    def norm(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator).add(0.5).bfloat16()

    def linear(outputs: int, inputs: int) -> Linear:
        return Linear(random(outputs, inputs), random(outputs) * 3 if bias else None)

    heads, dim, hidden = arch.num_heads + arch.num_kv_heads, arch.head_dim, arch.hidden_size
    layers = [
        LayerWeights(
            input_norm=norm(hidden),
            qkv=linear((heads + arch.num_kv_heads) * dim, hidden),
            qk_norm_hd=norm(heads, dim) if qk_norm else None,
            out=linear(hidden, arch.num_heads * dim),
            post_norm=norm(hidden),
            gate_up=linear(2 * arch.intermediate_size, hidden),
            down=linear(hidden, arch.intermediate_size),
        )
        for _ in range(arch.num_layers)
    ]
    embedding = random(arch.vocab_size, hidden) * hidden**0.5
    return ModelWeights(embedding, layers, norm(hidden), Linear(random(arch.vocab_size, hidden)))


class Inputs:
    """Random rows of a step."""

    def __init__(self, arch: ModelArch, tokens: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.ids = torch.randint(arch.vocab_size, (tokens,), generator=generator)
        positions = torch.randint(arch.max_position, (tokens,), generator=generator)
        self.cos, self.sin = (
            table[positions]
            for table in rope_table(arch.head_dim, 1e4, None, arch.max_position, torch.bfloat16)
        )
        self.hidden = torch.randn(tokens, arch.hidden_size, generator=generator)
        attended = torch.randn(tokens, arch.num_heads, arch.head_dim, generator=generator)
        self.attended = attended.bfloat16()
        self.start = (None, self.cos, self.sin)
        """The carry before stage 0."""

    @property
    def carry(self) -> tuple[torch.Tensor, ...]:
        return self.hidden, self.cos, self.sin


# -- the reference, in float64 except where the kernels round to bfloat16 between products


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.float().bfloat16().double()


class Dequantized(Linear):
    """A quantised product's weight as plain numbers, in float64."""


def encoded(x: torch.Tensor) -> torch.Tensor:
    """Rows as the kernels take them over quantised weights: whole multiples of a power of two, of
    which the largest of a group has between 2^14 and 2^15."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    _, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-112))
    scale = torch.ldexp(torch.ones_like(groups[..., :1]), exponent - 15)
    return (groups / scale).round().mul(scale).flatten(1)[:, : x.shape[1]]


def product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    x = encoded(x) if isinstance(linear, Dequantized) else x
    out = x @ linear.weight.double().T
    return out if linear.bias is None else out + linear.bias.double()


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def plain_start(
    arch: ModelArch, layer: LayerWeights, hidden: torch.Tensor, inputs: Inputs
) -> torch.Tensor:
    """Queries, keys and values, ``[t, h + 2n, d]``."""
    x = rounded(normed(hidden.double(), layer.input_norm, arch.norm_eps))
    qkv = product(layer.qkv, x).view(len(x), -1, arch.head_dim)
    rotated = arch.num_heads + arch.num_kv_heads
    qk = qkv[:, :rotated]
    if layer.qk_norm_hd is not None:
        qk = normed(qk, layer.qk_norm_hd, arch.norm_eps)
    turned = qk.roll(arch.head_dim // 2, -1)
    qk = qk * inputs.cos.double() + turned * inputs.sin.double()
    return torch.cat((qk, qkv[:, rotated:]), 1)


def plain_end(arch: ModelArch, layer: LayerWeights, inputs: Inputs) -> torch.Tensor:
    attended = inputs.attended.double().flatten(1)
    hidden = inputs.hidden.double() + product(layer.out, attended)
    x = rounded(normed(hidden, layer.post_norm, arch.norm_eps))
    gate, up = product(layer.gate_up, x).chunk(2, -1)
    return hidden + product(layer.down, rounded(gate * gate.sigmoid() * up))


def near(actual: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    """Within ``relative`` of the rows' size: sums of many terms err by the terms' size."""
    size = expected.abs().amax(-1, keepdim=True).clamp_min(1.0)
    assert ((actual.double() - expected).abs() / size).max() <= relative


def check_stages(arch: ModelArch, weights: ModelWeights, native: NativeStages, tokens: int) -> None:
    inputs, layer = Inputs(arch, tokens), weights.layers[0]
    heads, rotated = arch.num_heads, arch.num_heads + arch.num_kv_heads
    q, k, v, (hidden, *_) = native.stage(0, None, inputs.start, inputs.ids)
    assert q is not None
    assert k is not None
    assert v is not None
    assert torch.equal(hidden, weights.embedding[inputs.ids].float())
    expected = plain_start(arch, layer, hidden, inputs)
    # A step of bfloat16 is lost where an operand rounds to the neighbour of the reference's.
    near(q, expected[:, :heads], 2 * BF16_STEP)
    near(k, expected[:, heads:rotated], 2 * BF16_STEP)
    near(v, expected[:, rotated:], 2 * BF16_STEP)
    *none, (hidden,) = native.stage(1, inputs.attended, inputs.carry, None)
    assert none == [None, None, None]
    near(hidden, plain_end(arch, layer, inputs), BF16_STEP / 2)
    logits = native.logits(inputs.hidden)
    x = rounded(normed(inputs.hidden.double(), weights.final_norm, arch.norm_eps))
    near(logits, product(weights.head, x), BF16_STEP / 2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ARCHES)
@pytest.mark.parametrize("extras", [False, True])
def test_stages_equal_float64(isa: str, name: str, extras: bool) -> None:
    arch = ARCHES[name]
    weights = make_weights(arch, bias=extras, qk_norm=extras)
    native = NativeStages(arch, weights, 2, isa)
    assert native.isa == isa
    for tokens in (1, 2, 3, 5, 7, 13, 16, 64, 200):
        check_stages(arch, weights, native, tokens)


def test_every_number_of_tokens() -> None:
    arch = ARCHES["odd sizes"]
    weights = make_weights(arch, bias=True, qk_norm=False)
    native = NativeStages(arch, weights, 1)
    for tokens in [*range(1, 66), 95, 96, 97, 193, 300]:
        check_stages(arch, weights, native, tokens)


def run_stages(native: NativeStages, inputs: Inputs, rows: slice) -> list[torch.Tensor]:
    """All that two stages and the head give for some rows of ``inputs``."""
    cos, sin = inputs.cos[rows], inputs.sin[rows]
    q, k, v, (first, *_) = native.stage(0, None, (None, cos, sin), inputs.ids[rows])
    assert q is not None
    assert k is not None
    assert v is not None
    carry = (inputs.hidden[rows], cos, sin)
    *_, (hidden,) = native.stage(1, inputs.attended[rows], carry, None)
    return [q, k, v, first, hidden, native.logits(hidden)]


@pytest.mark.parametrize("isa", ISAS)
def test_results_depend_neither_on_threads_nor_on_the_batch(isa: str) -> None:
    arch = ARCHES["many parts"]
    weights = make_weights(arch, bias=True, qk_norm=True)
    inputs = Inputs(arch, 130)
    expected = run_stages(NativeStages(arch, weights, 1, isa), inputs, slice(0, 130))
    for threads in (1, 2, 3, 5):
        native = NativeStages(arch, weights, threads, isa)
        for first, last in ((0, 130), (3, 4), (40, 42), (5, 8), (5, 21), (0, 63), (66, 130)):
            rows = slice(first, last)
            for whole, part in zip(expected, run_stages(native, inputs, rows), strict=True):
                assert torch.equal(whole[rows], part)


def test_callers_on_several_threads_do_not_disturb_each_other() -> None:
    """Two models share the workers; each is also called from two threads."""
    arch = ARCHES["many parts"]
    models = [
        NativeStages(arch, make_weights(arch, bias=True, qk_norm=qk), 2) for qk in (True, False)
    ]
    inputs = Inputs(arch, 8)
    expected = [run_stages(native, inputs, slice(0, 8)) for native in models]

    def repeat(i: int) -> bool:
        results = [run_stages(models[i % 2], inputs, slice(0, 8)) for _ in range(50)]
        return all(
            torch.equal(a, b)
            for result in results
            for a, b in zip(expected[i % 2], result, strict=True)
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(repeat, range(4)))


def test_inputs_are_left_alone_and_may_have_gaps() -> None:
    arch = ARCHES["whole vectors"]
    native = NativeStages(arch, make_weights(arch, bias=False, qk_norm=False), 2)
    inputs = Inputs(arch, 6)
    expected = run_stages(native, inputs, slice(0, 6))
    wide = torch.zeros(6, arch.num_heads + 3, arch.head_dim, dtype=torch.bfloat16)
    wide[:, : arch.num_heads] = inputs.attended
    before = inputs.hidden.clone()
    *_, (hidden,) = native.stage(1, wide[:, : arch.num_heads], inputs.carry, None)
    assert torch.equal(hidden, expected[4])
    assert torch.equal(inputs.hidden, before)
    across = inputs.attended.transpose(1, 2).contiguous().transpose(1, 2)
    *_, (hidden,) = native.stage(1, across, inputs.carry, None)
    assert torch.equal(hidden, expected[4])


@pytest.mark.parametrize("gate", [200.0, -20.0, -200.0])
@pytest.mark.parametrize("isa", ISAS)
def test_large_gates_saturate(gate: float, isa: str) -> None:
    """SiLU of -200 is 0 and of 200 is 200, without infinities on the way."""
    arch = ARCHES["whole vectors"]
    weights = make_weights(arch, bias=True, qk_norm=False)
    bias = weights.layers[0].gate_up.bias
    assert bias is not None
    bias[: arch.intermediate_size] = gate
    check_stages(arch, weights, NativeStages(arch, weights, 1, isa), 3)


def test_queries_keys_and_values_go_where_they_are_wanted() -> None:
    arch = ARCHES["whole vectors"]
    native = NativeStages(arch, make_weights(arch, bias=False, qk_norm=False), 2)
    inputs = Inputs(arch, 3)
    q, k, v, _ = native.stage(0, None, inputs.start, inputs.ids)
    rows = torch.full(
        (3, 5 + arch.num_heads + 2 * arch.num_kv_heads, arch.head_dim), 7.0
    ).bfloat16()
    places = torch.split(rows, [arch.num_heads, arch.num_kv_heads, arch.num_kv_heads, 5], 1)
    *given, _ = native.stage(0, None, inputs.start, inputs.ids, places[:3])
    for place, back, value in zip(places, given, (q, k, v), strict=False):
        assert back is place
        assert torch.equal(place, value)
    assert (places[3] == 7).all()


def test_what_is_out_of_range_is_refused() -> None:
    arch = ARCHES["whole vectors"]
    weights = make_weights(arch, bias=False, qk_norm=False)
    with pytest.raises(ValueError, match="portable"):
        NativeStages(arch, weights, 1, "neon9")
    with pytest.raises(ValueError, match="threads"):
        NativeStages(arch, weights, 0)
    native = NativeStages(arch, weights, 1)
    inputs = Inputs(arch, 2)
    for bad in (-1, arch.vocab_size):
        inputs.ids[1] = bad
        with pytest.raises(ValueError, match=f"token {bad} is outside the vocabulary"):
            native.stage(0, None, inputs.start, inputs.ids)
    with pytest.raises(ValueError, match="no such stage"):
        native._native.stage(2, 2, 0, *(inputs.hidden.data_ptr(),) * 12)
    with pytest.raises(ValueError, match="attended is missing"):
        native._native.stage(1, 2, 0, 0, 64, *(inputs.hidden.data_ptr(),) * 10)


# -- quantised weights


def quantize_int8(weight_oi: torch.Tensor) -> Codes:
    """What the native side makes of a plain matrix."""
    weight = torch.nn.functional.pad(weight_oi.float(), (0, -weight_oi.shape[1] % GROUP))
    grouped = weight.unflatten(1, (-1, GROUP))
    scales = (grouped.abs().amax(-1) / 127).half()
    factor = torch.where(scales > 0, 1 / scales.float(), 0.0)[..., None]
    codes = (grouped * factor).round().clamp(-127, 127).char()
    return Codes(Format.INT8, codes.flatten(1), scales, None)


def random_int4(outputs: int, inputs: int, generator: torch.Generator) -> Codes:
    def halves(middle: float) -> torch.Tensor:
        noise = torch.rand((outputs, inputs // GROUP), generator=generator)
        return ((middle + 0.2 * noise) * inputs**-0.5).half()

    codes = torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    return Codes(Format.INT4, codes, halves(0.2), halves(-1.7))


def over_linears(weights: ModelWeights, change: Callable[[Linear], Linear]) -> ModelWeights:
    layers = [
        replace(layer, **{n: change(getattr(layer, n)) for n in ("qkv", "out", "gate_up", "down")})
        for layer in weights.layers
    ]
    return replace(weights, layers=layers, head=change(weights.head))


def dequantized(linear: Linear) -> Linear:
    """The same product with a plain weight in float64."""
    quantized = isinstance(linear, QuantizedLinear)
    codes = linear.codes if quantized else quantize_int8(linear.weight)
    return Dequantized(codes.dequantized()[:, : linear.shape[1]], linear.bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ARCHES)
def test_int8_stages_equal_float64_over_the_dequantized_weights(isa: str, name: str) -> None:
    arch = ARCHES[name]
    weights = make_weights(arch, bias=True, qk_norm=False)
    native = NativeStages(arch, weights, 2, isa, int8=True)
    for tokens in (1, 2, 5, 16, 97, 200):
        check_stages(arch, over_linears(weights, dequantized), native, tokens)


WHOLE_GROUPS = {
    "small": ARCHES["whole vectors"],
    "odd panels": make_arch(
        hidden_size=288, num_heads=9, num_kv_heads=3, head_dim=32, intermediate_size=608
    ),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", WHOLE_GROUPS)
def test_int4_stages_equal_float64_over_the_dequantized_weights(isa: str, name: str) -> None:
    arch, generator = WHOLE_GROUPS[name], torch.Generator().manual_seed(5)

    def int4(linear: Linear) -> Linear:
        return QuantizedLinear(random_int4(*linear.shape, generator), linear.bias)

    weights = over_linears(make_weights(arch, bias=True, qk_norm=True), int4)
    native = NativeStages(arch, weights, 2, isa)
    for tokens in (1, 2, 5, 16, 97, 200):
        check_stages(arch, over_linears(weights, dequantized), native, tokens)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_products_are_exact_but_for_the_sums_in_float32(isa: str, kind: str) -> None:
    """Rows of +-1 pass the norm unrounded, so only adding up errs: 1e-6 of all terms' size."""
    arch, generator = WHOLE_GROUPS["odd panels"], torch.Generator().manual_seed(6)
    weights = make_weights(arch, bias=False, qk_norm=False)
    weights.final_norm.fill_(1)
    if kind == "int4":
        weights.head = QuantizedLinear(random_int4(*weights.head.shape, generator))
    native = NativeStages(arch, weights, 2, isa, int8=kind == "int8")
    plain = weights.head if kind == "bfloat16" else dequantized(weights.head)
    x = torch.randint(2, (70, arch.hidden_size), generator=generator).mul(2).sub(1)
    expected = x.double() @ plain.weight.double().T
    size = plain.weight.double().abs().sum(1)
    for rows in (x, x[:1], x[:7]):
        actual = native.logits(rows.float()).double()
        assert ((actual - expected[: len(rows)]).abs() / size).max() <= 1e-6


@pytest.mark.parametrize("isa", ISAS)
def test_int8_results_depend_neither_on_threads_nor_on_the_batch(isa: str) -> None:
    arch = ARCHES["many parts"]
    weights = make_weights(arch, bias=True, qk_norm=True)
    inputs = Inputs(arch, 70)
    expected = run_stages(NativeStages(arch, weights, 1, isa, int8=True), inputs, slice(0, 70))
    native = NativeStages(arch, weights, 3, isa, int8=True)
    for rows in (slice(0, 70), slice(3, 4), slice(5, 21)):
        for whole, part in zip(expected, run_stages(native, inputs, rows), strict=True):
            assert torch.equal(whole[rows], part)


PANEL = 16
"""Outputs of a panel."""


def panels_of(codes: Codes, folds: int) -> torch.Tensor:
    """What the native side is to write, by its header's description."""
    more = (0, 0, 0, -(codes.codes_oi.shape[0] // folds) % PANEL)

    def grouped(values_ox: torch.Tensor) -> torch.Tensor:
        """``[panel, fold, g, o, ...]``, the folds' panels in turns."""
        parts = [torch.nn.functional.pad(part, more) for part in values_ox.chunk(folds)]
        shape = (-1, PANEL, codes.scales_og.shape[1], values_ox.shape[1])
        whole = torch.stack([part.view(-1, PANEL, part.shape[1]) for part in parts], 1)
        return whole.unflatten(3, (shape[2], -1)).transpose(2, 3).contiguous()

    pairs = grouped(codes.codes_oi).view(torch.uint8).unflatten(4, (-1, 2)).transpose(3, 4)
    if codes.format is Format.INT4:
        pairs = pairs[..., ::2, :, :] | pairs[..., 1::2, :, :] << 4
    stored = [grouped(codes.scales_og).view(torch.uint8).flatten(3)]
    if codes.minima_og is not None:
        stored.append(grouped(codes.minima_og).view(torch.uint8).flatten(3))
    return torch.cat((*stored, pairs.flatten(3)), 3).flatten()


def packed(linear: Linear, folds: int, int8: bool = False) -> torch.Tensor:
    outputs, inputs = linear.shape
    kind = linear.codes.format if isinstance(linear, QuantizedLinear) else Format.INT8
    size = folds * _native.dense_packed_bytes(kind, outputs // folds, inputs)
    panels = torch.empty(size, dtype=torch.uint8)
    pack(linear, folds, Packing(2, int8), panels)
    return panels


def test_int8_panels_are_those_of_the_codes() -> None:
    """Also where a group is all zeros, tiny, or holds its largest weight at both ends."""
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn((37, 100), generator=generator).bfloat16()
    weight[3, :32] = 0
    weight[4, 32:64] *= 1e-9
    weight[5, 64], weight[5, 65] = -3, 3
    made = packed(Linear(weight), 1, int8=True)
    codes = quantize_int8(weight)
    assert torch.equal(made, panels_of(codes, 1))
    assert torch.equal(made, packed(QuantizedLinear(codes), 1))
    with pytest.raises(ValueError, match="int4 is packed from its codes only"):
        _native.dense_pack(threads=1, format=2, weight=64, size=(1, 1, 1), to=64)
    with pytest.raises(ValueError, match="whole groups"):
        _native.dense_pack_codes(threads=1, format=1, codes=(64, 64, 0), size=(1, 1, 1), to=64)
    with pytest.raises(ValueError, match="no codes"):
        _native.dense_pack_codes(threads=1, format=0, codes=(64, 64, 0), size=(1, 32, 1), to=64)


@pytest.mark.parametrize("folds", [1, 2])
def test_int4_panels_are_those_of_the_codes(folds: int) -> None:
    codes = random_int4(38, 96, torch.Generator().manual_seed(9))
    assert torch.equal(packed(QuantizedLinear(codes), folds), panels_of(codes, folds))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_are_multiplied_as_they_are_encoded(isa: str, kind: str) -> None:
    """Attended rows come in unrounded; numbers far apart in one group, zeros, subnormals."""
    arch, generator = WHOLE_GROUPS["odd panels"], torch.Generator().manual_seed(10)

    def quantized(linear: Linear) -> Linear:
        if kind == "int8":
            return QuantizedLinear(quantize_int8(linear.weight))
        return QuantizedLinear(random_int4(*linear.shape, generator))

    plain = make_weights(arch, bias=False, qk_norm=False)
    weights = over_linears(plain, quantized)
    down = weights.layers[0].down.codes  # type: ignore[attr-defined]
    down.scales_og.zero_()
    if down.minima_og is not None:
        down.minima_og.zero_()
    native = NativeStages(arch, weights, 2, isa)
    inputs = Inputs(arch, 7)
    inputs.hidden.zero_()
    spread = 2.0 ** -torch.randint(25, inputs.attended.shape, generator=generator)
    inputs.attended = (inputs.attended * spread).bfloat16()
    inputs.attended[2] = 0
    inputs.attended[3] *= 1e-38
    *_, (hidden,) = native.stage(1, inputs.attended, inputs.carry, None)
    x = inputs.attended.double().flatten(1)
    out = dequantized(weights.layers[0].out)
    allowed = 2.0**-20 * (x.abs() @ out.weight.double().abs().T) + 1e-38
    assert ((hidden.double() - product(out, x)).abs() <= allowed).all()
    largest = x.abs().unflatten(1, (-1, GROUP)).amax(-1).repeat_interleave(GROUP, 1)
    assert ((encoded(x) - x).abs() <= 2.0**-15 * largest + 2.0**-127).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_so_and_alone(isa: str, bad: float) -> None:
    arch = WHOLE_GROUPS["odd panels"]
    native = NativeStages(arch, make_weights(arch, False, False), 2, isa, int8=True)
    inputs = Inputs(arch, 3)
    good = native.stage(1, inputs.attended, inputs.carry, None)[3][0]
    inputs.attended[1, 0, 0] = bad
    *_, (hidden,) = native.stage(1, inputs.attended, inputs.carry, None)
    assert not hidden[1].isfinite().any()
    assert torch.equal(hidden[::2], good[::2])
