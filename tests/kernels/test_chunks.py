"""How many queries a loss takes at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from pylate_flash.kernels.plan_backward import Chunks, chunks_of, halved
from pylate_flash.kernels.tables import CHUNK_SCRATCH
from pylate_flash.problem import Options, Problem, Tensors, problem_of


@dataclass(frozen=True)
class Batch:
    """Queries of 32 tokens, and documents; on the meta device, where they take no memory."""

    queries: int
    documents: int
    length: int = 180
    dtype: torch.dtype = torch.bfloat16
    with_winners: bool = True
    own: bool = False

    @property
    def problem(self) -> Problem:
        shape = (self.queries, self.documents) if self.own else (self.documents,)
        queries = torch.empty(self.queries, 32, 128, dtype=self.dtype, device="meta")
        documents = torch.empty(*shape, self.length, 128, dtype=self.dtype, device="meta")
        return problem_of(Tensors(queries, documents), Options(), self.with_winners)

    @property
    def of_query(self) -> int:
        """Bytes of a query's scores and their gradient, and of its winners with half as much again for their lists."""
        winners = (2 if self.length <= 32767 else 4) * 32 * 3 // 2 if self.with_winners else 0
        return self.documents * (8 + winners)


batches = st.builds(
    Batch,
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from([1, 180, 40000]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.booleans(),
    st.booleans(),
)


@given(batch=batches, budget=st.integers(1, 1 << 32))
def test_chunks_keep_to_the_scratch_and_take_all_queries(batch: Batch, budget: int) -> None:
    chunks = chunks_of(batch.problem, budget)
    assert chunks.queries == 1 or chunks.queries * batch.of_query <= budget
    assert (chunks.number - 1) * chunks.queries < batch.queries <= chunks.number * chunks.queries
    # Cut where what is cut is aligned, unless there are too few to be.
    assert chunks.number == 1 or chunks.queries < 16 or chunks.queries % 16 == 0


def test_what_fits_is_one_chunk() -> None:
    batch = Batch(1024, 1024)
    assert batch.queries * batch.of_query <= CHUNK_SCRATCH
    assert chunks_of(batch.problem, None) == Chunks(1024, 1)
    assert chunks_of(batch.problem, 1024 * batch.of_query) == Chunks(1024, 1)
    assert chunks_of(batch.problem, 1024 * batch.of_query - 1).number == 2


def test_chunks_do_not_shrink_with_the_batch() -> None:
    """By default, the scratch grows with the documents, as what one query takes does."""
    of_16384, of_65536 = (chunks_of(Batch(size, size).problem, None) for size in (16384, 65536))
    assert of_65536.queries >= 0.9 * of_16384.queries
    # Less than what the documents take in float32 above their own type, with a third for whole waves.
    assert of_16384.queries * Batch(16384, 16384).of_query <= 4 / 3 * 16384 * 180 * 128 * 2


@given(queries=st.integers(2, 5000), n_queries=st.integers(1, 5000))
def test_halves_end_at_one_query(queries: int, n_queries: int) -> None:
    chunks = Chunks(queries, -(-n_queries // queries))
    while chunks.queries > 1:
        smaller = halved(chunks, n_queries)
        assert smaller.queries < chunks.queries
        assert (smaller.number - 1) * smaller.queries < n_queries <= smaller.number * smaller.queries
        chunks = smaller
