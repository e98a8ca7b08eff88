"""The kernels of the losses in the interpreter, with blocks so small that small problems cross them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from pylate_flash.kernels import backward, losses
from pylate_flash.ops import losses as operation
from pylate_flash.ops import maxsim_cross_entropy, maxsim_kl_divergence
from tests.ops.cases import Case, relative_error
from tests.ops.loss_cases import LOSSES, LossCase, loss_cases

OPTIONS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(losses, "_BLOCK", 4)
    monkeypatch.setattr(losses, "_TILE", 4)
    bound = (losses.bound_loss, losses.bound_step, losses.bound_rescale, operation._launches_of)
    for function in bound:
        function.cache_clear()
    yield
    for function in bound:
        function.cache_clear()


@settings(max_examples=15, **OPTIONS)
@given(case=loss_cases(dtypes=(torch.float16, torch.float32), max_batch=6, max_length=12))
def test_losses(case: LossCase) -> None:
    case.check(1e-5 if case.case.queries.dtype == torch.float32 else 1e-2, implementation="triton")


def problem(
    loss: str,
    queries: tuple[int, ...],
    documents: tuple[int, ...],
    labelled: bool,
    masked: tuple[bool, bool] = (False, False),
    masking: str = "exclude",
    **options,
) -> LossCase:
    generator = torch.Generator().manual_seed(0)
    case = Case(
        torch.randn(queries, generator=generator).half(), torch.randn(documents, generator=generator).half(),
        *(
            torch.rand(shape[:-1], generator=generator) > 0.4 if wanted else None
            for shape, wanted in zip((queries, documents), masked, strict=True)
        ),
        {"masking": masking},
    )  # fmt: skip
    shape = queries[0], documents[-3]
    target = None
    if loss == "divergence":
        target = torch.randn(shape, generator=generator)
    elif labelled:
        target = torch.randint(shape[1], shape[:1], generator=generator)
    return LossCase(case, loss, target, {"temperature": 2.0} | options)


def step_of(case: LossCase, needs: tuple[bool, bool] = (True, True)):
    queries, documents = case.case.queries, case.case.documents
    own_candidates = documents.dim() == 4
    grouped = documents if own_candidates else documents.unsqueeze(0)
    comparison = losses.Comparison(
        case.loss == "divergence", case.target is not None, own_candidates, case.options["temperature"],
        case.options.get("loss_reduction", "mean"),
    )  # fmt: skip
    step = losses.bound_step(
        queries.shape, queries.stride(), queries.dtype, queries.device, grouped.shape, grouped.stride(), True,
        case.case.queries_mask is not None, case.case.documents_mask is not None,
        case.case.options["masking"] == "zero", *needs, "ieee", comparison,
    )  # fmt: skip
    return step(queries, documents, case.case.queries_mask, case.case.documents_mask, case.target)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("queries", "documents", "lists", "loss_reduction"),
    [
        ((5, 4, 8), (7, 6, 8), False, "mean"),  # winners compared with each other
        ((5, 4, 8), (7, 6, 8), False, "sum"),
        ((6, 16, 8), (8, 6, 8), True, "mean"),  # lists of winners, in the memory of the gradients or not
        ((6, 16, 64), (8, 24, 64), True, "mean"),
        ((3, 4, 8), (3, 5, 6, 8), False, "mean"),
        ((2, 140, 8), (2, 3, 6, 8), True, "sum"),  # several sums for a query, one after the other
        ((3, 140, 8), (5, 6, 8), True, "mean"),
    ],
)
def test_a_step_is_one_sequence(queries, documents, lists: bool, loss_reduction: str, loss: str, monkeypatch):
    monkeypatch.setattr(backward, "_FEW_ROWS", 1 if lists else 1 << 20)
    case = problem(loss, queries, documents, labelled=False, loss_reduction=loss_reduction)
    found = step_of(case)
    reference = LossCase(case.case.doubled(), case.loss, case.target, case.options)
    leaves = reference.leaves(reference.case)
    for value, expected in zip(found, plain(reference, leaves), strict=True):
        assert value.shape == expected.shape
        assert relative_error(value, expected) <= 2e-3
    for needs in ((True, False), (False, True)):
        _, *gradients = step_of(case, needs)
        for gradient, expected, needed in zip(gradients, found[1:], needs, strict=True):
            assert torch.equal(gradient, expected) if needed else gradient is None


def plain(case: LossCase, leaves: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Loss and gradients on the CPU, for a gradient of the loss of 1."""
    masks, options = (case.case.queries_mask, case.case.documents_mask), case.options | case.case.options
    if case.loss == "divergence":
        loss = maxsim_kl_divergence(*leaves, case.target, *masks, **options)
    else:
        loss = maxsim_cross_entropy(*leaves, *masks, labels=case.target, **options)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(("queries", "documents"), [((5, 4, 8), (7, 6, 8)), ((3, 100, 8), (3, 4, 9, 8))])
@pytest.mark.parametrize(
    ("masked", "masking"),
    [((False, False), "exclude"), ((True, True), "exclude"), ((False, True), "zero"), ((True, False), "zero")],
)
def test_a_step_with_labels_and_masks(queries, documents, masked: tuple[bool, bool], masking: str) -> None:
    case = problem("cross entropy", queries, documents, labelled=True, masked=masked, masking=masking)
    reference = LossCase(case.case.doubled(), case.loss, case.target, case.options)
    for value, expected in zip(step_of(case), plain(reference, reference.leaves(reference.case)), strict=True):
        assert relative_error(value, expected) <= 2e-3


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_not_finite(value: float) -> None:
    """As in torch: one that is not a number, or too large, spoils its query and no other; -inf has no probability."""
    scores = torch.randn(3, 6)
    scores[1, 4] = value
    teacher = torch.randn(3, 6)
    for divergence, target in ((False, torch.tensor([2, 0, 5])), (True, teacher)):
        comparison = losses.Comparison(divergence, True, False, 0.5, "none")
        bound = losses.bound_loss((3, 6), scores.device, comparison)
        found, statistics = bound.forward(scores, target)
        gradient = bound.gradient(torch.ones(3), scores, target, statistics, None)
        leaf = scores.double().requires_grad_()
        if divergence:
            expected = torch.nn.functional.kl_div(
                (leaf / 0.5).log_softmax(-1), teacher.double().log_softmax(-1), reduction="none", log_target=True
            ).sum(-1)
        else:
            expected = torch.nn.functional.cross_entropy(leaf / 0.5, target, reduction="none")
        torch.testing.assert_close(found.double(), expected.detach(), equal_nan=True, rtol=1e-5, atol=1e-5)
        (reference,) = torch.autograd.grad(expected.sum(), leaf)
        torch.testing.assert_close(gradient.double(), reference, equal_nan=True, rtol=1e-5, atol=1e-5)
        assert gradient[[0, 2]].isfinite().all()


def test_a_label_out_of_range_is_not_a_number() -> None:
    scores, labels = torch.randn(4, 6), torch.tensor([5, 6, -1, 0])
    bound = losses.bound_loss((4, 6), scores.device, losses.Comparison(False, True, False, 1.0, "none"))
    found, statistics = bound.forward(scores, labels)
    assert found.isnan().tolist() == [False, True, True, False]
    gradient = bound.gradient(torch.ones(4), scores, labels, statistics, None)
    assert gradient.isnan().all(-1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("sizes", [(70, 9), (70, 0), (0, 9)])
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.0, torch.nan])
def test_gradients_are_multiplied_in_place(factor: float, sizes: tuple[int, int]) -> None:
    given = [torch.randn(size).half() if size else None for size in sizes]
    found = [None if tensor is None else tensor.clone() for tensor in given]
    losses.bound_rescale(*sizes, torch.device("cpu"))(torch.tensor(factor), *found)
    for tensor, before in zip(found, given, strict=True):
        if tensor is not None:
            torch.testing.assert_close(tensor, before * factor, equal_nan=True)


def kinds(**changes) -> dict:
    """Arguments of the decision whether a sequence serves: in-batch, with labels and both masks."""
    device = torch.device("cpu")
    plain = {
        "shape": torch.Size((5, 4, 8)), "strides": (32, 8, 1), "dtype": torch.bfloat16, "device": device,
        "need_queries": True, "documents_shape": torch.Size((7, 6, 8)), "documents_strides": (48, 8, 1),
        "documents_dtype": torch.bfloat16, "documents_device": device, "need_documents": True, "aligned": True,
        "queries_mask": (torch.Size((5, 4)), torch.bool, device),
        "documents_mask": (torch.Size((7, 6)), torch.bool, device), "target": (torch.Size((5,)), torch.int64, device),
        "zero_masked": False, "comparison": operation._Comparison(False, 0.5, "mean"), "implementation": "triton",
    }  # fmt: skip
    return plain | changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"queries_mask": None, "documents_mask": None, "target": None},
        {
            "target": (torch.Size((5, 7)), torch.float32, torch.device("cpu")),
            "comparison": operation._Comparison(True, 0.5, "sum"),
        },
    ],
)
def test_what_a_sequence_serves(changes: dict) -> None:
    assert operation._launches_of(**kinds(**changes)) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16, "documents_dtype": torch.float16},
        {"documents_dtype": torch.float16},
        {"documents_device": torch.device("meta")},
        {"shape": torch.Size((5, 8)), "strides": (8, 1)},
        {"documents_shape": torch.Size((4, 7, 6, 8)), "documents_strides": (336, 48, 8, 1)},
        {"documents_shape": torch.Size((7, 6, 9)), "documents_strides": (54, 9, 1)},
        {"documents_strides": (48, 1, 6)},
        {"queries_mask": (torch.Size((5, 3)), torch.bool, torch.device("cpu"))},
        {"documents_mask": (torch.Size((7, 6)), torch.float32, torch.device("cpu"))},
        {"documents_mask": (torch.Size((7, 6)), torch.bool, torch.device("meta"))},
        {"documents_mask": ()},
        {"target": (torch.Size((4,)), torch.int64, torch.device("cpu"))},
        {"target": (torch.Size((5,)), torch.int32, torch.device("cpu"))},
        {"target": (torch.Size((5,)), torch.int64, torch.device("meta"))},
        {"target": ()},
        {"comparison": operation._Comparison(True, 0.5, "mean")},
        {"comparison": operation._Comparison(True, 0.5, "mean"), "target": None},
        {"comparison": operation._Comparison(False, 0.5, "none")},
        {"comparison": operation._Comparison(False, 0.5, "max")},
        {"comparison": operation._Comparison(False, 0.0, "mean")},
        {"comparison": operation._Comparison(False, float("nan"), "mean")},
        {"target": None, "shape": torch.Size((8, 4, 8)), "queries_mask": None},
        {"implementation": "blocked"},
        {"implementation": "fast"},
    ],
    ids=str,
)
def test_what_goes_the_longer_way(changes: dict) -> None:
    """There it is served in parts, or the argument that is wrong is named."""
    assert operation._launches_of(**kinds(**changes)) is None
