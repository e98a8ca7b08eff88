"""float32 that is split into float16 parts before the kernel, against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pylate_flash import explain, maxsim
from pylate_flash.kernels import tables
from pylate_flash.ops import maxsim_varlen
from tests.gpu.test_varlen import STREAMS
from tests.gpu.tools import CAPABILITY, of_scale, products_in, random_mask, unit, with_infinities
from tests.ops.cases import relative_error

pytestmark = pytest.mark.gpu
ON_HOPPER = CAPABILITY[0] == 9
# Some rows of a tile, several tiles, and queries whose rows end within a tile.
QUERIES = [(3, 32), (5, 77), (70, 1), (32, 32)]
# Embeddings with padding in one half or in all; in one block, and in several, whose sums are added up.
SIZES = [132, 192, 210, 320, 768, 1360]


@pytest.fixture(params=["here", "before Hopper"] if ON_HOPPER else ["here"])
def on_hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the Hopper kernel serves; on a Hopper GPU, the plans of an earlier one are tested as well."""
    if request.param == "here":
        return ON_HOPPER
    sms = tables.architecture(torch.device("cuda", 0))[1]
    monkeypatch.setattr(tables, "architecture", lambda device: (8, sms))
    return False


def assert_scores(queries: Tensor, documents: Tensor, **options: Any) -> None:
    """Check that scores are reproducible, and equal the definition's within 22 bits of the largest score."""
    plan_options = {name: value for name, value in options.items() if name != "empty_score"}
    assert explain(queries, documents, **plan_options).forward.decomposed is not None
    actual = maxsim(queries, documents, **options)
    for _ in range(5):
        torch.testing.assert_close(maxsim(queries, documents, **options), actual, rtol=0.0, atol=0.0, equal_nan=True)
    expected = maxsim(queries.double(), documents.double(), **options, implementation="blocked")
    largest = expected.abs().nan_to_num(0.0, 0.0, 0.0).amax(dim=1, keepdim=True)
    # Sums may cancel, so divide by at least five standard deviations of a random similarity.
    divided = largest.clamp(min=5 / queries.shape[-1] ** 0.5).where(largest > 0, 1.0)
    torch.testing.assert_close(actual.double() / divided, expected / divided, rtol=0.0, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("length", [1, 70, 180, 300])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("n_queries", "query_length"), QUERIES)
def test_padded(n_queries: int, query_length: int, size: int, length: int) -> None:
    documents = unit(40, length, size)
    documents[3, length // 2, -1] = torch.nan
    documents[4] = 0.0
    assert_scores(unit(n_queries, query_length, size, seed=1), documents)


@pytest.mark.parametrize("size", [210, 320, 768])
@pytest.mark.parametrize("masking", ["exclude", "zero"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_masks_and_norms(size: int, masking: str, normalize: bool, own: bool, on_hopper: bool) -> None:
    documents = (3 if normalize else 1) * unit(*((6,) if own else ()), 30, 300, size)
    mask = random_mask(tuple(documents.shape[:-1]))
    mask[..., 0, :] = False
    options: dict[str, Any] = {"documents_mask": mask, "queries_mask": random_mask((6, 80)), "masking": masking}
    options["empty_score"] = -2.0
    assert_scores(unit(6, 80, size, seed=1), documents, normalize=normalize, **options)


@pytest.mark.parametrize("lengths", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize("size", [210, 320])
@pytest.mark.parametrize("normalize", [False, True])
def test_packed(lengths: list[int], size: int, normalize: bool, on_hopper: bool) -> None:
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    query_bounds = torch.arange(6, device="cuda", dtype=torch.int32) * 77
    documents, queries = unit(max(1, int(bounds[-1])), size), unit(5 * 77, size, seed=1)
    options: dict[str, Any] = {"normalize": normalize, "max_query_length": 77, "max_document_length": max(1, *lengths)}
    cu_seqlens = {"queries_cu_seqlens": query_bounds, "documents_cu_seqlens": bounds}
    assert explain(queries, documents, **cu_seqlens, **options).forward.decomposed is not None
    actual = maxsim_varlen(queries, documents, query_bounds, bounds, **options, empty_score=-2.0)
    double = queries.double(), documents.double(), query_bounds, bounds
    expected = maxsim_varlen(*double, **options, empty_score=-2.0, implementation="blocked")
    torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=77 * 2.0**-21)
    assert (actual[:, bounds.diff() == 0] == -2.0).all()


def test_documents_apart_from_each_other(on_hopper: bool) -> None:
    """Neither side is contiguous, and rows do not begin at multiples of 16 bytes."""
    queries, documents = unit(8, 2, 40, 212, seed=1)[:, 1, 3:, 1:211], unit(30, 3, 90, 212)[:, 1, :, 1:211]
    assert_scores(queries, documents)


def far_from_ties(queries: Tensor, documents: Tensor) -> Tensor:
    """Mask [Nq, Lq] of query tokens whose two best similarities differ by more than rounding in every document."""
    similarities = torch.einsum("qsd,ntd->qnst", queries.double(), documents.double())
    best = similarities.topk(2).values
    return (best[..., 0] - best[..., 1] > 1e-5).all(dim=1)


@pytest.mark.parametrize("size", [48, 128, 210, 320, 768])
@pytest.mark.parametrize(("n_queries", "query_length"), [(5, 32), (5, 77), (32, 32)])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_gradients(
    n_queries: int, query_length: int, size: int, normalize: bool, precision: str, on_hopper: bool
) -> None:
    """Any size, as no kernel computes the argmax of pairs; tokens are far from ties, in 22 bits or in 11."""
    queries, documents = unit(n_queries, query_length, size, seed=1), unit(50, 90, size)
    mask = random_mask((50, 90))
    clear = far_from_ties(queries, documents * mask[..., None])
    if precision == "high":
        # A token of each document is close to one of the first query.
        documents[:, :query_length] = queries[0] + 0.25 * documents[:, :query_length]
        mask[:, :query_length], clear = True, torch.zeros_like(clear)
        clear[0] = True
    leaves = [x.clone().requires_grad_() for x in (queries, documents)]
    options: dict[str, Any] = {"queries_mask": clear, "documents_mask": mask, "normalize": normalize}
    weights = torch.rand(n_queries, 50, device="cuda")
    with products_in(precision):
        # TF32 products are served by the plain kernels.
        assert (explain(*leaves, **options).forward.decomposed is None) == (precision == "high" and not on_hopper)
        actual = torch.autograd.grad(maxsim(*leaves, **options), leaves, weights)
    double = [x.detach().double().requires_grad_() for x in leaves]
    scores = maxsim(*double, **options, implementation="blocked")
    expected = torch.autograd.grad(scores, double, weights.double())
    for gradient, reference in zip(actual, expected, strict=True):
        assert relative_error(gradient, reference) < 1e-5


@pytest.mark.parametrize("size", [192, 320])
@pytest.mark.parametrize("scale", ["large", "small", "of each token", "of each element"])
@pytest.mark.parametrize("normalize", [False, True])
def test_of_any_scale(size: int, scale: str, normalize: bool, on_hopper: bool) -> None:
    assert_scores(*of_scale(scale, size, normalize), normalize=normalize)


@pytest.mark.parametrize("size", [192, 320])
@pytest.mark.parametrize("infinite", ["queries", "documents", "both"])
def test_infinities(size: int, infinite: str, on_hopper: bool) -> None:
    """Products with 0 and sums of both signs are NaN; all other scores are as infinite as in the definition."""
    assert_scores(*with_infinities(infinite, size))


@pytest.mark.parametrize("size", [128, 192, 320])
@pytest.mark.parametrize(("n_queries", "query_length"), [(3, 50), (32, 32), (128, 32)])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_bits_do_not_depend_on_other_documents(size: int, n_queries: int, query_length: int, precision: str) -> None:
    """Neither on their number nor on their values, as when an index is scored block by block."""
    queries, documents = unit(n_queries, query_length, size, seed=1), unit(1000, 50, size)
    changed = documents.clone()
    changed[1::2] *= 1e20
    changed[3::8] = torch.inf
    with products_in(precision):
        scores = maxsim(queries, documents)
        assert torch.equal(maxsim(queries, changed)[:, ::2], scores[:, ::2])
        for first, last in ((0, 1), (1, 8), (100, 300), (8, 1000)):
            assert torch.equal(maxsim(queries, documents[first:last]), scores[:, first:last])
    expected = maxsim(queries.double(), documents.double(), implementation="blocked")
    tolerance = query_length * (2.0**-21 if precision == "highest" else 1.01 * 2.0**-10)
    torch.testing.assert_close(scores.double(), expected, rtol=0.0, atol=tolerance)
