"""Gradient of the documents, "csr": the query rows of each document listed by the token that they chose, then summed.

The list is a counting sort: `_sort_kernel` sorts chunks of rows in registers and tells how many of them chose a token,
`_scan_kernel` turns those counts into places, and `_place_kernel` moves the rows there. Few rows are listed by one
program of `_list_kernel` for each document instead. Either sort is stable, so the order, and with it every bit of the
sum, is always the same. `_sum_kernel` sums the rows of a token; of a token that many more than `_SEGMENT` rows chose
(markers such as [CLS] win thousands), other programs take the rest, cut at multiples of `_SEGMENT`, and
`_combine_kernel` adds up the parts in order.

All this needs memory, so it is done for a block of documents at a time, and most of it in the memory of the gradients:
that of the documents is written when the rows are placed, and that of the queries after that of the documents. Only the
list itself is scratch then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .gradients import Problem, Slot, group_of, joined, quotient, through_norm
from .launch import Launcher, Sequence, region_at
from .overlap import wait_for_previous_kernel

# The times beside a constant are milliseconds on an H200 in bfloat16 at d = 128, at 1024 x 1024 (32 x 180 tokens), at
# 512 x 512 (32 x 180) and at 64 x 64 (1024 x 1024), in this order, with uniform winners.

# Scratch of the lists of a block of documents: at least so many bytes, or half of what the winners take. At 64 x 64 the
# whole backward takes 0.472 and 44 MiB, its gradients among them, and did 0.492 and 52 where all else was scratch too.
_SCRATCH = 12 << 20
# Bytes of which regions, that begin at multiples of some, may leave unused.
_SLACK = 1 << 10
# Rows that one program, of one warp, sorts, as a power of two. Sort, scan and place: 0.59, 0.20, 0.16; 2048 rows
# 1.13, 0.30, 0.28. 512 rows take as long, and twice the counts.
_CHUNK_BITS = 10
# Bits of a token that one pass sorts by; a document of more tokens takes two passes.
_BIN_BITS = 11
# Counts that one program scans at a time, of bins x chunks: all chunks of these bins.
_BLOCK_BINS = 256
_BLOCK_CHUNKS = 16
# Query rows that one program lists, at most, and keys that a warp of it sorts. With 512 rows and 264 documents of 300
# tokens, the gradient takes 0.059 instead of 0.071; with 256 and 4000 of 180 tokens, 0.449 instead of 0.518; but with
# 1024 and 1024 of 180 tokens, 0.174 instead of 0.147.
_ALONE_ROWS = 512
_ALONE_KEYS = 256
# Query rows on one token that one program sums, at least; at most twice as many: 1.18, 0.35, 0.18, and 1.62,
# 0.66, 0.31 with skewed winners; 256 rows 1.27, 0.37, 0.20, and 1.50, 0.56, 0.33.
_SEGMENT = 512
# Rows in flight in a program that sums, and its warps, at d = 128: 1.18, 0.35, 0.18; 16 rows in one warp 1.66, 0.48,
# 0.26, in two 1.29, 0.40, 0.23. Longer embeddings take more warps.
_SUM_ROWS, _SUM_WARPS = 8, 1
# Weights of the rows of one document lie together, and in L1, if there are enough rows to pay for transposing.
_TRANSPOSED_WINNERS = 1 << 22


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
    winners_ptr, listed_ptr, n_listed_ptr, order_ptr, counts_ptr, runs_ptr, reached_ptr,
    first_document, n_rows, n_chunks, n_bins,
    SHIFT: tl.constexpr,
    BIN_BITS: tl.constexpr,
    CHUNK_BITS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK_BINS: tl.constexpr,
):  # fmt: skip
    """order[local document, chunk] = the chunk's rows by bin, and within a bin in their order; chunks x documents.

    `runs`, a view of `counts` [local document, chunk, bin], tells where in the chunk each bin's rows begin and end, and
    `reached` [local document, chunk, block of bins] where a block's do.
    """
    wait_for_previous_kernel()
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
    reached_ptr += program * tl.cdiv(n_bins, BLOCK_BINS)
    for block in tl.range(0, n_bins, BLOCK_BINS):
        tl.store(reached_ptr + block // BLOCK_BINS, tl.sum((bins < block).to(tl.int32), axis=0))
        every = block + tl.arange(0, BLOCK_BINS)
        tl.store(counts_ptr + program * n_bins + every, tl.zeros([BLOCK_BINS], tl.int32), mask=every < n_bins)
    tl.debug_barrier()
    runs_ptr += program * n_bins * 2
    tl.store(runs_ptr + bins * 2, ranks.to(tl.uint16), mask=exists & begins)
    tl.store(runs_ptr + bins * 2 + 1, (ranks + 1).to(tl.uint16), mask=exists & ends)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["first_document", "n_rows", "document_length"])
def _list_kernel(
    winners_ptr, list_ptr, starts_ptr,
    first_document, n_rows, document_length,
    ROW_BITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """list[local document] = its rows by the token that they chose, and where each token's begin; one program for each.

    All of at most 2**ROW_BITS rows, and of fewer than BLOCK_TOKENS tokens, are in registers.
    """
    wait_for_previous_kernel()
    ROWS: tl.constexpr = 1 << ROW_BITS
    local = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, ROWS)
    winners_ptr += (first_document + local) * n_rows
    winners = tl.load(winners_ptr + ranks, mask=ranks < n_rows, other=-1).to(tl.int32)
    # The row makes keys different and the sort stable. Rows without a winner come last.
    keys = _sorted((tl.where(winners >= 0, winners, document_length) << ROW_BITS) | ranks, ROW_BITS)
    tokens = keys >> ROW_BITS
    listed = tokens < document_length
    tl.store(list_ptr + local * n_rows + ranks, (keys & (ROWS - 1)).to(list_ptr.dtype.element_ty), mask=listed)

    # A token's rows begin where the first of them is; without any, where those of the next token do.
    starts_ptr += local * (document_length + 1)
    every = tl.arange(0, BLOCK_TOKENS)
    n_listed = tl.sum(listed.to(tl.int32), axis=0)
    starts = tl.zeros([BLOCK_TOKENS], tl.int32) + n_listed
    tl.store(starts_ptr + every, starts.to(starts_ptr.dtype.element_ty), mask=every <= document_length)
    tl.debug_barrier()
    begins = (ranks == 0) | (tl.gather(tokens, tl.maximum(ranks - 1, 0), axis=0) != tokens)
    tl.store(starts_ptr + tokens, ranks.to(starts_ptr.dtype.element_ty), mask=listed & begins)
    tl.debug_barrier()
    found = tl.load(starts_ptr + every, mask=every < document_length, other=0).to(tl.int32)
    starts = tl.associative_scan(tl.where(every < document_length, found, n_listed), 0, _smaller, reverse=True)
    tl.store(starts_ptr + every, starts.to(starts_ptr.dtype.element_ty), mask=every < document_length)


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
    counts_ptr, reached_ptr, starts_ptr, owners_ptr, n_listed_ptr, cu_seqlens_ptr,
    first_document, n_chunks, n_bins, document_length,
    BLOCK_BINS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
    WITH_STARTS: tl.constexpr,
):  # fmt: skip
    """Turn the runs of a document's chunks into places: what to add to a rank in the chunk, by chunk and bin.

    Also leaves how many rows have a bin and, WITH_STARTS (where bins are tokens), where the list of every token begins;
    of a packed document also whose tokens they are. Grid: blocks of bins x documents.
    """
    wait_for_previous_kernel()
    n_blocks = tl.cdiv(n_bins, BLOCK_BINS)
    local = (tl.program_id(0) // n_blocks).to(tl.int64)
    block = tl.program_id(0) % n_blocks
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
    bins = block * BLOCK_BINS + tl.arange(0, BLOCK_BINS)
    reached_ptr += local * n_chunks * n_blocks + block
    reached = n_chunks * 0
    totals = tl.zeros([BLOCK_BINS], tl.int32)
    for chunk in tl.range(0, n_chunks, BLOCK_CHUNKS):
        chunks = chunk + tl.arange(0, BLOCK_CHUNKS)
        _, rows, _, _ = _load_runs(counts_ptr, n_chunks, n_bins, chunks, bins)
        totals += tl.sum(rows, axis=0)
        reached += tl.sum(tl.load(reached_ptr + chunks * n_blocks, mask=chunks < n_chunks, other=0), axis=0)
    place = reached + tl.cumsum(totals, axis=0) - totals
    # Places overwrite runs that another thread may have to read first.
    tl.debug_barrier()
    if WITH_STARTS:
        tl.store(starts_ptr + bins, place.to(starts_ptr.dtype.element_ty), mask=bins < length)
        if PACKED:
            tl.store(owners_ptr + bins, (flat + bins * 0).to(tl.int32), mask=bins < length)
    for chunk in tl.range(0, n_chunks, BLOCK_CHUNKS):
        begins, rows, at, mask = _load_runs(counts_ptr, n_chunks, n_bins, chunk + tl.arange(0, BLOCK_CHUNKS), bins)
        tl.store(counts_ptr + at, place[None, :] + tl.cumsum(rows, axis=0) - rows - begins, mask=mask)
        place += tl.sum(rows, axis=0)
    if block == n_blocks - 1:
        listed = reached + tl.sum(totals, axis=0)
        tl.store(n_listed_ptr + local, listed)
        if WITH_STARTS:
            tl.store(starts_ptr + length, listed.to(starts_ptr.dtype.element_ty))


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
    wait_for_previous_kernel()
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
    wait_for_previous_kernel()
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
    tl.store(starts_ptr + tokens, low.to(starts_ptr.dtype.element_ty), mask=tokens <= length)


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
    exists = boundary < tl.load(starts_ptr + length).to(tl.int32)
    row = tl.load(list_ptr + local * n_rows + boundary, mask=exists, other=0).to(tl.int32)
    token = tl.load(winners_ptr + flat * n_rows + row, mask=exists, other=0).to(tl.int32)
    start = tl.load(starts_ptr + token, mask=exists, other=0).to(tl.int32)
    end = tl.load(starts_ptr + token + 1, mask=exists, other=0).to(tl.int32)
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
        total = tl.reshape(through_norm(total[None, :], embedding[None, :], scale), total.shape)
    tl.store(grad_documents_ptr + at * EMBEDDING + dims, total.to(grad_documents_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "first_document", "n_block_documents", "n_segments", "n_rows", "n_group_queries", "query_length", "magic",
        "shift", "n_documents", "document_length", "stride_grad_query", "stride_grad_document", "n_groups",
    ]
)  # fmt: skip
def _sum_kernel(
    grad_scores_ptr, queries_ptr, documents_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, owners_ptr, winners_ptr, list_ptr, starts_ptr, parts_ptr, grad_documents_ptr,
    first_document, n_block_documents, n_segments, n_rows, n_group_queries, query_length, magic, shift, n_documents,
    document_length, stride_grad_query, stride_grad_document, n_groups,
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
    wait_for_previous_kernel()
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
        low = tl.load(starts_ptr + starts_at, mask=exists, other=0).to(tl.int32)
        end = tl.load(starts_ptr + starts_at + 1, mask=exists, other=0).to(tl.int32)
        boundary = (tl.cdiv(low, SEGMENT) + 1) * SEGMENT
        in_parts = end > boundary
        high = tl.minimum(end, boundary)
        part = (local * n_segments + boundary // SEGMENT - 1) * 2

    group, weights_ptr = group_of(
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
        query = quotient(row, magic, shift)
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
    summed = joined(tl.sum(left_sum, axis=0)[None, :], tl.sum(right_sum, axis=0)[None, :], 1, BLOCK_EMBEDDING)
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
    wait_for_previous_kernel()
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


_list = Launcher(_list_kernel, follows=True)
_sort = Launcher(_sort_kernel, follows=True)
_scan = Launcher(_scan_kernel, follows=True)
_place = Launcher(_place_kernel, follows=True)
_starts = Launcher(_starts_kernel, follows=True)
_sum = Launcher(_sum_kernel, follows=True)
_combine = Launcher(_combine_kernel, follows=True)


def wants_transposed_scores(problem: Problem) -> bool:
    """Whether the scores' gradient is to be copied so that those of one document lie together."""
    return problem.groups == 1 and problem.rows * problem.documents >= _TRANSPOSED_WINNERS


def _sorting_regions(sequence: Sequence, at: int, of: int | None, chunks: int, bins: int) -> tuple[int, int, int, int]:
    """The slots of the chunks' order, of their counts by bin, of those as runs, and of how far blocks of bins reach."""
    order = sequence.region(chunks << _CHUNK_BITS, torch.uint16, at, of)
    at = region_at(at + 2 * (chunks << _CHUNK_BITS))
    counts = sequence.region(chunks * bins, torch.int32, at, of)
    runs = sequence.region(2 * chunks * bins, torch.uint16, at, of)
    at = region_at(at + 4 * chunks * bins)
    return order, counts, runs, sequence.region(chunks * triton.cdiv(bins, _BLOCK_BINS), torch.int32, at, of)


def add_lists(problem: Problem, sequence: Sequence, with_queries: bool) -> None:
    """Add the gradient of the documents by sorted lists of rows, a block of documents at a time.

    `problem.grad_strides` are those of the tensor in `Slot.WEIGHTS`. `with_queries`: the gradient of the queries is
    computed too, later.
    """
    rows, length, size, item = problem.rows, problem.length, problem.size, problem.dtype.itemsize
    widest = 1 << _BIN_BITS
    if length > widest**2:
        raise ValueError(f"documents must have at most {widest**2} tokens, got {length}")
    # Shift of a token to its bin, and how many bins there are, in each pass: the low digit first.
    digits = [(0, length)] if length <= widest else [(0, widest), (_BIN_BITS, triton.cdiv(length, widest))]
    chunks = triton.cdiv(rows, 1 << _CHUNK_BITS)
    bins = max(count for _, count in digits)
    segments = triton.cdiv(rows, _SEGMENT) - 1
    list_dtype = torch.uint16 if rows <= 1 << 16 else torch.int32
    starts_dtype = torch.uint16 if rows < 1 << 16 and not problem.packed else torch.int32

    alone = rows <= _ALONE_ROWS and len(digits) == 1 and not problem.packed

    # Bytes of a document. Chunks in order, their counts by bin and what is reached, until the rows are placed; then
    # parts of sums; and all the time the lists, and what tells where they begin and end.
    ordered, counted = 2 * (chunks << _CHUNK_BITS), 4 * chunks * bins
    sorting = 0 if alone else ordered + counted + 4 * chunks * triton.cdiv(bins, _BLOCK_BINS)
    summing = 4 * segments * 2 * size
    starts = 0 if problem.packed else length + 1
    ends = starts * starts_dtype.itemsize + 4
    listed = len(digits) * rows * list_dtype.itemsize
    # Of packed documents it is not known here where their gradients begin.
    own = 0 if problem.packed else length * size * item
    sorts_in_gradient = sorting + _SLACK <= own
    shared = summing if sorts_in_gradient else max(sorting, summing)
    winners = problem.documents * rows * problem.winners_dtype.itemsize
    scratch = max(_SCRATCH, winners // 2)
    step = max(1, min(problem.documents, scratch // (listed + shared + ends)))
    borrowed = problem.n_queries * problem.query_length * size * item - 2 * _SLACK if with_queries else 0
    step_of_borrowed = min(problem.documents, scratch // listed, borrowed // (shared + ends))
    # For up to twice as many blocks, which take a few launches more.
    borrows = 2 * step_of_borrowed >= step
    step = triton.cdiv(problem.documents, triton.cdiv(problem.documents, step_of_borrowed if borrows else step))

    of = Slot.GRAD_QUERIES if borrows else None
    parts = sequence.region(step * segments * 2 * size, torch.float32, 0, of)
    end = region_at(step * shared + _SLACK)
    n_listed = sequence.region(step, torch.int32, end, of)
    end = region_at(end + step * 4)
    # Over what the launches before the backward had in the scratch.
    list_at = 0 if borrows else region_at(end + step * starts * starts_dtype.itemsize)
    lists = []
    for _ in digits:
        lists.append(sequence.region(step * rows, list_dtype, list_at))
        list_at = region_at(list_at + step * rows * list_dtype.itemsize)
    if problem.packed:
        starts_slot = sequence.region(problem.tokens + problem.documents, torch.int32)
        owners = sequence.region(problem.tokens, torch.int32)
    else:
        starts_slot, owners = sequence.region(step * starts, starts_dtype, end, of), int(Slot.NONE)

    block = problem.block_embedding
    num_warps = max(_SUM_WARPS, min(8, block // 128))
    block_rows = max(4, min(_SUM_ROWS, num_warps * 2048 // block))
    for first in range(0, problem.documents, step):
        count = min(step, problem.documents - first)
        previous: int = Slot.NONE
        if alone:
            row_bits = max(8, (rows - 1).bit_length())
            list_rows = _list.bind(
                (count, 1, 1),
                (first, rows, length),
                (),
                (row_bits, triton.next_power_of_2(length + 1)),
                max(1, (1 << row_bits) // _ALONE_KEYS),
                num_stages=1,
            )
            sequence.add(list_rows, Slot.WINNERS, lists[0], starts_slot)
            previous = lists[0]
        else:
            at, sorted_in = (region_at(first * own), Slot.GRAD_DOCUMENTS) if sorts_in_gradient else (0, of)
            order, counts, runs, reached = _sorting_regions(sequence, at, sorted_in, count * chunks, bins)
            for index, (shift, n_bins) in enumerate(digits):
                integers = (first, rows, chunks, n_bins)
                constants = (shift, _BIN_BITS, _CHUNK_BITS, index > 0)
                sequence.add(
                    _sort.bind((chunks * count, 1, 1), integers, (), (*constants, _BLOCK_BINS), 1, num_stages=1),
                    Slot.WINNERS, previous, n_listed, order, counts, runs, reached,
                )  # fmt: skip
                scan = _scan.bind(
                    (triton.cdiv(n_bins, _BLOCK_BINS) * count, 1, 1),
                    (first, chunks, n_bins, length),
                    (),
                    (_BLOCK_BINS, _BLOCK_CHUNKS, problem.packed, len(digits) == 1),
                    4,
                    num_stages=1,
                )
                sequence.add(scan, counts, reached, starts_slot, owners, n_listed, Slot.CU_SEQLENS)
                sequence.add(
                    _place.bind((chunks * count, 1, 1), integers, (), constants, 4, num_stages=1),
                    Slot.WINNERS, previous, order, counts, n_listed, lists[index],
                )  # fmt: skip
                previous = lists[index]
        if len(digits) > 1:
            find_starts = _starts.bind(
                (triton.cdiv(length + 1, 256) * count, 1, 1),
                (first, rows, rows.bit_length(), length),
                (),
                (256, problem.packed),
                4,
                num_stages=1,
            )
            sequence.add(find_starts, Slot.WINNERS, previous, n_listed, Slot.CU_SEQLENS, starts_slot, owners)
        tokens = min(problem.tokens, count * length)
        add = _sum.bind(
            (count * segments + tokens, 1, 1),
            (first, count, segments, *problem.layout),
            (*problem.query_strides[:2], *problem.document_strides),
            (
                size, block, block_rows, _SEGMENT, problem.packed, problem.has_candidates, problem.normalize,
                problem.narrow_queries,
            ),
            num_warps,
            num_stages=1,
        )  # fmt: skip
        sequence.add(
            add, Slot.WEIGHTS, Slot.QUERIES, Slot.DOCUMENTS, Slot.QUERIES_SCALE, Slot.DOCUMENTS_SCALE, Slot.CU_SEQLENS,
            Slot.CANDIDATES, owners, Slot.WINNERS, previous, starts_slot, parts, Slot.GRAD_DOCUMENTS,
        )  # fmt: skip
        if segments > 0:
            combine = _combine.bind(
                (count * segments, 1, 1),
                (first, rows, problem.per_group, length, segments),
                problem.document_strides,
                (size, block, 8, _SEGMENT, problem.packed, problem.normalize),
                num_warps,
                num_stages=1,
            )
            sequence.add(
                combine, Slot.DOCUMENTS, Slot.DOCUMENTS_SCALE, Slot.CU_SEQLENS, Slot.WINNERS, previous, starts_slot,
                parts, Slot.GRAD_DOCUMENTS,
            )  # fmt: skip
