"""`pack`, `unpack`, `maxsim_varlen` and `maxsim_varlen_pairwise` against one pair at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from pylate_flash import maxsim_varlen, maxsim_varlen_pairwise, pack, unpack
from pylate_flash.ops.varlen import maxsim_varlen_reference
from tests.ops.cases import (
    FLOAT32_SCORES,
    SIZES,
    differentiated,
    mistakes,
    wrong,
)


@st.composite
def packed(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.float64),
    sizes: st.SearchStrategy[int] = SIZES,
) -> tuple:
    """Draw packed queries and documents of lengths from 0, with or without candidates, and their boundaries."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size, dtype = draw(sizes), draw(st.sampled_from(dtypes))
    query_lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    document_lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=9))

    def tokens(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.nn.functional.normalize(torch.randn(sum(lengths), size, generator=generator), dim=-1)
        bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=draw(st.sampled_from([torch.int32, torch.int64])))
        return values.to(dtype), bounds

    queries, queries_cu_seqlens = tokens(query_lengths)
    documents, documents_cu_seqlens = tokens(document_lengths)
    candidates = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, len(document_lengths)), min_size=len(query_lengths) - 1,
                                    max_size=len(query_lengths) - 1)))  # fmt: skip
        candidates = torch.tensor([0, *cuts, len(document_lengths)], dtype=torch.int32)
    options = {
        "candidates_cu_seqlens": candidates,
        "normalize": draw(st.booleans()),
        "reduction": draw(st.sampled_from(["sum", "mean"])),
        "empty_score": draw(st.sampled_from([0.0, -5.0])),
    }
    return (queries, documents, queries_cu_seqlens, documents_cu_seqlens), options


def gradients(function: Callable[..., torch.Tensor], case: tuple, dtype: torch.dtype | None = None) -> tuple:
    """Gradients of queries and documents, in `dtype` or their own, computed by `differentiated`."""
    (queries, documents, *bounds), options = case
    return differentiated(function, [t.to(dtype or t.dtype) for t in (queries, documents)], options, *bounds)


@pytest.mark.parametrize("options", [{}, {"normalize": True, "reduction": "mean", "empty_score": -3.0}])
def test_pairs_are_candidates_of_one(options: dict) -> None:
    torch.manual_seed(0)
    queries, documents = (
        [torch.randn(n, 8, dtype=torch.float64) for n in lengths] for lengths in ((3, 0, 5, 2), (4, 7, 0, 1))
    )
    arguments = _packed(queries, documents)
    case = arguments, options | {"candidates_cu_seqlens": torch.arange(5)}
    actual = maxsim_varlen_pairwise(*arguments, **options)
    definition = maxsim_varlen_reference(*arguments, **case[1])
    torch.testing.assert_close(actual.double(), definition.double(), **FLOAT32_SCORES)
    expected = gradients(maxsim_varlen_reference, case)
    torch.testing.assert_close(gradients(maxsim_varlen_pairwise, (arguments, options)), expected, **FLOAT32_SCORES)


def _packed(queries: list[torch.Tensor], documents: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    (queries_values, queries_bounds), (documents_values, documents_bounds) = pack(queries), pack(documents)
    return queries_values, documents_values, queries_bounds, documents_bounds


@pytest.mark.parametrize(("query_lengths", "document_lengths"), [((0,), (3,)), ((2,), (0, 0)), ((0, 0), (0,))])
def test_nothing_but_empty_sequences(query_lengths: tuple[int, ...], document_lengths: tuple[int, ...]) -> None:
    arguments = _packed([torch.randn(n, 4) for n in query_lengths], [torch.randn(n, 4) for n in document_lengths])
    expected = maxsim_varlen_reference(*arguments, empty_score=-7.0, reduction="mean")
    assert torch.equal(maxsim_varlen(*arguments, empty_score=-7.0, reduction="mean"), expected)
    assert all((gradient == 0).all() for gradient in gradients(maxsim_varlen, (arguments, {})))


def test_boundaries_on_the_host_tell_the_longest() -> None:
    """A bound above the longest changes nothing, and one below it is an error."""
    arguments = _packed([torch.randn(3, 4), torch.randn(1, 4)], [torch.randn(5, 4), torch.randn(2, 4)])
    expected = maxsim_varlen(*arguments)
    assert torch.equal(maxsim_varlen(*arguments, max_query_length=9, max_document_length=70), expected)
    for options, message in (
        ({"max_query_length": 2}, "queries_cu_seqlens has a sequence of length 3, more than max_query_length = 2"),
        ({"max_document_length": 4}, "documents_cu_seqlens has a sequence of length 5, .* max_document_length = 4"),
        ({"max_document_length": -1}, "max_document_length must be at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            maxsim_varlen(*arguments, **options)


def test_pack_takes_tensors_and_arrays() -> None:
    values, bounds = pack([np.ones((2, 3), dtype=np.float32), np.zeros((0, 3), dtype=np.float32)])
    assert values.shape == (2, 3)
    assert values.dtype == torch.float32
    assert bounds.tolist() == [0, 2, 2]
    assert bounds.dtype == torch.int32
    assert pack([torch.ones(1, 2), torch.ones(3, 2)])[1].tolist() == [0, 1, 4]


def test_unpack_gives_back_what_was_packed() -> None:
    sequences = [torch.randn(n, 3, requires_grad=True) for n in (2, 0, 4)]
    values, bounds = pack(sequences)
    result = unpack(values, bounds)
    assert all(torch.equal(a, b) for a, b in zip(result, sequences, strict=True))
    assert result[2].data_ptr() == values[2:].data_ptr(), "views, not copies"
    result[2].sum().backward()
    assert (sequences[2].grad == 1).all()
    assert [len(part) for part in unpack(torch.arange(6), bounds.long())] == [2, 0, 4]


Q, D = torch.zeros(4, 3), torch.zeros(6, 3)
QB, DB = torch.tensor([0, 4]), torch.tensor([0, 2, 6])


test_bad_input_names_the_argument = mistakes(
    wrong(ValueError, "at least one sequence", pack, []),
    wrong(ValueError, "got 4 at 1 and 3 at 0", pack, [torch.zeros(2, 3), torch.zeros(2, 4)]),
    wrong(ValueError, r"shape \[L, d\]", pack, [torch.zeros(3)]),
    wrong(ValueError, "documents_cu_seqlens must rise from 0 .* 6, got 0 to 2", maxsim_varlen, Q, D, QB, DB[:-1]),
    wrong(ValueError, "falling in between", maxsim_varlen, Q, D, QB, torch.tensor([0, 5, 2, 6])),
    wrong(ValueError, "queries_cu_seqlens must rise from 0 to the number of tokens of queries, 4, got 0 to 1",
          maxsim_varlen, Q, D, torch.tensor([0, 1]), DB),
    wrong(ValueError, "candidates_cu_seqlens must rise from 0 to the number of documents, 2, got 0 to 1",
          maxsim_varlen, Q, D, QB, DB, candidates_cu_seqlens=torch.tensor([0, 1])),
    wrong(ValueError, "2 entries, got 3",
          maxsim_varlen, Q, D, QB, DB, candidates_cu_seqlens=torch.tensor([0, 1, 2])),
    wrong(ValueError, "cu_seqlens must rise from 0 to the number of values, 6, got 0 to 4", unpack, D, QB),
)  # fmt: skip


def test_a_maximum_length_beyond_all_tokens_is_their_number() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(6, 8, generator=generator).requires_grad_() for _ in range(2))
    bounds = torch.tensor([0, 1, 6]), torch.tensor([0, 4, 6])
    longest = {"max_query_length": 2**62, "max_document_length": 2**62}
    expected, actual = (maxsim_varlen(queries, documents, *bounds, **lengths) for lengths in ({}, longest))
    assert torch.equal(actual, expected)
    for inputs in (queries, documents):
        gradients = [torch.autograd.grad(s.sum(), inputs, retain_graph=True)[0] for s in (expected, actual)]
        assert torch.equal(*gradients)


def test_boundaries_of_candidates_are_not_looked_at() -> None:
    """On a GPU, and as here in a graph, their values are unknown on the host."""
    with FakeTensorMode():
        tensors = torch.zeros(40, 8), torch.zeros(90, 8), torch.zeros(5).int(), torch.zeros(31).int()
        scores = maxsim_varlen(
            *tensors, candidates_cu_seqlens=torch.zeros(5).int(), max_query_length=10, max_document_length=9
        )
    assert scores.shape == (30,)
