"""The native module. Addresses are of tensors whose shape and type the caller has checked."""

# --- attention on the CPU (csrc/bindings/attention_cpu.cpp) ---

ATTENTION_MAX_QUERIES: int
"""``CpuAttentionPool.attend`` leaves rows of more query tokens alone."""

def attention_isas() -> list[str]:
    """Instruction sets compiled in and supported by this processor, the baseline first."""

class CpuAttentionPool:
    """A KV pool in memory of the caller's, which must outlive it, and threads to attend over it.

    Types are codes: 0 float32, 1 bfloat16, 2 float16. Strides count elements. Whatever is out of
    range is a ``ValueError``.
    """

    def __init__(
        self,
        threads: int,
        isa: str,
        pool: int,
        pool_bytes: int,
        block_size: int,
        num_blocks: int,
    ) -> None: ...
    def add_layer(
        self,
        *,
        dtype: int,
        kv_heads: int,
        group: int,
        k_dim: int,
        v_dim: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: list[float],
        alibi_slopes: list[float],
    ) -> None:
        """The next layer of the pool; 0 and empty lists stand for a feature that is not used."""

    def isa(self, layer: int, /) -> str:
        """The instruction set whose kernels serve the layer."""

    def append(
        self,
        layer: int,
        dtype: int,
        k: int,
        k_stride: int,
        v: int,
        v_stride: int,
        slots: int,
        tokens: int,
        /,
    ) -> None: ...
    def attend(
        self,
        layer: int,
        dtype: int,
        q: int,
        q_stride: int,
        starts: int,
        tables: int,
        table_stride: int,
        lengths: int,
        rows: int,
        tokens: int,
        o: int,
        lse: int,
        /,
    ) -> None: ...
