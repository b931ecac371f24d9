"""From a module to one functional graph in which attention is one operator.

It owns the export and the clean-up of what it leaves: weights by name, tied ones once, inputs,
the calls of attention in order. It does not know transformers, and cuts nothing.

Shapes: t tokens, c vocabulary. The graph is traced for one row of t tokens, t unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from ..core.errors import ModelError
from ..kvcache.layout import KVSpec
from ..models.operators import exporting
from .errors import LengthWatch, refuse_export
from .evaluate import evaluate
from .operator import ATTENTION, decode_spec

TRACED_TOKENS = 7
"""Only an example: the graph holds for any number."""
MOST_TOKENS = 1 << 24


@dataclass
class Captured:
    """One model as a graph ``(weights..., token_ids [t], positions [t]) -> logits [t, c]``."""

    graph: fx.Graph
    tensors: dict[str, torch.Tensor]
    """Weights (and constants) by name, those of the model itself: nothing is copied."""
    weights: dict[fx.Node, str]
    """Placeholders of weights, and their names."""
    token_ids: fx.Node
    positions: fx.Node
    calls: list[fx.Node] = field(default_factory=list)
    """The calls of attention, layer by layer."""

    @property
    def logits(self) -> fx.Node:
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        (logits,) = output.args[0]
        return logits  # type: ignore[no-any-return]

    def run(self, token_ids_t: torch.Tensor, positions_t: torch.Tensor) -> torch.Tensor:
        """The whole, unsplit: logits ``[t, c]`` of one prompt."""
        given = {node: self.tensors[name] for node, name in self.weights.items()}
        given |= {self.token_ids: token_ids_t, self.positions: positions_t}
        return evaluate(self.logits, given)  # type: ignore[no-any-return]

    def number_calls(self) -> None:
        """Finds the calls of attention and numbers them in the order of the graph."""
        self.calls = [node for node in self.graph.nodes if node.target is ATTENTION]
        for layer, call in enumerate(self.calls):
            call.update_arg(4, layer)

    def spec_of(self, call: fx.Node) -> KVSpec:
        """What its layer's cache looks like, and how it is attended over."""
        _, k, v, sinks = call.args[:4]
        assert isinstance(k, fx.Node)
        assert isinstance(v, fx.Node)
        known = None if sinks is None else self.constant(sinks)
        return decode_spec(str(call.args[5])).kv_spec(k.meta["val"], v.meta["val"], known)

    def constant(self, node: Any) -> torch.Tensor:
        """The value of a node that depends on weights only."""
        given = {one: self.tensors[name] for one, name in self.weights.items()}
        try:
            return evaluate(node, given)  # type: ignore[no-any-return]
        except KeyError as problem:
            raise ModelError(f"attention's sinks depend on the tokens ({problem})") from problem


class NoDropout(TorchFunctionMode):
    """Dropout does nothing, also where a model leaves it on: nobody serves with it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = args[:4] + ((0.0,) if len(args) > 4 else ()) + args[5:], kwargs
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.alpha_dropout, torch.dropout)


class _Flat(nn.Module):
    """Adds and removes the one row that models expect."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any], has_positions: bool) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.has_positions = has_positions

    def forward(self, token_ids_t: torch.Tensor, positions_t: torch.Tensor) -> torch.Tensor:
        given = dict(self.inputs)
        if self.has_positions:
            given["position_ids"] = positions_t[None]
        out = self.model(token_ids_t[None], **given)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        return logits[0]


def capture(
    model: nn.Module, inputs: dict[str, Any] | None = None, has_positions: bool = True
) -> Captured:
    """The graph of ``model(token_ids [1, t], position_ids=[1, t], **inputs)``, which returns logits
    ``[1, t, c]`` or a record with them; calls of attention are still as the model writes them.

    ``ModelError`` names the line of the model's code that cannot be exported.
    """
    # Non-strict: Python runs as it is, and what it does with tensors is recorded.
    wrapped = _Flat(model.eval(), inputs or {}, has_positions)
    tokens = torch.export.Dim("tokens", min=1, max=MOST_TOKENS)
    example, watch = torch.arange(TRACED_TOKENS), LengthWatch()
    try:
        with exporting(), torch.no_grad(), NoDropout(), watch:
            program = torch.export.export(
                wrapped, (example, example.clone()), dynamic_shapes=({0: tokens},) * 2, strict=False
            ).run_decompositions({})
    except ModelError:
        raise
    except Exception as problem:  # the boundary to the model's own code, which may raise anything
        raise refuse_export(problem, watch.line) from problem
    return _tidy(program)


def _tidy(program: torch.export.ExportedProgram) -> Captured:
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
    mutated = (
        program.graph_signature.buffers_to_mutate or program.graph_signature.user_inputs_to_mutate
    )
    if mutated:
        raise ModelError(
            f"the model keeps state between calls ({', '.join(map(str, mutated.values()))}); "
            "a dense half holds nothing but its weights"
        )
    captured = _bind(program, graph)
    drop_dead(captured)
    return captured


def _bind(program: torch.export.ExportedProgram, graph: fx.Graph) -> Captured:
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    tensors: dict[str, torch.Tensor] = {}
    weights: dict[fx.Node, str] = {}
    seen: dict[Any, fx.Node] = {}
    inputs = []
    for given in program.graph_signature.input_specs:
        node = nodes[given.arg.name]
        if given.kind is InputKind.USER_INPUT:
            inputs.append(node)
            continue
        tensor = program.state_dict.get(given.target)
        tensor = program.constants[given.target] if tensor is None else tensor
        assert isinstance(tensor, torch.Tensor), given
        first = seen.setdefault(_identity(tensor), node)
        if first is not node:  # tied: one weight, whatever it is called
            node.replace_all_uses_with(first)
            continue
        name = given.target.removeprefix("model.")
        tensors[name], weights[node] = tensor.detach(), name
    token_ids, positions = inputs
    return Captured(graph, tensors, weights, token_ids, positions)


def _identity(tensor: torch.Tensor) -> Any:
    if not tensor.numel():
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def drop_dead(captured: Captured) -> None:
    """Erases what nothing uses, weights included."""
    graph = captured.graph
    kept = (captured.token_ids, captured.positions)
    for node in reversed(list(graph.nodes)):
        if node.op == "output" or node.users or node in kept:
            continue
        graph.erase_node(node)
        name = captured.weights.pop(node, None)
        if name is not None:
            del captured.tensors[name]
