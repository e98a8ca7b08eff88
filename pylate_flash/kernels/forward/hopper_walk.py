"""Layout of documents in a stream (`hopper_stream`): the tokens of its columns, and where documents end.

One warp computes it for all others, a span of 256 columns at a time. Its lanes first stand for 32 documents, whose end
columns are a prefix sum over lanes, and then for the 32 eights of columns, each of which searches for its document
among these. So many short documents take as long as a single long one, where a loop over documents in all copying warps
took 17 to 25 % of the time of those that decompress codes.

Tokens are counted from the start of the run: packed tokens by cu_seqlens, padded ones by position. In masked documents,
only active tokens have columns; they are looked up unless the mask is a prefix.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon import add, larger_of, next_slot, reinterpret
from .hopper_barriers import arrive, await_barrier, load_word, offsets, spans, store_word

# Columns that are computed together; an "eight" is a group of 8.
SPAN = gl.constexpr(256)


@gluon.jit
def run_start_of(cu_seqlens_ptr, group, first, n_documents, document_length, config: gl.constexpr):
    """The first token of a run, counted over all documents.

    If only empty packed documents remain, it is the last token, or row 0 without any.
    """
    if config.packed:
        start = gl.maximum(gl.minimum(gl.load(cu_seqlens_ptr + first), gl.load(cu_seqlens_ptr + n_documents) - 1), 0)
    else:
        start = (group.to(gl.int64) * n_documents + first) * document_length
    return start


@gluon.jit
def walk_memory(config: gl.constexpr):
    """Allocate for every span the token of each column, counted from the run's start, and its row, if by offsets."""
    SPANS: gl.constexpr = spans(config)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tokens = gl.allocate_shared_memory(gl.int32, [SPANS, SPAN // 8, 8], layout)
    row_offsets = tokens
    if config.offset_unit > 0:
        row_offsets = gl.allocate_shared_memory(gl.int64, [SPANS, SPAN // 8, 8], layout)
    return tokens, row_offsets


@gluon.jit
def of_tile(words, tile, positions, config: gl.constexpr):
    """Load the words of the columns of a (part of a) tile, counted over all spans, in the layout of `positions`."""
    COLUMNS: gl.constexpr = positions.shape[0]
    SPANS: gl.constexpr = spans(config)
    by_column: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    by_tile = reinterpret(words, words.dtype, [SPANS * SPAN // COLUMNS, COLUMNS], by_column)
    return by_tile.index(tile).load(positions.type.layout)


@gluon.jit
def await_span(memory, span, phase, config: gl.constexpr):
    """Wait for a span; return its number of eights with documents, and after which of them one ends, as bits."""
    AT: gl.constexpr = offsets(config)
    await_barrier(memory, AT.full_spans, span, phase)
    return load_word(memory, AT.words_of_spans, 2 * span), load_word(memory, AT.words_of_spans, 2 * span + 1)


@gluon.jit
def ended_of(span_end_bits, index, config: gl.constexpr):
    """After which eights of tile `index` of a span a document ends, as bits."""
    EIGHTS: gl.constexpr = config.tile.columns // 8
    return span_end_bits >> index * EIGHTS & (1 << EIGHTS) - 1


@gluon.jit
def _window(documents, share, numbers, run_start, base, begin, lanes, config: gl.constexpr):
    """Token ranges and column ranges of 32 documents, of which the first one begins at column `begin`.

    Under a mask, a document has only its active tokens; `scattered` marks those whose active tokens are no prefix.
    """
    _, bounds_ptr, cu_seqlens_ptr = documents
    _, group, first, last = share
    _, _, _, n_documents, document_length, _ = numbers
    document = gl.minimum(base + lanes, last)
    scattered = lanes < 0
    if config.packed:
        start = (gl.load(cu_seqlens_ptr + document) - run_start).to(gl.int32)
        stop = (gl.load(cu_seqlens_ptr + gl.minimum(base + lanes + 1, last)) - run_start).to(gl.int32)
    else:
        start = (document - first) * document_length
        stop = gl.where(document < last, start + document_length, start)
        if config.has_documents_mask:
            bounds = bounds_ptr + 2 * (group.to(gl.int64) * n_documents + document)
            stop = start + gl.load(bounds, mask=document < last, other=0)
            scattered = gl.load(bounds + 1, mask=document < last, other=0) < stop - start
    columns = (stop - start + 7) // 8 * 8
    ends = begin + gl.associative_scan(columns, 0, add)
    return start, stop, ends - columns, ends, scattered


@gluon.jit
def _first_after(ends, column):
    """The index of the first of 32 ascending `ends` that is after a column, or else of the last."""
    first = column * 0
    for step in gl.static_range(5):
        first += gl.where(gl.gather(ends, first + (16 >> step) - 1, 0) <= column, 16 >> step, 0)
    return first


@gluon.jit
def _as_column(values, LAYOUT: gl.constexpr):
    return gl.convert_layout(values, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]


@gluon.jit
def walk_stream(arguments, offsets_ptr, stride, span_buffers, config: gl.constexpr):
    """Compute for every span the tokens of its columns, and where documents end.

    A document takes the columns up to the next multiple of 8; those past its end repeat its last token.
    """
    AT: gl.constexpr = offsets(config)
    _, documents, shared, share, numbers, _ = arguments
    active_ptr, _, cu_seqlens_ptr = documents
    _, _, _, _, memory, _ = shared
    _, group, first, last = share
    _, _, _, n_documents, document_length, _ = numbers
    tokens, row_offsets = span_buffers
    SPANS: gl.constexpr = spans(config)
    by_eight: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [1, 1], [1, 0])
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    column = 8 * lanes
    within = gl.arange(0, 8, layout=gl.SliceLayout(0, by_eight))[None, :]
    run_start = run_start_of(cu_seqlens_ptr, group, first, n_documents, document_length, config)
    span = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    # The first document that does not end in an earlier span, and its first column, relative to this span.
    base = first
    begin = gl.to_tensor(0)
    span_is_full = gl.to_tensor(True)
    while span_is_full:
        token = lanes * 0
        stop_token = lanes * 0 + 1
        row_base = lanes.to(gl.int64) * 0
        origin = lanes * 0
        assigned = lanes < 0
        is_end = lanes < 0
        needs_lookup = lanes < 0
        searching = gl.to_tensor(True)
        while searching:
            window = _window(documents, share, numbers, run_start, base, begin, lanes, config)
            start, stop, begins, ends, scattered = window
            document = _first_after(ends, column)
            end = gl.gather(ends, document, 0)
            matches = (end > column) & (not assigned)
            document_column = column - gl.gather(begins, document, 0)
            document_start = gl.gather(start, document, 0)
            token = gl.where(matches, document_start + document_column, token)
            stop_token = gl.where(matches, gl.gather(stop, document, 0), stop_token)
            if config.offset_unit > 0:
                offset = gl.load(offsets_ptr + base + document, mask=matches, other=0)
                offset -= document_start.to(gl.int64) * (stride // config.offset_unit)
                row_base = gl.where(matches, offset, row_base)
            if config.has_documents_mask:
                origin = gl.where(matches, document_start, origin)
                needs_lookup = needs_lookup | (matches & (gl.gather(scattered.to(gl.int32), document, 0) != 0))
            is_end = is_end | (matches & (end == column + 8))
            assigned = assigned | matches
            # There may be more empty documents than lanes.
            window_end = gl.reduce(ends, 0, larger_of)
            searching = (window_end < SPAN) & (base + 32 < last)
            finished = ends <= SPAN
            base += gl.reduce(finished.to(gl.int32), 0, add)
            begin = gl.reduce(gl.where(finished, ends, begin), 0, larger_of)
        begin -= SPAN
        eights = gl.reduce(assigned.to(gl.int32), 0, add)
        column_token = gl.minimum(_as_column(token, by_eight) + within, _as_column(stop_token, by_eight) - 1)
        if config.has_documents_mask:
            lookup_mask = _as_column(needs_lookup, by_eight)
            active = gl.load(active_ptr + run_start + column_token, mask=lookup_mask, other=0)
            column_token = gl.where(lookup_mask, _as_column(origin, by_eight) + active, column_token)
        await_barrier(memory, AT.empty_spans, span, phase)
        tokens.index(span).store(column_token)
        if config.offset_unit > 0:
            column_rows = _as_column(row_base, by_eight) + column_token.to(gl.int64) * (stride // config.offset_unit)
            row_offsets.index(span).store(column_rows)
        store_word(memory, AT.words_of_spans, 2 * span, eights)
        store_word(memory, AT.words_of_spans, 2 * span + 1, gl.reduce(gl.where(is_end, 1 << lanes, 0), 0, add))
        arrive(memory, AT.full_spans, span)
        span, phase = next_slot(span, phase, SPANS)
        span_is_full = eights == SPAN // 8
