"""What the Hopper kernel is made of: copies of document tokens, query rows in registers, scales, sums.

Tokens get into shared memory by four warps that do nothing else, tile by tile.

To a sum x of int8 products the bits of 1.0 are added. Taken for a float, that is 1 + x / 2**23, or 1 + x / 2**24 where
x is negative, as floats below 1 lie twice as close. A multiply-add by a scale s that is not negative makes s x / 2**23
of it, rounded as x converted and multiplied would be. What is negative comes out half as large, which matters only
where it is the maximum, and is doubled then (`unscaled`). Of |s x| below 2**-103, bits are lost.

That takes as many instructions as a conversion does. But a conversion takes the ALU, as a maximum does, for two cycles
each, which together is all the time of a product of 128 elements. A multiply-add of integers takes another unit. (An
addition would take the ALU as well: so one multiplies by a 1 of which the compiler does not know that it is one.)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..gluon import add, copy_to_shared, next_slot
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
    """Whether similarities are multiplied by something of their token's."""
    return config.normalize or config.values or config.pairs


@gluon.constexpr_function
def _groups_in_warps(ROWS, GROUP):
    """Whether each warp of a part has one group of rows."""
    return GROUP > 16 and 4 * GROUP == ROWS


@gluon.jit
def rows_of(first_row, positions, ROWS: gl.constexpr, config: gl.constexpr):
    """Query rows at these positions among the rows of a part's product, of which a warp has 16 of every 64.

    Where there are as many groups as warps, each warp has the rows of one, and what is summed stays within it.
    """
    if _groups_in_warps(ROWS, config.group) and not config.stream:
        positions = positions // 16 % 4 * config.group + positions // 64 * 16 + positions % 16
    return first_row + positions


@gluon.jit
def query_rows(queries_ptr, first_row, layout, FIRST: gl.constexpr, BLOCK: gl.constexpr, config: gl.constexpr):
    """The BLOCK elements from FIRST on of the query rows of a product."""
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
    """As `quantized_rows.rounded_rows`, of rows that several threads share: a scale is the work of one thread, or two.

    Where every thread works out those of its rows, 32 x 32 (32 x 180) with int8 takes 13.6 us in place of 11.8.
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
    """Sums of products [ROWS, TOKENS] times their tokens' scale; of integers, `unscaled` makes similarities of that."""
    if sums.dtype == gl.int32:
        # Multiplied, the scale becomes an operand with a minus. Subtracted from 0, it takes an instruction.
        return gl.fma((sums * one + _BITS_OF_ONE).to(gl.float32, bitcast=True), scale[None, :], (scale * -1.0)[None, :])
    return sums * scale[None, :]


@gluon.jit
def row_sums_of(rows, layout: gl.constexpr):
    """Sums of the elements of rows in int8."""
    return gl.convert_layout(gl.reduce(rows.to(gl.int32), 1, add).to(gl.float32), layout)


@gluon.jit
def scaled_affine(sums, scale, offset, row_sums):
    """Similarities of affine tokens, less the rows' scales: sums [ROWS, TOKENS] times the scale, and the offset.

    They are converted: the bits of 1.0 would leave half of a negative one, to which the offset is added. With those of
    1.5 * 2**23, from which an addition more takes that away again, 1 x 1000, 1024 x 1024 took 0.391 ms in place of
    0.363, and with those for every other sum as long.
    """
    return gl.fma(sums.to(gl.float32), scale[None, :], row_sums[:, None] * offset[None, :])


@gluon.jit
def unscaled(best):
    """The maxima of similarities, of those of `scaled` integers."""
    return best * gl.where(best < 0.0, 2 * _INTEGER_UNIT, _INTEGER_UNIT)


@gluon.jit
def sums_of(values, ROWS: gl.constexpr, config: gl.constexpr):
    """Sums of every group of values [ROWS], which lie as `rows_of` says: in the same order, whoever takes them.

    So scores of the same documents are the same to the bit, whether these are a stream or not.
    """
    GROUP: gl.constexpr = config.group
    sums = gl.reduce(gl.reshape(values, [ROWS // min(GROUP, 16), min(GROUP, 16)]), 1, add)
    if _groups_in_warps(ROWS, GROUP) and not config.stream:
        sums = gl.reduce(gl.reshape(sums, [GROUP // 16, 4]), 0, add)
    elif GROUP > 16:
        WARPS: gl.constexpr = warps_of_sums(config) if config.stream else 4
        together: gl.constexpr = gl.BlockedLayout([GROUP // 16], [32], [WARPS], [0])
        sums = gl.convert_layout(sums, together) if GROUP > 32 or not config.stream else sums
        sums = gl.reduce(gl.reshape(sums, [ROWS // GROUP, GROUP // 16]), 1, add)
    return sums


@gluon.jit
def document_range(cu_seqlens_ptr, bounds_ptr, flat_document, document, document_length, config: gl.constexpr):
    """The first of a document's tokens, counted over all documents, and how many of them take part."""
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
def tokens_read(start, left, BLOCK_TOKENS: gl.constexpr, TAIL: gl.constexpr, config: gl.constexpr):
    """Tokens that a product reads of the tile from `start` on, where so many tokens of the document are left."""
    narrow = left <= TAIL
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
    """A tile of a document's tokens that take part, of which the last is repeated."""
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
    """Take 128 from the unsigned bytes [tokens, bytes] of a tile, which leaves signed ones."""
    BYTES: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [512 // BYTES, BYTES // 16], [4, 1], [1, 0])
    words_layout: gl.constexpr = gl.NVMMASharedLayout(tile.layout.swizzle_byte_width, 32, 2)
    words = tile._reinterpret(gl.int32, [tile.shape[0], BYTES // 4], words_layout)
    # 0x80 in every byte.
    words.store(words.load(layout) ^ -0x7F7F7F80)


@gluon.jit
def _make_signed(slot, shared, config: gl.constexpr):
    """Make the affine tokens that have arrived in a slot what the tensor cores take, and say that it is full.

    These multiply signed integers: 128 is taken from the values, and its product with the scale added to the offset.
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
def announce(slot, under_way, oldest, shared, config: gl.constexpr):
    """Have a slot be full when what is being copied to it has arrived, and of affine tokens when they have signs.

    Those get them once UNDER_WAY more tiles are being copied. Of affine tokens, `under_way` counts the tiles that have
    none yet, and `oldest` is the slot of the first of these. The parts leave a slot only when the next one is full: so
    at least two must be full while an empty one is waited for, and three are.
    """
    UNDER_WAY: gl.constexpr = config.tile.num_stages - 3
    if config.affine:
        async_copy.commit_group()
        if under_way == UNDER_WAY:
            async_copy.wait_group(UNDER_WAY)
            _make_signed(oldest, shared, config)
            oldest = next_slot(oldest, 0, config.tile.num_stages)[0]
        else:
            under_way += 1
    else:
        _announce_copied(slot, shared[-1], config)
    return under_way, oldest


@gluon.jit
def announce_last(slot, under_way, oldest, shared, config: gl.constexpr):
    """After the last tile, have those get their signs that have none, and announce one of which nothing is copied.

    The parts look ahead to it.
    """
    AT: gl.constexpr = offsets(config)
    if config.affine:
        async_copy.wait_group(0)
        for _ in range(under_way):
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
    """Tokens of a tile and elements of a block, as threads copy UNIT of them; of a second block; tokens of scales."""
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
    of_scales = gl.arange(0, COLUMNS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return positions, dims, second_positions, second_dims, of_scales


@gluon.jit
def copy_documents(arguments, config: gl.constexpr, SCALED: gl.constexpr):
    """Copy the tokens of the run's documents, tile by tile, into the slots as they become empty.

    Where products start early, every document has a first tile, a whole one: without tokens, whatever lies there.

    SCALED: with what similarities are multiplied by. A thread that multiplies would load that of every fourth token,
    and the token's number, 32 loads beside as many products.
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
    # Whole tiles are copied whole, the last ones too.
    TAIL: gl.constexpr = config.tail if config.tail < BLOCK_TOKENS else 0
    UNIT: gl.constexpr = 128 // documents_ptr.dtype.element_ty.primitive_bitwidth
    positions, dims, second_positions, second_dims, scale_positions = tile_positions(UNIT, config)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    under_way = gl.to_tensor(0)
    oldest = gl.to_tensor(0)
    if config.affine:
        documents_ptr = documents_ptr.to(gl.pointer_type(gl.int8), bitcast=True)
    source = documents_ptr, bounds_ptr, cu_seqlens_ptr, offsets_ptr, stride_group, stride_document, stride_token
    for document in range(first, last):
        base, first_token, length = document_at(source, group, document, n_documents, document_length, config)
        if config.starts_early and length <= 0:
            mbarrier.wait(empty.index(slot), phase)
            under_way, oldest = announce(slot, under_way, oldest, shared, config)
            slot, phase = next_slot(slot, phase, config.tile.num_stages)
        for start in range(0, length, BLOCK_TOKENS):
            rows = _token_rows(base, active_ptr, first_token, positions, dims, start, length, stride_token, config)
            mbarrier.wait(empty.index(slot), phase)
            if TAIL > 0:
                read = (positions < tokens_read(start, length - start, BLOCK_TOKENS, TAIL, config))[:, None]
                exists = read & (dims < EMBEDDING)[None, :]
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
                    read = (second_positions < tokens_read(start, length - start, BLOCK_TOKENS, TAIL, config))[:, None]
                    exists = read & exists
                copy_to_shared(second_tiles.index(slot), rows, mask=exists)
            if SCALED:
                tokens = tokens_of(active_ptr, first_token, scale_positions, start, length, config)
                copy_to_shared(scales.index(slot), scale_ptr + first_token + tokens)
                if config.affine:
                    copy_to_shared(token_offsets.index(slot), documents_offset_ptr + first_token + tokens)
            under_way, oldest = announce(slot, under_way, oldest, shared, config)
            slot, phase = next_slot(slot, phase, config.tile.num_stages)
    mbarrier.wait(empty.index(slot), phase)
    announce_last(slot, under_way, oldest, shared, config)
