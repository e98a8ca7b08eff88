"""`pack` and `maxsim_varlen` against one pair at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash.ops import maxsim_varlen, pack
from pylate_flash.ops import varlen as module
from pylate_flash.ops.varlen import maxsim_varlen_reference
from tests.ops.cases import SIZES


@st.composite
def packed(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.float64),
    sizes: st.SearchStrategy[int] = SIZES,
) -> tuple:
    """Packed queries and documents of lengths from 0, with or without candidates, and their boundaries."""
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
    options = {"candidates_cu_seqlens": candidates, "empty_score": draw(st.sampled_from([0.0, -5.0]))}
    return (queries, documents, queries_cu_seqlens, documents_cu_seqlens), options


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=packed())
def test_equals_one_pair_at_a_time(case: tuple) -> None:
    (queries, documents, *bounds), options = case
    scores = maxsim_varlen(queries, documents, *bounds, **options)
    expected = maxsim_varlen_reference(queries.double(), documents.double(), *bounds, **options)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(case=packed(dtypes=(torch.float32,)))
def test_blocks_do_not_change_the_result(case: tuple) -> None:
    arguments, options = case
    expected = maxsim_varlen(*arguments, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_CPU", 40)
        torch.testing.assert_close(maxsim_varlen(*arguments, **options), expected)


def test_nan_stays_in_its_document() -> None:
    queries, queries_bounds = pack([torch.randn(3, 4)])
    documents = [torch.randn(2, 4), torch.randn(3, 4)]
    documents[0][1, 2] = torch.nan
    packed_documents, documents_bounds = pack(documents)
    scores = maxsim_varlen(queries, packed_documents, queries_bounds, documents_bounds)
    assert scores[0, 0].isnan()
    assert scores[0, 1].isfinite()


def test_pack_takes_tensors_and_arrays() -> None:
    values, bounds = pack([np.ones((2, 3), dtype=np.float32), np.zeros((0, 3), dtype=np.float32)])
    assert values.shape == (2, 3)
    assert values.dtype == torch.float32
    assert bounds.tolist() == [0, 2, 2]
    assert bounds.dtype == torch.int32
    assert pack([torch.ones(1, 2), torch.ones(3, 2)])[1].tolist() == [0, 1, 4]


Q, D = torch.zeros(4, 3), torch.zeros(6, 3)
QB, DB = torch.tensor([0, 4]), torch.tensor([0, 2, 6])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pack([]), ValueError, "at least one sequence"),
        (lambda: pack([torch.zeros(2, 3), torch.zeros(2, 4)]), ValueError, r"got \[2, 4\] at 1"),
        (lambda: pack([torch.zeros(3)]), ValueError, r"shape \[L_i, d\]"),
        (lambda: maxsim_varlen(Q[None], D, QB, DB), ValueError, r"queries must have shape \[Tq, d\]"),
        (lambda: maxsim_varlen(Q, D[:, :2], QB, DB), ValueError, "embedding size of queries, 3, got 2"),
        (lambda: maxsim_varlen(Q, D, [0, 4], DB), TypeError, "queries_cu_seqlens must be a torch.Tensor"),
        (lambda: maxsim_varlen(Q, D, QB, DB.float()), TypeError, "documents_cu_seqlens must be int32 or int64"),
        (
            lambda: maxsim_varlen(Q, D, QB, DB[:-1]),
            ValueError,
            "documents_cu_seqlens must rise from 0 .* 6, got 0 to 2",
        ),
        (lambda: maxsim_varlen(Q, D, QB, torch.tensor([0, 5, 2, 6])), ValueError, "falling in between"),
        (
            lambda: maxsim_varlen(Q, D, QB, DB, candidates_cu_seqlens=torch.tensor([0, 1, 2])),
            ValueError,
            "2 entries, got 3",
        ),
        (lambda: maxsim_varlen(Q, D, QB, DB, implementation="x"), ValueError, "implementation must be one of"),
        (lambda: maxsim_varlen(Q.clone().requires_grad_(), D, QB, DB), RuntimeError, "no gradient"),
    ],
)
def test_bad_input_names_the_argument(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
