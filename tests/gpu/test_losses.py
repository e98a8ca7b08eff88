"""The losses on a GPU: against their definition in float64, and everything that calls them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from pylate_flash import maxsim, maxsim_cross_entropy, maxsim_kl_divergence
from pylate_flash.ops import cross_entropy_reference, kl_divergence_reference, maxsim_reference
from tests.gpu.embeddings import unit
from tests.ops.cases import relative_error

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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
KINDS = ("in order", "labels", "teacher")


def problem(queries: tuple, documents: tuple, kind: str, dtype: torch.dtype = torch.bfloat16, **options):
    """A function of embeddings, the same by definition, and embeddings."""
    leaves = unit(*queries, dtype=dtype).requires_grad_(), unit(*documents, dtype=dtype, seed=1).requires_grad_()
    shape = queries[0], documents[-3]
    generator = torch.Generator("cuda").manual_seed(2)
    options = {"temperature": 0.1} | options
    of_loss = {name: options.pop(name) for name in ("temperature", "loss_reduction") if name in options}
    scoring, options = options, of_loss
    if kind == "teacher":
        teacher = torch.randn(shape, device="cuda", generator=generator)
        return (
            lambda *t: maxsim_kl_divergence(*t, teacher, **options, **scoring),
            lambda *t: kl_divergence_reference(maxsim_reference(*t, **scoring), teacher, **options),
            leaves,
        )
    labels = torch.randint(shape[1], shape[:1], device="cuda", generator=generator) if kind == "labels" else None
    reference = labels
    if labels is None:
        reference = torch.zeros(shape[0], dtype=torch.int64) if len(documents) == 4 else torch.arange(shape[0])
        reference = reference.cuda()
    return (
        lambda *t: maxsim_cross_entropy(*t, labels=labels, **options, **scoring),
        lambda *t: cross_entropy_reference(maxsim_reference(*t, **scoring), reference, **options),
        leaves,
    )


def step(loss_of: Callable[..., torch.Tensor], leaves, factor: float = 1.0) -> tuple[torch.Tensor, ...]:
    loss = loss_of(*leaves)
    return loss.detach(), *torch.autograd.grad((loss * factor).sum(), leaves)


def doubled(leaves) -> tuple[torch.Tensor, ...]:
    return tuple(leaf.detach().double().requires_grad_() for leaf in leaves)


def is_one_operator(loss: torch.Tensor) -> bool:
    """Whether the gradients were computed with the loss."""
    return type(loss.grad_fn).__name__ == "_MaxsimLossBackward"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "documents"), SHAPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum", "none"])
def test_exact_scores(queries, documents, kind: str, dtype: torch.dtype, loss_reduction: str) -> None:
    options = {"loss_reduction": loss_reduction, "temperature": queries[1] / 50}
    loss_of, definition, leaves = problem(queries, documents, kind, dtype, **options)
    with torch.no_grad():
        # Multiples of 1/8, whose products and sums are exact in every type: other winners are no rounding's fault.
        for leaf, seed in zip(leaves, (3, 4), strict=True):
            generator = torch.Generator("cuda").manual_seed(seed)
            leaf.copy_(torch.randint(-2, 3, leaf.shape, generator=generator, device="cuda") / 8)
    assert is_one_operator(loss_of(*leaves)) == (loss_reduction != "none")
    found, expected = step(loss_of, leaves, 3.0), step(definition, doubled(leaves), 3.0)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-4, atol=1e-4)
    largest = max(gradient.norm() for gradient in expected[1:])
    for gradient, reference in zip(found[1:], expected[1:], strict=True):
        assert gradient.dtype == dtype
        rounding = 1e-5 if dtype == torch.float32 else 1e-2
        assert (gradient - reference).norm() <= rounding * reference.norm() + 1e-5 * largest
        if dtype != torch.float32 and reference.norm() > 1e-3 * largest:
            assert F.cosine_similarity(gradient.double().flatten(), reference.flatten(), dim=0) >= 0.9999


@pytest.mark.parametrize(
    ("masks", "options"),
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
def test_masks_and_options(queries, documents, kind: str, masks: str, options: dict) -> None:
    options = dict(options)
    generator = torch.Generator("cuda").manual_seed(5)
    for name, shape in (("queries", queries), ("documents", documents)):
        if name in masks:
            mask = torch.rand(shape[:-1], device="cuda", generator=generator) > 0.3
            mask[-1] = False
            if name == "queries" and "weights" in masks:
                mask = mask * (0.25 + 2 * torch.rand(shape[:-1], device="cuda", generator=generator))
            options[f"{name}_mask"] = mask.float() if "float" in masks else mask.long() if "int64" in masks else mask
    loss_of, definition, leaves = problem(queries, documents, kind, **options)
    assert is_one_operator(loss_of(*leaves))
    expected = step(definition, doubled(leaves))
    for _ in range(3):
        found = step(loss_of, leaves)
        torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-4, atol=1e-4)
        assert all(relative_error(a, b) <= 1e-2 for a, b in zip(found[1:], expected[1:], strict=True))
    loss = loss_of(*leaves)
    torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    assert all(relative_error(a, b) <= 1e-2 for a, b in zip(again, expected[1:], strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("queries", "documents"), [((128, 32, 128), (128, 180, 128)), ((16, 32, 128), (16, 8, 300, 128))]
)
def test_bitwise_reproducible(queries, documents, kind: str) -> None:
    loss_of, _, leaves = problem(queries, documents, kind)
    first = step(loss_of, leaves)
    assert all(torch.equal(a, b) for _ in range(19) for a, b in zip(step(loss_of, leaves), first, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"normalize": True, "masking": "zero", "reduction": "mean"}], ids=str)
@pytest.mark.parametrize(
    ("queries", "documents"),
    [((16, 32, 128), (20, 70, 128)), ((3, 200, 64), (9, 70, 64)), ((6, 32, 64), (6, 5, 70, 64))],
)
def test_zeros_and_ones_of_any_type_give_the_same_bits(queries, documents, options: dict, kind: str) -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    of_queries, of_documents = (
        torch.rand(shape[:-1], device="cuda", generator=generator) > 0.3 for shape in (queries, documents)
    )
    results = []
    for dtype in (torch.bool, torch.int64, torch.float32, torch.bfloat16):
        masks = {"queries_mask": of_queries.to(dtype), "documents_mask": of_documents.to(dtype)}
        loss_of, _, leaves = problem(queries, documents, kind, **masks, **options)
        results.append(step(loss_of, leaves))
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward(kind: str) -> None:
    """The gradients of the first were given away, and may have been changed."""
    loss_of, _, leaves = problem((64, 32, 128), (64, 90, 128), kind)
    loss = loss_of(*leaves)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()
    for factor in (1.0, -2.0):
        for found, expected in zip(torch.autograd.grad(loss * factor, leaves, retain_graph=True), kept, strict=True):
            assert relative_error(found, expected * factor) <= 1e-2
    (of_documents,) = torch.autograd.grad(loss, leaves[1])
    assert relative_error(of_documents, kept[1]) <= 1e-2
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_second_derivative_is_refused() -> None:
    loss_of, _, leaves = problem((8, 32, 64), (8, 50, 64), "in order")
    (gradient,) = torch.autograd.grad(loss_of(*leaves), leaves[0], create_graph=True)
    assert relative_error(gradient, step(loss_of, leaves)[1]) <= 1e-2
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


def test_frozen_documents_and_frozen_queries() -> None:
    loss_of, _, (queries, documents) = problem((64, 32, 128), (64, 90, 128), "in order")
    _, *both = step(loss_of, (queries, documents))
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(loss_of(queries, documents.detach()), queries)[0], both[0])
        assert torch.equal(torch.autograd.grad(loss_of(queries.detach(), documents), documents)[0], both[1])
    with torch.no_grad():
        assert not loss_of(queries, documents).requires_grad


def test_the_same_tensor_twice() -> None:
    tokens = unit(16, 32, 64, dtype=torch.bfloat16).requires_grad_()
    other = tokens.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(maxsim_cross_entropy(tokens, tokens, temperature=10.0), tokens)
    expected = cross_entropy_reference(maxsim_reference(other, other), temperature=10.0)
    assert relative_error(found, torch.autograd.grad(expected, other)[0]) <= 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_any_stride_and_address(kind: str) -> None:
    loss_of, _, (queries, documents) = problem((16, 32, 128), (20, 90, 128), kind)
    expected = step(loss_of, (queries, documents))
    storage = torch.empty(documents.numel() + 1, device="cuda", dtype=torch.bfloat16)
    shifted = storage[1:].view(documents.shape).copy_(documents.detach()).requires_grad_()
    wide = torch.empty(16, 40, 160, device="cuda", dtype=torch.bfloat16)
    narrow = wide[:, :32, :128].copy_(queries.detach()).requires_grad_()
    for leaves in ((queries, shifted), (narrow, documents), (narrow, shifted)):
        for _ in range(3):
            for found, reference in zip(step(loss_of, leaves), expected, strict=True):
                assert relative_error(found, reference) <= 1e-2


def test_a_label_out_of_range_is_not_a_number() -> None:
    queries, documents = unit(4, 32, 64, dtype=torch.bfloat16), unit(6, 50, 64, dtype=torch.bfloat16)
    losses = maxsim_cross_entropy(
        queries, documents, labels=torch.tensor([5, 6, -100, 0], device="cuda"), loss_reduction="none"
    )
    assert losses.isnan().tolist() == [False, True, True, False]


def test_not_a_number_is_seen() -> None:
    loss_of, _, (queries, documents) = problem((8, 32, 64), (8, 50, 64), "teacher")
    with torch.no_grad():
        documents[3, 4, 5] = torch.nan
    loss, grad_queries, _ = step(loss_of, (queries, documents))
    assert loss.isnan()
    assert grad_queries.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_grad_scaler(dtype: torch.dtype) -> None:
    """A scale that float16 would lose the gradients without."""
    queries, documents = unit(256, 32, 64).requires_grad_(), unit(256, 50, 64, seed=1).requires_grad_()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16)
    with torch.autocast("cuda", dtype=dtype):
        loss = maxsim_cross_entropy(queries, documents, temperature=100.0)
    assert is_one_operator(loss)
    scaler.scale(loss).backward()
    others = [leaf.detach().to(dtype).double().requires_grad_() for leaf in (queries, documents)]
    expected = torch.autograd.grad(
        cross_entropy_reference(maxsim_reference(*others), temperature=100.0) * 2.0**16, others
    )
    for leaf, reference in zip((queries, documents), expected, strict=True):
        assert relative_error(leaf.grad, reference) <= 1e-2


def test_activation_checkpointing() -> None:
    loss_of, _, leaves = problem((16, 32, 64), (16, 50, 64), "in order")
    expected = step(loss_of, leaves)
    found = step(lambda *t: torch.utils.checkpoint.checkpoint(loss_of, *t, use_reentrant=False), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_compiles_into_one_graph() -> None:
    loss_of, _, leaves = problem((16, 32, 64), (16, 50, 64), "teacher", torch.float32)
    for found, expected in zip(
        step(torch.compile(loss_of, fullgraph=True), leaves), step(loss_of, leaves), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_and_cuda_graphs(kind: str) -> None:
    loss_of, _, leaves = problem((64, 32, 128), (64, 90, 128), kind)
    expected = step(loss_of, leaves, 2.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            found = step(loss_of, leaves, 2.0)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(loss_of, leaves, 2.0)
    for tensor in found:
        tensor.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_step_keeps_the_gradients_and_nothing_else() -> None:
    loss_of, _, leaves = problem((512, 32, 128), (512, 90, 128), "in order")
    step(loss_of, leaves)
    before = torch.cuda.memory_allocated()
    loss = loss_of(*leaves)
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    # Winners would be 16 MiB; the allocator may leave up to 1 MiB of a block unused.
    assert gradients <= torch.cuda.memory_allocated() - before <= gradients + (3 << 20)
    del loss


def test_bad_input_is_an_error_each_time() -> None:
    queries, documents = (unit(4, 32, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"labels must have shape \[4\]"):
            maxsim_cross_entropy(queries, documents, labels=torch.zeros(3, dtype=torch.int64, device="cuda"))
        with pytest.raises(ValueError, match="labels must be on the device of queries"):
            maxsim_cross_entropy(queries, documents, labels=torch.zeros(4, dtype=torch.int64))
        with pytest.raises(ValueError, match="loss_reduction must be one of"):
            maxsim_cross_entropy(queries, documents, loss_reduction="max")
        with pytest.raises(ValueError, match="teacher_scores must not require a gradient"):
            maxsim_kl_divergence(queries, documents, torch.zeros(4, 4, device="cuda", requires_grad=True))
    labels = torch.tensor([3, 2, 1, 0], device="cuda")
    found, expected = (
        step(lambda q, d, labels=labels: maxsim_cross_entropy(q, d, labels=labels), (queries, documents))
        for labels in (labels.int(), labels)
    )
    assert all(relative_error(a, b) <= 1e-2 for a, b in zip(found, expected, strict=True))


def test_the_scores_are_those_of_maxsim() -> None:
    loss_of, _, leaves = problem((64, 32, 128), (64, 90, 128), "in order")
    expected = F.cross_entropy(maxsim(*leaves) / 0.1, torch.arange(64, device="cuda"))
    torch.testing.assert_close(loss_of(*leaves), expected, rtol=1e-5, atol=1e-5)
