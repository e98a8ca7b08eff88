"""Losses on a GPU, at once and in chunks of queries: against their definition in float64, and their callers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from pylate_flash import maxsim_cross_entropy, maxsim_kl_divergence
from pylate_flash.kernels.tables import CHUNK_SCRATCH
from pylate_flash.ops import cross_entropy_reference, maxsim_reference
from tests.gpu.tools import DTYPES, FLOAT, HALF, allocated, equal, exact, memory_of, random_mask, unit
from tests.ops.cases import relative_error
from tests.ops.loss_cases import LossCase, loss_problem

pytestmark = pytest.mark.gpu

# Queries and documents.
SHAPES = [
    ((128, 32, 128), (128, 300, 128)),
    ((3, 32, 128), (7, 180, 128)),
    ((1, 1, 48), (1, 1, 48)),
    ((1500, 4, 32), (1700, 5, 32)),  # more documents than one block of a row
    ((64, 32, 128), (64, 16, 300, 128)),
    ((6, 100, 64), (6, 4, 50, 64)),
    ((5, 200, 96), (5, 3, 70, 96)),
    ((9, 1024, 128), (9, 700, 128)),
    ((40, 32, 768), (50, 60, 768)),
]
KINDS = {"in order": ("cross entropy", False), "labels": ("cross entropy", True), "teacher": ("divergence", False)}


def problem(
    kind: str,
    queries: tuple[int, ...],
    documents: tuple[int, ...],
    masks: str = "",
    scoring: dict | None = None,
    dtype: torch.dtype = HALF,
    draw=unit,
    **options,
) -> LossCase:
    """A case whose last query and last documents have no active token, if there are masks."""
    loss, labelled = KINDS.get(kind, (kind, True))
    options = ({} if loss == "margin MSE" else {"temperature": 0.1}) | options
    embeddings = (draw(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate((queries, documents)))
    case = loss_problem(loss, *embeddings, labelled, masks, scoring, **options)
    for mask in (case.case.queries_mask, case.case.documents_mask):
        if mask is not None:
            mask[-1] = 0
    return case


multiples = partial(exact, parts=8, most=2)


def is_one_operator(case: LossCase) -> bool:
    """Whether the gradients are computed with the loss."""
    return type(case.loss_of(case.leaves()).grad_fn).__name__ == "_MaxsimLossBackward"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "documents"), SHAPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum", "none"])
def test_exact_scores(queries, documents, kind: str, dtype: torch.dtype, loss_reduction: str) -> None:
    options = {"loss_reduction": loss_reduction, "temperature": queries[1] / 50}
    case = problem(kind, queries, documents, dtype=dtype, draw=multiples, **options)
    assert is_one_operator(case) == (loss_reduction != "none")
    actual, expected = case.run(), case.expected()
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-4, atol=1e-4)
    largest = max(gradient.norm() for gradient in expected[1:])
    for gradient, reference in zip(actual[1:], expected[1:], strict=True):
        assert gradient.dtype == dtype
        rounding = 1e-5 if dtype == FLOAT else 1e-2
        assert (gradient - reference).norm() <= rounding * reference.norm() + 1e-5 * largest
        if dtype != FLOAT and reference.norm() > 1e-3 * largest:
            assert F.cosine_similarity(gradient.double().flatten(), reference.flatten(), dim=0) >= 0.9999


@pytest.mark.parametrize(
    ("masks", "scoring"),
    [
        ("", {"normalize": True}),
        ("", {"reduction": "mean"}),
        ("queries", {"reduction": "mean"}),
        ("documents", {"empty_score": -100.0}),
        ("queries documents", {"empty_score": -100.0, "normalize": True, "reduction": "mean"}),
        ("queries documents float", {}),
        ("queries documents int64", {"reduction": "mean"}),
        ("queries weights", {}),
        ("queries weights documents", {"normalize": True, "reduction": "mean", "masking": "zero"}),
        ("queries", {}),
        ("documents", {"masking": "zero"}),
        ("queries documents", {}),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("queries", "documents"),
    [((16, 32, 128), (20, 70, 128)), ((5, 200, 64), (9, 70, 64)), ((6, 32, 64), (6, 5, 70, 64))],
)
def test_masks_and_options(queries, documents, kind: str, masks: str, scoring: dict) -> None:
    case = problem(kind, queries, documents, masks, scoring)
    assert is_one_operator(case)
    expected = case.expected()
    for _ in range(3):
        actual = case.run()
        torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-4, atol=1e-4)
        assert all(relative_error(a, b) <= 1e-2 for a, b in zip(actual[1:], expected[1:], strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scoring", [{}, {"normalize": True, "masking": "zero", "reduction": "mean"}], ids=str)
@pytest.mark.parametrize(
    ("queries", "documents"),
    [((16, 32, 128), (20, 70, 128)), ((3, 200, 64), (9, 70, 64)), ((6, 32, 64), (6, 5, 70, 64))],
)
def test_zeros_and_ones_of_any_type_give_the_same_bits(queries, documents, scoring: dict, kind: str) -> None:
    case = problem(kind, queries, documents, "queries documents", scoring)
    expected = case.run()
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        masks = {name: getattr(case.case, name).to(dtype) for name in ("queries_mask", "documents_mask")}
        assert equal(replace(case, case=replace(case.case, **masks)).run(), expected)


def test_the_same_tensor_twice() -> None:
    tokens = unit(16, 32, 64, dtype=HALF).requires_grad_()
    doubled = tokens.detach().double().requires_grad_()
    (actual,) = torch.autograd.grad(maxsim_cross_entropy(tokens, tokens, temperature=10.0), tokens)
    expected = cross_entropy_reference(maxsim_reference(doubled, doubled), temperature=10.0)
    assert relative_error(actual, torch.autograd.grad(expected, doubled)[0]) <= 1e-2


def test_a_label_out_of_range_is_not_a_number() -> None:
    queries, documents = unit(4, 32, 64, dtype=HALF), unit(6, 50, 64, dtype=HALF)
    losses = maxsim_cross_entropy(
        queries, documents, labels=torch.tensor([5, 6, -100, 0], device="cuda"), loss_reduction="none"
    )
    assert losses.isnan().tolist() == [False, True, True, False]


def test_not_a_number_is_seen() -> None:
    case = problem("teacher", (8, 32, 64), (8, 50, 64))
    case.case.documents[3, 4, 5] = torch.nan
    loss, grad_queries, _ = case.run()
    assert loss.isnan()
    assert grad_queries.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_autocast_and_grad_scaler(dtype: torch.dtype) -> None:
    """With a loss scale, without which float16 would lose the gradients."""
    case = problem("in order", (256, 32, 64), (256, 50, 64), dtype=FLOAT, temperature=100.0)
    leaves, scaler = case.leaves(), torch.amp.GradScaler("cuda", init_scale=2.0**16)
    with torch.autocast("cuda", dtype=dtype):
        loss = case.loss_of(leaves)
        assert is_one_operator(case)
    scaler.scale(loss).backward()
    doubled = [leaf.detach().to(dtype).double().requires_grad_() for leaf in leaves]
    for leaf, reference in zip(leaves, torch.autograd.grad(case.definition(doubled) * 2.0**16, doubled), strict=True):
        assert relative_error(leaf.grad, reference) <= 1e-2


def test_a_step_keeps_the_gradients_and_nothing_else() -> None:
    case = problem("in order", (512, 32, 128), (512, 90, 128))
    case.run()
    leaves = case.leaves()
    before = allocated()
    loss = case.loss_of(leaves)
    gradients = sum(leaf.nbytes for leaf in leaves)
    # The argmax would be 16 MiB; the allocator may leave up to 1 MiB of a block unused.
    assert gradients <= torch.cuda.memory_allocated() - before <= gradients + (3 << 20)
    del loss


def test_bad_input_is_an_error_each_time() -> None:
    queries, documents = (unit(4, 32, 64, dtype=HALF).requires_grad_() for _ in range(2))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"labels must have shape \[4\]"):
            maxsim_cross_entropy(queries, documents, labels=torch.zeros(3, dtype=torch.int64, device="cuda"))
        with pytest.raises(ValueError, match="labels must be on the device of queries"):
            maxsim_cross_entropy(queries, documents, labels=torch.zeros(4, dtype=torch.int64))
        with pytest.raises(ValueError, match="loss_reduction must be one of"):
            maxsim_cross_entropy(queries, documents, loss_reduction="max")
        with pytest.raises(ValueError, match="teacher_scores must not require a gradient"):
            maxsim_kl_divergence(queries, documents, torch.zeros(4, 4, device="cuda", requires_grad=True))
    case = problem("labels", (4, 32, 64), (4, 32, 64))
    actual, expected = replace(case, target=case.target.int()).run(), case.run()
    assert all(relative_error(a, b) <= 1e-2 for a, b in zip(actual, expected, strict=True))


# In chunks

# The last case has more query rows than one program lists, and lists that are summed in parts.
CHUNKED = [
    ((23, 4, 32), (29, 9, 32)),
    ((70, 32, 128), (90, 180, 128)),
    ((12, 32, 64), (12, 5, 70, 64)),
    ((100, 32, 128), (110, 3, 128)),
]
LOSSES = ("cross entropy", "symmetric", "divergence", "margin MSE")


def in_chunks(loss: str, queries: tuple[int, ...], documents: tuple[int, ...], **kwargs) -> LossCase:
    """A case with a learned temperature; scores are multiples of 1/64."""
    if loss == "symmetric" and len(documents) == 4:
        pytest.skip("no other query meets a query's own documents")
    options: dict = {} if loss == "margin MSE" else {"temperature": torch.tensor(queries[1] / 50, device="cuda")}
    if loss == "divergence":
        options |= {"teacher_temperature": 2.0, "normalize_scores": True}
    case = problem("cross entropy" if loss == "symmetric" else loss, queries, documents, **kwargs, **options)
    if case.loss == "cross entropy":
        exclude = random_mask((queries[0], documents[-3]), 0.25).scatter_(1, case.target.unsqueeze(1), False)
        case.options.update(exclude=exclude, margin=-0.3, symmetric=loss == "symmetric")
    return case


def budget(queries: tuple[int, ...], documents: tuple[int, ...], number: int) -> int:
    """Scratch bytes of about `number` queries."""
    return number * documents[-3] * (8 + 3 * queries[1])


def check_definition(case: LossCase, expected: tuple, scratch: int | None) -> tuple[torch.Tensor, ...]:
    first = case.run(max_scratch_bytes=scratch)
    torch.testing.assert_close(first[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    for actual, reference in zip(first[1:3], expected[1:3], strict=True):
        assert actual.dtype == case.case.queries.dtype
        assert relative_error(actual, reference) <= (1e-5 if actual.dtype == FLOAT else 4e-3)
    for actual, reference in zip(first[3:], expected[3:], strict=True):
        torch.testing.assert_close(actual.double(), reference, rtol=1e-4, atol=1e-4)
    return first


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("queries", "documents"), CHUNKED)
def test_the_definition_whatever_the_chunks(queries, documents, loss: str, dtype: torch.dtype) -> None:
    case = in_chunks(loss, queries, documents, dtype=dtype, draw=multiples)
    expected = case.expected()
    for scratch in (None, budget(queries, documents, 5), budget(queries, documents, 17)):
        first = check_definition(case, expected, scratch)
        assert all(equal(case.run(max_scratch_bytes=scratch), first) for _ in range(5))


@pytest.mark.parametrize(
    "scoring",
    [
        {"normalize": True},
        {"reduction": "mean", "empty_score": -3.0},
        {"normalize": True, "reduction": "mean", "masking": "zero"},
    ],
    ids=str,
)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("queries", "documents"), CHUNKED[:3])
def test_masks_and_options_in_chunks(queries, documents, loss: str, scoring: dict) -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    active = torch.rand(documents[:-1], device="cuda", generator=generator) > 0.3
    active[..., -1, :] = False
    weights = torch.rand(queries[:-1], device="cuda", generator=generator)
    case = in_chunks(loss, queries, documents, scoring=scoring, dtype=FLOAT)
    masks = {"queries_mask": weights * (weights > 0.3), "documents_mask": active}
    case = replace(case, case=replace(case.case, **masks))
    chunked = case.run(max_scratch_bytes=budget(queries, documents, 5))
    at_once = case.run()
    for actual, reference in zip(chunked[:3], at_once[:3], strict=True):
        assert relative_error(actual, reference) <= 3e-6
    # Gradients of a temperature have terms of about 1 that may cancel.
    for actual, reference in zip(chunked[3:], at_once[3:], strict=True):
        torch.testing.assert_close(actual, reference, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_packed_documents(dtype: torch.dtype, loss: str) -> None:
    queries, documents = (40, 32, 64), (50, 90, 64)
    case = in_chunks(loss, queries, documents, dtype=dtype, draw=multiples)
    lengths = torch.randint(0, 91, (50,), generator=torch.Generator().manual_seed(0))
    lengths[3], lengths[7] = 0, 90
    mask = (torch.arange(90) < lengths.unsqueeze(1)).cuda()
    case = replace(case, case=replace(case.case, documents_mask=mask), packed=True)
    for scratch in (None, budget(queries, documents, 5)):
        check_definition(case, case.expected(), scratch)


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_statistics(dtype: torch.dtype) -> None:
    """Also without a gradient, where another kernel serves float32, which rounds differently."""
    queries, documents = unit(60, 32, 64, dtype=dtype).requires_grad_(), unit(70, 50, 64, dtype=dtype, seed=1)
    exclude = random_mask((60, 70), 0.2)
    exclude.fill_diagonal_(False)
    scores = maxsim_reference(queries.detach().double(), documents.double())
    negatives = scores.masked_fill(exclude | torch.eye(60, 70, dtype=torch.bool, device="cuda"), -torch.inf).amax(1)
    expected = (scores.diagonal() > negatives).double().mean(), scores.diagonal().mean(), negatives.mean()
    for scratch in (None, 70 * 104 * 7):
        options = {"exclude": exclude, "with_statistics": True, "max_scratch_bytes": scratch}
        loss, statistics = maxsim_cross_entropy(queries, documents, **options)
        assert loss.requires_grad
        for actual, reference in zip(statistics, expected, strict=True):
            assert not actual.requires_grad
            assert actual.is_cuda
            torch.testing.assert_close(actual.double(), reference, rtol=1e-3, atol=1e-3)
        with torch.no_grad():
            rounding = 0.0 if dtype == HALF else 2e-6
            again = maxsim_cross_entropy(queries, documents, **options)[1]
            torch.testing.assert_close(tuple(again), tuple(statistics), rtol=rounding, atol=0.0)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("margin", [None, -0.5])
@pytest.mark.parametrize("shape", [(32, 32), (20, 60), (1, 1), (5, 5), (2, 1000), (40, 60)], ids=str)
def test_few_scores_give_the_same_bits(shape: tuple[int, int], margin: float | None, symmetric: bool) -> None:
    """One program computes all but the last shape; a single document leaves no hardest negative."""
    leaves = unit(shape[0], 32, 128).requires_grad_(), unit(shape[1], 20, 128, seed=1).requires_grad_()
    temperature = torch.tensor(0.7, device="cuda", requires_grad=True)
    options = {"temperature": temperature, "symmetric": symmetric, "margin": margin, "with_statistics": True}

    def step() -> list[torch.Tensor]:
        loss, statistics = maxsim_cross_entropy(*leaves, **options)
        return [loss.detach(), *statistics, *torch.autograd.grad(loss, (*leaves, temperature))]

    first = step()
    assert [tensor.isnan().any().item() for tensor in first] == [False] * 3 + [shape[1] == 1] + [False] * 3
    for _ in range(20):
        torch.testing.assert_close(step(), first, rtol=0, atol=0, equal_nan=True)


def peak(batch: int, **options) -> tuple[int, int]:
    """Bytes beyond the inputs at the peak of a step, and those of the gradients; 32 x 180 tokens of 64 dimensions."""
    leaves = [unit(batch, length, 64, dtype=HALF).requires_grad_() for length in (32, 180)]
    return memory_of(lambda: torch.autograd.grad(maxsim_cross_entropy(*leaves, **options), leaves))


def test_memory_is_linear_in_the_batch() -> None:
    """The argmax of all 4096 would take 1 GiB; here are the gradients, scratch, and a float32 sum of documents.

    The allocator rounds up allocations, by less than 2 MiB for each of some twenty tensors.
    """
    scratch, slack = 64 << 20, 40 << 20
    for batch in (2048, 4096):
        peak_bytes, gradients = peak(batch, max_scratch_bytes=scratch)
        document_bytes = batch * 180 * 64 * 2
        # While chunks add up, the documents' gradient is in float32 alone; at the end, there is no scratch.
        assert peak_bytes <= gradients + max(2 * document_bytes, document_bytes + scratch) + slack


def test_one_chunk_takes_no_sum_in_float32() -> None:
    peak_bytes, gradients = peak(1024)
    # The argmax and half as much of lists, scores and their gradient; 1024 documents in float32 would be 45 MiB more.
    chunk = 1024 * 1024 * (32 * 2 * 3 // 2 + 2 * 4)
    assert chunk < CHUNK_SCRATCH
    assert peak_bytes <= gradients + chunk + (8 << 20)


def test_a_scaled_loss_of_float16_keeps_small_gradients() -> None:
    """In chunks and in one; a gradient of 1e-7 would be 0 or rounded to one digit in float16."""
    case = problem("in order", (64, 32, 64), (64, 50, 64), dtype=torch.float16, temperature=1000.0)
    leaves, wide = case.leaves(), case.doubled().leaves()
    expected = torch.autograd.grad(case.definition(wide) * 2.0**16, wide)
    for scratch in (None, 64 * 104 * 7):
        loss = case.loss_of(leaves, max_scratch_bytes=scratch)
        for actual, reference in zip(torch.autograd.grad(loss * 2.0**16, leaves), expected, strict=True):
            assert actual.dtype == torch.float16
            assert relative_error(actual, reference) <= 1e-2
            assert F.cosine_similarity(actual.double().flatten(), reference.flatten(), dim=0) >= 0.9999
