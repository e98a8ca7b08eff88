"""Where the documents of a stream lie (`hopper_stream`): the tokens of its columns, and where documents end.

One warp finds out for all others, a span of 256 columns at a time. Its lanes are 32 documents, of which a sum over
lanes tells the columns where each ends; then they are the 32 eights of columns, each of which looks for its document
among these. So it takes as long for many short documents as for a long one, where a loop over documents, by all who
copy, took 17 to 25 % of the time of those that decompress codes.

Tokens are counted from where the run starts: packed ones by the boundaries of documents, padded ones as they lie. Of
masked documents, those that are active have columns, which are looked up unless the mask is a prefix.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon import add, larger_of, next_slot
from .hopper_barriers import arrive, await_barrier, load_word, offsets, spans, store_word

# Columns that are found out together.
SPAN = gl.constexpr(256)


@gluon.jit
def run_start_of(cu_seqlens_ptr, group, first, n_documents, document_length, config: gl.constexpr):
    """The first token of a run, counted over all documents.

    Where nothing but empty packed documents are left, the last one; of none at all, row 0.
    """
    if config.packed:
        start = gl.maximum(gl.minimum(gl.load(cu_seqlens_ptr + first), gl.load(cu_seqlens_ptr + n_documents) - 1), 0)
    else:
        start = (group.to(gl.int64) * n_documents + first) * document_length
    return start


@gluon.jit
def walk_memory(config: gl.constexpr):
    """For every span, the token of each column, counted from where the run starts, and of a list, its place."""
    SPANS: gl.constexpr = spans(config)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tokens = gl.allocate_shared_memory(gl.int32, [SPANS, SPAN // 8, 8], layout)
    places = tokens
    if config.offset_unit > 0:
        places = gl.allocate_shared_memory(gl.int64, [SPANS, SPAN // 8, 8], layout)
    return tokens, places


@gluon.jit
def of_tile(words, tile, positions, config: gl.constexpr):
    """What a span has of the columns of a tile, or part of one, counted over all spans, as these `positions` lie."""
    COLUMNS: gl.constexpr = positions.shape[0]
    SPANS: gl.constexpr = spans(config)
    by_column: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (
        words._reinterpret(words.dtype, [SPANS * SPAN // COLUMNS, COLUMNS], by_column)
        .index(tile)
        .load(positions.type.layout)
    )


@gluon.jit
def await_span(memory, span, phase, config: gl.constexpr):
    """Eights of columns that are documents', of a span; after which of them one ends, as bits."""
    AT: gl.constexpr = offsets(config)
    await_barrier(memory, AT.full_spans, span, phase)
    return load_word(memory, AT.words_of_spans, 2 * span), load_word(memory, AT.words_of_spans, 2 * span + 1)


@gluon.jit
def ended_of(ended, number, config: gl.constexpr):
    """After which eights of the columns of a tile of a span a document ends, as bits."""
    EIGHTS: gl.constexpr = config.tile.columns // 8
    return ended >> number * EIGHTS & (1 << EIGHTS) - 1


@gluon.jit
def _window(documents, share, numbers, run_start, base, begin, lanes, config: gl.constexpr):
    """The tokens between which each of 32 documents lies, and the columns, where the first one begins at `begin`.

    Under a mask, a document has as many as are active; `scattered` are those whose active tokens are no prefix.
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
    """The first of 32 ascending `ends` that is after a column, or the last one."""
    first = column * 0
    for step in gl.static_range(5):
        first += gl.where(gl.gather(ends, first + (16 >> step) - 1, 0) <= column, 16 >> step, 0)
    return first


@gluon.jit
def _as_column(values, LAYOUT: gl.constexpr):
    return gl.convert_layout(values, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]


@gluon.jit
def walk_stream(arguments, offsets_ptr, stride, walked, config: gl.constexpr):
    """Find out for every span which tokens its columns are, and where documents end.

    A document takes the columns up to the next multiple of 8, those past its end with its last token.
    """
    AT: gl.constexpr = offsets(config)
    _, documents, shared, share, numbers, _ = arguments
    active_ptr, _, cu_seqlens_ptr = documents
    _, _, _, _, memory, _ = shared
    _, group, first, last = share
    _, _, _, n_documents, document_length, _ = numbers
    tokens, places = walked
    SPANS: gl.constexpr = spans(config)
    by_eight: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [1, 1], [1, 0])
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    column = 8 * lanes
    within = gl.arange(0, 8, layout=gl.SliceLayout(0, by_eight))[None, :]
    run_start = run_start_of(cu_seqlens_ptr, group, first, n_documents, document_length, config)
    span = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    # The first document that does not end in the spans before, and the column where it begins, counted from this one.
    base = first
    begin = gl.to_tensor(0)
    whole = gl.to_tensor(True)
    while whole:
        token = lanes * 0
        stop_token = lanes * 0 + 1
        place = lanes.to(gl.int64) * 0
        origin = lanes * 0
        found = lanes < 0
        ended = lanes < 0
        looked_up = lanes < 0
        more = gl.to_tensor(True)
        while more:
            window = _window(documents, share, numbers, run_start, base, begin, lanes, config)
            start, stop, begins, ends, scattered = window
            document = _first_after(ends, column)
            end = gl.gather(ends, document, 0)
            here = (end > column) & (not found)
            of_document = column - gl.gather(begins, document, 0)
            document_start = gl.gather(start, document, 0)
            token = gl.where(here, document_start + of_document, token)
            stop_token = gl.where(here, gl.gather(stop, document, 0), stop_token)
            if config.offset_unit > 0:
                offset = gl.load(offsets_ptr + base + document, mask=here, other=0)
                offset -= document_start.to(gl.int64) * (stride // config.offset_unit)
                place = gl.where(here, offset, place)
            if config.has_documents_mask:
                origin = gl.where(here, document_start, origin)
                looked_up = looked_up | (here & (gl.gather(scattered.to(gl.int32), document, 0) != 0))
            ended = ended | (here & (end == column + 8))
            found = found | here
            # Documents without tokens may be more than lanes.
            window_end = gl.reduce(ends, 0, larger_of)
            more = (window_end < SPAN) & (base + 32 < last)
            finished = ends <= SPAN
            base += gl.reduce(finished.to(gl.int32), 0, add)
            begin = gl.reduce(gl.where(finished, ends, begin), 0, larger_of)
        begin -= SPAN
        eights = gl.reduce(found.to(gl.int32), 0, add)
        column_token = gl.minimum(_as_column(token, by_eight) + within, _as_column(stop_token, by_eight) - 1)
        if config.has_documents_mask:
            is_looked_up = _as_column(looked_up, by_eight)
            active = gl.load(active_ptr + run_start + column_token, mask=is_looked_up, other=0)
            column_token = gl.where(is_looked_up, _as_column(origin, by_eight) + active, column_token)
        await_barrier(memory, AT.empty_spans, span, phase)
        tokens.index(span).store(column_token)
        if config.offset_unit > 0:
            column_place = _as_column(place, by_eight) + column_token.to(gl.int64) * (stride // config.offset_unit)
            places.index(span).store(column_place)
        store_word(memory, AT.words_of_spans, 2 * span, eights)
        store_word(memory, AT.words_of_spans, 2 * span + 1, gl.reduce(gl.where(ended, 1 << lanes, 0), 0, add))
        arrive(memory, AT.full_spans, span)
        span, phase = next_slot(span, phase, SPANS)
        whole = eights == SPAN // 8
