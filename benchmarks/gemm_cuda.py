"""Products with weights on a GPU: a decode step's, in a chain, over the weights' read time.

32 layers of Llama-3.1-8B's shapes and the LM head, 15 GB of random bfloat16 weights, each read
once, captured in one graph with the norms and the gate between the products; no attention. The
peer is the same with ``F.linear``. With ``--quantization fp8`` the layers' weights are in float8,
and the peers are ``torch._scaled_mm`` with quantised rows and our kernel with bfloat16 weights. The
floor is the weights' bytes over the bandwidth of a sum over 2 GiB in the same run.

    python benchmarks/gemm_cuda.py [--quantization fp8]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from _common import Row, finish, parser
from cloverinfer.models.cuda_kernels import DenseKernels
from cloverinfer.models.cuda_linear import OWN_ROWS, CudaLinear, gemm_of
from cloverinfer.models.fp8 import Fp8Linear
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


def plain_model(layers: int, product: Callable[[torch.Tensor], Linear]) -> Model:
    """PyTorch's products, the layers' by ``product``."""
    shapes = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)]
    made = [Layer(*(product(weight(*shape)) for shape in shapes)) for _ in range(layers)]
    return Model(made, Linear(weight(VOCAB, HIDDEN)))


def own(model: Model) -> Model:
    """The same weights with our kernel."""
    layers = [Layer(*(CudaLinear(p) for p in vars(layer).values())) for layer in model.layers]
    return Model(layers, CudaLinear(model.head))


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


def models(layers: int, quantization: str | None) -> tuple[Model, dict[str, Model]]:
    """Ours, and its peers by name."""
    plain = plain_model(layers, Linear)
    if quantization is None:
        return own(plain), {"cuBLAS": plain}
    narrow = plain_model(layers, Fp8Linear)
    return own(narrow), {"torch._scaled_mm": narrow, "ours in bfloat16": own(plain)}


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--quantization", choices=["fp8"], help="of the layers' matrices")
    options = made.parse_args()
    if gemm_of(0) is None:
        raise SystemExit("needs a GPU of compute capability 9.0 and a build with CUDA kernels")
    bandwidth = read_bandwidth()
    print(f"read bandwidth: {bandwidth / 1e9:,.0f} GB/s")
    ours, peers = models(2 if options.quick else LAYERS, options.quantization)
    kernels = DenseKernels(torch.bfloat16, DEVICE)
    floor = ours.nbytes / bandwidth * 1e3
    rows = []
    for tokens in ROWS:
        assert tokens <= OWN_ROWS
        hidden_tc = torch.randn((tokens, HIDDEN), device=DEVICE).bfloat16()
        with torch.inference_mode():
            times = {
                name: time_ms(lambda x=hidden_tc, model=model: step(model, kernels, x))
                for name, model in peers.items()
            }
            value = time_ms(lambda x=hidden_tc: step(ours, kernels, x))
        for name, peer in times.items():
            rows.append(Row("step", value, "ms", {"tokens": tokens}, floor, name, peer))
    finish(rows, options.json)


if __name__ == "__main__":
    main()
