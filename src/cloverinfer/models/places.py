"""What a rewritten graph takes as its weights, made of those of the graph as it was.

Shapes: i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .arena import Arenas
from .panels import panels_of, panels_of_experts, panels_serve


@dataclass(frozen=True)
class Place:
    """One weight: some of the artifact's, one below the other."""

    parts: tuple[int, ...]
    """Places in the graph as it was."""
    folds: int = 0
    """Of a matrix for ``cloverinfer::linear``; 0: anything else, as it is."""
    transposed: bool = False
    """Whether the matrix is stored ``[i, o]``."""
    floats: bool = False
    """Whether it is wanted in float32."""
    experts: bool = False
    """Whether it is the matrices of many experts, for ``cloverinfer::expert_panels``."""
    computed: fx.GraphModule | None = None
    """What is made of the parts instead."""

    def make(self, parts: Sequence[torch.Tensor], arenas: Arenas) -> torch.Tensor:
        """The weight; panels lie in ``arenas``."""
        if self.experts:
            return panels_of_experts(parts[0], self.transposed, arenas)
        if self.computed is not None:
            whole: torch.Tensor = self.computed(*parts)
        else:
            turned = [part.T.contiguous() for part in parts] if self.transposed else list(parts)
            whole = turned[0] if len(turned) == 1 else torch.cat(turned)
        if self.folds and panels_serve(whole):
            return panels_of(whole, self.folds, arenas)
        return whole.float().contiguous() if self.floats else whole


@dataclass(frozen=True)
class Bound:
    """One tensor with the addresses of several weights, for a chain."""

    places: tuple[Place, ...]
