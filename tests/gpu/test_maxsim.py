"""The kernels on a GPU against the definition in float64, on the same, already rounded, inputs."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

from pylate_flash.ops import maxsim, maxsim_from_hidden, maxsim_pairwise, maxsim_reference
from pylate_flash.ops.compute import compute
from pylate_flash.problem import Options, Tensors
from tests.gpu.calls import STEPS
from tests.gpu.tools import DTYPES, HALF, check_large, memory_of, products_in, unit
from tests.ops.cases import Case, relative_error
from tests.ops.test_numbers import NEGATIVE, check_the_negative_bit

pytestmark = pytest.mark.gpu

SHAPES = [
    ((1, 32, 128), (100, 300, 128)),
    ((1, 128, 128), (50, 1024, 128)),
    ((1, 512, 128), (20, 1024, 128)),
    ((1, 1024, 128), (20, 1000, 128)),
    ((32, 32, 128), (64, 180, 128)),
    ((130, 33, 128), (70, 45, 128)),
    ((1, 32, 48), (100, 512, 48)),
    ((16, 32, 96), (16, 70, 96)),
    ((9, 20, 16), (8, 70, 16)),
    ((5, 70, 40), (9, 129, 40)),
    ((16, 32, 256), (16, 70, 256)),
    ((1, 256, 200), (7, 600, 200)),
    ((5, 32, 320), (40, 64, 320)),
    ((3, 77, 300), (20, 100, 300)),
    ((9, 40, 384), (20, 333, 384)),
    ((16, 32, 512), (16, 70, 512)),
    ((16, 32, 1000), (16, 150, 1000)),
    ((1, 32, 768), (50, 150, 768)),
    ((2, 200, 4096), (3, 150, 4096)),
    ((8, 32, 128), (8, 16, 300, 128)),
    ((4, 100, 128), (4, 5, 300, 128)),
    ((64, 1, 128), (64, 1, 128)),
]


def kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return maxsim(*tensors, **options, implementation="triton")


# `STEPS` have no float32: of their many maxima, some are so close to the next that its rounding decides.
@pytest.mark.parametrize(
    ("shapes", "normalize", "dtype"), [*product(SHAPES, [False], DTYPES), *product(STEPS, [False, True], DTYPES[:2])]
)
def test_shapes_in_use(shapes, normalize: bool, dtype: torch.dtype) -> None:
    embeddings = (unit(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    check_large(kernel, maxsim_reference, Case(*embeddings, None, None, {"normalize": normalize}))


@pytest.mark.parametrize("n_queries", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity(n_queries: int, dtype: torch.dtype) -> None:
    queries, documents = unit(n_queries, 20, 32, dtype=dtype), unit(4, 90, 32, dtype=dtype, seed=1)
    documents[0, 75, 1] = torch.nan
    documents[1, 2, 0] = torch.inf
    queries.requires_grad_()
    scores = kernel(queries, documents)
    expected = maxsim_reference(queries.detach(), documents)
    torch.testing.assert_close(scores.detach(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert scores[:, 0].isnan().all()
    assert scores[:, 1].isinf().all()
    (gradient,) = torch.autograd.grad(kernel(queries, documents[[0, 3]])[:, 0].sum(), queries)
    assert gradient[..., 1].isnan().all()
    assert gradient[..., 0].isfinite().all()


@pytest.mark.parametrize("n_queries", [1, 4])
def test_ties_go_to_the_lowest_index(n_queries: int) -> None:
    queries = unit(n_queries, 20, 32, dtype=HALF)
    documents = unit(3, 1, 32, dtype=HALF, seed=1).repeat(1, 150, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(kernel(queries, documents).sum(), documents)
    assert (gradient[:, 1:] == 0).all()
    assert (gradient[:, 0] != 0).any()


@pytest.mark.parametrize("lowest", [-3, -9], ids=["mixed", "negative"])
@pytest.mark.parametrize("document_length", [3, 70, 150])
@pytest.mark.parametrize("n_queries", [1, 3, 40], ids=["single", "few", "stacked"])
@pytest.mark.parametrize("size", [16, 128, 256, 320])
def test_argmax_is_the_first_of_the_best_tokens(size: int, n_queries: int, document_length: int, lowest: int) -> None:
    """Small integers, whose products are exact: most maxima are reached more than once, and every column wins."""
    generator = torch.Generator("cuda").manual_seed(size)
    queries = torch.randint(0, 3, (n_queries, 32, size), device="cuda", generator=generator)
    documents = torch.randint(lowest, lowest + 7, (30, document_length, size), device="cuda", generator=generator)
    # Documents differ in their first elements only, so that there are few different similarities.
    documents[:, :, 2:] = lowest + 3
    similarities = torch.einsum("qsd,ntd->nqst", queries.double(), documents.double())
    tensors = Tensors(queries.bfloat16(), documents.bfloat16())
    scores, argmax = compute(tensors, Options(implementation="triton"), True)
    assert argmax is not None
    # The first of equal values; torch's argmax on a GPU may return any of them.
    first = (similarities == similarities.amax(-1, keepdim=True)).cpu().int().argmax(-1)
    assert torch.equal(argmax.cpu().long(), first.flatten(1))
    torch.testing.assert_close(scores.double(), similarities.amax(-1).sum(-1).T, rtol=2e-6, atol=0)
    assert len(first.unique()) > min(20, document_length - 1)


def test_masked_nan_does_not_leak() -> None:
    queries, documents = unit(4, 20, 32), unit(4, 90, 32, seed=1)
    documents[:, 50:] = torch.nan
    mask = torch.arange(90, device="cuda").expand(4, 90) < 50
    queries.requires_grad_()
    documents.requires_grad_()
    scores = kernel(queries, documents, documents_mask=mask)
    torch.testing.assert_close(scores, kernel(queries, documents[:, :50].contiguous()))
    assert all(g.isfinite().all() for g in torch.autograd.grad(scores.sum(), (queries, documents)))


def test_float32_follows_the_matmul_precision() -> None:
    queries, documents = unit(16, 32, 128), unit(16, 180, 128, seed=1)
    expected = maxsim_reference(queries.double(), documents.double())
    with products_in("high"):
        assert 2e-6 < relative_error(kernel(queries, documents), expected) <= 1e-3
    assert relative_error(kernel(queries, documents), expected) <= 2e-6


def test_opcheck() -> None:
    queries, documents = unit(4, 8, 16).requires_grad_(), unit(4, 20, 16, seed=1).requires_grad_()
    tensors = Tensors(queries, documents, unit(4, 8).abs(), torch.rand(4, 20, device="cuda") > 0.2)
    options = Options(normalize=True, empty_score=-1.0, implementation="triton")
    torch.library.opcheck(torch.ops.pylate_flash.maxsim.default, (*tensors, *options))


def test_memory_does_not_grow_with_the_similarity_tensor() -> None:
    """256 x 256 x 32 x 180 similarities are 720 MiB in bfloat16."""
    leaves = [unit(256, length, 128, dtype=HALF, seed=length).requires_grad_() for length in (32, 180)]
    assert memory_of(lambda: torch.autograd.grad(maxsim(*leaves).sum(), leaves))[0] < 160 << 20


def test_more_pairs_than_a_grid_axis_holds() -> None:
    queries, documents = unit(70_000, 2, 16), unit(70_000, 3, 16, seed=1)
    queries.requires_grad_()
    actual = maxsim_pairwise(queries, documents)
    expected = (queries.double() @ documents.double().transpose(1, 2)).amax(dim=-1).sum(dim=-1)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(actual.sum(), queries)
    (reference,) = torch.autograd.grad(expected.sum(), queries)
    assert relative_error(gradient, reference) <= 1e-5


@pytest.mark.parametrize("n_queries", [1, 4])
def test_more_elements_than_32_bits_address(n_queries: int) -> None:
    """2.2e9 elements of documents; the last ones are checked."""
    documents = torch.zeros(17_000, 1024, 128, dtype=HALF, device="cuda")
    documents[-3:] = unit(3, 1024, 128, dtype=HALF)
    queries = unit(n_queries, 32, 128, dtype=HALF, seed=1)
    expected = maxsim_reference(queries.double(), documents[-3:].double())
    scores = maxsim(queries, documents)
    torch.testing.assert_close(scores[:, -3:].double(), expected, rtol=2e-6, atol=2e-6)
    assert (scores[:, :-3] == 0).all()


def test_double_precision_falls_back_and_is_refused_by_name() -> None:
    queries, documents = unit(2, 3, 8).double(), unit(3, 5, 8, seed=1).double()
    torch.testing.assert_close(maxsim(queries, documents).double(), maxsim_reference(queries, documents))
    with pytest.raises(ValueError, match="float64"):
        kernel(queries, documents)


@pytest.mark.parametrize("name", ["masking", "implementation"])
@pytest.mark.parametrize("value", ["other", ["exclude"], None])
def test_bad_choices_of_plain_calls_name_the_argument(name: str, value) -> None:
    """A plain call is looked up by its options before they are checked."""
    queries, documents = unit(2, 4, 16, dtype=HALF), unit(3, 5, 16, dtype=HALF)
    weight = torch.eye(16, device="cuda", dtype=HALF)
    for call in (partial(maxsim, queries, documents), partial(maxsim_from_hidden, queries, documents, weight)):
        with pytest.raises(ValueError, match=name):
            call(**{name: value})


@pytest.mark.parametrize("name", NEGATIVE)
def test_the_negative_bit_is_read(name: str) -> None:
    check_the_negative_bit(name, "cuda")
