"""What ``_native`` has for GPUs: a part of its stub, and no module of its own."""

# --- attention on a GPU (csrc/bindings/attention_cuda.cpp) ---

CUDA_BUILT: bool
"""Whether this build has CUDA kernels; without them the names below but the plan are not there."""

def cuda_device_count() -> int: ...
def cuda_versions() -> tuple[int, int]:
    """Of CUDA, as 1000 times the major one and 10 times the minor one: the newest that the driver
    serves (0 where there is none), and the one that the kernels were built with."""

def cuda_attention_plan(
    *,
    lengths: list[int],
    counts: list[int],
    group: int,
    cols: int,
    kv_heads: int,
    window: int,
    fixed_tiles: int,
    tile: int,
    blocks: int,
    min_units: int,
) -> list[tuple[int, int, int, int, int, int, int, int, list[int], int]]:
    """Pieces of work in order: (range, row, KV head, column tile, first tile, end tile, parts of
    the item, slot, slots of all its parts, counter).
    """

def cuda_prompt_plan(
    *,
    lengths: list[int],
    counts: list[int],
    group: int,
    kv_heads: int,
    window: int,
    tile: int,
    blocks: int,
    narrow: int,
) -> tuple[int, list[tuple[int, int, int, int, int, int]]]:
    """Of the kernel for rows of more than ``narrow`` query tokens: parts of every item, and the
    parts of each row (row, KV head, column tile, part, first tile, end tile), longest first.
    """

def cuda_stages_within(*, limit: int, fixed_bytes: int, stage_bytes: int) -> int:
    """Tiles in flight that a kernel has room for in ``limit`` bytes of shared memory; 0: none."""

class CudaAttentionPool:
    """A KV pool in device memory of the caller's, which must outlive it.

    Types are codes: 0 float32, 1 bfloat16, 2 float16, 3 float8_e4m3. Strides count elements. Calls
    return at once; ``stream`` is CUDA's handle. Sizes out of range are a ``ValueError``, what CUDA
    refuses a ``RuntimeError``.
    """

    def __init__(
        self,
        *,
        device: int,
        pool: int,
        pool_bytes: int,
        block_size: int,
        num_blocks: int,
        fixed_splits: bool,
        shared_limit: int = 0,
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
        k_scale: float,
        v_scale: float,
        sinks: list[float],
        alibi_slopes: list[float],
    ) -> None:
        """The next layer of the pool; 0 and empty lists stand for a feature that is not used."""

    def append(
        self,
        layer: int,
        stream: int,
        dtype: int,
        k: int,
        k_stride: int,
        v: int,
        v_stride: int,
        slots: int,
        tokens: int,
        /,
    ) -> None: ...
    def append_rotated(
        self,
        layer: int,
        stream: int,
        dtype: int,
        tokens: int,
        sizes: tuple[int, int, int],
        eps: float,
        qkv: Rows,
        positions: int,
        table: tuple[int, int, int],
        norm: int,
        slots: int,
        /,
    ) -> None:
        """As ``CudaDense.rotate``, queries in place and keys and values into their slots."""

    def attend(
        self,
        layer: int,
        stream: int,
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
    def gather(
        self,
        layer: int,
        stream: int,
        dtype: int,
        table: int,
        first: int,
        length: int,
        k: int,
        v: int,
        /,
    ) -> None:
        """Positions first to length - 1 of one row, as [kv_heads, positions, size] of ``dtype``;
        float8 without its scales."""

    def copy_blocks(
        self,
        stream: int,
        from_: int,
        from_index: int,
        to: int,
        to_index: int,
        bytes_each: int,
        count: int,
        /,
    ) -> None:
        """Indices are int64 on the device; 0 counts up."""

    def settle_rows(self, settled: bool) -> None:
        """Promises that lengths, starts and tables of calls are not written by the launch just
        before them, which lets a call read them early. After an append it is taken to be so.
        """

    def rows_changed(self) -> None:
        """Takes that back for the next call."""

    def take_bad(self) -> int:
        """1 where a finished call met a block outside the pool, 2 a slot, else 0; forgets it."""

# --- products with weights on a GPU (csrc/bindings/gemm_cuda.cpp) ---

GEMM_TOKENS: int
"""Rows of a call at most."""

def cuda_gemm_serves(device: int) -> bool:
    """Whether the device can run the kernels: compute capability 9.0."""

class CudaGemm:
    """Products of bfloat16 rows with few tokens; only where ``CUDA_BUILT``.

    Strides count elements. Calls return at once; ``stream`` is CUDA's handle. Sizes and addresses
    that the kernel does not take are a ``ValueError``, what CUDA refuses a ``RuntimeError``.
    """

    def __init__(self, *, device: int) -> None: ...
    @property
    def workspace_bytes(self) -> int: ...
    def multiply(
        self,
        stream: int,
        workspace: int,
        tokens: int,
        w: tuple[int, int, int, bool, int],
        bias: int,
        x: tuple[int, int],
        y: tuple[int, int],
        residual: tuple[int, int] | None,
    ) -> None:
        """``w`` is (address, n, k, whether it is gate and then up, address of its rows' float32
        scales where it is float8, interleaved, or 0); ``x``, ``y`` and ``residual`` (address,
        stride). ``workspace`` is zero before the first call."""

# --- the dense half's small kernels on a GPU (csrc/bindings/dense_cuda.cpp) ---

Rows = tuple[int, int]
"""Address, and elements between tokens."""

class CudaDense:
    """Kernels on one device; only where ``CUDA_BUILT``.

    Types are codes: 0 float32, 1 bfloat16, 2 float16. Strides count elements. Calls return at
    once; ``stream`` is CUDA's handle. Sizes out of range are a ``ValueError``, what CUDA refuses a
    ``RuntimeError``.
    """

    def __init__(self, *, device: int, clusters: bool = True) -> None:
        """``clusters`` False: as on devices that have none, for tests."""

    def norm(
        self,
        stream: int,
        dtype: int,
        rows: int,
        columns: int,
        eps: float,
        weight: int,
        hidden: int,
        hidden_stride: int,
        out: int,
        /,
    ) -> None: ...
    def add_norm(
        self,
        stream: int,
        dtype: int,
        rows: int,
        columns: int,
        eps: float,
        weight: int,
        hidden: int,
        hidden_stride: int,
        added: int,
        added_stride: int,
        hidden_out: int,
        out: int,
        /,
    ) -> None: ...
    def embed_norm(
        self,
        stream: int,
        dtype: int,
        rows: int,
        columns: int,
        eps: float,
        weight: int,
        table: int,
        vocabulary: int,
        ids: int,
        hidden_out: int,
        out: int,
        /,
    ) -> None: ...
    def gate(
        self,
        stream: int,
        dtype: int,
        rows: int,
        columns: int,
        gate_up: int,
        stride: int,
        out: int,
        /,
    ) -> None: ...
    def rotate(
        self,
        stream: int,
        dtype: int,
        tokens: int,
        sizes: tuple[int, int, int],
        eps: float,
        qkv: Rows,
        positions: int,
        table: tuple[int, int, int],
        norm: int,
        q: Rows,
        k: Rows,
        v: Rows,
        /,
    ) -> None:
        """``sizes``: heads, KV heads, size of a head. ``table``: addresses of cos and sin, and
        their rows. ``norm``: 0 for none."""

    def quantise(
        self,
        stream: int,
        dtype: int,
        rows: int,
        columns: int,
        rows_in: int,
        stride: int,
        out: int,
        scales: int,
        interleaved: bool,
        /,
    ) -> None:
        """``out`` float8_e4m3, ``scales`` float32 of each row; ``interleaved``: in the order that
        ``CudaGemm`` wants, of 16-bit rows that lie on 16 bytes."""

    def sample(
        self,
        stream: int,
        dtype: int,
        rows: int,
        columns: int,
        logits: int,
        logits_stride: int,
        temperature: int,
        top_k: int,
        top_p: int,
        min_p: int,
        uniform: int,
        out: int,
        /,
    ) -> None:
        """``top_k`` int64 and its like float64, a number for each row."""
