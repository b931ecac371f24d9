"""The Llama family's stages through ``csrc/dense_cpu``: one call a stage, of any number of tokens.

It packs the weights and owns the tensors whose addresses the native side has. It serves bfloat16
arithmetic on the CPU, over weights in bfloat16, int8 or 4 bits.

Between stages hidden rows are float32. Shapes as in ``llama.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import _native
from .arena import Arena
from .base import QKV, Carry, ModelArch, NativeDense, NativeStep
from .linear import Linear
from .packed import Packing, format_of, pack, packed_bytes

Matrix = tuple[int, int, int]
"""Format, address of the panels, address of the bias or 0."""
Rope = tuple[torch.Tensor, torch.Tensor]
"""cos and sin by position, ``[p, 1, d]``."""


@dataclass
class LayerWeights:
    """Weights of one layer, as the stages read them."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm_hd: torch.Tensor | None
    """Qwen3: a weight per element of each query and key head, ``[h + n, d]``."""
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """In the order in which a step reads them."""
        return self.qkv, self.out, self.gate_up, self.down

    @property
    def nbytes(self) -> int:
        norms = self.input_norm.nbytes + self.post_norm.nbytes
        return norms + sum(linear.nbytes for linear in self.linears)


@dataclass
class ModelWeights:
    """All weights, as they are loaded."""

    embedding: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: Linear


def native_serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this type are to be kept as the native kernels read them.

    Not where only the portable kernels run: PyTorch's are better there.
    """
    vectors = _native.dense_isas()[-1] != "portable"
    return vectors and dtype == torch.bfloat16 and device.type == "cpu"


class NativeStages:
    """``DenseHalf.stage`` and ``logits``, on ``threads`` threads, the caller's included.

    Of ``weights`` it keeps what it does not pack. ``int8``: quantise matrices that are not yet.
    ``isa`` forces an instruction set (one of ``_native.dense_isas()``), for tests.
    """

    def __init__(
        self,
        arch: ModelArch,
        weights: ModelWeights,
        threads: int,
        isa: str = "auto",
        int8: bool = False,
    ) -> None:
        self._kept: list[torch.Tensor] = []
        self._shape = (arch.num_heads + 2 * arch.num_kv_heads, arch.head_dim)
        self._rotated = arch.num_heads + arch.num_kv_heads
        self._parts = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
        self._hidden, self._vocab = arch.hidden_size, arch.vocab_size
        self._layers = arch.num_layers
        self.panels: list[torch.Tensor] = []
        """Of all matrices, in the order in which a step reads them."""
        matrices = self._pack(arch, weights, Packing(threads, int8))
        self.nbytes = sum(panels.nbytes for panels in self.panels)
        self._native = _native.CpuDense(
            threads=threads,
            isa=isa,
            hidden=arch.hidden_size,
            heads=arch.num_heads,
            kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            ffn=arch.intermediate_size,
            vocab=arch.vocab_size,
            eps=arch.norm_eps,
            embedding=self._keep(weights.embedding, arch.vocab_size * arch.hidden_size),
            final_norm=self._keep(weights.final_norm, arch.hidden_size),
            head=matrices.pop(),
        )
        for i, layer in enumerate(weights.layers):
            self._add(arch, layer, matrices[4 * i : 4 * i + 4])

    @property
    def isa(self) -> str:
        return self._native.isa()

    def stage(
        self,
        i: int,
        attended_the: torch.Tensor | None,
        carry: tuple[torch.Tensor | None, ...],
        token_ids_t: torch.Tensor | None,
        out: QKV | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, Carry]:
        """``DenseHalf.stage``; ``carry`` is (hidden rows ``[t, c]``, None at stage 0; cos; sin)."""
        hidden_tc, cos_t1d, sin_t1d = carry
        assert cos_t1d is not None
        assert sin_t1d is not None
        tokens = cos_t1d.shape[0]
        hidden_out_tc = torch.empty((tokens, self._hidden))
        if not tokens:
            rest = self._new_qkv(0) if i < self._layers else (None, None, None)
            return *rest, (hidden_out_tc, *carry[1:][: 2 * (i < self._layers)])
        ids = attended = stride = hidden = 0
        if i == 0:
            assert token_ids_t is not None
            ids = token_ids_t.data_ptr()
        else:
            assert attended_the is not None
            assert hidden_tc is not None
            if attended_the.stride(2) != 1 or attended_the.stride(1) != attended_the.shape[2]:
                attended_the = attended_the.contiguous()
            hidden_tc = hidden_tc.float()
            attended, stride = attended_the.data_ptr(), attended_the.stride(0)
            hidden = hidden_tc.data_ptr()
        inputs = (i, tokens, ids, attended, stride, hidden, hidden_out_tc.data_ptr())
        if i == self._layers:
            self._native.stage(*inputs, *(0,) * 8)
            return None, None, None, (hidden_out_tc,)
        q, k, v = out or self._new_qkv(tokens)
        self._native.stage(
            *inputs,
            cos_t1d.data_ptr(),
            sin_t1d.data_ptr(),
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
        )
        return q, k, v, (hidden_out_tc, cos_t1d, sin_t1d)

    def _new_qkv(self, tokens: int) -> QKV:
        qkv = torch.empty((tokens, *self._shape), dtype=torch.bfloat16)
        q, k, v = torch.split_with_sizes(qkv, self._parts, 1)
        return q, k, v

    def logits(self, hidden_tc: torch.Tensor) -> torch.Tensor:
        """``[t, vocab]`` float32."""
        hidden_tc = hidden_tc.float()
        out = torch.empty((hidden_tc.shape[0], self._vocab))
        if len(out):
            self._native.logits(hidden_tc.data_ptr(), len(out), out.data_ptr())
        return out

    def _pack(self, arch: ModelArch, weights: ModelWeights, how: Packing) -> list[Matrix]:
        """Moves the matrices into one arena: four of each layer, then the head."""
        hidden, ffn, q = arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim
        sizes = [(self._shape[0] * arch.head_dim, hidden, 1), (hidden, q, 1)]
        sizes += [(2 * ffn, hidden, 2), (hidden, ffn, 1)]
        wanted = [(m, sizes[j]) for layer in weights.layers for j, m in enumerate(layer.linears)]
        wanted.append((weights.head, (arch.vocab_size, hidden, 1)))
        rooms = [packed_bytes(linear, folds, how) for linear, (*_, folds) in wanted]
        arena = Arena(sum(rooms), len(rooms))
        matrices = []
        for room, (linear, (outputs, inputs, folds)) in zip(rooms, wanted, strict=True):
            assert linear.shape == (outputs, inputs)
            panels = arena.room(room)
            pack(linear, folds, how, panels)
            self.panels.append(panels)
            bias = 0 if linear.bias is None else self._keep(linear.bias, outputs)
            matrices.append((int(format_of(linear, how.int8)), panels.data_ptr(), bias))
        return matrices

    def _add(self, arch: ModelArch, layer: LayerWeights, matrices: list[Matrix]) -> None:
        hidden, norm = arch.hidden_size, layer.qk_norm_hd
        qkv, out, gate_up, down = matrices
        self._native.add_layer(
            input_norm=self._keep(layer.input_norm, hidden),
            qkv=qkv,
            qk_norm=0 if norm is None else self._keep(norm, self._rotated * arch.head_dim),
            out=out,
            post_norm=self._keep(layer.post_norm, hidden),
            gate_up=gate_up,
            down=down,
        )

    def _keep(self, tensor: torch.Tensor, size: int) -> int:
        """The tensor's address, for as long as this lives."""
        assert tensor.dtype == torch.bfloat16
        assert tensor.numel() == size
        kept = tensor.contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def table(self) -> _native.DenseTable:
        """The stages as C functions; it keeps what they need alive, but not the weights."""
        return self._native.table()

    def step(self, token_ids_t: torch.Tensor, positions_t: torch.Tensor, rope: Rope) -> DenseStep:
        sizes = token_ids_t.shape[0], self._hidden, self._vocab
        return DenseStep(self._native, sizes, (token_ids_t, positions_t), rope)


class DenseStep(NativeStep):
    """Reads its tokens and positions anew each time that it is run."""

    def __init__(
        self,
        native: _native.CpuDense,
        sizes: tuple[int, int, int],
        inputs: tuple[torch.Tensor, torch.Tensor],
        rope: Rope,
    ) -> None:
        """``sizes``: tokens, hidden size, vocabulary; ``inputs``: token ids and positions."""
        tokens, hidden, vocab = sizes
        self._native = native
        self._inputs = token_ids_t, positions_t = inputs
        self._rope = cos_p1d, sin_p1d = rope
        self._hidden_2tc = torch.empty((2, tokens, hidden))
        self._logits_tc: torch.Tensor | None = None
        self._logits_shape = tokens, vocab
        assert all(tensor.is_contiguous() for tensor in (*inputs, *rope))
        self._step = native.step(
            tokens=tokens,
            token_ids=token_ids_t.data_ptr(),
            positions=positions_t.data_ptr(),
            rope=(cos_p1d.data_ptr(), sin_p1d.data_ptr(), len(cos_p1d)),
            hidden=self._hidden_2tc.data_ptr(),
        )
        self.address = self._step.address

    def carry(self, layers: int) -> Carry:
        cos_t1d, sin_t1d = (_rows_of(table, self._inputs[1]) for table in self._rope)
        return self._hidden_2tc[(layers - 1) % 2], cos_t1d, sin_t1d

    def logits(self, attended_the: torch.Tensor) -> torch.Tensor:
        assert attended_the.is_contiguous()
        if self._logits_tc is None:
            self._logits_tc = torch.empty(self._logits_shape)
        self._native.finish(self._step, attended_the.data_ptr(), self._logits_tc.data_ptr())
        return self._logits_tc


class LlamaTable(NativeDense):
    """The stages of ``stages``; ``rope`` is the half's cos and sin by position."""

    def __init__(self, stages: NativeStages, rope: Rope) -> None:
        self._stages, self._rope = stages, rope
        self.table = stages.table()

    def begin(self, token_ids_t: torch.Tensor, positions_t: torch.Tensor) -> NativeStep:
        return self._stages.step(token_ids_t, positions_t, self._rope)


def _rows_of(table_p1d: torch.Tensor, positions_t: torch.Tensor) -> torch.Tensor:
    """Of a single token a view: indexing would take longer than a layer's attention."""
    if positions_t.shape[0] == 1:
        return table_p1d.narrow(0, int(positions_t), 1)
    return table_p1d.index_select(0, positions_t)
