"""Kernels that read documents in place, on a GPU: bitwise equal to packed documents, and to the definition."""

from __future__ import annotations

import pytest
import torch

from pylate_flash import explain, maxsim_ragged, maxsim_ragged_pairwise, maxsim_varlen, pack
from pylate_flash.ops import ragged
from pylate_flash.ops.lists import sequences_of
from tests.gpu.tools import DTYPES, no_waiting, unit

pytestmark = pytest.mark.gpu


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offset unit of every call that read its documents in place."""
    results: list[int] = []
    compute = ragged.compute

    def noted(tensors, options, with_argmax, offsets):
        results.append(offsets.unit)
        return compute(tensors, options, with_argmax, offsets)

    monkeypatch.setattr(ragged, "compute", noted)
    return results


def lists(lengths: list[int], size: int, dtype: torch.dtype, shift: int = 0) -> list[torch.Tensor]:
    """Tensors of these lengths, each in its own memory, `shift` elements past its start."""
    values = [unit(length, size, dtype=dtype, seed=index) for index, length in enumerate(lengths)]
    return [torch.cat([t.new_zeros(shift), t.flatten()])[shift:].view(t.shape) for t in values]


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="a torch before 2.10")
@pytest.mark.parametrize("recorded", [True, False])
def test_lists_are_looked_at_beside_the_kernels(recorded: bool) -> None:
    values = lists([3, 0, 180], 128, torch.bfloat16, shift=1)
    with torch.set_grad_enabled(recorded):
        result = sequences_of("values", values)
        assert result.known_addresses is not None
        assert result.addresses.tolist() == [value.data_ptr() for value in values]
        assert result.lengths.tolist() == [3, 0, 180]
        with pytest.raises(ValueError, match=r"values must lie on one device, got cpu at 3 and cuda:\d at 0"):
            sequences_of("values", [*values, values[0].cpu()])
        with pytest.raises(TypeError, match="values must have one dtype"):
            sequences_of("values", [*values, values[0].half()])
        # Transposed tensors are copied first.
        assert sequences_of("values", [*values, values[2][:128].T]).known_addresses is None


@pytest.mark.parametrize("n_queries", [1, 3])
def test_rows_that_are_not_contiguous_are_copied_for_as_long_as_they_are_read(n_queries: int) -> None:
    queries = unit(n_queries, 32, 128, dtype=torch.bfloat16)
    documents = lists([180, 3, 0, 1000, *[300] * 50], 128, torch.bfloat16)
    wide = [torch.cat([document, document], dim=1)[:, :128] for document in documents]
    expected = maxsim_ragged(queries, documents)
    for _ in range(5):
        assert torch.equal(maxsim_ragged(queries, wide), expected)


@pytest.mark.parametrize("shift", [0, 1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_queries", [1, 3, 16])
@pytest.mark.parametrize("longest", [300, 9000])
def test_the_bits_are_those_of_packed_documents(
    n_queries: int, longest: int, dtype: torch.dtype, shift: int, units: list[int]
) -> None:
    """With every kernel, whole and in segments; unaligned documents use the kernel that takes any address."""
    queries = lists([32] * n_queries, 128, dtype)
    documents = lists([180, 0, longest, 7, 64] * 40, 128, dtype, shift)
    (q, q_bounds), (d, d_bounds) = pack(queries), pack(documents)
    actual = maxsim_ragged(queries, documents)
    expected = maxsim_varlen(q, d, q_bounds, d_bounds, max_query_length=32, max_document_length=longest)
    unit_of_16_bytes = 16 // dtype.itemsize
    assert units == [unit_of_16_bytes if shift * dtype.itemsize % 16 == 0 else 1]
    if units == [1]:
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
    else:
        assert torch.equal(actual, expected)


def test_pairs_and_candidates(units: list[int]) -> None:
    queries, documents = lists([5, 32, 9], 96, torch.bfloat16), lists([180, 33, 7], 96, torch.bfloat16)
    every = maxsim_ragged(queries, documents)
    torch.testing.assert_close(maxsim_ragged_pairwise(queries, documents), every.diagonal(), rtol=2e-6, atol=2e-6)
    candidates = torch.tensor([0, 2, 2, 3])
    result = maxsim_ragged(queries, documents, candidates_cu_seqlens=candidates)
    torch.testing.assert_close(result, torch.stack([every[0, 0], every[0, 1], every[2, 2]]), rtol=2e-6, atol=2e-6)
    assert units == [8] * 3


def test_documents_on_the_host_go_to_the_gpu_in_one_copy() -> None:
    """Tensors and arrays; a gradient flows back to the host."""
    queries = lists([32, 7], 128, torch.float32)
    documents = [t.cpu() for t in lists([180, 0, 33], 128, torch.float32)]
    expected = maxsim_ragged(queries, [t.cuda() for t in documents])
    for sources in (documents, [t.numpy() for t in documents]):
        actual = maxsim_ragged(queries, sources)
        assert actual.is_cuda
        torch.testing.assert_close(actual, expected)
    documents[0].requires_grad_()
    maxsim_ragged(queries, documents).sum().backward()
    assert documents[0].grad is not None
    assert documents[0].grad.abs().sum() > 0


def test_a_list_of_two_devices_is_refused() -> None:
    queries, (first, second) = lists([5], 128, torch.bfloat16), lists([180, 33], 128, torch.bfloat16)
    for documents in ([first, second.cpu()], [first.cpu(), second]):
        with pytest.raises(ValueError, match="documents must lie on one device, got"):
            maxsim_ragged(queries, documents)
    with pytest.raises(ValueError, match="documents must be on the device of queries, cpu, got cuda"):
        maxsim_ragged([t.cpu() for t in queries], [first, second])


@pytest.mark.parametrize("lengths", [[32] * 4, [32, 7, 0, 9], [5]])
@pytest.mark.parametrize("where", ["on the GPU", "on the host"])
def test_no_call_waits(lengths: list[int], where: str) -> None:
    queries, documents = lists(lengths, 128, torch.bfloat16), lists([180, 7, 64] * 20, 128, torch.bfloat16)
    expected = maxsim_ragged(queries, documents)
    if where == "on the host":
        documents = [t.cpu() for t in documents]
    with no_waiting():
        actual = maxsim_ragged(queries, documents)
        pairs = maxsim_ragged_pairwise(queries, documents[: len(queries)])
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(pairs, expected.diagonal(), rtol=2e-6, atol=2e-6)


def test_explain_says_where_they_are_read() -> None:
    queries, documents = lists([32, 7], 128, torch.bfloat16), lists([180, 7, 64], 128, torch.bfloat16)
    explanation = explain(queries, documents)
    assert explanation.implementation == "triton"
    assert explanation.lists == "read where they lie"
    on_host = explain(queries, [t.cpu() for t in documents])
    assert on_host.lists == "packed, because they lie on another device than the queries"
    assert on_host.forward is not None
    assert explanation.forward is not None
    assert on_host.forward.kernel == explanation.forward.kernel
