"""Numbers at the ends of their types: embeddings huge, tiny and infinite, half temperatures, equal tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pylate_flash import (
    chamfer,
    maxsim,
    maxsim_cross_entropy,
    maxsim_from_hidden,
    maxsim_kl_divergence,
    maxsim_pairwise,
    maxsim_ragged,
    maxsim_sparse_queries,
    maxsim_varlen,
    quantize,
    soft_maxsim,
    xtr_scores,
)
from pylate_flash.kernels.config import precision_of
from pylate_flash.ops import (
    cross_entropy_reference,
    kl_divergence_reference,
    maxsim_from_hidden_reference,
    maxsim_reference,
    soft_maxsim_reference,
)
from pylate_flash.problem import Options, Tensors, problem_of
from tests.ops.cases import relative_error


def sparse(queries: Tensor, documents: Tensor, **options) -> Tensor:
    return maxsim_sparse_queries(queries, documents, torch.arange(3, device=queries.device).expand(3, 3, 3), **options)


def packed(queries: Tensor, documents: Tensor, **options) -> Tensor:
    bounds = torch.arange(0, 10, 3, device=queries.device)
    return maxsim_varlen(queries.flatten(0, 1), documents.flatten(0, 1), bounds, bounds, **options)


def candidates(queries: Tensor, documents: Tensor, **options) -> Tensor:
    return maxsim(queries, documents.expand(3, 3, 3, -1), **options)


def ragged(queries: Tensor, documents: Tensor, **options) -> Tensor:
    return maxsim_ragged(list(queries), list(documents), **options)


def projected(queries: Tensor, documents: Tensor, **options) -> Tensor:
    return maxsim_from_hidden(queries, documents, torch.eye(6, dtype=queries.dtype, device=queries.device), **options)


def soft(queries: Tensor, documents: Tensor, **options) -> Tensor:
    return soft_maxsim(queries, documents, 3.0, **options)


OPERATIONS = [maxsim, candidates, maxsim_pairwise, packed, ragged, projected, sparse, soft]
by_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)


def embeddings(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(3, 3, 6, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))


@by_operation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power", [62, 64, 100, 126])
def test_finite_embeddings_of_any_size_are_normalized(operation: Callable, dtype: torch.dtype, power: int) -> None:
    """Scaling by a power of two changes no digit, and divides the gradient."""
    results = []
    for factor in (1.0, 2.0**power):
        leaves = [(values * factor).requires_grad_() for values in embeddings(dtype)]
        scores = operation(*leaves, normalize=True)
        gradients = torch.autograd.grad(scores.sum(), leaves)
        results.append((scores.detach(), *(gradient.double() * factor for gradient in gradients)))
    (scores, *gradients), (expected, *right) = results
    torch.testing.assert_close(scores, expected, rtol=2e-6, atol=2e-6)
    # Gradients of huge embeddings may be subnormal.
    bound = 1e-5 if dtype == torch.float32 and power < 126 else 3e-2
    assert all(relative_error(*pair) <= bound for pair in zip(right, gradients, strict=True))


@pytest.mark.parametrize("operation", [maxsim, packed, ragged, projected, sparse])
@pytest.mark.parametrize("norm", [1e-4, 1e-11, 1e-13, 0.0])
def test_norms_are_at_least_1e_12(operation: Callable, norm: float) -> None:
    """Below that, normalization divides by a constant and has the gradient of a product."""
    unit = [torch.nn.functional.normalize(values, dim=-1) for values in embeddings(torch.float64)]
    results = []
    for function in (operation, maxsim_reference):
        leaves = [(values * norm).requires_grad_() for values in unit]
        scores = function(*leaves, normalize=True)
        results.append((scores.detach().double(), *torch.autograd.grad(scores.sum(), leaves)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("precision", ["int8", "uint8", "fp8"])
@pytest.mark.parametrize("quantize_queries", [False, True])
def test_huge_quantized_documents_are_normalized(precision: str, quantize_queries: bool) -> None:
    queries, documents = embeddings(torch.float32)
    options = {"normalize": True, "quantize_queries": quantize_queries}
    expected = maxsim(queries, quantize(documents, precision), **options)
    # The scales are multiplied by a power of two, too.
    actual = maxsim(queries, quantize(documents * 2.0**84, precision), **options)
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)


@by_operation
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("value", "normalize"), [(torch.nan, False), (torch.nan, True), (torch.inf, True)])
def test_what_is_not_a_number_stays_in_its_scores(
    operation: Callable, value: float, normalize: bool, side: int
) -> None:
    """NaN reaches their gradient, too; an infinite token has no direction."""
    arguments = embeddings(torch.float32)
    arguments[side][1, 2, 3] = value
    scores = operation(*[values.requires_grad_() for values in arguments], normalize=normalize)
    nan = torch.zeros_like(scores, dtype=torch.bool)
    nan[1 if side == 0 or scores.dim() == 1 else (slice(None), 1)] = True
    assert torch.equal(scores.isnan(), nan)
    assert torch.autograd.grad(scores[nan].sum(), arguments[1 - side], retain_graph=True)[0].isnan().any()
    if operation not in (projected, soft) and not normalize:
        # A NaN score of weight 0 does not add 0 times NaN to other elements.
        (gradient,) = torch.autograd.grad(scores[~nan].sum(), arguments[1 - side])
        assert gradient[..., [0, 1, 2, 4, 5]].isfinite().all()


@pytest.mark.parametrize("operation", [maxsim, candidates, maxsim_pairwise, packed, ragged, sparse])
def test_infinities_behave_as_in_torch(operation: Callable) -> None:
    queries, documents = (values.abs() for values in embeddings(torch.float32))
    queries[2, 1, 0], documents[0, 0, 0], documents[1], documents[2, 1, 2] = 0.0, torch.inf, -torch.inf, -torch.inf
    scores, expected = operation(queries, documents.requires_grad_()), maxsim_reference(queries, documents)
    torch.testing.assert_close(scores, expected.diagonal() if scores.dim() == 1 else expected, equal_nan=True)
    assert expected[0, :2].tolist() == [torch.inf, -torch.inf]
    assert expected[2, 0].isnan()
    # Where the best similarity is -inf, no gradient flows.
    (gradient,) = torch.autograd.grad(scores[1 if scores.dim() == 1 else (0, 1)], documents)
    assert (gradient == 0).all()


@pytest.mark.parametrize(
    ("queries", "documents"),
    [((0, 3), (2, 5)), ((2, 3), (0, 5)), ((2, 0), (3, 5)), ((2, 3), (3, 0)), ((0, 3), (0, 2, 5)), ((2, 3), (2, 0, 5))],
)
@pytest.mark.parametrize(
    ("operation", "definition", "others"),
    [
        (maxsim, maxsim_reference, ()),
        (maxsim_from_hidden, maxsim_from_hidden_reference, (torch.eye(4),)),
        (soft_maxsim, soft_maxsim_reference, (2.0,)),
    ],
)
def test_of_nothing(operation: Callable, definition: Callable, others: tuple, queries: tuple, documents: tuple) -> None:
    arguments = [torch.randn(*shape, 4, requires_grad=True) for shape in (queries, documents)]
    scores = operation(*arguments, *others, empty_score=-7.0)
    assert torch.equal(scores, definition(*arguments, *others, empty_score=-7.0))
    assert not any(gradient.any() for gradient in torch.autograd.grad(scores.sum(), arguments))


@pytest.mark.parametrize("masking", ["exclude", "zero"])
def test_an_infinite_query_token_among_masked_documents(masking: str) -> None:
    """All of its similarities may be negative, and the 0 of a masked token larger."""
    queries, documents = embeddings(torch.float32)
    queries[0, 1, 2], documents[:, :, 2] = torch.inf, -1.0
    options = {"documents_mask": torch.tensor([[1, 0, 1]] * 3), "normalize": True, "masking": masking}
    assert maxsim_reference(queries, documents, **options)[0].isnan().all()
    assert torch.equal(maxsim(queries, documents, **options).isnan(), torch.tensor([[True] * 3] + [[False] * 3] * 2))


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_the_newer_setting_of_float32_products_is_followed(precision: str) -> None:
    """While it is set, torch does not report the older one."""
    queries, documents = torch.randn(2, 3, 4, requires_grad=True), torch.randn(3, 5, 4)
    options = Options(0, 0, 0, False, "sum", "exclude", 0.0, "auto")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        maxsim_cross_entropy(queries, documents).backward()
        scores = maxsim(queries, documents)
        cast = [Tensors(queries.to(dtype), documents.to(dtype)) for dtype in (torch.float32, torch.float16)]
        precisions = [precision_of(problem_of(tensors, options).kind) for tensors in cast]
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    torch.testing.assert_close(scores, maxsim_reference(queries, documents))
    assert precisions == [precision, "ieee"]


@pytest.mark.parametrize("loss_reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", ["cross entropy", "divergence"])
def test_the_gradient_of_a_half_temperature_is_computed_wide(kind: str, loss_reduction: str) -> None:
    """Its square leaves the range of float16."""
    queries, documents = (values * 20 for values in embeddings(torch.float32))
    teacher = torch.arange(9.0).view(3, 3)
    gradients = []
    for dtype in (torch.float16, torch.float64):
        temperature = torch.tensor(300.0, dtype=dtype, requires_grad=True)
        options = {"temperature": temperature, "loss_reduction": loss_reduction}
        if dtype == torch.float64:
            scores = maxsim_reference(queries.double(), documents.double())
            reference = cross_entropy_reference if kind == "cross entropy" else kl_divergence_reference
            loss = reference(scores, *([] if kind == "cross entropy" else [teacher]), **options)
        elif kind == "cross entropy":
            loss = maxsim_cross_entropy(queries, documents, **options)
        else:
            loss = maxsim_kl_divergence(queries, documents, teacher, **options)
        gradients += torch.autograd.grad(loss.sum() * 1000, temperature)
    assert gradients[1] != 0
    # Tolerances of half precision, near its smallest numbers.
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("loss_reduction", ["mean", "sum", "none"])
def test_a_loss_of_float64_embeddings_is_of_float64(loss_reduction: str) -> None:
    results = []
    for loss_of in (
        lambda q, d, t: maxsim_cross_entropy(q, d, temperature=t, reduction="mean", loss_reduction=loss_reduction),
        lambda q, d, t: cross_entropy_reference(
            maxsim_reference(q, d, reduction="mean"), temperature=t, loss_reduction=loss_reduction
        ),
    ):
        leaves = [values.requires_grad_() for values in (*embeddings(torch.float64), torch.tensor(0.3).double())]
        loss = loss_of(*leaves)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), leaves)))
    # One rounding of 1.1e-16 per term, of numbers of a few units.
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)


NEGATIVE = {
    "maxsim": lambda q, d: maxsim(q, d, normalize=True),
    "packed": packed,
    "soft": soft,
    "from hidden": projected,
    "chamfer": lambda q, d: chamfer(q, d),
    "xtr": lambda q, d: xtr_scores(q, d, k=4),
    "chosen tokens": sparse,
    "cross entropy": lambda q, d: maxsim_cross_entropy(q, d),
    "quantized": lambda q, d: maxsim(q, quantize(d)),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_the_negative_bit_is_read(name: str) -> None:
    check_the_negative_bit(name, "cpu")


def check_the_negative_bit(name: str, device: str) -> None:
    """The imaginary part of a conjugate is a view of memory that holds the negated numbers."""
    queries, documents = (values.to(device) for values in embeddings(torch.float32))
    lazy = [torch.complex(values, -values).conj().imag for values in (queries, documents)]
    assert all(values.is_neg() for values in lazy)
    assert torch.equal(NEGATIVE[name](*lazy), NEGATIVE[name](queries, documents))


@pytest.mark.parametrize("size", [1, 7, 9, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("operation", [maxsim, candidates, packed, chamfer, "xtr"])
def test_ties_go_to_the_lowest_index(operation: Callable | str, dtype: torch.dtype, size: int) -> None:
    """Similarities of small integers tie exactly: no summation order rounds them."""
    generator = torch.Generator().manual_seed(size)
    queries = torch.randint(-3, 4, (3, 3, size), generator=generator).to(dtype)
    documents = torch.randint(-3, 4, (3, 3, size), generator=generator).to(dtype)
    # The last token of each document repeats the first.
    documents[:, 2] = documents[:, 0]
    documents.requires_grad_()
    scores = xtr_scores(queries, documents, k=9) if operation == "xtr" else operation(queries, documents)
    (gradient,) = torch.autograd.grad(scores.sum(), documents)
    if operation is chamfer:
        # The last token gets the gradient of its own half of the distance only; the other half goes to the first.
        nearest = torch.cdist(documents.detach(), queries).argmin(dim=2)
        own = documents.detach() - queries.gather(1, nearest.unsqueeze(2).expand(-1, -1, size))
        torch.testing.assert_close(gradient[:, 2], 2 * own[:, 2] / 3)
    else:
        assert not gradient[:, 2].any()
        assert gradient[:, :2].any()
