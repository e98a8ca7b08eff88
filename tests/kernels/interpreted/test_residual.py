"""Residual code kernels, run by Triton's interpreter, against the definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash import ResidualCodes, maxsim_residual
from pylate_flash.kernels import tables
from pylate_flash.kernels.forward import Codes, residual_forward
from pylate_flash.kernels.forward.codes import decompressed_embeddings
from pylate_flash.ops import kernel_calls
from pylate_flash.ops.residual import maxsim_residual_reference
from pylate_flash.problem import Options, Tensors, problem_of
from tests.kernels.interpreted.test_kernels import HALF_AND_FLOAT
from tests.ops.cases import relative_error
from tests.ops.residual_cases import check_8_bits, residual_cases, residual_codes, residual_gradient
from tests.ops.test_residual import CLOSE, FIELDS

# The interpreter multiplies and adds elements of bfloat16 as integers.
DTYPES = {"dtypes": HALF_AND_FLOAT, "codec_dtypes": HALF_AND_FLOAT}


def by_kernels(*arguments, **options) -> torch.Tensor:
    return maxsim_residual(*arguments, **options, precision="full", implementation="triton")


def check(queries: torch.Tensor, documents, options: dict, with_gradient: bool = True) -> None:
    actual = by_kernels(queries, documents, **options)
    torch.testing.assert_close(actual.double(), maxsim_residual_reference(queries, documents, **options), **CLOSE)
    if with_gradient:
        gradient = residual_gradient(by_kernels, queries, documents, options)
        expected = residual_gradient(maxsim_residual_reference, queries, documents, options)
        assert gradient.dtype == queries.dtype
        assert relative_error(gradient, expected) <= (1e-5 if queries.dtype == torch.float32 else 1e-2)


@settings(max_examples=12)
@given(case=residual_cases(**DTYPES), with_gradient=st.booleans())
def test_scores_and_gradients(case: tuple, with_gradient: bool) -> None:
    check(*case, with_gradient)


@pytest.mark.parametrize(
    ("shape", "lengths", "dtype"),
    [
        ((9, 33, 24), [150, 0, 70], torch.float16),  # two blocks of rows, three tiles of tokens, sums of 8 rows
        ((2, 5, 200), [40, 3], torch.float32),  # embeddings that are split into blocks
        ((1, 3, 8), [3] * 20, torch.float16),  # a program that walks several documents
        ((1, 3, 1032), [5], torch.float16),  # more products than one sum takes
    ],
)
@pytest.mark.parametrize("nbits", [2, 4])
def test_tile_boundaries(nbits: int, shape: tuple[int, ...], lengths: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    queries, documents = (
        torch.nn.functional.normalize(torch.randn(shape), dim=-1),
        residual_codes(lengths, shape[-1], nbits),
    )
    options = {"queries_mask": torch.rand(shape[:-1])}
    check(queries.to(dtype), documents, options)


def test_the_documents_of_a_gradient_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 2))
    queries, documents = torch.randn(1, 4, 8), residual_codes([3, 0, 5] * 6, 8, 4)
    check(queries, documents, {})
    candidates = torch.arange(-1, 17).view(1, 18)
    check(queries, documents, {"candidates": candidates, "reduction": "mean", "empty_score": -5.0})


def test_a_query_token_that_is_not_a_number() -> None:
    queries, documents = torch.randn(2, 3, 8), residual_codes([4, 0], 8, 4)
    queries[1, 1, 2] = torch.nan
    assert by_kernels(queries, documents).isnan().tolist() == [[False, False], [True, False]]


def test_masked_tokens_of_short_queries_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 1))
    queries, documents = torch.randn(2, 3, 64), residual_codes([4, 0, 9, 40], 64, 4)
    mask = torch.tensor([[True, False, True], [True, True, True]])
    expected = maxsim_residual(queries, documents, queries_mask=mask, implementation="triton")
    queries[0, 1, 5] = torch.nan
    assert torch.equal(maxsim_residual(queries, documents, queries_mask=mask, implementation="triton"), expected)


def test_ties_go_to_the_lowest_token() -> None:
    """Within a tile, and among all tiles."""
    codes = torch.zeros(150, dtype=torch.int32)
    codes[5], codes[[7, 37, 140]] = 1, 2
    centroids = torch.tensor([[-1.0, 0, 0], [1, 1, 0], [1, 0, 1]]).repeat_interleave(8, dim=1)
    residuals, bounds = torch.zeros(150, 12, dtype=torch.uint8), torch.tensor([0, 150])
    documents = ResidualCodes(codes, residuals, centroids, torch.zeros(16), bounds)
    queries = torch.eye(1, 24).view(1, 1, 24)
    gradient = residual_gradient(by_kernels, queries, documents, {})
    assert torch.equal(gradient[0, 0], documents.decompress()[5])


def test_residuals_that_begin_within_a_word() -> None:
    documents = residual_codes([4, 3], 8, 4)
    memory = torch.zeros(documents.residuals.numel() + 1, dtype=torch.uint8)
    moved = memory[1:].view_as(documents.residuals).copy_(documents.residuals)
    assert moved.data_ptr() % 4
    check(torch.randn(2, 3, 8), replace(documents, residuals=moved), {})


@pytest.mark.parametrize("nbits", [2, 4])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 32, 128), torch.float16), ((2, 13, 64), torch.float32), ((3, 20, 192), torch.float16),
        ((1, 9, 96), torch.float32), ((2, 9, 48), torch.float16),
    ],
)  # fmt: skip
def test_short_queries_in_8_bits(
    nbits: int, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents that end anywhere in a step, several or none in one, and candidates; with several programs."""
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 1))
    monkeypatch.setattr(tables, "SHORT_PER_SM", 2)
    monkeypatch.setattr(tables, "SMALLEST_SPLIT", 64)
    torch.manual_seed(0)
    documents = residual_codes([0, 5, 40, 0, 16, 33, 64, 1, 20, 0], shape[-1], nbits)
    queries = torch.nn.functional.normalize(torch.randn(shape), dim=-1).to(dtype)
    for options in (
        {},
        {"queries_mask": torch.rand(shape[:2]) > 0.4, "empty_score": -5.0},
        {"queries_mask": torch.rand(shape[:2]), "candidates": torch.arange(shape[0] * 9).view(-1, 9) % 11 - 1},
    ):
        result = maxsim_residual(queries, documents, **options, implementation="triton")
        assert torch.equal(maxsim_residual(queries, documents, **options, implementation="triton"), result)
        assert not torch.equal(result, by_kernels(queries, documents, **options))
        check_8_bits(result, queries, documents, options)


def test_bucket_weights_are_as_near_as_8_bits_come() -> None:
    """Weights of real embeddings, far apart at both ends: no worse than rounding in steps of 1/127 of the largest."""
    weights = [-0.0895, -0.0578, -0.0424, -0.0316, -0.0232, -0.0159, -0.0094, -0.0032]
    weights = torch.tensor([*weights, 0.0029, 0.0091, 0.0156, 0.0228, 0.0313, 0.0419, 0.0573, 0.0888])
    # Document i has weight i in each element, of which the query reads one.
    residuals = (torch.arange(16, dtype=torch.uint8) * 17).unsqueeze(1).expand(16, 32).contiguous()
    codes = torch.zeros(16, dtype=torch.int32)
    documents = ResidualCodes(codes, residuals, torch.zeros(1, 64), weights, torch.arange(17), torch.ones(16))
    scores = maxsim_residual(torch.eye(1, 64).unsqueeze(0), documents, implementation="triton")
    assert (scores[0] - weights).square().mean().sqrt() <= weights.abs().max() / 127 / 12**0.5


@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.integers(1, 20))
def test_more_codes_than_are_decompressed_at_a_time(lengths: list[int], most: int) -> None:
    """Blocks of several documents, of one that is longer, and of documents without tokens."""
    documents = residual_codes(lengths, 24, 2)
    queries = torch.nn.functional.normalize(torch.randn(3, 5, 24), dim=-1)
    options = {"queries_mask": torch.rand(3, 5), "empty_score": -5.0}
    expected, token_counts = by_kernels(queries, documents, **options), []

    def forward(problem, tensors, codes):
        token_counts.append(problem.n_tokens)
        return residual_forward(problem, tensors, codes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_calls, "decompressed_tokens", lambda *_: most)
        patch.setattr(kernel_calls, "residual_forward", forward)
        assert torch.equal(by_kernels(queries, documents, **options), expected)
    assert sum(token_counts) == sum(lengths)
    host_bounds = documents.cu_seqlens.numpy() + 7
    in_blocks = kernel_calls._blocks_of_documents
    assert in_blocks(documents.cu_seqlens, sum(lengths), most, host_bounds) == in_blocks(
        documents.cu_seqlens, sum(lengths), most, None
    )
    if most < sum(lengths):
        assert max(token_counts) < max(1, 3 * most // 4) + max(lengths)


@pytest.mark.parametrize("bounds", [[0, 4, 2, 9], [1, 4, 6, 9], [0, 4, 6, 8]])
def test_boundaries_of_blocks_are_checked(bounds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_calls, "decompressed_tokens", lambda *_: 5)
    documents = residual_codes([4, 2, 3], 24, 2)
    documents.cu_seqlens.copy_(torch.tensor(bounds))
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the number of codes, 9, got"):
        by_kernels(torch.randn(3, 5, 24), documents)


def test_short_queries_that_are_not_numbers_or_zero() -> None:
    queries, documents = torch.randn(3, 4, 64), residual_codes([20, 0, 9], 64, 4)
    queries[0, 2], queries[1, 1, 3] = 0.0, torch.nan
    result = maxsim_residual(queries, documents, implementation="triton")
    assert result.isnan().tolist() == [[False] * 3, [True, False, True], [False] * 3]
    check_8_bits(result[::2], queries[::2], documents, {})


@pytest.mark.parametrize(("nbits", "size"), [(4, 128), (2, 24)])
def test_codes_decompressed_to_memory(nbits: int, size: int) -> None:
    documents, queries = residual_codes([40, 0, 5], size, nbits), torch.zeros(1, 2, size).half()
    problem = problem_of(Tensors(queries, queries), Options())
    codes = Codes(*(getattr(documents, name) for name in FIELDS), None)
    assert torch.equal(decompressed_embeddings(problem, codes, nbits), documents.decompress(torch.float16))
