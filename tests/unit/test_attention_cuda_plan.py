"""How a call to the CUDA kernels is split: the arithmetic that they do on the device, done here."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloverinfer import _native
from cloverinfer.attention import auto_backend, create_backend
from cloverinfer.attention.cuda import CudaAttention, missing
from cloverinfer.config.cluster import ClusterConfig, ModelConfig
from cloverinfer.core.errors import ConfigError
from cloverinfer.kvcache.layout import KVSpec, PoolLayout
from cloverinfer.nodes.local import make_backend
from cloverinfer.orchestrator.layout import node_configs, node_names
from cloverinfer.orchestrator.placement import on_this_host

TILE = 16


@dataclass(frozen=True)
class Piece:
    range: int
    row: int
    head: int
    col_tile: int
    begin: int
    end: int
    parts: int
    slot: int
    slots: list[int]
    counter: int


def plan(
    lengths: list[int], counts: list[int] | None = None, blocks: int = 132, **fields: int
) -> list[Piece]:
    settings = {
        "group": 4,
        "cols": 8,
        "kv_heads": 2,
        "window": 0,
        "fixed_tiles": 0,
        "min_units": 8,
        "tile": TILE,
    }
    pieces = _native.cuda_attention_plan(
        lengths=lengths, counts=counts or [1] * len(lengths), blocks=blocks, **(settings | fields)
    )
    return [Piece(*piece) for piece in pieces]


def items(pieces: list[Piece]) -> dict[tuple[int, int, int], list[Piece]]:
    found: dict[tuple[int, int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.row, piece.head, piece.col_tile].append(piece)
    return found


def check(pieces: list[Piece], lengths: list[int], counts: list[int], cols: int, window: int):
    """Every tile of every item once, in order; slots and counters of no two items the same."""
    found, slots, counters = items(pieces), set(), set()
    expected = {
        (row, head, tile)
        for row, count in enumerate(counts)
        for head in range(2)
        for tile in range(-(-count * 4 // cols))
        if lengths[row]
    }
    assert set(found) == expected
    for (row, _, _), parts in found.items():
        first = max(0, lengths[row] - counts[row] - window + 1) // TILE if window else 0
        assert parts[0].begin == first
        assert parts[-1].end == -(-lengths[row] // TILE)
        for one, after in itertools.pairwise(parts):
            assert one.end == after.begin
        assert [part.slot for part in parts if part.parts > 1] == (
            parts[0].slots if len(parts) > 1 else []
        )
        assert {part.parts for part in parts} == {len(parts)}
        if len(parts) > 1:
            assert not slots & set(parts[0].slots)
            slots |= set(parts[0].slots)
            assert len({part.counter for part in parts}) == 1
            assert parts[0].counter not in counters
            counters.add(parts[0].counter)
    return slots, counters


@given(
    rows=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 20)), min_size=1, max_size=12),
    cols=st.sampled_from([8, 16, 32]),
    window=st.sampled_from([0, 1, 37, 1000]),
    blocks=st.sampled_from([1, 7, 132]),
    min_units=st.sampled_from([1, 8]),
    fixed_tiles=st.sampled_from([0, 8, 64]),
)
def test_pieces_cover_the_work_once(
    rows: list[tuple[int, int]],
    cols: int,
    window: int,
    blocks: int,
    min_units: int,
    fixed_tiles: int,
) -> None:
    lengths = [length for length, _ in rows]
    counts = [min(count, length) for length, count in rows]
    pieces = plan(
        lengths,
        counts,
        blocks,
        cols=cols,
        window=window,
        min_units=min_units,
        fixed_tiles=fixed_tiles,
    )
    slots, counters = check(pieces, lengths, counts, cols, window)
    if not fixed_tiles:
        assert all(slot < 2 * blocks for slot in slots | counters), "past the workspace"
    assert {piece.range for piece in pieces} <= set(range(blocks))


def test_ranges_are_of_equal_length() -> None:
    pieces = plan([1, 100_000, 77, 5000, 1000], kv_heads=8)
    tiles: dict[int, int] = defaultdict(int)
    for piece in pieces:
        tiles[piece.range] += piece.end - piece.begin
    assert max(tiles.values()) - min(tiles.values()) <= 1
    assert set(tiles) == set(range(132))


@pytest.mark.parametrize(
    ("batch", "context", "ranges", "parts"),
    [(1, 65536, 128, 16), (8, 8192, 128, 2), (32, 1024, 128, 1), (128, 1024, 128, 1)],
)
def test_rows_of_one_length_have_the_fewest_parts(
    batch: int, context: int, ranges: int, parts: int
) -> None:
    pieces = plan([0, *[context] * batch, 0], kv_heads=8)
    assert len({piece.range for piece in pieces}) == ranges
    assert {piece.parts for piece in pieces} == {parts}
    assert len(pieces) == batch * 8 * parts


def test_rows_of_other_lengths_leave_no_block_idle() -> None:
    assert len({piece.range for piece in plan([1024] * 31 + [1000], kv_heads=8)}) == 132
    assert len({piece.range for piece in plan([1024] * 24, kv_heads=8)}) == 132


def test_a_small_call_uses_few_blocks() -> None:
    assert {piece.range for piece in plan([1024], kv_heads=8)} == set(range(64))


def test_rows_without_tokens_have_no_work() -> None:
    assert {piece.row for piece in plan([0, 40, 0])} == {1}
    assert plan([0, 0]) == []


def test_fixed_splits_depend_on_the_row_alone() -> None:
    def cuts(lengths: list[int], row: int) -> list[tuple[int, int, int]]:
        pieces = plan(lengths, fixed_tiles=8, min_units=1)
        return [(p.head, p.begin, p.end) for p in pieces if p.row == row]

    assert cuts([3000], 0) == cuts([17, 3000, 900], 1)
    assert all(begin % 8 == 0 for _, begin, _ in cuts([3000], 0))


def test_lengths_and_counts_must_match() -> None:
    with pytest.raises(ValueError, match="one size"):
        plan([1, 2], [1])


def test_nodes_on_the_cpu_take_the_cpu_backend() -> None:
    assert auto_backend("cpu") == "cpu"
    assert auto_backend("cuda") == ("cpu" if missing() else "cuda")


def test_batch_invariance_reaches_the_backend_and_is_said_to_change_nothing_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = ClusterConfig(
        executor="local", transport="inproc", threads=1, device="cpu", batch_invariant=True
    )
    names = [name for group in node_names(cluster).values() for name in group]
    config = node_configs(cluster, ModelConfig(), on_this_host(names))[0]
    assert config.batch_invariant
    assert config.prompt_attention == "auto"
    backend = create_backend("cuda", 1, batch_invariant=True)
    assert isinstance(backend, CudaAttention)
    assert backend.batch_invariant
    spec = KVSpec(kv_heads=1, k_dim=64, v_dim=64, dtype="float32", scale=1.0)
    make_backend(config, PoolLayout((spec,), 16, 2), 1, None).close()
    assert "cluster.batch_invariant changes nothing for attention backend cpu" in caplog.text
    assert "prompt_attention" not in caplog.text


def test_who_attends_over_prompts_reaches_the_backend_and_is_said_to_change_nothing_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = ClusterConfig(
        executor="local", transport="inproc", threads=1, device="cpu", prompt_attention="own"
    )
    names = [name for group in node_names(cluster).values() for name in group]
    config = node_configs(cluster, ModelConfig(), on_this_host(names))[0]
    backend = create_backend("cuda", 1, prompt_attention=config.prompt_attention)
    assert isinstance(backend, CudaAttention)
    assert backend.prompt_attention == "own"
    spec = KVSpec(kv_heads=1, k_dim=64, v_dim=64, dtype="float32", scale=1.0)
    make_backend(config, PoolLayout((spec,), 16, 2), 1, None).close()
    assert "cluster.prompt_attention changes nothing for attention backend cpu" in caplog.text


@pytest.mark.skipif(not missing(), reason="a GPU is here")
def test_without_a_gpu_the_backend_says_why() -> None:
    spec = KVSpec(kv_heads=1, k_dim=64, v_dim=64, dtype="bfloat16", scale=1.0)
    with pytest.raises(ConfigError, match="attention backend cuda cannot be used: "):
        create_backend("cuda").allocate(PoolLayout((spec,), 16, 2), 4)


@pytest.mark.parametrize(("driver", "usable"), [(12080, False), (13000, True), (13020, True)])
def test_a_driver_older_than_the_kernels_is_told(
    driver: int, usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "CUDA_BUILT", True)
    monkeypatch.setattr(_native, "cuda_versions", lambda: (driver, 13000), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    reason = missing()
    assert (reason == "") == usable
    if not usable:
        assert reason.startswith("the driver serves CUDA 12 and these kernels were built with CUD")
        assert reason.endswith("install a newer driver, or build again with nvcc 12")


@pytest.mark.skipif(not _native.CUDA_BUILT, reason="this build has no CUDA kernels")
def test_a_build_with_kernels_counts_gpus_without_a_driver_too() -> None:
    assert _native.cuda_device_count() == (
        torch.cuda.device_count() if torch.cuda.is_available() else 0
    )


def prompt_plan(lengths: list[int], counts: list[int], **fields: int):
    settings = {"group": 4, "kv_heads": 2, "window": 0, "tile": 128, "blocks": 132, "narrow": 2}
    return _native.cuda_prompt_plan(lengths=lengths, counts=counts, **(settings | fields))


@given(
    rows=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 900)), min_size=1, max_size=8),
    group=st.sampled_from([1, 3, 4, 16]),
    window=st.sampled_from([0, 1, 300]),
    blocks=st.sampled_from([1, 7, 132]),
)
def test_parts_of_prompts_cover_what_each_tile_of_columns_sees(
    rows: list[tuple[int, int]], group: int, window: int, blocks: int
) -> None:
    lengths = [length for length, _ in rows]
    counts = [max(1, min(count, length)) for length, count in rows]
    splits, parts = prompt_plan(lengths, counts, group=group, window=window, blocks=blocks)
    assert len(parts) <= 2 * blocks or splits == 1, "past the workspace"
    found: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for row, head, col_tile, part, begin, end in parts:
        assert part == len(found[row, head, col_tile])
        found[row, head, col_tile].append((begin, end))
    expected = {
        (row, head, tile)
        for row, count in enumerate(counts)
        for head in range(2)
        for tile in range(-(-count * group // 128))
        if lengths[row] and count > 2
    }
    assert set(found) == expected
    for (row, _, tile), ranges in found.items():
        first = lengths[row] - counts[row] + tile * 128 // group
        last = lengths[row] - counts[row] + min(counts[row] - 1, (tile * 128 + 127) // group)
        assert ranges[0][0] == (max(0, first - window + 1) // 128 if window else 0)
        assert ranges[-1][1] == last // 128 + 1
        assert len(ranges) == splits
        for one, after in itertools.pairwise(ranges):
            assert one[1] == after[0]


@pytest.mark.parametrize(
    ("length", "count", "splits"),
    [
        (8192, 512, 1),  # 128 items of 132 blocks
        (8192, 256, 2),  # 64
        (8192, 128, 4),  # 32
        (1024, 64, 1),  # 16 of 8 tiles: merging costs what it saves
        (512, 512, 1),
        (8192, 2048, 1),  # 512: four waves
    ],
)
def test_few_items_are_split(length: int, count: int, splits: int) -> None:
    assert prompt_plan([length], [count], kv_heads=8)[0] == splits


def test_the_longest_items_come_first() -> None:
    _, parts = prompt_plan([2000], [2000])
    ends = [end for *_, end in parts]
    assert ends == sorted(ends, reverse=True)


def test_rows_of_few_tokens_are_not_the_prompt_kernels() -> None:
    assert {part[0] for part in prompt_plan([900, 900, 0, 900], [1, 3, 1, 2])[1]} == {1}


@pytest.mark.parametrize(
    ("kib", "fixed", "stage", "stages"),
    [
        (227, 40_000, 57_344, 3),
        (163, 40_000, 57_344, 2),
        (99, 40_000, 57_344, 1),
        (99, 101_000, 16_384, 0),
        (99, 102_000, 0, 0),
        (227, 164_000, 0, 1),
        (227, 1000, 1000, 4),
    ],
)
def test_tiles_in_flight_are_what_shared_memory_has_room_for(
    kib: int, fixed: int, stage: int, stages: int
) -> None:
    found = _native.cuda_stages_within(limit=kib << 10, fixed_bytes=fixed, stage_bytes=stage)
    assert found == stages
