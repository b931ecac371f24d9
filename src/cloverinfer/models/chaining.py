"""Finds the parts of a graph that a chain computes, and rewrites the graph to call it.

What a chain can compute and what only PyTorch can take turns: phases 0, 2, ... are PyTorch's, those
between are chains. A value belongs to the first phase in which all that it is made of is there. It
owns the phases and the new graph; ``recognise.py`` knows operators, ``slots.py`` where values lie.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .chain import Act, Direct, Operand, Program, Step, run_chain
from .places import Bound, Place
from .recognise import Found, recognise
from .slots import (
    COPIES,
    TOKENS,
    VIEWS,
    Slot,
    axis_of,
    compact,
    fills,
    heads_of,
    sizes_of,
    token_axis,
    view,
    whole,
)

aten = torch.ops.aten
_MAKES = {aten.sym_size.int, operator.add, operator.mul, operator.sub, operator.floordiv}
"""What numbers in a graph are made by."""


@dataclass
class _Written:
    """A step whose buffers have names yet."""

    step: Step
    buffers: tuple[Hashable, ...]


@dataclass
class _Chain:
    """What a phase's chain does so far."""

    steps: list[_Written] = field(default_factory=list)
    weights: list[Place] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    own: dict[Hashable, int] = field(default_factory=dict)
    """Widths of buffers."""
    outputs: list[fx.Node] = field(default_factory=list)
    calls: int = 0
    """Products."""


class Chaining:
    """``at``: what the graph's first inputs are, which this adds to; ``rows``: its other inputs."""

    def __init__(self, graph: fx.Graph, at: dict[fx.Node, Place | Bound], rows: list[fx.Node]):
        self.graph, self.at, self.rows = graph, at, rows
        self.symbol = next(
            (str(n) for n in rows[0].meta["val"].shape if not isinstance(n, int)), ""
        )
        self._left: set[fx.Node] = set()
        """What no chain is to compute."""

    def run(self) -> tuple[fx.Graph, dict[fx.Node, Place | Bound], Direct | None]:
        """The new graph, what its first inputs are, and how to do without it."""
        while True:
            self._read()
            poor = [c for c in self._chains.values() if c.nodes and not c.calls]
            if not poor:
                break
            for chain in poor:  # calling it would take longer than PyTorch's operators
                self._left.update(chain.nodes)
        live = self._find_live()
        if not any(chain.calls for chain in self._chains.values()):
            return self.graph, self.at, None
        programs = {phase: self._finish(chain) for phase, chain in self._chains.items()}
        graph, at = self._rebuild(live, programs)
        return graph, at, self._direct(live, programs)

    # -- reading the graph

    def _read(self) -> None:
        self._phase: dict[fx.Node, int] = {}
        self._slots: dict[fx.Node, Slot | list[Slot]] = {}
        self._numbers: dict[fx.Node, Any] = {}
        self._chains: dict[int, _Chain] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._phase[node] = 0
                self._note_whole(node)
            elif node.op == "call_function":
                self._read_call(node)
        self._chains = {p: chain for p, chain in self._chains.items() if chain.nodes}

    def _note_whole(self, node: fx.Node) -> None:
        sample = whole(node, self.symbol)
        if sample is not None:
            self._slots[node] = Slot(("given", node), sample)

    def _read_call(self, node: fx.Node) -> None:
        if node.target in _MAKES and not isinstance(node.meta.get("val"), torch.Tensor):
            self._phase[node] = self._later(node, 0)
            self._note_number(node)
            return
        if node not in self._left and (self._read_view(node) or self._read_found(node)):
            return
        self._phase[node] = self._later(node, 0)
        if node not in self._slots:
            self._note_whole(node)

    def _later(self, node: fx.Node, parity: int) -> int:
        """The first phase of PyTorch's (0) or of a chain (1) in which what it reads is there."""
        phases = [self._phase[one] for one in node.all_input_nodes]
        return max((p + (p % 2 != parity) for p in phases), default=parity)

    def _note_number(self, node: fx.Node) -> None:
        if node.target is aten.sym_size.int:
            size = node.args[0].meta["val"].shape[node.args[1]]  # type: ignore[union-attr, index]
            if isinstance(size, int) or str(size) == self.symbol:
                self._numbers[node] = size if isinstance(size, int) else TOKENS
            return
        args = [self._numbers.get(arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        if None not in args:
            self._numbers[node] = node.target(*args)  # type: ignore[operator]

    def _read_view(self, node: fx.Node) -> bool:
        """Whether a chain's value is looked at otherwise, for which nothing is done."""
        source = node.args[0] if node.args else None
        slot = self._slots.get(source) if isinstance(source, fx.Node) else None  # type: ignore[arg-type]
        if slot is None or isinstance(slot, list) != (node.target is operator.getitem):
            return False
        assert isinstance(source, fx.Node)
        found = self._viewed(node, source, slot)
        if found is None:
            return False
        self._slots[node], self._phase[node] = found, self._phase[source]
        return self._phase[source] % 2 == 1

    def _viewed(
        self, node: fx.Node, source: fx.Node, slot: Slot | list[Slot]
    ) -> Slot | list[Slot] | None:
        if isinstance(slot, list):
            return slot[node.args[1]]  # type: ignore[index]
        if node.target in COPIES:
            return slot
        if node.target not in VIEWS:
            return None
        known = {one: self._numbers.get(one) for one in node.all_input_nodes if one is not source}
        if None in known.values():
            return None
        args, kwargs = fx.node.map_arg((node.args[1:], node.kwargs), lambda one: known[one])
        found = view(slot.sample, node.target, args, kwargs)
        if found is None and self._phase[source] % 2:
            slot = self._compacted(source, slot)
            found = view(slot.sample, node.target, args, kwargs)
        if found is None:
            return None
        if self._phase[source] % 2 and not _can_be_given(found):
            return None  # PyTorch looks at what the chain gives
        if isinstance(found, (list, tuple)):
            return [Slot(slot.buffer, one) for one in found]
        same = list(found.shape) == sizes_of(node) and axis_of(found) is not None
        return Slot(slot.buffer, found) if same else None

    def _compacted(self, source: fx.Node, slot: Slot) -> Slot:
        axis = axis_of(slot.sample)
        if axis is None or any(n != 1 for n in slot.sample.shape[:axis]):
            return slot
        made = Slot(("copy", source, len(self._slots)), compact(slot.sample.shape, axis))
        done = self._write(self._phase[source], Step(Act.MAP, ()), [made, slot])
        return made if done else slot

    def _read_found(self, node: fx.Node) -> bool:
        """Whether a chain computes it."""
        axis = token_axis(node, self.symbol)
        found = recognise(node, self.at) if axis is not None else None
        if found is None or any(one not in self._phase for one in found.reads):
            return False
        assert axis is not None
        phases = [self._phase[one] for one in found.reads]
        phase = max(p + (p % 2 == 0) for p in phases)
        reads = [self._slot(one, phase) for one in found.reads]
        if any(one is None for one in reads):
            return False
        made = Slot(("made", node), compact(sizes_of(node), axis))
        if not self._emit(found, phase, made, [one for one in reads if one is not None]):
            return False
        self._slots[node], self._phase[node] = made, phase
        self._chains[phase].nodes.append(node)
        return True

    def _slot(self, node: fx.Node, phase: int) -> Slot | None:
        """The value as a chain finds it: in its own buffers, or as it is given from before."""
        slot = self._slots.get(node)
        if self._phase[node] == phase or self._phase[node] % 2 == 0:
            return slot if isinstance(slot, Slot) else None
        sample = whole(node, self.symbol)
        return None if sample is None else Slot(("given", node), sample)

    # -- writing chains

    def _emit(self, found: Found, phase: int, made: Slot, reads: list[Slot]) -> bool:
        if found.parts is None:
            return self._write(phase, found.step, [made, *reads], found)
        at = 0
        for part in reads:  # one beside the other
            size = part.sample.shape[found.parts]
            to = Slot(made.buffer, made.sample.narrow(found.parts, at, size))
            if not self._write(phase, found.step, [to, part]):
                return False
            at += size
        return True

    def _write(self, phase: int, step: Step, slots: list[Slot], found: Found | None = None) -> bool:
        chain = self._chains.setdefault(phase, _Chain())
        if step.act == Act.PRODUCT:
            heads = [heads_of([one.sample]) for one in slots]
            operands = [None if one is None or one[0][1] != 1 else one[0] for one in heads]
            if None in operands or operands[1][3] != step.size[1]:  # type: ignore[index]
                return False
        else:
            shape = slots[0].sample.shape
            try:
                samples = [one.sample.expand(shape) for one in slots]
            except RuntimeError:
                return False
            operands = heads_of(samples, step.act != Act.MAP)  # type: ignore[assignment]
            if operands is None:
                return False
        places = () if found is None else found.weights
        numbers = [self._weight(chain, one) for one in places] + [-1, -1]
        given = tuple((0, *one) for one in operands)  # type: ignore[misc]
        fields = (step.size, step.map, step.centred, step.scalar)
        made = Step(step.act, given, (numbers[0], numbers[1]), *fields)
        chain.steps.append(_Written(made, tuple(one.buffer for one in slots)))
        chain.calls += step.act == Act.PRODUCT
        for one in slots:
            if one.buffer not in chain.own:
                chain.own[one.buffer] = self._width(one)
        return True

    def _width(self, slot: Slot) -> int:
        """Of the buffer's rows: of a value that is given, all of it."""
        if isinstance(slot.buffer, tuple) and slot.buffer[0] in ("given", "made"):
            sizes = sizes_of(slot.buffer[1])
            product = 1
            for n in sizes:
                product *= n
            return product // TOKENS
        return slot.size

    def _weight(self, chain: _Chain, place: Place | None) -> int:
        if place is None:
            return -1
        chain.weights.append(place)
        return len(chain.weights) - 1

    # -- what is needed, from the end

    def _find_live(self) -> set[fx.Node]:
        """PyTorch's nodes that are needed; chains learn what they must give, and lose the rest."""
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        needed = set(output.all_input_nodes)
        place = {node: i for i, node in enumerate(output.all_input_nodes)}
        order = list(self.graph.nodes)
        for phase in range(max(self._phase.values(), default=0), -1, -1):
            mine = [node for node in order if self._phase.get(node) == phase]
            if phase % 2:
                chain = self._chains.get(phase, _Chain())
                given = [node for node in mine if node in needed]
                chain.outputs = sorted(given, key=lambda node: place.get(node, len(place)))
                needed.update(self._prune(chain))
            else:
                for node in reversed(mine):
                    if node in needed:
                        needed.update(node.all_input_nodes)
        self._chains = {p: chain for p, chain in self._chains.items() if chain.outputs}
        return {node for node in needed if self._phase[node] % 2 == 0}

    def _prune(self, chain: _Chain) -> list[fx.Node]:
        """Drops steps that nothing reads, and says what the chain is to be given."""
        wanted = {self._slots[node].buffer for node in chain.outputs}  # type: ignore[union-attr]
        kept = []
        for one in reversed(chain.steps):
            if one.buffers[0] in wanted:
                wanted.update(one.buffers[1:])
                kept.append(one)
        chain.steps = kept[::-1]
        used = dict.fromkeys(buffer for one in chain.steps for buffer in one.buffers)
        chain.own = {buffer: chain.own[buffer] for buffer in used}
        return [b[1] for b in used if isinstance(b, tuple) and b[0] == "given"]

    def _finish(self, chain: _Chain) -> tuple[Program, list[fx.Node]]:
        """The program, and the nodes that it is given."""
        results: list[Hashable] = []
        for node in chain.outputs:
            slot = self._slots[node]
            assert isinstance(slot, Slot)
            buffer = slot.buffer
            taken = buffer in results or not isinstance(buffer, tuple) or buffer[0] == "given"
            if taken or not fills(slot, chain.own[buffer]):
                buffer = ("out", node)
                axis = axis_of(slot.sample)
                assert axis is not None
                self._copy(chain, Slot(buffer, compact(slot.sample.shape, axis)), slot)
            results.append(buffer)
        given = [b for b in chain.own if isinstance(b, tuple) and b[0] == "given"]
        rest = [b for b in chain.own if b not in given and b not in results]
        number = {buffer: i for i, buffer in enumerate([*given, *results, *rest])}
        steps = [self._numbered(one, number) for one in chain.steps]
        widths = tuple(chain.own[buffer] for buffer in number)
        counts = len(given), len(results), len(chain.weights)
        return Program(*counts, widths, tuple(steps)), [b[1] for b in given]  # type: ignore[index]

    def _copy(self, chain: _Chain, to: Slot, slot: Slot) -> None:
        heads = heads_of([to.sample, slot.sample])
        assert heads is not None, "what a chain gives was looked at when it was made"
        operands = tuple((0, *one) for one in heads)
        chain.steps.append(_Written(Step(Act.MAP, operands), (to.buffer, slot.buffer)))
        chain.own[to.buffer] = to.size

    def _numbered(self, one: _Written, number: dict[Hashable, int]) -> Step:
        operands: tuple[Operand, ...] = tuple(
            (number[buffer], *operand[1:])
            for buffer, operand in zip(one.buffers, one.step.operands, strict=True)
        )
        step = one.step
        fields = (step.weights, step.size, step.map, step.centred, step.scalar)
        return Step(step.act, operands, *fields)

    # -- the new graph

    def _rebuild(
        self, live: set[fx.Node], programs: dict[int, tuple[Program, list[fx.Node]]]
    ) -> tuple[fx.Graph, dict[fx.Node, Place | Bound]]:
        new, env = fx.Graph(), {}
        at: dict[fx.Node, Place | Bound] = {}
        bound: dict[int, fx.Node] = {}
        for node in self.at:
            if node in live:
                env[node] = new.node_copy(node)
                at[env[node]] = self.at[node]
        for phase, chain in self._chains.items():
            bound[phase] = new.placeholder(f"chain_{phase}")
            at[bound[phase]] = Bound(tuple(chain.weights))
        for node in self.rows:
            env[node] = new.node_copy(node)
        order = [node for node in self.graph.nodes if node.op == "call_function" and node in live]
        for phase in range(max(self._phase.values()) + 1):
            if phase in self._chains:
                self._call(new, env, bound[phase], phase, programs[phase])
            for node in (node for node in order if self._phase[node] == phase):
                env[node] = new.node_copy(node, lambda one: env[one])
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        new.node_copy(output, lambda one: env[one])
        return new, at

    def _call(
        self,
        new: fx.Graph,
        env: dict[fx.Node, fx.Node],
        weights: fx.Node,
        phase: int,
        made: tuple[Program, list[fx.Node]],
    ) -> None:
        program, given = made
        rows = [
            new.call_function(aten.reshape.default, (env[node], [-1, width]))
            for node, width in zip(given, program.widths, strict=False)
        ]
        target = torch.ops.cloverinfer.chain.default
        results = new.call_function(target, (weights, rows, program.text()))
        for i, node in enumerate(self._chains[phase].outputs):
            axis, sizes = token_axis(node, self.symbol), sizes_of(node)
            assert axis is not None
            sizes[axis] = -1
            one = new.call_function(operator.getitem, (results, i))
            if any(n != 1 for n in sizes[:axis]):
                sizes = [-1, *sizes[:axis], *sizes[axis + 1 :]]
                one = new.call_function(aten.reshape.default, (one, sizes))
                env[node] = new.call_function(aten.movedim.int, (one, 0, axis))
            else:
                env[node] = new.call_function(aten.reshape.default, (one, sizes))
            env[node].meta = dict(node.meta)

    def _direct(
        self, live: set[fx.Node], programs: dict[int, tuple[Program, list[fx.Node]]]
    ) -> Direct | None:
        """Where all that the graph does is one chain, and pass on some of its rows."""
        if list(programs) != [1]:
            return None
        program, given = programs[1]
        outputs = self._chains[1].outputs
        if any(node not in self.rows for node in given):
            return None
        results = []
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        for node in output.args[0]:  # type: ignore[union-attr]
            found = self._result(node, outputs)  # type: ignore[arg-type]
            if found is None:
                return None
            results.append(found)
        shapes = tuple(tuple(sizes_of(node)[1:]) for node in outputs)
        if any(token_axis(node, self.symbol) != 0 for node in outputs):
            return None
        return Direct(
            program.text(), tuple(self.rows.index(n) for n in given), shapes, tuple(results)
        )

    def _result(self, node: fx.Node, outputs: Sequence[fx.Node]) -> tuple[bool, int] | None:
        if node in outputs:
            return True, list(outputs).index(node)
        slot = self._slots.get(node)
        if not isinstance(slot, Slot) or not isinstance(slot.buffer, tuple):
            return None
        kind, row = slot.buffer
        same = kind == "given" and row in self.rows and sizes_of(row) == sizes_of(node)
        if not same or not fills(slot, self._width(slot)):
            return None
        return False, self.rows.index(row)


def _can_be_given(found: Any) -> bool:
    """Whether a chain can copy what a view shows to rows of its own."""
    for one in found if isinstance(found, (list, tuple)) else (found,):
        axis = axis_of(one)
        if axis is None or heads_of([compact(one.shape, axis), one]) is None:
            return False
    return True


def call_chains_directly(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is torch.ops.cloverinfer.chain.default:
            node.target = run_chain
