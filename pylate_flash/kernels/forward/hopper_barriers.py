"""Shared memory of a stream of the Hopper kernel besides tiles, in PTX: barriers, words, and a ring of maxima.

Between uses of Gluon's barriers or writes to shared memory, Triton synchronizes all warps of a partition. But a single
partition multiplies, and each of its groups of four warps must run at its own pace, so that one takes maxima while
another multiplies. (As separate partitions, as in `hopper`, each group has code of its own, which exceeds the
instruction caches: with int8, they waited for instructions for 18 % of their time, and now for 7.)

An element is addressed by the base address of the allocation, the offset of its array, a compile-time constant, and its
index: a thread keeps one address for everything, as registers are scarce.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon import larger_of, reinterpret

# Most documents whose maxima wait to be summed.
RING = gl.constexpr(3)


@gluon.constexpr_function
def rows_of_product(config):
    """Query rows of a product: those of a part, or, in a stream, of all parts."""
    return config.tile.rows if config.stream else config.tile.rows // config.tile.parts


@gluon.constexpr_function
def warps_of_product(config):
    return 4 * config.tile.parts if config.stream else 4


@gluon.constexpr_function
def converts(config):
    """Whether copies are converted on their way, by eight warps, which need registers of other warps."""
    return config.nbits > 0 or config.pairs


@gluon.constexpr_function
def has_lower(config):
    """Whether the rest of a float32 element after rounding to float16 is multiplied, too."""
    return config.pairs and config.precision == "tf32x3"


@gluon.constexpr_function
def summing_workers(config):
    """Workers that take turns to sum the maxima of documents."""
    return 3 if converts(config) else 2


@gluon.constexpr_function
def warps_of_sums(config):
    """Warps of each summing worker."""
    return 1 if converts(config) else 2


@gluon.constexpr_function
def spans(config):
    """Most spans of columns that wait for the copying warps; those that decompress codes look further ahead."""
    return 3 if config.nbits > 0 else 2


class Offsets(NamedTuple):
    """Byte offsets of the arrays of a stream in shared memory from its base address."""

    # Barriers of tile slots, of ring slots, and of spans of columns that have been walked (`hopper_walk`).
    full_slots: int
    empty_slots: int
    full_places: int
    empty_places: int
    full_spans: int
    empty_spans: int
    # Two words per span, and one per slot: after which eights of its columns documents end, as bits; negative after the
    # last tile. In between, for pairs, the factors of similarities of the tokens in a slot.
    words_of_spans: int
    scales_of_slots: int
    ends_of_slots: int
    # Maxima [rows, 4] of documents that wait to be summed.
    ring_of_maxima: int


@gluon.constexpr_function
def offsets(config):
    slots, ring_slots, n_spans = config.tile.num_stages, RING.value, spans(config)
    scales = 4 * config.tile.columns * slots if config.pairs else 0
    barrier_bytes = 8 * slots, 8 * slots, 8 * ring_slots, 8 * ring_slots, 8 * n_spans, 8 * n_spans
    starts = [0]
    for nbytes in (*barrier_bytes, 8 * n_spans, scales, 4 * slots):
        starts.append(starts[-1] + nbytes)
    starts[-1] = -(-starts[-1] // 16) * 16
    return Offsets(*starts)


@gluon.constexpr_function
def _allocation(config, copying_threads):
    """PTX that allocates the shared memory of a stream, in which one thread initializes the barriers.

    Tiles follow it, and tensor cores expect them at multiples of 1024 bytes.
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
    for index, count in enumerate(counts):
        lines += [f"add.u32 at, $0, {8 * index};", f"@first mbarrier.init.shared.b64 [at], {count};"]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.jit
def execute_ptx(PTX: gl.constexpr, OPERANDS: gl.constexpr, operands):
    """Execute PTX with these operands; return its integer result of every thread."""
    return gl.inline_asm_elementwise(PTX, OPERANDS, operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def stream_memory(config: gl.constexpr, COPYING_THREADS: gl.constexpr):
    """Allocate the shared memory of a stream besides tiles, which Triton does not count; return its address.

    Other threads may use it after the next barrier of all threads.

    A slot is full when every copying warp has arrived, and each of COPYING_THREADS threads with its copies.
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
    """PTX of an instruction on element $2 of an array of elements of `size` bytes."""
    return f"{{ .reg .b32 at; mad.lo.u32 at, $2, {size}, $1; {instruction.replace('@', f'[at + {offset}]')} }}"


@gluon.jit
def await_barrier(memory, OFFSET: gl.constexpr, index, phase):
    PTX: gl.constexpr = _await_ptx(OFFSET)
    execute_ptx(PTX, "=r,r,r,r", [memory, index, phase])


@gluon.jit
def arrive(memory, OFFSET: gl.constexpr, index):
    """Every warp arrives once all its threads have reached this point."""
    PTX: gl.constexpr = _arrive_ptx(OFFSET)
    execute_ptx(PTX, "=r,r,r", [memory, index])


@gluon.jit
def arrive_when_copied(memory, OFFSET: gl.constexpr, index):
    """Every thread arrives once its asynchronous copies are complete."""
    PTX: gl.constexpr = _of_number("cp.async.mbarrier.arrive.noinc.shared.b64 @; mov.b32 $0, 0;", 8, OFFSET)
    execute_ptx(PTX, "=r,r,r", [memory, index])


@gluon.jit
def store_word(memory, OFFSET: gl.constexpr, index, value):
    """Store a word; all threads store the same value."""
    PTX: gl.constexpr = _of_number("st.shared.b32 @, $3; mov.b32 $0, 0;", 4, OFFSET)
    execute_ptx(PTX, "=r,r,r,r", [memory, index, value])


@gluon.jit
def load_word(memory, OFFSET: gl.constexpr, index):
    PTX: gl.constexpr = _of_number("ld.shared.b32 $0, @;", 4, OFFSET)
    return execute_ptx(PTX, "=&r,r,r", [memory, index])


# A hardware barrier that Triton does not use.
_AWAIT_8_WARPS = gl.constexpr("bar.sync 8, 256; mov.b32 $0, 0;")
_WORD_OR_0 = gl.constexpr(
    "{ .reg .pred exists; .reg .b32 end, size; mov.u32 end, %reserved_smem_offset_end; mov.u32 size, %total_smem_size;"
    " add.u32 end, end, size; setp.lt.u32 exists, $1, end; mov.b32 $0, 0; @exists ld.shared.b32 $0, [$1]; }"
)
# Every warp holds 256 values, eight per lane.
_OF_EVERY_WARP = gl.constexpr(
    gl.DistributedLinearLayout([[32], [64], [128]], [[1], [2], [4], [8], [16]], [[0], [0], [0]], [], [256])
)


@gluon.jit
def address_of(tiles, memory):
    """Find the shared memory address of tiles, which Gluon does not expose, with 8 warps before specialization.

    It is the multiple of 1024 after `memory` at which a word changes with what is stored to the first tile. Every warp
    searches by itself: Triton overwrites the scratch of a maximum over warps with the initial state of partitions,
    without waiting until all warps have read it.
    """
    gl.static_assert(gl.num_warps() == 8)
    STAGES: gl.constexpr = tiles.shape[0]
    COLUMNS: gl.constexpr = tiles.shape[1]
    WORDS: gl.constexpr = tiles.shape[2] // 2
    in_words: gl.constexpr = gl.NVMMASharedLayout(tiles.layout.swizzle_byte_width, 32, 2)
    rows = reinterpret(tiles, gl.int32, [STAGES, COLUMNS, WORDS], in_words).index(0).slice(0, 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    words, _ = gl.broadcast(
        gl.arange(1, WORDS + 1, layout=gl.SliceLayout(0, layout))[None, :], gl.zeros([8, WORDS], gl.int32, layout)
    )
    addresses = memory + 1024 * gl.arange(0, 256, layout=_OF_EVERY_WARP)
    rows.store(words)
    execute_ptx(_AWAIT_8_WARPS, "=r,r", [gl.to_tensor(0)])
    first = execute_ptx(_WORD_OR_0, "=&r,r", [addresses])
    execute_ptx(_AWAIT_8_WARPS, "=r,r", [gl.to_tensor(0)])
    rows.store(-words)
    execute_ptx(_AWAIT_8_WARPS, "=r,r", [gl.to_tensor(0)])
    second = execute_ptx(_WORD_OR_0, "=&r,r", [addresses])
    execute_ptx(_AWAIT_8_WARPS, "=r,r", [gl.to_tensor(0)])
    return gl.reduce(gl.where((first == 1) & (second == -1), addresses, 0), 0, larger_of)
