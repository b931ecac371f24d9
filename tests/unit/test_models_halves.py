"""Dense half + plain attention == the whole model of transformers, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from cloverinfer.config import ModelConfig
from cloverinfer.core.errors import ModelError
from cloverinfer.models import DenseHalf, kv_specs, llama, load_half, resolve_model
from cloverinfer.models.arch import arch_from_config
from cloverinfer.models.arena import HUGE_PAGE
from cloverinfer.models.llama import LlamaHalf
from cloverinfer.models.rope import context_limit, normalize_scaling

PROMPT = [3, 17, 94, 5, 60, 2, 2, 41, 33, 8, 71, 90, 12]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(folder: Path, **settings: Any) -> DenseHalf:
    config = ModelConfig(model_path=str(folder), **({"dtype": "float32"} | settings))
    return load_half(resolve_model(config))


class Runner:
    """A dense half with the plainest attention: all keys and values, a mask, a softmax."""

    def __init__(self, half: DenseHalf) -> None:
        self.half = half
        self.keys: list[torch.Tensor] = [torch.empty(0)] * half.num_layers
        self.values = list(self.keys)
        self.length = 0

    @torch.inference_mode()
    def forward(self, ids: list[int], rows: list[int] | None = None) -> torch.Tensor:
        """Logits of all rows of ``ids``, or of some, selected before the last stage."""
        half, tokens = self.half, torch.tensor(ids)
        positions = torch.arange(self.length, self.length + len(ids))
        attended, carry = None, None
        for i in range(half.num_layers):
            q, k, v, carry = half.stage(i, attended, carry, tokens, positions)
            assert q is not None
            assert k is not None
            assert v is not None
            attended = self._attend(i, q, k, v, positions)
        self.length += len(ids)
        assert attended is not None
        assert carry is not None
        if rows is not None:
            attended, carry = attended[rows], tuple(part[rows] for part in carry)
            positions = positions[rows]
        *none, carry = half.stage(half.num_layers, attended, carry, None, positions)
        assert none == [None, None, None]
        return half.logits(carry)

    def _attend(
        self, i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        spec = self.half.specs[i]
        assert k.shape[1:] == (spec.kv_heads, spec.k_dim)
        self.keys[i] = torch.cat((self.keys[i].to(k), k)) if self.length else k
        self.values[i] = torch.cat((self.values[i].to(v), v)) if self.length else v
        groups = q.shape[1] // spec.kv_heads
        keys = self.keys[i].repeat_interleave(groups, 1)
        values = self.values[i].repeat_interleave(groups, 1)
        distance = positions[:, None] - torch.arange(keys.shape[0])
        seen = distance >= 0
        if spec.window is not None:
            seen &= distance < spec.window
        scores = torch.einsum("thd,shd->hts", q, keys) * spec.scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, values)

    def greedy(self, ids: list[int], count: int) -> list[int]:
        out: list[int] = []
        logits = self.forward(ids)
        for _ in range(count):
            out.append(int(logits[-1].argmax()))
            logits = self.forward(out[-1:])
        return out


def generate(model: Any, count: int) -> list[int]:
    """What transformers goes on with, greedily; without a mask it would skip padding tokens."""
    ids = torch.tensor([PROMPT])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    return made[0, len(PROMPT) :].tolist()


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3 | {"rope_theta": 500000.0}}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"attention_bias": True}),
    "qwen3-plain": ("qwen3", {}),
    "opt-before": ("opt", {}),
    "opt-after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-plain": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    folder = make_tiny(family, tmp_path, **overrides)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    half = load(folder)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
        made = generate(theirs, 24)
    actual = Runner(half).forward(PROMPT)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    assert Runner(half).greedy(PROMPT, 24) == made
    specs = kv_specs(half.arch, "float32")
    assert specs == half.specs
    windows = {"mistral-window": [5, 5], "qwen2-window": [None, 4]}
    assert [spec.window for spec in specs] == windows.get(case, [None, None])


def test_dynamic_scaling_beyond_the_trained_length_follows_transformers(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    folder = make_tiny("llama", tmp_path, max_position_embeddings=16, rope_scaling=scaling)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        made = generate(theirs, 30)
    half = load(folder)
    assert half.arch.max_position == 64
    assert Runner(half).greedy(PROMPT, 30) == made


def load_both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LlamaHalf, LlamaHalf]:
    """A half whose few tokens go through the native stages, and one that knows PyTorch only."""
    halves = []
    for native in (True, False):
        monkeypatch.setattr(llama, "native_serves", lambda *_, native=native: native)
        half = load(folder, dtype="bfloat16")
        assert isinstance(half, LlamaHalf)
        assert (half._native is not None) == native
        halves.append(half)
    return halves[0], halves[1]


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("opt")])
def test_native_stages_are_as_near_float32_as_pytorch(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, overrides = CASES[case]
    folder = make_tiny(family, tmp_path, **({"initializer_range": 0.1} | overrides))
    native, plain = load_both(folder, monkeypatch)
    reference = Runner(load(folder)).forward(PROMPT)
    error = (Runner(native).forward(PROMPT) - reference).abs().max()
    theirs = (Runner(plain).forward(PROMPT) - reference).abs().max()
    assert 0 < error <= 1.5 * theirs


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_kept_once_and_together(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("llama", tmp_path, tie_word_embeddings=tied)
    native, plain = load_both(folder, monkeypatch)
    assert native._native is not None
    assert not native._weights.layers
    assert torch.equal(native._weights.embedding, plain._weights.embedding)
    panels = native._native.panels
    assert len(panels) == 4 * native.num_layers + 1
    for before, after in pairwise(panels):
        assert after.data_ptr() % 64 == 0
        assert 0 <= after.data_ptr() - before.data_ptr() - before.nbytes < 64
    assert panels[0].data_ptr() % HUGE_PAGE == 0


def test_float32_never_goes_through_the_native_stages(tmp_path: Path) -> None:
    half = load(make_tiny("llama", tmp_path))
    assert isinstance(half, LlamaHalf)
    assert half._native is None


class Alternating(DenseHalf):
    """Stages of two halves of the same weights in turn."""

    def __init__(self, even: LlamaHalf, odd: LlamaHalf) -> None:
        self.arch, self.specs, self.dtype = even.arch, even.specs, even.dtype
        self._halves = (even, odd)

    weight_bytes = 0

    def stage(self, i: int, *args: Any) -> Any:
        return self._halves[i % 2].stage(i, *args)

    def logits(self, carry: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self._halves[1 - len(self.specs) % 2].logits(carry)


def test_either_path_takes_on_where_the_other_left_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("qwen3", tmp_path, initializer_range=0.1, num_hidden_layers=3)
    native, plain = load_both(folder, monkeypatch)
    reference = Runner(load(folder)).forward(PROMPT)
    limit = 1.5 * (Runner(plain).forward(PROMPT) - reference).abs().max()
    for half in (Alternating(native, plain), Alternating(plain, native)):
        assert 0 < (Runner(half).forward(PROMPT) - reference).abs().max() <= limit


def test_a_long_prompt_whose_last_rows_alone_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("llama", tmp_path, initializer_range=0.1)
    native, plain = load_both(folder, monkeypatch)
    ids = [(7 * i) % 96 for i in range(262)]
    rows = [261, 3]
    reference = Runner(load(folder)).forward(ids, rows)
    limit = 1.5 * (Runner(plain).forward(ids)[rows] - reference).abs().max()
    assert 0 < (Runner(native).forward(ids, rows) - reference).abs().max() <= limit


def test_a_step_of_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native, _ = load_both(make_tiny("llama", tmp_path), monkeypatch)
    nothing = torch.empty(0, dtype=torch.int64)
    q, k, v, carry = native.stage(0, None, None, nothing, nothing)
    assert [part.shape[0] for part in (q, k, v, *carry) if part is not None] == [0] * 6


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_rows_may_be_selected_before_the_last_stage(family: str, tmp_path: Path) -> None:
    half = load(make_tiny(family, tmp_path))
    every = Runner(half).forward(PROMPT)
    some = Runner(half).forward(PROMPT, rows=[12, 0, 5])
    torch.testing.assert_close(some, every[[12, 0, 5]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_stay_near_float32(family: str, dtype: str, tmp_path: Path) -> None:
    folder = make_tiny(
        family, tmp_path, **({"init_std": 0.1} if family == "opt" else {"initializer_range": 0.1})
    )
    reference = Runner(load(folder)).forward(PROMPT)
    half = load(folder, dtype=dtype)
    logits = Runner(half).forward(PROMPT)
    assert half.specs[0].dtype == dtype
    assert logits.dtype == torch.float32
    assert 0 < (logits - reference).abs().max() < 0.1 * reference.abs().max()


def test_weight_bytes_count_each_matrix_once(tmp_path: Path) -> None:
    half = load(make_tiny("llama", tmp_path))
    layer = 64 * (4 + 4) * 16 + 4 * 16 * 64 + 3 * 64 * 96 + 2 * 64
    assert half.weight_bytes == 4 * (2 * layer + 64 + 96 * 64)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "opt"])
def test_dummy_weights_give_sane_logits_by_seed(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    config = ModelConfig(model_path=str(tmp_path), load_format="dummy", dtype="float32")
    first, again, other = (
        Runner(load_half(resolve_model(config), seed)).forward(PROMPT) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0.1 < first.std() < 10


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'.*yarn"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], named: str) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    assert arch_from_config(config).family == "llama"
    with pytest.raises(ModelError, match=named):
        arch_from_config(config | change)


def test_scaling_sets_the_context() -> None:
    dynamic = normalize_scaling({"type": "dynamic", "factor": 2.0}, 100)
    assert context_limit(dynamic, 100) == 200
    yarn = normalize_scaling(
        {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 50}, 100
    )
    assert context_limit(yarn, 100) == 200
    assert normalize_scaling({"rope_type": "default", "rope_theta": 1.0}, 100) is None


def test_halves_hold_no_state(tmp_path: Path) -> None:
    half = load(make_tiny("qwen3", tmp_path))
    assert isinstance(half, LlamaHalf)
    assert torch.equal(Runner(half).forward(PROMPT), Runner(half).forward(PROMPT))


def test_a_lowering_that_changes_nothing_is_said_to(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    said: list[str] = []
    for lowering in ("eager", "inductor"):
        resolve_model(ModelConfig(model_path=str(path), lowering=lowering), said.append)
    assert said == ["note: model.lowering inductor changes nothing: no graphs are run"]
