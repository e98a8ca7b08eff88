"""Project hidden states on Hopper (compute capability 9.0), and score them for few query rows in the same kernel.

A program takes tiles of hidden states, across document boundaries, and projects each once, so every hidden state is
read once. The weight, which every tile needs, comes from the L2 cache in chunks along d_model, together with the
states: tiles of 256 tokens read half as many bytes of it as of states. Both are copied by TMA, issued by one thread,
which fills with zeros past their ends.

Embeddings are normalised and rounded in registers. `project` writes them; `score` multiplies them there with the
queries, which stay in shared memory: the second product takes its first operand from the accumulator registers of the
first one, as in FlashAttention. Only the maxima of each document in a tile are written to memory; `_finish_kernel`
reduces them over the tiles of a document, and sums them over the query.

Parts of a tile (128 tokens) and documents are both numbered in order, so the sum of the two numbers is unique to a
document and a part that overlap. It indexes the maxima, which need neither atomics nor initialization.

Document tokens, not query tokens, are the rows of the second product: the maximum over a document runs across warps,
which takes longer than one along a row, but there are few columns.

Measured on an H200 in bfloat16 at 768 to 128 elements, in one run, GPU time only: 0.134 ms at 1 x 1000, 32 x 300 (0.108
to read the states), and 0.559 at 1 x 8000, 32 x 180 (0.517). With four copying warps, and a run of tiles for each
program, it was 0.140 and 0.586. A linear layer and `maxsim` take 1.3 to 1.6 times as long.

Not every Triton has Gluon: import this only if `versions.has_gluon()`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..problem import Options, Tensors
from .gluon import add, copy_block_to_shared, execute, find_document, next_slot
from .launch import TmaMatrix, kernel, wait_for_previous_kernel
from .plan_operations import FusedPlan
from .reductions import larger
from .rows import inverse_norm
from .tables import power_of_two
from .tiles import FusedTile

# Parts of a tile, of four warps each; the kernels list them one by one.
PARTS = gl.constexpr(2)


@gluon.jit
def inverse_norms(embeddings):
    """One over the norm of each row, as `rows.inverse_norm`."""
    widened = embeddings.to(gl.float32)
    return inverse_norm(gl.reduce(widened * widened, 1, add))


@gluon.jit
def scaled(embeddings, scale):
    """Rows times their scale, rounded, as in `rows.normalized_rows`."""
    return (embeddings.to(gl.float32) * scale[:, None]).to(embeddings.dtype)


@gluon.jit
def copy_chunks(arguments, config: gl.constexpr):
    """Copy the states of all tiles and the weight, chunk by chunk, into slots as they become empty.

    TMA zero-fills past the end of either, and counts those bytes as copied.
    """
    hidden, weight, states, weights, full, empty, n_tiles = arguments
    PART_ROWS: gl.constexpr = states.shape[1]
    STAGES: gl.constexpr = weights.shape[0]
    CHUNK: gl.constexpr = weights.shape[2]
    BYTES: gl.constexpr = PARTS * hidden.block_type.nbytes + weight.block_type.nbytes
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        for start in range(0, config.d_model, CHUNK):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), BYTES)
            for part in gl.static_range(PARTS):
                first = (tile * PARTS + part) * PART_ROWS
                copy_block_to_shared(hidden, [first, start], full.index(slot), states.index(slot * PARTS + part))
            copy_block_to_shared(weight, [0, start], full.index(slot), weights.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)
    # Let the next kernel start early, if it is launched with PDL.
    execute("griddepcontrol.launch_dependents;", 1)


@gluon.jit
def project_part(states, weights, full, empty, slot, phase, config: gl.constexpr, PART: gl.constexpr):
    """Multiply a part of the next tile by the weight: [PART_ROWS, EMBEDDING] in float32, and next slot and phase."""
    PART_ROWS: gl.constexpr = states.shape[1]
    STAGES: gl.constexpr = weights.shape[0]
    EMBEDDING: gl.constexpr = weights.shape[1]
    CHUNK: gl.constexpr = weights.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EMBEDDING, 16])
    products = gl.zeros([PART_ROWS, EMBEDDING], gl.float32, layout)
    # A value of its own: if it were `slot`, Triton would not see that the loop changes it.
    previous = gl.to_tensor(0)
    for chunk in range(0, config.d_model, CHUNK):
        mbarrier.wait(full.index(slot), phase)
        follows = chunk > 0
        states_operand, weight_operand = states.index(slot * PARTS + PART), weights.index(slot).permute((1, 0))
        products = warpgroup_mma(states_operand, weight_operand, products, use_acc=follows, is_async=True)
        # Keep one product in flight; the one before it is done with its slot.
        products = warpgroup_mma_wait(1, deps=[products])
        mbarrier.arrive(empty.index(previous), count=1, pred=follows)
        previous = slot
        slot, phase = next_slot(slot, phase, STAGES)
    products = warpgroup_mma_wait(0, deps=[products])
    mbarrier.arrive(empty.index(previous), count=1)
    return products, slot, phase


def tma_matrices(n_tokens: int, weight: Tensor, tile: FusedTile) -> tuple[TmaMatrix, TmaMatrix]:
    """TMA descriptions of hidden states and weight, as the kernels take them."""
    size, d_model = weight.shape
    states, weights = (tile.rows // PARTS.value, tile.chunk), (tile.embedding, tile.chunk)
    return (
        TmaMatrix(n_tokens, d_model, states, _shared_layout(states, weight.dtype)),
        TmaMatrix(size, d_model, weights, _shared_layout(weights, weight.dtype)),
    )


@functools.cache
def _shared_layout(block: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    item = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block), item)


@triton.constexpr_function
def _by_sixteen_bytes(ROWS: int, EMBEDDING: int) -> gl.DistributedLinearLayout:
    """The layout of a product [ROWS, EMBEDDING] after an exchange within warps: eight columns of a row per thread."""
    columns = [[0, 1 << bit] for bit in range(3, EMBEDDING.bit_length() - 1)] + [[8, 0]]
    rows = [[1 << bit, 0] for bit in range(6, ROWS.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *columns[2:], *rows], [*columns[:2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [ROWS, EMBEDDING],
    )  # fmt: skip


# Parts of a document that `_finish_kernel` reads at once.
_PARTS_AT_ONCE = tl.constexpr(4)
# Documents per program of `_finish_kernel`.
_BLOCK_DOCUMENTS = 8


@gluon.jit
def _project_and_score(arguments, config: gl.constexpr, PART: gl.constexpr):
    """Project one part of every tile, and write the embeddings and the inverse norms that they were multiplied by; or,
    with `blocks` of query rows, write the maxima of its documents: best[document + part, query row].
    """
    (
        queries_ptr, bias_ptr, mask_ptr, cu_seqlens_ptr, best_ptr, embeddings_ptr, scales_ptr, states, weights, queries,
        full, empty, ready, n_tiles, n_rows, query_length, n_tokens, n_documents, document_length, stride_query,
        stride_query_token,
    ) = arguments  # fmt: skip
    PART_ROWS: gl.constexpr = states.shape[1]
    EMBEDDING: gl.constexpr = weights.shape[1]
    if config.blocks == 0:
        product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EMBEDDING, 16])
        stored: gl.constexpr = _by_sixteen_bytes(PART_ROWS, EMBEDDING)
        stored_dims = gl.arange(0, EMBEDDING, layout=gl.SliceLayout(0, stored))
    else:
        COLUMNS: gl.constexpr = queries.shape[1]
        similarity: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
        operand: gl.constexpr = gl.DotOperandLayout(0, similarity, 2)
        by_row: gl.constexpr = gl.SliceLayout(1, similarity)
        by_column: gl.constexpr = gl.SliceLayout(0, similarity)
        if PART == 0:
            # Load queries while the first states are in flight.
            LANES: gl.constexpr = EMBEDDING // 8
            loaded: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
            dims = gl.arange(0, EMBEDDING, layout=gl.SliceLayout(0, loaded))
            for block in gl.static_range(config.blocks):
                query_rows = block * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, loaded))
                offset = (query_rows // query_length).to(gl.int64) * stride_query
                offset += query_rows % query_length * stride_query_token
                exists = (query_rows < n_rows)[:, None] & (dims < config.size)[None, :]
                values = gl.load(queries_ptr + offset[:, None] + dims[None, :], mask=exists, other=0.0)
                if config.normalize:
                    values = scaled(values, inverse_norms(values))
                queries.index(block).store(values)
            fence_async_shared()
            mbarrier.arrive(ready, count=1)
        columns = gl.arange(0, COLUMNS, layout=by_column)
        no_similarities = gl.zeros([PART_ROWS, COLUMNS], gl.float32, similarity)
    if bias_ptr is not None:
        bias_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EMBEDDING, 16])
        bias_dims = gl.arange(0, EMBEDDING, layout=gl.SliceLayout(0, bias_layout))
        bias = gl.load(bias_ptr + bias_dims, mask=bias_dims < config.size, other=0.0).to(gl.float32)
    if cu_seqlens_ptr is not None:
        n_tokens = gl.minimum(n_tokens, gl.load(cu_seqlens_ptr + n_documents).to(gl.int32))
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        part = tile * PARTS + PART
        first = part * PART_ROWS
        embeddings, slot, phase = project_part(states, weights, full, empty, slot, phase, config, PART)
        if bias_ptr is not None:
            embeddings += bias[None, :]
        # Round as a linear layer does.
        rounded = embeddings.to(states.dtype)
        if config.normalize:
            scale = inverse_norms(rounded)
            rounded = scaled(rounded, scale)
        if config.blocks == 0:
            if config.normalize:
                rows = first + gl.arange(0, PART_ROWS, layout=gl.SliceLayout(1, product))
                gl.store(scales_ptr + rows, scale, mask=rows < n_tokens)
            stored_rows = first + gl.arange(0, PART_ROWS, layout=gl.SliceLayout(1, stored))
            mask = (stored_rows < n_tokens)[:, None] & (stored_dims < config.size)[None, :]
            offset = stored_rows.to(gl.int64)[:, None] * config.size + stored_dims[None, :]
            gl.store(embeddings_ptr + offset, gl.convert_layout(rounded, stored), mask=mask)
        else:
            rows = first + gl.arange(0, PART_ROWS, layout=by_row)
            if mask_ptr is not None:
                active = gl.load(mask_ptr + rows, mask=rows < n_tokens, other=0) != 0
            rounded = gl.convert_layout(rounded, operand)
            end = gl.minimum(first + PART_ROWS, n_tokens)
            if cu_seqlens_ptr is not None:
                document = find_document(cu_seqlens_ptr, n_documents, first.to(gl.int64) + 1, 0) - 1
            else:
                document = first // document_length
            mbarrier.wait(ready, 0)
            for block in gl.static_range(config.blocks):
                similarities = warpgroup_mma(
                    rounded, queries.index(block).permute((1, 0)), no_similarities, use_acc=False, is_async=True
                )
                similarities = warpgroup_mma_wait(0, deps=[similarities])
                if mask_ptr is not None:
                    similarities = gl.where(active[:, None], similarities, 0.0 if config.zero_masked else float("-inf"))
                current = document
                start = first
                while start < end:
                    stop = (current + 1) * document_length
                    if cu_seqlens_ptr is not None:
                        stop = gl.load(cu_seqlens_ptr + current + 1).to(gl.int32)
                    in_document = (rows >= start) & (rows < gl.minimum(stop, end))
                    best = gl.reduce(gl.where(in_document[:, None], similarities, float("-inf")), 0, larger)
                    target = best_ptr + (current + part).to(gl.int64) * (config.blocks * COLUMNS) + block * COLUMNS
                    gl.store(target + columns, best, mask=(columns >= 0) & (stop > start))
                    start = gl.maximum(start, stop)
                    current += 1


@kernel(jit=gluon.jit, config="size d_model columns blocks stages zero_masked normalize")
def _fused_kernel(
    hidden_desc, weight_desc, queries_ptr, bias_ptr, mask_ptr, cu_seqlens_ptr, best_ptr, embeddings_ptr, scales_ptr,
    n_rows, query_length, n_tokens, n_documents, document_length,
    stride_query, stride_query_token, config: gl.constexpr,
):  # fmt: skip
    """best [documents + parts of tiles, blocks * columns], see above; columns are the query rows [Nq * Lq].

    Without `blocks`, embeddings [n_tokens, size] instead, and with `normalize` their inverse norms, [n_tokens].

    Grid: n programs, each of which takes every n-th tile, so that concurrent reads are close together: with a run of
    tiles for each, it was 3 % slower at 1 x 1000, 32 x 300. hidden [n_tokens, d_model] and weight [size, d_model] are
    contiguous.
    """
    STAGES: gl.constexpr = config.stages
    PART_ROWS: gl.constexpr = hidden_desc.block_type.shape[0]
    EMBEDDING: gl.constexpr = weight_desc.block_type.shape[0]
    CHUNK: gl.constexpr = weight_desc.block_type.shape[1]
    n_tiles = gl.cdiv(n_tokens, PART_ROWS * PARTS)
    # Slots for chunks of a tile's states and of the weight, with full and empty barriers.
    states = gl.allocate_shared_memory(hidden_desc.dtype, [STAGES * PARTS, PART_ROWS, CHUNK], hidden_desc.layout)
    weights = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, EMBEDDING, CHUNK], weight_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # A slot is full when the expected bytes have arrived, and empty when every part has read it.
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=PARTS)
    queries, ready = states, full
    if config.blocks > 0:
        shape: gl.constexpr = [config.blocks, config.columns, EMBEDDING]
        queries_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape[1:], states.dtype)
        queries = gl.allocate_shared_memory(states.dtype, shape, queries_layout)
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=1)
    # Assigned to a name, a tuple turns its constexprs into runtime values, so these two hold none.
    arguments = (
        queries_ptr, bias_ptr, mask_ptr, cu_seqlens_ptr, best_ptr, embeddings_ptr, scales_ptr, states, weights, queries,
        full, empty, ready, n_tiles, n_rows, query_length, n_tokens, n_documents, document_length, stride_query,
        stride_query_token,
    )  # fmt: skip
    copy_arguments = hidden_desc, weight_desc, states, weights, full, empty, n_tiles
    gl.warp_specialize(
        [
            (_project_and_score, (arguments, config, gl.constexpr(0))),
            (_project_and_score, (arguments, config, gl.constexpr(1))),
            (copy_chunks, (copy_arguments, config)),
        ],
        [4, 1],
        [232, 40],
    )


def project(
    plan: FusedPlan, hidden: Tensor, weight: Tensor, bias: Tensor | None, embeddings: Tensor, scales: Tensor | None
) -> None:
    """Write the embeddings [n_tokens, d] of hidden states [n_tokens, d_model].

    With `scales` [n_tokens], float32, they are divided by their norms, and inverse norms are written there. `plan` is
    that of one query row. Inputs are contiguous, and hidden states and weight are 16-byte aligned.
    """
    size, d_model = weight.shape
    _fused_kernel(
        (plan.programs, 1, 1),
        (hidden, weight, None, bias, None, None, None, embeddings, scales),
        (0, 1, plan.n_tokens, 0, 0),
        (0, 0),
        (size, d_model, 0, 0, plan.tile.num_stages, False, scales is not None),
        (4, 1, None),
        tma_matrices(plan.n_tokens, weight, plan.tile),
    )


@kernel(follows=True, config="block_rows block_documents part_rows weighted mean")
def _finish_kernel(
    best_ptr, queries_mask_ptr, documents_mask_ptr, cu_seqlens_ptr, scores_ptr,
    query_length, n_documents, document_length, n_columns, empty_score, config: tl.constexpr,
):  # fmt: skip
    """scores[query, document] = sum over active rows of the maximum over the parts that the document overlaps.

    With `weighted`, the queries' mask holds a weight per row; with `mean`, the sum is divided by the number of active
    rows. A document without active tokens scores `empty_score`.

    Grid: (blocks of documents, queries).
    """
    wait_for_previous_kernel()
    query = tl.program_id(1)
    documents = tl.program_id(0) * config.block_documents + tl.arange(0, config.block_documents)
    exists = documents < n_documents
    tokens = tl.arange(0, config.block_rows)
    if cu_seqlens_ptr is not None:
        begin = tl.load(cu_seqlens_ptr + documents, mask=exists, other=0).to(tl.int32)
        end = tl.load(cu_seqlens_ptr + documents + 1, mask=exists, other=0).to(tl.int32)
    else:
        begin = documents * document_length
        end = tl.where(exists, begin + document_length, begin)
    nonempty = end > begin
    first = begin // config.part_rows
    parts = tl.where(nonempty, (end - 1) // config.part_rows + 1 - first, 0)
    best = tl.full([config.block_documents, config.block_rows], float("-inf"), tl.float32)
    in_query = tokens < query_length
    best_offsets = (documents + first).to(tl.int64)[:, None] * n_columns + (query * query_length + tokens)[None, :]
    # Most documents need a single step.
    part_offsets = tl.arange(0, _PARTS_AT_ONCE)
    for start in tl.range(0, tl.max(parts, axis=0), _PARTS_AT_ONCE):
        part = start + part_offsets[None, :, None]
        mask = (part < parts[:, None, None]) & in_query[None, None, :]
        values = tl.load(best_ptr + best_offsets[:, None, :] + part * n_columns, mask=mask, other=float("-inf"))
        best = larger(best, tl.reduce(values, 1, larger))
    if documents_mask_ptr is not None:
        active = tl.zeros([config.block_documents], tl.int32)
        for start in tl.range(0, document_length, 64):
            positions = start + tl.arange(0, 64)
            mask_offsets = documents.to(tl.int64)[:, None] * document_length + positions[None, :]
            mask = exists[:, None] & (positions < document_length)[None, :]
            active_tokens = tl.load(documents_mask_ptr + mask_offsets, mask=mask, other=0) != 0
            active = tl.maximum(active, tl.max(active_tokens.to(tl.int32), axis=1))
        nonempty &= active != 0
    row_active = in_query
    if queries_mask_ptr is not None:
        weight = tl.load(queries_mask_ptr + query * query_length + tokens, mask=in_query, other=0)
        row_active &= weight != 0
        if config.weighted:
            best *= weight.to(tl.float32)[None, :]
    best = tl.where(nonempty[:, None] & row_active[None, :], best, 0.0)
    scores = tl.sum(best, axis=1)
    if config.mean:
        scores = tl.div_rn(scores, tl.maximum(tl.sum(row_active.to(tl.float32), axis=0), 1.0))
    scores = tl.where(nonempty, scores, empty_score)
    tl.store(scores_ptr + query.to(tl.int64) * n_documents + documents, scores, mask=exists)


def score(plan: FusedPlan, tensors: Tensors, options: Options, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Scores, float32 [Nq, n_documents], of queries and the hidden states that take the place of the documents.

    `plan` is that of all query rows. Queries are [Nq, Lq, d] with contiguous rows. Hidden states [.., d_model], which
    all queries share, and the weight are contiguous and 16-byte aligned; the bias too. Packed documents may be empty;
    no dimension is 0.
    """
    queries, hidden, queries_mask, documents_mask, _, cu_seqlens, _ = tensors
    n_queries, query_length = queries.shape[:2]
    if cu_seqlens is not None:
        n_documents, document_length = cu_seqlens.shape[0] - 1, 0
        cu_seqlens = cu_seqlens.to(hidden.device, non_blocking=True).contiguous()
    else:
        n_documents, document_length = hidden.shape[-3:-1]
    weighted = False
    if queries_mask is not None:
        queries_mask, weighted = queries_mask.contiguous(), queries_mask.is_floating_point()
    if documents_mask is not None:
        documents_mask = documents_mask.contiguous()
    tile, n_tokens = plan.tile, plan.n_tokens
    part_rows, columns = tile.rows // PARTS.value, tile.blocks * tile.columns
    best = queries.new_empty(n_documents + plan.n_tiles * PARTS.value, columns, dtype=torch.float32)
    _fused_kernel(
        (plan.programs, 1, 1),
        (hidden, weight, queries, bias, documents_mask, cu_seqlens, best, None, None),
        (n_queries * query_length, query_length, n_tokens, n_documents, document_length),
        queries.stride()[:2],
        (*weight.shape, tile.columns, tile.blocks, tile.num_stages, options.masking == "zero", options.normalize),
        (4, 1, None),
        tma_matrices(n_tokens, weight, tile),
    )
    # Allocate what the first launch does not need after it, so that the GPU starts earlier.
    scores = queries.new_empty(n_queries, n_documents, dtype=torch.float32)
    _finish_kernel(
        (-(-n_documents // _BLOCK_DOCUMENTS), n_queries, 1),
        (best, queries_mask, documents_mask, cu_seqlens, scores),
        (query_length, n_documents, document_length, columns, float(options.empty_score)),
        (),
        (max(16, power_of_two(query_length)), _BLOCK_DOCUMENTS, part_rows, weighted, options.reduction == "mean"),
        (1, 1, None),
    )
    return scores
