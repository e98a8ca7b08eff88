"""The losses over MaxSim against their definition, and the definition against torch's own losses."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import given, settings

from pylate_flash import maxsim, maxsim_cross_entropy, maxsim_kl_divergence
from pylate_flash.ops import cross_entropy_reference, kl_divergence_reference
from tests.ops.cases import FLOAT32_SCORES
from tests.ops.loss_cases import LossCase, check_chunks, chunk_cases, loss_cases

OPTIONS = {"max_examples": 40, "deadline": None, "derandomize": True}


@settings(**OPTIONS)
@given(case=loss_cases())
def test_losses_equal_the_definition(case: LossCase) -> None:
    case.check(1e-5)


@settings(**OPTIONS)
@given(case=loss_cases(dtypes=(torch.bfloat16,)))
def test_half_gradients_are_close(case: LossCase) -> None:
    case.check(1e-2)


@settings(**OPTIONS)
@given(case=chunk_cases(dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64)))
def test_chunks_change_nothing(case: LossCase) -> None:
    check_chunks(case)


@pytest.mark.parametrize("loss_reduction", ["mean", "sum", "none"])
def test_the_definition_is_that_of_torch(loss_reduction: str) -> None:
    torch.manual_seed(0)
    scores, teacher = torch.randn(2, 5, 7, dtype=torch.float64)
    scores.requires_grad_()
    labels = torch.tensor([6, 0, 3, 3, 1])
    options = {"temperature": 0.2, "loss_reduction": loss_reduction}
    log_q = (scores / 0.2).log_softmax(-1)
    divergence = F.kl_div(log_q, teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    for found, expected in (
        (cross_entropy_reference(scores, labels, **options), F.cross_entropy(scores / 0.2, labels, reduction="none")),
        (cross_entropy_reference(scores, **options), F.cross_entropy(scores / 0.2, torch.arange(5), reduction="none")),
        (kl_divergence_reference(scores, teacher, **options), divergence),
    ):
        reduced = expected if loss_reduction == "none" else getattr(expected, loss_reduction)()
        torch.testing.assert_close(found, reduced)
        gradients = [torch.autograd.grad(loss.sum(), scores, retain_graph=True)[0] for loss in (found, reduced)]
        torch.testing.assert_close(*gradients)


def test_by_hand() -> None:
    queries = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    # Scores [[1, 0], [0, 1]], at a temperature of 0.5: log(1 + exp(-2)).
    # Two units in the last place of the logarithms of sums, which lie between 2 and 4.
    rounding = {"rel": 0, "abs": 2**-21}
    right = math.log1p(math.exp(-2))
    assert maxsim_cross_entropy(queries, queries, temperature=0.5).item() == pytest.approx(right, **rounding)
    wrong = maxsim_cross_entropy(queries, queries, temperature=0.5, labels=torch.tensor([1, 0]))
    assert wrong.item() == pytest.approx(right + 2, **rounding)
    even = torch.zeros(2, 2)
    # p = (1/2, 1/2), q = (1, e^-2) / (1 + e^-2).
    assert maxsim_kl_divergence(queries, queries, even, temperature=0.5).item() == pytest.approx(
        right + 1 - math.log(2), **rounding
    )


def test_candidates_have_the_right_one_first() -> None:
    queries, documents = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 4, 8), (3, 5, 6, 8)))
    first = maxsim_cross_entropy(queries, documents, labels=torch.zeros(3, dtype=torch.int64))
    assert torch.equal(maxsim_cross_entropy(queries, documents), first)
    last = maxsim_cross_entropy(queries, documents, labels=torch.full((3,), 4, dtype=torch.int32))
    expected = F.cross_entropy(maxsim(queries, documents), torch.full((3,), 4))
    torch.testing.assert_close(last, expected, **FLOAT32_SCORES)


def test_what_the_teacher_rules_out_adds_nothing() -> None:
    queries, documents = torch.randn(3, 4, 8, requires_grad=True), torch.randn(3, 5, 6, 8)
    teacher = torch.randn(3, 5)
    teacher[:, 2] = -torch.inf
    loss = maxsim_kl_divergence(queries, documents, teacher)
    scores = maxsim(queries, documents)
    p = teacher.softmax(-1)
    expected = (p * (p.clamp(min=1e-30).log() - scores.log_softmax(-1))).sum() / 3
    torch.testing.assert_close(loss, expected)
    assert torch.autograd.grad(loss, queries)[0].isfinite().all()


def test_a_label_out_of_range_is_not_a_number_to_the_definition() -> None:
    """And an error to the operation on a CPU, where looking costs nothing."""
    scores = torch.randn(3, 4, requires_grad=True)
    labels = torch.tensor([1, 4, -100])
    losses = cross_entropy_reference(scores, labels, loss_reduction="none")
    assert losses.isnan().tolist() == [False, True, True]
    (gradient,) = torch.autograd.grad(losses.sum(), scores)
    assert gradient.isnan().all(-1).tolist() == [False, True, True]


def test_no_queries() -> None:
    queries, documents = torch.zeros(0, 3, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    loss = maxsim_cross_entropy(queries, documents, loss_reduction="sum")
    assert loss.item() == 0.0
    assert not torch.autograd.grad(loss, documents)[0].any()


def test_only_the_needed_gradients() -> None:
    queries, documents = torch.randn(2, 3, 4), torch.randn(3, 5, 4, requires_grad=True)
    maxsim_cross_entropy(queries, documents).backward()
    assert queries.grad is None
    assert documents.grad is not None
    assert not maxsim_cross_entropy(queries, documents.detach()).requires_grad


def test_second_derivative_is_refused() -> None:
    queries, documents = torch.randn(2, 3, 4, requires_grad=True), torch.randn(3, 5, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(maxsim_cross_entropy(queries, documents), queries, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


def test_activation_checkpointing() -> None:
    queries, documents = torch.randn(2, 3, 4, requires_grad=True), torch.randn(3, 5, 4, requires_grad=True)
    checkpointed = torch.utils.checkpoint.checkpoint(maxsim_cross_entropy, queries, documents, use_reentrant=False)
    found = torch.autograd.grad(checkpointed, (queries, documents))
    expected = torch.autograd.grad(maxsim_cross_entropy(queries, documents), (queries, documents))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_autocast() -> None:
    queries, documents = torch.randn(2, 3, 16), torch.randn(3, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = maxsim_cross_entropy(queries, documents, temperature=0.1)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, maxsim_cross_entropy(queries.bfloat16(), documents.bfloat16(), temperature=0.1))


def test_compiles_into_one_graph() -> None:
    def losses(queries: torch.Tensor, documents: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor):
        options = {"documents_mask": mask, "normalize": True}
        return maxsim_cross_entropy(queries, documents, **options) + maxsim_kl_divergence(
            queries, documents, teacher, **options
        )

    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4, 8), (5, 6, 8))]
    others = torch.randn(3, 5), torch.rand(5, 6) > 0.3
    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*leaves, *others), leaves)
    expected = torch.autograd.grad(losses(*leaves, *others), leaves)
    for gradient, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, reference, **FLOAT32_SCORES)


Q, D, K = torch.zeros(2, 3, 4), torch.zeros(3, 5, 4), torch.zeros(2, 6, 5, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: maxsim_cross_entropy(Q, [1.0]), TypeError, "documents must be a torch.Tensor"),
        (lambda: maxsim_cross_entropy(Q, D[..., :2]), ValueError, "embedding size of queries, 4, got 2"),
        (lambda: maxsim_cross_entropy(Q, D[:0]), ValueError, "documents must be at least one for a loss"),
        (lambda: maxsim_cross_entropy(D, Q), ValueError, "labels must be given .* None for 3 queries and 2 documents"),
        (lambda: maxsim_cross_entropy(Q, D, labels=[0, 1]), TypeError, "labels must be a torch.Tensor or None"),
        (lambda: maxsim_cross_entropy(Q, D, labels=torch.zeros(3)), ValueError, r"labels must have shape \[2\], got"),
        (lambda: maxsim_cross_entropy(Q, D, labels=torch.zeros(2)), TypeError, "labels must be int64 or int32"),
        (
            lambda: maxsim_cross_entropy(Q, D, labels=torch.tensor([0, 3])),
            ValueError,
            "labels must be from 0 to 2, got values from 0 to 3",
        ),
        (lambda: maxsim_cross_entropy(Q, K, labels=torch.tensor([-1, 3])), ValueError, "labels must be from 0 to 5"),
        (lambda: maxsim_cross_entropy(Q, D, temperature=0.0), ValueError, "temperature must be positive .* got 0.0"),
        (lambda: maxsim_cross_entropy(Q, D, temperature=float("nan")), ValueError, "temperature must be positive"),
        (
            lambda: maxsim_cross_entropy(Q, D, temperature="1"),
            TypeError,
            "temperature must be a number or a .* got str",
        ),
        (lambda: maxsim_cross_entropy(Q, D, loss_reduction="max"), ValueError, "loss_reduction must be one of"),
        (lambda: maxsim_cross_entropy(Q, D, reduction="none"), ValueError, "^reduction must be one of"),
        (
            lambda: maxsim_cross_entropy(Q, D, documents_mask=torch.full((3, 5), 0.5)),
            ValueError,
            "documents_mask must hold only 0",
        ),
        (
            lambda: maxsim_cross_entropy(Q, D, queries_mask=torch.full((2, 3), -0.5)),
            ValueError,
            "queries_mask must hold only 0 .* or positive weights, got -0.5",
        ),
        (lambda: maxsim_cross_entropy(Q, D, implementation="fast"), ValueError, "implementation must be one of"),
        (lambda: maxsim_kl_divergence(Q, K, None), TypeError, "teacher_scores must be a torch.Tensor, got NoneType"),
        (lambda: maxsim_kl_divergence(Q, K, Q[:, 0]), ValueError, r"teacher_scores must have shape \[2, 6\], got"),
        (lambda: maxsim_kl_divergence(Q, K, torch.zeros(2, 6).int()), TypeError, "teacher_scores must be float16"),
        (
            lambda: maxsim_kl_divergence(Q, K, torch.zeros(2, 6, requires_grad=True)),
            ValueError,
            "teacher_scores must not require a gradient",
        ),
        (
            lambda: maxsim_kl_divergence(Q, K, torch.zeros(2, 6, device="meta")),
            ValueError,
            "teacher_scores must be on the device of queries, cpu, got meta",
        ),
    ],
)
def test_bad_input_names_the_argument(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
