"""The forward of short queries against documents of few bits, in 8 bits or residual codes of 4 or 2, or of few tokens.

A program is one warp. It walks a run of documents as one stream of tokens, 32 at a time, regardless of document
boundaries. The inputs of the next steps are copied to shared memory meanwhile: the compiler sank loads to registers to
the end of their step, where they stalled. Document tokens are the rows of the product, and the running maximum is
elementwise until a document ends.

With few bits, four threads hold a row of words, or with 8 bits half a row, each a contiguous part of it, which is the
operand of an 8-bit product as is; the query is permuted to match its element order. Rows of 8 bits are copied whole:
copying half of each at a time requests a line of 128 bytes from L2 twice, and at 1 x 10000 (32 x 300) int8 takes
0.123 ms instead of 0.111.

A residual code is looked up by byte permutes, a word of elements at a time, and stands for a bucket weight rounded to
8 bits, up to an offset common to all weights. With q = a v, of values v, and d = n (c + u (w + o)), of the centroid c,
the rounded weights w, their unit u and offset o, and the scale n, the similarity is

    <q, d> = a n (<c, v> + u (<w, v> + o <1, v>))

where <c, v> is looked up, in 16 bits, in a table of all centroids (`few_bits.with_table`), which stays in L2.

Integer accumulators start at the bits of 1.5 * 2**23, plus o <1, v>. Bitcast to float, the result is the sum plus
1.5 * 2**23, exactly; a conversion would use a slower unit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ...problem import Problem
from .. import tables
from ..launch import kernel, wait_for_previous_kernel
from ..plan import ForwardPlan
from ..reductions import larger, max_along
from .common import ForwardTensors, load_padded
from .few_bits import (
    BITS_OF_SUM,
    four_bits,
    operand,
    operands_of,
    query_operand,
    query_values,
    token_of_columns,
    two_bits,
    values_size,
    words_of,
)
from .splits import documents_of_split

_ROWS = tl.constexpr(32)
_SUM = tl.constexpr(1.5 * 2**23)


@triton.jit
def _words(documents_ptr, tokens, config: tl.constexpr, J: tl.constexpr):
    """Load the words of these tokens, padded to [tokens, 4 * J], or with 8 bits to [tokens, 8 * J]."""
    WORDS: tl.constexpr = config.size * config.nbits // 32
    PADDED: tl.constexpr = (4 if config.nbits < 8 else 8) * J
    word_offsets = tl.arange(0, PADDED)
    pointers = tokens[:, None].to(tl.int64) * config.row + word_offsets[None, :]
    if config.nbits < 8:
        # Limit the copy width: wider copies of few words would have another layout than the products take.
        pointers = tl.max_contiguous(pointers, [1, J])
    if WORDS < PADDED:
        return tl.load(documents_ptr + pointers, mask=(word_offsets < WORDS)[None, :], other=0)
    return tl.load(documents_ptr + pointers)


@triton.jit
def _embeddings(documents_ptr, tokens, config: tl.constexpr):
    """Load the 16-bit embeddings of these tokens, padded."""
    dims = tl.arange(0, values_size(config.size, 16))
    pointers = documents_ptr + tokens[:, None].to(tl.int64) * (2 * config.row) + dims[None, :]
    return load_padded(pointers, (dims < config.size)[None, :], dims.shape[0] > config.size)


@triton.jit
def _over(row_values, COLUMNS: tl.constexpr):
    return tl.broadcast_to(row_values[:, None], [_ROWS, COLUMNS])


@triton.jit
def _similarities(fetched, operands, luts, row_sums, sums_begin, unit, config: tl.constexpr, PTX: tl.constexpr):
    """Similarities [32, columns] of 32 fetched tokens, before multiplication by the column scales."""
    words, scale, offset, entries = fetched
    COLUMNS: tl.constexpr = operands[0].shape[1]
    DTYPE: tl.constexpr = operands[0].dtype
    sums = tl.broadcast_to(sums_begin[None, :], [_ROWS, COLUMNS])
    if config.nbits == 16:
        similarities = tl.dot(words, operands[0])
    elif config.nbits < 8:
        if config.nbits == 4:
            a, b = four_bits(words, luts, PTX)
            sums = tl.dot(operand(a, tl.int8), operands[0], sums, out_dtype=tl.int32)
            sums = tl.dot(operand(b, tl.int8), operands[1], sums, out_dtype=tl.int32)
        else:
            a, b, c, d = two_bits(words, luts, PTX)
            sums = tl.dot(operand(a, tl.int8), operands[0], sums, out_dtype=tl.int32)
            sums = tl.dot(operand(b, tl.int8), operands[1], sums, out_dtype=tl.int32)
            sums = tl.dot(operand(c, tl.int8), operands[2], sums, out_dtype=tl.int32)
            sums = tl.dot(operand(d, tl.int8), operands[3], sums, out_dtype=tl.int32)
        entries = tl.permute(tl.reshape(entries, [_ROWS, 4, COLUMNS // 8, 2]), (0, 2, 1, 3))
        entries = tl.reshape(entries, [_ROWS, COLUMNS]).to(tl.float32)
        # The subtraction of _SUM is rounded here, to half a unit of the sum.
        base = tl.fma(entries, _over(scale, COLUMNS), _over(scale * unit * -_SUM, COLUMNS))
        similarities = tl.fma(sums.to(tl.float32, bitcast=True), _over(scale * unit, COLUMNS), base)
    else:
        words, second_words = tl.split(tl.permute(tl.reshape(words, [_ROWS, 2, words.shape[1] // 2]), (0, 2, 1)))
        if tl.int8 == DTYPE:
            if config.affine:
                # Values are 0 to 255, but tensor cores multiply signed integers: 128 is subtracted here, and 128 times
                # the scale is added to the offset.
                words, second_words = words ^ -0x7F7F7F80, second_words ^ -0x7F7F7F80
            sums = tl.dot(operand(words, DTYPE), operands[0], sums, out_dtype=tl.int32)
            sums = tl.dot(operand(second_words, DTYPE), operands[1], sums, out_dtype=tl.int32)
            similarities = sums.to(tl.float32, bitcast=True) - _SUM
        else:
            similarities = tl.dot(operand(words, DTYPE), operands[0])
            similarities = tl.dot(operand(second_words, DTYPE), operands[1], similarities)
        similarities *= scale[:, None]
        if config.affine:
            similarities += (offset + 128.0 * scale)[:, None] * row_sums[None, :]
    return similarities


@triton.jit
def _best(best, similarities):
    """Update the maxima [8, columns], each over rows that one thread holds, with those of more rows."""
    COLUMNS: tl.constexpr = similarities.shape[1]
    return larger(best, max_along(tl.reshape(similarities, [_ROWS // 8, 8, COLUMNS]), 0))


@triton.jit
def _start(cu_seqlens_ptr, document, document_length, config: tl.constexpr):
    """The first token of a document, counted over all documents."""
    if config.packed:
        return tl.load(cu_seqlens_ptr + document).to(tl.int32)
    return document * document_length


@kernel(follows=True)
def _short_kernel(
    queries_ptr, documents_ptr, queries_mask_ptr, scales_ptr, offsets_ptr, cu_seqlens_ptr, candidates_ptr, codes_ptr,
    table_ptr, values_ptr, queries_scale_ptr, luts_ptr, scores_ptr,
    n_queries, query_length, n_documents, document_length, n_centroids, next_group, run, empty_score,
    stride_query, stride_query_token,
    config: tl.constexpr,
    PTX: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write scores [n_queries, n_documents] of documents shared by all queries, or of each query's own.

    Scales and offsets have a stride of STEP elements.

    Grid: runs of documents x queries; concurrent programs read the same documents. Query i scores the `n_documents`
    padded documents from i * `next_group` on; of "listed" documents, each program scores one.
    """
    CODED: tl.constexpr = config.nbits < 8
    if not CODED:
        wait_for_previous_kernel()
    J: tl.constexpr = words_of(config.size, config.nbits)
    SIZE: tl.constexpr = values_size(config.size, config.nbits)
    COLUMNS: tl.constexpr = config.tile.columns
    stride_query *= config.query_unit
    stride_query_token *= config.query_unit
    DTYPE: tl.constexpr = tl.float8e4nv if tl.float8e4nv == documents_ptr.dtype.element_ty else tl.int8
    embeddings_ptr = documents_ptr
    documents_ptr = documents_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    query = tl.program_id(0) % n_queries
    index = tl.program_id(0) // n_queries
    # First document of the program, one past its last, and the shift from these to document indices.
    shift = 0
    first = index * run
    last = tl.minimum(first + run, n_documents)
    exists = True
    if config.documents == "split":
        first, last = documents_of_split(cu_seqlens_ptr, n_documents, index.to(tl.int64) * run, run)
    elif config.documents == "run":
        shift = query * next_group
    elif config.documents == "listed":
        candidate = tl.load(candidates_ptr + query.to(tl.int64) * n_documents + index).to(tl.int32)
        shift = tl.maximum(candidate, 0) - index
        exists = candidate >= 0
    begin = _start(cu_seqlens_ptr, first + shift, document_length, config)
    stop = _start(cu_seqlens_ptr, last + shift, document_length, config)
    if config.documents == "listed":
        stop = tl.where(exists, stop, begin)
    # Not the last token of all documents: a launch recorded for one total also serves others (`problem.rounded_total`).
    last_token = tl.maximum(stop, 1) - 1
    document, document_start = first, begin
    end = _start(cu_seqlens_ptr, tl.minimum(first + 1, last) + shift, document_length, config)
    next_end = _start(cu_seqlens_ptr, tl.minimum(first + 2, last) + shift, document_length, config)
    if CODED:
        # Nothing before this reads the table.
        wait_for_previous_kernel()
    scores_ptr += query.to(tl.int64) * n_documents
    if CODED:
        table_ptr += query.to(tl.int64) * n_centroids * COLUMNS

    tokens = token_of_columns(COLUMNS)
    flat_token = query.to(tl.int64) * query_length + tokens
    # Weight of each column; 0 excludes it.
    factor = (tokens < query_length).to(tl.float32)
    if config.has_queries_mask:
        factor = tl.load(queries_mask_ptr + flat_token, mask=tokens < query_length, other=0).to(tl.float32)
        if not config.weighted:
            factor = (factor != 0.0).to(tl.float32)
    luts = (0, 0, 0, 0)
    unit = 1.0
    row_sums = tl.zeros([COLUMNS], tl.float32)
    sums_begin = tl.full([COLUMNS], BITS_OF_SUM, tl.int32)
    if CODED:
        values_ptr += query.to(tl.int64) * COLUMNS * SIZE
        queries_scale_ptr += query.to(tl.int64) * COLUMNS * 2
        luts = tl.load(luts_ptr), tl.load(luts_ptr + 1), tl.load(luts_ptr + 2), tl.load(luts_ptr + 3)
        unit = tl.load(luts_ptr + 4).to(tl.float32, bitcast=True)
        first_operand = query_operand(values_ptr, 0, COLUMNS, J)
        second_operand = query_operand(values_ptr, 1, COLUMNS, J)
        operands = first_operand, second_operand, first_operand, second_operand
        if config.nbits == 2:
            third, fourth = query_operand(values_ptr, 2, COLUMNS, J), query_operand(values_ptr, 3, COLUMNS, J)
            operands = first_operand, second_operand, third, fourth
        scale = tl.load(queries_scale_ptr + tl.arange(0, COLUMNS))
        sums_begin = tl.load(queries_scale_ptr + COLUMNS + tl.arange(0, COLUMNS)).to(tl.int32, bitcast=True)
    else:
        # Quantized here by every program: through memory, programs would wait for another launch, or for each other.
        queries_ptr += query.to(tl.int64) * stride_query
        values, scale = query_values(queries_ptr, query_length, stride_query_token, COLUMNS, config, DTYPE)
        if config.nbits == 16:
            first_operand, second_operand = tl.trans(values), tl.trans(values)
        else:
            first_operand, second_operand = operands_of(values, J)
        operands = first_operand, second_operand, first_operand, second_operand
        if config.affine:
            row_sums = tl.sum(values.to(tl.int32), axis=1).to(tl.float32)
    # A column of weight 0 may have a NaN scale.
    factor = tl.where(factor != 0.0, factor * scale, 0.0)

    best = tl.full([8, COLUMNS], float("-inf"), tl.float32)
    rows = tl.arange(0, _ROWS)
    for start in tl.range(begin, stop, _ROWS, num_stages=STAGES):
        row_tokens = tl.minimum(rows + start, last_token)
        if CODED:
            codes = tl.load(codes_ptr + row_tokens)
        if config.nbits == 16:
            words = _embeddings(embeddings_ptr, row_tokens, config)
        else:
            words = _words(documents_ptr, row_tokens, config, J)
        offsets = row_tokens if STEP == 1 else row_tokens.to(tl.int64) * STEP
        row_scale = offsets
        if config.nbits < 16:
            row_scale = tl.load(scales_ptr + offsets)
        row_offset, entries = row_scale, row_scale
        if config.affine:
            row_offset = tl.load(offsets_ptr + offsets)
        if CODED:
            offsets = codes[:, None].to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            entries = tl.load(table_ptr + tl.max_contiguous(offsets, [1, COLUMNS // 4]))
        fetched = words, row_scale, row_offset, entries
        similarities = _similarities(fetched, operands, luts, row_sums, sums_begin, unit, config, PTX)
        if end <= start + _ROWS:
            # The `if` guards the loop because Triton prefetches nothing in a loop of loops.
            while (end <= start + _ROWS) & (document < last):
                before_end = (rows + start < end)[:, None]
                best = _best(best, tl.where(before_end, similarities, float("-inf")))
                similarities = tl.where(before_end, float("-inf"), similarities)
                score = tl.sum(tl.where(factor != 0.0, max_along(best, 0) * factor, 0.0), axis=0)
                tl.store(scores_ptr + document, tl.where(end > document_start, score, empty_score))
                best = tl.full([8, COLUMNS], float("-inf"), tl.float32)
                document += 1
                document_start, end = end, next_end
                next_end = _start(cu_seqlens_ptr, tl.minimum(document + 2, last) + shift, document_length, config)
        best = _best(best, similarities)
    while document < last:
        # Documents after the last token are empty.
        tl.store(scores_ptr + document, empty_score)
        document += 1


def score_short(problem: Problem, plan: ForwardPlan, tensors: ForwardTensors, scores: Tensor) -> None:
    """Write the scores [Nq, documents per query]."""
    scales = tensors.documents_scale
    # Scales of padded documents are contiguous, and the stride of a dimension of size 1 is arbitrary.
    step = scales.stride(0) if scales is not None and scales.dim() == 1 else 1
    n_centroids = 0 if tensors.centroids is None else len(tensors.centroids)
    stages = tables.SHORT_STAGES_OF_CODES if tensors.codes is not None else tables.SHORT_STAGES
    next_group = problem.n_documents if problem.groups > 1 and plan.config.documents == "run" else 0
    _short_kernel(
        (plan.n_runs * problem.n_queries, 1, 1),
        (
            tensors.queries, tensors.documents, tensors.queries_mask, scales, tensors.documents_offset,
            tensors.cu_seqlens, tensors.candidates, tensors.codes, tensors.table, tensors.values,
            tensors.queries_scale, tensors.luts, scores,
        ),
        (
            problem.n_queries, problem.query_length, problem.n_documents, problem.document_length, n_centroids,
            next_group, plan.run, problem.empty_score,
        ),
        plan.strides[:2],
        (plan.config, not knobs.runtime.interpret, step, stages),
        plan.config.warps,
    )  # fmt: skip
