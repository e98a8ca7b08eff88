"""The product inside the blocked implementation, as a matrix product and as a convolution."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash import maxsim
from pylate_flash.ops import maxsim_reference, products
from pylate_flash.ops.products import inner_products

SIZES = [1, 3, 16, 37, 48, 128, 200]


@pytest.fixture(params=["always", "for large products", "never"])
def convolution(request, monkeypatch) -> str:
    """When products run as convolutions. The processor decides which are fast; all are correct everywhere."""
    if request.param == "always":
        monkeypatch.setattr(products, "_SMALL_PRODUCT", 0)
    monkeypatch.setattr(products, "_convolution_serves", lambda dtype: request.param != "never")
    return request.param


@contextmanager
def bfloat16_allowed(setting: str) -> Iterator[None]:
    """Allow bfloat16 in float32 products ("matmul") or convolutions ("conv") inside the context."""
    module = getattr(torch.backends.mkldnn, setting)
    before = module.fp32_precision
    module.fp32_precision = "bf16"
    try:
        yield
    finally:
        module.fp32_precision = before


def embeddings(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1)


def assert_exact(actual: torch.Tensor, documents: torch.Tensor, queries: torch.Tensor) -> None:
    """Check products in float32, summed in any order.

    A sum of d terms rounds d times, each time up or down, which adds up to about sqrt(d) units in the last place of
    the sum of the terms' absolute values (Higham and Mary, SIAM J. Sci. Comput. 41, 2019).
    """
    documents, queries = documents.double(), queries.double()
    expected, terms = documents @ queries.T, documents.abs() @ queries.abs().T
    assert torch.equal(actual.isnan(), expected.isnan())
    finite = expected.isfinite()
    assert torch.equal(actual[~finite].nan_to_num(), expected[~finite].float().nan_to_num())
    error = (actual.double() - expected).abs()[finite]
    assert (error <= (1 + documents.shape[1] ** 0.5) * 2**-24 * terms[finite]).all()


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 3000),
    rows=st.integers(1, 100),
    size=st.sampled_from(SIZES),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    spaced=st.booleans(),
)
def test_products_are_exact(tokens: int, rows: int, size: int, dtype: torch.dtype, spaced: bool) -> None:
    documents, queries = embeddings(tokens, size).to(dtype), embeddings(rows, size, seed=1).to(dtype)
    if spaced:
        documents = torch.cat([documents, documents], dim=1)[:, :size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_SMALL_PRODUCT", 0)
        result = inner_products(documents, queries)
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_exact(result, documents, queries)


@pytest.mark.parametrize("size", SIZES)
def test_nan_and_infinity_stay_in_their_rows(convolution: str, size: int) -> None:
    documents, queries = embeddings(4099, size), embeddings(96, size, seed=1)
    documents[7, size // 2] = torch.nan
    documents[-1, -1] = torch.inf
    queries[5, 0] = torch.nan
    assert_exact(inner_products(documents, queries), documents, queries)


def test_scores_and_their_repetition(convolution: str) -> None:
    """Large enough for several blocks, each with a large product."""
    queries, documents = embeddings(8, 32, 64), embeddings(60, 150, 64, seed=1)
    mask = torch.arange(150) < torch.arange(60).unsqueeze(1) * 3
    scores = maxsim(queries, documents, documents_mask=mask)
    expected = maxsim_reference(queries.double(), documents.double(), documents_mask=mask)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)
    assert all(torch.equal(maxsim(queries, documents, documents_mask=mask), scores) for _ in range(5))


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "conv"), reason="this torch has no such settings")
class TestSettings:
    """Torch settings for float32 on the CPU. Only a processor with AMX computes differently under them."""

    @pytest.mark.parametrize("setting", ["matmul", "conv"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_inputs_are_exact_under_each(self, monkeypatch, setting: str, dtype: torch.dtype) -> None:
        monkeypatch.setattr(products, "_SMALL_PRODUCT", 0)
        documents, queries = embeddings(4099, 128).to(dtype), embeddings(96, 128, seed=1).to(dtype)
        with bfloat16_allowed(setting):
            result = inner_products(documents, queries)
        assert_exact(result, documents, queries)

    def test_decide_between_convolution_and_matrix_product(self, monkeypatch) -> None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        serves = products._convolution_serves
        assert serves(torch.float32)
        with bfloat16_allowed("conv"):
            assert not serves(torch.float32)
            assert not serves(torch.float16)
        with bfloat16_allowed("matmul"):
            assert not serves(torch.float32)
            assert not serves(torch.bfloat16)
            assert serves(torch.float16)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert not serves(torch.float32)
