"""The forward of stacked queries: the tokens of all queries are one tall matrix, scored against a run of documents.

A tile of up to 256 rows spans several queries and feeds the tensor cores. It stays on the chip while the program walks
the documents of its run; under `split`, where an embedding is too long for that, both operands are read block by block
instead, as in any matrix product. An embedding that a power of two would pad too much is held as two blocks, the second
of SECOND elements.

Document tokens are read in the dtype of the products, or (`values`) in 8 bits, or (`nbits`) as residual codes, which
are decompressed tile by tile on the chip. Products of int8 accumulate in int32, those of fp8 in float32. If queries are
not quantized, the document tile is widened to their dtype, which is lossless. With values v and w, q = a v and
d = s w + m, the similarity is

    <q, d> = a (s <v, w> + m sum(v))

so a document token's scale s and offset m are applied to its column of the products before the maximum, and the query
token's scale a, which is not negative, after it.

The reduction of a row is its maximum, with the argmax where a gradient needs it, or (`soft`) the log-sum-exp
log(sum(exp(beta * similarity))) / beta.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..launch import kernel
from ..plan import ForwardPlan
from ..reductions import LOG2E, add_exponentials, log_sums
from .codes import decompressed
from .common import (
    NO_ARGMAX,
    SUMMED_EMBEDDING,
    ForwardTensors,
    argmax_of,
    document_range,
    load_padded,
    numbers_of,
    with_masked_zeros,
    with_maxima,
)
from .quantized_rows import leave_values
from .splits import document_position, documents_of_split, reaches_into, tokens_of_segment

# Affine values are 0 to 255, but tensor cores multiply signed integers: 128 is subtracted from the values, and 128
# times the scale is added to the offset.
_MIDDLE = tl.constexpr(128)


@triton.jit
def _token_tile(
    source, centroids_ptr, weights_ptr, tokens, codes, scale, dim, inside, config: tl.constexpr, DTYPE: tl.constexpr
):
    """Load a block of elements of a token tile, [elements, tokens], in the dtype of the products.

    `source` holds the address of every element or, for codes, the address of the document's residuals.
    """
    PADDED: tl.constexpr = config.blocks.split or config.blocks.first > config.size
    if config.nbits > 0:
        codec = source, centroids_ptr, weights_ptr
        tile = tl.trans(decompressed(codec, tokens, codes, scale, tokens >= 0, dim, config, PADDED, DTYPE))
    else:
        tile = load_padded(source + dim, inside[:, None], PADDED)
        if config.affine:
            tile = (tile ^ _MIDDLE).to(tl.int8, bitcast=True)
        tile = tile.to(DTYPE)
    return tile


@kernel
def _stacked_kernel(
    queries_ptr, documents_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr,
    cu_seqlens_ptr, offsets_ptr, candidates_ptr, sums_ptr, argmax_ptr, segments_ptr, keys_ptr,
    values_ptr, documents_offset_ptr, codes_ptr, centroids_ptr, weights_ptr, beta_ptr, lse_ptr,
    n_queries, query_length, padded_query_length, n_documents, document_length, n_runs, run, empty_score, longest_whole,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    config: tl.constexpr,
):  # fmt: skip
    """Sum row maxima over groups of GROUP rows, [G, Nq / G * groups per query, K], and store argmax [G, K, rows].

    `n_queries` is the number of queries of one group. The row block is the fastest-varying program index, so concurrent
    programs read the same documents from L2. `documents` says which documents a program scores: a "run" of those of its
    group; a "split" of packed documents (`kernels.forward.splits`), of size `run`; a share of the "candidates"
    [candidates[group], candidates[group + 1]), where every query is a group; or a run of the `n_documents` that are
    "listed" for its group by index, -1 for none. With "candidates", sums are [groups per query, Nd]. Under
    `in_segments`, documents of more than `longest_whole` tokens are scored in segments.
    """
    EMBEDDING: tl.constexpr = config.size
    BLOCK_EMBEDDING: tl.constexpr = config.blocks.first
    SECOND: tl.constexpr = config.blocks.second
    BLOCK_ROWS: tl.constexpr = config.tile.rows
    BLOCK_TOKENS: tl.constexpr = config.tile.columns
    GROUP: tl.constexpr = config.group
    SCALES_FIRST: tl.constexpr = config.values or config.nbits > 0
    stride_query *= config.query_unit
    stride_query_token *= config.query_unit
    stride_document_token *= config.document_unit
    if config.nbits > 0:
        stride_document_token = EMBEDDING * config.nbits // 8
    strides = stride_group * config.document_unit, stride_document * config.document_unit, stride_document_token
    n_row_blocks = tl.cdiv(n_queries * padded_query_length, BLOCK_ROWS)
    row_block = tl.program_id(0) % n_row_blocks
    run_index = (tl.program_id(0) // n_row_blocks) % n_runs
    group = tl.program_id(0) // (n_row_blocks * n_runs)
    if config.documents == "split":
        split_start = run_index.to(tl.int64) * run
        first, last = documents_of_split(cu_seqlens_ptr, n_documents, split_start, run)
    elif config.documents == "candidates":
        first = tl.load(candidates_ptr + group).to(tl.int32)
        last = tl.load(candidates_ptr + group + 1).to(tl.int32)
        share = tl.cdiv(last - first, n_runs)
        first += run_index * share
        last = tl.minimum(first + share, last)
    else:
        first = run_index * run
        last = tl.minimum(first + run, n_documents)
    if config.in_segments:
        first_in_split = first
        first -= reaches_into(cu_seqlens_ptr, first - 1, split_start, longest_whole)

    if config.quantize_rows:
        tensors = queries_ptr, values_ptr, queries_scale_ptr
        layout = group, n_queries, query_length, padded_query_length, stride_query, stride_query_token
        leave_values(tensors, row_block * BLOCK_ROWS, layout, EMBEDDING, BLOCK_ROWS, config.normalize)
        queries_ptr = values_ptr
        stride_query, stride_query_token = query_length * EMBEDDING, EMBEDDING
    DTYPE: tl.constexpr = queries_ptr.dtype.element_ty
    SUM: tl.constexpr = tl.int32 if tl.int8 == DTYPE else tl.float32
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query = rows // padded_query_length
    token = rows % padded_query_length
    row_exists = (query < n_queries) & (token < query_length)
    global_row = (group * n_queries + query).to(tl.int64) * query_length + token
    row_active = row_exists
    if config.has_queries_mask:
        row_weight = tl.load(queries_mask_ptr + global_row, mask=row_exists, other=0)
        row_active = row_active & (row_weight != 0)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    query_offset = (group * n_queries + query).to(tl.int64) * stride_query + token * stride_query_token
    query_rows = queries_ptr + query_offset[:, None] + dims[None, :]
    if not config.blocks.split:
        query_tile = tl.load(query_rows, mask=row_exists[:, None] & (dims < EMBEDDING)[None, :], other=0.0)
    if SECOND > 0:
        second_dims = BLOCK_EMBEDDING + tl.arange(0, SECOND)
        query_rows = queries_ptr + query_offset[:, None] + second_dims[None, :]
        second_exists = row_exists[:, None] & (second_dims < EMBEDDING)[None, :]
        second_query_tile = tl.load(query_rows, mask=second_exists, other=0.0)
    if config.soft:
        beta = tl.load(beta_ptr)
        # From similarities to exponents of 2.
        row_factor = tl.full([BLOCK_ROWS], LOG2E, tl.float32) * beta
        if config.scale_rows:
            row_factor *= tl.load(queries_scale_ptr + global_row, mask=row_exists, other=1.0)
    elif config.scale_rows:
        row_scale = tl.load(queries_scale_ptr + global_row, mask=row_exists, other=0.0)
    if config.affine:
        row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
        if config.blocks.split:
            for dim in tl.range(0, EMBEDDING, BLOCK_EMBEDDING):
                exists = row_exists[:, None] & (dim + dims < EMBEDDING)[None, :]
                row_sum += tl.sum(tl.load(query_rows + dim, mask=exists, other=0.0).to(tl.float32), axis=1)
        else:
            row_sum += tl.sum(query_tile.to(tl.float32), axis=1)

    # flatten: the two loops become one, so loads of the next document overlap the products of this one. Measured on an
    # H200 at the same tile: 0.493 to 0.428 ms at 1 x 1000, 1024 x 1024; 0.126 to 0.094 ms at 32 x 1024, 32 x 180.
    # The loop starts at 0: if it starts at the result of a search, Triton 3.9 loses the alignment of derived addresses
    # and loads embeddings element by element.
    for index in tl.range(0, last - first, flatten=not config.blocks.split):
        column = first + index
        document = column
        if config.documents == "listed":
            candidate = tl.load(candidates_ptr + group.to(tl.int64) * n_documents + column).to(tl.int32)
            document = tl.maximum(candidate, 0)
        base, length = document_range(
            documents_ptr, cu_seqlens_ptr, offsets_ptr, group, document, document_length, strides, config.offset_unit
        )
        if config.documents == "candidates":
            flat_document = tl.cast(column, tl.int64)
        else:
            flat_document = group.to(tl.int64) * n_documents + column
        flat = flat_document * document_length
        if config.packed and (config.normalize or SCALES_FIRST):
            # Offsets of quantized documents are in rows.
            flat = tl.load((offsets_ptr if config.offset_unit > 0 else cu_seqlens_ptr) + document).to(tl.int64)
        if config.documents == "listed":
            length = tl.where(candidate < 0, 0, length)
        if config.has_documents_mask:
            length = tl.load(bounds_ptr + 2 * flat_document)
        if config.in_segments:
            # From here on, the segment takes the place of the document.
            first_token, length = tokens_of_segment(cu_seqlens_ptr, document, split_start, run, longest_whole)
            base += first_token.to(tl.int64) * stride_document_token
            flat += first_token
        # Under `soft`, `best` is the largest exponent so far, and `total` the sum of exponentials relative to it.
        best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        key = tl.full([BLOCK_ROWS], NO_ARGMAX, tl.int32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        for start in tl.range(0, length, BLOCK_TOKENS):
            positions = start + tl.arange(0, BLOCK_TOKENS)
            tokens = tl.minimum(positions, length - 1)
            if config.has_documents_mask:
                tokens = tl.load(active_ptr + flat + tokens)
            # Placeholders, for configs without scales or codes.
            scale, codes = tokens, tokens
            if SCALES_FIRST:
                # Loaded before the products, so that the load overlaps them.
                scale = tl.load(documents_scale_ptr + flat + tokens)
            if config.affine:
                offset = tl.load(documents_offset_ptr + flat + tokens) + _MIDDLE * scale
            if config.nbits > 0:
                codes = tl.load(codes_ptr + flat + tokens).to(tl.int64)
                source = base
            else:
                source = base + tokens[None, :].to(tl.int64) * stride_document_token + dims[:, None]
            if config.blocks.split:
                similarities = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
                for sum_start in tl.static_range(0, EMBEDDING, SUMMED_EMBEDDING):
                    products = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], SUM)
                    for dim in tl.range(sum_start, min(EMBEDDING, sum_start + SUMMED_EMBEDDING), BLOCK_EMBEDDING):
                        inside = dim + dims < EMBEDDING
                        part = tl.load(query_rows + dim, mask=row_exists[:, None] & inside[None, :], other=0.0)
                        tile = _token_tile(
                            source, centroids_ptr, weights_ptr, tokens, codes, scale, dim, inside, config, DTYPE
                        )
                        products = tl.dot(part, tile, products, input_precision=config.precision, out_dtype=SUM)
                    similarities += products.to(tl.float32)
            else:
                inside = dims < EMBEDDING
                tile = _token_tile(source, centroids_ptr, weights_ptr, tokens, codes, scale, 0, inside, config, DTYPE)
                similarities = tl.dot(query_tile, tile, input_precision=config.precision, out_dtype=SUM).to(tl.float32)
                if SECOND > 0:
                    source = base + tokens[None, :].to(tl.int64) * stride_document_token + second_dims[:, None]
                    inside = (second_dims < EMBEDDING)[:, None]
                    tile = load_padded(source, inside, BLOCK_EMBEDDING + SECOND > EMBEDDING)
                    similarities = tl.dot(second_query_tile, tile, similarities, input_precision=config.precision)
            if config.values:
                similarities *= scale[None, :]
            elif config.normalize:
                similarities *= tl.load(documents_scale_ptr + flat + tokens)[None, :]
            if config.affine:
                similarities += row_sum[:, None] * offset[None, :]
            if config.soft:
                # A repeated token would count twice.
                similarities = tl.where((positions < length)[None, :], similarities, float("-inf"))
                best, total = add_exponentials(similarities, row_factor, best, total)
            else:
                best, key = with_maxima(similarities, tokens, best, key, config.with_argmax)

        store_mask = row_exists
        if config.in_segments:
            # Loaded again: the loop has no registers to keep it in.
            unsegmented = document_position(cu_seqlens_ptr, document)[1] <= longest_whole
            store_mask = row_exists & unsegmented
            if unsegmented == 0:
                slot = 2 * run_index + (document >= first_in_split).to(tl.int32)
                segment_row = (slot * n_row_blocks + row_block).to(tl.int64) * BLOCK_ROWS
                tl.store(segments_ptr + segment_row + tl.arange(0, BLOCK_ROWS), best)
                if config.with_argmax:
                    tl.store(keys_ptr + segment_row + tl.arange(0, BLOCK_ROWS), key)
        counted = row_active & (length > 0)
        flat_row = flat_document * n_queries * query_length + query.to(tl.int64) * query_length + token
        if config.soft:
            lse = log_sums(best, total, (document_length - length).to(tl.float32), config.zero_masked)
            if lse_ptr is not None:
                tl.store(lse_ptr + flat_row, lse, mask=row_exists)
            best = lse / beta
        else:
            argmax = argmax_of(key, best)
            if config.zero_masked:
                first_masked = tl.load(bounds_ptr + 2 * flat_document + 1)
                best, argmax = with_masked_zeros(best, argmax, first_masked, document_length)
            if config.with_argmax:
                argmax = tl.where(counted, argmax, -1)
                tl.store(argmax_ptr + flat_row, argmax.to(argmax_ptr.dtype.element_ty), mask=store_mask)
            if config.scale_rows:
                best *= row_scale
        if config.weighted:
            best *= row_weight.to(tl.float32)
        best = tl.where(counted, best, 0.0)
        sums = tl.sum(tl.reshape(best, [BLOCK_ROWS // GROUP, GROUP]), axis=1)
        groups_per_query = padded_query_length // GROUP
        sum_row = row_block * (BLOCK_ROWS // GROUP) + tl.arange(0, BLOCK_ROWS // GROUP)
        if config.packed or config.has_documents_mask:
            # For an empty document, one sum of a query is the empty score, and the others are 0.
            sums = tl.where(length > 0, sums, tl.where(sum_row % groups_per_query == 0, empty_score, 0.0))
        sums_row = sum_row
        if config.documents != "candidates":
            sums_row = group * n_queries * groups_per_query + sum_row
        sums_offset = sums_row.to(tl.int64) * n_documents + column
        sum_exists = sum_row < n_queries * groups_per_query
        if config.in_segments:
            sum_exists = sum_exists & unsegmented
        tl.store(sums_ptr + sums_offset, sums, mask=sum_exists)


def score_stacked(problem: Problem, plan: ForwardPlan, tensors: ForwardTensors, sums: Tensor) -> None:
    """Write the sums [groups, queries, n_sums, n_documents], or [n_sums, Nd] for packed candidates, of all scores."""
    _stacked_kernel(
        (plan.row_blocks * plan.n_runs * problem.groups, 1, 1),
        (*tensors[:10], sums, *tensors[10:20]),
        (*numbers_of(problem, plan), plan.splits.whole),
        plan.strides,
        (plan.config,),
        plan.config.warps,
    )
