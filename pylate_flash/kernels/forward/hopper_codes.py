"""Residual codes that the Hopper kernel's copying warps decompress on their way to shared memory.

A tile takes three steps, and others are begun between them, so that no step waits for memory: what is stored of its
tokens is copied to shared memory; the centroids of these are, to where the embeddings are to be; and there bucket
weights are added, and the sum times its scale replaces the centroid. A thread does the last with what it has copied
itself, eight elements at a time. Two workers of four warps each take turns with the tiles: a step is one chain of
instructions, of which one worker waits for the last while the other goes on. 32 queries and 10000 documents of 300
tokens take 1.50 ms on an H100, and 1.75 with one worker, whatever it has under way.

Weights are looked up by permutes of bytes, as in `few_bits`. Of 16 weights, lower and upper bytes have a table each; of
4, an index chooses two bytes of one.

Embeddings are rounded to the type of the queries where scores are to be those of decompressed documents. Where they may
differ, and centroids are float16, sums are multiplied in float16, by a scale rounded to it, and query rows take that
type too (`scaled_rows`), of which bfloat16 has fewer bits: 1.43 ms, as a tile takes 409 instructions in place of 523.
Scores are off by 1.6e-4 of them at most then, and by 5e-4 with embeddings rounded to bfloat16. Multiplied by its scale
in float32, after the product, a similarity would be exact, but the warps that multiply have no time for it: 1.60 ms.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..gluon import copy_to_shared, next_slot
from ..reductions import larger
from .hopper_parts import document_range

# Groups of four warps that decompress; tiles that one begins after another before it copies the centroids of that, and
# before it decompresses it.
_WORKERS = gl.constexpr(2)
_CENTROIDS_AFTER = gl.constexpr(1)
_DECODED_AFTER = gl.constexpr(2)
_NAMES = {gl.bfloat16: "bf16", gl.float16: "f16"}


def _looked_up_of_16() -> list[str]:
    """PTX that looks up weights of the indices of 4 bits in $4, with lower bytes in $10 to $13, upper in $14 to $17."""
    # Indices without their highest bits choose among eight weights, and those bits between two choices.
    lines = [
        "and.b32 index, $4, 0x77777777;",
        "shr.u32 bit, $4, 1;",
        "lop3.b32 bit, bit, 0x44444444, 0x32103210, 0xEA;",
    ]
    for first, last in ((0, 1), (2, 3)):
        for part, table in (("low", 10), ("high", 14)):
            lines += [
                f"prmt.b32 {part}, ${table}, ${table + 1}, index;",
                f"prmt.b32 other, ${table + 2}, ${table + 3}, index;",
                f"prmt.b32 {part}, {part}, other, bit;",
            ]
        # In a byte, the first index is the upper one.
        lines += [
            f"prmt.b32 weights{first}, low, high, 0x4051;",
            f"prmt.b32 weights{last}, low, high, 0x6273;",
            "shr.u32 index, index, 16;",
            "shr.u32 bit, bit, 16;",
        ]
    return lines


def _looked_up_of_4() -> list[str]:
    """PTX that looks up weights of the indices of 2 bits in $4, with all of them in $10 and $11."""
    # Index i chooses bytes 2 i and 2 i + 1. In a byte, the first index is the highest.
    lines = []
    for pair, (first, second) in enumerate(((6, -4), (2, -8), (14, 4), (10, 0))):
        lines += [
            f"shr.u32 index, $4, {first};",
            "and.b32 index, index, 0x3;",
            f"shl.b32 other, $4, {-second};" if second < 0 else f"shr.u32 other, $4, {second};",
            "lop3.b32 index, other, 0x300, index, 0xEA;",
            "mad.lo.u32 index, index, 0x22, 0x1010;",
            f"prmt.b32 weights{pair}, $10, $11, index;",
        ]
    return lines


def _decode_ptx(nbits: int, centroid: str, embedding: str | None) -> str:
    """PTX that makes eight elements, two in each of $0 to $3, of the type of centroids if `embedding` is None.

    Of indices $4, elements $5 to $8 of a centroid, a scale $9 and, from $10 on, the table.
    """
    lines = [
        ".reg .b32 index, bit, low, high, other, weights<4>, sum;",
        ".reg .b16 first, second;",
        ".reg .f32 a, b;",
        *(_looked_up_of_16() if nbits == 4 else _looked_up_of_4()),
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
_OPERANDS = gl.constexpr({nbits: ",".join(["=&r"] * 4 + ["r"] * (6 + words)) for nbits, words in ((2, 2), (4, 8))})


@gluon.constexpr_function
def _ptx_of(nbits, centroid, embedding):
    return _PTX.value[nbits, str(centroid), str(embedding)]


@gluon.jit
def _bytes_of(word, other, SHIFT: gl.constexpr):
    """The lower (SHIFT 0) or upper (8) bytes of the two weights in each of two words."""
    word, other = word >> SHIFT, other >> SHIFT
    return word & 0xFF | word >> 8 & 0xFF00 | (other & 0xFF) << 16 | (other >> 16 & 0xFF) << 24


@gluon.jit
def _table(weights_ptr, zero, UNITS: gl.constexpr, NBITS: gl.constexpr):
    """What bucket weights are looked up in: words [8], of 4 weights the first two; each of a row [UNITS].

    Every thread loads them from an address that is its own for all the compiler knows, as it does not know that `zero`
    is 0. Words that are the same for all threads it keeps in uniform registers, and copies each from there before use:
    60 of 584 instructions of a tile.
    """
    at = weights_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    at += gl.arange(0, UNITS, layout=gl.SliceLayout(0, _by_unit(UNITS))) * zero
    a, b = gl.load(at), gl.load(at + 1)
    if NBITS == 2:
        return a, b, a, b, a, b, a, b
    c, d, e = gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)
    f, g, h = gl.load(at + 5), gl.load(at + 6), gl.load(at + 7)
    return (
        _bytes_of(a, b, 0), _bytes_of(c, d, 0), _bytes_of(e, f, 0), _bytes_of(g, h, 0),
        _bytes_of(a, b, 8), _bytes_of(c, d, 8), _bytes_of(e, f, 8), _bytes_of(g, h, 8),
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
def _decode(tile, words, scales, table, types: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr):
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
    a, b = _everywhere(table[0], index), _everywhere(table[1], index)
    arguments = [index, first, second, third, last, scale, a, b]
    if NBITS == 4:
        c, d, e = _everywhere(table[2], index), _everywhere(table[3], index), _everywhere(table[4], index)
        f, g, h = _everywhere(table[5], index), _everywhere(table[6], index), _everywhere(table[7], index)
        arguments = [index, first, second, third, last, scale, a, b, c, d, e, f, g, h]
    first, second, third, last = gl.inline_asm_elementwise(
        _ptx_of(NBITS, types[1], types[2]), _OPERANDS[NBITS], arguments,
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
    wide = rows.to(gl.float32)
    bits = gl.reduce(gl.maximum(wide, -wide), 1, larger).to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.minimum(gl.maximum(bits, 1 << 23), 253 << 23)
    inverse = ((254 << 23) - bits).to(gl.float32, bitcast=True)
    return (wide * inverse[:, None]).to(dtype), bits.to(gl.float32, bitcast=True)


@gluon.jit
def decode_documents(arguments, coded, config: gl.constexpr, WORKER: gl.constexpr):
    """As `hopper_parts.copy_documents`, every other tile of packed documents that are residual codes."""
    codes_ptr, centroids_ptr, weights_ptr = coded
    (
        residuals_ptr, _, _, scale_ptr, cu_seqlens_ptr, _, tiles, _, _, full, empty, _, first, last, n_documents, _, _,
        _, _,
    ) = arguments  # fmt: skip
    SIZE: gl.constexpr = config.size
    # Slots of this worker, every other one.
    gl.static_assert(config.tile.num_stages % _WORKERS == 0)
    SLOTS: gl.constexpr = config.tile.num_stages // _WORKERS
    TOKENS: gl.constexpr = config.tile.columns
    # The last product of a document takes half a tile, of which no more is read.
    HALF: gl.constexpr = config.tail
    gl.static_assert(2 * HALF == TOKENS)
    UNITS: gl.constexpr = SIZE // 8
    EMBEDDING: gl.constexpr = None if config.scale_rows else tiles.dtype
    types: gl.constexpr = (config.nbits, centroids_ptr.dtype.element_ty, EMBEDDING)
    # What is stored of tokens: eight indices to a word, numbers of centroids, scales.
    WORD: gl.constexpr = gl.int32 if config.nbits == 4 else gl.int16
    words_ptr = residuals_ptr.to(gl.pointer_type(WORD), bitcast=True)
    by_row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(WORD, [SLOTS, TOKENS, UNITS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS, TOKENS], by_row)
    scales = gl.allocate_shared_memory(gl.float32, [SLOTS, TOKENS], by_row)
    in_pairs: gl.constexpr = gl.NVMMASharedLayout(tiles.layout.swizzle_byte_width, 32, 2)
    pairs = tiles._reinterpret(gl.int32, [_WORKERS * SLOTS, TOKENS, SIZE // 2], in_pairs)
    table = _table(weights_ptr, gl.minimum(n_documents, 1) - 1, UNITS, config.nbits)

    # All but numbers and scales are copied 16 bytes at a time.
    PACK: gl.constexpr = 128 // WORD.primitive_bitwidth
    of_words: gl.constexpr = gl.BlockedLayout([1, PACK], [32 * PACK // UNITS, UNITS // PACK], [4, 1], [1, 0])
    word_positions = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, of_words))
    word_places = gl.arange(0, UNITS, layout=gl.SliceLayout(0, of_words))
    positions = gl.arange(0, TOKENS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    of_centroids: gl.constexpr = gl.BlockedLayout([1, 8], [32 // UNITS, UNITS], [4, 1], [1, 0])
    dims = gl.arange(0, SIZE, layout=gl.SliceLayout(0, of_centroids))

    # The slots of the tiles in the three steps, counted by those of this worker, and what was left of their documents
    # where each of the last tiles began, 0 where there was none.
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    centroids_slot = gl.to_tensor(0)
    decoded_slot = gl.to_tensor(0)
    left_1 = gl.to_tensor(0)
    left_2 = gl.to_tensor(0)
    # Tiles, of this worker or not, modulo 2.
    number = gl.to_tensor(0)
    next_one = gl.minimum(first, n_documents - 1)
    following = document_range(cu_seqlens_ptr, None, next_one, next_one, 0, config)
    for document in range(first, last + 1):
        start, length = following
        next_one = gl.minimum(document + 1, n_documents - 1)
        following = document_range(cu_seqlens_ptr, None, next_one, next_one, 0, config)
        # After the last document, what is under way is finished.
        ends = document == last
        begin = gl.where(ends, 0, ((number + WORKER) & 1) * TOKENS)
        length = gl.where(ends, _WORKERS * _DECODED_AFTER * TOKENS, length)
        for position in range(begin, length, _WORKERS * TOKENS):
            left = gl.where(ends, 0, length - position)
            if left > 0:
                mbarrier.wait(empty.index(_WORKERS * slot + WORKER), phase)
                # The last token is repeated.
                tokens = start + gl.minimum(position + word_positions, length - 1)
                copy_to_shared(words.index(slot), words_ptr + (tokens * UNITS)[:, None] + word_places[None, :])
                tokens = start + gl.minimum(position + positions, length - 1)
                copy_to_shared(numbers.index(slot), codes_ptr + tokens)
                copy_to_shared(scales.index(slot), scale_ptr + tokens)
                slot, phase = next_slot(slot, phase, SLOTS)
            async_copy.commit_group()
            if left_1 > 0:
                # Every step has committed copies, empty ones where it had none: so many since this tile was begun.
                async_copy.wait_group(2 * _CENTROIDS_AFTER)
                tile = tiles.index(_WORKERS * centroids_slot + WORKER)
                for part in gl.static_range(2):
                    if left_1 > part * HALF:
                        half = numbers.index(centroids_slot).slice(part * HALF, HALF)
                        rows = half.load(gl.SliceLayout(1, of_centroids)).to(gl.int64)[:, None] * SIZE + dims[None, :]
                        copy_to_shared(tile.slice(part * HALF, HALF), centroids_ptr + rows)
                centroids_slot, _ = next_slot(centroids_slot, phase, SLOTS)
            async_copy.commit_group()
            if left_2 > 0:
                async_copy.wait_group(2 * (_DECODED_AFTER - _CENTROIDS_AFTER))
                of_pairs = pairs.index(_WORKERS * decoded_slot + WORKER)
                for part in gl.static_range(2):
                    if left_2 > part * HALF:
                        _decode(
                            of_pairs, words.index(decoded_slot), scales.index(decoded_slot), table, types,
                            part * HALF, HALF,
                        )  # fmt: skip
                mbarrier.arrive(full.index(_WORKERS * decoded_slot + WORKER), count=1)
                decoded_slot, _ = next_slot(decoded_slot, phase, SLOTS)
            left_2 = left_1
            left_1 = left
        if not ends:
            number = (number + gl.cdiv(length, TOKENS)) & 1
    if number == WORKER:
        # The parts look ahead to one tile more.
        mbarrier.wait(empty.index(_WORKERS * slot + WORKER), phase)
        mbarrier.arrive(full.index(_WORKERS * slot + WORKER), count=1)
