"""Loss kernels in the interpreter, with blocks so small that small problems span several."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from pylate_flash import maxsim_cross_entropy
from pylate_flash.kernels import plan_backward, tables_backward
from pylate_flash.kernels.backward import write_gradients
from pylate_flash.kernels.losses import ChunkedLoss, cross_entropy, rescale
from pylate_flash.ops import kernel_calls, kl_divergence_reference, margin_mse_reference
from pylate_flash.problem import Comparison, Targets
from tests.ops.cases import Case, relative_error
from tests.ops.loss_cases import LOSSES, LossCase, check_results, loss_cases, loss_problem


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "BLOCK", 4)
    monkeypatch.setattr(cross_entropy, "TILE", 4)
    # Some cases have at most as many scores, some have more.
    monkeypatch.setattr(cross_entropy, "WHOLE", 32)


@settings(max_examples=20)
@given(case=loss_cases(dtypes=(torch.float32, torch.float16), max_batch=6, max_length=12))
def test_losses(case: LossCase) -> None:
    case.check(1e-5 if case.case.queries.dtype == torch.float32 else 1e-2, implementation="triton")


def test_equal_scores() -> None:
    """A score equal to that of the positive is no hit, and one equal to the limit stays in the denominator."""
    queries = torch.tensor([[[3.0, 2.0, 3.0]], [[0.0, 2.0, 1.0]]])
    for margin, logits, accuracy in ((0.0, [0.0, -1.0, 0.0], 0.5), (1.0, [0.0, -1.0], 1.0)):
        loss, statistics = maxsim_cross_entropy(
            queries, torch.eye(3).unsqueeze(1), margin=margin, with_statistics=True, implementation="triton"
        )
        expected = [torch.tensor(values).logsumexp(0) for values in (logits, [-2.0, 0.0, -1.0])]
        torch.testing.assert_close(loss, torch.stack(expected).mean())
        assert statistics.accuracy == accuracy


def problem(loss: str, queries: tuple[int, ...], documents: tuple[int, ...], *arguments, **options) -> LossCase:
    generator = torch.Generator().manual_seed(0)
    embeddings = (torch.randn(shape, generator=generator) for shape in (queries, documents))
    return loss_problem(loss, *embeddings, *arguments, **options)


def by_kernels(case: LossCase, leaves: tuple[torch.Tensor, ...], **options) -> torch.Tensor:
    return case.loss_of(leaves, implementation="triton", **options)


def is_one_operator(loss: torch.Tensor) -> bool:
    """Whether the gradients were computed with the loss."""
    return type(loss.grad_fn).__name__ == "_MaxsimLossBackward"


def check_step(case: LossCase) -> None:
    """Check the loss and its gradients against torch's in float64, without gradients, and for each leaf alone."""
    leaves = case.leaves()
    loss = by_kernels(case, leaves)
    assert is_one_operator(loss)
    actual = loss.detach(), *torch.autograd.grad(loss, leaves)
    doubled = case.doubled()
    wide = doubled.leaves()
    expected = doubled.definition(wide)
    for value, reference in zip(actual, (expected.detach(), *torch.autograd.grad(expected, wide)), strict=True):
        assert value.shape == reference.shape
        assert relative_error(value, reference) <= 1e-5
    with torch.no_grad():
        # Without an argmax, other tiles score, and the order in which a BLAS adds up products may depend on them.
        assert relative_error(by_kernels(case, leaves), actual[0]) <= 1e-6
    for index, leaf in enumerate(leaves):
        arguments = [tensor if tensor is leaf else tensor.detach() for tensor in leaves]
        alone = by_kernels(case, tuple(arguments))
        assert torch.equal(alone.detach(), actual[0])
        assert torch.equal(torch.autograd.grad(alone, leaf)[0], actual[1 + index])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("queries", "documents", "lists", "loss_reduction"),
    [
        ((5, 4, 8), (7, 6, 8), False, "mean"),  # entries of the argmax compared with each other
        ((5, 4, 8), (7, 6, 8), False, "sum"),
        ((6, 16, 8), (8, 6, 8), True, "mean"),  # lists of the argmax, in the memory of the gradients or not
        ((6, 16, 64), (8, 24, 64), True, "mean"),
        ((3, 4, 8), (3, 5, 6, 8), False, "mean"),
        ((2, 140, 8), (2, 3, 6, 8), True, "sum"),  # several sums for a query, one after the other
        ((3, 140, 8), (5, 6, 8), True, "mean"),
    ],
)
def test_a_step(queries, documents, lists: bool, loss_reduction: str, loss: str, monkeypatch):
    monkeypatch.setattr(tables_backward, "FEW_ROWS", 0 if lists else 1 << 20)
    check_step(problem(loss, queries, documents, loss_reduction=loss_reduction))


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("loss", "documents", "packed", "scoring", "options"),
    [
        ("cross entropy", (6, 7, 8), False, {}, {"exclude": True, "margin": -2.0}),
        ("cross entropy", (6, 7, 8), True, {"normalize": True}, {"symmetric": True, "exclude": True, "margin": 0.1}),
        ("cross entropy", (5, 3, 7, 8), False, {"reduction": "mean", "empty_score": -3.0}, {}),
        ("divergence", (6, 7, 8), False, {"normalize": True}, {"normalize_scores": True, "teacher_temperature": 3}),
        ("margin MSE", (6, 7, 8), True, {"reduction": "mean"}, {}),
    ],
)
def test_chunks(loss, documents, packed: bool, scoring: dict, options: dict, dtype, lists: bool, monkeypatch) -> None:
    """Chunks of two queries, of five."""
    monkeypatch.setattr(tables_backward, "FEW_ROWS", 0 if lists else 1 << 20)
    if loss != "margin MSE":
        options = options | {"temperature": torch.tensor(2.0)}
    if "exclude" in options:
        options = options | {"exclude": torch.eye(5, documents[-3], dtype=torch.bool).roll(2, 1)}
    case = problem(loss, (5, 4, 8), documents, False, "queries documents", scoring, **options)
    embeddings = (tensor.to(dtype) for tensor in case.case.tensors)
    case = replace(case, case=Case(*embeddings, *list(case.case.keywords.values())[:2], scoring), packed=packed)
    # Bytes per score: itself, its gradient, the sums of its tokens, and their argmax with its lists.
    result = case.run(implementation="triton", max_scratch_bytes=2 * documents[-3] * (8 + 4 * 4 + 4 * 3))
    check_results(result, case.expected(), 1e-5 if dtype == torch.float32 else 4e-3, dtype)


def test_short_memory_halves_the_chunk(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Five queries, then three, run out of memory; if a single one does, the error is the caller's."""
    case = problem("cross entropy", (5, 4, 8), (6, 7, 8))
    expected, attempts, most = case.expected(), [], 2

    def write(problem, *arguments) -> None:
        attempts.append(problem.n_queries)
        if problem.n_queries > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        write_gradients(problem, *arguments)

    monkeypatch.setattr(kernel_calls, "write_gradients", write)
    plan_backward._log_halving.cache_clear()
    for _ in range(2):
        check_results(case.run(implementation="triton"), expected, 1e-5, torch.float32)
    assert attempts == [5, 3, 2, 2, 1] * 2
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "a loss over MaxSim ran out of memory, and goes on in chunks of half as many queries"
    ]
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        case.run(implementation="triton")
    assert attempts[10:] == [5, 3, 2, 1]


@pytest.mark.parametrize(("queries", "documents"), [((5, 4, 8), (7, 6, 8)), ((2, 70, 8), (2, 3, 9, 8))])
@pytest.mark.parametrize(
    ("masks", "scoring"),
    [
        ("", {}),
        ("queries documents", {}),
        ("documents", {"masking": "zero"}),
        ("queries", {"masking": "zero"}),
        ("queries documents int64", {"normalize": True, "reduction": "mean", "empty_score": -2.0}),
        ("queries documents float", {"reduction": "mean"}),
        ("queries weights documents", {"normalize": True, "reduction": "mean", "masking": "zero"}),
    ],
)
def test_a_step_with_labels_and_masks(queries, documents, masks: str, scoring: dict) -> None:
    check_step(problem("cross entropy", queries, documents, True, masks, scoring))


@pytest.mark.parametrize("loss", LOSSES)
def test_zeros_and_ones_of_any_type_give_the_same_bits(loss: str) -> None:
    results = []
    for dtype in ("", " int64", " float"):
        case = problem(loss, (5, 4, 8), (7, 6, 8), True, "queries documents" + dtype, {"normalize": True})
        leaves = case.leaves()
        output = by_kernels(case, leaves)
        results.append((output.detach(), *torch.autograd.grad(output, leaves)))
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_one_operator(loss: str) -> None:
    """Other calls consist of torch operations."""
    plain = problem(loss, (5, 4, 8), (7, 6, 8), True)
    leaves = plain.leaves()
    half = tuple(leaf.detach().half().requires_grad_() for leaf in leaves)
    strided = leaves[0].transpose(0, 1).contiguous().transpose(0, 1), leaves[1].flip(1)[:, 1:].expand(7, 5, 8)
    for embeddings, options in (
        (leaves, {}),
        (strided, {}),
        (half, {}),
        (leaves, {"loss_reduction": "sum"}),
        (leaves, {"implementation": "blocked"}),
    ):
        assert is_one_operator(plain.loss_of(embeddings, **{"implementation": "triton"} | options))
    for embeddings, options in ((leaves, {"loss_reduction": "none"}), (tuple(leaf[:, :0] for leaf in leaves), {})):
        assert not is_one_operator(by_kernels(plain, embeddings, **options))
    if loss == "cross entropy":
        int32 = replace(plain, target=plain.target.int())
        assert torch.equal(by_kernels(int32, leaves), by_kernels(plain, leaves))
    else:
        doubled = replace(plain, target=plain.target.double())
        assert torch.equal(by_kernels(doubled, leaves), by_kernels(plain, leaves))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_second_backward(loss: str) -> None:
    """The caller owns the gradients of the first backward, and may have changed them."""
    case = problem(loss, (5, 4, 8), (7, 6, 8), True)
    leaves = case.leaves()
    result = by_kernels(case, leaves)
    first = torch.autograd.grad(result, leaves, retain_graph=True)
    saved = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()
    for factor in (1.0, -2.0):
        repeated = torch.autograd.grad(result * factor, leaves, retain_graph=True)
        assert all(torch.equal(a, b * factor) for a, b in zip(repeated, saved, strict=True))
    (grad_documents,) = torch.autograd.grad(result, leaves[1])
    assert torch.equal(grad_documents, saved[1])
    with pytest.raises(RuntimeError, match="a second time"):
        result.backward()


def test_second_derivative_is_refused() -> None:
    case = problem("divergence", (5, 4, 8), (7, 6, 8))
    leaves = case.leaves()
    expected = torch.autograd.grad(by_kernels(case, leaves), leaves)
    actual = torch.autograd.grad(by_kernels(case, leaves), leaves, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    with pytest.raises(RuntimeError, match="no second derivative"):
        actual[0].sum().backward()


@pytest.mark.parametrize("loss", LOSSES)
def test_compiles_into_one_graph(loss: str) -> None:
    case = problem(loss, (5, 4, 8), (7, 6, 8), True, "queries weights documents", {"reduction": "mean"})
    leaves = case.leaves()
    compiled = torch.compile(lambda *t: by_kernels(case, t), fullgraph=True, backend="aot_eager")
    results = [torch.autograd.grad(step(*leaves) * 3, leaves) for step in (compiled, lambda *t: by_kernels(case, t))]
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves), by_kernels(case, leaves))


@pytest.mark.parametrize("implementation", ["triton", "blocked"])
@pytest.mark.parametrize("loss", LOSSES)
def test_opcheck(loss: str, implementation: str) -> None:
    case = problem(loss, (5, 4, 8), (7, 6, 8), True, "queries weights documents")
    leaves = case.leaves()
    with_statistics = loss == "cross entropy"
    comparison = Comparison(loss, with_statistics=with_statistics, symmetric=with_statistics)
    temperature = None if loss == "margin MSE" else torch.tensor(0.5, requires_grad=True)
    # All inputs of one loss; no gradient is requested of outputs that are not differentiable.
    torch.library.opcheck(
        torch.ops.pylate_flash.maxsim_loss.default,
        (
            *leaves, temperature, case.case.queries_mask, case.case.documents_mask, None, case.target, None, 0, True,
            "sum", "exclude", 0.0, implementation, *comparison,
        ),
    )  # fmt: skip


def compare(scores: torch.Tensor, target: torch.Tensor | None, comparison: Comparison, own: bool = False):
    """Run the loss kernels on scores: the loss of each query, the loss, and the gradient of the scores."""
    targets = Targets(target)
    result = ChunkedLoss(comparison, targets, (*scores.shape, len(scores)), own, False, scores.device)
    result.compare(scores, 0)
    result.sum()
    alone = result.loss.clone()
    gradient = result.gradient(scores, 0, None)
    assert torch.equal(result.loss.nan_to_num(7.0), alone.nan_to_num(7.0))
    return result._values.tensor()[: len(scores)], result.loss, gradient


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_not_finite(value: float) -> None:
    """As in torch: NaN or inf spoils its own query and no other; -inf has probability 0."""
    scores = torch.randn(3, 6)
    scores[1, 4] = value
    teacher = torch.randn(3, 6)
    for kind, target in (("cross entropy", torch.tensor([2, 0, 5])), ("divergence", teacher)):
        values, loss, gradient = compare(scores, target, Comparison(kind, 0.5, loss_reduction="sum"))
        leaf = scores.double().requires_grad_()
        if kind == "divergence":
            expected = torch.nn.functional.kl_div(
                (leaf / 0.5).log_softmax(-1), teacher.double().log_softmax(-1), reduction="none", log_target=True
            ).sum(-1)
        else:
            expected = torch.nn.functional.cross_entropy(leaf / 0.5, target, reduction="none")
        torch.testing.assert_close(values.double(), expected.detach(), equal_nan=True, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(loss.double(), expected.sum().detach(), equal_nan=True, rtol=1e-5, atol=1e-5)
        (reference,) = torch.autograd.grad(expected.sum(), leaf)
        torch.testing.assert_close(gradient.double(), reference, equal_nan=True, rtol=1e-5, atol=1e-5)
        assert gradient[[0, 2]].isfinite().all()


def test_a_label_out_of_range_is_not_a_number() -> None:
    values, loss, gradient = compare(torch.randn(4, 6), torch.tensor([5, 6, -1, 0]), Comparison("cross entropy"))
    assert values.isnan().tolist() == [False, True, True, False]
    assert loss.isnan()
    assert gradient.isnan().all(-1).tolist() == [False, True, True, False]


def test_an_excluded_label_is_not_a_number() -> None:
    scores, exclude = torch.randn(4, 6), torch.rand(4, 6) > 0.5
    exclude[[0, 1, 2, 3], [0, 1, 2, 3]] = torch.tensor([False, True, False, False])
    result = ChunkedLoss(Comparison("cross entropy"), Targets(None, exclude), (4, 6, 4), False, False, scores.device)
    assert result.gradient(scores, 0, None).isnan().all(-1).tolist() == [False, True, False, False]
    assert result._values.tensor().isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("own_candidates", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["divergence", "margin MSE"])
def test_gradients_of_scores_are_divided_and_lie_as_the_backward_wants_them(kind, reduction: str, own_candidates: bool):
    scores, teacher, counts = torch.randn(5, 9), torch.randn(5, 9), torch.tensor([[1.0], [7.0], [2.0], [3.0], [32.0]])
    comparison = Comparison(kind, 0.5, loss_reduction=reduction)
    result = ChunkedLoss(comparison, Targets(teacher), (5, 9, 5), own_candidates, False, scores.device)
    plain, divided = (result.gradient(scores, 0, arguments) for arguments in (None, counts))
    torch.testing.assert_close(divided, plain / counts, rtol=1e-6, atol=0)
    assert plain.stride() == ((9, 1) if own_candidates else (1, 5))
    leaf = scores.double().requires_grad_()
    if kind == "divergence":
        loss = kl_divergence_reference(leaf, teacher.double(), temperature=0.5, loss_reduction=reduction)
    else:
        loss = margin_mse_reference(leaf, teacher.double(), loss_reduction=reduction)
    torch.testing.assert_close(plain.double(), torch.autograd.grad(loss, leaf)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(70, 9), (70, 0), (0, 9)])
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.0, torch.nan])
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.float32, torch.float16)])
def test_gradients_are_multiplied(factor: float, sizes: tuple[int, int], dtypes: tuple) -> None:
    """In place, if they already have the target dtype."""
    arguments = [torch.randn(size).half() if size else None for size in sizes]
    copies = [None if tensor is None else tensor.clone() for tensor in arguments]
    actual = rescale(torch.tensor(factor), *copies, dtypes)
    for tensor, copy, before, dtype in zip(actual, copies, arguments, dtypes, strict=True):
        assert (tensor is copy) == (before is None or dtype == torch.float16)
        if tensor is not None:
            expected = (before.float() * factor).to(dtype)
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)
