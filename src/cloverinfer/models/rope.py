"""Rotary positions: frequencies under each scaling, and the cos/sin table that steps index.

Numerics follow ``transformers.modeling_rope_utils``: frequencies and angles in float32, cos and
sin multiplied by the attention factor and then rounded to the model's type.

``dynamic`` is where a table and transformers can differ. transformers rescales by the length of
the sequence at each forward and leaves the keys that are already cached as they are. The table
holds for each position beyond the trained length what transformers uses when *that* token is the
last one: token by token the two agree, and a key depends on its position alone, so chunking,
batching and topology cannot change it. A longer-than-trained *prompt* that transformers takes in
one forward gets the whole prompt's length there, and its own position's here.

Shapes: p positions, d head size, f = d / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..core.errors import ModelError

Scaling = dict[str, Any]

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def normalize_scaling(given: Mapping[str, Any], max_position: int) -> Scaling | None:
    """A checked scaling with ``rope_type`` and the trained length, or None for plain positions.

    ``given`` is ``rope_scaling`` or ``rope_parameters``; ``max_position`` the model's
    ``max_position_embeddings``. ``ModelError`` names an unknown type or a missing key.
    """
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if given.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelError(
            f"partial_rotary_factor {given['partial_rotary_factor']} is not supported (only 1)"
        )
    if kind == "default":
        return None
    for key in _REQUIRED[kind]:
        value = given.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ModelError(f"rope type {kind!r} needs {key} as a number > 0, not {value!r}")
    scaling = {key: value for key, value in given.items() if value is not None and key != "type"}
    scaling["rope_type"] = kind
    if kind == "dynamic":
        # transformers scales by the ratio to this very number, whatever else the file says.
        scaling["original_max_position_embeddings"] = max_position
    scaling.setdefault("original_max_position_embeddings", max_position)
    return scaling


def context_limit(scaling: Scaling | None, max_position: int) -> int:
    """Longest context in tokens that the scaling was made for."""
    if scaling is None or scaling["rope_type"] not in ("dynamic", "yarn"):
        return max_position
    return max(max_position, int(scaling["original_max_position_embeddings"] * scaling["factor"]))


def rope_table(
    head_dim: int,
    theta: float,
    scaling: Scaling | None,
    positions: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``cos`` and ``sin``, each ``[p, 1, d]`` for positions 0 to p - 1.

    The first half of ``sin`` is negated, so that ``x * cos + roll(x, d / 2) * sin`` is
    transformers' ``x * cos + rotate_half(x) * sin``, to the bit.
    """
    inv_freq, factor = _frequencies(head_dim, theta, scaling)
    at = torch.arange(positions, dtype=torch.float32)
    angles_pf = at[:, None] * inv_freq
    if scaling is not None and scaling["rope_type"] == "dynamic":
        trained = scaling["original_max_position_embeddings"]
        if positions > trained:
            longer = _dynamic_frequencies(head_dim, theta, scaling, at[trained:] + 1)
            angles_pf[trained:] = at[trained:, None] * longer
    cos, sin = angles_pf.cos() * factor, angles_pf.sin() * factor
    both_cos = torch.cat((cos, cos), dim=-1).to(dtype)
    both_sin = torch.cat((-sin, sin), dim=-1).to(dtype)
    return both_cos[:, None], both_sin[:, None]


def _frequencies(dim: int, theta: float, scaling: Scaling | None) -> tuple[torch.Tensor, float]:
    if scaling is None or scaling["rope_type"] == "dynamic":
        return _plain(dim, theta), 1.0
    if scaling["rope_type"] == "linear":
        return _plain(dim, theta) / scaling["factor"], 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(dim, theta, scaling), 1.0
    return _yarn(dim, theta, scaling)


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _plain(dim: int, theta: float) -> torch.Tensor:
    return 1.0 / (theta ** _exponents(dim))


def _dynamic_frequencies(
    dim: int, theta: float, scaling: Scaling, lengths_p: torch.Tensor
) -> torch.Tensor:
    """NTK-aware frequencies ``[p, f]`` for sequences of these lengths, in transformers' order."""
    factor, trained = scaling["factor"], scaling["original_max_position_embeddings"]
    base_p = theta * ((factor * lengths_p / trained) - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / (base_p[:, None] ** _exponents(dim))


def _llama3(dim: int, theta: float, scaling: Scaling) -> torch.Tensor:
    """Long wavelengths divided by the factor, short ones kept, a ramp between."""
    inv_freq = _plain(dim, theta)
    factor, trained = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > trained / low, inv_freq / factor, inv_freq)
    smooth = (trained / wavelength - low) / (high - low)
    ramp = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelength < trained / high) * ~(wavelength > trained / low)
    return torch.where(medium, ramp, scaled)


def llama3_divisors(dim: int, theta: float, scaling: Scaling) -> torch.Tensor:
    """What each plain frequency is divided by under ``llama3``: ``[f]``; GGUF files store these."""
    return _plain(dim, theta) / _llama3(dim, theta, scaling)


def _yarn(dim: int, theta: float, scaling: Scaling) -> tuple[torch.Tensor, float]:
    """Interpolated and extrapolated frequencies mixed by a ramp over the dimensions."""
    factor, trained = scaling["factor"], scaling["original_max_position_embeddings"]
    plain = theta ** _exponents(dim)
    extrapolated, interpolated = 1.0 / plain, 1.0 / (factor * plain)

    def dimension_of(rotations: float) -> float:
        return (dim * math.log(trained / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low = dimension_of(scaling.get("beta_fast") or 32)
    high = dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep, _yarn_attention(scaling)


def _yarn_attention(scaling: Scaling) -> float:
    """What cos and sin are multiplied by."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def mscale(weight: float) -> float:
        factor = scaling["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    some, every = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return float(mscale(some) / mscale(every)) if some and every else mscale(1)
