"""How gradients are computed, and how many queries a loss takes at a time, made from a `Problem`."""

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
    """How the gradient of the documents is computed: `kernel` is "lists" or "compare_argmax"."""

    kernel: str
    reason: str


def backward_plan(problem: Problem) -> BackwardPlan:
    """Choose how the gradient of the documents is computed."""
    if problem.rows <= measured.FEW_ROWS:
        return BackwardPlan("compare_argmax", f"at most {measured.FEW_ROWS} query tokens meet a document")
    return BackwardPlan("lists", f"more than {measured.FEW_ROWS} query tokens meet a document")


class RowsPlan(NamedTuple):
    """A kernel's elements of an embedding with padding, rows and warps of a program, and rows compared with at once."""

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
    """Of the gradient of the queries: rows and documents in flight, programs, splits, registers of a thread at most."""

    block_embedding: int
    rows: int
    documents: int
    num_warps: int
    programs: int
    n_splits: int
    registers: int | None


def gather_plan(problem: Problem) -> GatherPlan:
    sms = tables.architecture(problem.device)[1]
    wanted = measured.GATHER_PROGRAMS * sms
    groups, rows, walked = problem.groups, problem.rows, problem.n_documents
    block = max(16, tables.power_of_two(problem.size))
    if problem.has_candidates:
        # Documents that a query meets on average.
        walked = walked // groups or 1
    for slots, block_documents in measured.GATHERS if walked > 1 else measured.GATHERS_OF_ONE:
        num_warps = slots // 8
        if block > 128:
            slots = max(2, slots * 128 // block)
            block_documents = min(block_documents, slots)
        block_rows = slots // block_documents
        programs, n_splits = -(-rows // block_rows) * groups, 1
        shares = min(measured.GATHER_SHARES, measured.GATHER_ROOM * sms // programs, walked // measured.GATHER_SHARE)
        if block_documents == 1 and shares > 1 and shares * programs >= wanted:
            n_splits = shares
            break
        if programs >= wanted and block_rows < 2 * rows:
            break
    if programs < wanted and n_splits == 1:
        n_splits = max(1, min(measured.SPLIT_PROGRAMS * sms // programs, walked // measured.SPLIT_DOCUMENTS))
    packs = (num_warps * 8, block_documents) == measured.GATHERS[0] and problem.dtype.itemsize == 2
    registers = tables.registers_of(measured.GATHER_ROOM, num_warps) if packs else None
    return GatherPlan(block, block_rows, block_documents, num_warps, programs, n_splits, registers)


def gather_wave(problem: Problem) -> int:
    """Query rows of the programs that gather on all SMs at a time, where there are rows for so many."""
    block = max(128, tables.power_of_two(problem.size))
    sms = tables.architecture(problem.device)[1]
    return max(2, measured.GATHERS[0][0] * 128 // block) * measured.GATHER_PROGRAMS * sms


# A token and the position of a row in a chunk are one number of 31 bits.
MOST_LISTED_TOKENS = (1 << 31 - measured.LIST_CHUNK_BITS) - 1


class ListsPlan(NamedTuple):
    """How the query rows of each document are listed by token, and summed, a block of documents at a time."""

    # Documents of a block.
    block: int
    # Rows that one program lists, as a power of two; 0 where programs share a document's rows.
    alone_bits: int
    alone_warps: int
    # What the kernels call chunks (of rows that a program sorts) and segments (of a list, for programs that sum what is
    # left of long ones) of each document.
    n_chunks: int
    n_segments: int
    # Rows of a segment.
    segment: int
    list_dtype: torch.dtype
    starts_dtype: torch.dtype
    # Whether what sorts fits into the memory of the documents' own gradient.
    sorts_in_gradient: bool
    # Of the kernel that sums: elements of an embedding with padding, and rows and warps of a program.
    block_embedding: int
    rows: int
    num_warps: int


def lists_plan(problem: Problem, lent: bool, adds: bool = False) -> ListsPlan:
    """`lent`: the memory of the gradient of the queries may be used, which is computed later.

    `adds`: what is in that of the documents is kept, and sums are added to it.
    """
    rows, length, size, documents = problem.rows, problem.document_length, problem.size, problem.all_documents
    item, packed = problem.dtype.itemsize, problem.packed
    if length > MOST_LISTED_TOKENS:
        raise ValueError(
            f"documents (of chamfer, x and y) that need a gradient must have at most {MOST_LISTED_TOKENS} tokens, "
            f"got {length}"
        )
    n_chunks = -(-rows >> measured.LIST_CHUNK_BITS)
    # Lists that are summed whole have no segments, and need no kernel that is compiled for other ones.
    are_long = rows > max(measured.LIST_LONG * length, 2 * measured.LIST_SEGMENT_OF_FEW)
    few = documents * rows <= measured.LIST_FEW_ROWS
    segment = measured.LIST_SEGMENT_OF_FEW if few and are_long else measured.LIST_SEGMENT
    n_segments = 0 if rows <= 2 * segment else -(-rows // segment) - 1
    list_dtype = torch.uint16 if rows <= 1 << 16 else torch.int32
    starts_dtype = torch.uint16 if rows < 1 << 16 and not packed else torch.int32
    alone_bits, alone_warps = 0, 1
    sms = tables.architecture(problem.device)[1]
    alone_rows = measured.ALONE_ROWS_OF_FEW if documents <= sms else measured.ALONE_ROWS
    if rows <= alone_rows and length <= measured.ALONE_TOKENS and not packed:
        alone_bits = max(8, (rows - 1).bit_length())
        alone_warps = max(1, (1 << alone_bits) // measured.ALONE_KEYS)

    # Bytes of a document: what sorts, until the rows are placed; then sums of segments, in the same memory; and all the
    # time the lists, and what tells where they begin and end.
    sorting = n_chunks * ((2 << measured.LIST_CHUNK_BITS) + 4 * length + 4 * -(-length // measured.LIST_BLOCK_TOKENS))
    sorting = 0 if alone_bits else sorting
    summing = 4 * n_segments * 2 * size
    listed = rows * list_dtype.itemsize
    ends = 0 if packed else (length + 1) * starts_dtype.itemsize
    # Of packed documents it is not known here where their gradients begin.
    sorts_in_gradient = not packed and not adds and sorting + measured.SLACK <= length * size * item
    shared = summing if sorts_in_gradient else max(sorting, summing)
    memory = max(measured.LISTS_MEMORY, documents * rows * problem.argmax_dtype.itemsize // 2)
    block = min(documents, memory // (listed + shared + ends)) or 1
    if lent:
        # All but the lists in the memory of the gradient of the queries, for up to twice as many blocks, which take a
        # few launches more.
        lent_bytes = problem.n_queries * problem.query_length * size * item - measured.SLACK
        lent_block = min(documents, memory // listed, lent_bytes // (shared + ends))
        if 2 * lent_block >= block:
            block = lent_block
    if block < documents:
        block = -(-documents // -(-documents // block))

    block_embedding = max(16, tables.power_of_two(size))
    # Warps that had rows of their own would add up in shared memory, of tokens that no row chose too.
    num_warps = max(1, block_embedding // measured.SUM_ELEMENTS)
    block_rows = measured.SUM_ROWS if block_embedding <= 256 else measured.SUM_ROWS // 2
    listing = block, alone_bits, alone_warps, n_chunks, n_segments, segment, list_dtype, starts_dtype
    return ListsPlan(*listing, sorts_in_gradient, block_embedding, block_rows, num_warps)


class ResidualGradientPlan(NamedTuple):
    """How the gradient of the queries is computed."""

    rows: int
    blocks: Blocks
    # Programs that share an embedding, and programs that share the documents.
    parts: int
    n_splits: int


def residual_gradient_plan(problem: Problem) -> ResidualGradientPlan:
    """Choose how the gradient of the queries is computed."""
    blocks = residual_blocks(problem.kind)
    parts = -(-problem.size // blocks.first)
    programs = -(-problem.rows // tables.RESIDUAL_GRADIENT_ROWS) * problem.groups * parts
    slots = tables.RESIDUAL_GRADIENT_PROGRAMS * tables.architecture(problem.device)[1]
    n_splits = max(1, min(slots // programs, problem.n_documents // tables.RESIDUAL_SMALLEST_SHARE))
    return ResidualGradientPlan(tables.RESIDUAL_GRADIENT_ROWS, blocks, parts, n_splits)


class Parts(NamedTuple):
    """How the gradients of soft MaxSim hold embeddings: in one block, or `split`."""

    block: int
    split: bool
    # Elements of a gradient that one program sums, and programs that share an embedding.
    owned: int
    number: int


class SoftGradientPlan(NamedTuple):
    """How the gradients of soft scores are computed, by programs that own tokens of documents, and others query rows.

    `n_splits` of the latter share the documents.
    """

    documents: Tile
    queries: Tile
    parts: Parts
    # From one query row to the next one, and those of the documents, divided by the units.
    strides: tuple[int, ...]
    units: tuple[int, int]
    # Programs that own the tokens of a document.
    n_blocks: int
    n_splits: int
    # Whether probabilities are rounded to bfloat16 before they are multiplied.
    rounded: bool


def soft_gradient_plan(problem: Problem) -> SoftGradientPlan:
    """Choose how gradients are computed."""
    from triton import knobs

    sms = tables.architecture(problem.device)[1]
    tile, length = soft_tile(problem.kind, tables.SOFT_GRADIENT, tables.SOFT_GRADIENT_WIDE), problem.document_length
    queries = narrowed(tile, problem.rows, length)
    documents = narrowed(tile, length, problem.rows)
    walked = problem.max_candidates if problem.has_candidates else problem.n_documents
    blocks = soft_blocks(problem.kind)
    owned = tables.SOFT_SPLIT_OWNED[problem.dtype.itemsize] if blocks.split else blocks.first
    parts = Parts(blocks.first, blocks.split, owned, -(-problem.size // owned))
    programs = -(-problem.rows // queries.rows) * problem.groups * parts.number
    smallest = -(-tables.SOFT_SMALLEST_SHARE // max(1, -(-length // queries.columns)))
    n_splits = max(1, min(tables.SOFT_PER_SM * sms // programs, walked // smallest))
    strides, units = divided_strides(problem.query_strides, problem.document_strides)
    rounded = problem.dtype != torch.float32 and not knobs.runtime.interpret
    n_blocks = -(-length // documents.rows)
    return SoftGradientPlan(documents, queries, parts, strides[1:], units, n_blocks, n_splits, rounded)


def gradient_warps(tile: Tile) -> tuple[int, int, int | None]:
    """Warps, stages and registers of a thread of a program that computes gradients."""
    registers = None
    if tile == tables.SOFT_GRADIENT:
        registers = tables.registers_of(tables.SOFT_GRADIENT_PER_SM, tile.num_warps)
    return tile.num_warps, tile.num_stages, registers


class Chunks(NamedTuple):
    """Queries of a chunk, of which the last may have fewer, and how many chunks there are."""

    queries: int
    number: int


def chunks_of(problem: Problem, max_scratch_bytes: int | None) -> Chunks:
    """Split the queries of a problem so that a chunk takes at most `max_scratch_bytes`, but has at least one query.

    None: `tables.CHUNK_SCRATCH`, or a fifth more than the documents take. So chunks do not shrink where the batch, and
    with it what a query takes, grows; and where the gradient of half documents is summed in float32, its copy in their
    type, at the end, takes the place of most of the scratch.
    """
    n_queries, length = problem.n_queries, problem.query_length
    if max_scratch_bytes is None:
        max_scratch_bytes = max(tables.CHUNK_SCRATCH, problem.n_tokens * problem.size * problem.dtype.itemsize * 6 // 5)
    # Of a score: the score and its gradient, the sums that it is of, argmax, and the lists of half a block of them.
    padded, group = padded_query_length(length, True)
    of_score = 8 + (4 * padded // group if padded > group else 0)
    if problem.with_argmax:
        of_score += length * problem.argmax_dtype.itemsize * 3 // 2
    documents = problem.all_documents if problem.groups == 1 else problem.n_documents
    most = max(1, max_scratch_bytes // max(1, of_score * documents))
    if most >= n_queries:
        return Chunks(n_queries, 1)
    # Programs that gather the gradient of the queries fill whole waves.
    wave = gather_wave(problem) // length
    most = most // wave * wave if most >= wave > 0 else most
    step = tables.CHUNK_MULTIPLE if most >= tables.CHUNK_MULTIPLE else 1
    most -= most % step
    number = -(-n_queries // most)
    queries = -(-n_queries // (number * step)) * step
    return Chunks(queries, -(-n_queries // queries))


def halved(chunks: Chunks, n_queries: int) -> Chunks:
    """Chunks of half as many queries, for a device whose memory is less than what the others would take."""
    queries = -(-chunks.queries // 2)
    if queries > tables.CHUNK_MULTIPLE:
        queries = -(-queries // tables.CHUNK_MULTIPLE) * tables.CHUNK_MULTIPLE
    _log_halving()
    return Chunks(queries, -(-n_queries // queries))


@functools.cache
def _log_halving() -> None:
    """Say once per process that memory was short."""
    logger.warning(
        "a loss over MaxSim ran out of memory, and goes on in chunks of half as many queries: a smaller "
        "max_scratch_bytes spares it the attempt"
    )
