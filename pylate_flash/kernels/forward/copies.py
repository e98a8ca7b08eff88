"""How the Hopper kernel gets document tokens into shared memory: four warps that do nothing else, tile by tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..gluon import copy_to_shared, next_slot


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
def _tokens_read(left, BLOCK_TOKENS: gl.constexpr, TAIL: gl.constexpr):
    """Tokens of a tile that a product reads, where so many tokens of the document are left."""
    return gl.where(left <= TAIL, TAIL, BLOCK_TOKENS)


@gluon.jit
def _tokens(active_ptr, first_token, positions, start, length, config: gl.constexpr):
    """A tile of a document's tokens that take part, of which the last is repeated."""
    tokens = gl.minimum(start + positions, length - 1)
    if config.has_documents_mask:
        tokens = gl.load(active_ptr + first_token + tokens)
    return tokens


@gluon.jit
def _token_rows(base, active_ptr, first_token, positions, dims, start, length, stride_token, config: gl.constexpr):
    """Addresses of these elements of a tile of a document's tokens."""
    tokens = _tokens(active_ptr, first_token, positions, start, length, config)
    return base + tokens.to(gl.int64)[:, None] * stride_token + dims[None, :]


@gluon.jit
def copy_documents(arguments, config: gl.constexpr, SCALED: gl.constexpr):
    """Copy the tokens of the run's documents, tile by tile, into the slots as they become empty.

    SCALED: with what similarities are multiplied by. A thread that multiplies would load that of every fourth token,
    and the token's number, 32 loads beside as many products.
    """
    (
        documents_ptr, active_ptr, bounds_ptr, scale_ptr, cu_seqlens_ptr, offsets_ptr, tiles, second_tiles, scales,
        full, empty, group, first, last, n_documents, document_length, stride_group, stride_document, stride_token,
    ) = arguments  # fmt: skip
    EMBEDDING: gl.constexpr = config.size
    BLOCK_EMBEDDING: gl.constexpr = config.blocks.first
    SECOND: gl.constexpr = config.blocks.second
    BLOCK_TOKENS: gl.constexpr = config.tile.columns
    # Whole tiles are copied whole, the last ones too.
    TAIL: gl.constexpr = config.tail if config.tail < BLOCK_TOKENS else 0
    UNIT: gl.constexpr = 128 // documents_ptr.dtype.element_ty.primitive_bitwidth
    LANES: gl.constexpr = BLOCK_EMBEDDING // UNIT
    layout: gl.constexpr = gl.BlockedLayout([1, UNIT], [32 // LANES, LANES], [4, 1], [1, 0])
    positions = gl.arange(0, BLOCK_TOKENS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, BLOCK_EMBEDDING, layout=gl.SliceLayout(0, layout))
    if SECOND > 0:
        SECOND_LANES: gl.constexpr = SECOND // UNIT
        second_layout: gl.constexpr = gl.BlockedLayout([1, UNIT], [32 // SECOND_LANES, SECOND_LANES], [4, 1], [1, 0])
        second_positions = gl.arange(0, BLOCK_TOKENS, layout=gl.SliceLayout(1, second_layout))
        second_dims = BLOCK_EMBEDDING + gl.arange(0, SECOND, layout=gl.SliceLayout(0, second_layout))
    if SCALED:
        scale_positions = gl.arange(0, BLOCK_TOKENS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for document in range(first, last):
        flat_document = group.to(gl.int64) * n_documents + document
        first_token, length = document_range(
            cu_seqlens_ptr, bounds_ptr, flat_document, document, document_length, config
        )
        if config.offset_unit > 0:
            base = documents_ptr + gl.load(offsets_ptr + document) * config.offset_unit
        elif config.packed:
            base = documents_ptr + first_token * stride_token
        else:
            base = documents_ptr + group.to(gl.int64) * stride_group + gl.cast(document, gl.int64) * stride_document
        for start in range(0, length, BLOCK_TOKENS):
            rows = _token_rows(base, active_ptr, first_token, positions, dims, start, length, stride_token, config)
            mbarrier.wait(empty.index(slot), phase)
            if TAIL > 0:
                read = (positions < _tokens_read(length - start, BLOCK_TOKENS, TAIL))[:, None]
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
                    exists &= (second_positions < _tokens_read(length - start, BLOCK_TOKENS, TAIL))[:, None]
                copy_to_shared(second_tiles.index(slot), rows, mask=exists)
            if SCALED:
                tokens = _tokens(active_ptr, first_token, scale_positions, start, length, config)
                copy_to_shared(scales.index(slot), scale_ptr + first_token + tokens)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            slot, phase = next_slot(slot, phase, config.tile.num_stages)
    # The parts look ahead to one tile more.
    mbarrier.wait(empty.index(slot), phase)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
