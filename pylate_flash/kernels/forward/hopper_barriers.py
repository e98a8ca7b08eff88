"""What a stream of the Hopper kernel has in shared memory beside tiles, in PTX: barriers, words, and a ring of maxima.

Where warps use Gluon's barriers, or write to shared memory, Triton has all warps of their partition wait for each other
in between. But one partition multiplies, of which each group of four warps is to go at a pace of its own, so that one
takes maxima while another multiplies. (As partitions of their own, as in `hopper`, each has its own code, which the
caches of instructions do not hold: with int8, they waited for instructions for 18 % of their time, where it is 7 now.)

All is told by the address of the whole, how far from there an array begins, which is known when a kernel is compiled,
and a number in it: a thread has one address for all of it, as registers are few.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon import larger_of

# Documents whose maxima wait to be summed, at most.
RING = gl.constexpr(3)


@gluon.constexpr_function
def rows_of_product(config):
    """Query rows that are multiplied together: those of a part, or, of a stream, of all."""
    return config.tile.rows if config.stream else config.tile.rows // config.tile.parts


@gluon.constexpr_function
def warps_of_product(config):
    return 4 * config.tile.parts if config.stream else 4


@gluon.constexpr_function
def converts(config):
    """Whether what is copied becomes something else on its way, by eight warps, which need the registers of others."""
    return config.nbits > 0 or config.pairs


@gluon.constexpr_function
def has_lower(config):
    """Whether what float16 leaves of an element of float32 is multiplied too."""
    return config.pairs and config.precision == "tf32x3"


@gluon.constexpr_function
def summing_workers(config):
    """How many take turns to sum the maxima of a document."""
    return 3 if converts(config) else 2


@gluon.constexpr_function
def warps_of_sums(config):
    """The warps of each of these."""
    return 1 if converts(config) else 2


@gluon.constexpr_function
def spans(config):
    """Spans of columns that wait for the warps that copy, at most. Those that decompress codes look further ahead."""
    return 3 if config.nbits > 0 else 2


class Offsets(NamedTuple):
    """Where what a stream has in shared memory begins, in bytes from its address."""

    # Barriers: of tiles; of places in the ring; of spans of columns that have been walked (`hopper_walk`).
    full_slots: int
    empty_slots: int
    full_places: int
    empty_places: int
    full_spans: int
    empty_spans: int
    # Two words of every span, and one of every slot: after which eights of its columns documents end, as bits; below 0,
    # after all. In between, of pairs, what similarities of a slot's tokens are multiplied by.
    words_of_spans: int
    scales_of_slots: int
    ends_of_slots: int
    # Where maxima [rows, 4] of documents wait to be summed.
    ring_of_maxima: int


@gluon.constexpr_function
def offsets(config):
    slots, places, spanned = config.tile.num_stages, RING.value, spans(config)
    scales = 4 * config.tile.columns * slots if config.pairs else 0
    of_barriers = 8 * slots, 8 * slots, 8 * places, 8 * places, 8 * spanned, 8 * spanned
    begins = [0]
    for nbytes in (*of_barriers, 8 * spanned, scales, 4 * slots):
        begins.append(begins[-1] + nbytes)
    begins[-1] = -(-begins[-1] // 16) * 16
    return Offsets(*begins)


@gluon.constexpr_function
def _allocation(config, copying_threads):
    """PTX that allocates what a stream has in shared memory, and has one thread make the barriers.

    Tiles come behind, of which the tensor cores expect that they begin at multiples of 1024 bytes.
    """
    stages, multiplying = config.tile.num_stages, warps_of_product(config)
    counts = [(8 if config.pairs else 4) + copying_threads] * stages + [multiplying] * stages
    counts += [multiplying] * RING.value + [warps_of_sums(config)] * RING.value
    counts += [1] * spans(config) + [8 if converts(config) else 4] * spans(config)
    nbytes = offsets(config).ring_of_maxima + RING.value * 16 * config.tile.rows
    lines = [
        ".reg .pred first;",
        ".reg .b32 thread, at;",
        f".shared .align 1024 .b8 allocated[{-(-nbytes // 1024) * 1024}];",
        "mov.u32 $0, allocated;",
        "mov.u32 thread, %tid.x;",
        "setp.eq.u32 first, thread, 0;",
    ]
    for number, count in enumerate(counts):
        lines += [f"add.u32 at, $0, {8 * number};", f"@first mbarrier.init.shared.b64 [at], {count};"]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.jit
def execute_ptx(PTX: gl.constexpr, OPERANDS: gl.constexpr, operands):
    """The integer that PTX with these operands gives every thread."""
    return gl.inline_asm_elementwise(PTX, OPERANDS, operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def stream_memory(config: gl.constexpr, COPYING_THREADS: gl.constexpr):
    """The address of what a stream has in shared memory beside tiles, which Triton does not count.

    Others may use it after the next barrier of all threads.

    A slot is full when every copying warp has said so, and each of so many threads when what it copies has arrived.
    """
    PTX: gl.constexpr = _allocation(config, COPYING_THREADS)
    return execute_ptx(PTX, "=r,r", [gl.to_tensor(0)])


@gluon.constexpr_function
def _await_ptx(offset):
    return (
        "{ .reg .pred there; .reg .b32 at; mad.lo.u32 at, $2, 8, $1;"
        f" again: mbarrier.try_wait.parity.shared.b64 there, [at + {offset}], $3; @!there bra.uni again;"
        " mov.b32 $0, 0; }"
    )


@gluon.constexpr_function
def _arrive_ptx(offset):
    return (
        "{ .reg .pred first; .reg .b32 lane, at; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;"
        " mad.lo.u32 at, $2, 8, $1; bar.warp.sync -1;"
        f" @first mbarrier.arrive.shared.b64 _, [at + {offset}]; mov.b32 $0, 0; }}"
    )


@gluon.constexpr_function
def _of_number(instruction, size, offset):
    """PTX of an instruction on what is `size` bytes long and has number $2."""
    return f"{{ .reg .b32 at; mad.lo.u32 at, $2, {size}, $1; {instruction.replace('@', f'[at + {offset}]')} }}"


@gluon.jit
def await_barrier(memory, OFFSET: gl.constexpr, number, phase):
    PTX: gl.constexpr = _await_ptx(OFFSET)
    execute_ptx(PTX, "=r,r,r,r", [memory, number, phase])


@gluon.jit
def arrive(memory, OFFSET: gl.constexpr, number):
    """Every warp arrives, once all its threads are here."""
    PTX: gl.constexpr = _arrive_ptx(OFFSET)
    execute_ptx(PTX, "=r,r,r", [memory, number])


@gluon.jit
def arrive_when_copied(memory, OFFSET: gl.constexpr, number):
    """Every thread arrives, when what it copies asynchronously is there."""
    PTX: gl.constexpr = _of_number("cp.async.mbarrier.arrive.noinc.shared.b64 @; mov.b32 $0, 0;", 8, OFFSET)
    execute_ptx(PTX, "=r,r,r", [memory, number])


@gluon.jit
def store_word(memory, OFFSET: gl.constexpr, number, value):
    """Of all threads, which have the same value."""
    PTX: gl.constexpr = _of_number("st.shared.b32 @, $3; mov.b32 $0, 0;", 4, OFFSET)
    execute_ptx(PTX, "=r,r,r,r", [memory, number, value])


@gluon.jit
def load_word(memory, OFFSET: gl.constexpr, number):
    PTX: gl.constexpr = _of_number("ld.shared.b32 $0, @;", 4, OFFSET)
    return execute_ptx(PTX, "=&r,r,r", [memory, number])


# At a barrier of the hardware that Triton does not use.
_AWAIT_8_WARPS = gl.constexpr("bar.sync 8, 256; mov.b32 $0, 0;")
_WORD_OR_0 = gl.constexpr(
    "{ .reg .pred exists; .reg .b32 end, size; mov.u32 end, %reserved_smem_offset_end; mov.u32 size, %total_smem_size;"
    " add.u32 end, end, size; setp.lt.u32 exists, $1, end; mov.b32 $0, 0; @exists ld.shared.b32 $0, [$1]; }"
)
# Every warp has 256 numbers, a lane eight of them.
_OF_EVERY_WARP = gl.constexpr(
    gl.DistributedLinearLayout([[32], [64], [128]], [[1], [2], [4], [8], [16]], [[0], [0], [0]], [], [256])
)


@gluon.jit
def address_of(tiles, memory):
    """The address of tiles in shared memory, which Gluon does not tell. A block has 8 warps, and no partitions yet.

    It is the multiple of 1024, behind `memory`, where a word changes as what is stored in the first tile does. Every
    warp looks for itself: what a maximum over warps leaves in shared memory, Triton overwrites with what partitions
    begin with, and does not wait until all warps have read it.
    """
    gl.static_assert(gl.num_warps() == 8)
    STAGES: gl.constexpr = tiles.shape[0]
    COLUMNS: gl.constexpr = tiles.shape[1]
    WORDS: gl.constexpr = tiles.shape[2] // 2
    in_words: gl.constexpr = gl.NVMMASharedLayout(tiles.layout.swizzle_byte_width, 32, 2)
    rows = tiles._reinterpret(gl.int32, [STAGES, COLUMNS, WORDS], in_words).index(0).slice(0, 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    words, _ = gl.broadcast(
        gl.arange(1, WORDS + 1, layout=gl.SliceLayout(0, layout))[None, :], gl.zeros([8, WORDS], gl.int32, layout)
    )
    at = memory + 1024 * gl.arange(0, 256, layout=_OF_EVERY_WARP)
    rows.store(words)
    execute_ptx(_AWAIT_8_WARPS, "=r,r", [gl.to_tensor(0)])
    first = execute_ptx(_WORD_OR_0, "=&r,r", [at])
    execute_ptx(_AWAIT_8_WARPS, "=r,r", [gl.to_tensor(0)])
    rows.store(-words)
    execute_ptx(_AWAIT_8_WARPS, "=r,r", [gl.to_tensor(0)])
    second = execute_ptx(_WORD_OR_0, "=&r,r", [at])
    execute_ptx(_AWAIT_8_WARPS, "=r,r", [gl.to_tensor(0)])
    return gl.reduce(gl.where((first == 1) & (second == -1), at, 0), 0, larger_of)
