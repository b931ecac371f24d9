"""Blocks of one pool as blocks of another: exact where it can be, refused where it cannot."""

import msgspec
import numpy as np
import pytest
import torch

from cloverinfer.core.errors import ConfigError
from cloverinfer.kvcache.convert import (
    PoolWriter,
    block_parts,
    block_views,
    convert,
    covers_heads,
    gather_tokens,
    needs_conversion,
)
from cloverinfer.kvcache.layout import KVSpec, PoolLayout

SPEC = KVSpec(kv_heads=4, k_dim=8, v_dim=4, dtype="float32", scale=1.0)
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_numpy(tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def same(a, b):
    return np.array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("stored", TORCH)
@pytest.mark.parametrize("wanted", TORCH)
def test_types_are_rounded_as_torch_rounds_them(stored, wanted):
    torch.manual_seed(0)
    special = [0.0, -0.0, 1.0, 65504.0, 70000.0, 1e-8, 3.0e38, float("inf"), -float("inf")]
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]
    given = torch.cat([torch.tensor(special + ties), torch.randn(2000), torch.randn(2000) * 1e-6])
    given = given.to(TORCH[stored])
    made = convert(as_numpy(given), stored, wanted)
    # By way of float32, as a copy between two 16-bit types is anywhere.
    assert same(made, as_numpy(given.float().to(TORCH[wanted])))


@pytest.mark.parametrize("wanted", TORCH)
def test_what_is_no_number_stays_none(wanted):
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFFC00000], np.uint32).view(np.float32)
    made = convert(nans, "float32", wanted)
    values = convert(made, wanted, "float32")
    assert np.isnan(values).all()


def test_int8_keeps_each_token_within_half_a_step():
    rng = np.random.default_rng(0)
    sizes = np.float32([0, 1e-6, 1, 1e5])[:, None, None]
    given = rng.standard_normal((4, 3, 8)).astype(np.float32) * sizes
    packed = convert(given, "float32", "int8")
    assert packed.shape == (4, 3, 8 + 4)
    back = convert(packed, "int8", "float32")
    step = np.abs(given).max(-1, keepdims=True) / 127
    assert (np.abs(back - given) <= step * 0.5001).all()
    assert (back != given).any()
    assert convert(packed, "int8", "int8") is packed
    half = convert(packed, "int8", "bfloat16")
    assert same(half, convert(back, "float32", "bfloat16"))


@pytest.mark.parametrize(("theirs", "mine"), [(4, 8), (8, 4), (1, 16)])
def test_int8_blocks_change_size_bit_for_bit(theirs, mine):
    """Numbers and scales move as they are; from floats they are made on the way."""
    rng = np.random.default_rng(1)
    spec = msgspec.structs.replace(SPEC, dtype="int8")
    count = 11
    tokens = [rng.standard_normal((count, 4, d)).astype(np.float32) for d in (8, 4)]
    pools = []
    for size in (theirs, mine):
        layout = PoolLayout((spec,), size, -(-count // size))
        pool = np.zeros(layout.total_bytes, np.uint8)
        packed = [convert(x, "float32", "int8") for x in tokens]
        PoolWriter(layout, memoryview(pool)).store(0, *packed, np.arange(count), 0)
        pools.append((layout, pool))
    (theirs_layout, given), (layout, wanted) = pools
    memory = given.reshape(theirs_layout.num_blocks, -1)
    moved = np.zeros_like(wanted)
    parts = block_parts(memory, spec, theirs)
    k, v = (gather_tokens(part, 0, count) for part in parts)
    PoolWriter(layout, memoryview(moved)).store(0, k, v, np.arange(count), 0)
    assert np.array_equal(moved, wanted)
    assert wanted.any()


@pytest.mark.parametrize(("theirs", "mine"), [(4, 8), (8, 4), (4, 4), (1, 16), (16, 1)])
def test_tokens_keep_their_values_over_block_sizes_and_heads(theirs, mine):
    """Two senders of two heads each fill blocks of four heads, from the middle of a block on."""
    rng = np.random.default_rng(0)
    part = msgspec.structs.replace(SPEC, kv_heads=2)
    count, skip = 13, min(3, theirs - 1)
    layout = PoolLayout((SPEC, SPEC), mine, 20)
    pool = np.zeros(layout.total_bytes, np.uint8)
    writer = PoolWriter(layout, memoryview(pool))
    blocks = rng.permutation(20)
    at = np.arange(count)
    slots = blocks[at // mine] * mine + at % mine
    wanted = []
    for sender in range(2):
        held = -(-(count + skip) // theirs)
        raw = rng.standard_normal((held, part.token_bytes * theirs // 4), np.float32)
        views = block_views(raw.view(np.uint8), part, theirs)
        assert views[0].base is not None
        k, v = (gather_tokens(view, skip, count) for view in views)
        writer.store(1, k, v, slots, 2 * sender)
        wanted.append((k, v))
        position = skip + 5
        assert same(k[5], np.ascontiguousarray(views[0][position // theirs, :, position % theirs]))
    layer = pool[layout.layer_offsets[1] :].reshape(20, -1)
    keys, values = block_views(layer, SPEC, mine)
    for token in range(count):
        block, offset = blocks[token // mine], token % mine
        for sender, (k, v) in enumerate(wanted):
            heads = slice(2 * sender, 2 * sender + 2)
            assert np.array_equal(keys[block, heads, offset], k[token])
            assert np.array_equal(values[block, heads, offset], v[token])
    touched = np.zeros(pool.size, bool)
    touched[layout.layer_offsets[1] :] = True
    assert not pool[~touched].any(), "another layer was written"
    assert np.count_nonzero(values.any(axis=-1)) == count * 4, "other tokens were written"


def layout_of(block_size=16, layers=2, **changes):
    return PoolLayout((msgspec.structs.replace(SPEC, **changes),) * layers, block_size, 8)


@pytest.mark.parametrize(
    ("sender", "first_head", "differ"),
    [
        (layout_of(), 0, False),
        (layout_of(32), 0, True),
        (layout_of(dtype="bfloat16"), 0, True),
        (layout_of(kv_heads=2), 2, True),
    ],
)
def test_what_converts_is_told_from_what_needs_not(sender, first_head, differ):
    assert needs_conversion(sender, layout_of(), first_head) is differ


@pytest.mark.parametrize(
    ("sender", "first_head", "match"),
    [
        (layout_of(k_dim=16), 0, "k_dim of layer 0 is 16 at the sender and 8 here"),
        (layout_of(v_dim=8), 0, "v_dim of layer 0 is 8 at the sender and 4 here"),
        (layout_of(window=64), 0, "window of layer 0 is 64 at the sender and None here"),
        (layout_of(kv_heads=8), 0, "kv_heads of layer 0 are 0 to 7 at the sender and 4 here"),
        (layout_of(kv_heads=2), 3, "kv_heads of layer 0 are 3 to 4 at the sender and 4 here"),
        (layout_of(layers=3), 0, "3 layers and the receiver 2"),
        (layout_of(dtype="float8_e4m3"), 0, "float8_e4m3"),
    ],
)
def test_what_cannot_convert_is_refused_with_both_values(sender, first_head, match):
    with pytest.raises(ConfigError, match=match):
        needs_conversion(sender, layout_of(), first_head)


def test_heads_are_covered_once():
    assert covers_heads([(0, 4)], 4)
    assert covers_heads([(2, 4), (0, 2)], 4)
    assert not covers_heads([(0, 2)], 4)
    assert not covers_heads([(0, 3), (2, 4)], 4)
    assert not covers_heads([(0, 2), (3, 4)], 4)
