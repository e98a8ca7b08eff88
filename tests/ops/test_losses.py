"""The losses over MaxSim against their definition, and the definition against torch's own losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import given, settings

from pylate_flash import maxsim, maxsim_cross_entropy, maxsim_kl_divergence, maxsim_margin_mse
from pylate_flash.ops import cross_entropy_reference, kl_divergence_reference
from tests.ops.cases import gradient_tolerance, mistakes, wrong
from tests.ops.loss_cases import LossCase, check_chunks, chunk_cases, loss_cases

OPTIONS = {"max_examples": 40}


@settings(max_examples=80)
@given(case=loss_cases(dtypes=(torch.float32, torch.bfloat16)))
def test_losses_equal_the_definition(case: LossCase) -> None:
    case.check(gradient_tolerance(case.case.queries.dtype))


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
    for actual, expected in (
        (cross_entropy_reference(scores, labels, **options), F.cross_entropy(scores / 0.2, labels, reduction="none")),
        (cross_entropy_reference(scores, **options), F.cross_entropy(scores / 0.2, torch.arange(5), reduction="none")),
        (kl_divergence_reference(scores, teacher, **options), divergence),
    ):
        reduced = expected if loss_reduction == "none" else getattr(expected, loss_reduction)()
        torch.testing.assert_close(actual, reduced)
        gradients = [torch.autograd.grad(loss.sum(), scores, retain_graph=True)[0] for loss in (actual, reduced)]
        torch.testing.assert_close(*gradients)


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


def test_a_label_out_of_range_or_left_out_is_not_a_number_to_the_definition() -> None:
    """The operation raises an error on a CPU, where the check costs nothing."""
    scores, labels = torch.randn(5, 4, requires_grad=True), torch.tensor([1, 4, -100, -1, 2])
    exclude = torch.zeros(5, 4, dtype=torch.bool)
    exclude[4, 2] = True
    losses = cross_entropy_reference(scores, labels, exclude=exclude, loss_reduction="none")
    assert losses.isnan().tolist() == [False, True, True, True, True]
    (gradient,) = torch.autograd.grad(losses[:3].sum(), scores)
    assert gradient[:3].isnan().all(-1).tolist() == [False, True, True]


def test_no_queries() -> None:
    queries, documents = torch.zeros(0, 3, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    loss = maxsim_cross_entropy(queries, documents, loss_reduction="sum")
    assert loss.item() == 0.0
    assert not torch.autograd.grad(loss, documents)[0].any()


Q, D, K = torch.zeros(2, 3, 4), torch.zeros(3, 5, 4), torch.zeros(2, 6, 5, 4)
BOUNDS = torch.tensor([0, 3, 5])


test_bad_input_names_the_argument = mistakes(
    wrong(ValueError, "documents must be at least one for a loss", maxsim_cross_entropy, Q, D[:0]),
    wrong(ValueError, "labels must be given .* None for 3 queries and 2 documents", maxsim_cross_entropy, D, Q),
    wrong(ValueError, "labels must be from 0 to 2, got values from 0 to 3",
          maxsim_cross_entropy, Q, D, labels=torch.tensor([0, 3])),
    wrong(ValueError, "labels must be from 0 to 5", maxsim_cross_entropy, Q, K, labels=torch.tensor([-1, 3])),
    wrong(ValueError, "temperature must be above 0 .* got 0.0", maxsim_cross_entropy, Q, D, temperature=0.0),
    wrong(ValueError, "temperature must be above 0", maxsim_cross_entropy, Q, D, temperature=float("nan")),
    wrong(TypeError, "temperature must be a number or a .* got str", maxsim_cross_entropy, Q, D, temperature="1"),
    wrong(ValueError, "loss_reduction must be one of", maxsim_cross_entropy, Q, D, loss_reduction="max"),
    wrong(ValueError, "documents_mask must hold only 0",
          maxsim_cross_entropy, Q, D, documents_mask=torch.full((3, 5), 0.5)),
    wrong(ValueError, "queries_mask must hold only 0 .* or positive weights, got -0.5",
          maxsim_cross_entropy, Q, D, queries_mask=torch.full((2, 3), -0.5)),
    wrong(ValueError, "teacher_scores must not require a gradient",
          maxsim_kl_divergence, Q, K, torch.zeros(2, 6, requires_grad=True)),
    wrong(ValueError, "exclude must be False for each query's label, got True for that of query 1",
          maxsim_cross_entropy, Q, D, exclude=torch.tensor([[0, 1, 0], [0, 1, 0]]).bool()),
    wrong(TypeError, "margin must be a number or None, got str", maxsim_cross_entropy, Q, D, margin="0.1"),
    wrong(ValueError, "margin must be finite, got inf", maxsim_cross_entropy, Q, D, margin=float("inf")),
    wrong(ValueError, "temperature must be a number or a tensor of one element",
          maxsim_cross_entropy, Q, D, temperature=torch.ones(2)),
    wrong(ValueError, "must be above 0 .* got 0.0", maxsim_cross_entropy, Q, D, temperature=torch.zeros(())),
    wrong(ValueError, "symmetric must be False where each query has", maxsim_cross_entropy, Q, K, symmetric=True),
    wrong(ValueError, "max_scratch_bytes must be at least 1", maxsim_cross_entropy, Q, D, max_scratch_bytes=0),
    wrong(TypeError, "max_scratch_bytes must be an integer, got float",
          maxsim_cross_entropy, Q, D, max_scratch_bytes=1e9),
    wrong(ValueError, "max_document_length must be None", maxsim_cross_entropy, Q, D, max_document_length=5),
    wrong(ValueError, "documents_mask must be None where documents are packed",
          maxsim_cross_entropy, Q, D[0], documents_cu_seqlens=BOUNDS, documents_mask=torch.ones(5)),
    wrong(ValueError, r"documents must have shape \[Td", maxsim_cross_entropy, Q, D, documents_cu_seqlens=BOUNDS),
    wrong(ValueError, r"queries must have shape", maxsim_cross_entropy, Q[0], D[0], documents_cu_seqlens=BOUNDS),
    wrong(ValueError, "documents_cu_seqlens has a sequence of length 3, more than max_document_length = 2",
          maxsim_cross_entropy, Q, D[0], documents_cu_seqlens=BOUNDS, max_document_length=2),
    wrong(ValueError, "teacher_temperature must be above 0 and finite, got 0",
          maxsim_kl_divergence, Q, K, Q[:, :, 0], teacher_temperature=0),
    wrong(TypeError, "teacher_temperature must be a number, got Tensor",
          maxsim_kl_divergence, Q, K, Q[:, :, 0], teacher_temperature=torch.ones(())),
    wrong(ValueError, "temperature must be above 0 and finite, got -2",
          maxsim_cross_entropy, Q, D, temperature=torch.nn.Parameter(torch.tensor(-2.0))),
    wrong(ValueError, "temperature must be above 0 and finite, got 1e-46",
          maxsim_cross_entropy, Q, D, temperature=1e-46),
    wrong(ValueError, "documents must be a positive and a negative", maxsim_margin_mse, Q, K[:, :1], Q[:, :1, 0]),
)  # fmt: skip


def test_normalized_scores_are_those_of_pylate() -> None:
    queries, documents, teacher = torch.randn(3, 4, 8), torch.randn(3, 5, 6, 8), torch.randn(3, 5)
    scores = maxsim(queries, documents)
    low, high = scores.min(dim=1, keepdim=True).values, scores.max(dim=1, keepdim=True).values
    log_q = ((scores - low) / (high - low + 1e-8)).log_softmax(-1)
    expected = F.kl_div(log_q, teacher.log_softmax(-1), reduction="batchmean", log_target=True)
    torch.testing.assert_close(maxsim_kl_divergence(queries, documents, teacher, normalize_scores=True), expected)


def test_margin_mse_is_that_of_sentence_transformers() -> None:
    queries, documents, teacher = torch.randn(3, 4, 8), torch.randn(3, 5, 6, 8), torch.randn(3, 5)
    scores = maxsim(queries, documents)
    margins = [scores[:, 0] - scores[:, index] for index in range(1, 5)]
    expected = F.mse_loss(torch.stack(margins, dim=1), teacher[:, :1] - teacher[:, 1:])
    torch.testing.assert_close(maxsim_margin_mse(queries, documents, teacher), expected)


@pytest.mark.parametrize("max_scratch_bytes", [None, 1])
def test_statistics(max_scratch_bytes: int | None) -> None:
    """Scores are [[3, 2.9, 1], [0.5, 2, 9]]: the second query's right document is not the best."""
    queries = torch.tensor([[[3.0, 2.9, 1.0]], [[0.5, 2.0, 9.0]]], requires_grad=True)
    documents = torch.eye(3).unsqueeze(1)
    options = {"with_statistics": True, "max_scratch_bytes": max_scratch_bytes}
    for loss_reduction in ("mean", "none"):
        loss, statistics = maxsim_cross_entropy(queries, documents, loss_reduction=loss_reduction, **options)
        assert loss.requires_grad
        assert not any(value.requires_grad for value in statistics)
        assert torch.stack(statistics).tolist() == pytest.approx([0.5, 2.5, (2.9 + 9.0) / 2])
    _, statistics = maxsim_cross_entropy(queries, documents, margin=0.0, **options)
    assert torch.stack(statistics).tolist() == pytest.approx([1.0, 2.5, (2.9 + 0.5) / 2])
    # A document that ties with the right one is no hit.
    _, statistics = maxsim_cross_entropy(queries, documents[[0, 1, 0]], **options)
    assert torch.stack(statistics).tolist() == pytest.approx([0.5, 2.5, (3.0 + 0.5) / 2])
    # Excluded documents are no negatives, and a single document has none.
    exclude = torch.tensor([[False, True, True], [False, False, True]])
    _, statistics = maxsim_cross_entropy(queries, documents, exclude=exclude, **options)
    assert torch.stack(statistics).tolist() == pytest.approx([1.0, 2.5, 0.5])
    labels = torch.zeros(2, dtype=torch.int64)
    _, statistics = maxsim_cross_entropy(queries, documents[:1], labels=labels, **options)
    assert statistics.accuracy.item() == 1.0
    assert statistics.hardest_negative_score.isnan()


def test_a_temperature_that_is_learned() -> None:
    queries, documents = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(5, 6, 8, dtype=torch.float64)
    for temperature in (torch.tensor(0.7), torch.tensor([0.7]), torch.nn.Parameter(torch.tensor(0.7).double())):
        leaf = temperature.detach().requires_grad_()
        loss = maxsim_cross_entropy(queries, documents, temperature=leaf)
        (actual,) = torch.autograd.grad(loss, leaf)
        assert (actual.shape, actual.dtype) == (leaf.shape, leaf.dtype)
        other = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        expected = cross_entropy_reference(maxsim(queries, documents).double(), temperature=other)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(actual.double().sum(), torch.autograd.grad(expected, other)[0], rtol=1e-5, atol=1e-6)


def test_a_scaled_loss_of_float16_keeps_small_gradients() -> None:
    """Gradients that are saved until the loss is scaled would be 0 in float16."""
    leaves = [torch.randn(shape).half().requires_grad_() for shape in ((3, 4, 8), (5, 6, 8))]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    for max_scratch_bytes in (None, 1):
        loss = maxsim_cross_entropy(*leaves, temperature=1e8, max_scratch_bytes=max_scratch_bytes) * 2.0**26
        expected = maxsim_cross_entropy(*wide, temperature=1e8) * 2.0**26
        for actual, reference in zip(
            torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, wide), strict=True
        ):
            assert actual.dtype == torch.float16
            assert (actual.double() - reference).norm() <= 1e-2 * reference.norm()


def test_the_argmax_lives_no_longer_than_their_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's argmax has the rows of its queries only: two of eight, as many as fit into the scratch."""
    from pylate_flash.ops import loss_scores

    rows = []

    def recorded(*arguments):
        scores, argmax = compute(*arguments)
        rows.append(None if argmax is None else argmax.shape[1])
        return scores, argmax

    compute = loss_scores.compute
    monkeypatch.setattr(loss_scores, "compute", recorded)
    queries, documents = torch.randn(8, 32, 16, requires_grad=True), torch.randn(10, 6, 16)
    # Per pair: a score and its gradient, and an argmax of 32 tokens with its lists.
    maxsim_cross_entropy(queries, documents, max_scratch_bytes=2 * 10 * (8 + 32 * 3))
    assert rows == [64] * 4
    rows.clear()
    with torch.no_grad():
        maxsim_cross_entropy(queries, documents, max_scratch_bytes=3 * 10 * 8)
    assert rows == [None] * 3


def test_numbers_may_be_numpys() -> None:
    options = {"temperature": np.float32(0.5), "margin": np.float64(0.25)}
    result = maxsim_cross_entropy(Q, D, **options)
    assert torch.equal(result, maxsim_cross_entropy(Q, D, temperature=0.5, margin=0.25))
