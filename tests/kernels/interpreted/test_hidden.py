"""`maxsim_from_hidden` through the interpreted kernels: blocks of documents, which are views of what they take."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pylate_flash.ops import hidden as module
from pylate_flash.ops import hidden_plans, maxsim_from_hidden, maxsim_from_hidden_reference
from tests.ops.cases import relative_error
from tests.ops.test_hidden import Problem

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")


@pytest.mark.parametrize("scratch", [module.SCRATCH_BYTES, 2048])
@pytest.mark.parametrize("layout", ["in-batch", "candidates", "packed", "packed candidates"])
def test_blocks(layout: str, scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCRATCH_BYTES", scratch)
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
    for name, found in problem.gradients(kernel).items():
        assert relative_error(found, gradients[name]) <= 1e-5, name


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
        ((3, 5, 16), (7, 6, 20), module.SCRATCH_BYTES),
        ((3, 5, 16), (7, 6, 20), 2 * 6 * 16 * 2),
        ((1, 5, 16), (7, 6, 20), 3 * 6 * 16 * 2),
        ((3, 5, 16), (3, 2, 6, 20), module.SCRATCH_BYTES),
        ((3, 5, 16), (3, 2, 6, 20), 2 * 2 * 6 * 16 * 2),
        ((3, 70, 16), (3, 2, 6, 20), 2 * 6 * 16 * 2),
    ],
)
def test_the_short_way(
    queries_shape: tuple, hidden_shape: tuple, scratch: int, with_bias: bool, masked: bool, masking: str
) -> None:
    """On a GPU, a plain call is decided once, in one block or several; its scores are those of the longer way."""
    generator = torch.Generator().manual_seed(0)
    shapes = queries_shape, hidden_shape, (16, 20), (16,)
    queries, hidden, weight, bias = (torch.randn(shape, generator=generator).half() for shape in shapes)
    layer = (weight, bias if with_bias else None)
    mask = torch.rand(hidden_shape[:-1], generator=generator) > 0.4 if masked else None
    arguments = (queries, hidden, *layer, mask)
    for normalize in (False, True):
        options = normalize, masking, "triton"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SCRATCH_BYTES", scratch)
            expected = module.maxsim_from_hidden(
                *arguments, normalize=normalize, masking=masking, implementation="triton"
            )
        plan = hidden_plans.decide(*map(hidden_plans.kind, arguments), None, None, True, False, *options, scratch)
        assert plan is not None
        assert torch.equal(plan.forward(*arguments, None)[0], expected)


@pytest.mark.parametrize(
    ("hidden_shape", "masked", "normalize"),
    [((5, 6, 20), False, True), ((5, 6, 20), True, False), ((3, 2, 6, 20), True, True), ((3, 2, 6, 20), False, False)],
)
def test_the_short_way_of_a_step(hidden_shape: tuple, masked: bool, normalize: bool, monkeypatch) -> None:
    """Gradients and errors are those of the longer way; so are a second backward and one of a part of the inputs."""
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 5, 16), hidden_shape, (16, 20), (16,)
    leaves = [torch.randn(shape, generator=generator).half().requires_grad_() for shape in shapes]
    mask = torch.rand(hidden_shape[:-1], generator=generator) > 0.4 if masked else None

    def score() -> torch.Tensor:
        return maxsim_from_hidden(*leaves, mask, normalize=normalize, implementation="triton")

    def differentiate(scores: torch.Tensor, leaves=leaves, **options) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(scores, leaves, torch.cos(scores.detach()), **options)

    scores = score()
    expected = differentiate(scores)
    taken = []

    def planned(*arguments):
        *tensors, longest, normalize, masking, implementation, scratch = arguments
        kinds = map(hidden_plans.kind, tensors)
        taken.append(hidden_plans.decide(*kinds, longest, True, True, normalize, masking, implementation, scratch))
        return taken[-1]

    monkeypatch.setattr(module, "plan_of", planned)
    monkeypatch.setattr(module, "_is_current", lambda tensor: True)
    assert torch.equal(score(), scores)
    assert taken[0] is not None
    found = score()
    for _ in range(2):
        gradients = differentiate(found, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(differentiate(score(), [leaf])[0], gradient)
    found = score()
    gradients = differentiate(found, create_graph=True)
    for again in (gradients, differentiate(found, retain_graph=True), differentiate(found)):
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradients[1].sum().backward()
    found = score()
    with torch.no_grad():
        leaves[2].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_what_does_not_go_the_short_way() -> None:
    queries, hidden, weight = torch.zeros(3, 5, 16).half(), torch.zeros(3, 4, 6, 20).half(), torch.zeros(16, 20).half()

    def decide(
        queries=queries, hidden=hidden, weight=weight, bias=None, mask=None, masking="exclude", scratch=1 << 20,
        learning=False, bounds=None, longest=None,
    ):  # fmt: skip
        kinds = map(hidden_plans.kind, (queries, hidden, weight, bias, mask, bounds))
        return hidden_plans.decide(*kinds, longest, True, learning, True, masking, "triton", scratch)

    assert decide() is not None
    assert decide(learning=True) is not None
    assert decide(learning=True, scratch=3 * 4 * 6 * 16 * 2) is None, "no room for what is projected and its gradient"
    assert decide(hidden=hidden.transpose(1, 2).contiguous().transpose(1, 2)) is None
    assert decide(hidden=hidden[:2]) is None
    assert decide(hidden=hidden[0, 0]) is None
    assert decide(scratch=2 * 6 * 16 * 2) is None, "half of a query's candidates do not fit"
    assert decide(weight=weight.float()) is None
    assert decide(weight=weight[:8]) is None
    assert decide(bias=torch.zeros(20).half()) is None
    assert decide(mask=torch.ones(3, 4, 6)) is None
    assert decide(mask=torch.ones(3, 4, 5, dtype=torch.bool)) is None
    assert decide(masking="other") is None
    assert decide(queries.float(), hidden.float(), weight.float()) is None
    tokens, bounds = hidden.view(-1, 20), torch.arange(13, dtype=torch.int32) * 6
    assert decide(hidden=tokens, bounds=bounds, longest=6) is not None
    assert decide(hidden=tokens, bounds=bounds, longest=6, learning=True) is None
    assert decide(hidden=tokens, bounds=bounds) is None, "the longest document is not known"
    assert decide(hidden=tokens, bounds=bounds, longest=6, scratch=71 * 16 * 2) is None, "several blocks"
    assert decide(hidden=tokens, bounds=bounds.float(), longest=6) is None
    assert decide(hidden=tokens, bounds=bounds, longest=6, mask=torch.ones(12, 6, dtype=torch.bool)) is None
    assert decide(longest=6) is None


@pytest.mark.parametrize("normalize", [False, True])
def test_the_short_way_of_packed_documents(normalize: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, hidden, weight = (
        torch.randn(shape, generator=generator).half() for shape in ((3, 5, 16), (40, 20), (16, 20))
    )
    bounds = torch.tensor([0, 7, 7, 30, 40], dtype=torch.int32)
    arguments = (queries, hidden, weight, None, None, bounds)
    expected = maxsim_from_hidden(
        queries, hidden, weight, documents_cu_seqlens=bounds, normalize=normalize, implementation="triton"
    )
    plan = hidden_plans.decide(
        *map(hidden_plans.kind, arguments), 23, True, False, normalize, "exclude", "triton", module.SCRATCH_BYTES
    )
    assert plan is not None
    assert torch.equal(plan.forward(*arguments)[0], expected)
