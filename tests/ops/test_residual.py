"""`ResidualCodes` and `maxsim_residual` against the definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pylate_flash import ResidualCodes, maxsim, maxsim_residual, maxsim_varlen
from pylate_flash.ops import products, residual_codes
from pylate_flash.ops.residual import maxsim_residual_reference
from tests.ops.cases import mistakes, relative_error, wrong
from tests.ops.residual_cases import residual_codes as codes_of
from tests.ops.residual_cases import residual_gradient

CLOSE = {"rtol": 2e-6, "atol": 2e-6, "equal_nan": True}
FIELDS = ("codes", "residuals", "centroids", "bucket_weights", "cu_seqlens", "scales")


def element_by_element(documents: ResidualCodes) -> torch.Tensor:
    """Decompress codes in float64, bit by bit."""
    rows = []
    for code, packed in zip(documents.codes.tolist(), documents.residuals.tolist(), strict=True):
        bits = "".join(f"{byte:08b}" for byte in packed)
        indices = [int(bits[i : i + documents.nbits], 2) for i in range(0, len(bits), documents.nbits)]
        row = documents.centroids[code] + documents.bucket_weights[indices]
        rows.append(row.double() / row.double().norm())
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("nbits", [2, 4])
def test_decompressed_as_the_bits_say(nbits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = codes_of([3, 0, 5], 24, nbits, dtype)
    expected = element_by_element(documents)
    # Both with a block of two tokens, and with all at once.
    for step in (48, 1 << 20):
        monkeypatch.setattr(residual_codes, "_ELEMENTS_AT_ONCE", step)
        again = replace(documents, scales=None)
        torch.testing.assert_close(again.decompress(torch.float64), expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(again.decompress().double(), expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(again.decompress(torch.bfloat16), again.decompress().bfloat16())
    assert documents.nbits == nbits
    assert documents.size == 24
    assert documents.n_documents == 3


def test_a_token_of_zeros_stays_one() -> None:
    documents = ResidualCodes(
        torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.uint8), torch.ones(1, 8), -torch.ones(4),
        torch.tensor([0, 1]),
    )  # fmt: skip
    assert torch.equal(documents.decompress(), torch.zeros(1, 8))


def test_the_definition_is_maxsim_of_what_is_decompressed() -> None:
    queries, documents = torch.randn(3, 5, 8, dtype=torch.float64), codes_of([4, 0, 9], 8, 4)
    bounds = torch.tensor([0, 5, 10, 15])
    expected = maxsim_varlen(
        queries.flatten(0, 1), documents.decompress(torch.float64), bounds, documents.cu_seqlens, empty_score=-2.0
    )
    actual = maxsim_residual_reference(queries, documents, empty_score=-2.0)
    torch.testing.assert_close(actual, expected)
    candidates = torch.tensor([[2, 0], [-1, 1], [0, 0]])
    actual = maxsim_residual_reference(queries, documents, candidates=candidates, empty_score=-2.0)
    assert actual[1].tolist() == [-2.0, -2.0]
    clamped = candidates.clamp(min=0)
    torch.testing.assert_close(actual[[0, 2]], expected.gather(1, clamped)[[0, 2]])


@pytest.mark.parametrize("with_candidates", [False, True])
def test_several_blocks_of_documents(with_candidates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    queries, documents = torch.randn(3, 5, 16), codes_of([20, 0, 3, 17, 40], 16, 2)
    options = {"queries_mask": torch.rand(3, 5), "empty_score": -1.0}
    if with_candidates:
        options["candidates"] = torch.tensor([[4, 0, -1], [1, 1, 2], [3, 4, 3]])
    expected = maxsim_residual_reference(queries, documents, **options)
    gradient = residual_gradient(maxsim_residual_reference, queries, documents, options)
    for block in (1, 80, 1 << 20):
        monkeypatch.setattr(products, "_BLOCK_CPU", block)
        torch.testing.assert_close(maxsim_residual(queries, documents, **options).double(), expected, **CLOSE)
        assert relative_error(residual_gradient(maxsim_residual, queries, documents, options), gradient) <= 1e-5


@pytest.mark.parametrize(("lengths", "n_queries"), [([], 2), ([0, 0], 2), ([3, 4], 0)])
def test_nothing_to_score(lengths: list[int], n_queries: int) -> None:
    queries, documents = torch.ones(n_queries, 3, 8, requires_grad=True), codes_of(lengths, 8, 4)
    result = maxsim_residual(queries, documents, empty_score=-7.0, reduction="mean")
    assert torch.equal(result, torch.full((n_queries, len(lengths)), -7.0))
    result.sum().backward()
    assert torch.equal(queries.grad, torch.zeros_like(queries))
    none = torch.full((n_queries, 2), -1)
    assert torch.equal(maxsim_residual(queries, documents, candidates=none, empty_score=-7.0), none * 7.0)
    assert maxsim_residual(queries, documents, candidates=none[:, :0]).shape == (n_queries, 0)


def test_a_query_token_that_is_not_a_number() -> None:
    queries, documents = torch.randn(2, 3, 8), codes_of([4, 0], 8, 4)
    queries[1, 1, 2] = torch.nan
    assert maxsim_residual(queries, documents).isnan().tolist() == [[False, False], [True, False]]
    mask = ~queries.isnan().any(dim=-1)
    assert not maxsim_residual(queries, documents, queries_mask=mask).isnan().any()


def changed(**tensors: torch.Tensor) -> ResidualCodes:
    return replace(codes_of([2, 1], 8, 4), **tensors)


QUERIES = torch.ones(2, 3, 8)


test_one_error_for_each_mistake = mistakes(
    wrong(ValueError, "codes must be from 0 to 6, the last of centroids, got -1 to 2",
          changed, codes=torch.tensor([0, -1, 2], dtype=torch.int32)),
    wrong(ValueError, r"bucket_weights must have shape \[4\] or \[16\], got \[8\]",
          changed, bucket_weights=torch.ones(8).half()),
    wrong(ValueError, "centroids must have an embedding size that is a multiple of 8, got 7",
          changed, centroids=torch.zeros(7, 7).half()),
    wrong(ValueError, "cu_seqlens must rise from 0 to .* 3, got 0 to", changed, cu_seqlens=torch.tensor([0, 2])),
    wrong(ValueError, r"scales must have shape \[3\], got \[2\]", changed, scales=torch.ones(2)),
    wrong(ValueError, "centroids must not require a gradient",
          changed, centroids=torch.zeros(7, 8, dtype=torch.float16, requires_grad=True)),
    wrong(TypeError, "dtype must be a floating torch.dtype", changed().decompress, torch.int8),
    wrong(TypeError, "documents must be ResidualCodes", maxsim_residual, QUERIES, torch.ones(2, 3, 8)),
    wrong(TypeError, "documents must be a torch.Tensor, got ResidualCodes", maxsim, QUERIES, changed()),
    wrong(ValueError, "precision must be one of 'int8', 'full', got 'half'",
          maxsim_residual, QUERIES, changed(), precision="half"),
    wrong(ValueError, "queries_mask must hold only 0",
          maxsim_residual, QUERIES, changed(), queries_mask=torch.full((2, 3), 2)),
    wrong(ValueError, "candidates must hold numbers of documents from 0 to 1, or -1 for none, got 0 to 2",
          maxsim_residual, QUERIES, changed(), candidates=torch.tensor([[0], [2]])),
    wrong(ValueError, "candidates must have one row per query, Nq = 2",
          maxsim_residual, QUERIES, changed(), candidates=torch.tensor([[0, 1]])),
)  # fmt: skip
