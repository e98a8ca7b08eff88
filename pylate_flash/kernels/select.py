"""Every choice of an implementation, a kernel, a tile and a grid, made from a `Problem`; `explain` says why.

Nothing is tuned at run time: tile sizes come from tables (`tiles`), so that the first call compiles once and no later
call stalls.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch

from ..problem import Problem, rounded_total
from .forms import REGISTERS, Form, hopper_form, single_form, single_runs, stacked_form, tile_of_hopper, tile_of_stacked
from .grids import Cuts, ForwardPlan, Shares, cuts_of, run_length, tall_plan
from .tiles import (
    HOPPER_NARROW_ROWS,
    HOPPER_WIDE_MIN_LENGTH,
    FusedTile,
    HopperTile,
    architecture,
    copied_by_16_bytes,
    divided_strides,
    fused_tile,
    hopper_tail,
    kernels_run_on,
    padded_query_length,
    power_of_two,
    single_columns,
)

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "triton", "blocked")
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.float8_e4m3fn)
# What the tests reach; the kernels sum longer embeddings block by block.
KERNEL_MAX_EMBEDDING_SIZE = 4096


def _kernels_take(device: torch.device, dtype: torch.dtype, embedding_size: int) -> str | None:
    """None if the Triton kernels take such an input, else the reason why they do not."""
    if (reason := kernels_run_on(device, dtype)) is not None:
        return reason
    if dtype not in KERNEL_DTYPES:
        return f"the Triton kernels take float16, bfloat16 and float32, and the tensors are {dtype}"
    if embedding_size > KERNEL_MAX_EMBEDDING_SIZE:
        return f"the Triton kernels take an embedding size of at most {KERNEL_MAX_EMBEDDING_SIZE}, got {embedding_size}"
    return None


@functools.cache
def _log_fallback(reason: str) -> None:
    """Say once per reason and process why a CUDA input is not served by a kernel."""
    logger.warning("maxsim: blocked torch instead of the Triton kernels: %s", reason)


@functools.cache
def choose(implementation: str, device: torch.device, dtype: torch.dtype, embedding_size: int) -> str:
    """Resolve `implementation` to "triton" or "blocked".

    Raises
    ------
    ValueError
        If "triton" was asked for by name, and the kernels cannot take the input.
    """
    if implementation == "blocked":
        return "blocked"
    reason = _kernels_take(device, dtype, embedding_size)
    if implementation != "auto":
        if reason is not None:
            raise ValueError(f'implementation="triton" cannot serve this input: {reason}')
        return "triton"
    if device.type == "cuda" and reason is not None:
        _log_fallback(reason)
    # Triton's interpreter exists to test the kernels, so it is never picked by "auto".
    return "triton" if reason is None and device.type == "cuda" else "blocked"


def why(implementation: str, device: torch.device, dtype: torch.dtype, embedding_size: int) -> str:
    """The reason for what `choose` resolves such a call to."""
    if implementation != "auto":
        return "asked for by name"
    reason = _kernels_take(device, dtype, embedding_size)
    return reason or f"{device.type} tensors of {dtype} with an embedding size of {embedding_size}"


# Up to this many query tokens, one query is scored by the single kernel.
_SINGLE_MAX_QUERY_LENGTH = 64
# A query is summed row by row where documents have so many tokens, so that what is stored costs little, and the sums
# take no more than so much memory.
_UNPADDED_MIN_LENGTH = 64
_UNPADDED_MEMORY = 1 << 28
HOPPER_SHARES = Shares(1, 64, 16384)
_STACKED_SHARES = Shares(2, 16, 4096, in_pieces=True)


def forward_plan(problem: Problem) -> ForwardPlan:
    """Choose the forward's kernel, tile and grid."""
    if problem.groups == problem.n_queries and (
        problem.query_length <= _SINGLE_MAX_QUERY_LENGTH or problem.has_candidates
    ):
        return _single_plan(problem)
    return _stacked_plan(problem)


_OWN_DOCUMENTS = "every query has documents of its own"
_ONE_QUERY = f"one query of at most {_SINGLE_MAX_QUERY_LENGTH} tokens"
_ONE_MATRIX = "the tokens of all queries are the rows of one matrix"


def _single_plan(problem: Problem) -> ForwardPlan:
    kind, n_queries, n_documents = problem.kind, problem.n_queries, problem.n_documents
    capability, processors = architecture(kind.device)
    columns = single_columns(problem.query_length)
    column_blocks = -(-problem.query_length // columns)
    per_query = n_documents if kind.candidates is None else problem.max_candidates
    per_processor, of_one_wave, longest = single_runs(capability, kind, columns)
    if per_query * n_queries * column_blocks <= per_processor * processors * of_one_wave:
        longest = of_one_wave
    run = run_length(per_query, n_queries * column_blocks, processors, per_processor, longest)
    cuts, in_pieces = Cuts(), False
    if kind.cu_seqlens is not None:
        cuts = cuts_of(problem, column_blocks, processors, per_processor=4, largest=4096)
        in_pieces = problem.document_length > cuts.whole
    strides, *units = divided_strides(problem.query_strides, problem.document_strides)
    return ForwardPlan(
        single_form(capability, kind, columns, in_pieces, *units), strides, columns, run, -(-per_query // run),
        per_query, cuts, in_pieces, column_blocks, column_blocks, _OWN_DOCUMENTS if n_queries > 1 else _ONE_QUERY,
    )  # fmt: skip


def _stacked_plan(problem: Problem) -> ForwardPlan:
    kind, length, n_documents = problem.kind, problem.document_length, problem.n_documents
    packed = kind.cu_seqlens is not None
    capability, processors = architecture(kind.device)
    all_rows = problem.n_queries * problem.query_length
    total = rounded_total(problem.n_tokens) if packed else problem.n_tokens
    unpadded = total >= _UNPADDED_MIN_LENGTH * problem.all_documents
    unpadded = unpadded and 4 * all_rows * n_documents <= _UNPADDED_MEMORY
    rows = problem.n_queries // problem.groups * padded_query_length(problem.query_length, unpadded)[0]
    long = not packed and length >= HOPPER_WIDE_MIN_LENGTH
    wide, why_not = tile_of_hopper(capability, kind, rows <= HOPPER_NARROW_ROWS, long)
    why = _ONE_MATRIX
    if wide is None:
        why += why_not
    elif not (problem.aligned and copied_by_16_bytes(kind.size, problem.document_strides)):
        why += "; documents cannot be copied 16 bytes at a time"
    else:
        # Winners are found in a whole tile.
        tail = 0 if packed or kind.with_winners else hopper_tail(wide, length)
        plan = hopper_plan(problem, wide, tail, why + ", on a Hopper GPU", unpadded)
        if not packed or length <= plan.cuts.whole:
            return plan
        why += f"; a document may be longer than {plan.cuts.whole} tokens, and is scored in pieces"
    tile = tile_of_stacked(capability, kind, min(rows, 256))
    make = functools.partial(stacked_form, capability, kind, tile)
    return tall_plan(problem, processors, tile, _STACKED_SHARES, make, why, unpadded)


def hopper_plan(
    problem: Problem,
    tile: HopperTile,
    tail: int,
    reason: str,
    unpadded: bool = False,
    soft: bool = False,
) -> ForwardPlan:
    """The plan of the Hopper kernel with this tile, and products of `tail` columns of what is left after whole ones."""
    (capability, processors), kind = architecture(problem.device), problem.kind

    def make(_: bool, *sizes: int) -> Form:
        return hopper_form(capability, kind, tile, tail, *sizes, soft)

    return tall_plan(problem, processors, tile, HOPPER_SHARES, make, reason, unpadded)


# The backward. The times beside a constant are milliseconds on an H200 in bfloat16 at d = 128, at 1024 x 1024 (32 x 180
# tokens), at 512 x 512 (32 x 180) and at 64 x 64 (1024 x 1024), in this order, with uniform winners.

# Winners are compared where at most so many query rows choose tokens of a document, and listed where more do: lists
# take a program for every token, chosen or not, which costs more than few rows do: 0.220 and 0.066 at 128 rows and 1024
# documents of 300 tokens, 0.222 and 0.347 at 512 rows, 0.055 each at 128 rows and documents of 40 tokens.
_FEW_ROWS = 128
# Rows that pull in one program, at d = 128 of one warp, and winners that they are compared with at once. Two rows in
# flight for each of them take 168 registers instead of 105, so that two thirds as many programs run side by side.
_COMPARE_ROWS = 8
_COMPARED = 32

# Query rows x documents in flight in a gather, 8 of them to a warp, at d = 128: 1.23, 0.39, 0.18. The first of these
# that gives every multiprocessor `_GATHER_PROGRAMS` is taken. 32 rows: 1.22, 0.66, 0.17, but 0.047 instead of 0.052 at
# 128 x 128 (32 x 300 tokens), where (32, 4) is left of it.
_GATHERS = ((64, 1), (64, 4), (32, 4))
_GATHERS_OF_ONE = ((64, 1), (32, 1))
_GATHER_PROGRAMS = 2
# Of the first, so many find room on a multiprocessor. With norms, the compiler would give a thread 79 registers where
# 64 are left: three programs and then the fourth took 2.69 ms at 1024 x 1024, and together they take 0.96. Where there
# are fewer, but at least so many documents for each of up to four, these share the documents.
_GATHER_ROOM, _GATHER_SHARES = 4, 4
_GATHER_SHARE = 1024
# Programs per multiprocessor at which the documents of a gather are split no more, and documents of a split at least.
_SPLIT_PROGRAMS = 8
_SPLIT_DOCUMENTS = 32

# Memory of the lists of a block of documents: at least so many bytes, or half of what the winners take. At 64 x 64 the
# whole backward takes 0.472 and 44 MiB, its gradients among them; with nothing laid in these, 0.492 and 52.
_LISTS_MEMORY = 12 << 20
# Bytes of a gradient's memory that tensors laid in it, which begin at multiples of 16, may leave unused.
_SLACK = 128
# Rows that one program, of one warp, sorts, as a power of two. Sort, scan and place: 0.59, 0.20, 0.16; 2048 rows
# 1.13, 0.30, 0.28. 512 rows take as long, and twice the counts.
LIST_CHUNK_BITS = 10
# Bits of a token that one pass sorts by; a document of more tokens takes two passes.
LIST_BIN_BITS = 11
# Counts that one program scans at a time, of bins x chunks: all chunks of these bins.
LIST_BLOCK_BINS = 256
LIST_BLOCK_CHUNKS = 16
# Query rows that one program lists, at most, and keys that a warp of it sorts. With 512 rows and 264 documents of 300
# tokens, the gradient takes 0.059 instead of 0.071; with 256 and 4000 of 180 tokens, 0.449 instead of 0.518; but with
# 1024 and 1024 of 180 tokens, 0.174 instead of 0.147. Where every document has a multiprocessor, more rows are listed
# so: both gradients of 32 x 32 (32 x 180) take 0.028 instead of 0.035, of 64 x 64 0.054 instead of 0.050 but two
# launches less, which the host waits for: 0.072 instead of 0.094. 4096 rows: 0.124 instead of 0.086 at 128 x 128.
_ALONE_ROWS = 512
_ALONE_ROWS_OF_FEW = 2048
_ALONE_KEYS = 256
# Query rows on one token that one program sums, at least; at most twice as many: 1.18, 0.35, 0.18, and 1.62,
# 0.66, 0.31 with skewed winners; 256 rows 1.27, 0.37, 0.20, and 1.50, 0.56, 0.33.
LIST_SEGMENT = 512
# Rows in flight in a program that sums, and its warps, at d = 128: 1.18, 0.35, 0.18; 16 rows in one warp 1.66, 0.48,
# 0.26, in two 1.29, 0.40, 0.23. Longer embeddings take more warps.
_SUM_ROWS, _SUM_WARPS = 8, 1
# Weights of the rows of one document lie together, and in L1, if there are enough rows to pay for transposing.
_TRANSPOSED_WINNERS = 1 << 22


class BackwardPlan(NamedTuple):
    """How the gradient of the documents is computed: `kernel` is "lists" or "compare_winners"."""

    kernel: str
    reason: str


def backward_plan(problem: Problem) -> BackwardPlan:
    """Choose how the gradient of the documents is computed."""
    if problem.rows <= _FEW_ROWS:
        return BackwardPlan("compare_winners", f"at most {_FEW_ROWS} query tokens meet a document")
    return BackwardPlan("lists", f"more than {_FEW_ROWS} query tokens meet a document")


class RowsPlan(NamedTuple):
    """A kernel's elements of an embedding with padding, rows and warps of a program, and rows compared with at once."""

    block_embedding: int
    rows: int
    num_warps: int
    compared: int = 0


def compare_plan(problem: Problem) -> RowsPlan:
    block = max(16, power_of_two(problem.size))
    num_warps = max(1, min(8, block // 128))
    return RowsPlan(block, min(_COMPARE_ROWS, num_warps * 2048 // block), num_warps, _COMPARED)


def finish_plan(problem: Problem) -> RowsPlan:
    block = max(16, power_of_two(problem.size))
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
    processors = architecture(problem.device)[1]
    wanted = _GATHER_PROGRAMS * processors
    groups, rows, walked = problem.groups, problem.rows, problem.n_documents
    block = max(16, power_of_two(problem.size))
    if problem.has_candidates:
        # Documents that a query meets on average.
        walked = walked // groups or 1
    for slots, block_documents in _GATHERS if walked > 1 else _GATHERS_OF_ONE:
        num_warps = slots // 8
        if block > 128:
            slots = max(2, slots * 128 // block)
            block_documents = min(block_documents, slots)
        block_rows = slots // block_documents
        programs, n_splits = -(-rows // block_rows) * groups, 1
        shares = min(_GATHER_SHARES, _GATHER_ROOM * processors // programs, walked // _GATHER_SHARE)
        if block_documents == 1 and shares > 1 and shares * programs >= wanted:
            n_splits = shares
            break
        if programs >= wanted and block_rows < 2 * rows:
            break
    if programs < wanted and n_splits == 1:
        n_splits = max(1, min(_SPLIT_PROGRAMS * processors // programs, walked // _SPLIT_DOCUMENTS))
    packs = (num_warps * 8, block_documents) == _GATHERS[0] and problem.dtype.itemsize == 2
    registers = REGISTERS // (_GATHER_ROOM * 32 * num_warps) if packs else None
    return GatherPlan(block, block_rows, block_documents, num_warps, programs, n_splits, registers)


def gather_wave(problem: Problem) -> int:
    """Query rows of the programs that gather on all multiprocessors at a time, where there are rows for so many."""
    block = max(128, power_of_two(problem.size))
    return max(2, _GATHERS[0][0] * 128 // block) * _GATHER_PROGRAMS * architecture(problem.device)[1]


class ListsPlan(NamedTuple):
    """How the query rows of each document are listed by token, and summed, a block of documents at a time."""

    # Documents of a block.
    block: int
    # Rows that one program lists, as a power of two; 0 where programs share a document's rows.
    alone_bits: int
    alone_warps: int
    # Of each pass, the low digit of tokens first: the shift of a token to its bin, and how many bins there are.
    digits: tuple[tuple[int, int], ...]
    # What the kernels call chunks (of rows that a program sorts) and segments (of a list, for programs that sum what is
    # left of long ones) of each document.
    n_chunks: int
    n_segments: int
    list_dtype: torch.dtype
    starts_dtype: torch.dtype
    # Whether what sorts fits into the memory of the documents' own gradient.
    sorts_in_gradient: bool
    # Whether the scores' gradient is to be copied so that those of one document lie together.
    transposes: bool
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
    bins = widest = 1 << LIST_BIN_BITS
    if length > widest**2:
        raise ValueError(f"documents must have at most {widest**2} tokens, got {length}")
    digits: tuple[tuple[int, int], ...] = ((0, widest), (LIST_BIN_BITS, -(-length // widest)))
    if length <= widest:
        bins, digits = length, ((0, length),)
    n_chunks = -(-rows >> LIST_CHUNK_BITS)
    n_segments = 0 if rows <= 2 * LIST_SEGMENT else -(-rows // LIST_SEGMENT) - 1
    list_dtype = torch.uint16 if rows <= 1 << 16 else torch.int32
    starts_dtype = torch.uint16 if rows < 1 << 16 and not packed else torch.int32
    alone_bits, alone_warps = 0, 1
    alone_rows = _ALONE_ROWS_OF_FEW if documents <= architecture(problem.device)[1] else _ALONE_ROWS
    if rows <= alone_rows and length <= widest and not packed:
        alone_bits = max(8, (rows - 1).bit_length())
        alone_warps = max(1, (1 << alone_bits) // _ALONE_KEYS)

    # Bytes of a document: what sorts, until the rows are placed; then sums of segments, in the same memory; and all the
    # time the lists, and what tells where they begin and end.
    sorting = 0 if alone_bits else n_chunks * ((2 << LIST_CHUNK_BITS) + 4 * bins + 4 * -(-bins // LIST_BLOCK_BINS))
    summing = 4 * n_segments * 2 * size
    listed = len(digits) * rows * list_dtype.itemsize
    ends = 4 if packed else (length + 1) * starts_dtype.itemsize + 4
    # Of packed documents it is not known here where their gradients begin.
    sorts_in_gradient = not packed and not adds and sorting + _SLACK <= length * size * item
    shared = summing if sorts_in_gradient else max(sorting, summing)
    memory = max(_LISTS_MEMORY, documents * rows * problem.winners_dtype.itemsize // 2)
    block = min(documents, memory // (listed + shared + ends)) or 1
    if lent:
        # All but the lists in the memory of the gradient of the queries, for up to twice as many blocks, which take a
        # few launches more.
        lent_bytes = problem.n_queries * problem.query_length * size * item - _SLACK
        lent_block = min(documents, memory // listed, lent_bytes // (shared + ends))
        if 2 * lent_block >= block:
            block = lent_block
    if block < documents:
        block = -(-documents // -(-documents // block))

    block_embedding = max(16, power_of_two(size))
    num_warps, block_rows = _SUM_WARPS, _SUM_ROWS
    if block_embedding > 128:
        num_warps = min(8, block_embedding // 128)
        block_rows = max(4, min(block_rows, num_warps * 2048 // block_embedding))
    return ListsPlan(
        block, alone_bits, alone_warps, digits, n_chunks, n_segments, list_dtype, starts_dtype, sorts_in_gradient,
        problem.groups == 1 and rows * documents >= _TRANSPOSED_WINNERS, block_embedding, block_rows, num_warps,
    )  # fmt: skip


class FusedPlan(NamedTuple):
    """How hidden states are projected by a kernel, which scores query rows too, or writes embeddings."""

    tile: FusedTile
    n_tokens: int
    n_tiles: int
    # Programs, which take every so many-th tile.
    programs: int


def fused_plan(
    rows: int, n_tokens: int, weight_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> FusedPlan | None:
    """Plan for `n_tokens` hidden states that meet `rows` query rows (1: that are projected only), or None."""
    capability, processors = architecture(device)
    tile = fused_tile(capability, rows, *weight_shape, dtype.itemsize)
    if tile is None or not 0 < n_tokens < 1 << 31:
        return None
    n_tiles = -(-n_tokens // tile.rows)
    return FusedPlan(tile, n_tokens, n_tiles, min(n_tiles, processors))
