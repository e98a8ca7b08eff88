"""float32 in pairs of float16 on a Hopper GPU, against the definition in float64 on the same inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pylate_flash import explain, maxsim
from pylate_flash.ops import maxsim_varlen
from tests.gpu.test_varlen import STREAMS
from tests.gpu.tools import CAPABILITY, of_scale, products_in, random_mask, unit, with_infinities

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY[0] != 9, reason="the kernel is for compute capability 9.0"),
]
# One query, tiles of 64, 128 and 256 rows, several tiles, and queries whose rows end within a tile.
QUERIES = [(1, 32), (3, 32), (5, 77), (70, 1), (32, 32)]
# Two or four elements per lane of a warp, with and without padding.
SIZES = [4, 40, 64, 100, 128]


def assert_scores(queries: Tensor, documents: Tensor, **options: Any) -> None:
    """Check that scores are reproducible, and equal the definition's within 22 bits of the largest score."""
    plan_options = {name: value for name, value in options.items() if name != "empty_score"}
    assert explain(queries, documents, **plan_options).forward.config.pairs
    actual = maxsim(queries, documents, **options)
    for _ in range(10):
        torch.testing.assert_close(maxsim(queries, documents, **options), actual, rtol=0.0, atol=0.0, equal_nan=True)
    expected = maxsim(queries.double(), documents.double(), **options, implementation="blocked")
    largest = expected.abs().nan_to_num(0.0, 0.0, 0.0).amax(dim=1, keepdim=True)
    divided = largest.where(largest > 0, 1.0)
    torch.testing.assert_close(actual.double() / divided, expected / divided, rtol=0.0, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("lengths", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("n_queries", "query_length"), QUERIES)
@pytest.mark.parametrize("normalize", [False, True])
def test_packed(lengths: list[int], size: int, n_queries: int, query_length: int, normalize: bool) -> None:
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    documents, queries = unit(max(1, int(bounds[-1])), size), unit(n_queries * query_length, size, seed=1)
    # Similarities of both signs, and negative ones only.
    documents[::3] = -queries[: len(documents[::3])].sum(dim=0) / query_length
    documents[len(documents) // 2, 3] = torch.nan
    query_bounds = torch.arange(n_queries + 1, device="cuda", dtype=torch.int32) * query_length
    options = {"normalize": normalize, "max_query_length": query_length, "max_document_length": max(1, *lengths)}
    cu_seqlens = {"queries_cu_seqlens": query_bounds, "documents_cu_seqlens": bounds}
    assert explain(queries, documents, **cu_seqlens, **options).forward.config.pairs
    options["empty_score"] = -2.0
    actual = maxsim_varlen(queries, documents, query_bounds, bounds, **options)
    for _ in range(20):
        again = maxsim_varlen(queries, documents, query_bounds, bounds, **options)
        torch.testing.assert_close(again, actual, rtol=0.0, atol=0.0, equal_nan=True)
    double = queries.double(), documents.double(), query_bounds, bounds
    expected = maxsim_varlen(*double, **options, implementation="blocked")
    # Similarities of about the largest norm may cancel.
    largest = documents.double().norm(dim=1).nan_to_num(0.0).max().clamp(min=1.0).item()
    atol = query_length * largest * 2**-21
    torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=atol, equal_nan=True)
    assert (actual[:, bounds.diff() == 0] == -2.0).all()


@pytest.mark.parametrize("shape", [(9000, 1), (500, 65), (20, 1000)], ids=str)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("n_queries", [1, 2, 33])
@pytest.mark.parametrize("masking", [None, "exclude", "zero"])
@pytest.mark.parametrize("own", [False, True])
def test_padded(shape: tuple[int, int], size: int, n_queries: int, masking: str | None, own: bool) -> None:
    documents = unit(*((n_queries,) if own else ()), *shape, size)
    options: dict[str, Any] = {"empty_score": -2.0}
    if masking is not None:
        mask = random_mask(tuple(documents.shape[:-1]))
        mask[..., 0, :] = False
        options |= {"documents_mask": mask, "masking": masking, "queries_mask": random_mask((n_queries, 32))}
    assert_scores(unit(n_queries, 32, size, seed=1), documents, **options)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("scale", ["large", "small", "of each token", "of each element"])
@pytest.mark.parametrize("normalize", [False, True])
def test_of_any_scale(size: int, scale: str, normalize: bool) -> None:
    assert_scores(*of_scale(scale, size, normalize), normalize=normalize)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("n_queries", [1, 3, 32])
def test_bits_do_not_depend_on_other_documents(size: int, n_queries: int) -> None:
    queries, documents = unit(n_queries, 32, size, seed=1), unit(400, 5, size)
    changed = documents.clone()
    changed[1::2] *= 1e20
    changed[3::8] = torch.inf
    assert torch.equal(maxsim(queries, changed)[:, ::2], maxsim(queries, documents)[:, ::2])


@pytest.mark.parametrize("size", [48, 128])
@pytest.mark.parametrize(("n_queries", "query_length"), [(1, 32), (1, 80), (3, 32), (32, 32)])
def test_bits_do_not_depend_on_the_number_of_documents(size: int, n_queries: int, query_length: int) -> None:
    """As when an index is scored block by block."""
    queries, documents = unit(n_queries, query_length, size, seed=1), unit(4000, 50, size)
    scores = maxsim(queries, documents)
    for first, last in ((0, 1), (1, 8), (1000, 1300), (8, 4000)):
        assert torch.equal(maxsim(queries, documents[first:last]), scores[:, first:last])


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("infinite", ["queries", "documents", "both"])
def test_infinities(size: int, infinite: str) -> None:
    """Products with 0 and sums of both signs are NaN; all other scores are as infinite as in the definition."""
    assert_scores(*with_infinities(infinite, size))


@pytest.mark.parametrize("size", [68, 128])
@pytest.mark.parametrize(("n_queries", "query_length"), [(3, 32), (5, 77), (30, 32)])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("masking", [None, "exclude", "zero"])
def test_where_products_may_be_of_tf32(
    size: int, n_queries: int, query_length: int, normalize: bool, masking: str | None
) -> None:
    """Both operands of a product have 11 bits, and a score does not depend on other documents."""
    queries, documents = unit(n_queries, query_length, size, seed=1), unit(700, 90, size)
    scales = 10.0 ** torch.randint(-15, 15, (700, 90, 1), device="cuda") if normalize else 1.0
    options: dict[str, Any] = {"normalize": normalize}
    if masking is not None:
        options |= {"documents_mask": random_mask((700, 90)), "masking": masking}
    scaled = documents * scales
    expected = maxsim(queries.double(), scaled.double(), **options, implementation="blocked")
    with products_in("high"):
        assert explain(queries, scaled, **options).forward.config.pairs
        actual = maxsim(queries, scaled, **options)
        assert torch.equal(maxsim(queries, scaled, **options), actual)
        if masking is None:
            assert torch.equal(maxsim(queries, scaled[5:50], **options), actual[:, 5:50])
    torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=1.01 * query_length * 2.0**-10)
    assert (actual - maxsim(queries, scaled, **options)).abs().max() > 0.0
