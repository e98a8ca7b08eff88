"""float32 split into float16 parts: products of the parts equal those of the embeddings, within their 22 bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash.kernels.decompose import decompose
from pylate_flash.kernels.rows import norms_of
from pylate_flash.problem import rounded_total


def similarities(queries: torch.Tensor, documents: torch.Tensor, parts: int, normalize: bool = False) -> torch.Tensor:
    size = parts * (-(-queries.shape[-1] // 8) * 8)
    norms = norms_of(queries, documents) if normalize else None
    query_parts, document_parts, scales = decompose(queries, documents, size, norms)
    assert query_parts.dtype == document_parts.dtype == torch.float16
    assert (query_parts.shape, document_parts.shape) == ((*queries.shape[:-1], size), (*documents.shape[:-1], size))
    products = torch.einsum("qsd,ntd->qnst", query_parts.double(), document_parts.double())
    return products * scales.queries.double()[:, None, :, None] * scales.documents.double()[None, :, None, :]


@settings(max_examples=30)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.integers(1, 5), st.sampled_from([1, 7, 8, 40, 100]),
    st.sampled_from([1, 3]), st.booleans(), st.booleans(), st.sampled_from([0.0, 3.0, 15.0]),
)  # fmt: skip
def test_similarities(n_queries, query_length, n, length, size, parts, normalize, transposed, spread) -> None:
    generator = torch.Generator().manual_seed(size)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, size, generator=generator)
        # Norms are above the lower limit of normalization, and their squares are in float32's range.
        values *= torch.exp2((spread * torch.randn(*shape, 1, generator=generator)).clamp(-30.0, 45.0))
        return values.transpose(0, 1).contiguous().transpose(0, 1) if transposed else values

    queries, documents = draw(n_queries, query_length), draw(n, length)
    actual = similarities(queries, documents, parts, normalize)
    wide = queries.double(), documents.double()
    norms = [tensor.norm(dim=-1) for tensor in wide]
    largest = norms[0][:, None, :, None] * norms[1][None, :, None, :]
    expected = torch.einsum("qsd,ntd->qnst", *wide) / (largest if normalize else 1.0)
    # Each of two elements is rounded to 22 bits, or to 11.
    bound = 2.0**-20 if parts == 3 else 2.0**-10
    assert ((actual - expected).abs() <= bound * (1.0 if normalize else largest)).all()


@pytest.mark.parametrize("parts", [1, 3])
def test_infinite_elements_and_rows_of_zeros(parts: int) -> None:
    queries, documents = torch.randn(1, 3, 16), torch.randn(1, 4, 16)
    queries[0, 1, 3], documents[0, 0, 5] = torch.inf, -torch.inf
    documents[0, 1], documents[0, 2, 7], queries[0, 2] = 0.0, torch.nan, 1e-38
    actual = similarities(queries, documents, parts)
    expected = torch.einsum("qsd,ntd->qnst", queries.double(), documents.double())
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.isposinf(), expected.isposinf())
    assert (actual[0, 0, 0, 1], actual[0, 0, 2, 1]) == (0.0, 0.0)


def test_another_total_than_that_of_the_tensor() -> None:
    """As many rows of packed documents are split as cu_seqlens says: fewer than memory is allocated for."""
    queries, documents = torch.randn(2, 3, 16), torch.randn(100, 16)
    assert rounded_total(99) == rounded_total(100) == 100
    cu_seqlens = torch.tensor([0, 40, 100])
    _, expected, scales = decompose(queries, documents, 48)
    _, result, result_scales = decompose(queries, documents[:99], 48, None, cu_seqlens)
    assert torch.equal(result, expected)
    assert torch.equal(result_scales.documents, scales.documents)
