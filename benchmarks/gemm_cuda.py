"""Products with weights on a GPU: a decode step's, in a chain, over the weights' read time.

32 layers of Llama-3.1-8B's shapes and the LM head, 15 GB of random bfloat16 weights, each read
once, captured in one graph with the norms and the gate between the products; no attention. The
peer is the same with ``F.linear``. The floor is the weights' bytes over the bandwidth of a sum over
2 GiB in the same run.

    python benchmarks/gemm_cuda.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from _common import Row, finish, parser
from cloverinfer.models.cuda_kernels import DenseKernels
from cloverinfer.models.cuda_linear import OWN_ROWS, CudaLinear, gemm_of
from cloverinfer.models.product import Linear

HIDDEN, FFN, QKV, VOCAB, LAYERS = 4096, 14336, 6144, 128256, 32
ROWS = [1, 2, 4, 8, 16, 24, 32, 48, 64]
EPS = 1e-5
DEVICE = torch.device("cuda", 0)


@dataclass
class Layer:
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


@dataclass
class Model:
    layers: list[Layer]
    head: Linear

    @property
    def nbytes(self) -> int:
        products = [product for layer in self.layers for product in vars(layer).values()]
        return self.head.nbytes + sum(product.nbytes for product in products)


def weight(outputs: int, inputs: int) -> torch.Tensor:
    made = torch.empty((outputs, inputs), device=DEVICE, dtype=torch.bfloat16)
    return made.normal_(0, inputs**-0.5)


def own_model(layers: int) -> Model:
    made = [
        Layer(
            CudaLinear(weight(QKV, HIDDEN)),
            CudaLinear(weight(HIDDEN, HIDDEN)),
            CudaLinear(weight(2 * FFN, HIDDEN)),
            CudaLinear(weight(HIDDEN, FFN)),
        )
        for _ in range(layers)
    ]
    return Model(made, CudaLinear(weight(VOCAB, HIDDEN)))


def plain(model: Model) -> Model:
    """The same weights with PyTorch's products."""
    layers = [Layer(*(Linear(p.weight) for p in vars(layer).values())) for layer in model.layers]
    return Model(layers, Linear(model.head.weight))


def step(model: Model, kernels: DenseKernels, hidden_tc: torch.Tensor) -> torch.Tensor:
    """As ``CudaStages`` puts products together: what one cannot take along, the next norm does."""
    norm_c, rows = torch.ones_like(hidden_tc[0]), hidden_tc.shape[0]

    def add_norm(linear: Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if linear.fuses_add(rows):
            added_tc = linear.add(x, hidden_tc)
            return added_tc, kernels.norm(added_tc, norm_c, EPS)
        return kernels.add_norm(hidden_tc, linear(x), norm_c, EPS)

    x_tc = kernels.norm(hidden_tc, norm_c, EPS)
    for layer in model.layers:
        attended_tc = layer.qkv(x_tc)[:, :HIDDEN]
        hidden_tc, x_tc = add_norm(layer.out, attended_tc)
        if layer.gate_up.fuses_gate(rows):
            gated_tf = layer.gate_up.gated(x_tc)
        else:
            gated_tf = kernels.gate(layer.gate_up(x_tc))
        hidden_tc, x_tc = add_norm(layer.down, gated_tf)
    return model.head(x_tc)


def time_ms(run: Callable[[], object]) -> float:
    """Of one replay, the median."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return statistics.median(times[4:])


def read_bandwidth() -> float:
    """Bytes per second of a sum over 2 GiB."""
    data = torch.randn(1 << 29, device=DEVICE)
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        data.sum()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return data.nbytes / statistics.median(times[2:])


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    if gemm_of(0) is None:
        raise SystemExit("needs a GPU of compute capability 9.0 and a build with CUDA kernels")
    bandwidth = read_bandwidth()
    print(f"read bandwidth: {bandwidth / 1e9:,.0f} GB/s")
    own = own_model(2 if options.quick else LAYERS)
    cublas, kernels = plain(own), DenseKernels(torch.bfloat16, DEVICE)
    rows = []
    for tokens in ROWS:
        assert tokens <= OWN_ROWS
        hidden_tc = torch.randn((tokens, HIDDEN), device=DEVICE).bfloat16()
        with torch.inference_mode():
            peer = time_ms(lambda x=hidden_tc: step(cublas, kernels, x))
            value = time_ms(lambda x=hidden_tc: step(own, kernels, x))
        floor = own.nbytes / bandwidth * 1e3
        rows.append(Row("step", value, "ms", {"tokens": tokens}, floor, "cuBLAS", peer))
    finish(rows, options.json)


if __name__ == "__main__":
    main()
