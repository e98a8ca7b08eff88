"""Plans of the other operations.

Forward kernels: 8-bit documents, soft MaxSim, chosen query tokens, residual codes. Kernels of their own: the projection
of hidden states, XTR's search over token similarities, and Chamfer distances.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..problem import replaced
from . import config, tables
from .config import INT32_MAX, divided_strides, embedding_blocks, stacked_tile, whole_or_split
from .plan import (
    ON_HOPPER,
    STREAMED,
    UNCOPIED,
    ForwardPlan,
    Splits,
    enough_for_stream,
    hopper_plan,
    is_streamed,
    run_length,
    short_plan,
    short_takes,
    stacked_rows,
    stream_pays,
    tall_plan,
)
from .tables import registers_of
from .tiles import FusedTile, HopperTile, Shares, Tile
from .versions import has_gluon

if TYPE_CHECKING:
    from ..problem import Problem


_QUANTIZED = "documents are quantized"


class FusedPlan(NamedTuple):
    """Tile and grid of the kernel that projects hidden states, and scores query rows or writes embeddings."""

    tile: FusedTile
    n_tokens: int
    n_tiles: int
    # Number of programs; program i takes tiles i, i + programs, and so on.
    programs: int


def fused_plan(
    rows: int, n_tokens: int, weight_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> FusedPlan | None:
    """Plan for `n_tokens` hidden states against `rows` query rows (1: projection only), or None if not served."""
    capability, sms = tables.architecture(device)
    tile = fused_tile(capability, rows, *weight_shape, dtype.itemsize)
    if tile is None or not 0 < n_tokens < 1 << 31:
        return None
    n_tiles = -(-n_tokens // tile.rows)
    return FusedPlan(tile, n_tokens, n_tiles, min(n_tiles, sms))


@functools.lru_cache(maxsize=1024)
def fused_tile(capability: int, rows: int, size: int, d_model: int, element_size: int) -> FusedTile | None:
    """Tile of the kernel that projects d_model elements to `size` and scores `rows` query rows; None if not served."""
    blocks = -(-rows // tables.FUSED_MAX_COLUMNS)
    if (
        capability != 9
        or element_size != 2
        or not 0 < blocks <= tables.FUSED_MAX_BLOCKS
        or size > 128
        or size % 8
        or d_model % 8
        or not has_gluon()
    ):
        return None
    columns = max(16, min(tables.FUSED_MAX_COLUMNS, tables.power_of_two(rows)))
    embedding = max(16, tables.power_of_two(size))
    free = tables.FUSED_SHARED_MEMORY - blocks * columns * embedding * element_size
    stages = min(6, free // ((tables.FUSED_ROWS + embedding) * tables.FUSED_CHUNK * element_size))
    return FusedTile(tables.FUSED_ROWS, tables.FUSED_CHUNK, embedding, blocks, columns, stages)


class Collection(NamedTuple):
    """Collection of the tokens above a bound: documents per run, number of runs, and slots per column of a run.

    At most `packed` tokens of a row, a power of two, are then compacted. If `n_runs` is 0, none are collected.
    """

    run: int
    n_runs: int
    depth: int
    packed: int

    def slots(self, columns: int) -> int:
        """Slots of a row, for tiles of `columns` columns."""
        return self.n_runs * columns * self.depth


class SearchPlan(NamedTuple):
    """Tile and grid of XTR's search, elements of an embedding per block, and whether an embedding is split into blocks.

    Each tile has `groups` groups of tokens with a maximum of their own (0: only documents have maxima); the first
    `n_groups` maxima are used.
    """

    tile: Tile
    block_embedding: int
    split: bool
    row_blocks: int
    run: int
    n_runs: int
    groups: int
    n_groups: int
    collection: Collection
    # Elements of scratch per row: for group maxima, for the collection (slots and packed), or for bin counts.
    scratch: int
    # maxnreg, so that two programs share an SM, where that causes no spills.
    registers: int | None


def search_plan(problem: Problem, k: int) -> SearchPlan:
    capability, sms = tables.architecture(problem.device)
    item, n_documents = problem.dtype.itemsize, problem.n_documents
    blocks = embedding_blocks(capability, problem.size, item)
    if blocks.second:
        # One padded block where the forward takes two; longer embeddings are split, as a block would leave no room.
        blocks = whole_or_split(problem.size, item, 16, tables.XTR_MOST_ROW_BYTES)
    tile = stacked_tile(capability, problem.size, item, problem.rows, True, blocks)
    row_blocks = -(-problem.rows // tile.rows)
    run = run_length(n_documents, row_blocks, sms, per_sm=2, longest=16)
    groups, n_groups, min_maxima = 0, n_documents, min(tables.XTR_MOST_MAXIMA, tables.XTR_MAXIMA_PER_TOKEN * k)
    if n_documents < min_maxima:
        n_tiles = n_documents * -(-problem.document_length // tile.columns)
        groups = next((candidate for candidate in (1, 2) if candidate * n_tiles >= min_maxima), tables.XTR_MAX_GROUPS)
        n_groups = groups * n_tiles
    n_groups = min(tables.XTR_MOST_MAXIMA, n_groups)
    collection = _collection(n_documents, k, tile.columns, row_blocks, sms)
    collected = collection.slots(tile.columns) + collection.packed
    # A multiple of 16, so that launches see aligned strides.
    scratch = -(-max(1 << tables.XTR_BIN_BITS, n_groups if groups else 0, collected) // 16) * 16
    registers = None if blocks.split or item > 2 else tables.registers_of(2, tile.num_warps)
    walk = tile, blocks.first, blocks.split, row_blocks, run, -(-n_documents // run)
    return SearchPlan(*walk, groups, n_groups, collection, scratch, registers)


def _collection(n_documents: int, k: int, columns: int, row_blocks: int, sms: int) -> Collection:
    """Collect with one wave of programs, or not at all if there are not enough slots for half of the SMs.

    Each program has slots of its own, so it places tokens without synchronization.
    """
    n_runs = min(n_documents, max(1, 2 * sms // row_blocks))
    packed = min(tables.XTR_MOST_SLOTS, max(16, tables.power_of_two(tables.XTR_COLLECTED_PER_TOKEN * k)))
    while n_runs > 0:
        mean = 1.5 * k / (columns * n_runs)
        collection = Collection(-(-n_documents // n_runs), n_runs, math.ceil(mean + 4 * math.sqrt(mean) + 4), packed)
        if collection.slots(columns) <= tables.XTR_MOST_SLOTS and 2 * row_blocks * n_runs >= sms:
            return collection._replace(n_runs=-(-n_documents // collection.run))
        n_runs //= 2
    return Collection(0, 0, 0, 0)


class MeetingPlan(NamedTuple):
    """Tile and grid of the kernel that compares the points of two sets."""

    tile: Tile
    # Whether a tile is computed coordinate by coordinate; else elements of a point per block, and whether it is split.
    direct: bool
    block: int
    split: bool
    groups: int
    # Triton's input_precision.
    precision: str
    strides: tuple[int, ...]
    units: tuple[int, int]
    # Programs of a pair of sets: blocks of points of x, times `n_shares` shares of `share` points of y.
    row_blocks: int
    share: int
    n_shares: int


def meeting_plan(problem: Problem) -> MeetingPlan:
    """Choose the tile and the grid."""
    size, item = problem.size, problem.dtype.itemsize
    direct, block, split = size <= tables.DIRECT_SIZE, max(16, tables.power_of_two(size)), False
    if direct:
        tile = tables.CHAMFER_DIRECT if size <= tables.DIRECT_SIZE // 2 else tables.CHAMFER_DIRECT_LONG
    else:
        split = block > tables.CHAMFER_MAX_WHOLE[item]
        if split:
            block = tables.CHAMFER_PART_BYTES // item
        tile = tables.CHAMFER_HALF if split or block <= 128 else tables.CHAMFER_HALF_LONG
        tile = tables.CHAMFER_FLOAT if item == 4 else tile
    row_blocks = -(-problem.query_length // tile.rows)
    programs = row_blocks * problem.n_queries
    tiles = -(-problem.document_length // tile.columns)
    sms = tables.architecture(problem.device)[1]
    # Two sets of tens of millions of points would take more shares than a launch allows (`launch.MOST_PROGRAMS`); half
    # of the limit leaves room for the last wave.
    longest = max(tables.CHAMFER_LONGEST_SHARE, -(-tiles * programs // (INT32_MAX // 2)))
    share = run_length(tiles, programs, sms, tables.CHAMFER_PER_SM, longest)
    precision = config.precision_of(problem.kind)
    if problem.dtype == torch.float32 and precision == "ieee":
        # Three products on tensor cores, which keep 22 of float32's 24 bits. The final distances are computed in
        # float32, from the points themselves.
        precision = "tf32x3"
    strides, units = divided_strides(problem.query_strides, problem.document_strides)
    # A set of y is the only document of its group.
    strides = strides[:3] + strides[4:]
    groups = tables.CHAMFER_DIRECT_GROUPS if direct else tables.CHAMFER_GROUPS
    grid = row_blocks, share * tile.columns, -(-tiles // share)
    return MeetingPlan(tile, direct, block, split, groups, precision, strides, units, *grid)


def soft_forward_plan(problem: Problem) -> ForwardPlan:
    """Choose the kernel, tile and grid of soft MaxSim's forward."""
    (capability, _), kind, rows = tables.architecture(problem.device), problem.kind, stacked_rows(problem)
    # Exponentials take longer than the argmax, so they use its tiles.
    narrow = rows <= tables.HOPPER_NARROW_ROWS
    hopper_tile = config.hopper_tile(capability, kind.size, kind.dtype.itemsize, narrow, True)
    if hopper_tile is None:
        reason = f"the Hopper kernel needs such a GPU, half precision and at most {tables.HOPPER_MAX_SIZE} dimensions"
    elif problem.has_candidates:
        reason = "packed queries have candidates of their own"
    elif rows < tables.SOFT_HOPPER_MIN_ROWS:
        reason = f"fewer than {tables.SOFT_HOPPER_MIN_ROWS} query tokens meet a document"
    elif not (problem.aligned and config.copied_by_16_bytes(kind.size, problem.document_strides)):
        reason = UNCOPIED
    else:
        reason = f"at least {tables.SOFT_HOPPER_MIN_ROWS} query tokens meet a document"
        tail = hopper_tile.columns
        if kind.documents_mask is None and not problem.packed:
            # All documents leave the same number of tokens after their full tiles.
            remainder = problem.document_length % tail
            tail = max(tables.SOFT_NARROWEST, tables.power_of_two(remainder)) if remainder else 0
        return hopper_plan(problem, hopper_tile, reason, tail=tail, soft=True)
    tile = config.soft_tile(kind, tables.SOFT_FORWARD, tables.SOFT_FORWARD_WIDE)
    tile = config.narrowed(tile, rows, problem.document_length)
    return tall_plan(problem, "stacked", tile, config.soft_blocks(kind), tables.SOFT_SHARES, reason, soft=True)


def sparse_plan(problem: Problem, n_chosen: int, shared: bool) -> ForwardPlan:
    """Choose the tile and grid if `n_chosen` tokens of a query are chosen for each document.

    `shared`: all queries meet the same documents.
    """
    kind, n_documents = problem.kind, problem.n_documents
    blocks, tile = config.soft_blocks(kind), config.soft_tile(kind, tables.SPARSE_TILE, tables.SPARSE_TILE_WIDE)
    few_columns = tables.SPARSE_FEW_COLUMNS
    columns = max(16, min(tile.columns, tables.power_of_two(n_chosen), few_columns if blocks.split else tile.columns))
    rows = max(16, min(tile.rows, tables.power_of_two(problem.document_length)))
    tile = tile._replace(rows=rows, columns=columns, num_warps=4 if columns <= few_columns else tile.num_warps)
    row_bytes = blocks.first * kind.dtype.itemsize
    tile = config.fitted(tile, tables.architecture(kind.device)[0], row_bytes, blocks.split)
    strides, units = divided_strides(problem.query_strides, problem.document_strides)
    kernel_config = config.config_of("single", kind, tile, blocks, units, chosen=True, shared=shared)
    n_blocks = -(-n_chosen // columns)
    return ForwardPlan(
        kernel_config, strides, columns, 1, n_documents, n_documents, Splits(), n_blocks, n_blocks, "tokens are chosen"
    )


def decompressed_tokens(problem: Problem, centroids: torch.dtype, listed: bool) -> int:
    """Number of tokens that are decompressed to memory at a time, and then scored as embeddings by the Hopper kernel.

    0: residual codes are decompressed by the kernel that scores them.
    """
    many = _rows_of_hopper(problem, listed) >= tables.RESIDUAL_MANY_ROWS
    decompressed = many and not _decoded_by_copies(problem, centroids, listed)
    return tables.RESIDUAL_SCRATCH // (problem.size * problem.dtype.itemsize) if decompressed else 0


def _rows_of_hopper(problem: Problem, listed: bool) -> int:
    """Query rows that are scored together against residual codes; 0 if the Hopper kernel does not serve them."""
    kind, capability = problem.kind, tables.architecture(problem.device)[0]
    tile = config.hopper_tile(capability, kind.size, kind.dtype.itemsize, False, kind.with_argmax)
    serves = tile is not None and not listed and config.copied_by_16_bytes(kind.size, (kind.size,))
    return stacked_rows(problem) if serves else 0


def _decoded_by_copies(problem: Problem, centroids: torch.dtype, listed: bool) -> bool:
    """Whether the copying warps of the Hopper kernel also decompress (`forward.hopper_codes`)."""
    kind, (least, most) = problem.kind, tables.RESIDUAL_COPIED_ROWS
    fits = kind.size in tables.RESIDUAL_COPIED_SIZES and centroids.itemsize == 2 and is_streamed(problem, kind.size)
    return fits and least <= _rows_of_hopper(problem, listed) <= most


def residual_plan(
    problem: Problem, nbits: int, n_centroids: int, centroids: torch.dtype, tokens_met: int, listed: bool
) -> ForwardPlan:
    """Choose the kernel, tile and grid of a call with residual codes.

    Every query meets about `tokens_met` tokens; `listed`: those of its own list of candidates.
    """
    kind, reason = problem.kind, "documents are residual codes"
    if kind.quantize_queries:
        few = listed or problem.n_queries <= tables.SHORT_MAX_QUERIES
        if few and tokens_met >= tables.SHORT_TOKENS_PER_CENTROID * n_centroids and short_takes(problem, nbits):
            return short_plan(problem, nbits, "listed" if listed else "split", reason)
    copied = _decoded_by_copies(problem, centroids, listed)
    if not (copied and centroids == torch.float16):
        # In all other cases, query rows keep their dtype.
        kind = replaced(kind, "quantize_queries", False)
    # Residuals are contiguous.
    problem = problem._replace(kind=kind, document_strides=(0, 0, 0))
    if copied:
        reason += ON_HOPPER + STREAMED
        return hopper_plan(problem, tables.RESIDUAL_COPIED_TILE, reason, stream=True, nbits=nbits)
    item = problem.dtype.itemsize
    capability, _ = tables.architecture(kind.device)
    rows = min(tables.RESIDUAL_TILE.rows, tables.power_of_two(stacked_rows(problem)))
    blocks, tile = config.residual_blocks(kind), tables.RESIDUAL_FEW_ROWS
    if rows > tile.rows and item == 2:
        tile = tables.RESIDUAL_TILE._replace(rows=rows)
    tile = config.fitted(tile, capability, blocks.held * item, blocks.split)
    per_sm, registers = tables.RESIDUAL_PER_SM[tile.num_warps], None
    if capability == 9 and item == 2 and not blocks.split:
        # Uncapped, ptxas uses a few registers too many for `per_sm` programs.
        registers = registers_of(per_sm, tile.num_warps)
    shares = Shares(per_sm, tables.RESIDUAL_LONGEST_RUN, tables.RESIDUAL_LARGEST_SPLIT)
    return tall_plan(problem, "stacked", tile, blocks, shares, reason, listed=listed, nbits=nbits, registers=registers)


def quantized_plan(problem: Problem) -> ForwardPlan:
    """Choose the kernel, tile and grid of a call with quantized documents.

    Packed documents are distributed by token count, without segments; candidates by document count.
    """
    kind, rows = problem.kind, stacked_rows(problem)
    own = kind.quantize_queries and problem.n_queries == problem.groups
    capability, _ = tables.architecture(kind.device)
    why_not = _quantized_needs_stacked(problem, rows)
    short = own and short_takes(problem, 8) and problem.n_tokens >= _least_tokens_of_short(problem)
    if short and (why_not is not None or _is_short_for_one(problem)):
        return short_plan(problem, 8, "run" if kind.cu_seqlens is None else "split", _QUANTIZED)
    if why_not is None:
        masked, narrow = kind.documents_mask is not None, rows <= tables.HOPPER_NARROW_ROWS
        total = problem.counted_tokens
        length = total // problem.n_documents if problem.packed else problem.document_length
        affine = kind.quantized == torch.uint8
        tile_of = functools.partial(config.quantized_hopper_tile, kind.size, narrow, affine, None if masked else length)
        streamed = is_streamed(problem, problem.document_strides[-1], tables.STREAM_QUANTIZED_MEAN_LENGTH)
        if not problem.packed:
            streamed &= stream_pays(problem, rows) if masked else _is_short(problem, rows, tile_of(False))
        hopper_tile = tile_of(streamed)
        if streamed and not masked and length >= tables.STREAM_QUANTIZED_IN_FOUR and not affine:
            hopper_tile = config.streamed_tile(hopper_tile, rows)
        # Tokens that fit into half a tile take a product of half the columns.
        tail = hopper_tile.columns // 2
        if not masked and not problem.packed and not 0 < length % hopper_tile.columns <= tail:
            tail = 0
        # Row sums, which affine documents need, cost as much as a launch if there are many rows.
        in_kernel = rows * total <= tables.QUANTIZED_HOPPER_OWN and (narrow or not affine)
        in_kernel = in_kernel and not config.hopper_blocks(kind.size, 1).second
        problem, reason = problem if in_kernel else _with_values(problem), _QUANTIZED + ON_HOPPER + STREAMED * streamed
        fields = {"stream": True} if streamed else {"tail": tail, "starts_early": not masked}
        return hopper_plan(problem, hopper_tile, reason, quantize_rows=in_kernel, **fields)
    item = 1 if kind.quantize_queries else kind.dtype.itemsize
    blocks, few_rows = whole_or_split(kind.size, item, tables.QUANTIZED_MIN_BLOCK), tables.QUANTIZED_FEW_ROWS
    rows = min(tables.QUANTIZED_TILE.rows, tables.power_of_two(rows))
    tile = few_rows if rows <= few_rows.rows else tables.QUANTIZED_TILE._replace(rows=rows)
    tile = config.fitted(tile, capability, blocks.held * item, blocks.split)
    registers = None
    if capability == 9 and tile.num_warps == tables.QUANTIZED_TILE.num_warps and not blocks.split:
        # Two programs share an SM, so that products of one overlap with maxima of the other. That leaves 128 registers
        # per thread: a full tile takes 120 with 8-bit products. Uncapped, ptxas uses more for other products.
        registers = registers_of(2, tile.num_warps)
    # Each program quantizes the query rows that it scores, which saves a launch and the GPU's wait for it: one query
    # and 100 documents (32 x 180) take 0.091 ms instead of 0.113. With many rows, each program would have more to
    # quantize, and more programs would quantize the same rows.
    in_kernel = kind.quantize_queries and tile.rows <= few_rows.rows and not blocks.split
    if kind.quantize_queries and not in_kernel:
        problem = _with_values(problem)
    per_sm = tables.QUANTIZED_PER_SM[tile.num_warps]
    shares = Shares(per_sm, tables.QUANTIZED_LONGEST_RUN, tables.QUANTIZED_LARGEST_SPLIT)
    reason = _QUANTIZED + why_not
    return tall_plan(problem, "stacked", tile, blocks, shares, reason, quantize_rows=in_kernel, registers=registers)


def _quantized_needs_stacked(problem: Problem, rows: int) -> str | None:
    """Reason why the Hopper kernel does not serve quantized documents, or None if it does."""
    kind = problem.kind
    if tables.architecture(kind.device)[0] != 9 or not has_gluon():
        return ""
    if not kind.quantize_queries:
        return "; the Hopper kernel multiplies 8 bits by 8 bits"
    if kind.size > tables.QUANTIZED_HOPPER_MAX_SIZE:
        return f"; the Hopper kernel takes at most {tables.QUANTIZED_HOPPER_MAX_SIZE} dimensions"
    if problem.has_candidates:
        return "; packed documents are candidates"
    if rows < tables.QUANTIZED_HOPPER_MIN_ROWS:
        total, too_little, length = problem.counted_tokens, None, tables.STREAM_QUANTIZED_MEAN_LENGTH
        masked = kind.documents_mask is not None and kind.size <= 128
        if problem.groups > 1:
            too_little = "a document"
        elif total < tables.QUANTIZED_HOPPER_FEW_TOKENS:
            too_little = f"fewer than {tables.QUANTIZED_HOPPER_FEW_TOKENS} of documents"
        elif masked and total >= tables.QUANTIZED_MANY_TOKENS and total > length * problem.all_documents:
            too_little = f"masked documents of more than {length}"
        if too_little is not None:
            return f"; fewer than {tables.QUANTIZED_HOPPER_MIN_ROWS} query tokens meet {too_little}"
    if not (problem.aligned and config.copied_by_16_bytes(kind.size, problem.document_strides, 1)):
        return f"; {UNCOPIED}"
    return None


def _is_short_for_one(problem: Problem) -> bool:
    """Whether 8-bit documents are so short that `forward.short` serves one query faster than the Hopper kernel."""
    kind, total = problem.kind, problem.counted_tokens
    if kind.quantized == torch.uint8 and not problem.packed:
        return True
    if kind.size > 128:
        short = total <= tables.SHORT_QUANTIZED_LONG_LENGTH * problem.n_documents
        return short and total >= tables.SHORT_QUANTIZED_LONG
    wide = config.single_columns(problem.query_length) > 32
    short = total <= tables.SHORT_QUANTIZED_WIDE_LENGTH * problem.n_documents
    return not wide or short or total >= tables.QUANTIZED_MANY_TOKENS


def _is_short(problem: Problem, rows: int, tile: HopperTile) -> bool:
    """Whether unmasked padded 8-bit documents are short, or leave many columns of full tiles empty."""
    length = problem.document_length
    # A product may take half of a wide tile.
    columns = min(tile.columns, tables.STREAM_COLUMNS)
    saves = -(-length // columns) * columns >= tables.STREAM_QUANTIZED_SAVES * (-(-length // 8) * 8)
    return (saves or length <= tables.STREAM_QUANTIZED_SHORT) and enough_for_stream(problem, rows, tables.STREAM_LEAST)


def _with_values(problem: Problem) -> Problem:
    """The problem with queries that were quantized beforehand, into contiguous rows."""
    return problem._replace(query_strides=(problem.query_length * problem.size, problem.size))


def _least_tokens_of_short(problem: Problem) -> float:
    """Minimum number of tokens of 8-bit documents for `forward.short` to serve them."""
    if config.single_columns(problem.query_length) <= 32:
        return tables.SHORT_QUANTIZED_TOKENS
    unpacked_fp8 = problem.kind.quantized == torch.float8_e4m3fn and not problem.packed
    return math.inf if unpacked_fp8 else tables.SHORT_QUANTIZED_WIDE
