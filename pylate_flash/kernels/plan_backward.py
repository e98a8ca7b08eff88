"""Plan the backward kernels, and the number of queries that a loss takes at a time, from a `Problem`."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from . import tables
from . import tables_backward as measured
from .config import divided_strides, narrowed, padded_query_length, residual_blocks, soft_blocks, soft_tile
from .tiles import Blocks, Tile

if TYPE_CHECKING:
    from ..problem import Problem

logger = logging.getLogger(__name__)


class BackwardPlan(NamedTuple):
    """Kernel that computes the gradient of the documents: "lists" or "compare_argmax"."""

    kernel: str
    reason: str


def backward_plan(problem: Problem) -> BackwardPlan:
    """Choose the kernel that computes the gradient of the documents."""
    if problem.rows <= measured.FEW_ROWS:
        return BackwardPlan("compare_argmax", f"at most {measured.FEW_ROWS} query tokens meet a document")
    return BackwardPlan("lists", f"more than {measured.FEW_ROWS} query tokens meet a document")


class RowsPlan(NamedTuple):
    """Padded embedding size, rows and warps of a program, and argmax entries that it compares at once."""

    block_embedding: int
    rows: int
    num_warps: int
    compared: int = 0


def compare_plan(problem: Problem) -> RowsPlan:
    block = max(16, tables.power_of_two(problem.size))
    num_warps = max(1, min(8, block // 128))
    return RowsPlan(block, min(measured.COMPARE_ROWS, num_warps * 2048 // block), num_warps, measured.COMPARED)


def finish_plan(problem: Problem) -> RowsPlan:
    block = max(16, tables.power_of_two(problem.size))
    num_warps = 4 if block <= 512 else 8
    return RowsPlan(block, max(1, num_warps * 32 * 16 // block), num_warps)


class GatherPlan(NamedTuple):
    """Gradient of the queries: rows and documents in flight, programs, splits, maximum registers per thread."""

    block_embedding: int
    rows: int
    documents: int
    num_warps: int
    programs: int
    n_splits: int
    registers: int | None


def gather_plan(problem: Problem) -> GatherPlan:
    sms = tables.architecture(problem.device)[1]
    min_programs = measured.GATHER_PROGRAMS * sms
    groups, rows, per_query = problem.groups, problem.rows, problem.n_documents
    block = max(16, tables.power_of_two(problem.size))
    if problem.has_candidates:
        # Mean number of documents per query.
        per_query = per_query // groups or 1
    for slots, block_documents in measured.GATHERS if per_query > 1 else measured.GATHERS_OF_ONE:
        num_warps = slots // 8
        if block > 128:
            slots = max(2, slots * 128 // block)
            block_documents = min(block_documents, slots)
        block_rows = slots // block_documents
        programs, n_splits = -(-rows // block_rows) * groups, 1
        shares = min(measured.GATHER_SHARES, measured.GATHER_ROOM * sms // programs, per_query // measured.GATHER_SHARE)
        if block_documents == 1 and shares > 1 and shares * programs >= min_programs:
            n_splits = shares
            break
        if programs >= min_programs and block_rows < 2 * rows:
            break
    if programs < min_programs and n_splits == 1:
        n_splits = max(1, min(measured.SPLIT_PROGRAMS * sms // programs, per_query // measured.SPLIT_DOCUMENTS))
    packs = (num_warps * 8, block_documents) == measured.GATHERS[0] and problem.dtype.itemsize == 2
    registers = None
    if packs:
        registers = tables.registers_of(measured.GATHER_ROOM, num_warps)
    elif block_documents == 4 and problem.size % 16 == 0:
        # Loads of less than 16 bytes would spill.
        registers = measured.GATHER_REGISTERS[problem.dtype.itemsize]
    return GatherPlan(block, block_rows, block_documents, num_warps, programs, n_splits, registers)


def gather_wave(problem: Problem) -> int:
    """Query rows of one full wave of gathering programs, if there are that many."""
    block = max(128, tables.power_of_two(problem.size))
    sms = tables.architecture(problem.device)[1]
    return max(2, measured.GATHERS[0][0] * 128 // block) * measured.GATHER_PROGRAMS * sms


# A token index and the position of a row in its chunk are packed into 31 bits.
MOST_LISTED_TOKENS = (1 << 31 - measured.LIST_CHUNK_BITS) - 1


class ListsPlan(NamedTuple):
    """List the query rows of each document by token and sum them, one block of documents at a time."""

    # Documents per block.
    block: int
    # log2 of the rows that one program lists alone; 0 where several programs share a document's rows.
    alone_bits: int
    alone_warps: int
    # Per document: chunks (rows that one program sorts) and segments (pieces of long lists, each summed by a program of
    # its own).
    n_chunks: int
    n_segments: int
    # Rows per segment.
    segment: int
    list_dtype: torch.dtype
    starts_dtype: torch.dtype
    # Whether the sort's scratch fits into the memory of the documents' own gradient.
    sorts_in_gradient: bool
    # Summing kernel: padded embedding size, rows and warps of a program, and registers of a thread, if limited.
    block_embedding: int
    rows: int
    num_warps: int
    registers: int | None


def lists_plan(problem: Problem, lent: bool, adds: bool = False) -> ListsPlan:
    """Plan the lists. `lent`: scratch may lie in the memory of the queries' gradient, which is computed later.

    `adds`: sums are accumulated into the existing gradient of the documents.
    """
    rows, length, size, n_documents = problem.rows, problem.document_length, problem.size, problem.all_documents
    item, packed = problem.dtype.itemsize, problem.packed
    if length > MOST_LISTED_TOKENS:
        raise ValueError(
            f"documents (of chamfer, x and y) that need a gradient must have at most {MOST_LISTED_TOKENS} tokens, "
            f"got {length}"
        )
    n_chunks = -(-rows >> measured.LIST_CHUNK_BITS)
    # Lists without segments need no kernel compiled for segments.
    are_long = rows > max(measured.LIST_LONG * length, 2 * measured.LIST_SEGMENT_OF_FEW)
    few_rows = n_documents * rows <= measured.LIST_FEW_ROWS
    segment = measured.LIST_SEGMENT_OF_FEW if few_rows and are_long else measured.LIST_SEGMENT
    n_segments = 0 if rows <= 2 * segment else -(-rows // segment) - 1
    list_dtype = torch.uint16 if rows <= 1 << 16 else torch.int32
    starts_dtype = torch.uint16 if rows < 1 << 16 and not packed else torch.int32
    alone_bits, alone_warps = 0, 1
    sms = tables.architecture(problem.device)[1]
    alone_rows = measured.ALONE_ROWS_OF_FEW if n_documents <= sms else measured.ALONE_ROWS
    if rows <= alone_rows and length <= measured.ALONE_TOKENS and not packed:
        alone_bits = max(8, (rows - 1).bit_length())
        alone_warps = max(1, (1 << alone_bits) // measured.ALONE_KEYS)

    # Bytes per document: the sort's scratch, until rows are placed; then the sums of segments, in the same memory; and
    # throughout, the lists and their boundaries.
    sorting = n_chunks * ((2 << measured.LIST_CHUNK_BITS) + 4 * length + 4 * -(-length // measured.LIST_BLOCK_TOKENS))
    sorting = 0 if alone_bits else sorting
    summing = 4 * n_segments * 2 * size
    listed = rows * list_dtype.itemsize
    ends = 0 if packed else (length + 1) * starts_dtype.itemsize
    # Where the gradients of packed documents begin is not known on the host.
    sorts_in_gradient = not packed and not adds and sorting + measured.SLACK <= length * size * item
    shared = summing if sorts_in_gradient else max(sorting, summing)
    memory = max(measured.LISTS_MEMORY, n_documents * rows * problem.argmax_dtype.itemsize // 2)
    block = min(n_documents, memory // (listed + shared + ends)) or 1
    if lent:
        # Put all but the lists into the memory of the queries' gradient, even if that takes up to twice as many blocks,
        # and so a few more launches.
        lent_bytes = problem.n_queries * problem.query_length * size * item - measured.SLACK
        lent_block = min(n_documents, memory // listed, lent_bytes // (shared + ends))
        if 2 * lent_block >= block:
            block = lent_block
    if block < n_documents:
        block = -(-n_documents // -(-n_documents // block))

    block_embedding = max(16, tables.power_of_two(size))
    # Warps with rows of their own would have to reduce in shared memory, even for tokens that no row chose.
    num_warps = max(1, block_embedding // measured.SUM_ELEMENTS)
    block_rows = measured.SUM_ROWS if block_embedding <= 256 else measured.SUM_ROWS // 2
    listing = block, alone_bits, alone_warps, n_chunks, n_segments, segment, list_dtype, starts_dtype
    registers = None
    if size % 32 == 0 and 256 <= block_embedding <= 512:
        registers = measured.SUM_REGISTERS
    elif size == 128 and item == 2:
        registers = measured.SUM_REGISTERS_OF_128
    return ListsPlan(*listing, sorts_in_gradient, block_embedding, block_rows, num_warps, registers)


class ResidualGradientPlan(NamedTuple):
    """Rows, blocks and grid of the queries' gradient with residual codes."""

    rows: int
    blocks: Blocks
    # Programs that share an embedding, and programs that share the documents.
    parts: int
    n_splits: int


def residual_gradient_plan(problem: Problem) -> ResidualGradientPlan:
    """Plan the gradient of the queries with residual codes."""
    blocks = residual_blocks(problem.kind)
    parts = -(-problem.size // blocks.first)
    programs = -(-problem.rows // tables.RESIDUAL_GRADIENT_ROWS) * problem.groups * parts
    slots = tables.RESIDUAL_GRADIENT_PROGRAMS * tables.architecture(problem.device)[1]
    n_splits = max(1, min(slots // programs, problem.n_documents // tables.RESIDUAL_SMALLEST_SHARE))
    return ResidualGradientPlan(tables.RESIDUAL_GRADIENT_ROWS, blocks, parts, n_splits)


class Parts(NamedTuple):
    """Blocks of embeddings in the gradients of soft MaxSim: a single one, or several if `split`."""

    block: int
    split: bool
    # Elements of a gradient that one program sums, and programs that share an embedding.
    owned: int
    number: int


class SoftGradientPlan(NamedTuple):
    """Gradients of soft scores: some programs own document tokens, others own query rows.

    `n_splits` programs of the latter share the documents.
    """

    documents: Tile
    queries: Tile
    parts: Parts
    # Strides of query rows and of the documents, divided by the units.
    strides: tuple[int, ...]
    units: tuple[int, int]
    # Programs that share the tokens of a document.
    n_blocks: int
    n_splits: int
    # Whether probabilities are rounded to bfloat16 before they are multiplied.
    rounded: bool


def soft_gradient_plan(problem: Problem) -> SoftGradientPlan:
    """Plan the gradients of soft scores."""
    from triton import knobs

    sms = tables.architecture(problem.device)[1]
    tile, length = soft_tile(problem.kind, tables.SOFT_GRADIENT, tables.SOFT_GRADIENT_WIDE), problem.document_length
    queries = narrowed(tile, problem.rows, length)
    documents = narrowed(tile, length, problem.rows)
    n_documents = problem.max_candidates if problem.has_candidates else problem.n_documents
    blocks = soft_blocks(problem.kind)
    owned = tables.SOFT_SPLIT_OWNED[problem.dtype.itemsize] if blocks.split else blocks.first
    parts = Parts(blocks.first, blocks.split, owned, -(-problem.size // owned))
    programs = -(-problem.rows // queries.rows) * problem.groups * parts.number
    min_documents = -(-tables.SOFT_SMALLEST_SHARE // max(1, -(-length // queries.columns)))
    n_splits = max(1, min(tables.SOFT_PER_SM * sms // programs, n_documents // min_documents))
    strides, units = divided_strides(problem.query_strides, problem.document_strides)
    rounded = problem.dtype != torch.float32 and not knobs.runtime.interpret
    n_blocks = -(-length // documents.rows)
    return SoftGradientPlan(documents, queries, parts, strides[1:], units, n_blocks, n_splits, rounded)


def gradient_warps(tile: Tile) -> tuple[int, int, int | None]:
    """Triton's num_warps, num_stages and maxnreg of a program that computes gradients."""
    registers = None
    if tile == tables.SOFT_GRADIENT:
        registers = tables.registers_of(tables.SOFT_GRADIENT_PER_SM, tile.num_warps)
    return tile.num_warps, tile.num_stages, registers


class Chunks(NamedTuple):
    """Queries per chunk (the last chunk may have fewer), and the number of chunks."""

    queries: int
    number: int


def chunks_of(problem: Problem, max_scratch_bytes: int | None) -> Chunks:
    """Split the queries of a problem so that a chunk takes at most `max_scratch_bytes`, but has at least one query.

    None: `tables.CHUNK_SCRATCH`, or 1.2 times the bytes of the documents if that is more. So chunks do not shrink as
    the batch, and with it the scratch per query, grows. If the gradient of half-precision documents is summed in
    float32, its final copy in their type takes the place of most of the scratch.
    """
    n_queries, length = problem.n_queries, problem.query_length
    if max_scratch_bytes is None:
        max_scratch_bytes = max(tables.CHUNK_SCRATCH, problem.n_tokens * problem.size * problem.dtype.itemsize * 6 // 5)
    # Bytes per score: the score and its gradient, its partial sums, the argmax, and the lists (half of the argmax).
    padded, group = padded_query_length(length, True)
    score_bytes = 8 + (4 * padded // group if padded > group else 0)
    if problem.with_argmax:
        score_bytes += length * problem.argmax_dtype.itemsize * 3 // 2
    n_documents = problem.all_documents if problem.groups == 1 else problem.n_documents
    max_queries = max(1, max_scratch_bytes // max(1, score_bytes * n_documents))
    if max_queries >= n_queries:
        return Chunks(n_queries, 1)
    # Round down so that the programs that gather the queries' gradient fill whole waves.
    wave = gather_wave(problem) // length
    max_queries = max_queries // wave * wave if max_queries >= wave > 0 else max_queries
    step = tables.CHUNK_MULTIPLE if max_queries >= tables.CHUNK_MULTIPLE else 1
    max_queries -= max_queries % step
    number = -(-n_queries // max_queries)
    queries = -(-n_queries // (number * step)) * step
    return Chunks(queries, -(-n_queries // queries))


def halved(chunks: Chunks, n_queries: int) -> Chunks:
    """Chunks of half as many queries, after a device ran out of memory."""
    queries = -(-chunks.queries // 2)
    if queries > tables.CHUNK_MULTIPLE:
        queries = -(-queries // tables.CHUNK_MULTIPLE) * tables.CHUNK_MULTIPLE
    _log_halving()
    return Chunks(queries, -(-n_queries // queries))


@functools.cache
def _log_halving() -> None:
    """Warn once per process that memory ran out."""
    logger.warning(
        "a loss over MaxSim ran out of memory, and goes on in chunks of half as many queries: a smaller "
        "max_scratch_bytes spares it the attempt"
    )
