"""Causal language models of transformers: made so that attention and experts are one operator each.

The only module that imports transformers, when it is used. It knows how its models are told what
attends; it does not look at graphs.

Shapes: t tokens, h query heads, n KV heads, d the key size, e the value size, c hidden size,
s rows (a token and one of its experts).
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import ModelError
from ..models import operators
from .operator import ATTENTION, UNNUMBERED, CallSpec

NAME = "cloverinfer"
"""Under which attention and experts are registered."""
_HARMLESS = frozenset({"cache_position", "is_causal", "output_attentions", "position_ids",
                       "output_router_logits", "use_cache", "output_hidden_states",
                       "logits_to_keep"})  # fmt: skip
"""Keywords that models pass to what attends and that change nothing here."""
_REFUSED = {
    "kv_lora_rank": "latent-compressed KV caches are not supported yet",
    "attention_chunk_size": "attention in chunks is not supported",
    "add_cross_attention": "cross attention is not supported",
    "is_encoder_decoder": "cross attention (an encoder and a decoder) is not supported",
    "quantization_config": "weights quantised by others are not supported",
}
_STATEFUL_LAYERS = ("linear_attention", "mamba", "recurrent", "conv")


def require() -> None:
    """``ModelError`` saying what to install where transformers is not there."""
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            "compiling a model needs transformers: pip install 'cloverinfer[compile]', or give a "
            "folder that `cloverinfer compile -o` made elsewhere"
        )


def read_config(folder: Path) -> Any:
    """The model's configuration; ``ModelError`` by name for what cannot be served."""
    require()
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ModelError(f"{folder}: transformers cannot read its config.json: {problem}") from None
    refuse_config(config)
    return config


def refuse_config(config: Any) -> None:
    """``ModelError`` by name for what the runtime does not serve."""
    name = type(config).__name__.removesuffix("Config")
    for key, reason in _REFUSED.items():
        if getattr(config, key, None):
            raise ModelError(f"{name}: {reason} ({key})")
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    stateful = [kind for kind in kinds if kind.startswith(_STATEFUL_LAYERS)]
    model_class = class_of(config)
    if stateful or getattr(model_class, "_is_stateful", False):
        what = f" ({', '.join(sorted(stateful))})" if stateful else ""
        raise ModelError(f"{name}: state-space and other recurrent layers{what} are not supported")
    chunked = [kind for kind in kinds if "chunked" in kind]
    if chunked:
        raise ModelError(f"{name}: attention in chunks is not supported ({chunked[0]})")


def class_of(config: Any) -> Any:
    """The causal language model of a configuration; ``ModelError`` where there is none."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        name = type(config).__name__
        raise ModelError(f"{name}: transformers has no causal language model for it") from None


def load_model(folder: Path, config: Any, dtype: torch.dtype, seed: int | None) -> nn.Module:
    """The model with its weights in ``dtype``, its attention the operator where it lets itself be
    told; ``seed``: random weights instead of the folder's."""
    _register()
    model_class = class_of(config)
    how = {"dtype": dtype, "attn_implementation": attention_of(model_class)}
    try:
        with _quiet():
            if seed is not None:
                torch.manual_seed(seed)
                model = model_class._from_config(config, **how)
            else:
                model = model_class.from_pretrained(folder, config=config, **how)
    except Exception as problem:  # the boundary to the model's own code, which may raise anything
        what = f"{type(problem).__name__}: {problem}"
        raise ModelError(f"{folder}: transformers cannot load it: {what}") from problem
    use_experts(model)
    return model.eval()  # type: ignore[no-any-return]


def prepare(model: nn.Module) -> nn.Module:
    """Tells a model that was made elsewhere to use the operators, where it lets itself be told."""
    _register()
    refuse_config(model.config)  # type: ignore[arg-type]
    wanted = attention_of(type(model))
    if wanted == NAME:
        model.set_attn_implementation(wanted)  # type: ignore[operator]
    use_experts(model)
    return model.eval()


def use_experts(model: nn.Module, name: str = NAME) -> None:
    if type(model)._can_set_experts_implementation():  # type: ignore[attr-defined]
        model.set_experts_implementation(name)  # type: ignore[operator]


def attention_of(model_class: Any) -> str:
    """How a class is told to attend: our operator, torch's, or as it is written out."""
    if getattr(model_class, "_supports_attention_backend", False):
        return NAME
    return "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"


def inputs_of(model: nn.Module) -> tuple[dict[str, Any], bool]:
    """Keywords that a call needs beside the tokens, and whether it takes positions."""
    names = inspect.signature(model.forward).parameters
    given = {"use_cache": False} if "use_cache" in names else {}
    return given, "position_ids" in names


@contextlib.contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """The model with its own attention and experts, to compare with."""
    attention = model.config._attn_implementation  # type: ignore[union-attr]
    if attention == NAME:
        model.set_attn_implementation("eager")  # type: ignore[operator]
    use_experts(model, "eager")
    try:
        yield
    finally:
        if attention == NAME:
            model.set_attn_implementation(attention)  # type: ignore[operator]
        use_experts(model)


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # No mask function goes with it, so models make no masks: the operator is causal.
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _run_experts)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: q ``[1, h, t, d]``, k and v ``[1, n, t, d or e]``; gives
    ``[1, t, h, e]``."""
    name = type(module).__name__
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ModelError(f"{name}: attention that is not causal is not supported")
    if query.shape[2] != key.shape[2]:
        raise ModelError(f"{name}: cross attention is not supported")
    given.pop("dropout", None)
    window, softcap = given.pop("sliding_window", None), given.pop("softcap", None)
    scale, sinks = given.pop("scaling", None), given.pop("s_aux", None)
    strange = [key for key, what in given.items() if what is not None and key not in _HARMLESS]
    if strange:
        raise ModelError(f"{name}: attention with {', '.join(sorted(strange))} is not supported")
    spec = CallSpec(
        scale=float(query.shape[3] ** -0.5 if scale is None else scale),
        window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap),
    )
    qkv = [x[0].transpose(0, 1) for x in (query, key, value)]
    out: torch.Tensor = ATTENTION(*qkv, sinks, UNNUMBERED, spec.encode())
    return out[None], None


def _run_experts(
    module: Any, hidden_tc: torch.Tensor, top_tk: torch.Tensor, weights_tk: torch.Tensor
) -> torch.Tensor:
    """Each token through its experts, weighted: ``[t, c]``."""
    each = top_tk.shape[-1]
    experts_s = top_tk.reshape(-1)
    rows_sc = hidden_tc.repeat_interleave(each, dim=0)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _expert_product(module, first, rows_sc, experts_s)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out_sc = _expert_product(module, "down_proj", inner, experts_s)
    if getattr(module, "has_post_expert_norm", False):  # older versions know of none
        out_sc = module.post_expert_norm(out_sc)
    weighted = out_sc * weights_tk.reshape(-1, 1)
    summed: torch.Tensor = weighted.unflatten(0, (-1, each)).sum(dim=1)
    return summed.to(hidden_tc.dtype)


def _expert_product(
    module: Any, name: str, rows: torch.Tensor, experts_s: torch.Tensor
) -> torch.Tensor:
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    product: torch.Tensor = operators.expert_linear(
        rows, getattr(module, name), bias, experts_s, module.is_transposed
    )
    return product


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
