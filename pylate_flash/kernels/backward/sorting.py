"""Sort rows by their argmax token, in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bit(position: tl.constexpr, n_bits: tl.constexpr):
    """One bit of the position of every element of a tensor of shape [2] * n_bits, broadcastable."""
    return tl.reshape(tl.arange(0, 2), [1] * (n_bits - position - 1) + [2] + [1] * position)


@triton.jit
def sorted_keys(keys, N_BITS: tl.constexpr):
    """Bitonic sort of 2**N_BITS distinct integers.

    `tl.sort` compares and selects; a minimum and a maximum take fewer instructions (1024 keys in one warp: 123 instead
    of 168 per key). The partner of a key is the sum of both minus the key, which compiles to nothing.
    """
    keys = tl.reshape(keys, [2] * N_BITS)
    for stage in tl.static_range(1, N_BITS + 1):
        descending = _bit(stage, N_BITS) if stage < N_BITS else 0
        for step in tl.static_range(stage):
            partners = tl.sum(keys, axis=N_BITS - stage + step, keep_dims=True) - keys
            takes_larger = (descending ^ _bit(stage - 1 - step, N_BITS)) != 0
            keys = tl.where(takes_larger, tl.maximum(keys, partners), tl.minimum(keys, partners))
    return tl.reshape(keys, [1 << N_BITS])


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def list_rows(local, argmax_ptr, list_ptr, starts_ptr, first_document, n_rows, document_length, config: tl.constexpr):
    """list[local document] = its rows sorted by argmax token, and the starts of each token's rows.

    All of at most 2**row_bits rows, and of fewer than `block_tokens` tokens, are in registers.
    """
    ROWS: tl.constexpr = 1 << config.row_bits
    local = local.to(tl.int64)
    ranks = tl.arange(0, ROWS)
    argmax_ptr += (first_document + local) * n_rows
    argmax = tl.load(argmax_ptr + ranks, mask=ranks < n_rows, other=-1).to(tl.int32)
    # The row makes keys unique and the sort stable. Rows without an argmax come last.
    keys = sorted_keys((tl.where(argmax >= 0, argmax, document_length) << config.row_bits) | ranks, config.row_bits)
    tokens = keys >> config.row_bits
    listed = tokens < document_length
    tl.store(list_ptr + local * n_rows + ranks, (keys & (ROWS - 1)).to(list_ptr.dtype.element_ty), mask=listed)

    # A token's rows begin at the first of them; without any, where those of the next token do.
    starts_ptr += local * (document_length + 1)
    all_tokens = tl.arange(0, config.block_tokens)
    n_listed = tl.sum(listed.to(tl.int32), axis=0)
    starts = tl.zeros([config.block_tokens], tl.int32) + n_listed
    tl.store(starts_ptr + all_tokens, starts.to(starts_ptr.dtype.element_ty), mask=all_tokens <= document_length)
    tl.debug_barrier()
    begins = (ranks == 0) | (tl.gather(tokens, tl.maximum(ranks - 1, 0), axis=0) != tokens)
    tl.store(starts_ptr + tokens, ranks.to(starts_ptr.dtype.element_ty), mask=listed & begins)
    tl.debug_barrier()
    first_ranks = tl.load(starts_ptr + all_tokens, mask=all_tokens < document_length, other=0).to(tl.int32)
    starts = tl.associative_scan(
        tl.where(all_tokens < document_length, first_ranks, n_listed), 0, _smaller, reverse=True
    )
    tl.store(starts_ptr + all_tokens, starts.to(starts_ptr.dtype.element_ty), mask=all_tokens < document_length)
