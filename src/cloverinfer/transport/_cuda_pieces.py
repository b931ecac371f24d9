"""A kernel that copies many pieces of one size between two memories, for what copy engines do
badly: thousands of pieces of some kilobytes. PTX, which the driver compiles for whatever device is
there, so that no CUDA compiler is needed.

Each block of 256 threads takes chunks of 16 KiB: it reads one row of a table (target, source) and
each thread moves four vectors of 16 bytes, all loads before the first store. The table must be in
device memory: read over the bus, by every thread, it costs ten times what the copies do.
"""

from __future__ import annotations

from ctypes import c_uint, c_uint64

from ._cuda_driver import Driver

VECTOR = 16
"""Addresses and lengths must be multiples of it."""
_CHUNK = 16 << 10
_THREADS = 256
_MOST_BLOCKS = 2048

_PTX = """
.version 6.4
.target sm_70
.address_size 64

.visible .entry copy_pieces(
    .param .u64 table, .param .u32 pieces, .param .u32 vectors, .param .u32 chunks)
{
    .reg .pred %p<6>;
    .reg .b32 %r<16>;
    .reg .b32 %v<16>;
    .reg .b64 %d<10>;

    ld.param.u64 %d1, [table];
    ld.param.u32 %r1, [pieces];
    ld.param.u32 %r2, [vectors];
    ld.param.u32 %r3, [chunks];
    mov.u32 %r4, %ctaid.x;
    mov.u32 %r5, %tid.x;
    mov.u32 %r6, %nctaid.x;
    mul.lo.u32 %r7, %r1, %r3;
next:
    setp.ge.u32 %p1, %r4, %r7;
    @%p1 bra done;
    // The row of this chunk's piece.
    div.u32 %r8, %r4, %r3;
    mul.lo.u32 %r9, %r8, %r3;
    sub.u32 %r9, %r4, %r9;
    mul.wide.u32 %d2, %r8, 16;
    add.u64 %d2, %d1, %d2;
    ld.global.v2.u64 {%d3, %d4}, [%d2];
    // First vector of this thread: chunk * 1024 + thread; the others 256 vectors further each.
    shl.b32 %r10, %r9, 10;
    add.u32 %r10, %r10, %r5;
    add.u32 %r11, %r10, 256;
    add.u32 %r12, %r10, 512;
    add.u32 %r13, %r10, 768;
    setp.lt.u32 %p2, %r10, %r2;
    setp.lt.u32 %p3, %r11, %r2;
    setp.lt.u32 %p4, %r12, %r2;
    setp.lt.u32 %p5, %r13, %r2;
    mul.wide.u32 %d5, %r10, 16;
    add.u64 %d6, %d3, %d5;
    add.u64 %d7, %d4, %d5;
    @%p2 ld.global.v4.u32 {%v0, %v1, %v2, %v3}, [%d7];
    @%p3 ld.global.v4.u32 {%v4, %v5, %v6, %v7}, [%d7+4096];
    @%p4 ld.global.v4.u32 {%v8, %v9, %v10, %v11}, [%d7+8192];
    @%p5 ld.global.v4.u32 {%v12, %v13, %v14, %v15}, [%d7+12288];
    @%p2 st.global.v4.u32 [%d6], {%v0, %v1, %v2, %v3};
    @%p3 st.global.v4.u32 [%d6+4096], {%v4, %v5, %v6, %v7};
    @%p4 st.global.v4.u32 [%d6+8192], {%v8, %v9, %v10, %v11};
    @%p5 st.global.v4.u32 [%d6+12288], {%v12, %v13, %v14, %v15};
    add.u32 %r4, %r4, %r6;
    bra next;
done:
    ret;
}
"""


class PieceKernel:
    """Made with a device's context current, and closed so."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._module = driver.load(_PTX)
        self._function = driver.function(self._module, "copy_pieces")

    def launch(self, stream: int, table: int, pieces: int, length: int) -> None:
        """``table``: device address of ``pieces`` rows of two addresses, target and source; each
        piece has ``length`` bytes.
        """
        assert length % VECTOR == 0
        chunks = -(-length // _CHUNK)
        assert pieces * chunks < 1 << 32
        arguments = (c_uint64(table), *map(c_uint, (pieces, length // VECTOR, chunks)))
        shape = (min(pieces * chunks, _MOST_BLOCKS), _THREADS)
        self._driver.launch(stream, self._function, shape, *arguments)

    def close(self) -> None:
        self._driver.unload(self._module)
