"""The losses on a GPU in chunks of queries: against their definition, against one chunk, and what memory they take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pylate_flash import maxsim_cross_entropy, maxsim_kl_divergence, maxsim_margin_mse
from pylate_flash.kernels.tables import CHUNK_SCRATCH
from pylate_flash.ops import (
    cross_entropy_reference,
    kl_divergence_reference,
    margin_mse_reference,
    maxsim_reference,
)
from tests.gpu.embeddings import unit
from tests.ops.cases import relative_error

pytestmark = pytest.mark.gpu

# Queries and documents; of the last, more query rows than one program lists, and lists that are summed in parts.
SHAPES = [
    ((23, 4, 32), (29, 9, 32)),
    ((70, 32, 128), (90, 180, 128)),
    ((12, 32, 64), (12, 5, 70, 64)),
    ((100, 32, 128), (110, 3, 128)),
]
LOSSES = ("cross entropy", "symmetric", "divergence", "margin MSE")


def exact(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Multiples of 1/8, whose products and sums are exact in every type: other winners are no rounding's fault."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randint(-2, 3, shape, generator=generator, device="cuda") / 8).to(dtype).requires_grad_()


def problem(
    loss: str, queries: tuple[int, ...], documents: tuple[int, ...], dtype: torch.dtype
) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    """The operation, its definition, and what both take: embeddings, and a temperature."""
    leaves = [exact(*queries, seed=3, dtype=dtype), exact(*documents, seed=4, dtype=dtype)]
    leaves.append(torch.tensor(queries[1] / 50, device="cuda", requires_grad=True))
    shape, generator = (queries[0], documents[-3]), torch.Generator("cuda").manual_seed(2)
    teacher = torch.randn(shape, device="cuda", generator=generator)
    if loss == "margin MSE":
        return (
            lambda q, d, t, **o: maxsim_margin_mse(q, d, teacher, **o) / t,
            lambda q, d, t, **o: margin_mse_reference(maxsim_reference(q, d, **o), teacher) / t,
            leaves,
        )
    if loss == "divergence":
        options = {"teacher_temperature": 2.0, "normalize_scores": True}
        return (
            lambda q, d, t, **o: maxsim_kl_divergence(q, d, teacher, temperature=t, **options, **o),
            lambda q, d, t, **o: kl_divergence_reference(
                maxsim_reference(q, d, **o), teacher, temperature=t, **options
            ),
            leaves,
        )
    labels = torch.randint(shape[1], shape[:1], device="cuda", generator=generator)
    exclude = (teacher > 0.7).scatter_(1, labels.unsqueeze(1), False)
    # Scores are multiples of 1/64.
    options = {"exclude": exclude, "margin": -0.3, "symmetric": loss == "symmetric"}
    return (
        lambda q, d, t, **o: maxsim_cross_entropy(q, d, labels=labels, temperature=t, **options, **o),
        lambda q, d, t, **o: cross_entropy_reference(maxsim_reference(q, d, **o), labels, temperature=t, **options),
        leaves,
    )


def step(loss_of: Callable[..., Tensor], leaves: list[Tensor], **options) -> tuple[Tensor, ...]:
    loss = loss_of(*leaves, **options)
    return loss.detach(), *torch.autograd.grad(loss * 3.0, leaves)


def budget(queries: tuple[int, ...], documents: tuple[int, ...], number: int) -> int:
    """Scratch of about so many queries."""
    return number * documents[-3] * (8 + 3 * queries[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("queries", "documents"), SHAPES)
def test_the_definition_whatever_the_chunks(queries, documents, loss: str, dtype: torch.dtype) -> None:
    if loss == "symmetric" and len(documents) == 4:
        pytest.skip("no other query meets a query's own documents")
    loss_of, definition, leaves = problem(loss, queries, documents, dtype)
    expected = step(definition, [leaf.detach().double().requires_grad_() for leaf in leaves])
    for scratch in (None, budget(queries, documents, 5), budget(queries, documents, 17)):
        first = step(loss_of, leaves, max_scratch_bytes=scratch)
        torch.testing.assert_close(first[0].double(), expected[0], rtol=1e-5, atol=1e-5)
        for found, reference in zip(first[1:3], expected[1:3], strict=True):
            assert found.dtype == dtype
            assert relative_error(found, reference) <= (1e-5 if dtype == torch.float32 else 4e-3)
        torch.testing.assert_close(first[3].double(), expected[3], rtol=1e-4, atol=1e-4)
        for _ in range(5):
            again = step(loss_of, leaves, max_scratch_bytes=scratch)
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"normalize": True},
        {"reduction": "mean", "empty_score": -3.0},
        {"normalize": True, "reduction": "mean", "masking": "zero"},
    ],
    ids=str,
)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("queries", "documents"), SHAPES[:3])
def test_masks_and_options(queries, documents, loss: str, options: dict) -> None:
    if loss == "symmetric" and len(documents) == 4:
        pytest.skip("no other query meets a query's own documents")
    loss_of, _, leaves = problem(loss, queries, documents, torch.float32)
    leaves[:2] = [unit(*shape, seed=seed).requires_grad_() for seed, shape in enumerate((queries, documents))]
    generator = torch.Generator("cuda").manual_seed(5)
    of_documents = torch.rand(documents[:-1], device="cuda", generator=generator) > 0.3
    of_documents[..., -1, :] = False
    weights = torch.rand(queries[:-1], device="cuda", generator=generator)
    options = options | {"queries_mask": weights * (weights > 0.3), "documents_mask": of_documents}
    torch.set_float32_matmul_precision("highest")
    whole = step(loss_of, leaves, **options)
    chunked = step(loss_of, leaves, max_scratch_bytes=budget(queries, documents, 5), **options)
    for found, reference in zip(chunked, whole, strict=True):
        assert relative_error(found, reference) <= 3e-6


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_documents(dtype: torch.dtype, loss: str) -> None:
    queries, documents = (40, 32, 64), (50, 90, 64)
    loss_of, definition, (q, d, t) = problem(loss, queries, documents, dtype)
    lengths = torch.randint(0, 91, (50,), generator=torch.Generator().manual_seed(0))
    lengths[3], lengths[7] = 0, 90
    mask = (torch.arange(90) < lengths.unsqueeze(1)).cuda()
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().cuda()
    wide = [leaf.detach().double().requires_grad_() for leaf in (q, d, t)]
    expected = step(definition, wide, documents_mask=mask)
    packed = d.detach()[mask].requires_grad_()
    for scratch in (None, budget(queries, documents, 5)):
        found = step(
            loss_of, [q, packed, t], documents_cu_seqlens=bounds, max_document_length=90, max_scratch_bytes=scratch
        )
        torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
        rounding = 1e-5 if dtype == torch.float32 else 4e-3
        assert relative_error(found[1], expected[1]) <= rounding
        assert relative_error(found[2], expected[2][mask]) <= rounding
        torch.testing.assert_close(found[3].double(), expected[3], rtol=1e-4, atol=1e-4)


def test_statistics() -> None:
    queries, documents = unit(60, 32, 64).requires_grad_(), unit(70, 50, 64, seed=1)
    exclude = torch.rand(60, 70, device="cuda") > 0.8
    exclude.fill_diagonal_(False)
    scores = maxsim_reference(queries.detach().double(), documents.double())
    others = scores.masked_fill(exclude | torch.eye(60, 70, dtype=torch.bool, device="cuda"), -torch.inf).amax(1)
    expected = (scores.diagonal() > others).double().mean(), scores.diagonal().mean(), others.mean()
    for scratch in (None, 70 * 104 * 7):
        loss, statistics = maxsim_cross_entropy(
            queries, documents, exclude=exclude, with_statistics=True, max_scratch_bytes=scratch
        )
        assert loss.requires_grad
        for found, reference in zip(statistics, expected, strict=True):
            assert not found.requires_grad
            assert found.is_cuda
            torch.testing.assert_close(found.double(), reference, rtol=1e-3, atol=1e-3)
        with torch.no_grad():
            _, alone = maxsim_cross_entropy(
                queries, documents, exclude=exclude, with_statistics=True, max_scratch_bytes=scratch
            )
        assert all(torch.equal(a, b) for a, b in zip(alone, statistics, strict=True))


def peak(batch: int, dtype: torch.dtype, **options) -> tuple[int, int]:
    """Bytes beyond the inputs at the peak of a step, and those of the gradients; 32 x 180 tokens of 64 dimensions."""
    leaves = [unit(batch, 32, 64, dtype=dtype).requires_grad_(), unit(batch, 180, 64, dtype=dtype).requires_grad_()]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(maxsim_cross_entropy(*leaves, **options), leaves)
    return torch.cuda.max_memory_allocated() - before, sum(g.numel() * g.element_size() for g in gradients)


def test_memory_is_linear_in_the_batch() -> None:
    """All winners of 4096 would take 1 GiB. Here there are the gradients, the scratch, and a float32 sum of documents.

    The allocator rounds what it gives out, by less than 2 MiB for each of some twenty tensors.
    """
    scratch, slack = 64 << 20, 40 << 20
    peak(1024, torch.bfloat16, max_scratch_bytes=scratch)
    for batch in (2048, 4096):
        taken, gradients = peak(batch, torch.bfloat16, max_scratch_bytes=scratch)
        of_documents = batch * 180 * 64 * 2
        # While chunks add up, the gradient of the documents in their type is not there; at the end, no scratch is.
        assert taken <= gradients + max(2 * of_documents, of_documents + scratch) + slack


def test_one_chunk_takes_no_sum_in_float32() -> None:
    peak(512, torch.bfloat16)
    taken, gradients = peak(1024, torch.bfloat16)
    # Winners and half as much of lists, scores and their gradient; 1024 documents in float32 would be 45 MiB more.
    chunk = 1024 * 1024 * (32 * 2 * 3 // 2 + 2 * 4)
    assert chunk < CHUNK_SCRATCH
    assert taken <= gradients + chunk + (8 << 20)


def test_a_scaled_loss_of_float16_keeps_small_gradients() -> None:
    """In chunks as in one; a gradient of 1e-7 would be 0 or rounded to one digit in float16."""
    leaves = unit(64, 32, 64, dtype=torch.float16).requires_grad_(), unit(64, 50, 64, dtype=torch.float16, seed=1)
    leaves[1].requires_grad_()
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(cross_entropy_reference(maxsim_reference(*wide), temperature=1000.0) * 2.0**16, wide)
    for scratch in (None, 64 * 104 * 7):
        loss = maxsim_cross_entropy(*leaves, temperature=1000.0, max_scratch_bytes=scratch)
        for found, reference in zip(torch.autograd.grad(loss * 2.0**16, leaves), expected, strict=True):
            assert found.dtype == torch.float16
            assert relative_error(found, reference) <= 1e-2
            assert F.cosine_similarity(found.double().flatten(), reference.flatten(), dim=0) >= 0.9999
