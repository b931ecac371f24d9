"""Many operators of a graph as one native call (``csrc/dense_cpu/chain.h``), on rows of bfloat16.

It owns a chain's program and how it is called. It does not know which operators of a graph go into
one (``chaining.py``), nor where weights come from.

Shapes: t tokens, w numbers of a token's row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import torch

from .. import _native
from .threads import kernel_threads

Operand = tuple[int, int, int, int, int]
"""Buffer, offset in a token's row, heads, stride of heads, numbers of a head."""


class Act(IntEnum):
    """As ``chain.h`` numbers them."""

    PRODUCT = 0
    NORM = 1
    TURN = 2
    MAP = 3


class Map(IntEnum):
    """As ``rows.h`` numbers them."""

    COPY = 0
    ADD = 1
    SUBTRACT = 2
    MULTIPLY = 3
    ADD_SCALAR = 4
    SCALE = 5
    SILU = 6
    GELU = 7
    GELU_TANH = 8
    RELU = 9
    SIGMOID = 10
    TANH = 11
    SQUARE = 12
    CUBE = 13


class Step(msgspec.Struct, frozen=True, array_like=True):
    """What is written, then what is read, and what else the act needs."""

    act: int
    operands: tuple[Operand, ...]
    weights: tuple[int, int] = (-1, -1)
    """Places of weight and bias among the chain's."""
    size: tuple[int, int, int] = (0, 0, 1)
    """Of a product: outputs of a fold, inputs, folds."""
    map: int = 0
    centred: bool = False
    scalar: float = 0.0


class Program(msgspec.Struct, frozen=True, array_like=True):
    """A chain's code; its text says all of it, so that graphs can hold it."""

    inputs: int
    outputs: int
    weights: int
    widths: tuple[int, ...]
    """Of the rows of inputs, outputs, and the chain's own buffers."""
    steps: tuple[Step, ...]

    def text(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def made(self) -> tuple[int, ...]:
        """Widths of the outputs."""
        return self.widths[self.inputs : self.inputs + self.outputs]


@functools.lru_cache(maxsize=1024)
def _program(text: str) -> Program:
    return msgspec.json.decode(text, type=Program)


@functools.lru_cache(maxsize=1024)
def _chain(text: str, threads: int) -> _native.CpuChain:
    program = _program(text)
    counts = program.inputs, program.outputs, program.weights
    code = [
        (one.act, one.operands, one.weights, one.size, one.map, one.centred, one.scalar)
        for one in program.steps
    ]
    return _native.CpuChain(
        threads=threads, isa="auto", counts=counts, widths=program.widths, code=code
    )


def run_chain(
    weights: torch.Tensor, rows: Sequence[torch.Tensor], program: str
) -> list[torch.Tensor]:
    """Outputs ``[t, w]`` of the inputs ``[t, w]``; ``weights``: addresses, int64."""
    rows = [row if row.stride(1) == 1 else row.contiguous() for row in rows]
    tokens = len(rows[0])
    made = [rows[0].new_empty((tokens, width)) for width in _program(program).made]
    if tokens:
        places = [(row.data_ptr(), row.stride(0)) for row in (*rows, *made)]
        chain = _chain(program, kernel_threads())
        chain.run((weights.data_ptr(), len(weights)), tokens, places)
    return made


def _fake(weights: torch.Tensor, rows: Sequence[torch.Tensor], program: str) -> list[torch.Tensor]:
    first = rows[0]
    return [first.new_empty((first.shape[0], width)) for width in _program(program).made]


_LIBRARY = torch.library.Library("cloverinfer", "FRAGMENT")
_LIBRARY.define("chain(Tensor weights, Tensor[] rows, str program) -> Tensor[]")
_LIBRARY.impl("chain", run_chain, "CompositeExplicitAutograd")
torch.library.register_fake("cloverinfer::chain", _fake, lib=_LIBRARY)


@dataclass(frozen=True)
class Direct:
    """A graph that is one chain: called without the graph."""

    program: str
    given: tuple[int, ...]
    """Which of the graph's rows each input is."""
    made: tuple[tuple[int, ...], ...]
    """Shape of each output, less its tokens."""
    results: tuple[tuple[bool, int], ...]
    """Of each of the graph's results whether it is an output or one of its rows, and which."""

    def makes_first(self, count: int) -> bool:
        """Whether the graph's first results are its first outputs, in order."""
        return self.results[:count] == tuple((True, i) for i in range(count))

    def __call__(
        self,
        weights: Sequence[torch.Tensor],
        rows: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """``out``: where the first outputs are wanted, each token's numbers being contiguous."""
        tokens, (addresses,) = len(rows[0]), weights
        kept = [_by_token(rows[i]) for i in self.given]
        first = kept[0]
        wanted = () if out is None else tuple(out)
        made = [*wanted, *(first.new_empty((tokens, *s)) for s in self.made[len(wanted) :])]
        if tokens:
            places = [(row.data_ptr(), row.stride(0)) for row in (*kept, *made)]
            chain = _chain(self.program, kernel_threads())
            chain.run((addresses.data_ptr(), len(addresses)), tokens, places)
        return tuple(made[i] if is_made else rows[i] for is_made, i in self.results)


def _by_token(row: torch.Tensor) -> torch.Tensor:
    """With the numbers of each token contiguous."""
    return row if row.is_contiguous() or is_by_token(row) else row.contiguous()


def is_by_token(row: torch.Tensor) -> bool:
    return len(row) == 0 or row[0].is_contiguous()
