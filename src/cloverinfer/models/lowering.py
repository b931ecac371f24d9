"""How a compiled model's graphs run: as they are, or through PyTorch's own compiler.

It owns what that compiler needs on a host, and that it works while a model is loaded rather than
in the first steps. It knows nothing of folders and manifests.

Shapes: t tokens.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ..core.errors import ModelError
from .threads import alone

_LONGEST = 400
"""Characters of PyTorch's error that are repeated."""
Run = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
"""A graph, called with weights and with what has the tokens first."""
WARM_TOKENS = (5, 1)
"""What has all code of a ``Lowered`` made."""


def require(lowering: str, device: torch.device) -> None:
    """``ModelError`` saying what to install where graphs cannot be run so."""
    if lowering == "eager":
        return
    if device.type != "cpu":
        if importlib.util.find_spec("triton") is None:
            raise ModelError("model.lowering inductor needs Triton on a GPU: install it, or eager")
        return
    with _quiet():
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ModelError(
            "model.lowering inductor needs a C++ compiler where the model runs, and there is none: "
            "install g++ (or name one in CXX), or leave model.lowering at eager"
        ) from None


class Lowered:
    """A graph as PyTorch's compiler makes it: once for one token, and once for any larger number.

    What that compiler would check on every call is known here: weights are those of the first call
    or of the same shapes, and what has the tokens first is made contiguous. Without its checks a
    tensor that was made otherwise (outside of inference mode, say) compiles nothing anew in a step.
    """

    def __init__(self, graph: torch.fx.GraphModule, small: bool = False) -> None:
        self._small = small
        self._one, self._many = (_compiled(graph), _compiled(graph))
        self._told = False

    def __call__(
        self, weights: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        rows = [row.contiguous() for row in rows]
        if self._small:
            with alone(len(rows[0])):
                return self._run(weights, rows)
        return self._run(weights, rows)

    def _run(
        self, weights: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        if len(rows[0]) == 1:
            return self._one(*weights, *rows)
        if not self._told:
            for row in rows:
                torch._dynamo.mark_dynamic(row, 0)
            self._told = True
        return self._many(*weights, *rows)


def _compiled(graph: torch.fx.GraphModule) -> Callable[..., tuple[torch.Tensor, ...]]:
    # PyTorch keeps what it compiled by code object, of which this one gets its own.
    own = torch.fx.GraphModule(graph, graph.graph)
    with _quiet():
        return torch.compile(
            own,
            options={
                "guard_filter_fn": lambda guards: [False for _ in guards],
                "cpp.dynamic_threads": True,  # as many as there are when it runs
            },
        )


def lower(graph: torch.fx.GraphModule, lowering: str, small: bool = False) -> Run:
    """What to call instead of ``graph``; ``small``: little is done for a few tokens but in native
    kernels."""
    if lowering != "eager":
        return Lowered(graph, small)

    def run(
        weights: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        results: tuple[torch.Tensor, ...] = graph(*weights, *rows)
        return results

    def run_small(
        weights: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        with alone(len(rows[0])):
            return run(weights, rows)

    return run_small if small else run


@contextlib.contextmanager
def compiling(folder: Path) -> Iterator[None]:
    """While graphs of ``folder`` are compiled: ``ModelError`` where that fails."""
    try:
        with _quiet():
            yield
    except torch._dynamo.exc.TorchDynamoException as problem:
        lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
        reason = "; ".join(lines[:2])[:_LONGEST]
        raise ModelError(
            f"{folder}: torch.compile fails ({reason}): leave model.lowering at eager"
        ) from problem


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what PyTorch's compiler warns of its own insides."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script")
        # float32 stays float32.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        yield
