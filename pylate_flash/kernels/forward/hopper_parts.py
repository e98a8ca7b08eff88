"""Building blocks of the Hopper kernel: copies of document tokens, query rows in registers, scales, sums.

Four warps do nothing but copy tokens to shared memory, tile by tile.

The bits of 1.0 are added to a sum x of int8 products. Bitcast to float, the result is 1 + x / 2**23, or 1 + x / 2**24
where x is negative, as floats below 1 are spaced half as far apart. A multiply-add with a non-negative scale s turns it
into s x / 2**23, rounded like x converted and multiplied. Negative results are half as large, which matters only where
one is the maximum, and is then doubled (`unscaled`). For |s x| below 2**-103, bits are lost.

This takes as many instructions as a conversion. But a conversion occupies the ALU, as a maximum does, for two cycles
each, which together is all the time of a product of 128 elements; an integer multiply-add uses another unit. (An
addition would use the ALU, too: hence the multiplication by a 1 that is unknown to the compiler.)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..gluon import add, copy_to_shared, next_slot, reinterpret
from ..rows import inverse_norm
from .hopper_barriers import (
    arrive,
    arrive_when_copied,
    offsets,
    rows_of_product,
    warps_of_product,
    warps_of_sums,
)
from .quantized_rows import largest_magnitudes, rounded, scales_of, squares_of

# The bits of 1.0: |x| stays below 2**23 in products of up to 512 elements.
_BITS_OF_ONE = gl.constexpr(0x3F800000)
_INTEGER_UNIT = gl.constexpr(2.0**23)


@gluon.constexpr_function
def scales_tokens(config):
    """Whether similarities are multiplied by a factor per token."""
    return config.normalize or config.values or config.pairs


@gluon.constexpr_function
def _groups_in_warps(ROWS, GROUP):
    """Whether each warp of a part holds exactly one group of rows."""
    return GROUP > 16 and 4 * GROUP == ROWS


@gluon.jit
def rows_of(first_row, positions, ROWS: gl.constexpr, config: gl.constexpr):
    """Query rows at these positions of a part's product, in which a warp holds 16 of every 64 rows.

    If there are as many groups as warps, each warp gets the rows of one group, so that sums stay within a warp.
    """
    if _groups_in_warps(ROWS, config.group) and not config.stream:
        positions = positions // 16 % 4 * config.group + positions // 64 * 16 + positions % 16
    return first_row + positions


@gluon.jit
def query_rows(queries_ptr, first_row, layout, FIRST: gl.constexpr, BLOCK: gl.constexpr, config: gl.constexpr):
    """Load the BLOCK elements from FIRST on of the query rows of a product."""
    group, n_queries, query_length, padded_query_length, stride_query, stride_query_token = layout
    ROWS: gl.constexpr = rows_of_product(config)
    WARPS: gl.constexpr = warps_of_product(config)
    LANES: gl.constexpr = 4 if config.stream else BLOCK // 8
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    rows = rows_of(first_row, gl.arange(0, ROWS, layout=gl.SliceLayout(1, loaded)), ROWS, config)
    query, token = rows // padded_query_length, rows % padded_query_length
    dims = FIRST + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, loaded))
    exists = ((query < n_queries) & (token < query_length))[:, None] & (dims < config.size)[None, :]
    offset = (group * n_queries + query).to(gl.int64) * stride_query + token * stride_query_token
    return gl.load(queries_ptr + offset[:, None] + dims[None, :], mask=exists, other=0.0)


@gluon.jit
def rounded_in_registers(rows, dtype: gl.constexpr, config: gl.constexpr):
    """As `quantized_rows.rounded_rows`, for rows shared by several threads: one thread, or two, computes each scale.

    If every thread computes the scales of its rows, 32 x 32 (32 x 180) with int8 takes 13.6 us instead of 11.8.
    """
    wide = rows.to(gl.float32)
    by_thread: gl.constexpr = gl.BlockedLayout([1], [32], [warps_of_product(config)], [0])
    scale, inverse = scales_of(gl.convert_layout(largest_magnitudes(wide), by_thread), dtype)
    values = rounded(wide, gl.convert_layout(inverse, gl.SliceLayout(1, wide.type.layout)), dtype)
    if config.normalize:
        scale *= inverse_norm(gl.convert_layout(squares_of(values), by_thread), scale)
    return values, scale


@gluon.jit
def scaled(sums, scale, one):
    """Sums of products [ROWS, TOKENS] times the token scales; for integers, `unscaled` completes the similarities."""
    if sums.dtype == gl.int32:
        # Multiplication by -1 becomes an operand modifier; subtraction from 0 would take an instruction.
        return gl.fma((sums * one + _BITS_OF_ONE).to(gl.float32, bitcast=True), scale[None, :], (scale * -1.0)[None, :])
    return sums * scale[None, :]


@gluon.jit
def row_sums_of(rows, layout: gl.constexpr):
    """Sum the elements of each int8 row."""
    return gl.convert_layout(gl.reduce(rows.to(gl.int32), 1, add).to(gl.float32), layout)


@gluon.jit
def scaled_affine(sums, scale, offset, row_sums):
    """Similarities of affine tokens before the row scales: sums [ROWS, TOKENS] times the scale, plus the offset.

    Sums are converted: with the bits of 1.0, the offset would be added to half of a negative sum. With the bits of
    1.5 * 2**23, which take another addition to subtract, 1 x 1000, 1024 x 1024 took 0.391 ms instead of 0.363, and with
    those for every other sum as long.
    """
    return gl.fma(sums.to(gl.float32), scale[None, :], row_sums[:, None] * offset[None, :])


@gluon.jit
def unscaled(best):
    """Maxima of similarities, from the maxima of `scaled` integers."""
    return best * gl.where(best < 0.0, 2 * _INTEGER_UNIT, _INTEGER_UNIT)


@gluon.jit
def sums_of(values, ROWS: gl.constexpr, config: gl.constexpr):
    """Sum every group of values [ROWS], laid out by `rows_of`, in the same order whichever warps do it.

    So scores of the same documents are bitwise equal, whether documents are a stream or not.
    """
    GROUP: gl.constexpr = config.group
    sums = gl.reduce(gl.reshape(values, [ROWS // min(GROUP, 16), min(GROUP, 16)]), 1, add)
    if _groups_in_warps(ROWS, GROUP) and not config.stream:
        sums = gl.reduce(gl.reshape(sums, [GROUP // 16, 4]), 0, add)
    elif GROUP > 16:
        WARPS: gl.constexpr = warps_of_sums(config) if config.stream else 4
        by_sum: gl.constexpr = gl.BlockedLayout([GROUP // 16], [32], [WARPS], [0])
        sums = gl.convert_layout(sums, by_sum) if GROUP > 32 or not config.stream else sums
        sums = gl.reduce(gl.reshape(sums, [ROWS // GROUP, GROUP // 16]), 1, add)
    return sums


@gluon.jit
def document_range(cu_seqlens_ptr, bounds_ptr, flat_document, document, document_length, config: gl.constexpr):
    """The first token of a document, counted over all documents, and its number of active tokens."""
    if config.packed:
        start = gl.load(cu_seqlens_ptr + document).to(gl.int64)
        length = (gl.load(cu_seqlens_ptr + document + 1).to(gl.int64) - start).to(gl.int32)
    else:
        start = flat_document * document_length
        length = document_length
        if config.has_documents_mask:
            length = gl.load(bounds_ptr + 2 * flat_document)
    return start, length


@gluon.jit
def tokens_read(start, remaining, BLOCK_TOKENS: gl.constexpr, TAIL: gl.constexpr, config: gl.constexpr):
    """Tokens that a product reads of the tile at `start`, given the remaining tokens of the document."""
    narrow = remaining <= TAIL
    if config.starts_early:
        narrow = narrow & (start > 0)
    return gl.where(narrow, TAIL, BLOCK_TOKENS)


@gluon.jit
def document_at(source, group, document, n_documents, document_length, config: gl.constexpr):
    """The address of a document, and its `document_range`."""
    documents_ptr, bounds_ptr, cu_seqlens_ptr, offsets_ptr, stride_group, stride_document, stride_token = source
    flat_document = group.to(gl.int64) * n_documents + document
    first_token, length = document_range(cu_seqlens_ptr, bounds_ptr, flat_document, document, document_length, config)
    if config.offset_unit > 0:
        base = documents_ptr + gl.load(offsets_ptr + document) * config.offset_unit
    elif config.packed:
        base = documents_ptr + first_token * stride_token
    else:
        base = documents_ptr + group.to(gl.int64) * stride_group + gl.cast(document, gl.int64) * stride_document
    return base, first_token, length


@gluon.jit
def tokens_of(active_ptr, first_token, positions, start, length, config: gl.constexpr):
    """A tile of a document's active tokens, padded with the last one."""
    tokens = gl.minimum(start + positions, length - 1)
    if config.has_documents_mask:
        tokens = gl.load(active_ptr + first_token + tokens)
    return tokens


@gluon.jit
def _token_rows(base, active_ptr, first_token, positions, dims, start, length, stride_token, config: gl.constexpr):
    """Addresses of these elements of a tile of a document's tokens."""
    tokens = tokens_of(active_ptr, first_token, positions, start, length, config)
    return base + tokens.to(gl.int64)[:, None] * stride_token + dims[None, :]


@gluon.jit
def _with_signs(tile):
    """Subtract 128 from the unsigned bytes [tokens, bytes] of a tile in place, which makes them signed."""
    BYTES: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [512 // BYTES, BYTES // 16], [4, 1], [1, 0])
    words_layout: gl.constexpr = gl.NVMMASharedLayout(tile.layout.swizzle_byte_width, 32, 2)
    words = reinterpret(tile, gl.int32, [tile.shape[0], BYTES // 4], words_layout)
    # 0x80 in every byte.
    words.store(words.load(layout) ^ -0x7F7F7F80)


@gluon.jit
def _make_signed(slot, shared, config: gl.constexpr):
    """Make the affine tokens that have arrived in a slot signed, and signal that the slot is full.

    Tensor cores multiply signed integers: 128 is subtracted from the values, and 128 * scale is added to the offset.
    """
    AT: gl.constexpr = offsets(config)
    tiles, second_tiles, scales, token_offsets, full = shared
    _with_signs(tiles.index(slot))
    if config.blocks.second > 0:
        _with_signs(second_tiles.index(slot))
    by_token: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offset = gl.fma(scales.index(slot).load(by_token), 128.0, token_offsets.index(slot).load(by_token))
    token_offsets.index(slot).store(offset)
    if config.stream:
        arrive(full, AT.full_slots, slot)
    else:
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _announce_copied(slot, full, config: gl.constexpr):
    AT: gl.constexpr = offsets(config)
    if config.stream:
        arrive_when_copied(full, AT.full_slots, slot)
    else:
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def announce(slot, in_flight, oldest, shared, config: gl.constexpr):
    """Make a slot full once its copies have arrived and, for affine tokens, once these are signed.

    A tile is made signed once IN_FLIGHT more tiles are being copied; `in_flight` counts the affine tiles that are not
    signed yet, and `oldest` is the slot of the first. A part releases a slot only when the next one is full: so at
    least two must be full while an empty one is awaited, and three are.
    """
    IN_FLIGHT: gl.constexpr = config.tile.num_stages - 3
    if config.affine:
        async_copy.commit_group()
        if in_flight == IN_FLIGHT:
            async_copy.wait_group(IN_FLIGHT)
            _make_signed(oldest, shared, config)
            oldest = next_slot(oldest, 0, config.tile.num_stages)[0]
        else:
            in_flight += 1
    else:
        _announce_copied(slot, shared[-1], config)
    return in_flight, oldest


@gluon.jit
def announce_last(slot, in_flight, oldest, shared, config: gl.constexpr):
    """After the last tile, make the remaining tiles signed, and announce one to which nothing is copied.

    The parts wait for it ahead of time.
    """
    AT: gl.constexpr = offsets(config)
    if config.affine:
        async_copy.wait_group(0)
        for _ in range(in_flight):
            _make_signed(oldest, shared, config)
            oldest = next_slot(oldest, 0, config.tile.num_stages)[0]
        if config.stream:
            arrive(shared[-1], AT.full_slots, slot)
        else:
            mbarrier.arrive(shared[-1].index(slot), count=1)
    else:
        _announce_copied(slot, shared[-1], config)


@gluon.jit
def tile_positions(UNIT: gl.constexpr, config: gl.constexpr):
    """Tokens of a tile and elements of a block, for copies of UNIT elements; of a second block; tokens of scales."""
    COLUMNS: gl.constexpr = config.tile.columns
    FIRST: gl.constexpr = config.blocks.first
    SECOND: gl.constexpr = config.blocks.second
    layout: gl.constexpr = gl.BlockedLayout([1, UNIT], [32 * UNIT // FIRST, FIRST // UNIT], [4, 1], [1, 0])
    positions = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, FIRST, layout=gl.SliceLayout(0, layout))
    second_positions, second_dims = positions, dims
    if SECOND > 0:
        second_layout: gl.constexpr = gl.BlockedLayout([1, UNIT], [32 * UNIT // SECOND, SECOND // UNIT], [4, 1], [1, 0])
        second_positions = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, second_layout))
        second_dims = FIRST + gl.arange(0, SECOND, layout=gl.SliceLayout(0, second_layout))
    scale_positions = gl.arange(0, COLUMNS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return positions, dims, second_positions, second_dims, scale_positions


@gluon.jit
def copy_documents(arguments, config: gl.constexpr, SCALED: gl.constexpr):
    """Copy the tokens of the run's documents, tile by tile, into slots as they become empty.

    If products start early, every document has a full first tile; without tokens, its contents are arbitrary.

    SCALED: copy the factors of similarities, too. A multiplying thread would load that of every fourth token, and the
    token's number, 32 loads beside as many products.
    """
    (
        documents_ptr, active_ptr, bounds_ptr, scale_ptr, documents_offset_ptr, cu_seqlens_ptr, offsets_ptr, tiles,
        second_tiles, scales, token_offsets, full, empty, group, first, last, n_documents, document_length,
        stride_group, stride_document, stride_token,
    ) = arguments  # fmt: skip
    shared = tiles, second_tiles, scales, token_offsets, full
    EMBEDDING: gl.constexpr = config.size
    BLOCK_EMBEDDING: gl.constexpr = config.blocks.first
    SECOND: gl.constexpr = config.blocks.second
    BLOCK_TOKENS: gl.constexpr = config.tile.columns
    # With a tail as wide as a tile, last tiles are copied in full.
    TAIL: gl.constexpr = config.tail if config.tail < BLOCK_TOKENS else 0
    UNIT: gl.constexpr = 128 // documents_ptr.dtype.element_ty.primitive_bitwidth
    positions, dims, second_positions, second_dims, scale_positions = tile_positions(UNIT, config)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    in_flight = gl.to_tensor(0)
    oldest = gl.to_tensor(0)
    if config.affine:
        documents_ptr = documents_ptr.to(gl.pointer_type(gl.int8), bitcast=True)
    source = documents_ptr, bounds_ptr, cu_seqlens_ptr, offsets_ptr, stride_group, stride_document, stride_token
    for document in range(first, last):
        base, first_token, length = document_at(source, group, document, n_documents, document_length, config)
        if config.starts_early and length <= 0:
            mbarrier.wait(empty.index(slot), phase)
            in_flight, oldest = announce(slot, in_flight, oldest, shared, config)
            slot, phase = next_slot(slot, phase, config.tile.num_stages)
        for start in range(0, length, BLOCK_TOKENS):
            rows = _token_rows(base, active_ptr, first_token, positions, dims, start, length, stride_token, config)
            mbarrier.wait(empty.index(slot), phase)
            if TAIL > 0:
                used = (positions < tokens_read(start, length - start, BLOCK_TOKENS, TAIL, config))[:, None]
                exists = used & (dims < EMBEDDING)[None, :]
                copy_to_shared(tiles.index(slot), rows, mask=exists)
            elif BLOCK_EMBEDDING <= EMBEDDING:
                copy_to_shared(tiles.index(slot), rows)
            else:
                copy_to_shared(tiles.index(slot), rows, mask=(dims < EMBEDDING)[None, :])
            if SECOND > 0:
                rows = _token_rows(
                    base, active_ptr, first_token, second_positions, second_dims, start, length, stride_token, config
                )
                exists = (second_dims < EMBEDDING)[None, :]
                if TAIL > 0:
                    used = (second_positions < tokens_read(start, length - start, BLOCK_TOKENS, TAIL, config))[:, None]
                    exists = used & exists
                copy_to_shared(second_tiles.index(slot), rows, mask=exists)
            if SCALED:
                tokens = tokens_of(active_ptr, first_token, scale_positions, start, length, config)
                copy_to_shared(scales.index(slot), scale_ptr + first_token + tokens)
                if config.affine:
                    copy_to_shared(token_offsets.index(slot), documents_offset_ptr + first_token + tokens)
            in_flight, oldest = announce(slot, in_flight, oldest, shared, config)
            slot, phase = next_slot(slot, phase, config.tile.num_stages)
    mbarrier.wait(empty.index(slot), phase)
    announce_last(slot, in_flight, oldest, shared, config)
