"""Choose the kernel, tile and grid of a forward from its `Problem`; `explain` reports the reason.

Nothing is autotuned at run time: choices come from `tables`, so the first call compiles once and no later call stalls.
`plan_backward` and `plan_operations` plan the other kernels; `choice` chooses between kernels and blocked torch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..problem import Problem, replaced, rounded_total
from . import config, tables
from .choice import KERNEL_MAX_EMBEDDING_SIZE
from .config import Config
from .tables import registers_of
from .tiles import Blocks, HopperTile, Shares, Tile
from .versions import has_gluon


class Splits(NamedTuple):
    """Splits of packed documents: work per split, tokens up to which a document is not split, number of splits."""

    per_split: int = 0
    whole: int = 0
    number: int = 0


_NO_SPLITS = Splits()


class ForwardPlan(NamedTuple):
    """Kernel config, strides and grid that score a problem."""

    config: Config
    # Query and document strides, divided by the units that the kernel multiplies them by.
    strides: tuple[int, ...]
    # Rows of a stacked query, padding included.
    padded: int
    # Documents that one program walks (stacked and packed: the work of its split), and the number of such runs.
    run: int
    n_runs: int
    # Maximum number of documents that one query is scored against.
    per_query: int
    splits: Splits
    # Programs that share a run: blocks of query rows, or of a query's columns.
    row_blocks: int
    # Partial sums that the kernel writes per score.
    n_sums: int
    reason: str
    # The float16 problem that replaces a float32 one, if it is decomposed first (`kernels.decompose`).
    decomposed: Problem | None = None

    @property
    def kernel(self) -> str:
        return self.config.kernel

    @property
    def tile(self) -> Tile | HopperTile:
        return self.config.tile

    @property
    def in_segments(self) -> bool:
        """Whether documents longer than `splits.whole` tokens are scored in segments."""
        return self.config.in_segments

    @property
    def block_rows(self) -> int:
        """Query rows per block."""
        return self.tile.columns if self.kernel == "single" else self.tile.rows


def tall_plan(
    problem: Problem,
    kernel: str,
    tile: Tile | HopperTile,
    blocks: Blocks,
    shares: Shares,
    reason: str,
    unpadded: bool = False,
    listed: bool = False,
    **fields: Any,
) -> ForwardPlan:
    """Plan a kernel that takes the tokens of all queries as one tall matrix.

    `listed`: each group has a list of documents. `fields` are more fields of the config.
    """
    kind, sms = problem.kind, tables.architecture(problem.device)[1]
    streamed = fields.get("stream", False)
    padded, group = config.padded_query_length(problem.query_length, unpadded)
    # A sum lies within one part. Streams sum outside their parts, but as if there were two: scores are bitwise equal.
    parts = 1 if isinstance(tile, Tile) else 2 if streamed else tile.parts
    group = min(group, tile.rows // parts)
    row_blocks = -(-(problem.n_queries // problem.groups * padded) // tile.rows)
    splits, programs, per_query, documents = _NO_SPLITS, row_blocks * problem.groups, problem.n_documents, "run"
    if kind.candidates is not None:
        documents, per_query = "candidates", problem.max_candidates
    elif listed:
        documents = "listed"
    if shares.largest and kind.cu_seqlens is not None and documents == "run":
        cost = tables.STREAM_DOCUMENT_COST if streamed else tables.DOCUMENT_COST
        documents = "split"
        splits = splits_of(problem, row_blocks, sms, shares.per_sm, shares.largest, cost, kernel == "hopper")
        run, n_runs = splits.per_split, splits.number
        if shares.in_segments and config.planned_length(problem) > splits.whole:
            fields["in_segments"] = True
            if isinstance(tile, Tile) and not blocks.split and not kind.normalize and kind.dtype.itemsize == 2:
                # Two programs share an SM; uncapped, ptxas would use a few more registers for the segments.
                fields["registers"] = registers_of(2, tile.num_warps)
    else:
        if shares.largest:
            length = problem.document_length if kernel == "hopper" else 0
            run = run_length(per_query, programs, sms, shares.per_sm, shares.longest, length)
        else:
            run = max(1, min(shares.longest, per_query * programs // (shares.per_sm * sms)))
        n_runs = -(-per_query // run) or 1
    strides, units = config.divided_strides(problem.query_strides, problem.document_strides)
    if kernel == "stacked":
        fields["documents"] = documents
    kernel_config = config.config_of(kernel, kind, tile, blocks, units, group=group, **fields)
    return ForwardPlan(
        kernel_config, strides, padded, run, n_runs, per_query, splits, row_blocks, padded // group, reason
    )


def run_length(documents: int, programs: int, sms: int, per_sm: int, longest: int, length: int = 0) -> int:
    """Documents that one program walks: about `longest`, or fewer so that every SM gets work.

    `programs` programs share each run, and `per_sm` of them fit on an SM at a time. The runs are split so
    that the programs fill whole waves: a few programs more than a wave would take as long as a second one.
    If the last wave is still mostly idle, and documents have `length` tokens (0: unknown), runs are split into more
    waves.
    """
    slots = per_sm * sms
    waves = -(-documents * programs // (slots * longest))

    def run_in(waves: int) -> int:
        return max(1, -(-documents // max(1, slots * waves // programs)))

    def tokens_in(run: int) -> int:
        """Tokens that one SM walks over its successive programs, with their fixed cost."""
        return -(-programs * -(-documents // run) // slots) * (run * length + tables.PROGRAM_COST)

    run = run_in(waves)
    least = documents * programs * length / slots + tables.PROGRAM_COST
    if length == 0 or documents == 0 or least >= tables.MORE_WAVES_SAVE * tokens_in(run):
        return run
    shortest = min(map(run_in, range(waves + 1, waves + 1 + tables.MORE_WAVES)), key=tokens_in)
    return shortest if tokens_in(shortest) < tables.MORE_WAVES_SAVE * tokens_in(run) else run


def splits_of(
    problem: Problem,
    programs: int,
    sms: int,
    per_sm: int,
    largest: int,
    cost: int = tables.DOCUMENT_COST,
    more_waves: bool = False,
) -> Splits:
    """Split packed documents so that every SM gets an equal share, in whole waves, as `run_length` does.

    The work of a document is its token count plus `cost`. A split has at most `largest` work, or the last splits leave
    SMs idle. The total is rounded (`rounded_total`), so that a recording of one total can be replayed for others.
    """
    work = rounded_total(problem.n_tokens) + problem.n_documents * cost
    per_split = max(tables.SMALLEST_SPLIT, run_length(work, programs, sms, per_sm, largest))
    # A document of less than half of an SM's share of work is not split: it does no harm even if it comes last.
    longest_whole = max(tables.LONGEST_WHOLE, per_split, work * programs // (2 * per_sm * sms))
    if more_waves:
        per_split = max(tables.SMALLEST_SPLIT, run_length(work, programs, sms, per_sm, largest, 1))
    return Splits(per_split, longest_whole, -(-work // per_split))


def forward_plan(problem: Problem) -> ForwardPlan:
    """Choose the forward's kernel, tile and grid."""
    pairs, decomposed = _pairs_plan(problem), _decomposed_problem(problem)
    if decomposed is not None and (
        pairs is None or problem.rows >= tables.DECOMPOSED_PAIRS_ROWS[pairs.config.precision]
    ):
        plan = forward_plan(decomposed)
        # On Hopper, documents in segments keep TF32 products: halves in the plain kernel were not measured there.
        if plan.kernel == "hopper" or tables.architecture(problem.device)[0] != 9:
            return plan._replace(decomposed=decomposed, reason=plan.reason + _DECOMPOSED)
    if pairs is not None:
        return pairs
    if _is_single(problem) and not _prefers_hopper(problem):
        return _single_plan(problem)
    plan = _stacked_plan(problem)
    # With embeddings in blocks, the query rows would be reread for each document that is not part of a stream.
    on_hopper = plan.kernel == "hopper" and (plan.config.stream or problem.size <= tables.HOPPER_MAX_SIZE)
    return plan if on_hopper or not _is_single(problem) else _single_plan(problem)


def _prefers_hopper(problem: Problem) -> bool:
    """Whether the Hopper kernel, where it can serve them, scores short queries faster than the single kernel.

    It does for long embeddings, and for others if documents are short, or many and masked, or packed with a query too
    long for `forward.short`. With norms, it reads the documents once more, which pays where tiles of the single kernel
    would stay half empty. Several queries with documents of their own were not measured with embeddings in blocks, nor
    with embeddings of up to 128 elements.
    """
    kind, total = problem.kind, problem.counted_tokens
    longest = tables.HOPPER_MAX_SIZE if problem.n_queries > 1 else KERNEL_MAX_EMBEDDING_SIZE
    if kind.size > longest or problem.with_argmax or problem.has_candidates:
        return False
    many, mean_length = total >= tables.SINGLE_HOPPER_TOKENS, total / max(1, problem.all_documents)
    if kind.size > 128:
        short = mean_length <= tables.SINGLE_HOPPER_MEAN_LENGTH
        if kind.normalize:
            return short
        return not problem.packed or ((many or short) and not _documents_are_short(problem))
    columns = config.single_columns(problem.query_length)
    if problem.n_queries > 1:
        return False
    alike = not problem.packed and kind.documents_mask is None
    if kind.normalize:
        return total >= tables.SINGLE_HOPPER_NORMS[alike] and mean_length <= columns
    if columns < 32:
        return False
    if problem.packed and 2 * columns * kind.size <= tables.SHORT_MAX_ELEMENTS:
        return False
    if alike:
        return mean_length <= tables.SINGLE_HOPPER_ALIKE_LENGTH
    return many or mean_length <= tables.SINGLE_HOPPER_UNLIKE_LENGTH


def _is_single(problem: Problem) -> bool:
    """Whether each query has its own documents, so that the single kernel serves where no other does."""
    short = problem.query_length <= tables.SINGLE_MAX_QUERY_LENGTH
    return problem.groups == problem.n_queries and (short or problem.has_candidates)


_OWN_DOCUMENTS = "every query has documents of its own"
_ONE_QUERY = f"one query of at most {tables.SINGLE_MAX_QUERY_LENGTH} tokens"
_ONE_MATRIX = "the tokens of all queries are the rows of one matrix"
ON_HOPPER = ", on a Hopper GPU"
STREAMED = ", documents as one stream"
_DECOMPOSED = ", float32 decomposed into float16 first"
_IN_PAIRS = {"tf32x3": ", float32 as pairs of float16", "tf32": ", float32 as float16 times powers of 2"}
_MANY_FLOATS = "; the Hopper kernel takes half precision, and float32 of many query tokens"
_FEW_FLOATS = f", or float32 of at most {tables.PAIRS_MAX_SIZE} elements without argmax"
UNCOPIED = "documents cannot be copied 16 bytes at a time"


def _single_plan(problem: Problem) -> ForwardPlan:
    kind, n_queries = problem.kind, problem.n_queries
    if _documents_are_short(problem):
        return short_plan(problem, 16, "split", "packed documents are short")
    capability, sms = tables.architecture(kind.device)
    columns = config.single_columns(problem.query_length)
    blocks = -(-problem.query_length // columns)
    per_query = problem.n_documents if kind.candidates is None else problem.max_candidates
    per_sm, one_wave_longest, longest = config.single_runs(capability, kind, columns)
    if per_query * n_queries * blocks <= per_sm * sms * one_wave_longest:
        longest = one_wave_longest
    run = run_length(per_query, n_queries * blocks, sms, per_sm, longest)
    splits, in_segments, small = _NO_SPLITS, False, False
    if kind.cu_seqlens is not None:
        splits = splits_of(problem, blocks, sms, per_sm=4, largest=4096)
        # One program with one long document may take longer than segments cost all other documents.
        in_segments = config.planned_length(problem, tables.SINGLE_LIKELY_LENGTH) > splits.whole
        short = rounded_total(problem.n_tokens) < tables.SINGLE_PACKED_LENGTH * problem.n_documents
        small = short or problem.n_documents > tables.SINGLE_PACKED_DOCUMENTS
    strides, units = config.divided_strides(problem.query_strides, problem.document_strides)
    kernel_config = config.single_config(capability, kind, columns, small, in_segments, units)
    reason, n_runs = _OWN_DOCUMENTS if n_queries > 1 else _ONE_QUERY, -(-per_query // run)
    return ForwardPlan(kernel_config, strides, columns, run, n_runs, per_query, splits, blocks, blocks, reason)


def _pairs_plan(problem: Problem) -> ForwardPlan | None:
    """Plan float32 documents as a stream that the Hopper kernel decomposes into float16, or None if it cannot serve."""
    kind, (capability, _) = problem.kind, tables.architecture(problem.device)
    served = capability == 9 and kind.size <= tables.PAIRS_MAX_SIZE
    precision = config.precision_of(kind)
    if not served or precision == "ieee" or not has_gluon():
        return None
    copied = problem.aligned and config.copied_by_16_bytes(kind.size, problem.document_strides, 4)
    if problem.has_candidates or not (copied and is_streamed(problem, problem.document_strides[-1])):
        return None
    if kind.normalize and _is_single(problem) and not _pairs_prefer_streams(problem):
        return None
    unpadded = _unpadded(problem)
    rows = stacked_rows(problem, unpadded)
    if precision == "tf32" and (rows < tables.PAIRS_TF32_ROWS or kind.size <= tables.PAIRS_TF32_SIZE):
        return None
    tile, blocks = config.pairs_tile(kind, rows), config.pair_blocks(kind.size)
    reason = _ONE_MATRIX + ON_HOPPER + STREAMED + _IN_PAIRS[precision]
    fields = {"stream": True, "pairs": True}
    plan = tall_plan(problem, "hopper", tile, blocks, tables.HOPPER_SHARES, reason, unpadded, **fields)
    return plan if not problem.packed or config.planned_length(problem) <= plan.splits.whole else None


def _pairs_prefer_streams(problem: Problem) -> bool:
    """Whether a stream scores one query with norms faster, for which it reads tokens once more, than the single kernel.

    It does unless embeddings are small, and documents long and few. Several queries with documents of their own were
    not measured.
    """
    total = problem.counted_tokens
    few = tables.PAIRS_SINGLE_LENGTH * problem.all_documents < total < tables.PAIRS_SINGLE_TOKENS
    return problem.n_queries == 1 and not (few and problem.size <= tables.PAIRS_SINGLE_SIZE)


def _decomposed_problem(problem: Problem) -> Problem | None:
    """The float16 problem of float32 embeddings that `kernels.decompose` decomposes, or None if it does not."""
    kind, on_hopper = problem.kind, tables.architecture(problem.device)[0] == 9
    if kind.dtype != torch.float32 or kind.offset_unit or problem.has_candidates or (on_hopper and not has_gluon()):
        return None
    parts = 1 if kind.float32_precision == "tf32" else 3
    if parts == 1 and not on_hopper:
        # The plain kernel multiplies TF32 itself.
        return None
    size = parts * -(-kind.size // 8) * 8
    length, rows = problem.document_length, problem.n_queries * problem.query_length
    fits = size <= KERNEL_MAX_EMBEDDING_SIZE and 2 * size * (problem.counted_tokens + rows) <= tables.DECOMPOSED_MEMORY
    if not fits or rows < tables.DECOMPOSED_ROWS[parts] * problem.groups:
        return None
    kind = replaced(replaced(replaced(kind, "dtype", torch.float16), "size", size), "normalize", True)
    document = 0 if problem.packed else length * size
    group = document * problem.n_documents if problem.groups > 1 else 0
    strides = (problem.query_length * size, size), (group, document, size)
    return problem._replace(kind=kind, query_strides=strides[0], document_strides=strides[1], aligned=True)


def _unpadded(problem: Problem) -> bool:
    """Whether documents are so long that unpadded queries, summed row by row, are worth their memory."""
    total = problem.counted_tokens
    sums = problem.n_queries * problem.query_length * problem.n_documents
    return total >= tables.UNPADDED_MIN_LENGTH * problem.all_documents and 4 * sums <= tables.UNPADDED_MEMORY


def _stacked_plan(problem: Problem) -> ForwardPlan:
    kind, length = problem.kind, problem.document_length
    item, packed = kind.dtype.itemsize, kind.cu_seqlens is not None
    capability, _ = tables.architecture(kind.device)
    unpadded = _unpadded(problem)
    rows = stacked_rows(problem, unpadded)
    streamed = is_streamed(problem, problem.document_strides[-1]) and (packed or stream_pays(problem, rows))
    hopper_tile = config.hopper_tile(capability, kind.size, item, rows <= tables.HOPPER_NARROW_ROWS, kind.with_argmax)
    reason, why_not = _ONE_MATRIX, _not_in_blocks(problem)
    if in_blocks := why_not is None:
        hopper_tile = tables.HOPPER_BLOCKS if kind.size <= tables.SUMMED_EMBEDDING else tables.HOPPER_BLOCKS_SUMMED
    if hopper_tile is None:
        reason += why_not or ""
        if capability == 9 and item == 4:
            reason += _MANY_FLOATS + _FEW_FLOATS * (config.precision_of(kind) == "tf32x3")
    elif not (problem.aligned and config.copied_by_16_bytes(kind.size, problem.document_strides)):
        reason += f"; {UNCOPIED}"
    else:
        # The argmax is computed over full tiles only.
        uniform = not packed and kind.documents_mask is None
        tail = 0 if kind.with_argmax and not in_blocks else config.hopper_tail(hopper_tile, length if uniform else None)
        fields = {"stream": True} if streamed else {"tail": tail}
        hopper_tile = config.streamed_tile(hopper_tile, rows) if streamed else hopper_tile
        plan = hopper_plan(problem, hopper_tile, reason + ON_HOPPER + STREAMED * streamed, unpadded, **fields)
        if not packed or config.planned_length(problem) <= plan.splits.whole:
            return plan
        reason += f"; a document may be longer than {plan.splits.whole} tokens, and is scored in segments"
    tile = config.stacked_tile(capability, kind.size, item, min(rows, 256), kind.with_argmax)
    blocks = config.embedding_blocks(capability, kind.size, item)
    return tall_plan(problem, "stacked", tile, blocks, tables.STACKED_SHARES, reason, unpadded)


def _not_in_blocks(problem: Problem) -> str | None:
    """Reason why the Hopper kernel cannot take embeddings in blocks (`forward.hopper_long`), or None if it can.

    Its offsets from the first query of a tile, and from the first token of a padded document, are 32-bit.
    """
    kind = problem.kind
    if tables.architecture(kind.device)[0] != 9 or kind.dtype.itemsize != 2 or not has_gluon():
        return ""
    if kind.size <= tables.HOPPER_MAX_SIZE:
        return ""
    if not config.copied_by_16_bytes(kind.size, problem.query_strides):
        return "; queries cannot be copied 16 bytes at a time"
    query, token = problem.query_strides
    farthest = (tables.HOPPER_BLOCKS.rows // max(1, problem.query_length) + 1) * query + problem.query_length * token
    if not problem.packed:
        farthest = max(farthest, problem.document_length * problem.document_strides[-1])
    return None if farthest <= config.INT32_MAX else "; embeddings lie too far apart to count elements in 32 bits"


def is_streamed(problem: Problem, row_stride: int, mean_length: float = math.inf) -> bool:
    """Whether the Hopper kernel takes documents as one stream (`forward.hopper_stream`).

    Rows are `row_stride` elements apart, documents average at most `mean_length` tokens, and padded ones are
    contiguous. Offsets from the start of a program's share are 32-bit; to fill whole waves, a share may be nearly twice
    the largest one.
    """
    length, shares = problem.document_length, tables.HOPPER_SHARES
    most_tokens = length + 2 * shares.largest if problem.packed else length * 2 * shares.longest
    fits = (
        (problem.packed or problem.documents_follow)
        and not problem.with_argmax
        and most_tokens * row_stride <= config.INT32_MAX
    )
    return fits and rounded_total(problem.n_tokens) <= mean_length * problem.all_documents


def stream_pays(problem: Problem, rows: int) -> bool:
    """Whether padded documents that can be a stream are scored faster as one, by `rows` query rows per group."""
    length, masked = problem.document_length, problem.kind.documents_mask is not None
    if problem.size > tables.HOPPER_MAX_SIZE:
        empty = -length % tables.HOPPER_BLOCKS.columns
        narrow = rows <= tables.STREAM_BLOCKS_NARROW.rows
        return masked or narrow or empty > tables.STREAM_BLOCKS_SAVES * (length + empty)
    few, short = tables.STREAM_FEW_ROWS if problem.size <= 256 else tables.STREAM_FEW_ROWS_OF_LONG
    uniform = not masked and length > short
    least = tables.STREAM_LEAST_ALIKE if uniform else tables.STREAM_LEAST
    return enough_for_stream(problem, rows, least) and not (uniform and rows <= few)


def enough_for_stream(problem: Problem, rows: int, least: int) -> bool:
    """Whether `rows` query rows meet enough padded tokens, `least` pairs per SM; mostly empty tiles count in full."""
    length, empty = problem.document_length, -problem.document_length % tables.STREAM_COLUMNS
    counted_length = length + empty if empty > length else length
    return rows * problem.all_documents * counted_length >= least * tables.architecture(problem.device)[1]


def stacked_rows(problem: Problem, unpadded: bool = False) -> int:
    """Stacked rows of the queries of a group, padding included."""
    return problem.n_queries // problem.groups * config.padded_query_length(problem.query_length, unpadded)[0]


def hopper_plan(problem: Problem, tile: HopperTile, reason: str, unpadded: bool = False, **fields: Any) -> ForwardPlan:
    """Plan the Hopper kernel with this tile."""
    blocks = config.hopper_blocks(problem.size, 2 if problem.kind.quantized is None else 1)
    return tall_plan(problem, "hopper", tile, blocks, tables.HOPPER_SHARES, reason, unpadded, **fields)


def short_takes(problem: Problem, nbits: int) -> bool:
    """Whether `forward.short` can serve these queries and documents of `nbits` bits per element."""
    kind, size, row_stride = problem.kind, problem.size, problem.document_strides[2]
    contiguous = kind.cu_seqlens is not None or problem.documents_follow
    plain = not (kind.with_argmax or problem.has_candidates or kind.documents_mask is not None or kind.offset_unit)
    elements = size * config.single_columns(problem.query_length)
    few = problem.query_length <= tables.SHORT_MAX_LENGTH and elements <= tables.SHORT_MAX_ELEMENTS
    few &= size <= tables.SHORT_MAX_SIZE
    # Rows are whole 4-byte words (16 bytes where elements are not codes), and centroid products take 16 elements.
    fits = size >= 16 and size % (32 // nbits if nbits < 8 else 16) == 0 and problem.n_tokens < config.INT32_MAX
    return contiguous and plain and few and fits and (nbits < 8 or (problem.aligned and row_stride % 4 == 0))


def _documents_are_short(problem: Problem) -> bool:
    """Whether packed 16-bit documents are so short that `forward.short` serves one query."""
    kind, total = problem.kind, rounded_total(problem.n_tokens)
    short = kind.cu_seqlens is not None and any(
        total >= tokens and total <= length * problem.n_documents for length, tokens in tables.SHORT_MEAN_LENGTHS
    )
    if not short or kind.dtype.itemsize != 2 or problem.n_queries > 1 or kind.normalize:
        return False
    # A program holds twice as many bytes of a query as with 8 bits, and shares no document with other programs.
    elements = config.single_columns(problem.query_length) * problem.size
    fits = 2 * elements <= tables.SHORT_MAX_ELEMENTS and config.planned_length(problem) <= tables.LONGEST_WHOLE
    return fits and short_takes(problem, 16)


def short_plan(problem: Problem, nbits: int, documents: str, reason: str) -> ForwardPlan:
    """Plan `forward.short`, with programs that fill the GPU once."""
    kind, n_queries, n_documents = problem.kind, problem.n_queries, problem.n_documents
    sms, per_sm = tables.architecture(kind.device)[1], tables.SHORT_PER_SM
    columns, splits, run = config.single_columns(problem.query_length), Splits(), 1
    if documents == "split":
        splits = splits_of(problem, n_queries, sms, per_sm, config.INT32_MAX)
        run = splits.per_split
    elif documents == "run":
        run = run_length(n_documents, n_queries, sms, per_sm, config.INT32_MAX)
    strides, units = config.divided_strides(problem.query_strides, (0, 0, 0))
    tile, blocks = Tile(tables.SHORT_ROWS, columns, 1, 1), Blocks(problem.size, 0, False)
    row_words = (problem.size if nbits < 8 else problem.document_strides[2]) * nbits // 32
    fields = {"documents": documents, "nbits": nbits, "row": row_words}
    kernel_config = config.config_of("short", kind, tile, blocks, units, tables.SHORT_REGISTERS, **fields)
    n_runs = splits.number if documents == "split" else -(-n_documents // run)
    reason += f", and queries of at most {tables.SHORT_MAX_LENGTH} tokens"
    return ForwardPlan(kernel_config, strides, columns, run, n_runs, n_documents, splits, 1, 1, reason)
