"""Residual codes that the Hopper kernel's copying warps decompress on their way to shared memory.

A tile takes three steps, and others are begun between them, so that no step waits for memory: what is stored of its
tokens is copied to shared memory; the centroids of these are, to where the embeddings are to be; and there bucket
weights are added, and the sum times its scale replaces the centroid. A thread does the last with what it has copied
itself, eight elements at a time. Two workers of four warps each take turns with the tiles: a step is one chain of
instructions, of which one worker waits for the last while the other goes on. With one worker, whatever it has under
way, 32 queries and 10000 documents of 300 tokens took 1.75 ms on an H100, and 1.50 with two.

Weights are looked up two at a time, by a byte of indices (of 2 bits, half a byte), in a table in shared memory. By
permutes of bytes, as in `few_bits`, it took a thread 184 instructions of the ALU for 64 elements, where now it is 32,
and maxima need the ALU too: 1.33 ms with 4 bits in place of 1.40; 0.0946 in place of 0.1010 with 1024 documents of 180.

Embeddings are rounded to the type of the queries where scores are to be those of decompressed documents. Where they may
differ, and centroids are float16, sums are multiplied in float16, by a scale rounded to it, and query rows take that
type too (`scaled_rows`), of which bfloat16 has fewer bits: 1.43 ms in place of 1.50, looked up by permutes. Scores are
off by 1.6e-4 of them at most then, and by 5e-4 with embeddings rounded to bfloat16. Multiplied by its scale in float32,
after the product, a similarity would be exact, but the warps that multiply have no time for it: 1.60 ms.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..gluon import copy_to_shared, next_slot
from ..reductions import larger
from .hopper_barriers import (
    SPANS,
    arrive,
    await_barrier,
    empty_slots,
    empty_spans,
    ends_of_slots,
    full_slots,
    store_word,
)
from .hopper_walk import SPAN, await_span, ended_of, of_tile, run_start_of

# Groups of four warps that decompress; tiles that one begins after another before it copies the centroids of that, and
# before it decompresses it.
_WORKERS = gl.constexpr(2)
_CENTROIDS_AFTER = gl.constexpr(1)
_DECODED_AFTER = gl.constexpr(2)
_NAMES = {gl.bfloat16: "bf16", gl.float16: "f16"}
# Bits before the indices of each pair, two of 4 bits or two of 2, of which the first one is the upper one.
_PAIRS = {4: (0, 8, 16, 24), 2: (4, 0, 12, 8)}
# Every pair of weights stands in the table once for each bank of shared memory, so that no lane waits for another.
_LANES = gl.constexpr(32)


def _looked_up(nbits: int) -> list[str]:
    """PTX that looks up the weights of the indices in $4, pair by pair, in the column that begins at $10."""
    lines = []
    for pair, first in enumerate(_PAIRS[nbits]):
        lines += [
            f"bfe.u32 index, $4, {first}, {2 * nbits};",
            f"mad.lo.u32 index, index, {4 * _LANES.value}, $10;",
            f"ld.shared.b32 weights{pair}, [index];",
        ]
    return lines


def _decode_ptx(nbits: int, centroid: str, embedding: str | None) -> str:
    """PTX that makes eight elements, two in each of $0 to $3, of the type of centroids if `embedding` is None.

    Of indices $4, elements $5 to $8 of a centroid, a scale $9, and the address of the thread's column of the table $10.
    """
    lines = [
        ".reg .b32 index, weights<4>, sum;",
        ".reg .b16 first, second;",
        ".reg .f32 a, b;",
        *_looked_up(nbits),
    ]
    if embedding is None:
        # The largest number of float16: a sum of a norm below 2**-16 is not normalised.
        lines += ["min.f32 a, $9, 0f477FE000;", f"cvt.rn.{centroid}x2.f32 index, a, a;"]
    for pair in range(4):
        lines.append(f"add.rn.{centroid}x2 sum, ${5 + pair}, weights{pair};")
        if embedding is None:
            lines.append(f"mul.rn.{centroid}x2 ${pair}, sum, index;")
            continue
        lines += [
            "mov.b32 {first, second}, sum;",
            f"cvt.f32.{centroid} a, first;",
            f"cvt.f32.{centroid} b, second;",
            "mul.f32 a, a, $9;",
            "mul.f32 b, b, $9;",
            f"cvt.rn.{embedding}x2.f32 ${pair}, b, a;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


_PTX = gl.constexpr(
    {
        (nbits, str(centroid), str(embedding)): _decode_ptx(nbits, _NAMES[centroid], _NAMES.get(embedding))
        for nbits in (2, 4)
        for centroid in _NAMES
        for embedding in (*_NAMES, None)
        if embedding is not None or centroid is gl.float16
    }
)
# A word of a table for each lane and pair.
_ALLOCATE = gl.constexpr(
    {nbits: f"{{ .shared .align 128 .b32 pairs[{_LANES.value << 2 * nbits}]; mov.u32 $0, pairs; }}" for nbits in _PAIRS}
)
_OPERANDS = gl.constexpr(",".join(["=&r"] * 4 + ["r"] * 7))


@gluon.constexpr_function
def _ptx_of(nbits, centroid, embedding):
    return _PTX.value[nbits, str(centroid), str(embedding)]


@gluon.jit
def pair_table(weights_ptr, NBITS: gl.constexpr):
    """The address in shared memory of a table [pairs, lanes] of two bucket weights each, which it fills.

    It is allocated in PTX, as Gluon tells no address of what it allocates, and so comes on top of what Triton counts.
    """
    PAIRS: gl.constexpr = 1 << 2 * NBITS
    by_pair: gl.constexpr = gl.BlockedLayout([PAIRS // 4, 1], [1, _LANES], [4, 1], [1, 0])
    indices = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, by_pair))
    lanes = gl.arange(0, _LANES, layout=gl.SliceLayout(0, by_pair))
    at = weights_ptr.to(gl.pointer_type(gl.int16), bitcast=True)
    first = gl.load(at + (indices >> NBITS)).to(gl.int32) & 0xFFFF
    second = gl.load(at + (indices & (1 << NBITS) - 1)).to(gl.int32) << 16
    table = gl.inline_asm_elementwise(
        _ALLOCATE[NBITS], "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )
    places = table + 4 * (indices[:, None] * _LANES + lanes[None, :])
    pairs, _ = gl.broadcast((first | second)[:, None], places)
    gl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.b32 $0, $1;", "=r,r,r", [places, pairs], dtype=gl.int32, is_pure=False, pack=1
    )
    return table


@gluon.jit
def _column(table, UNITS: gl.constexpr):
    """The address of the table's column of each lane, which it has in place of a row [UNITS]."""
    row = table + gl.arange(0, UNITS, layout=gl.SliceLayout(0, _by_unit(UNITS))) * 0
    return gl.inline_asm_elementwise(
        "{ .reg .u32 lane; mov.u32 lane, %laneid; mad.lo.u32 $0, lane, 4, $1; }",
        "=r,r", [row], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _by_unit(units):
    """The layout of tokens and units of eight elements, of which a thread has one."""
    return gl.BlockedLayout([1, 1], [32 // units, units], [4, 1], [1, 0])


@gluon.jit
def _everywhere(word, like):
    word = gl.convert_layout(word, gl.SliceLayout(0, like.type.layout), assert_trivial=True)
    return gl.broadcast(word[None, :], like)[0]


@gluon.jit
def _decode(tile, words, scales, column, types: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """Make embeddings of the centroids in a tile [tokens, elements / 2], int32, in ROWS rows from FIRST on."""
    NBITS: gl.constexpr = types[0]
    UNITS: gl.constexpr = words.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // UNITS, UNITS], [4, 1], [1, 0])
    pairs = tile.slice(FIRST, ROWS).load(layout)
    even, odd = gl.split(gl.reshape(pairs, [ROWS, UNITS, 2, 2]))
    first, third = gl.split(even)
    second, last = gl.split(odd)
    here: gl.constexpr = first.type.layout
    index = words.slice(FIRST, ROWS).load(here).to(gl.int32)
    scale = scales.slice(FIRST, ROWS).load(gl.SliceLayout(1, here)).to(gl.int32, bitcast=True)
    scale, _ = gl.broadcast(scale[:, None], index)
    arguments = [index, first, second, third, last, scale, _everywhere(column, index)]
    first, second, third, last = gl.inline_asm_elementwise(
        _ptx_of(NBITS, types[1], types[2]), _OPERANDS, arguments,
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    made = gl.reshape(gl.join(gl.join(first, third), gl.join(second, last)), [ROWS, 4 * UNITS])
    tile.slice(FIRST, ROWS).store(gl.convert_layout(made, layout, assert_trivial=True))


@gluon.jit
def scaled_rows(rows, dtype: gl.constexpr):
    """Rows in another type of 16 bits, and what their maxima are to be multiplied by, a power of 2 for each row.

    Largest elements become 1 to 2 (of infinite ones, or nearly so, the others come out smaller), and an element is
    rounded to float16 only where it is below 2**-14.
    """
    largest = gl.reduce(gl.maximum(rows, -rows), 1, larger).to(gl.float32)
    bits = largest.to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.minimum(gl.maximum(bits, 1 << 23), 253 << 23)
    inverse = ((254 << 23) - bits).to(gl.float32, bitcast=True)
    return (rows.to(gl.float32) * inverse[:, None]).to(dtype), bits.to(gl.float32, bitcast=True)


@gluon.jit
def decode_stream(arguments, coded, walked, config: gl.constexpr, WORKER: gl.constexpr):
    """As `hopper_stream.copy_stream`, every other tile, of documents that are residual codes."""
    codes_ptr, centroids_ptr, table = coded
    (
        residuals_ptr, _, _, scale_ptr, _, cu_seqlens_ptr, _, tiles, _, _, _, memory, _, _, first, _, n_documents,
        _, _, _, _,
    ) = arguments  # fmt: skip
    SIZE: gl.constexpr = config.size
    # Slots of this worker, every other one.
    gl.static_assert(config.tile.num_stages % _WORKERS == 0)
    SLOTS: gl.constexpr = config.tile.num_stages // _WORKERS
    COLUMNS: gl.constexpr = config.tile.columns
    # So many rows are decoded at a time, as more take registers.
    ROWS: gl.constexpr = 32
    UNITS: gl.constexpr = SIZE // 8
    EMBEDDING: gl.constexpr = None if config.scale_rows else tiles.dtype
    types: gl.constexpr = (config.nbits, centroids_ptr.dtype.element_ty, EMBEDDING)
    # What is stored of tokens: eight indices to a word, numbers of centroids, scales.
    WORD: gl.constexpr = gl.int32 if config.nbits == 4 else gl.int16
    words_ptr = residuals_ptr.to(gl.pointer_type(WORD), bitcast=True)
    by_row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(WORD, [SLOTS, COLUMNS, UNITS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS, COLUMNS], by_row)
    scales = gl.allocate_shared_memory(gl.float32, [SLOTS, COLUMNS], by_row)
    in_pairs: gl.constexpr = gl.NVMMASharedLayout(tiles.layout.swizzle_byte_width, 32, 2)
    pairs = tiles._reinterpret(gl.int32, [_WORKERS * SLOTS, COLUMNS, SIZE // 2], in_pairs)
    column = _column(table, UNITS)

    # All but numbers and scales are copied 16 bytes at a time.
    PACK: gl.constexpr = 128 // WORD.primitive_bitwidth
    of_words: gl.constexpr = gl.BlockedLayout([1, PACK], [32 * PACK // UNITS, UNITS // PACK], [4, 1], [1, 0])
    word_positions = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, of_words))
    word_places = gl.arange(0, UNITS, layout=gl.SliceLayout(0, of_words))
    positions = gl.arange(0, COLUMNS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    of_centroids: gl.constexpr = gl.BlockedLayout([1, 8], [32 // UNITS, UNITS], [4, 1], [1, 0])
    dims = gl.arange(0, SIZE, layout=gl.SliceLayout(0, of_centroids))

    # The slots of the tiles in the three steps, counted by those of this worker, and whether there were the last tiles.
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    centroids_slot = gl.to_tensor(0)
    decoded_slot = gl.to_tensor(0)
    first_step = gl.to_tensor(False)
    second_step = gl.to_tensor(False)
    run_start = run_start_of(cu_seqlens_ptr, first, n_documents)
    words_ptr += run_start.to(gl.int64) * UNITS
    codes_ptr += run_start
    scale_ptr += run_start
    centroids = centroids_ptr + dims[None, :]
    of_columns, _places = walked
    TILES: gl.constexpr = SPAN // COLUMNS
    gl.static_assert(TILES % _WORKERS == 0)
    span = gl.to_tensor(0)
    span_phase = gl.to_tensor(0)
    number = gl.to_tensor(WORKER)
    last_number = gl.to_tensor(0)
    # After the last tile, what is under way is finished.
    left = gl.to_tensor(_DECODED_AFTER)
    while left > 0:
        eights, ended_in_span = await_span(memory, span, span_phase, config)
        exists = 8 * eights > COLUMNS * number
        last_number = gl.cdiv(8 * eights, COLUMNS)
        if exists:
            tokens = of_tile(of_columns, TILES * span + number, positions, config)
            word_tokens = of_tile(of_columns, TILES * span + number, word_positions, config)
            await_barrier(memory, empty_slots(config), _WORKERS * slot + WORKER, phase)
            store_word(memory, ends_of_slots(config), _WORKERS * slot + WORKER, ended_of(ended_in_span, number, config))
            copy_to_shared(words.index(slot), words_ptr + (word_tokens * UNITS)[:, None] + word_places[None, :])
            copy_to_shared(numbers.index(slot), codes_ptr + tokens)
            copy_to_shared(scales.index(slot), scale_ptr + tokens)
            slot, phase = next_slot(slot, phase, SLOTS)
            number += _WORKERS
            if (number >= TILES) & (eights == SPAN // 8):
                arrive(memory, empty_spans(config), span)
                span, span_phase = next_slot(span, span_phase, SPANS)
                number = gl.to_tensor(WORKER)
        else:
            left -= 1
        async_copy.commit_group()
        if first_step:
            # Every step has committed copies, empty ones where it had none: so many since this tile was begun.
            async_copy.wait_group(2 * _CENTROIDS_AFTER)
            for part in gl.static_range(COLUMNS // ROWS):
                some = numbers.index(centroids_slot).slice(part * ROWS, ROWS)
                at = centroids + some.load(gl.SliceLayout(1, of_centroids))[:, None] * SIZE
                tile = tiles.index(_WORKERS * centroids_slot + WORKER)
                copy_to_shared(tile.slice(part * ROWS, ROWS), at)
            centroids_slot, _ = next_slot(centroids_slot, phase, SLOTS)
        async_copy.commit_group()
        if second_step:
            async_copy.wait_group(2 * (_DECODED_AFTER - _CENTROIDS_AFTER))
            of_pairs = pairs.index(_WORKERS * decoded_slot + WORKER)
            for part in gl.static_range(COLUMNS // ROWS):
                _decode(
                    of_pairs, words.index(decoded_slot), scales.index(decoded_slot), column, types,
                    part * ROWS, ROWS,
                )  # fmt: skip
            arrive(memory, full_slots(config), _WORKERS * decoded_slot + WORKER)
            decoded_slot, _ = next_slot(decoded_slot, phase, SLOTS)
        second_step = first_step
        first_step = exists
    if number == last_number:
        # What multiplies looks ahead to one tile more, which would be this worker's.
        await_barrier(memory, empty_slots(config), _WORKERS * slot + WORKER, phase)
        store_word(memory, ends_of_slots(config), _WORKERS * slot + WORKER, -1)
        arrive(memory, full_slots(config), _WORKERS * slot + WORKER)
