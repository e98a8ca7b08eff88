"""Where the documents of a stream lie (`hopper_stream`): their tokens in memory, and their columns in tiles.

Whoever copies walks through the documents of a run by these, a tile at a time, and says with each where some end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _aligned(length):
    """Columns that a document of so many tokens takes."""
    return (length + 7) // 8 * 8


@gluon.jit
def run_start_of(cu_seqlens_ptr, first, n_documents):
    """The first token of a run. Where nothing but empty documents are left, the last one; of none at all, row 0."""
    return gl.maximum(gl.minimum(gl.load(cu_seqlens_ptr + first), gl.load(cu_seqlens_ptr + n_documents) - 1), 0)


@gluon.jit
def _start_of(cu_seqlens_ptr, run_start, document, n_documents):
    """Where a document of a run starts, or the last one ends, counted from where the run does."""
    return (gl.load(cu_seqlens_ptr + gl.minimum(document, n_documents)) - run_start).to(gl.int32)


@gluon.jit
def first_document(cu_seqlens_ptr, run_start, first, n_documents):
    """The first document of a run: its number, where it starts and stops, and the next one does; its columns.

    Tokens are counted from where the run starts, columns from where the tile at hand begins.
    """
    start = _start_of(cu_seqlens_ptr, run_start, first, n_documents)
    stop = _start_of(cu_seqlens_ptr, run_start, first + 1, n_documents)
    next_stop = _start_of(cu_seqlens_ptr, run_start, first + 2, n_documents)
    return first, start, stop, next_stop, gl.to_tensor(0), _aligned(stop - start)


@gluon.jit
def next_document(walk, cu_seqlens_ptr, run_start, n_documents):
    document, _, stop, next_stop, _, end = walk
    after = _start_of(cu_seqlens_ptr, run_start, document + 3, n_documents)
    return document + 1, stop, next_stop, after, end, end + _aligned(next_stop - stop)


@gluon.jit
def next_tile(walk, COLUMNS: gl.constexpr):
    """The document at hand, its columns counted from where the next tile begins."""
    document, start, stop, next_stop, begin, end = walk
    return document, start, stop, next_stop, begin - COLUMNS, end - COLUMNS


@gluon.jit
def skip_tile(walk, cu_seqlens_ptr, run_start, last, n_documents, COLUMNS: gl.constexpr):
    """The document at hand after a tile."""
    while (walk[0] < last) & (walk[5] <= COLUMNS):
        walk = next_document(walk, cu_seqlens_ptr, run_start, n_documents)
    return next_tile(walk, COLUMNS)


@gluon.jit
def end_of(start, stop, end):
    """The bit of the eight of columns after which a document ends, 0 of one without tokens."""
    return gl.where(stop > start, 1 << ((end - 1) // 8), 0)


@gluon.jit
def with_tokens(tokens, positions, begin, start, stop):
    """The tokens of a tile's columns, of which those from `begin` on are a document's, the last one repeated.

    Of documents without tokens, `begin` is past the end.
    """
    return gl.where(positions >= begin, gl.minimum(positions + (start - begin), stop - 1), tokens)
