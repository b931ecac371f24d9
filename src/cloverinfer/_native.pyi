"""The native module. Addresses are of tensors whose shape and type the caller has checked."""

from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from ._native_cuda import CUDA_BUILT as CUDA_BUILT
from ._native_cuda import GEMM_TOKENS as GEMM_TOKENS
from ._native_cuda import CudaAttentionPool as CudaAttentionPool
from ._native_cuda import CudaDense as CudaDense
from ._native_cuda import CudaGemm as CudaGemm
from ._native_cuda import cuda_attention_plan as cuda_attention_plan
from ._native_cuda import cuda_device_count as cuda_device_count
from ._native_cuda import cuda_gemm_serves as cuda_gemm_serves
from ._native_cuda import cuda_prompt_plan as cuda_prompt_plan
from ._native_cuda import cuda_stages_within as cuda_stages_within
from ._native_cuda import cuda_versions as cuda_versions

# --- attention on the CPU (csrc/bindings/attention_cpu.cpp) ---

def attention_isas() -> list[str]:
    """Instruction sets compiled in and supported by this processor, the baseline first."""

class CpuAttentionPool:
    """A KV pool in memory of the caller's, which must outlive it, and threads to attend over it.

    Types are codes: 0 float32, 1 bfloat16, 2 float16, 3 int8 (stored only). Strides count elements.
    Whatever is out of range is a ``ValueError``.
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
        most_queries: int,
        /,
    ) -> None:
        """Rows of more than ``most_queries`` query tokens are left alone; 0: none are."""
    def table(self) -> AttentionTable: ...

# --- checksums (csrc/bindings/checksum.cpp) ---

def crc32c(data: Buffer, hardware: bool = True) -> int:
    """CRC-32C of a contiguous buffer of bytes; ``hardware`` False: without the processor's
    instructions for it."""

def crc32c_slices(data: Buffer, offsets: npt.NDArray[np.int64], length: int) -> int:
    """CRC-32C of the checksums, as little-endian 32-bit numbers, of slices of ``length`` bytes at
    ``offsets``. ``ValueError`` if one reaches outside."""

def has_hardware_crc32c() -> bool:
    """Whether this processor has instructions for it."""

# --- the dense half on the CPU (csrc/bindings/dense_cpu.cpp) ---

def dense_isas() -> list[str]:
    """Instruction sets compiled in and supported by this processor, the baseline first."""

def greedy_tokens(logits: int, rows: int, columns: int, /) -> list[int]:
    """The place of each row's largest float32, the lowest where several are equal; -1 where it is
    not finite or the row holds a NaN."""

def dense_packed_bytes(format: int, outputs: int, inputs: int) -> int:
    """Size of a matrix in panels, as ``csrc/dense_cpu/kernel.h`` describes them.

    ``format``: 0 bfloat16, 1 int8, 2 int4.
    """

def dense_pack(
    *, threads: int, format: int, weight: int, size: tuple[int, int, int], to: int
) -> None:
    """Brings a bfloat16 matrix into panels of bfloat16 or int8 at ``to``.

    ``size``: outputs of a fold, inputs, folds (one below the other), whose panels alternate.
    """

def dense_read_blocks(
    *, threads: int, kind: int, blocks: int, count: int, to: tuple[int, int, int]
) -> None:
    """Blocks of a GGUF file as codes, scales and minima (0 for Q8_0), at these addresses.

    ``kind``: 0 Q4_0, 1 Q4_1, 2 Q8_0.
    """

def dense_pack_codes(
    *, threads: int, format: int, codes: tuple[int, int, int], size: tuple[int, int, int], to: int
) -> None:
    """Brings a quantised matrix, whose inputs are whole groups of 32, into panels at ``to``.

    ``codes``: addresses of the codes (a byte each), of the groups' scales and of their minima
    (float16; 0 for int8), rows one below the other. ``size`` as for ``dense_pack``.
    """

class CpuProducts:
    """Single products with packed bfloat16 weights of the caller's. Callers take turns."""

    def __init__(self, *, threads: int, isa: str) -> None: ...
    def multiply(
        self,
        weight: tuple[int, int, int],
        size: tuple[int, int, int],
        x: int,
        rows: tuple[int, int],
        residual: int,
        y: int,
        /,
    ) -> None:
        """``weight``: format (0), addresses of the panels and of the bias or 0. ``size``: outputs
        of a fold, inputs (even), folds; of two folds ``silu(first) * second``, with no
        residual. ``rows``: how many, and elements from one to the next. ``residual``: what is
        added, contiguous as ``y`` is, or 0."""

class CpuChain:
    """Operators of a graph on rows of bfloat16, in one call. Callers take turns.

    ``counts``: inputs, outputs, weights. ``widths``: numbers of a token's row of each buffer: of
    inputs, outputs, and the chain's own. ``code``: of each step its act (0 product, 1 norm, 2 turn,
    3 map), what it writes and reads as (buffer, offset, heads, stride, size), the places of weight
    and bias or -1, a product's size (outputs of a fold, inputs, folds), the map, whether a norm
    takes the mean off, and the scalar. What reaches outside is a ``ValueError``.
    """

    def __init__(
        self,
        *,
        threads: int,
        isa: str,
        counts: tuple[int, int, int],
        widths: Sequence[int],
        code: Sequence[
            tuple[
                int,
                Sequence[tuple[int, int, int, int, int]],
                tuple[int, int],
                tuple[int, int, int],
                int,
                bool,
                float,
            ]
        ],
    ) -> None: ...
    def run(
        self, weights: tuple[int, int], tokens: int, places: Sequence[tuple[int, int]], /
    ) -> None:
        """``weights``: address of the weights' addresses, and their number. ``places``: address of
        each input and output, and numbers from one token's row to the next."""

class CpuDense:
    """Stages of a Llama over packed weights of the caller's, which must outlive it.

    Addresses of what is not there are 0; strides count elements from token to token. Whatever is
    out of range is a ``ValueError``.
    """

    def __init__(
        self,
        *,
        threads: int,
        isa: str,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        ffn: int,
        vocab: int,
        eps: float,
        embedding: int,
        final_norm: int,
        head: tuple[int, int, int],
    ) -> None: ...
    def add_layer(
        self,
        *,
        input_norm: int,
        qkv: tuple[int, int, int],
        qk_norm: int,
        out: tuple[int, int, int],
        post_norm: int,
        gate_up: tuple[int, int, int],
        down: tuple[int, int, int],
    ) -> None:
        """The next layer; matrices are format, address of the panels, address of the bias."""

    def isa(self) -> str: ...
    def stage(
        self,
        index: int,
        tokens: int,
        token_ids: int,
        attended: int,
        attended_stride: int,
        hidden: int,
        hidden_out: int,
        cos: int,
        sin: int,
        q: int,
        q_stride: int,
        k: int,
        k_stride: int,
        v: int,
        v_stride: int,
        /,
    ) -> None:
        """Hidden rows are float32, token ids int64, all else bfloat16."""

    def logits(self, hidden: int, tokens: int, out: int, /) -> None:
        """Float32 both."""

    def table(self) -> DenseTable: ...
    def step(
        self,
        *,
        tokens: int,
        token_ids: int,
        positions: int,
        rope: tuple[int, int, int],
        hidden: int,
    ) -> DenseStep:
        """``rope``: cos and sin by position, and rows of each. ``hidden``: float32
        ``[2, tokens, hidden]``, where stage i leaves rows at i % 2."""

    def finish(self, step: DenseStep, attended: int, out: int, /) -> None:
        """The last stage of a step whose stages were run by the table, and logits as float32."""

class DenseStep:
    """A step of ``CpuDense.table``; what it was made of outlives it."""

    address: int

# --- a step's layers without Python (csrc/bindings/loop.cpp) ---

class DenseTable:
    """A dense half's stages as C functions; keeps the half alive."""

    layers: int

class AttentionTable:
    """A backend's append and attend as C functions; keeps the backend's native side alive."""

    layers: int

class Gate:
    """A fair lock."""

    def enter(self) -> None: ...
    def leave(self) -> None: ...
    @property
    def waiting(self) -> int:
        """Threads that wait to enter."""

class LoopOutcome(Enum):
    DONE = 0
    EVENTS = 1
    """Something else has come, to be looked at before the loop goes on."""
    TIMEOUT = 2
    HAND_OVER = 3
    """This layer's hop, and what follows, is the caller's to do."""

class Hop:
    """A step's way to attention and back."""

class OwnHop(Hop):
    """Attention in the same node. ``rows``: addresses of starts, tables, their stride, lengths,
    slots, then rows and tokens; ``qkv``: address and stride of q, k, v. All outlive it."""

    def __init__(
        self,
        *,
        table: AttentionTable,
        rows: tuple[int, int, int, int, int, int, int],
        qkv: tuple[int, int, int, int, int, int],
        o: int,
        lse: int,
    ) -> None: ...
    @property
    def seconds(self) -> float: ...

class NearHop(Hop):
    """Attention nodes of this process. ``parts``: answerer, source, notice of the first layer,
    first row, rows. Output goes to ``o``, ``row_bytes`` a row."""

    def __init__(
        self,
        *,
        parts: Sequence[tuple[Answerer, int, int, int, int]],
        qkv: tuple[int, int, int, int, int, int],
        element_bytes: int,
        o: int,
        row_bytes: int,
    ) -> None: ...
    @property
    def seconds(self) -> list[float]:
        """In which each part's layers were answered."""

class ShmHop(Hop):
    """Attention nodes of this host. ``parts``: writer to the node, rings from it, first row, rows,
    address of the rows there and of their output here. ``row_bytes``: there and back; ``rows``: q,
    k and v as stages write them; ``o``: room for output of several nodes."""

    def __init__(
        self,
        *,
        reader: MailboxReader,
        parts: Sequence[tuple[MailboxWriter, Sequence[int], int, int, int, int]],
        row_bytes: tuple[int, int],
        rows: int,
        o: int,
        notice: int,
    ) -> None: ...
    @property
    def waiting(self) -> list[int]:
        """Parts that have not answered for the layer."""

    @property
    def lost(self) -> list[int]:
        """Parts to which the hop of the layer could not be made."""

class Answerer:
    """An attention node's steps under way, answered on whichever thread asks."""

    def __init__(self, *, table: AttentionTable, heads: int, gate: Gate | None) -> None: ...
    def begin(
        self,
        *,
        source: int,
        notice: int,
        rows: tuple[int, int, int, int, int, int, int],
        into: tuple[int, int, int, int, int, int],
        out: int,
        told: int,
    ) -> None:
        """A step: ``notice`` of its first layer, where a wire leaves q, k, v, and where output
        goes; where to tell, once a wire's last layer is answered, what was done (uint32 notice,
        uint32 layers, float64 seconds), 0 being nowhere. All that is named stays until ``end``."""

    def end(self, *, source: int, notice: int) -> tuple[int, float]:
        """Layers answered, and seconds; waits for the answer under way."""

    def close(self) -> None: ...

class ShmServer:
    """Answers hops that arrive in a mailbox, on its owner's thread."""

    def __init__(self, *, reader: MailboxReader, answerer: Answerer, layer_bits: int) -> None: ...
    def know(self, source: int, rings: Sequence[int], writer: MailboxWriter) -> None:
        """Notices of these rings are of ``source``, whose answers go by ``writer``."""

    def answer(self, source: int, notice: int) -> bool:
        """One hop of ``source`` that came another way; False: it is left to the node."""

    def serve(self, timeout: float) -> LoopOutcome:
        """EVENTS once something else is there to be polled, or TIMEOUT."""

class LayerLoop:
    """The layers of one step; ``step`` is the address of a step of ``dense``."""

    def __init__(
        self,
        *,
        dense: DenseTable,
        step: int,
        qkv: tuple[int, int, int, int, int, int],
        hop: Hop,
        gate: Gate | None,
    ) -> None: ...
    def run(self, timeout: float) -> LoopOutcome:
        """Goes on where the last call ended; ``timeout`` bounds each wait. ``ValueError`` is what
        a stage or attention refused."""

    def restart(self, notice: int) -> None:
        """For another step of the same rows, ways and memory; ``notice`` of its first layer."""

    @property
    def layer(self) -> int:
        """The layer whose hop is under way, or is to be done by the caller."""

    @property
    def dense_seconds(self) -> float: ...
    @property
    def hop_seconds(self) -> float: ...

# --- copies and mailboxes in shared memory (csrc/bindings/shm.cpp) ---
# Memory is any writable contiguous buffer (``src`` and payloads may be read-only). It stays pinned
# as long as an object made from it lives. Nothing here holds the GIL while it copies or waits.

Memory = Buffer | npt.NDArray[np.uint8]

MAILBOX_NOTICE: int
"""Kind of a record whose value is all that it says."""
LARGE_COPY_BYTES: int
"""Copies of so many bytes in all go past the caches, and over ``CopyThreads`` where given."""

class CopyThreads:
    """Threads that large copies are shared out over, the caller's included; ``ValueError`` below
    1. They sleep between copies, and end with the last object of their number."""

    def __init__(self, threads: int) -> None: ...

CALLERS_PAGE_BYTES: int
"""Of the page of shared memory that names a region of private memory to other processes."""

def open_page(page: Memory, memory: Memory) -> None:
    """``page`` (zeroed) names ``memory`` of this process from now on."""

def close_page(page: Memory, timeout: float) -> bool:
    """Nobody begins to write there any more; waits for those who do. False where somebody may
    still be writing after ``timeout`` seconds, or died while it was."""

def may_write(page: Memory, pid: int) -> None:
    """``TransportError`` where this process may not write into what ``page`` of the process
    ``pid`` names, or where that is closed."""

def write_ranges(
    page: Memory,
    pid: int,
    dst_offsets: npt.NDArray[np.int64],
    src: Memory,
    src_offsets: npt.NDArray[np.int64],
    length: int,
    index: npt.NDArray[np.int32],
) -> None:
    """As ``copy_ranges``, into the memory that ``page`` of the process ``pid`` names.
    ``TransportError`` where it is closed, gone or forbidden."""

ForeignPut: TypeAlias = tuple[
    Memory,
    npt.NDArray[np.int64],
    Memory,
    npt.NDArray[np.int64],
    int,
    npt.NDArray[np.int32],
    int,
]
"""Arguments of ``write_ranges`` but the process, and the notice that follows."""

def write_and_tell(
    writer: MailboxWriter, pid: int, puts: Sequence[ForeignPut], timeout: float
) -> int:
    """``write_ranges`` of each, and its notice into the mailbox; how many were made. It ends at
    the first that cannot be, or whose notice finds no room within ``timeout`` seconds."""

def copy_ranges(
    dst: Memory,
    dst_offsets: npt.NDArray[np.int64],
    src: Memory,
    src_offsets: npt.NDArray[np.int64],
    length: int,
    index: npt.NDArray[np.int32],
    threads: CopyThreads | None = None,
) -> None:
    """For each row (s, d) of ``index`` [n, 2]: ``length`` bytes from ``src_offsets[s]`` to
    ``dst_offsets[d]``; adjoining rows become one copy. ``ValueError``, before anything has moved,
    if a row names no offset or reaches outside the memory.
    """

def bell_rally(memory: Memory, second: bool, rounds: int, timeout: float) -> bool:
    """Wakes another process, which has the other ``second``, and is woken by it, ``rounds`` times:
    the floor of latencies. ``memory``: 256 zeroed bytes that both share, good for one rally. False
    if the other did not answer within ``timeout`` seconds.
    """

def format_mailbox(memory: Memory, pid: int, start_time: int) -> None:
    """Makes fresh memory a mailbox; its owner is named by pid and start time."""

def mailbox_owner(memory: Memory) -> tuple[int, int]:
    """(pid, start time); ``TransportError`` if this is no mailbox."""

def format_ring(memory: Memory, sender: str) -> None:
    """Makes fresh memory an empty ring; ``sender`` is an address."""

def ring_sender(memory: Memory) -> str:
    """``TransportError`` if this is no ring."""

class MailboxWriter:
    """The sending end of one ring into one mailbox. Not thread-safe."""

    def __init__(self, mailbox: Memory, ring: Memory) -> None: ...
    @property
    def position(self) -> int:
        """Bytes pushed so far."""
    @property
    def peer_closed(self) -> bool: ...
    def push(self, kind: int, value: int, payload: bytes, timeout: float) -> bool:
        """False if there was no room within ``timeout`` seconds; ``TransportError`` if the peer
        has closed; ``ValueError`` if it can never fit.
        """
    def wait_consumed(self, position: int, timeout: float) -> bool:
        """Whether the reader has come to ``position`` within ``timeout`` seconds."""
    def announce(self) -> None:
        """Tells the mailbox's owner that a ring can be found."""
    def close(self) -> None:
        """Says that nothing more will be pushed."""

class MailboxReader:
    """The owner's end of a mailbox, with the rings that lead into it. One thread."""

    def __init__(self, mailbox: Memory) -> None: ...
    @property
    def malformed(self) -> int:
        """Times that a ring held what cannot be a record."""
    def add_ring(self, ring: Memory) -> int: ...
    def remove_ring(self, ring: int) -> None: ...
    def finished(self, ring: int, sender_died: bool) -> bool:
        """Whether all is read and nothing more will come."""
    def take_announcement(self) -> bool:
        """Whether rings were announced since the last call."""
    def poll(self, timeout: float) -> list[tuple[int, int, int, bytes]]:
        """(ring, kind, value, payload) of what has arrived. Waits, asleep, up to ``timeout``
        seconds for the first; returns early with nothing at an announcement or a signal.
        """
    def close(self) -> None:
        """From now on pushes fail; senders that wait are woken."""

# --- the tcp transport (csrc/bindings/tcp.cpp) ---
# Nothing here holds the GIL while it waits. Links and regions are numbers. A ``TransportError``
# (or ``DeadlineError``, which is one) says why something could not be done.

class TcpRanges:
    """Both sides of a put. Keeps ``source`` pinned and the offsets alive."""

    def __init__(
        self,
        source: Memory,
        local: npt.NDArray[np.int64],
        region: int,
        region_bytes: int,
        remote: npt.NDArray[np.int64],
        length: int,
    ) -> None: ...

class TcpEngine:
    """An endpoint's sockets, moved by ``loops`` threads of its own."""

    def __init__(self, loops: int) -> None: ...
    @property
    def malformed(self) -> int:
        """Links that were dropped for what they sent."""
    def add_region(self, number: int, memory: Memory) -> None:
        """Lets peers write there; pinned until it is removed."""
    def remove_region(self, number: int) -> None:
        """Returns once nothing writes there any more."""
    def add_outgoing(self, sockets: list[int]) -> int:
        """A link of connected, non-blocking sockets, which it takes over; 0: it is closed."""
    def drop_outgoing(self, link: int) -> None:
        """Fails what is pending on it."""
    def add_incoming(self, key: bytes, first: bool, socket: int) -> int:
        """One more socket of the link called ``key``, which ``first`` begins. 0: there is no such
        link any more, and the socket is closed.
        """
    def fence_incoming(self, link: int, timeout: float) -> bool:
        """Ends it. True: nothing is written for it any more, and what its sockets held is thrown
        away; False: not within ``timeout`` seconds.
        """
    def problem(self, link: int) -> str:
        """Why an outgoing link is of no use; empty while it is."""
    def query(self, link: int, region: int, nbytes: int, timeout: float) -> None:
        """``TransportError`` unless the peer has this region of this size."""
    def put(
        self,
        link: int,
        number: int,
        ranges: TcpRanges,
        index: npt.NDArray[np.int32],
        notice: int,
        timeout: float,
    ) -> None:
        """Begins a put; ``poll`` tells its end by ``number``. ``ValueError``, before anything has
        moved, if a row names no slice. Waits for room.
        """
    def put_many(
        self,
        link: int,
        puts: Sequence[tuple[int, TcpRanges, npt.NDArray[np.int32], int]],
        timeout: float,
    ) -> int:
        """As ``put`` of each (number, ranges, index, notice); how many were begun, up to the first
        that cannot be."""
    def send(self, link: int, message: bytes, timeout: float) -> None:
        """Begins to send; waits for room."""
    def poll(
        self, timeout: float
    ) -> tuple[list[tuple[int, int | bytes | None]], list[tuple[int, bool, str]]]:
        """([(link, notice, message, or None for the link's end)], [(number of a put, whether it
        missed its deadline, what went wrong or "")]). Waits, asleep, up to ``timeout`` seconds for
        the first; returns early with nothing at a signal.
        """
    def close(self, timeout: float) -> None:
        """Waits up to ``timeout`` seconds for what is pending, then ends everything."""
