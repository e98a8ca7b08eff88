"""`maxsim_ragged` and `maxsim_ragged_pairwise` against one pair at a time, and against packed sequences."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pylate_flash import maxsim_ragged, maxsim_ragged_pairwise, maxsim_varlen, pack, unpack
from pylate_flash.ops import maxsim_reference
from pylate_flash.ops import ragged as ragged_operation
from pylate_flash.ops.varlen import maxsim_varlen_reference
from pylate_flash.problem import Options
from tests.ops.cases import check_scores, mistakes, wrong
from tests.ops.operations import Operators


def lists_of(case: tuple) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    (queries, documents, queries_cu_seqlens, documents_cu_seqlens), _ = case
    return unpack(queries, queries_cu_seqlens), unpack(documents, documents_cu_seqlens)


def ragged(*lengths: int, size: int = 8, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, size, generator=generator) for length in lengths]


@pytest.mark.parametrize("kind", ["masked", "weighted", "whole"])
def test_padded_queries_may_have_a_mask(kind: str) -> None:
    queries, documents = torch.stack(ragged(4, 4, 4)), ragged(5, 1, 7, seed=1)
    mask = {
        "masked": torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]]),
        "weighted": torch.tensor([[0.5, 2.0, 0.0, 0.0], [1.0, 0.0, 0.0, 3.0], [1.0, 1.0, 1.0, 1.0]]),
        "whole": None,
    }[kind]
    expected = [maxsim_reference(queries.double(), d.double().unsqueeze(0), queries_mask=mask) for d in documents]
    actual = maxsim_ragged(queries, documents, queries_mask=mask)
    torch.testing.assert_close(actual.double(), torch.cat(expected, dim=1), rtol=1e-5, atol=1e-5)


def test_pairs_are_the_diagonal() -> None:
    queries, documents = ragged(3, 0, 2), ragged(5, 1, 0, seed=1)
    all_pairs = maxsim_ragged(queries, documents, empty_score=-7.0)
    result = maxsim_ragged_pairwise(queries, documents, empty_score=-7.0)
    torch.testing.assert_close(result, all_pairs.diagonal())
    padded = torch.stack(ragged(3, 3))
    torch.testing.assert_close(
        maxsim_ragged_pairwise(padded, documents[:2]), maxsim_ragged(padded, documents[:2]).diagonal()
    )


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_pairs_on_the_host_are_those_of_packed_sequences(dtype: torch.dtype, reduction: str) -> None:
    """Scored in place, also without tokens, with NaN and infinity; packed where a gradient is needed."""
    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        [torch.randn(n, 8, generator=generator).to(dtype) for n in lengths]
        for lengths in ((3, 1, 0, 6, 2, 0, 4, 2), (9, 2, 4, 1, 0, 0, 5, 3))
    )
    documents[6][2, 1], documents[7][0] = torch.nan, torch.inf
    options = {"reduction": reduction, "empty_score": -2.0}
    scores = maxsim_ragged_pairwise(queries, documents, **options)
    bounds = [torch.tensor([0, *(len(tokens) for tokens in values)]).cumsum(0) for values in (queries, documents)]
    candidates = torch.arange(9)
    packed = torch.cat(queries).double(), torch.cat(documents).double()
    expected = maxsim_varlen_reference(*packed, *bounds, candidates_cu_seqlens=candidates, **options)
    check_scores(scores, expected, dtype)
    with_gradient = maxsim_ragged_pairwise([query.requires_grad_() for query in queries], documents, **options)
    torch.testing.assert_close(with_gradient.detach(), scores, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_where_operators_are_looked_at_pairs_on_the_host_are_one() -> None:
    queries, documents = ragged(3, 2), ragged(5, 1, seed=1)
    expected = maxsim_ragged_pairwise(queries, documents)
    with Operators() as operators:
        torch.testing.assert_close(maxsim_ragged_pairwise(queries, documents), expected)
    assert operators.names == ["maxsim"]


def test_arrays_tuples_and_rows_that_are_not_contiguous_are_sequences() -> None:
    queries, documents = ragged(3, 2), ragged(5, 1, 7, seed=1)
    expected = maxsim_ragged(queries, documents)
    wide = [torch.cat([t, t + 1], dim=1)[:, :8] for t in documents]
    turned = [t.T.contiguous().T for t in documents]
    every_other = [t.repeat_interleave(2, dim=0)[::2] for t in documents]
    arrays = [t.numpy() for t in documents]
    mixed = [documents[0].numpy(), *documents[1:]]
    parameters = [torch.nn.Parameter(documents[0]), *documents[1:]]
    for variant in (wide, turned, every_other, arrays, mixed, tuple(documents), parameters):
        assert torch.equal(maxsim_ragged([t.numpy() for t in queries], variant).detach(), expected)


def test_arrays_stay_on_the_host_whatever_the_default_device() -> None:
    queries, documents = ragged(2), ragged(3)
    with torch.device("meta"):
        mixed = maxsim_ragged([t.numpy() for t in queries], [documents[0].numpy(), *documents[1:]])
    assert torch.equal(mixed, maxsim_ragged(queries, documents))


def test_without_data_lists_have_candidates_and_pairs() -> None:
    with FakeTensorMode():
        queries, documents = [torch.zeros(n, 8) for n in (3, 2)], [torch.zeros(n, 8) for n in (5, 1)]
        assert maxsim_ragged_pairwise(queries, documents).shape == (2,)
        assert maxsim_ragged(queries, documents, candidates_cu_seqlens=torch.tensor([0, 2, 2])).shape == (2,)


def test_pairs_of_negative_views() -> None:
    queries, documents = torch.stack(ragged(3, 3)), ragged(5, 1, seed=1)
    negative = list(torch._neg_view(-queries))
    torch.testing.assert_close(maxsim_ragged_pairwise(negative, documents), maxsim_ragged_pairwise(queries, documents))


def test_a_row_of_a_window_is_one_row() -> None:
    """Its strides are those of contiguous rows of 4, and its 8 elements would fill two of them."""
    queries, documents = ragged(2, size=4), [torch.ones(3, 4), torch.arange(16.0)[None].unfold(1, 8, 4)[0][:1]]
    assert documents[1].shape == (1, 8)
    assert documents[1].stride() == (4, 1)
    with pytest.raises(ValueError, match="documents must have one embedding size, got 8 at 1 and 4 at 0"):
        maxsim_ragged(queries, documents)
    with pytest.raises(ValueError, match="documents must have one embedding size, got 4 at 1 and 8 at 0"):
        maxsim_ragged(queries, documents[::-1])
    alone = maxsim_ragged(ragged(2), documents[1:])
    assert torch.equal(alone, maxsim_ragged(ragged(2), [torch.arange(8.0)[None]]))


@pytest.mark.parametrize("length", [0, 1, 3])
def test_queries_of_one_length_are_those_of_several(length: int) -> None:
    queries, documents = ragged(*[length] * 3), ragged(5, 0, 7, seed=1)
    (q, q_bounds), (d, d_bounds) = pack(queries), pack(documents)
    for number in (1, 3):
        expected = maxsim_varlen(q[: number * length], d, q_bounds[: number + 1], d_bounds, empty_score=-2.0)
        assert torch.equal(maxsim_ragged(queries[:number], documents, empty_score=-2.0), expected)
        mixed = maxsim_ragged([*queries[:number], torch.ones(4, 8)], documents, empty_score=-2.0)
        torch.testing.assert_close(mixed[:-1], expected)


def addresses(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("lengths", [(4, 4, 4), (3, 1, 2), (5,)])
def test_all_that_the_kernels_are_told_of_lists_is_in_one_copy(lengths: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses and boundaries each start at a multiple of 16 bytes; a single query is used as it is."""
    padded: list[tuple] = []

    def pad(origin, bounds, length, offsets, unit):
        padded.append((offsets * unit * 4 + origin.data_ptr(), bounds, length))
        return torch.zeros(len(lengths), length, 8), torch.zeros(len(lengths), length, dtype=torch.bool)

    monkeypatch.setattr(ragged_operation, "choose", lambda *call: "triton")
    monkeypatch.setattr(ragged_operation, "kernels", lambda: SimpleNamespace(pad=pad))
    queries, documents = ragged(*lengths), ragged(5, 1, 7, seed=1)
    candidates = torch.tensor([0, *[3] * len(lengths)], dtype=torch.int32)
    call = ragged_operation.call_of_lists("ragged", queries, documents, None, candidates, Options())
    assert call.packed_because is None
    tensors, offsets = call.tensors, call.offsets
    assert offsets is not None
    assert (offsets.starts * offsets.unit * 4 + tensors.documents.data_ptr()).tolist() == addresses(documents)
    assert (offsets.n_tokens, offsets.unit) == (13, 4 if all(a % 16 == 0 for a in addresses(documents)) else 1)
    assert tensors.documents_cu_seqlens.tolist() == [0, 5, 6, 13]
    assert tensors.candidates_cu_seqlens.tolist() == candidates.tolist()
    parts = [offsets.starts, tensors.documents_cu_seqlens, tensors.candidates_cu_seqlens]
    if len(lengths) == 1:
        assert tensors.queries.data_ptr() == queries[0].data_ptr()
        assert padded == []
    else:
        [(result, bounds, longest)] = padded
        assert (result.tolist(), longest) == (addresses(queries), max(lengths))
        assert bounds.diff().tolist() == [*lengths]
        parts.append(bounds)
    assert (tensors.queries_mask is None) == (len(set(lengths)) == 1)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert all(part.storage_offset() % 2 == 0 for part in parts)


LIST, TWO = "must be a list of tensors or arrays", ragged(2)


test_one_error_for_each_mistake = mistakes(
    wrong(TypeError, f"documents {LIST} .* got Tensor", maxsim_ragged, TWO, torch.ones(1, 2, 8)),
    wrong(TypeError, f"documents {LIST} .* got str", maxsim_ragged, TWO, "text"),
    wrong(TypeError, f"queries {LIST} .* got int", maxsim_ragged, 5, TWO),
    wrong(ValueError, "documents must hold at least one sequence, got none", maxsim_ragged, TWO, []),
    wrong(ValueError, "queries must hold at least one sequence, got none", maxsim_ragged, [], TWO),
    wrong(TypeError, r"documents\[1\] must be a torch.Tensor .* got list", maxsim_ragged, TWO, [*TWO, [1.0]]),
    wrong(ValueError, r"documents\[1\] must have shape \[L, d\], got \[8\]", maxsim_ragged, TWO, [*TWO, torch.ones(8)]),
    wrong(ValueError, "documents must have one embedding size, got 4 at", maxsim_ragged, TWO, [*TWO, torch.ones(2, 4)]),
    wrong(TypeError, "documents must have one dtype, got torch.float64", maxsim_ragged, TWO, [*TWO, np.ones((1, 8))]),
    wrong(TypeError, "documents must have the dtype of queries", maxsim_ragged, TWO, [t.half() for t in TWO]),
    wrong(TypeError, "documents must be float16, bfloat16, float32 or float64", maxsim_ragged, TWO, [TWO[0].int()]),
    wrong(ValueError, "queries_mask must be None", maxsim_ragged, TWO, TWO, queries_mask=torch.ones(1, 2)),
    wrong(ValueError, "from 0 to the number of", maxsim_ragged, TWO, TWO, candidates_cu_seqlens=torch.tensor([0, 2])),
    wrong(ValueError, "documents must have one document per query, 2, got 3 documents",
          maxsim_ragged_pairwise, ragged(1, 2), ragged(1, 2, 3)),
)  # fmt: skip
