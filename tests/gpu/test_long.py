"""Long embeddings, which the Hopper kernel processes in blocks, against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pylate_flash import explain, maxsim
from pylate_flash.kernels import plan
from pylate_flash.ops import maxsim_ragged, maxsim_varlen
from pylate_flash.ops.operator import repeated
from tests.gpu.tools import CAPABILITY, HALF, exact, random_mask, unit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY[0] != 9, reason="the kernel is for compute capability 9.0"),
]
# Several blocks, a last block with padding, several sums of blocks, and a last sum of one block with padding.
SIZES = [392, 512, 1024, 1048, 2048, 3080, 4096]
# A partly filled tile of rows, several tiles, queries whose rows end within a tile, and rows that are sums themselves.
QUERIES = [(1, 32), (3, 32), (32, 32), (5, 77), (1, 129), (70, 1)]
# Document lengths: none, one, a product of half a tile, a full tile, one more, two tiles, two and a half.
LENGTHS = [256, 0, 1, 128, 129, 257, 512, 640, 0, 3, 70]


def assert_close(actual: Tensor, expected: Tensor, size: int) -> None:
    """Within 2e-6 of the largest score, or of five standard deviations of a random similarity if sums cancel."""
    largest = expected.abs().nan_to_num(0.0, 0.0, 0.0).amax(dim=1, keepdim=True)
    divided = largest.clamp(min=5 / size**0.5)
    torch.testing.assert_close(actual.double() / divided, expected / divided, rtol=0.0, atol=2e-6, equal_nan=True)


def assert_scores(queries: Tensor, documents: Tensor, **options: Any) -> None:
    """Check that scores are reproducible, and equal the definition's."""
    plan = explain(queries, documents, **{k: v for k, v in options.items() if k != "empty_score"}).forward
    assert (plan.kernel, plan.config.blocks.split) == ("hopper", True)
    actual = maxsim(queries, documents, **options)
    for _ in range(5):
        torch.testing.assert_close(maxsim(queries, documents, **options), actual, rtol=0.0, atol=0.0, equal_nan=True)
    expected = maxsim(queries.double(), documents.double(), **options, implementation="blocked")
    assert_close(actual, expected, queries.shape[-1])


@pytest.mark.parametrize("length", [1, 70, 128, 256, 300, 513])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("n_queries", "query_length"), QUERIES)
def test_padded(n_queries: int, query_length: int, size: int, length: int) -> None:
    documents = unit(40, length, size, dtype=HALF)
    documents[3, length // 2, -1] = torch.nan
    documents[4] = 0.0
    documents[5, :, 7] = torch.inf
    assert_scores(unit(n_queries, query_length, size, dtype=HALF, seed=1), documents)


@pytest.mark.parametrize("dtype", [torch.float16, HALF])
@pytest.mark.parametrize("size", [520, 2048, 4096])
@pytest.mark.parametrize("masking", ["exclude", "zero"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_masks_and_norms(dtype: torch.dtype, size: int, masking: str, normalize: bool, own: bool) -> None:
    documents = 3 * unit(*((6,) if own else ()), 30, 300, size, dtype=dtype)
    mask = random_mask(tuple(documents.shape[:-1]))
    mask[..., 0, :] = False
    mask[..., 1, 100:] = False
    options = {"documents_mask": mask, "queries_mask": random_mask((6, 80)), "masking": masking, "empty_score": -2.0}
    assert_scores(unit(6, 80, size, dtype=dtype, seed=1), documents, normalize=normalize, **options)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("n_queries", "query_length"), QUERIES)
@pytest.mark.parametrize("normalize", [False, True])
def test_packed(n_queries: int, query_length: int, size: int, normalize: bool) -> None:
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    query_bounds = torch.arange(n_queries + 1, device="cuda", dtype=torch.int32) * query_length
    queries = unit(n_queries * query_length, size, dtype=HALF, seed=1)
    documents = unit(int(bounds[-1]), size, dtype=HALF)
    options = {"normalize": normalize, "empty_score": -2.0}
    options |= {"max_query_length": query_length, "max_document_length": max(LENGTHS)}
    result = maxsim_varlen(queries, documents, query_bounds, bounds, **options)
    double = queries.double(), documents.double(), query_bounds, bounds
    assert_close(result, maxsim_varlen(*double, **options, implementation="blocked"), size)
    assert (result[:, bounds.diff() == 0] == -2.0).all()


@pytest.mark.parametrize("size", [392, 1024, 2056])
@pytest.mark.parametrize(("n_queries", "query_length"), [(1, 32), (6, 80)])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("masking", [None, "exclude", "zero"])
@pytest.mark.parametrize("length", [1, 7, 65, 300])
def test_bits_of_documents_by_themselves(
    size: int, n_queries: int, query_length: int, normalize: bool, masking: str | None, length: int, monkeypatch
) -> None:
    """Equal documents have equal scores, whether they are a stream or not."""
    n_documents = 30_000 // length
    queries = unit(n_queries, query_length, size, dtype=HALF, seed=1)
    documents = 2 * unit(n_documents, length, size, dtype=HALF)
    mask = None if masking is None else random_mask((n_documents, length))
    options = {"documents_mask": mask, "masking": masking or "exclude", "normalize": normalize}
    streamed = n_queries > 1 or not normalize or length < 32
    assert explain(queries, documents, **options).forward.config.stream == streamed
    actual = maxsim(queries, documents, **options, empty_score=-2.0)
    expected = maxsim(queries.double(), documents.double(), **options, empty_score=-2.0, implementation="blocked")
    assert_close(actual, expected, size)
    repeated.forget()
    monkeypatch.setattr(plan, "is_streamed", lambda *_: False)
    alone = maxsim(queries, documents, **options, empty_score=-2.0)
    repeated.forget()
    # Without a stream, another kernel serves one query.
    if n_queries > 1 or not streamed:
        assert torch.equal(actual, alone)
    else:
        assert_close(alone, expected, size)


@pytest.mark.parametrize("size", [136, 192, 256, 384, 512, 2048])
@pytest.mark.parametrize("query_length", [1, 32, 64])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("length", [9, 180])
def test_short_queries(size: int, query_length: int, own: bool, length: int) -> None:
    """One query, or several with their own documents, padded, masked and packed."""
    groups, n_documents = 3 if own else 1, 90_000 // length
    queries = unit(groups, query_length, size, dtype=HALF, seed=1)
    documents = unit(*((groups,) if own else ()), n_documents, length, size, dtype=HALF)
    mask = random_mask(tuple(documents.shape[:-1]))
    for options in ({}, {"documents_mask": mask, "masking": "zero"}, {"documents_mask": mask}):
        on_hopper = explain(queries, documents, **options).forward.kernel == "hopper"
        assert on_hopper == (not own or size <= 384)
        actual = maxsim(queries, documents, **options, empty_score=-2.0)
        assert torch.equal(maxsim(queries, documents, **options, empty_score=-2.0), actual)
        expected = maxsim(queries.double(), documents.double(), **options, empty_score=-2.0, implementation="blocked")
        assert_close(actual, expected, size)
    if not own:
        bounds = torch.arange(n_documents + 1, device="cuda", dtype=torch.int32) * length
        query_bounds = torch.tensor([0, query_length], device="cuda", dtype=torch.int32)
        max_lengths = {"max_query_length": query_length, "max_document_length": length}
        packed = queries[0], documents.flatten(0, 1), query_bounds, bounds
        assert_close(maxsim_varlen(*packed, **max_lengths), maxsim(queries.double(), documents.double()), size)


@pytest.mark.parametrize("size", [392, 2048])
def test_lists(size: int) -> None:
    """Documents are read in place."""
    queries = [unit(length, size, dtype=HALF, seed=length) for length in (32, 20, 31, 7)]
    documents = [unit(length, size, dtype=HALF, seed=100 + length) for length in LENGTHS]
    result = maxsim_ragged(queries, documents)
    doubled = [[tensor.double() for tensor in side] for side in (queries, documents)]
    assert_close(result, maxsim_ragged(*doubled, implementation="blocked"), size)


@pytest.mark.parametrize("size", [392, 1024, 4096])
@pytest.mark.parametrize("length", [100, 256, 300, 1100])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients(size: int, length: int, masked: bool) -> None:
    """All sums are exact in every dtype: the first of equal tokens has the gradient, rounded only by its dtype."""
    queries, documents = exact(8, 40, size, dtype=HALF), exact(20, length, size, dtype=HALF, seed=1)
    # Many equal tokens, one in every part of a tile.
    documents[:, length // 2 :] = documents[:, : length - length // 2]
    mask = random_mask((20, length)) if masked else None
    upstream = exact(8, 20, dtype=torch.float32, seed=3)
    actual = []
    for dtype, implementation in ((HALF, "triton"), (torch.float64, "blocked")):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (queries, documents)]
        scores = maxsim(*inputs, documents_mask=mask, implementation=implementation)
        actual.append((scores, *torch.autograd.grad(scores, inputs, upstream.to(scores.dtype))))
    for ours, reference in zip(*actual, strict=True):
        assert torch.equal(ours, reference.to(ours.dtype))


def test_where_query_rows_begin_anywhere() -> None:
    memory, documents = unit(1, 8 * 32 * 512 + 8, dtype=HALF)[0], unit(40, 100, 512, dtype=HALF, seed=1)
    for offset in (1, 4, 8):
        queries = memory[offset : offset + 8 * 32 * 512].view(8, 32, 512)
        assert_scores(queries, documents)
    apart = unit(8, 2 * 32, 512, dtype=HALF, seed=2)[:, ::2]
    assert_scores(apart, documents)
    assert_scores(apart.transpose(0, 1), documents)


@pytest.mark.parametrize("with_argmax", [False, True])
def test_bits_do_not_depend_on_other_documents(with_argmax: bool) -> None:
    queries = unit(4, 32, 2048, dtype=HALF, seed=1).requires_grad_(with_argmax)
    documents = unit(60, 300, 2048, dtype=HALF)
    scores = maxsim(queries, documents)
    for first, last in ((0, 1), (1, 8), (20, 53)):
        assert torch.equal(maxsim(queries, documents[first:last]), scores[:, first:last])
