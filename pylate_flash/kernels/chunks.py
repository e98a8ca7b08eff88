"""How many queries a loss takes at a time, whose winners and scores live no longer than that."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, NamedTuple

from .select import gather_wave
from .tiles import padded_query_length

if TYPE_CHECKING:
    from ..problem import Problem

logger = logging.getLogger(__name__)

# What a chunk of queries may take unless the documents take more, in bytes.
SCRATCH = 256 << 20
# Chunks that large are multiples of so many queries, so that what is cut from aligned tensors is aligned.
_MULTIPLE = 16


class Chunks(NamedTuple):
    """Queries of a chunk, of which the last may have fewer, and how many chunks there are."""

    queries: int
    number: int


def chunks_of(problem: Problem, max_scratch_bytes: int | None) -> Chunks:
    """Cut the queries of a problem so that a chunk takes at most `max_scratch_bytes`, but has at least one query.

    None: `SCRATCH`, or a fifth more than the documents take. So chunks do not shrink where the batch, and with it what
    a query takes, grows; and where the gradient of half documents is summed in float32, its copy in their type, at the
    end, takes the place of most of the scratch.
    """
    n_queries, length = problem.n_queries, problem.query_length
    if max_scratch_bytes is None:
        max_scratch_bytes = max(SCRATCH, problem.n_tokens * problem.size * problem.dtype.itemsize * 6 // 5)
    # Of a score: the score and its gradient, the sums that it is of, winners, and the lists of half a block of them.
    padded, group = padded_query_length(length, True)
    of_score = 8 + (4 * padded // group if padded > group else 0)
    if problem.with_winners:
        of_score += length * problem.winners_dtype.itemsize * 3 // 2
    documents = problem.all_documents if problem.groups == 1 else problem.n_documents
    most = max(1, max_scratch_bytes // max(1, of_score * documents))
    if most >= n_queries:
        return Chunks(n_queries, 1)
    # Programs that gather the gradient of the queries fill whole waves.
    wave = gather_wave(problem) // length
    most = most // wave * wave if most >= wave > 0 else most
    step = _MULTIPLE if most >= _MULTIPLE else 1
    most -= most % step
    number = -(-n_queries // most)
    queries = -(-n_queries // (number * step)) * step
    return Chunks(queries, -(-n_queries // queries))


def halved(chunks: Chunks, n_queries: int) -> Chunks:
    """Chunks of half as many queries, for a device whose memory is less than what the others would take."""
    queries = -(-chunks.queries // 2)
    if queries > _MULTIPLE:
        queries = -(-queries // _MULTIPLE) * _MULTIPLE
    _log_halving()
    return Chunks(queries, -(-n_queries // queries))


@functools.cache
def _log_halving() -> None:
    """Say once per process that memory was short."""
    logger.warning(
        "a loss over MaxSim ran out of memory, and goes on in chunks of half as many queries: a smaller "
        "max_scratch_bytes spares it the attempt"
    )
