"""Gradient of the documents by lists: sort the query rows of each document by their argmax token, then sum them.

The list is a counting sort: `_sort_kernel` sorts chunks of rows in registers and counts the rows of each token,
`_scan_kernel` turns the counts into positions, and `_place_kernel` moves the rows there. Few rows are instead listed by
one program of `_list_kernel` per document. Both sorts are stable, so the order of the sums (`kernels.backward.sums`) is
fixed, and gradients are bitwise reproducible.

This needs memory, so it is done for a block of documents at a time, mostly in the memory of the gradients: that of the
documents is written once the rows are placed, and that of the queries after that of the documents. Only the list
itself has memory of its own then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from .. import plan_backward, tables, tables_backward
from ..launch import Scratch, kernel, wait_for_previous_kernel
from ..plan_backward import GatherPlan, ListsPlan
from .common import BackwardTensors, Destination
from .gather import gather_queries
from .sorting import list_rows, sorted_keys
from .sums import Lists, sum_lists

# Sorts after all tokens.
_NO_TOKEN = tl.constexpr(plan_backward.MOST_LISTED_TOKENS)


@triton.jit
def _tokens_of(rows, argmax_ptr, flat, n_rows):
    """The argmax tokens of rows of a document, _NO_TOKEN where there is none."""
    argmax = tl.load(argmax_ptr + flat * n_rows + rows, mask=rows < n_rows, other=-1).to(tl.int32)
    return tl.where(argmax >= 0, argmax, _NO_TOKEN)


@kernel(follows=True, config="chunk_bits block_tokens")
def _sort_kernel(
    argmax_ptr, order_ptr, counts_ptr, runs_ptr, reached_ptr, first_document, n_rows, n_chunks, document_length,
    config: tl.constexpr,
):  # fmt: skip
    """order[local document, chunk] = the chunk's rows sorted by token, stable; chunks x documents.

    `runs`, a view of `counts` [local document, chunk, token], holds the positions in the chunk where each token's rows
    begin and end, and `reached` [local document, chunk, block of tokens] where a block's rows begin.
    """
    wait_for_previous_kernel()
    CHUNK: tl.constexpr = 1 << config.chunk_bits
    program = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, CHUNK)
    rows, flat = tl.program_id(0) % n_chunks * CHUNK + ranks, first_document + program // n_chunks
    tokens = _tokens_of(rows, argmax_ptr, flat, n_rows)
    # The position in the chunk makes keys unique and the sort stable. Rows without a token come last.
    keys = sorted_keys((tokens << config.chunk_bits) | ranks, config.chunk_bits)
    tokens = keys >> config.chunk_bits
    tl.store(order_ptr + program * CHUNK + ranks, (keys & (CHUNK - 1)).to(tl.uint16))
    exists = tokens < _NO_TOKEN
    begins = (ranks == 0) | (tl.gather(tokens, tl.maximum(ranks - 1, 0), axis=0) != tokens)
    ends = (ranks == CHUNK - 1) | (tl.gather(tokens, tl.minimum(ranks + 1, CHUNK - 1), axis=0) != tokens)
    reached_ptr += program * tl.cdiv(document_length, config.block_tokens)
    counts_ptr += program * document_length
    for block in tl.range(0, document_length, config.block_tokens):
        tl.store(reached_ptr + block // config.block_tokens, tl.sum((tokens < block).to(tl.int32), axis=0))
        all_tokens = block + tl.arange(0, config.block_tokens)
        tl.store(counts_ptr + all_tokens, tl.zeros([config.block_tokens], tl.int32), mask=all_tokens < document_length)
    tl.debug_barrier()
    runs_ptr += program * document_length * 2
    tl.store(runs_ptr + tokens * 2, ranks.to(tl.uint16), mask=exists & begins)
    tl.store(runs_ptr + tokens * 2 + 1, (ranks + 1).to(tl.uint16), mask=exists & ends)


@kernel(follows=True, config="row_bits block_tokens")
def _list_kernel(argmax_ptr, list_ptr, starts_ptr, first_document, n_rows, document_length, config: tl.constexpr):
    """`list_rows`, one program per document."""
    wait_for_previous_kernel()
    list_rows(tl.program_id(0), argmax_ptr, list_ptr, starts_ptr, first_document, n_rows, document_length, config)


@triton.jit
def _load_runs(runs_ptr, n_chunks, document_length, chunks, tokens):
    """Where the tokens' rows begin in the chunks, their number, their offsets, and the mask [chunks, tokens]."""
    offsets = chunks[:, None] * document_length + tokens[None, :]
    mask = (chunks < n_chunks)[:, None] & (tokens < document_length)[None, :]
    run = tl.load(runs_ptr + offsets, mask=mask, other=0)
    begins = run & 0xFFFF
    return begins, (run >> 16) - begins, offsets, mask


@kernel(follows=True, config="block_tokens block_chunks")
def _scan_kernel(
    counts_ptr, reached_ptr, starts_ptr, owners_ptr, cu_seqlens_ptr, first_document, n_chunks, document_length,
    config: tl.constexpr,
):  # fmt: skip
    """Turn the runs of a document's chunks into the shift from rank in the chunk to list position, by chunk and token.

    Also writes where the list of every token begins, and the owners of a packed document's tokens. Grid: blocks of
    tokens x documents.
    """
    wait_for_previous_kernel()
    n_blocks = tl.cdiv(document_length, config.block_tokens)
    local = (tl.program_id(0) // n_blocks).to(tl.int64)
    block = tl.program_id(0) % n_blocks
    flat = first_document + local
    counts_ptr += local * n_chunks * document_length
    length = document_length
    if cu_seqlens_ptr is not None:
        token = tl.load(cu_seqlens_ptr + flat).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + flat + 1).to(tl.int64) - token).to(tl.int32)
        owners_ptr += token
        starts_ptr += token + flat
    else:
        starts_ptr += local * (document_length + 1)
    tokens = block * config.block_tokens + tl.arange(0, config.block_tokens)
    reached_ptr += local * n_chunks * n_blocks + block
    reached = n_chunks * 0
    totals = tl.zeros([config.block_tokens], tl.int32)
    for chunk in tl.range(0, n_chunks, config.block_chunks):
        chunks = chunk + tl.arange(0, config.block_chunks)
        _, rows, _, _ = _load_runs(counts_ptr, n_chunks, document_length, chunks, tokens)
        totals += tl.sum(rows, axis=0)
        reached += tl.sum(tl.load(reached_ptr + chunks * n_blocks, mask=chunks < n_chunks, other=0), axis=0)
    positions = reached + tl.cumsum(totals, axis=0) - totals
    # Positions overwrite runs that another thread may still have to read.
    tl.debug_barrier()
    tl.store(starts_ptr + tokens, positions.to(starts_ptr.dtype.element_ty), mask=tokens < length)
    if cu_seqlens_ptr is not None:
        tl.store(owners_ptr + tokens, (flat + tokens * 0).to(tl.int32), mask=tokens < length)
    for chunk in tl.range(0, n_chunks, config.block_chunks):
        begins, rows, offsets, mask = _load_runs(
            counts_ptr, n_chunks, document_length, chunk + tl.arange(0, config.block_chunks), tokens
        )
        tl.store(counts_ptr + offsets, positions[None, :] + tl.cumsum(rows, axis=0) - rows - begins, mask=mask)
        positions += tl.sum(rows, axis=0)
    if block == n_blocks - 1:
        tl.store(starts_ptr + length, (reached + tl.sum(totals, axis=0)).to(starts_ptr.dtype.element_ty))


@kernel(follows=True, config="chunk_bits")
def _place_kernel(
    argmax_ptr, order_ptr, offsets_ptr, list_ptr, first_document, n_rows, n_chunks, document_length,
    config: tl.constexpr,
):  # fmt: skip
    """list[local document] = its rows by token, from the sorted chunks and the offsets of `_scan_kernel`."""
    wait_for_previous_kernel()
    CHUNK: tl.constexpr = 1 << config.chunk_bits
    program = tl.program_id(0).to(tl.int64)
    local = program // n_chunks
    ranks = tl.arange(0, CHUNK)
    rows = tl.program_id(0) % n_chunks * CHUNK + tl.load(order_ptr + program * CHUNK + ranks).to(tl.int32)
    tokens = _tokens_of(rows, argmax_ptr, first_document + local, n_rows)
    exists = tokens < _NO_TOKEN
    offsets = tl.load(offsets_ptr + program * document_length + tokens, mask=exists, other=0)
    tl.store(list_ptr + local * n_rows + ranks + offsets, rows.to(list_ptr.dtype.element_ty), mask=exists)


def sum_by_lists(
    problem: Problem, inputs: BackwardTensors, destination: Destination, for_queries: BackwardTensors
) -> bool:
    """Compute the gradient of the documents and, for small problems, that of the queries in the same launches.

    Returns whether it computed the latter, from the inputs `for_queries`; otherwise it is overwritten as scratch.
    """
    plan = plan_backward.lists_plan(problem, destination.queries is not None, destination.adds)
    in_one_block = plan.block == problem.all_documents <= tables_backward.GATHERED_BESIDE
    if destination.queries is not None and plan.alone_bits and in_one_block:
        gather = plan_backward.gather_plan(problem)
        # Listing takes more registers than are left to programs of the first gather.
        if gather.n_splits == 1 and (gather.documents > 1 or gather.registers is None):
            _sum_and_gather(problem, plan, gather, inputs, destination, for_queries)
            return True
    device, starts, owners = problem.device, None, None
    if problem.packed:
        starts = torch.empty(problem.n_tokens + problem.n_documents, dtype=torch.int32, device=device)
        owners = torch.empty(problem.n_tokens, dtype=torch.int32, device=device)
    for first in range(0, problem.all_documents, plan.block):
        _sum_block(problem, plan, inputs, first, starts, owners, destination)
    return False


def _sum_and_gather(
    problem: Problem,
    plan: ListsPlan,
    gather: GatherPlan,
    inputs: BackwardTensors,
    destination: Destination,
    for_queries: BackwardTensors,
) -> None:
    """Both gradients, if the launch of the gather also lists the documents, which saves a launch."""
    assert destination.queries is not None
    number, length, device = problem.all_documents, problem.document_length, problem.device
    ends, rows, parts = number * (length + 1), number * problem.rows, 8 * number * plan.n_segments * problem.size
    nbytes = ends * plan.starts_dtype.itemsize + rows * plan.list_dtype.itemsize + parts + tables_backward.SLACK
    # One allocation for scratch, as the gradient of the queries is in use here and cannot hold it.
    scratch = Scratch(torch.empty(nbytes, dtype=torch.uint8, device=device))
    starts = scratch.empty(ends, plan.starts_dtype, device)
    listed = scratch.empty(rows, plan.list_dtype, device)
    gather_queries(problem, for_queries, destination.queries, gather, (listed, starts), plan.alone_bits)
    lists = Lists(0, number, starts, None, inputs.argmax, None)
    sum_lists(problem, plan, inputs, lists, listed, destination, scratch)


def _sum_block(
    problem: Problem,
    plan: ListsPlan,
    inputs: BackwardTensors,
    first: int,
    starts: Tensor | None,
    owners: Tensor | None,
    destination: Destination,
) -> None:
    """Write the gradients of a block of documents. Its memory is freed before the next block's is allocated."""
    number, scratch = min(plan.block, problem.all_documents - first), Scratch(destination.queries)
    ends = number * (problem.document_length + 1)
    block_starts = scratch.empty(ends, plan.starts_dtype, problem.device) if starts is None else starts
    lists = Lists(first, number, block_starts, owners, inputs.argmax, inputs.documents_cu_seqlens)
    # The sums of segments reuse the same memory later.
    sorting = scratch.fork()
    if plan.sorts_in_gradient:
        assert destination.documents is not None
        document_bytes = problem.document_length * problem.size * destination.documents.element_size()
        sorting = Scratch(destination.documents, first * document_bytes, number * document_bytes)
    listed = _listed(problem, plan, lists, sorting)
    sum_lists(problem, plan, inputs, lists, listed, destination, scratch)


def rows_by_token(problem: Problem, argmax: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows of every document sorted by argmax token [documents, rows], and where those of each token begin.

    `argmax` is that of `write_gradients`, and `cu_seqlens` the boundaries of packed documents. For token t of a
    document, the start is at the document's first token among those of all documents, plus its index, plus t; the entry
    after its last token holds the end.
    """
    plan, documents, device = plan_backward.lists_plan(problem, lent=False), problem.all_documents, problem.device
    starts = torch.empty(problem.n_tokens + documents, dtype=plan.starts_dtype, device=device)
    owners = torch.empty(problem.n_tokens, dtype=torch.int32, device=device) if problem.packed else None
    lists = Lists(0, documents, starts, owners, argmax, cu_seqlens)
    return _listed(problem, plan, lists, Scratch(None)), starts


def _listed(problem: Problem, plan: ListsPlan, lists: Lists, scratch: Scratch) -> Tensor:
    """The rows of every document of `lists`, listed by one program per document, or by one per chunk of its rows.

    Fills `lists.starts`.
    """
    first, number, starts, owners, argmax, bounds = lists
    device, rows, length, n_chunks = problem.device, problem.rows, problem.document_length, plan.n_chunks
    listed = torch.empty(number * rows, dtype=plan.list_dtype, device=device)
    if plan.alone_bits:
        _list_kernel(
            (number, 1, 1),
            (argmax, listed, starts),
            (first, rows, length),
            (),
            (plan.alone_bits, 1 << length.bit_length()),
            (plan.alone_warps, 1, None),
        )
        return listed
    chunk_bits, block_tokens = tables_backward.LIST_CHUNK_BITS, tables_backward.LIST_BLOCK_TOKENS
    programs, blocks = number * plan.n_chunks, -(-length // block_tokens)
    order = scratch.empty(programs << chunk_bits, torch.uint16, device)
    counts = scratch.empty(programs * length, torch.int32, device)
    reached = scratch.empty(programs * blocks, torch.int32, device)
    _sort_kernel(
        (programs, 1, 1),
        (argmax, order, counts, counts.view(torch.uint16), reached),
        (first, rows, n_chunks, length),
        (),
        (chunk_bits, block_tokens),
        (1, 1, None),
    )
    _scan_kernel(
        (blocks * number, 1, 1),
        (counts, reached, starts, owners, bounds),
        (first, n_chunks, length),
        (),
        (block_tokens, tables_backward.LIST_BLOCK_CHUNKS),
        # Without a limit, ptxas uses a few registers too many for four programs per SM.
        (4, 1, tables.registers_of(4, 4)),
    )
    _place_kernel(
        (programs, 1, 1),
        (argmax, order, counts, listed),
        (first, rows, n_chunks, length),
        (),
        (chunk_bits,),
        (4, 1, None),
    )
    return listed
