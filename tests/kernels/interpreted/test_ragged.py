"""Kernels that read documents in place, in Triton's interpreter, against the definition."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings

from pylate_flash import maxsim_ragged, maxsim_ragged_pairwise, maxsim_varlen, pack
from pylate_flash.kernels import tables
from pylate_flash.ops import ragged
from pylate_flash.ops.varlen import maxsim_in_place, maxsim_varlen_reference
from tests.kernels.interpreted.test_kernels import HALF_AND_FLOAT
from tests.ops.test_ragged import lists_of
from tests.ops.test_varlen import packed


@pytest.fixture(autouse=True)
def units(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offset unit of every call that read its documents in place."""
    results: list[int] = []
    compute = ragged.compute

    def noted(tensors, options, with_argmax, offsets):
        results.append(offsets.unit)
        return compute(tensors, options, with_argmax, offsets)

    monkeypatch.setattr(ragged, "compute", noted)
    return results


def apart(tensors: list[torch.Tensor], shift: int) -> list[torch.Tensor]:
    """The same documents, each in its own memory, `shift` elements past a multiple of 16 bytes."""
    moved = []
    for tensor in reversed(tensors):
        memory = torch.full((tensor.numel() + shift + 16,), torch.nan, dtype=tensor.dtype)
        begin = -memory.data_ptr() % 16 // tensor.element_size() + shift
        moved.append(memory[begin : begin + tensor.numel()].view(tensor.shape).copy_(tensor))
    return moved[::-1]


def check(case: tuple, shift: int, units: list[int]) -> None:
    (queries, documents, *bounds), options = case
    options = options | {"normalize": False}
    queries_list, documents_list = lists_of(case)
    before = len(units)
    actual = maxsim_ragged(queries_list, apart(documents_list, shift), **options, implementation="triton")
    expected = maxsim_varlen_reference(queries.double(), documents.double(), *bounds, **options)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6)
    aligned = shift * documents.element_size() % 16 == 0 or len(documents) == 0
    assert units[before:] == [16 // documents.element_size() if aligned else 1]


@settings(max_examples=25)
@given(case=packed(dtypes=HALF_AND_FLOAT))
def test_documents_apart(case: tuple, units: list[int]) -> None:
    check(case, 0, units)


@settings(max_examples=10)
@given(case=packed(dtypes=HALF_AND_FLOAT))
def test_documents_that_begin_anywhere(case: tuple, units: list[int]) -> None:
    check(case, 1, units)


def sequences(*lengths: int, size: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randn(length, size, generator=generator).half() for length in lengths]


def expected_of(queries: list[torch.Tensor], documents: list[torch.Tensor]) -> torch.Tensor:
    values = [torch.cat(tensors).double() for tensors in (queries, documents)]
    bounds = [torch.tensor([0, *map(len, tensors)]).cumsum(0) for tensors in (queries, documents)]
    return maxsim_varlen_reference(*values, *bounds)


@pytest.mark.parametrize("n_queries", [1, 3])
def test_a_document_in_segments(n_queries: int, units: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SMALLEST_SPLIT", 128)
    monkeypatch.setattr(tables, "LONGEST_WHOLE", 100)
    queries, documents = sequences(*[40] * n_queries), apart(sequences(3, 700, 0, 90, 120), 0)
    result = maxsim_ragged(queries, documents, implementation="triton")
    torch.testing.assert_close(result.double(), expected_of(queries, documents), rtol=2e-6, atol=2e-6)
    assert units == [8]


def test_pairs(units: list[int]) -> None:
    queries, documents = sequences(5, 9, 2), apart(sequences(33, 7, 80), 0)
    result = maxsim_ragged_pairwise(queries, documents, implementation="triton")
    torch.testing.assert_close(result.double(), expected_of(queries, documents).diagonal(), rtol=2e-6, atol=2e-6)
    assert units == [8]


@pytest.mark.parametrize("lengths", [(9, 9, 9), (5, 0, 9), (9,), (0, 0)])
@pytest.mark.parametrize("shift", [0, 1])
def test_queries_are_padded_from_where_they_lie(lengths: tuple[int, ...], shift: int, units: list[int]) -> None:
    """Bitwise equal to packed queries; memory around them is never read, or scores would be NaN."""
    queries, documents = apart(sequences(*lengths), shift), apart(sequences(33, 0, 80), 0)
    (q, q_bounds), (d, d_bounds) = pack(queries), pack(documents)
    for options in ({}, {"reduction": "mean"}):
        expected = maxsim_varlen(q, d, q_bounds, d_bounds, empty_score=-3.0, implementation="triton", **options)
        actual = maxsim_ragged(queries, documents, empty_score=-3.0, implementation="triton", **options)
        assert torch.equal(actual, expected)
    if len(lengths) == 3:
        pairs = maxsim_ragged_pairwise(queries, documents, empty_score=-3.0, implementation="triton")
        every = maxsim_ragged(queries, documents, empty_score=-3.0, implementation="triton")
        torch.testing.assert_close(pairs, every.diagonal())
    assert set(units) == {8}


class Copied(Sequence):
    """A sequence that creates its items when asked for them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index):
        items = self.tensors[index]
        return [item.clone() for item in items] if isinstance(index, slice) else items.clone()


@pytest.mark.parametrize("kind", ["strided", "created"])
def test_copies_that_only_the_call_has_live_until_they_are_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels get their addresses alone; whatever is allocated in the call may take the place of a freed copy."""
    queries, documents = torch.stack(sequences(5, 5)), sequences(33, 7, 80)
    wide = [torch.cat([document, document], dim=1)[:, :16] for document in documents]
    compute, seen = ragged.compute, []

    def after_more_is_allocated(*arguments):
        seen.extend(torch.full_like(document, torch.nan) for document in documents for _ in range(8))
        return compute(*arguments)

    monkeypatch.setattr(ragged, "compute", after_more_is_allocated)
    expected = expected_of(list(queries), documents)
    passed = wide if kind == "strided" else Copied(documents)
    result = maxsim_ragged(queries, passed, implementation="triton")
    torch.testing.assert_close(result.double(), expected, rtol=2e-6, atol=2e-6)
    pairs = maxsim_ragged_pairwise(queries, passed[:2], implementation="triton")
    torch.testing.assert_close(pairs.double(), expected.diagonal(), rtol=2e-6, atol=2e-6)
    assert seen


def test_the_same_document_twice_is_read_twice() -> None:
    queries, (document, other) = sequences(5), sequences(20, 6)
    result = maxsim_ragged(queries, [document, other, document], implementation="triton")
    assert result[0, 0] == result[0, 2] != result[0, 1]


def test_what_the_kernels_cannot_read_in_place_is_packed(units: list[int]) -> None:
    queries, documents = sequences(5, 3), sequences(20, 6)
    maxsim_ragged(queries, documents, normalize=True, implementation="triton")
    documents[1].requires_grad_()
    assert maxsim_ragged(queries, documents, implementation="triton").requires_grad
    assert units == []
    with torch.no_grad():
        maxsim_ragged(queries, documents, implementation="triton")
    assert units == [8]


@pytest.mark.parametrize("own", [False, True], ids=["all", "candidates"])
@pytest.mark.parametrize("size", [16, 20])
def test_documents_that_lie_among_others(own: bool, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        [torch.randn(length, size, generator=generator, dtype=torch.float32).half() for length in lengths]
        for lengths in ((5, 3), (7, 0, 40, 12, 90))
    )
    (values, queries_bounds), (rows, bounds) = pack(queries), pack(documents)
    chosen = [4, 0, 1, 3, 3]
    chosen_rows, chosen_bounds = pack([documents[i] for i in chosen])
    candidates = torch.tensor([0, 2, 5], dtype=torch.int32) if own else None
    actual = maxsim_in_place(
        values, rows, queries_bounds, chosen_bounds, bounds[chosen].long(), candidates, 5, 90, 3, len(chosen_rows),
        -3.0, "triton",
    )  # fmt: skip
    expected = maxsim_varlen(
        values, chosen_rows, queries_bounds, chosen_bounds, candidates_cu_seqlens=candidates, empty_score=-3.0,
        implementation="triton",
    )  # fmt: skip
    assert torch.equal(actual, expected)
