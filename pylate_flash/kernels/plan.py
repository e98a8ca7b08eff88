"""Which implementation, kernel, tile and grid serves a forward, made from a `Problem`; `explain` says why.

Nothing is tuned at run time: choices come from `tables`, so that the first call compiles once and no later call stalls.
`plan_backward` and `plan_operations` choose for the other kernels.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..problem import Problem, rounded_total
from . import tables
from .config import (
    Config,
    copied_by_16_bytes,
    divided_strides,
    embedding_blocks,
    hopper_config,
    hopper_tail,
    hopper_tile,
    narrowed,
    padded_query_length,
    parts_of,
    plain_registers,
    quantized_config,
    quantizes_rows,
    residual_config,
    single_columns,
    single_config,
    single_runs,
    soft_tile,
    sparse_config,
    stacked_config,
    tile_of_hopper,
    tile_of_stacked,
)  # fmt: skip
from .tables import Blocks, HopperTile, Shares, Tile
from .versions import has_gluon

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "triton", "blocked")
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.float8_e4m3fn)
# What the tests reach; the kernels sum longer embeddings block by block.
KERNEL_MAX_EMBEDDING_SIZE = 4096
_QUANTIZED = "documents are quantized"


def _kernels_take(device: torch.device, dtype: torch.dtype, embedding_size: int) -> str | None:
    """None if the Triton kernels take such an input, else the reason why they do not."""
    if (reason := tables.kernels_run_on(device, dtype)) is not None:
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


class Cuts(NamedTuple):
    """How packed documents are cut: work per cut, tokens up to which a document stays whole, and the number of cuts."""

    cut: int = 0
    whole: int = 0
    number: int = 0


class ForwardPlan(NamedTuple):
    """How a problem is scored."""

    config: Config
    # Strides of queries and of documents, divided by the units that the kernel multiplies them by.
    strides: tuple[int, ...]
    # Rows that a stacked query takes.
    padded: int
    # Documents that one program walks (stacked and packed: the work of its cut), and how many programs that takes.
    run: int
    n_runs: int
    # Documents that a query meets, at most.
    per_query: int
    # How packed documents are cut, and whether one may be longer than what is scored whole.
    cuts: Cuts
    in_pieces: bool
    # Programs that share a run: blocks of query rows, or of a query's columns.
    row_blocks: int
    # Sums that the kernel leaves for each score.
    n_sums: int
    reason: str

    @property
    def kernel(self) -> str:
        return self.config.kernel

    @property
    def tile(self) -> Tile | HopperTile:
        return self.config.tile

    @property
    def block_rows(self) -> int:
        """Query rows of a block."""
        return self.tile.columns if self.kernel == "single" else self.tile.rows


def tall_plan(
    problem: Problem,
    sms: int,
    tile: Tile | HopperTile,
    shares: Shares,
    make: Callable[..., Config],
    reason: str,
    unpadded: bool = False,
    listed: bool = False,
) -> ForwardPlan:
    """The plan of a kernel for which the tokens of all queries are one tall matrix.

    Its config is made of: which documents are a program's (`forward.stacked`), whether one may be in pieces, the rows
    of a sum, and the units of strides. `listed`: every group has a list of documents.
    """
    padded, group = padded_query_length(problem.query_length, unpadded)
    group = min(group, tile.rows // tile.parts if isinstance(tile, HopperTile) else tile.rows)
    row_blocks = -(-(problem.n_queries // problem.groups * padded) // tile.rows)
    per_query = problem.max_candidates if problem.has_candidates else problem.n_documents
    cuts, in_pieces, documents = Cuts(), False, "run"
    if shares.largest and problem.packed and not problem.has_candidates and not listed:
        documents, cuts = "cut", cuts_of(problem, row_blocks, sms, shares.per_sm, shares.largest)
        run, n_runs = cuts.cut, cuts.number
        in_pieces = shares.in_pieces and problem.document_length > cuts.whole
    else:
        if listed or problem.has_candidates:
            documents = "listed" if listed else "candidates"
        programs = row_blocks * problem.groups
        if shares.largest:
            run = run_length(per_query, programs, sms, shares.per_sm, shares.longest)
        else:
            run = max(1, min(shares.longest, per_query * programs // (shares.per_sm * sms)))
        n_runs = -(-per_query // run) or 1
    strides, *units = divided_strides(problem.query_strides, problem.document_strides)
    return ForwardPlan(
        make(documents, in_pieces, group, *units), strides, padded, run, n_runs, per_query, cuts, in_pieces, row_blocks,
        padded // group, reason,
    )  # fmt: skip


def run_length(documents: int, programs: int, sms: int, per_sm: int, longest: int) -> int:
    """Documents that one program walks: about `longest`, or fewer so that every SM gets work.

    `programs` programs share each run, and `per_sm` of them fit on an SM at a time. The runs are cut so
    that the programs fill whole waves: a few programs more than a wave would take as long as a second one.
    """
    slots = per_sm * sms
    waves = -(-documents * programs // (slots * longest))
    return max(1, -(-documents // max(1, slots * waves // programs)))


def cuts_of(problem: Problem, programs: int, sms: int, per_sm: int, largest: int) -> Cuts:
    """Cut packed documents so that every SM gets an equal share, in whole waves.

    `programs` programs share each cut, and `per_sm` of them fit on an SM at a time. A cut has at most
    `largest` work, or the last ones leave gaps. The total is rounded (`rounded_total`), so that what is repeated of
    one serves others.
    """
    work = rounded_total(problem.n_tokens) + problem.n_documents * tables.DOCUMENT_COST
    slots = per_sm * sms
    waves = -(-work * programs // (slots * largest))
    cut = max(tables.SMALLEST_CUT, -(-work // max(1, slots * waves // programs)))
    # What takes less than half an SM's share of the time can wait for its turn, even the last.
    whole = max(tables.LONGEST_WHOLE, cut, work * programs // (2 * slots))
    return Cuts(cut, whole, -(-work // cut))


def forward_plan(problem: Problem) -> ForwardPlan:
    """Choose the forward's kernel, tile and grid."""
    if problem.groups == problem.n_queries and (
        problem.query_length <= tables.SINGLE_MAX_QUERY_LENGTH or problem.has_candidates
    ):
        return _single_plan(problem)
    return _stacked_plan(problem)


_OWN_DOCUMENTS = "every query has documents of its own"
_ONE_QUERY = f"one query of at most {tables.SINGLE_MAX_QUERY_LENGTH} tokens"
_ONE_MATRIX = "the tokens of all queries are the rows of one matrix"


def _single_plan(problem: Problem) -> ForwardPlan:
    kind, n_queries, n_documents = problem.kind, problem.n_queries, problem.n_documents
    capability, sms = tables.architecture(kind.device)
    columns = single_columns(problem.query_length)
    column_blocks = -(-problem.query_length // columns)
    per_query = n_documents if kind.candidates is None else problem.max_candidates
    per_sm, of_one_wave, longest = single_runs(capability, kind, columns)
    if per_query * n_queries * column_blocks <= per_sm * sms * of_one_wave:
        longest = of_one_wave
    run = run_length(per_query, n_queries * column_blocks, sms, per_sm, longest)
    cuts, in_pieces = Cuts(), False
    if kind.cu_seqlens is not None:
        cuts = cuts_of(problem, column_blocks, sms, per_sm=4, largest=4096)
        in_pieces = problem.document_length > cuts.whole
    strides, *units = divided_strides(problem.query_strides, problem.document_strides)
    return ForwardPlan(
        single_config(capability, kind, columns, in_pieces, *units), strides, columns, run, -(-per_query // run),
        per_query, cuts, in_pieces, column_blocks, column_blocks, _OWN_DOCUMENTS if n_queries > 1 else _ONE_QUERY,
    )  # fmt: skip


def _stacked_plan(problem: Problem) -> ForwardPlan:
    kind, length, n_documents = problem.kind, problem.document_length, problem.n_documents
    packed = kind.cu_seqlens is not None
    capability, sms = tables.architecture(kind.device)
    all_rows = problem.n_queries * problem.query_length
    total = rounded_total(problem.n_tokens) if packed else problem.n_tokens
    unpadded = total >= tables.UNPADDED_MIN_LENGTH * problem.all_documents
    unpadded = unpadded and 4 * all_rows * n_documents <= tables.UNPADDED_MEMORY
    rows = problem.n_queries // problem.groups * padded_query_length(problem.query_length, unpadded)[0]
    long = not packed and length >= tables.HOPPER_WIDE_MIN_LENGTH
    wide, why_not = tile_of_hopper(capability, kind, rows <= tables.HOPPER_NARROW_ROWS, long)
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
    blocks = embedding_blocks(capability, kind.size, kind.dtype.itemsize)

    def make(documents: str, in_pieces: bool, *sizes: int) -> Config:
        registers = plain_registers(kind, tile, blocks, in_pieces)
        return stacked_config(kind, tile, blocks, registers, documents, in_pieces, *sizes)

    return tall_plan(problem, sms, tile, tables.STACKED_SHARES, make, why, unpadded)


def hopper_plan(
    problem: Problem,
    tile: HopperTile,
    tail: int,
    reason: str,
    unpadded: bool = False,
    soft: bool = False,
) -> ForwardPlan:
    """The plan of the Hopper kernel with this tile, and products of `tail` columns of what is left after whole ones."""
    (capability, sms), kind = tables.architecture(problem.device), problem.kind

    def make(documents: str, in_pieces: bool, *sizes: int) -> Config:
        return hopper_config(capability, kind, tile, tail, *sizes, soft)

    return tall_plan(problem, sms, tile, tables.HOPPER_SHARES, make, reason, unpadded)


def quantized_plan(problem: Problem) -> ForwardPlan:
    """Choose the kernel, the tile and the grid of a call with quantized documents.

    Packed documents are shared out by their tokens, whole ones; those of candidates by their number.
    """
    hopper = _quantized_hopper_plan(problem)
    return _quantized_stacked_plan(problem, hopper) if isinstance(hopper, str) else hopper


def _quantized_hopper_plan(problem: Problem) -> ForwardPlan | str:
    """The plan of the Hopper kernel, or why it does not serve the problem."""
    kind = problem.kind
    capability, _ = tables.architecture(kind.device)
    if capability != 9 or not has_gluon():
        return _QUANTIZED
    if not kind.quantize_queries or kind.quantized == torch.uint8:
        return _QUANTIZED + "; the Hopper kernel multiplies int8 or fp8 by the same"
    if kind.size > tables.QUANTIZED_HOPPER_MAX_SIZE:
        return _QUANTIZED + f"; the Hopper kernel takes at most {tables.QUANTIZED_HOPPER_MAX_SIZE} dimensions"
    if problem.has_candidates:
        return _QUANTIZED + "; packed documents are candidates"
    rows = _stacked_rows(problem)
    if rows < tables.QUANTIZED_HOPPER_MIN_ROWS:
        return _QUANTIZED + f"; fewer than {tables.QUANTIZED_HOPPER_MIN_ROWS} query tokens meet a document"
    if not (problem.aligned and copied_by_16_bytes(kind.size, problem.document_strides, 1)):
        return _QUANTIZED + "; documents cannot be copied 16 bytes at a time"
    tile = tables.QUANTIZED_HOPPER_NARROW if rows <= tables.HOPPER_NARROW_ROWS else tables.QUANTIZED_HOPPER
    if kind.size > 128:
        tile = tables.QUANTIZED_HOPPER_LONG
    tail = tables.QUANTIZED_HOPPER_TAIL
    if kind.documents_mask is None and not problem.packed and not 0 < problem.document_length % tile.columns <= tail:
        tail = 0
    return hopper_plan(_with_values(problem), tile, tail, _QUANTIZED + ", on a Hopper GPU")


def _quantized_stacked_plan(problem: Problem, reason: str) -> ForwardPlan:
    kind = problem.kind
    capability, sms = tables.architecture(kind.device)
    rows = min(tables.QUANTIZED_TILE.rows, tables.power_of_two(_stacked_rows(problem)))
    tile, blocks, registers = quantized_config(capability, kind, rows)
    make = functools.partial(stacked_config, kind, tile, blocks, registers)
    per_sm = tables.QUANTIZED_PER_SM[tile.num_warps]
    shares = Shares(per_sm, tables.QUANTIZED_LONGEST_RUN, tables.QUANTIZED_LARGEST_CUT)
    if kind.quantize_queries and not quantizes_rows(tile, blocks):
        problem = _with_values(problem)
    return tall_plan(problem, sms, tile, shares, make, reason)


def quantized_before(problem: Problem, plan: ForwardPlan) -> bool:
    """Whether a kernel of its own quantizes queries, before the one that scores them."""
    by_itself = plan.kernel == "stacked" and quantizes_rows(plan.tile, plan.config.blocks)
    return problem.kind.quantize_queries and not by_itself


def _with_values(problem: Problem) -> Problem:
    """The problem of queries that were quantized before, one row after the other."""
    return problem._replace(query_strides=(problem.query_length * problem.size, problem.size))


def _stacked_rows(problem: Problem) -> int:
    """Rows that the queries of a group take, each padded."""
    return problem.n_queries // problem.groups * padded_query_length(problem.query_length, False)[0]


def residual_plan(problem: Problem, nbits: int, listed: bool) -> ForwardPlan:
    """Choose the tile and the grid of a call with residual codes; `listed`: every query has a list of candidates."""
    kind = problem.kind
    capability, sms = tables.architecture(kind.device)
    rows = min(tables.RESIDUAL_TILE.rows, tables.power_of_two(_stacked_rows(problem)))
    tile, blocks, registers = residual_config(capability, kind, rows)
    make = functools.partial(stacked_config, kind, tile, blocks, registers, nbits=nbits)
    per_sm = tables.RESIDUAL_PER_SM[tile.num_warps]
    shares = Shares(per_sm, tables.RESIDUAL_LONGEST_RUN, tables.RESIDUAL_LARGEST_CUT)
    # Residuals lie one after the other.
    problem = problem._replace(document_strides=(0, 0, 0))
    return tall_plan(problem, sms, tile, shares, make, "documents are residual codes", listed=listed)


def soft_forward_plan(problem: Problem) -> ForwardPlan:
    """Choose the kernel, the tile and the grid of the forward."""
    hopper = _soft_hopper_plan(problem)
    return _soft_stacked_plan(problem, hopper) if isinstance(hopper, str) else hopper


def _soft_hopper_plan(problem: Problem) -> ForwardPlan | str:
    """The plan of the Hopper kernel, or why it does not serve the problem."""
    kind, capability = problem.kind, tables.architecture(problem.device)[0]
    rows = _stacked_rows(problem)
    # Exponentials take longer than winners do: they have their tiles.
    tile = hopper_tile(capability, kind.size, kind.dtype.itemsize, rows <= tables.HOPPER_NARROW_ROWS, False, True)
    if tile is None:
        return f"the Hopper kernel needs such a GPU, half precision and at most {tables.HOPPER_MAX_SIZE} dimensions"
    if problem.has_candidates:
        return "packed queries have candidates of their own"
    if rows < tables.SOFT_HOPPER_MIN_ROWS:
        return f"fewer than {tables.SOFT_HOPPER_MIN_ROWS} query tokens meet a document"
    if not (problem.aligned and copied_by_16_bytes(kind.size, problem.document_strides)):
        return "documents cannot be copied 16 bytes at a time"
    tail = tile.columns
    if kind.documents_mask is None and not problem.packed:
        # All documents leave as many tokens after whole tiles.
        left = problem.document_length % tile.columns
        tail = max(tables.SOFT_NARROWEST, tables.power_of_two(left)) if left else 0
    reason = f"at least {tables.SOFT_HOPPER_MIN_ROWS} query tokens meet a document"
    return hopper_plan(problem, tile, tail, reason, soft=True)


def _soft_stacked_plan(problem: Problem, reason: str) -> ForwardPlan:
    kind = problem.kind
    tile = soft_tile(kind, tables.SOFT_FORWARD, tables.SOFT_FORWARD_WIDE)
    tile = narrowed(tile, _stacked_rows(problem), problem.document_length)
    parts = parts_of(kind.size, kind.dtype.itemsize)
    make = functools.partial(stacked_config, kind, tile, Blocks(parts.block, 0, parts.split), None, soft=True)
    return tall_plan(problem, tables.architecture(kind.device)[1], tile, tables.SOFT_SHARES, make, reason)


def sparse_plan(problem: Problem, n_chosen: int, shared: bool) -> ForwardPlan:
    """Choose the tile and the grid where `n_chosen` tokens of a query are chosen for each document.

    `shared`: all queries meet the same documents.
    """
    kind, n_documents = problem.kind, problem.n_documents
    capability, _ = tables.architecture(kind.device)
    strides, *units = divided_strides(problem.query_strides, problem.document_strides)
    length = min(problem.document_length, tables.SPARSE_TILE.rows)
    config = sparse_config(capability, kind, tables.power_of_two(length), n_chosen, shared, *units)
    columns = config.tile.columns
    blocks = -(-n_chosen // columns)
    return ForwardPlan(
        config, strides, columns, 1, n_documents, n_documents, Cuts(), False, blocks, blocks, "tokens are chosen"
    )
