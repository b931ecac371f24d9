"""What the compiler does with graphs: modules of one's own, split and compared bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from cloverinfer.compiler.capture import Captured
from cloverinfer.compiler.check import check_original, check_parts, check_rows
from cloverinfer.compiler.command import splitter_of
from cloverinfer.compiler.find import capture_module
from cloverinfer.compiler.partition import Stage, split_at_attention, split_by
from cloverinfer.compiler.run import Parts
from cloverinfer.compiler.targets import split_ffn
from cloverinfer.core.errors import ConfigError, ModelError

HIDDEN, HEADS, DIM, VOCAB = 32, 4, 8, 50


class Attention(nn.Module):
    """Attention by torch's own call; ``mask``: what it is given, from the number of tokens."""

    def __init__(self, kv_heads: int = HEADS, mask: Callable[[int], Any] | None = None) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.mask = mask
        self.q = nn.Linear(HIDDEN, HEADS * DIM)
        self.kv = nn.Linear(HIDDEN, 2 * kv_heads * DIM)
        self.o = nn.Linear(HEADS * DIM, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, HEADS, DIM).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 2 * self.kv_heads, DIM).transpose(1, 2).chunk(2, dim=1)
        if self.kv_heads != HEADS:
            k, v = (y.repeat_interleave(HEADS // self.kv_heads, dim=1) for y in (k, v))
        mask = None if self.mask is None else self.mask(t)
        o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.o(o.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = Attention(**given)
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Embedding, what ``body`` does with hidden rows, a head tied to the embedding."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(2048, HIDDEN)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(token_ids) + self.place(position_ids)))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def compile_checked(model: nn.Module) -> tuple[Captured, list[Stage]]:
    """Split at attention, every check passed."""
    captured = capture_module(model)
    stages = split_at_attention(captured)
    parts = Parts(captured, stages)
    check_parts(captured, parts)
    check_rows(captured, parts)
    check_original(captured, lambda ids, positions: model(ids[None], positions[None])[0])
    return captured, stages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("wrong", "passes"), [([5], [torch.bfloat16]), (range(20, 37), [])])
def test_what_rounding_may_do_to_a_token_it_does_not_do_to_many(
    dtype: torch.dtype, wrong: Sequence[int], passes: list[torch.dtype]
) -> None:
    model = Model(Block()).to(dtype)
    captured = capture_module(model)

    def original(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits_tc: torch.Tensor = model(ids[None], positions[None])[0]
        if len(ids) > max(wrong):
            logits_tc[wrong] += 0.5 * logits_tc.abs().max()
        return logits_tc

    with (
        contextlib.nullcontext() if dtype in passes else pytest.raises(ModelError, match="differs")
    ):
        check_original(captured, original)


def test_stages_hold_only_their_parameters() -> None:
    captured, stages = compile_checked(Model(Block(), Block()))
    assert len(stages) == 3
    assert [s.carry_out for s in stages[:2]] == [stages[1].carry_in, stages[2].carry_in]
    assert all(len(stage.carry_out) == 1 for stage in stages[:2])  # the residual, nothing else
    first = stages[0].bind(captured.tensors)
    held = {name for name, _ in first.named_buffers()}
    assert held == {name.replace(".", "_") for name in stages[0].weights}
    assert not any("blocks_1" in name or "blocks_0_down" in name for name in held)
    assert "blocks.1.down.weight" in stages[2].weights
    shared = first.get_buffer("embed_weight" if "embed_weight" in held else "head_weight")
    assert shared.data_ptr() in {t.data_ptr() for t in captured.tensors.values()}  # not a copy


def test_tied_embeddings_are_one_weight() -> None:
    model = Model(Block())
    captured, stages = compile_checked(model)
    tied = [n for n, t in captured.tensors.items() if t.data_ptr() == model.embed.weight.data_ptr()]
    assert len(tied) == 1
    assert tied[0] in stages[0].weights
    assert tied[0] in stages[-1].weights


def test_shared_parameters_and_attention_in_a_loop() -> None:
    class Looped(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.blocks[0](x)
            return x

    captured, stages = compile_checked(Looped(Block()))
    assert len(captured.calls) == 3
    assert len(stages) == 4
    assert sum("attention.q" in name for name in captured.tensors) == 2  # weight and bias, once
    assert all("blocks.0.attention.q.weight" in stage.weights for stage in stages[:3])


def test_two_attentions_in_one_block() -> None:
    class Two(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            one, other = self.blocks
            return x + one.attention(x) * other.attention(x)  # neither needs the other

    captured, stages = compile_checked(Two(Block(), Block()))
    assert len(captured.calls) == 2
    assert len(stages) == 3
    assert len(stages[1].carry_out) == 2  # what came of the first goes on, beside x


def test_dropout_left_in_does_nothing() -> None:
    class Dropping(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().body(x), 0.5, training=True)

    captured, _ = compile_checked(Dropping(Block()))
    names = " ".join(str(node.target) for node in captured.graph.nodes)
    assert "dropout" not in names
    assert "rand" not in names


def test_in_place_updates() -> None:
    class InPlace(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            before = x.clone()
            half = x[..., : HIDDEN // 2]
            half.mul_(2.0)  # through a view
            x += self.blocks[0].attention(x)
            x[..., 0].add_(1.0)
            return self.blocks[1](x).add_(before)

    captured, _ = compile_checked(InPlace(Block(), Block()))
    assert not any(str(node.target).endswith("_.Tensor") for node in captured.graph.nodes)


def test_branch_on_a_value_is_refused_with_its_line() -> None:
    class Branching(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:  # the line that is named
                x = x + 1
            return super().body(x)

    with pytest.raises(ModelError, match=r"test_compiler_graphs\.py:\d+: if x\.sum\(\) > 0:"):
        capture_module(Branching(Block()))


def test_code_that_fixes_the_number_of_tokens_is_refused_with_its_line() -> None:
    class Bounded(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            x = x + x.new_ones(1, x.shape[1], 1)
            x = x + x.new_ones(1, 16, 1)[:, : x.shape[1]]  # the line that is named
            return super().body(x)

    with pytest.raises(ModelError, match=r"graphs\.py:\d+: x = x \+ x\.new_ones\(1, 16, 1\)"):
        capture_module(Bounded(Block()))


def test_state_between_calls_is_refused() -> None:
    class Counting(Model):
        def __init__(self, *blocks: nn.Module) -> None:
            super().__init__(*blocks)
            self.register_buffer("calls", torch.zeros(()))

        def body(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1.0)
            return super().body(x) + self.calls

    with pytest.raises(ModelError, match="keeps state between calls"):
        capture_module(Counting(Block()))


def test_tokens_that_see_one_another_outside_of_attention_are_refused() -> None:
    class Mixing(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            x = super().body(x)
            return x + x.mean(dim=1, keepdim=True)

    with pytest.raises(ModelError, match="mixes tokens"):
        compile_checked(Mixing(Block()))


def test_no_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="no attention"):
        capture_module(Model(nn.Linear(HIDDEN, HIDDEN)))


def lower(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def windowed(tokens: int) -> torch.Tensor:
    at = torch.arange(tokens)
    seen = lower(tokens) & (at[:, None] - at < 5)
    return torch.zeros(tokens, tokens).masked_fill(~seen, -torch.inf)


def alibi(tokens: int) -> torch.Tensor:
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    added = slopes[:, None, None] * torch.arange(tokens)
    return added.masked_fill(~lower(tokens), -torch.inf)


def prefix(tokens: int) -> torch.Tensor:
    return lower(tokens) | (torch.arange(tokens) < 3)


def sparse(tokens: int) -> torch.Tensor:
    at = torch.arange(tokens)
    return lower(tokens) & ((at[:, None] - at) % 2 == 0)


@pytest.mark.parametrize(
    ("mask", "window", "slopes"),
    [(lower, None, None), (windowed, 5, None), (alibi, None, (0.5, 0.25, 0.125, 0.0625))],
)
def test_masks_are_read_by_value(mask: Any, window: int | None, slopes: Any) -> None:
    captured, _ = compile_checked(Model(Block(mask=mask)))
    spec = captured.spec_of(captured.calls[0])
    assert (spec.window, spec.alibi_slopes) == (window, slopes)


@pytest.mark.parametrize(
    ("mask", "reason"), [(prefix, "sees later tokens"), (sparse, "neither full nor a window")]
)
def test_masks_that_no_spec_can_say_are_refused(mask: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=f"attention call 0.*{reason}"):
        capture_module(Model(Block(mask=mask)))


def test_repeated_kv_heads_are_stored_once() -> None:
    captured, _ = compile_checked(Model(Block(kv_heads=2)))
    assert captured.spec_of(captured.calls[0]).kv_heads == 2


def test_a_split_between_attention_and_ffn() -> None:
    captured = capture_module(Model(Block(), Block()))
    stages = split_ffn(captured)
    check_parts(captured, Parts(captured, stages))
    assert len(stages) == 5  # attention | FFN | attention | FFN | the head
    for part in (1, 3):
        layer = part // 2
        wanted = {f"blocks.{layer}.{which}" for which in ("up.weight", "down.weight")}
        assert wanted <= set(stages[part].weights)
        assert not any("attention" in name for name in stages[part].weights)
    assert all(len(stage.carry_out) == 1 for stage in stages[:-1])  # only hidden rows cross


def test_a_split_by_a_predicate_of_ones_own() -> None:
    captured = capture_module(Model(Block(), Block()))
    stages = split_by(captured, lambda node: node.target is torch.ops.aten.gelu.default)
    check_parts(captured, Parts(captured, stages))
    assert len(stages) == 5
    assert all(not stage.weights for stage in stages[1::2])


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("json:dumps", "fails on .*: TypeError: .*not JSON"),
        ("json:__name__", "no function"),
        ("json:nothing", "has no attribute 'nothing'"),
        ("nowhere", "No module named 'nowhere'"),
    ],
)
def test_predicates_that_are_none_are_refused(target: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        splitter_of(target)(capture_module(Model(Block())))  # type: ignore[misc]
