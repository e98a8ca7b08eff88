"""`maxsim_from_hidden` with interpreted kernels: blocks of documents, which are views of the inputs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pylate_flash.ops import hidden_blocks as module
from pylate_flash.ops import maxsim_from_hidden, maxsim_from_hidden_reference
from tests.ops.cases import relative_error
from tests.ops.test_hidden import Problem, limit_scratch


@pytest.mark.parametrize("scratch", [module.SCRATCH_BYTES, 2048])
@pytest.mark.parametrize("layout", ["in-batch", "candidates", "packed", "packed candidates"])
def test_blocks(layout: str, scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_scratch(monkeypatch, scratch)
    torch.manual_seed(0)
    shape = {"in-batch": (6, 10, 12), "candidates": (3, 2, 10, 12)}.get(layout, (48, 12))
    tensors = {"queries": torch.randn(3, 5, 16), "hidden": torch.randn(shape), "weight": torch.randn(16, 12)}
    tensors["bias"] = torch.randn(16) / 4
    options: dict = {"queries_mask": torch.rand(3, 5) > 0.3}
    if layout.startswith("packed"):
        options["documents_cu_seqlens"] = torch.tensor([0, 10, 13, 13, 30, 40, 48])
        if "candidates" in layout:
            options["candidates_cu_seqlens"] = torch.tensor([0, 1, 4, 6])
    else:
        options["documents_mask"] = torch.rand(shape[:-1]) > 0.3
    problem = Problem(tensors, options)
    kernel = partial(maxsim_from_hidden, implementation="triton")
    expected = problem.to(torch.float64)
    torch.testing.assert_close(
        problem(kernel).double(), expected(maxsim_from_hidden_reference).double(), rtol=1e-5, atol=1e-5
    )
    gradients = expected.gradients(maxsim_from_hidden_reference)
    for name, actual in problem.gradients(kernel).items():
        assert relative_error(actual, gradients[name]) <= 1e-5, name


def test_masked_query_tokens_do_not_meet_the_tokens_of_packed_documents() -> None:
    torch.manual_seed(0)
    tensors = {"queries": torch.randn(2, 5, 16), "hidden": torch.randn(20, 12), "weight": torch.randn(16, 12)}
    tensors["hidden"][3, 0] = torch.nan
    mask = torch.tensor([[True, False, True, True, False], [False] * 5])
    problem = Problem(tensors, {"queries_mask": mask, "documents_cu_seqlens": torch.tensor([0, 8, 20])})
    scores = problem(partial(maxsim_from_hidden, implementation="triton"))
    torch.testing.assert_close(scores, problem(maxsim_from_hidden_reference), equal_nan=True, rtol=1e-5, atol=1e-5)
    assert (scores[1] == 0).all()


@pytest.mark.parametrize("masking", ["exclude", "zero"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("queries_shape", "hidden_shape", "scratch"),
    [
        ((3, 5, 16), (7, 6, 20), 2 * 6 * 16 * 2),
        ((1, 5, 16), (7, 6, 20), 3 * 6 * 16 * 2),
        ((3, 5, 16), (3, 2, 6, 20), 2 * 2 * 6 * 16 * 2),
        ((3, 70, 16), (3, 2, 6, 20), 2 * 6 * 16 * 2),
        ((3, 5, 16), (3, 2, 6, 20), 1),
    ],
)
def test_blocks_of_half_precision_score_as_one(
    queries_shape: tuple, hidden_shape: tuple, scratch: int, with_bias: bool, masked: bool, masking: str, monkeypatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = queries_shape, hidden_shape, (16, 20), (16,)
    queries, hidden, weight, bias = (torch.randn(shape, generator=generator).half() for shape in shapes)
    mask = torch.rand(hidden_shape[:-1], generator=generator) > 0.4 if masked else None
    for normalize in (False, True):
        score = partial(
            maxsim_from_hidden, queries, hidden, weight, bias if with_bias else None, documents_mask=mask,
            normalize=normalize, masking=masking, implementation="triton",
        )  # fmt: skip
        expected = score()
        with monkeypatch.context() as patch:
            limit_scratch(patch, scratch)
            assert torch.equal(score(), expected)


@pytest.mark.parametrize(
    ("hidden_shape", "masked", "normalize"),
    [((5, 6, 20), False, True), ((5, 6, 20), True, False), ((3, 2, 6, 20), True, True), ((3, 2, 6, 20), False, False)],
)
def test_ways_to_differentiate_a_step(hidden_shape: tuple, masked: bool, normalize: bool, monkeypatch) -> None:
    """Repeatedly, for some inputs only, with create_graph, and with too little memory for what is saved."""
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 5, 16), hidden_shape, (16, 20), (16,)
    leaves = [torch.randn(shape, generator=generator).half().requires_grad_() for shape in shapes]
    mask = torch.rand(hidden_shape[:-1], generator=generator) > 0.4 if masked else None

    def score() -> torch.Tensor:
        return maxsim_from_hidden(*leaves, documents_mask=mask, normalize=normalize, implementation="triton")

    def differentiate(scores: torch.Tensor, leaves=leaves, **options) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(scores, leaves, torch.cos(scores.detach()), **options)

    def assert_equal(actual: tuple[torch.Tensor, ...]) -> None:
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))

    actual = score()
    expected = differentiate(actual, retain_graph=True)
    for _ in range(2):
        assert_equal(differentiate(actual, retain_graph=True))
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(differentiate(score(), [leaf])[0], gradient)
    actual = score()
    gradients = differentiate(actual, create_graph=True)
    for repeated in (gradients, differentiate(actual, retain_graph=True), differentiate(actual)):
        assert_equal(repeated)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradients[1].sum().backward()
    with monkeypatch.context() as patch:
        # Enough for all documents, but not for their gradient as well.
        limit_scratch(patch, 2 * 6 * 16 * 6)
        for gradient, reference in zip(differentiate(score()), expected, strict=True):
            assert relative_error(gradient, reference) <= 2e-3
    actual = score()
    with torch.no_grad():
        leaves[2].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        actual.sum().backward()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("layout", ["in-batch", "packed"])
def test_masks_of_any_type_and_weights(layout: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 5, 16), (6, 10, 12), (16, 12)
    tensors = dict(
        zip(("queries", "hidden", "weight"), (torch.randn(s, generator=generator) for s in shapes), strict=True)
    )
    mask = torch.rand(3, 5, generator=generator) > 0.3
    options: dict = {"queries_mask": mask.to(dtype), "empty_score": -2.0}
    if layout == "packed":
        tensors["hidden"] = tensors["hidden"].flatten(0, 1)
        options["documents_cu_seqlens"] = torch.tensor([0, 10, 13, 13, 30, 40, 60])
    else:
        options["documents_mask"] = (torch.rand(6, 10, generator=generator) > 0.3).to(dtype)
        options["documents_mask"][2] = 0
    if dtype == torch.float32:
        options["queries_mask"] = mask * torch.rand(3, 5, generator=generator)
    for reduction in ("sum", "mean"):
        problem = Problem(tensors, options | {"reduction": reduction})
        exact = problem.to(torch.float64)
        kernel = partial(maxsim_from_hidden, implementation="triton")
        expected = exact(maxsim_from_hidden_reference)
        assert (expected[:, 2] == -2.0).all()
        torch.testing.assert_close(problem(kernel).double(), expected.double(), rtol=1e-5, atol=1e-5)
        gradients = exact.gradients(maxsim_from_hidden_reference)
        for name, actual in problem.gradients(kernel).items():
            assert relative_error(actual, gradients[name]) <= 1e-5, name
