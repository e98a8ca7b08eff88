"""The backward: every query token takes one row from, and sends one row to, the document token that won.

Layout as in `kernels.forward`; `winners` is [documents, rows], documents counted over all groups of the layout, with
rows = Nq / G * Lq, and -1 where no gradient flows. Everything is summed in float32 registers and written once, in the
type of the embeddings, with the Jacobian of `normalize` applied on the way.

Gradient of the queries: `_gather_kernel` sums, for a block of query rows, the winning document rows over the documents
in their order. Programs walk the documents side by side, so the rows come out of L1 and L2. Where there are too few
query rows to fill the GPU, several programs share the documents, and `_finish_kernel` adds up their sums in order.

Gradient of the documents, one of three ways:

"csr" lists each document's query rows by the token that they chose, and sums the rows of each token in that order. The
    list is a counting sort: `_sort_kernel` sorts chunks of rows in registers and tells how many of them chose a token,
    `_scan_kernel` turns those counts into places, and `_place_kernel` moves the rows there. The sort is stable, so the
    order, and with it every bit of the sum, is always the same. `_sum_kernel` sums the rows of a token; of a token that
    many more than SEGMENT rows chose (markers such as [CLS] win thousands), other programs take the rest, cut at
    multiples of SEGMENT, and `_combine_kernel` adds up the parts in order.
"onehot" multiplies [tokens, rows] of zeros and ones with the weighted query rows: one launch and no list, for work that
    grows with tokens x rows.
"atomic" adds every row to a float32 sum in memory, in any order: not reproducible.

The list needs scratch memory, so it is built for a block of documents at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launcher
from .norms import SMALLEST_NORM, inverse_norms
from .tiles import architecture

# The times beside a constant are milliseconds on an H200 in bfloat16 at d = 128, at 1024 x 1024 (32 x 180 tokens), at
# 512 x 512 (32 x 180) and at 64 x 64 (1024 x 1024), in this order, with uniform winners.

# Scratch of the list of a block of documents: at least so many bytes, or half of what the winners take. All of grad_D:
# 2.20, 0.65, 0.52; with 4 MiB 2.20, 0.70, 0.75; with 32 MiB 2.20, 0.57, 0.48, which memory does not allow.
_SCRATCH = 12 << 20
# Rows that one program, of one warp, sorts, as a power of two. Sort, scan and place: 0.59, 0.22, 0.22; 2048 rows
# 1.13, 0.30, 0.28, and in two warps 0.28 at the last. 512 rows take 0.57, 0.21 and twice the counts.
_CHUNK_BITS = 10
# Bits of a token that one pass sorts by; a document of more tokens takes two passes.
_BIN_BITS = 11
# Counts that a scan holds, of bins x chunks: 0.047, 0.025, 0.041; as 512 x 8 0.066, 0.030, 0.040.
_BLOCK_BINS = 256
_BLOCK_CHUNKS = 16
# Query rows on one token that one program sums, at least; at most twice as many: 1.18, 0.35, 0.18, and 1.62,
# 0.66, 0.31 with skewed winners; 256 rows 1.27, 0.37, 0.20, and 1.50, 0.56, 0.33.
_SEGMENT = 512
# Rows in flight in a program that sums, and its warps, at d = 128: 1.18, 0.35, 0.18; 16 rows in one warp 1.66, 0.48,
# 0.26, in two 1.29, 0.40, 0.23. Longer embeddings take more warps.
_SUM_ROWS, _SUM_WARPS = 8, 1
# Query rows x documents in flight in a gather, 8 of them to a warp, at d = 128: 1.23, 0.39, 0.18. The first of these
# that gives every multiprocessor `_GATHER_PROGRAMS` is taken. 32 rows: 1.22, 0.66, 0.17, but 0.047 instead of 0.052 at
# 128 x 128 (32 x 300 tokens), where (32, 4) is left of it.
_GATHERS = ((64, 1), (64, 4), (32, 4))
_GATHER_PROGRAMS = 2
# Weights of the rows of one document lie together, and in L1, if there are enough rows to pay for transposing.
_TRANSPOSED_WINNERS = 1 << 22
# Programs per multiprocessor at which the documents of a gather are split no more, and documents of a part at least.
_SPLIT_PROGRAMS = 8
_SPLIT_DOCUMENTS = 32
# Longest embedding of which a one-hot product holds whole rows, for the Jacobian.
_ONEHOT_EMBEDDING = 128
_LARGEST_SCALE = tl.constexpr(1.0 / SMALLEST_NORM)


@triton.jit
def _quotient(value, magic, shift):
    """value // divisor for 0 <= value < 2**31: a product and a shift instead of a division, see `_division`."""
    return ((value.to(tl.uint32).to(tl.uint64) * magic.to(tl.uint32).to(tl.uint64)) >> shift.to(tl.uint64)).to(tl.int32)


@triton.jit
def _owner(bounds_ptr, count, value):
    """The sequence, of `count`, whose boundaries bounds[i] <= value < bounds[i + 1] enclose `value`."""
    low = count * 0
    high = count - 1
    while low < high:
        middle = (low + high + 1) // 2
        above = tl.load(bounds_ptr + middle).to(tl.int64) > value
        high = tl.where(above, middle - 1, high)
        low = tl.where(above, low, middle)
    return low


@triton.jit
def _group_of(
    flat, grad_scores_ptr, candidates_ptr, n_documents, n_group_queries, n_groups, stride_grad_query,
    stride_grad_document,
    HAS_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Group of the layout that a document belongs to, and where its score with the group's first query stands."""
    if HAS_CANDIDATES:
        group = _owner(candidates_ptr, n_groups, flat).to(tl.int64)
        offset = flat * stride_grad_document
    else:
        group = flat // n_documents
        offset = group * n_group_queries * stride_grad_query + (flat - group * n_documents) * stride_grad_document
    return group, grad_scores_ptr + offset


@triton.jit
def _joined(low, high, ROWS: tl.constexpr, BLOCK_EMBEDDING: tl.constexpr):
    """Rows [ROWS, BLOCK_EMBEDDING] from their halves."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [ROWS, BLOCK_EMBEDDING])


@triton.jit
def _through_norm(grad, embeddings, scale):
    """The gradient of x [rows, d] from that of y = x * scale, where scale [rows] is one over the norm of x.

    The Jacobian maps g to (g - y <y, g>) / |x|. Where the norm was clamped, y is linear in x.
    """
    scaled = embeddings.to(tl.float32) * scale[:, None]
    along = tl.where(scale < _LARGEST_SCALE, tl.sum(scaled * grad, axis=1), 0.0)
    return (grad - scaled * along[:, None]) * scale[:, None]


@triton.jit(
    do_not_specialize=[
        "n_rows", "query_length", "n_documents", "document_length", "n_splits", "stride_grad_query",
        "stride_grad_document",
    ]
)  # fmt: skip
def _gather_kernel(
    grad_scores_ptr, queries_ptr, documents_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, winners_ptr, grad_queries_ptr,
    n_rows, query_length, n_documents, document_length, n_splits, stride_grad_query, stride_grad_document,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DOCUMENTS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """grad_queries[row] = sum over documents of grad_score * documents[winner], [Nq * Lq, d]; the rows of one group.

    Grid: (blocks of rows x groups, splits of the documents). BLOCK_DOCUMENTS documents are in flight at once. Under
    SPLIT the sums stay in float32, [splits, Nq * Lq, d], and their Jacobian is `_finish_kernel`'s. NARROW: an offset
    within a document, or among the scores of one, fits into 32 bits.

    A row is loaded in halves: at d = 128 that is 8 threads to a row and not 16, so a thread looks up half as many rows,
    which takes as many instructions as summing them does.
    """
    n_blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    group = (tl.program_id(0) // n_blocks).to(tl.int64)
    first_row = tl.program_id(0) % n_blocks * BLOCK_ROWS
    slots = tl.arange(0, BLOCK_ROWS * BLOCK_DOCUMENTS)
    rows = first_row + slots % BLOCK_ROWS
    row_exists = rows < n_rows
    query = group * (n_rows // query_length) + rows // query_length
    dims = tl.arange(0, BLOCK_EMBEDDING)
    dim_exists = dims < EMBEDDING

    origin = group * n_documents
    first = origin
    last = origin + n_documents
    if HAS_CANDIDATES:
        origin = group * 0
        first = tl.load(candidates_ptr + group).to(tl.int64)
        last = tl.load(candidates_ptr + group + 1).to(tl.int64)
    share = tl.cdiv(last - first, n_splits)
    first += tl.program_id(1) * share
    count = tl.maximum(tl.minimum(share, last - first), 0).to(tl.int32)
    to_query = query * stride_grad_query
    if NARROW:
        to_query = to_query.to(tl.int32)
    HALF: tl.constexpr = BLOCK_EMBEDDING // 2
    halves = tl.arange(0, HALF)
    documents_ptr += group * stride_group
    low = tl.zeros([BLOCK_ROWS * BLOCK_DOCUMENTS, HALF], tl.float32)
    high = tl.zeros([BLOCK_ROWS * BLOCK_DOCUMENTS, HALF], tl.float32)
    for step in tl.range(0, count, BLOCK_DOCUMENTS):
        if BLOCK_DOCUMENTS == 1:
            document = first + step
            exists = row_exists
        else:
            ahead = step + slots // BLOCK_ROWS
            document = first + ahead
            exists = row_exists & (ahead < count)
        winner = tl.load(winners_ptr + document * n_rows + rows, mask=exists, other=-1).to(tl.int32)
        won = winner >= 0
        weight = tl.load(grad_scores_ptr + (document - origin) * stride_grad_document + to_query, mask=won, other=0.0)
        offset = winner * stride_document_token if NARROW else winner.to(tl.int64) * stride_document_token
        if PACKED:
            # The end of the last document, where several are in flight and some are past it.
            begin = tl.load(cu_seqlens_ptr + tl.minimum(document, last)).to(tl.int64)
            base = documents_ptr + begin * stride_document_token
        else:
            begin = document * document_length
            base = documents_ptr + (document - origin) * stride_document
        if NORMALIZE:
            weight *= tl.load(documents_scale_ptr + begin + winner, mask=won, other=0.0)
        if BLOCK_DOCUMENTS > 1:
            base = base[:, None]
        at = base + halves[None, :] + offset[:, None]
        if BLOCK_EMBEDDING == EMBEDDING:
            left = tl.load(at, mask=won[:, None], other=0.0)
            right = tl.load(at + HALF, mask=won[:, None], other=0.0)
        else:
            left = tl.load(at, mask=won[:, None] & (halves < EMBEDDING)[None, :], other=0.0)
            right = tl.load(at + HALF, mask=won[:, None] & (HALF + halves < EMBEDDING)[None, :], other=0.0)
        low += weight[:, None] * left.to(tl.float32)
        high += weight[:, None] * right.to(tl.float32)

    total = _joined(low, high, BLOCK_ROWS * BLOCK_DOCUMENTS, BLOCK_EMBEDDING)
    if BLOCK_DOCUMENTS > 1:
        total = tl.sum(tl.reshape(total, [BLOCK_DOCUMENTS, BLOCK_ROWS, BLOCK_EMBEDDING]), axis=0)
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    mask = (rows < n_rows)[:, None] & dim_exists[None, :]
    if NORMALIZE and not SPLIT:
        query = group * (n_rows // query_length) + rows // query_length
        source = query * stride_query + rows % query_length * stride_query_token
        embeddings = tl.load(queries_ptr + source[:, None] + dims[None, :], mask=mask, other=0.0)
        scale = tl.load(queries_scale_ptr + group * n_rows + rows, mask=rows < n_rows, other=1.0)
        total = _through_norm(total, embeddings, scale)
    offset = group * n_rows + rows
    if SPLIT:
        offset += tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // n_blocks) * n_rows
    tl.store(
        grad_queries_ptr + offset[:, None] * EMBEDDING + dims[None, :],
        total.to(grad_queries_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit(do_not_specialize=["n_rows", "n_parts", "n_sequences", "length"])
def _finish_kernel(
    parts_ptr, embeddings_ptr, scales_ptr, grad_ptr,
    n_rows, n_parts, n_sequences, length,
    stride_group, stride_sequence, stride_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """grad[row] from the sum, in order, of parts [n_parts, n_rows, d] in float32; rows [groups, sequences, length]."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    mask = (rows < n_rows)[:, None] & (dims < EMBEDDING)[None, :]
    offset = rows[:, None] * EMBEDDING + dims[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_EMBEDDING], tl.float32)
    for part in tl.range(0, n_parts):
        total += tl.load(parts_ptr + tl.cast(part, tl.int64) * n_rows * EMBEDDING + offset, mask=mask, other=0.0)
    if NORMALIZE:
        sequence = rows // length
        source = (
            (sequence // n_sequences) * stride_group
            + (sequence % n_sequences) * stride_sequence
            + (rows % length) * stride_token
        )
        embeddings = tl.load(embeddings_ptr + source[:, None] + dims[None, :], mask=mask, other=0.0)
        total = _through_norm(total, embeddings, tl.load(scales_ptr + rows, mask=rows < n_rows, other=1.0))
    tl.store(grad_ptr + offset, total.to(grad_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bit(position: tl.constexpr, n_bits: tl.constexpr):
    """One bit of the position of every element of a tensor of shape [2] * n_bits, broadcastable."""
    return tl.reshape(tl.arange(0, 2), [1] * (n_bits - position - 1) + [2] + [1] * position)


@triton.jit
def _sorted(keys, N_BITS: tl.constexpr):
    """Bitonic sort of 2**N_BITS different integers.

    As `tl.sort`, which compares and selects; a minimum and a maximum take fewer instructions (1024 keys in one warp:
    123 instead of 168 for each key). The partner of a key is the sum of both less the key, which compiles to nothing.
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
def _bins_of(
    items, winners_ptr, listed_ptr, n_listed_ptr, flat, local, n_rows,
    SHIFT: tl.constexpr,
    BIN_BITS: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Rows of a document by position, and their bins: `winner >> SHIFT` modulo 2**BIN_BITS, 2**BIN_BITS for none.

    LISTED: positions count in the list of an earlier pass.
    """
    if LISTED:
        exists = items < tl.load(n_listed_ptr + local)
        rows = tl.load(listed_ptr + local * n_rows + items, mask=exists, other=0).to(tl.int32)
    else:
        exists = items < n_rows
        rows = items
    winners = tl.load(winners_ptr + flat * n_rows + rows, mask=exists, other=-1).to(tl.int32)
    return rows, tl.where(winners >= 0, (winners >> SHIFT) & ((1 << BIN_BITS) - 1), 1 << BIN_BITS)


@triton.jit(do_not_specialize=["first_document", "n_rows", "n_chunks", "n_bins"])
def _sort_kernel(
    winners_ptr, listed_ptr, n_listed_ptr, order_ptr, counts_ptr, runs_ptr,
    first_document, n_rows, n_chunks, n_bins,
    SHIFT: tl.constexpr,
    BIN_BITS: tl.constexpr,
    CHUNK_BITS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK_BINS: tl.constexpr,
):  # fmt: skip
    """order[local document, chunk] = the chunk's rows by bin, and within a bin in their order; chunks x documents.

    `runs`, a view of `counts` [local document, chunk, bin], tells where in the chunk each bin's rows begin and end.
    """
    CHUNK: tl.constexpr = 1 << CHUNK_BITS
    program = tl.program_id(0).to(tl.int64)
    local = program // n_chunks
    ranks = tl.arange(0, CHUNK)
    _, bins = _bins_of(
        tl.program_id(0) % n_chunks * CHUNK + ranks, winners_ptr, listed_ptr, n_listed_ptr, first_document + local,
        local, n_rows, SHIFT, BIN_BITS, LISTED,
    )  # fmt: skip
    # The position in the chunk makes keys different and the sort stable. Rows without a bin come last.
    keys = _sorted((bins << CHUNK_BITS) | ranks, CHUNK_BITS)
    bins = keys >> CHUNK_BITS
    tl.store(order_ptr + program * CHUNK + ranks, (keys & (CHUNK - 1)).to(tl.uint16))
    exists = bins < (1 << BIN_BITS)
    begins = (ranks == 0) | (tl.gather(bins, tl.maximum(ranks - 1, 0), axis=0) != bins)
    ends = (ranks == CHUNK - 1) | (tl.gather(bins, tl.minimum(ranks + 1, CHUNK - 1), axis=0) != bins)
    for block in tl.range(0, n_bins, BLOCK_BINS):
        every = block + tl.arange(0, BLOCK_BINS)
        tl.store(counts_ptr + program * n_bins + every, tl.zeros([BLOCK_BINS], tl.int32), mask=every < n_bins)
    tl.debug_barrier()
    runs_ptr += program * n_bins * 2
    tl.store(runs_ptr + bins * 2, ranks.to(tl.uint16), mask=exists & begins)
    tl.store(runs_ptr + bins * 2 + 1, (ranks + 1).to(tl.uint16), mask=exists & ends)


@triton.jit
def _load_runs(runs_ptr, n_chunks, n_bins, chunks, bins):
    """Where the bins begin in the chunks, how many rows they have there, and which of [chunks, bins] exist."""
    at = chunks[:, None] * n_bins + bins[None, :]
    mask = (chunks < n_chunks)[:, None] & (bins < n_bins)[None, :]
    run = tl.load(runs_ptr + at, mask=mask, other=0)
    begins = run & 0xFFFF
    return begins, (run >> 16) - begins, at, mask


@triton.jit(do_not_specialize=["first_document", "n_chunks", "n_bins", "document_length"])
def _scan_kernel(
    counts_ptr, starts_ptr, owners_ptr, n_listed_ptr, cu_seqlens_ptr,
    first_document, n_chunks, n_bins, document_length,
    BLOCK_BINS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
    WITH_STARTS: tl.constexpr,
):  # fmt: skip
    """Turn the runs of a document's chunks into places: what to add to a rank in the chunk, by chunk and bin.

    Also leaves how many rows have a bin and, WITH_STARTS (where bins are tokens), where the list of every token begins;
    of a packed document also whose tokens they are.
    """
    local = tl.program_id(0).to(tl.int64)
    flat = first_document + local
    counts_ptr += local * n_chunks * n_bins
    length = document_length
    if WITH_STARTS:
        if PACKED:
            token = tl.load(cu_seqlens_ptr + flat).to(tl.int64)
            length = (tl.load(cu_seqlens_ptr + flat + 1).to(tl.int64) - token).to(tl.int32)
            owners_ptr += token
            starts_ptr += token + flat
        else:
            starts_ptr += local * (document_length + 1)
    reached = n_chunks * 0
    for block in tl.range(0, n_bins, BLOCK_BINS):
        bins = block + tl.arange(0, BLOCK_BINS)
        totals = tl.zeros([BLOCK_BINS], tl.int32)
        for chunk in tl.range(0, n_chunks, BLOCK_CHUNKS):
            _, rows, _, _ = _load_runs(counts_ptr, n_chunks, n_bins, chunk + tl.arange(0, BLOCK_CHUNKS), bins)
            totals += tl.sum(rows, axis=0)
        place = reached + tl.cumsum(totals, axis=0) - totals
        reached += tl.sum(totals, axis=0)
        # Places overwrite runs that another thread may have to read first.
        tl.debug_barrier()
        if WITH_STARTS:
            tl.store(starts_ptr + bins, place, mask=bins < length)
            if PACKED:
                tl.store(owners_ptr + bins, (flat + bins * 0).to(tl.int32), mask=bins < length)
        for chunk in tl.range(0, n_chunks, BLOCK_CHUNKS):
            begins, rows, at, mask = _load_runs(counts_ptr, n_chunks, n_bins, chunk + tl.arange(0, BLOCK_CHUNKS), bins)
            tl.store(counts_ptr + at, place[None, :] + tl.cumsum(rows, axis=0) - rows - begins, mask=mask)
            place += tl.sum(rows, axis=0)
    tl.store(n_listed_ptr + local, reached)
    if WITH_STARTS:
        tl.store(starts_ptr + length, reached)


@triton.jit(do_not_specialize=["first_document", "n_rows", "n_chunks", "n_bins"])
def _place_kernel(
    winners_ptr, listed_ptr, order_ptr, places_ptr, n_listed_ptr, list_ptr,
    first_document, n_rows, n_chunks, n_bins,
    SHIFT: tl.constexpr,
    BIN_BITS: tl.constexpr,
    CHUNK_BITS: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """list[local document] = its rows by bin, from the sorted chunks and the places of their bins."""
    CHUNK: tl.constexpr = 1 << CHUNK_BITS
    program = tl.program_id(0).to(tl.int64)
    local = program // n_chunks
    ranks = tl.arange(0, CHUNK)
    items = tl.program_id(0) % n_chunks * CHUNK + tl.load(order_ptr + program * CHUNK + ranks).to(tl.int32)
    rows, bins = _bins_of(
        items, winners_ptr, listed_ptr, n_listed_ptr, first_document + local, local, n_rows, SHIFT, BIN_BITS, LISTED
    )
    exists = bins < (1 << BIN_BITS)
    places = tl.load(places_ptr + program * n_bins + bins, mask=exists, other=0)
    tl.store(list_ptr + local * n_rows + ranks + places, rows.to(list_ptr.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["first_document", "n_rows", "n_steps", "document_length"])
def _starts_kernel(
    winners_ptr, list_ptr, n_listed_ptr, cu_seqlens_ptr, starts_ptr, owners_ptr,
    first_document, n_rows, n_steps, document_length,
    BLOCK_TOKENS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Where the list of every token begins, by bisection of the list: after two passes, bins are not tokens."""
    n_blocks = tl.cdiv(document_length + 1, BLOCK_TOKENS)
    local = (tl.program_id(0) // n_blocks).to(tl.int64)
    flat = first_document + local
    tokens = tl.program_id(0) % n_blocks * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    length = document_length
    low = tl.zeros([BLOCK_TOKENS], tl.int32)
    high = low + tl.load(n_listed_ptr + local)
    if PACKED:
        begin = tl.load(cu_seqlens_ptr + flat).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + flat + 1).to(tl.int64) - begin).to(tl.int32)
        tl.store(owners_ptr + begin + tokens, (flat + tokens * 0).to(tl.int32), mask=tokens < length)
        starts_ptr += begin + flat
    else:
        starts_ptr += local * (document_length + 1)
    for _ in tl.range(0, n_steps):
        open_ = low < high
        middle = (low + high) // 2
        row = tl.load(list_ptr + local * n_rows + middle, mask=open_, other=0).to(tl.int32)
        below = tl.load(winners_ptr + flat * n_rows + row, mask=open_, other=0).to(tl.int32) < tokens
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & ~below, middle, high)
    tl.store(starts_ptr + tokens, low, mask=tokens <= length)


@triton.jit
def _segment(
    winners_ptr, list_ptr, starts_ptr, cu_seqlens_ptr, flat, local, segment, n_rows, document_length,
    SEGMENT: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """The token whose rows stand around the `segment`-th multiple of SEGMENT in a document's list.

    Returns that multiple, the token, where its rows begin and end, and whether they go on for SEGMENT before it, so
    that a program of its own takes them from there.
    """
    boundary = (segment + 1) * SEGMENT
    if PACKED:
        begin = tl.load(cu_seqlens_ptr + flat).to(tl.int64)
        starts_ptr += begin + flat
        length = (tl.load(cu_seqlens_ptr + flat + 1).to(tl.int64) - begin).to(tl.int32)
    else:
        starts_ptr += local * (document_length + 1)
        length = document_length
    exists = boundary < tl.load(starts_ptr + length)
    row = tl.load(list_ptr + local * n_rows + boundary, mask=exists, other=0).to(tl.int32)
    token = tl.load(winners_ptr + flat * n_rows + row, mask=exists, other=0).to(tl.int32)
    start = tl.load(starts_ptr + token, mask=exists, other=0)
    end = tl.load(starts_ptr + token + 1, mask=exists, other=0)
    return boundary, token, start, end, exists & (boundary >= start + SEGMENT)


@triton.jit
def _store_token(
    total, documents_ptr, documents_scale_ptr, grad_documents_ptr, cu_seqlens_ptr, flat, token, n_documents,
    document_length, stride_group, stride_document, stride_document_token, dims, exists,
    EMBEDDING: tl.constexpr,
    PACKED: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write the gradient [d] of a token of a document from its sum, where `exists`."""
    if PACKED:
        at = tl.load(cu_seqlens_ptr + flat).to(tl.int64) + token
        source = at * stride_document_token
    else:
        at = flat * document_length + token
        source = (flat // n_documents) * stride_group + (flat % n_documents) * stride_document
        source += token.to(tl.int64) * stride_document_token
    mask = (dims < EMBEDDING) & exists
    if NORMALIZE:
        embedding = tl.load(documents_ptr + source + dims, mask=mask, other=0.0)
        scale = tl.load(documents_scale_ptr + at + tl.arange(0, 1), mask=exists, other=1.0)
        total = tl.reshape(_through_norm(total[None, :], embedding[None, :], scale), total.shape)
    tl.store(grad_documents_ptr + at * EMBEDDING + dims, total.to(grad_documents_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "first_document", "n_block_documents", "n_rows", "n_group_queries", "query_length", "magic", "shift",
        "n_documents", "document_length", "n_segments", "stride_grad_query", "stride_grad_document", "n_groups",
    ]
)  # fmt: skip
def _sum_kernel(
    grad_scores_ptr, queries_ptr, documents_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, owners_ptr, winners_ptr, list_ptr, starts_ptr, parts_ptr, grad_documents_ptr,
    first_document, n_block_documents, n_rows, n_group_queries, query_length, magic, shift, n_documents,
    document_length, n_segments, stride_grad_query, stride_grad_document, n_groups,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """grad_documents[token] = sum of grad_score * queries[row] over the rows on its list, in their order.

    Programs: first `n_segments` of every document for the rest of long lists, then one for each token. What a list of
    more than one part sums up to goes to parts [local document, segment, 2, d]: what the token's own program summed,
    at the segment that follows, and what that segment's program did.

    NARROW: queries are contiguous, and an offset among those of one group, or their scores, fits into 32 bits. Rows are
    loaded in halves, as in `_gather_kernel`.
    """
    program = tl.program_id(0)
    n_extra = n_block_documents * n_segments
    if program < n_extra:
        local = (program // n_segments).to(tl.int64)
        flat = first_document + local
        boundary, token, start, end, mine = _segment(
            winners_ptr, list_ptr, starts_ptr, cu_seqlens_ptr, flat, local, program % n_segments, n_rows,
            document_length, SEGMENT, PACKED,
        )  # fmt: skip
        low = boundary
        high = tl.where(mine, tl.minimum(boundary + SEGMENT, end), boundary)
        in_parts = mine
        exists = mine
        part = program.to(tl.int64) * 2 + 1
    else:
        if PACKED:
            at = tl.load(cu_seqlens_ptr + first_document).to(tl.int64) + (program - n_extra)
            exists = at < tl.load(cu_seqlens_ptr + first_document + n_block_documents).to(tl.int64)
            flat = tl.load(owners_ptr + at, mask=exists, other=first_document).to(tl.int64)
            local = flat - first_document
            token = (at - tl.load(cu_seqlens_ptr + flat).to(tl.int64)).to(tl.int32)
            starts_at = at + flat
        else:
            local = ((program - n_extra) // document_length).to(tl.int64)
            flat = first_document + local
            token = (program - n_extra) % document_length
            exists = token >= 0
            starts_at = local * (document_length + 1) + token
        low = tl.load(starts_ptr + starts_at, mask=exists, other=0)
        end = tl.load(starts_ptr + starts_at + 1, mask=exists, other=0)
        boundary = (tl.cdiv(low, SEGMENT) + 1) * SEGMENT
        in_parts = end > boundary
        high = tl.minimum(end, boundary)
        part = (local * n_segments + boundary // SEGMENT - 1) * 2

    group, weights_ptr = _group_of(
        flat, grad_scores_ptr, candidates_ptr, n_documents, n_group_queries, n_groups, stride_grad_query,
        stride_grad_document, HAS_CANDIDATES,
    )  # fmt: skip
    queries_ptr += group * n_group_queries * stride_query
    list_ptr += local * n_rows
    dims = tl.arange(0, BLOCK_EMBEDDING)
    HALF: tl.constexpr = BLOCK_EMBEDDING // 2
    halves = tl.arange(0, HALF)
    left_sum = tl.zeros([BLOCK_ROWS, HALF], tl.float32)
    right_sum = tl.zeros([BLOCK_ROWS, HALF], tl.float32)
    for position in tl.range(low, high, BLOCK_ROWS):
        positions = position + tl.arange(0, BLOCK_ROWS)
        mask = positions < high
        row = tl.load(list_ptr + positions, mask=mask, other=0).to(tl.int32)
        query = _quotient(row, magic, shift)
        if NARROW:
            weight = tl.load(weights_ptr + query * stride_grad_query, mask=mask, other=0.0)
            source = row * stride_query_token
        else:
            weight = tl.load(weights_ptr + query.to(tl.int64) * stride_grad_query, mask=mask, other=0.0)
            source = query.to(tl.int64) * stride_query + (row - query * query_length).to(tl.int64) * stride_query_token
        if NORMALIZE:
            weight *= tl.load(queries_scale_ptr + group * n_rows + row, mask=mask, other=0.0)
        at = queries_ptr + halves[None, :] + source[:, None]
        if BLOCK_EMBEDDING == EMBEDDING:
            left = tl.load(at, mask=mask[:, None], other=0.0)
            right = tl.load(at + HALF, mask=mask[:, None], other=0.0)
        else:
            left = tl.load(at, mask=mask[:, None] & (halves < EMBEDDING)[None, :], other=0.0)
            right = tl.load(at + HALF, mask=mask[:, None] & (HALF + halves < EMBEDDING)[None, :], other=0.0)
        left_sum += weight[:, None] * left.to(tl.float32)
        right_sum += weight[:, None] * right.to(tl.float32)
    summed = _joined(tl.sum(left_sum, axis=0)[None, :], tl.sum(right_sum, axis=0)[None, :], 1, BLOCK_EMBEDDING)
    summed = tl.reshape(summed, [BLOCK_EMBEDDING])
    if in_parts:
        tl.store(parts_ptr + part * EMBEDDING + dims, summed, mask=dims < EMBEDDING)
    else:
        _store_token(
            summed, documents_ptr, documents_scale_ptr, grad_documents_ptr, cu_seqlens_ptr, flat, token, n_documents,
            document_length, stride_group, stride_document, stride_document_token, dims, exists,
            EMBEDDING, PACKED, NORMALIZE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_document", "n_rows", "n_documents", "document_length", "n_segments"])
def _combine_kernel(
    documents_ptr, documents_scale_ptr, cu_seqlens_ptr, winners_ptr, list_ptr, starts_ptr, parts_ptr,
    grad_documents_ptr,
    first_document, n_rows, n_documents, document_length, n_segments,
    stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    PACKED: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """The gradient of every token whose list was summed in parts, from `parts`; a program for each segment.

    It acts if its segment is the first that was not summed by the token's own program.
    """
    program = tl.program_id(0).to(tl.int64)
    local = program // n_segments
    flat = first_document + local
    boundary, token, start, end, taken = _segment(
        winners_ptr, list_ptr, starts_ptr, cu_seqlens_ptr, flat, local, tl.program_id(0) % n_segments, n_rows,
        document_length, SEGMENT, PACKED,
    )  # fmt: skip
    if taken & (boundary < start + 2 * SEGMENT):
        dims = tl.arange(0, BLOCK_EMBEDDING)
        parts_ptr += program * 2 * EMBEDDING
        total = tl.load(parts_ptr + dims, mask=dims < EMBEDDING, other=0.0)
        count = tl.cdiv(end - boundary, SEGMENT)
        for first in tl.range(0, count, BLOCK_PARTS):
            parts = first + tl.arange(0, BLOCK_PARTS)
            mask = (parts < count)[:, None] & (dims < EMBEDDING)[None, :]
            at = (parts * 2 + 1)[:, None] * EMBEDDING + dims[None, :]
            total += tl.sum(tl.load(parts_ptr + at, mask=mask, other=0.0), axis=0)
        _store_token(
            total, documents_ptr, documents_scale_ptr, grad_documents_ptr, cu_seqlens_ptr, flat, token, n_documents,
            document_length, stride_group, stride_document, stride_document_token, dims, taken,
            EMBEDDING, PACKED, NORMALIZE,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_group_queries", "query_length", "n_documents", "document_length", "stride_grad_query",
        "stride_grad_document", "n_groups",
    ]
)  # fmt: skip
def _onehot_kernel(
    grad_scores_ptr, queries_ptr, documents_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, winners_ptr, grad_documents_ptr,
    n_rows, n_group_queries, query_length, n_documents, document_length, stride_grad_query, stride_grad_document,
    n_groups,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    SCALED: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """grad_documents of a block of tokens, [tokens, rows] of zeros and ones times the weighted rows [rows, d].

    Grid: (blocks of tokens x documents, blocks of the embedding). The product is exact to float32: three products in
    tf32. A row that is not finite would spoil every token of the product, so such rows are added one by one.
    """
    n_blocks = tl.cdiv(document_length, BLOCK_TOKENS)
    flat = (tl.program_id(0) // n_blocks).to(tl.int64)
    tokens = tl.program_id(0) % n_blocks * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    dims = tl.program_id(1) * BLOCK_EMBEDDING + tl.arange(0, BLOCK_EMBEDDING)
    dim_exists = dims < EMBEDDING
    if PACKED:
        begin = tl.load(cu_seqlens_ptr + flat).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + flat + 1).to(tl.int64) - begin).to(tl.int32)
        source = (begin + tokens) * stride_document_token
    else:
        begin = flat * document_length
        length = document_length
        source = (flat // n_documents) * stride_group + (flat % n_documents) * stride_document
        source += tokens.to(tl.int64) * stride_document_token
    group, weights_ptr = _group_of(
        flat, grad_scores_ptr, candidates_ptr, n_documents, n_group_queries, n_groups, stride_grad_query,
        stride_grad_document, HAS_CANDIDATES,
    )  # fmt: skip
    queries_ptr += group * n_group_queries * stride_query
    winners_ptr += flat * n_rows
    total = tl.zeros([BLOCK_TOKENS, BLOCK_EMBEDDING], tl.float32)
    for start in tl.range(0, n_rows, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        winner = tl.load(winners_ptr + rows, mask=rows < n_rows, other=-1).to(tl.int32)
        won = winner >= 0
        query = rows // query_length
        weight = tl.load(weights_ptr + query.to(tl.int64) * stride_grad_query, mask=won, other=0.0)
        if SCALED:
            weight *= tl.load(queries_scale_ptr + group * n_rows + rows, mask=won, other=0.0)
        at = query.to(tl.int64) * stride_query + (rows % query_length).to(tl.int64) * stride_query_token
        mask = won[:, None] & dim_exists[None, :]
        tile = tl.load(queries_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)
        weighted = tile.to(tl.float32) * weight[:, None]
        if tl.sum(tl.sum((weighted - weighted != 0.0).to(tl.int32), axis=1), axis=0) == 0:
            chosen = (tokens[:, None] == winner[None, :]).to(tl.float32)
            total = tl.dot(chosen, weighted, total, input_precision="tf32x3")
        else:
            for row in tl.range(start, tl.minimum(start + BLOCK_ROWS, n_rows)):
                chosen_token = tl.load(winners_ptr + row).to(tl.int32)
                row_weight = tl.load(weights_ptr + tl.cast(row // query_length, tl.int64) * stride_grad_query)
                if SCALED:
                    row_weight *= tl.load(queries_scale_ptr + group * n_rows + row)
                at_row = tl.cast(row // query_length, tl.int64) * stride_query
                at_row += tl.cast(row % query_length, tl.int64) * stride_query_token
                values = tl.load(queries_ptr + at_row + dims, mask=dim_exists, other=0.0).to(tl.float32) * row_weight
                total = tl.where((tokens == chosen_token)[:, None], total + values[None, :], total)
    mask = (tokens < length)[:, None] & dim_exists[None, :]
    if NORMALIZE:
        embeddings = tl.load(documents_ptr + source[:, None] + dims[None, :], mask=mask, other=0.0)
        scale = tl.load(documents_scale_ptr + begin + tokens, mask=tokens < length, other=1.0)
        total = _through_norm(total, embeddings, scale)
    tl.store(
        grad_documents_ptr + (begin + tokens)[:, None] * EMBEDDING + dims[None, :],
        total.to(grad_documents_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_group_queries", "query_length", "n_documents", "document_length", "stride_grad_query",
        "stride_grad_document", "n_groups",
    ]
)  # fmt: skip
def _atomic_kernel(
    grad_scores_ptr, queries_ptr, queries_scale_ptr, cu_seqlens_ptr, candidates_ptr, winners_ptr, sums_ptr,
    n_rows, n_group_queries, query_length, n_documents, document_length, stride_grad_query, stride_grad_document,
    n_groups,
    stride_query, stride_query_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """sums[winner] += grad_score * queries[row], in float32 and in any order; grid: blocks of rows x documents."""
    n_blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    flat = (tl.program_id(0) // n_blocks).to(tl.int64)
    rows = tl.program_id(0) % n_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    begin = flat * document_length
    if PACKED:
        begin = tl.load(cu_seqlens_ptr + flat).to(tl.int64)
    group, weights_ptr = _group_of(
        flat, grad_scores_ptr, candidates_ptr, n_documents, n_group_queries, n_groups, stride_grad_query,
        stride_grad_document, HAS_CANDIDATES,
    )  # fmt: skip
    winner = tl.load(winners_ptr + flat * n_rows + rows, mask=rows < n_rows, other=-1).to(tl.int32)
    won = winner >= 0
    query = rows // query_length
    weight = tl.load(weights_ptr + query.to(tl.int64) * stride_grad_query, mask=won, other=0.0)
    if NORMALIZE:
        weight *= tl.load(queries_scale_ptr + group * n_rows + rows, mask=won, other=0.0)
    at = (group * n_group_queries + query) * stride_query + (rows % query_length).to(tl.int64) * stride_query_token
    mask = won[:, None] & (dims < EMBEDDING)[None, :]
    tile = tl.load(queries_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    to = sums_ptr + (begin + winner)[:, None] * EMBEDDING + dims[None, :]
    tl.atomic_add(to, tile * weight[:, None], mask=mask, sem="relaxed")


_gather = Launcher(_gather_kernel)
_finish = Launcher(_finish_kernel)
_sort = Launcher(_sort_kernel)
_scan = Launcher(_scan_kernel)
_place = Launcher(_place_kernel)
_starts = Launcher(_starts_kernel)
_sum = Launcher(_sum_kernel)
_combine = Launcher(_combine_kernel)
_onehot = Launcher(_onehot_kernel)
_atomic = Launcher(_atomic_kernel)


class _Problem(NamedTuple):
    """All that a launch depends on but the tensors' contents: the key of the functions that decide how to launch.

    Documents and tokens are counted over all groups; `per_group` documents belong to one, and `length` is the longest
    document.
    """

    n_queries: int
    query_length: int
    size: int
    groups: int
    documents: int
    per_group: int
    length: int
    tokens: int
    grad_strides: tuple[int, ...]
    query_strides: tuple[int, ...]
    document_strides: tuple[int, ...]
    packed: bool
    has_candidates: bool
    normalize: bool
    device: torch.device
    dtype: torch.dtype
    winners_dtype: torch.dtype
    bounds_dtypes: tuple[torch.dtype | None, ...] = ()

    @property
    def rows(self) -> int:
        return self.n_queries // self.groups * self.query_length

    @property
    def block_embedding(self) -> int:
        return max(16, triton.next_power_of_2(self.size))

    @property
    def narrow_documents(self) -> bool:
        """Whether offsets within a document, and among one document's scores, fit into 32 bits."""
        return max(self.length * self.document_strides[2], self.n_queries * self.grad_strides[0]) < 1 << 31

    @property
    def narrow_queries(self) -> bool:
        """Whether queries are contiguous, and offsets among one group's, and among their scores, fit into 32 bits."""
        to_query, to_token = self.query_strides[:2]
        return to_query == self.query_length * to_token and (
            max(self.rows * to_token, self.n_queries * self.grad_strides[0]) < 1 << 31
        )

    @property
    def walked(self) -> int:
        """Documents that a query meets (on average, where every query owns its own of the packed ones)."""
        return max(1, self.documents // self.groups) if self.has_candidates else self.per_group


class _Inputs(NamedTuple):
    """The tensors of one backward."""

    grad_scores: Tensor
    queries: Tensor
    documents: Tensor
    queries_scale: Tensor | None
    documents_scale: Tensor | None
    cu_seqlens: Tensor | None
    candidates: Tensor | None
    winners: Tensor


def maxsim_backward(
    grad_scores: Tensor,
    queries: Tensor,
    documents: Tensor,
    winners: Tensor,
    normalize: bool,
    need_queries: bool,
    need_documents: bool,
    backward: str = "auto",
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients [Nq, Lq, d] and [G, K, Ld, d] in the type of the embeddings; no dimension is 0.

    `grad_scores` [Nq, K] is float32 with any strides, `winners` [G, K, Nq / G * Lq] contiguous. `backward` is "auto",
    "csr", "onehot" or "atomic".
    """
    groups, candidates, length, size = documents.shape
    problem = _Problem(
        queries.shape[0], queries.shape[1], size, groups, groups * candidates, candidates, length,
        groups * candidates * length, grad_scores.stride(), queries.stride(), documents.stride()[:3],
        False, False, normalize, queries.device, queries.dtype, winners.dtype,
    )  # fmt: skip
    queries_scale, documents_scale = (inverse_norms(queries), inverse_norms(documents)) if normalize else (None, None)
    inputs = _Inputs(grad_scores, queries, documents, queries_scale, documents_scale, None, None, winners)
    return _backward(problem, inputs, need_queries, need_documents, backward)


def maxsim_varlen_backward(
    grad_scores: Tensor,
    queries: Tensor,
    documents: Tensor,
    cu_seqlens: Tensor,
    winners: Tensor,
    candidates: Tensor | None,
    max_document_length: int,
    need_queries: bool,
    need_documents: bool,
    backward: str = "auto",
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients [Nq, Lq, d] and [T, d] in the type of the embeddings; no dimension is 0, but a document may be empty.

    `queries` [Nq, Lq, d] are padded, `documents` [T, d] packed with `cu_seqlens` [Nd + 1], int32 or int64 on the
    device, the longest of them of `max_document_length` tokens. `winners` count from the start of their document:
    [Nd, Nq * Lq] for `grad_scores` [Nq, Nd], or, with `candidates` [Nq + 1] on the device (query i owns documents
    candidates[i] to candidates[i + 1]), [Nd, Lq] for `grad_scores` [Nd].
    """
    n_queries, query_length, size = queries.shape
    count = cu_seqlens.shape[0] - 1
    grad_strides = (0, grad_scores.stride(0)) if candidates is not None else grad_scores.stride()
    problem = _Problem(
        n_queries, query_length, size, 1 if candidates is None else n_queries, count, count, max_document_length,
        documents.shape[0], grad_strides, queries.stride(), (0, 0, documents.stride(0)),
        True, candidates is not None, False, queries.device, queries.dtype, winners.dtype,
        (cu_seqlens.dtype, None if candidates is None else candidates.dtype),
    )  # fmt: skip
    inputs = _Inputs(grad_scores, queries, documents, None, None, cu_seqlens, candidates, winners)
    return _backward(problem, inputs, need_queries, need_documents, backward)


def chosen_backward(rows: int, size: int, normalize: bool) -> str:
    """What "auto" takes for documents of which `rows` query rows each choose a token: one-hot products, or lists."""
    return "csr"


def _backward(
    problem: _Problem, inputs: _Inputs, need_queries: bool, need_documents: bool, backward: str
) -> tuple[Tensor | None, Tensor | None]:
    grad_queries = grad_documents = None
    if need_queries:
        grad_queries = _backward_queries(problem, inputs)
    if need_documents:
        if backward == "auto":
            backward = chosen_backward(problem.rows, problem.size, problem.normalize)
        by = {"csr": _backward_by_lists, "onehot": _backward_by_products, "atomic": _backward_by_atomics}[backward]
        grad_documents = by(problem, inputs)
    return grad_queries, grad_documents


def _backward_queries(problem: _Problem, inputs: _Inputs) -> Tensor:
    launch, n_splits, finish = _bound_gather(problem)
    queries = inputs.queries
    grad_queries = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if finish is None:
        launch(*inputs, grad_queries)
        return grad_queries
    parts = queries.new_empty(n_splits, *queries.shape, dtype=torch.float32)
    launch(*inputs, parts)
    finish(parts, queries, inputs.queries_scale, grad_queries)
    return grad_queries


def _backward_by_lists(problem: _Problem, inputs: _Inputs) -> Tensor:
    """Gradient of the documents by sorted lists of rows, a block of documents at a time."""
    if problem.groups == 1 and problem.rows * problem.documents >= _TRANSPOSED_WINNERS:
        weights = inputs.grad_scores.t().contiguous().t()
        inputs = inputs._replace(grad_scores=weights)
        problem = problem._replace(grad_strides=weights.stride())
    plan, blocks = _bound_lists(problem)
    documents, winners = inputs.documents, inputs.winners
    grad_documents = torch.empty(documents.shape, dtype=documents.dtype, device=documents.device)
    count, device = plan.documents, documents.device
    lists = [torch.empty(count, problem.rows, dtype=plan.list_dtype, device=device) for _ in range(plan.passes)]
    order = torch.empty(count, plan.chunks << _CHUNK_BITS, dtype=torch.uint16, device=device)
    counts = torch.empty(count, plan.chunks, plan.bins, dtype=torch.int32, device=device)
    runs = counts.view(torch.uint16)
    listed = torch.empty(count, dtype=torch.int32, device=device)
    parts = torch.empty(count, max(1, plan.segments), 2, problem.size, dtype=torch.float32, device=device)
    if problem.packed:
        starts = torch.empty(problem.tokens + problem.documents, dtype=torch.int32, device=device)
        owners = torch.empty(problem.tokens, dtype=torch.int32, device=device)
    else:
        starts, owners = torch.empty(count, problem.length + 1, dtype=torch.int32, device=device), None
    for block in blocks:
        previous = None
        for (sort, scan, place), target in zip(block.passes, lists, strict=True):
            sort(winners, previous, listed, order, counts, runs)
            scan(counts, starts, owners, listed, inputs.cu_seqlens)
            place(winners, previous, order, counts, listed, target)
            previous = target
        if block.find_starts is not None:
            block.find_starts(winners, previous, listed, inputs.cu_seqlens, starts, owners)
        block.sum(*inputs[:-1], owners, winners, previous, starts, parts, grad_documents)
        if block.combine is not None:
            block.combine(
                documents, inputs.documents_scale, inputs.cu_seqlens, winners, previous, starts, parts, grad_documents
            )
    return grad_documents


def _backward_by_products(problem: _Problem, inputs: _Inputs) -> Tensor:
    """Gradient of the documents by one-hot products."""
    launch, finish = _bound_products(problem)
    documents = inputs.documents
    grad_documents = torch.empty(documents.shape, dtype=documents.dtype, device=documents.device)
    if finish is None:
        launch(*inputs, grad_documents)
        return grad_documents
    sums = torch.empty(documents.shape, dtype=torch.float32, device=documents.device)
    launch(*inputs, sums)
    finish(sums, documents, inputs.documents_scale, grad_documents)
    return grad_documents


def _backward_by_atomics(problem: _Problem, inputs: _Inputs) -> Tensor:
    """Gradient of the documents by atomic additions."""
    launch, finish = _bound_atomics(problem)
    documents = inputs.documents
    sums = torch.zeros(documents.shape, dtype=torch.float32, device=documents.device)
    launch(
        inputs.grad_scores, inputs.queries, inputs.queries_scale, inputs.cu_seqlens, inputs.candidates, inputs.winners,
        sums,
    )  # fmt: skip
    if documents.dtype == torch.float32 and not problem.normalize:
        return sums
    grad_documents = torch.empty(documents.shape, dtype=documents.dtype, device=documents.device)
    finish(sums, documents, inputs.documents_scale, grad_documents)
    return grad_documents


# The functions below decide how a launch is cut up, once for each problem.


@functools.lru_cache(maxsize=4096)
def _bound_gather(problem: _Problem) -> tuple[Callable[..., None], int, Callable[..., None] | None]:
    """A launch of `_gather_kernel`, into how many splits it sums, and a launch of `_finish_kernel` if there are any."""
    processors = architecture(problem.device)[1]
    block = problem.block_embedding
    for slots, block_documents in _GATHERS if problem.walked > 1 else ((64, 1), (32, 1)):
        num_warps = slots // 8
        slots = max(2, min(slots, num_warps * 32 * 32 // block))
        block_documents = min(block_documents, slots)
        block_rows = slots // block_documents
        programs = triton.cdiv(problem.rows, block_rows) * problem.groups
        if programs >= _GATHER_PROGRAMS * processors and block_rows < 2 * problem.rows:
            break
    n_splits = 1
    if programs < _GATHER_PROGRAMS * processors:
        n_splits = max(1, min(_SPLIT_PROGRAMS * processors // programs, problem.walked // _SPLIT_DOCUMENTS))
    launch = _gather.bind(
        (programs, n_splits, 1),
        (problem.rows, problem.query_length, problem.per_group, problem.length, n_splits, *problem.grad_strides),
        (*problem.query_strides[:2], *problem.document_strides),
        (
            problem.size, block, block_rows, block_documents, problem.packed, problem.has_candidates,
            problem.normalize, n_splits > 1, problem.narrow_documents,
        ),
        num_warps,
        num_stages=3,
    )  # fmt: skip
    finish = None
    if n_splits > 1:
        finish = _bind_finish(
            problem, problem.n_queries * problem.query_length, n_splits, problem.n_queries, problem.query_length,
            (0, *problem.query_strides[:2]),
        )  # fmt: skip
    return launch, n_splits, finish


def _bind_finish(
    problem: _Problem, rows: int, parts: int, sequences: int, length: int, strides: tuple[int, ...]
) -> Callable[..., None]:
    block = problem.block_embedding
    num_warps = 4 if block <= 512 else 8
    block_rows = max(1, num_warps * 32 * 16 // block)
    return _finish.bind(
        (triton.cdiv(rows, block_rows), 1, 1),
        (rows, parts, sequences, length),
        strides,
        (problem.size, block, block_rows, problem.normalize),
        num_warps,
        num_stages=3,
    )


def _finish_documents(problem: _Problem) -> Callable[..., None]:
    """A launch of `_finish_kernel` over the one float32 sum of every document token."""
    sequences, length = (1, problem.tokens) if problem.packed else (problem.per_group, problem.length)
    return _bind_finish(problem, problem.tokens, 1, sequences, length, problem.document_strides)


class _Plan(NamedTuple):
    """Sizes of the scratch tensors of a block of documents."""

    documents: int
    list_dtype: torch.dtype
    passes: int
    chunks: int
    bins: int
    segments: int


class _Block(NamedTuple):
    """The launches of a block of documents: (sort, scan, place) of each pass, then the rest."""

    passes: tuple[tuple[Callable[..., None], ...], ...]
    find_starts: Callable[..., None] | None
    sum: Callable[..., None]
    combine: Callable[..., None] | None


@functools.lru_cache(maxsize=1024)
def _bound_lists(problem: _Problem) -> tuple[_Plan, tuple[_Block, ...]]:
    """How the documents are cut into blocks, and the launches of each."""
    rows, length, size = problem.rows, problem.length, problem.size
    widest = 1 << _BIN_BITS
    if length > widest**2:
        raise ValueError(f"documents must have at most {widest**2} tokens, got {length}")
    # Shift of a token to its bin, and how many bins there are, in each pass: the low digit first.
    digits = [(0, length)] if length <= widest else [(0, widest), (_BIN_BITS, triton.cdiv(length, widest))]
    chunks = triton.cdiv(rows, 1 << _CHUNK_BITS)
    bins = max(count for _, count in digits)
    segments = triton.cdiv(rows, _SEGMENT) - 1
    list_dtype = torch.uint16 if rows <= 1 << 16 else torch.int32
    scratch = (
        len(digits) * rows * list_dtype.itemsize
        + (chunks << _CHUNK_BITS) * 2
        + chunks * bins * 4
        + segments * 2 * size * 4
        + (0 if problem.packed else (length + 1) * 4)
    )
    winners = problem.documents * rows * problem.winners_dtype.itemsize
    step = max(1, min(problem.documents, max(_SCRATCH, winners // 2) // scratch))
    step = triton.cdiv(problem.documents, triton.cdiv(problem.documents, step))
    blocks = tuple(
        _bind_block(problem, first, min(step, problem.documents - first), digits, chunks, segments)
        for first in range(0, problem.documents, step)
    )
    return _Plan(step, list_dtype, len(digits), chunks, bins, segments), blocks


def _bind_block(
    problem: _Problem,
    first: int,
    count: int,
    digits: list[tuple[int, int]],
    chunks: int,
    segments: int,
) -> _Block:
    rows, length, size = problem.rows, problem.length, problem.size
    passes = []
    for index, (shift, bins) in enumerate(digits):
        integers = (first, rows, chunks, bins)
        constants = (shift, _BIN_BITS, _CHUNK_BITS, index > 0)
        sort = _sort.bind(
            (chunks * count, 1, 1),
            integers,
            (),
            (*constants, _BLOCK_BINS),
            1,
            num_stages=1,
        )
        scan = _scan.bind(
            (count, 1, 1),
            (first, chunks, bins, length),
            (),
            (_BLOCK_BINS, _BLOCK_CHUNKS, problem.packed, len(digits) == 1),
            4,
            num_stages=1,
        )
        place = _place.bind((chunks * count, 1, 1), integers, (), constants, 4, num_stages=1)
        passes.append((sort, scan, place))
    find_starts = None
    if len(digits) > 1:
        find_starts = _starts.bind(
            (triton.cdiv(length + 1, 256) * count, 1, 1),
            (first, rows, rows.bit_length(), length),
            (),
            (256, problem.packed),
            4,
            num_stages=1,
        )
    block = problem.block_embedding
    num_warps = max(_SUM_WARPS, min(8, block // 128))
    block_rows = max(4, min(_SUM_ROWS, num_warps * 2048 // block))
    tokens = min(problem.tokens, count * length)
    group_queries = problem.n_queries // problem.groups
    add = _sum.bind(
        (count * segments + tokens, 1, 1),
        (
            first, count, rows, group_queries, problem.query_length, *_division(problem.query_length),
            problem.per_group, length, segments, *problem.grad_strides, problem.groups,
        ),
        (*problem.query_strides[:2], *problem.document_strides),
        (
            size, block, block_rows, _SEGMENT, problem.packed, problem.has_candidates, problem.normalize,
            problem.narrow_queries,
        ),
        num_warps,
        num_stages=1,
    )  # fmt: skip
    combine = None
    if segments > 0:
        combine = _combine.bind(
            (count * segments, 1, 1),
            (first, rows, problem.per_group, length, segments),
            problem.document_strides,
            (size, block, 8, _SEGMENT, problem.packed, problem.normalize),
            num_warps,
            num_stages=1,
        )
    return _Block(tuple(passes), find_starts, add, combine)


def _division(divisor: int) -> tuple[int, int]:
    """Factor, just above 2**shift / divisor and below 2**32, and shift by which `_quotient` divides exactly."""
    shift = 31 + (divisor - 1).bit_length()
    return (1 << shift) // divisor + 1, shift


@functools.lru_cache(maxsize=4096)
def _bound_products(problem: _Problem) -> tuple[Callable[..., None], Callable[..., None] | None]:
    """A launch of `_onehot_kernel`, and one of `_finish_kernel` if that is what applies the Jacobian."""
    block = min(problem.block_embedding, _ONEHOT_EMBEDDING)
    whole = block >= problem.size
    block_tokens = 64 if problem.length > 32 else 32
    launch = _onehot.bind(
        (triton.cdiv(problem.length, block_tokens) * problem.documents, triton.cdiv(problem.size, block), 1),
        (
            problem.rows, problem.n_queries // problem.groups, problem.query_length, problem.per_group,
            problem.length, *problem.grad_strides, problem.groups,
        ),
        (*problem.query_strides[:2], *problem.document_strides),
        (
            problem.size, block, block_tokens, 32, problem.packed, problem.has_candidates, problem.normalize,
            problem.normalize and whole,
        ),
        4,
        num_stages=2,
    )  # fmt: skip
    return launch, _finish_documents(problem) if problem.normalize and not whole else None


@functools.lru_cache(maxsize=4096)
def _bound_atomics(problem: _Problem) -> tuple[Callable[..., None], Callable[..., None]]:
    """Launches of `_atomic_kernel` and `_finish_kernel`."""
    block = problem.block_embedding
    num_warps = 4 if block <= 512 else 8
    block_rows = max(2, min(32, num_warps * 32 * 32 // block))
    launch = _atomic.bind(
        (triton.cdiv(problem.rows, block_rows) * problem.documents, 1, 1),
        (
            problem.rows, problem.n_queries // problem.groups, problem.query_length, problem.per_group,
            problem.length, *problem.grad_strides, problem.groups,
        ),
        problem.query_strides[:2],
        (problem.size, block, block_rows, problem.packed, problem.has_candidates, problem.normalize),
        num_warps,
        num_stages=1,
    )  # fmt: skip
    return launch, _finish_documents(problem)
