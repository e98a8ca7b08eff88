"""`maxsim_from_hidden` against its definition in float64, over layouts, masks and scratch sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pylate_flash import maxsim_from_hidden, pack
from pylate_flash.ops import hidden, maxsim_from_hidden_reference
from pylate_flash.ops import hidden_blocks as module
from tests.ops.cases import Case, cases, differentiated, mistakes, relative_error, wrong
from tests.ops.test_varlen import packed

# With one dimension many tokens share a direction, and with two nearly so: rounding would decide the argmax.
MODEL_SIZES = st.integers(3, 40)
PROJECTED_SIZES = st.integers(3, 24)
OPTIONS = {"max_examples": 40}


@dataclass(frozen=True)
class Problem:
    """One call: the tensors that get gradients, by argument name, and all other arguments."""

    tensors: dict[str, Tensor]
    rest: dict

    def to(self, dtype: torch.dtype) -> Problem:
        return replace(self, tensors={name: tensor.to(dtype) for name, tensor in self.tensors.items()})

    def __call__(self, function) -> Tensor:
        return function(**self.tensors, **self.rest)

    def gradients(self, function, names: tuple[str, ...] | None = None) -> dict[str, Tensor]:
        """Gradients by argument name, computed by `differentiated`."""
        names = tuple(self.tensors) if names is None else names

        def scores(*leaves: Tensor) -> Tensor:
            return function(**(self.tensors | dict(zip(names, leaves, strict=True))), **self.rest)

        result = differentiated(scores, [self.tensors[name] for name in names], {})
        return dict(zip(names, result, strict=True))


def layers(draw: st.DrawFn, case: Case, dtype: torch.dtype, sizes: st.SearchStrategy[int]) -> dict[str, Tensor]:
    """Draw queries, hidden states and layers of the shapes of a case."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    d_model, d = case.documents.shape[-1], draw(sizes)
    hidden = torch.randn(case.documents.shape, generator=generator)
    tensors = {"hidden": hidden, "weight": torch.randn(d, d_model, generator=generator)}
    if draw(st.booleans()):
        tensors["bias"] = torch.randn(d, generator=generator) / 4
    if draw(st.booleans()):
        tensors |= {"queries": case.queries, "queries_weight": torch.randn(d, d_model, generator=generator)}
        if draw(st.booleans()):
            tensors["queries_bias"] = torch.randn(d, generator=generator) / 4
    else:
        tensors["queries"] = torch.nn.functional.normalize(
            torch.randn(*case.queries.shape[:-1], d, generator=generator), dim=-1
        )
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


@st.composite
def problems(
    draw: st.DrawFn, dtype: torch.dtype = torch.float32, sizes: st.SearchStrategy[int] = PROJECTED_SIZES
) -> Problem:
    if draw(st.booleans()):
        case = draw(cases(dtypes=(torch.float32,), sizes=MODEL_SIZES))
        masks = {"queries_mask": case.queries_mask, "documents_mask": case.documents_mask}
        return Problem(layers(draw, case, dtype, sizes), masks | case.options)
    (queries, documents, queries_bounds, documents_bounds), options = draw(
        packed(dtypes=(torch.float32,), sizes=MODEL_SIZES)
    )
    options = options | {"documents_cu_seqlens": documents_bounds}
    if draw(st.booleans()):
        options["queries_cu_seqlens"] = queries_bounds
    else:
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        shape = len(queries_bounds) - 1, draw(st.integers(1, 12))
        queries = torch.randn(*shape, documents.shape[-1], generator=generator)
        active = torch.rand(shape, generator=generator) > 0.4
        weights = active * (0.25 + torch.rand(shape, generator=generator))
        options["queries_mask"] = draw(st.sampled_from([None, active, weights]))
    return Problem(layers(draw, Case(queries, documents, None, None, {}), dtype, sizes), options)


# Scratch sizes in bytes: the default, which these problems stay within, and ones that each or some documents exceed.
SCRATCHES = st.sampled_from([module.SCRATCH_BYTES, 1, 2000, 8000])


def limit_scratch(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Limit the scratch to `nbytes`, whatever the size of the hidden states."""
    patch.setattr(module, "SCRATCH_BYTES", nbytes)
    patch.setattr(module, "STATES_PER_SCRATCH", 1 << 60)


@settings(max_examples=80)
@given(problem=problems(), scratch=SCRATCHES)
def test_scores_and_gradients_equal_the_definition(problem: Problem, scratch: int) -> None:
    wide = problem.to(torch.float64)
    scores, expected = wide(maxsim_from_hidden_reference), wide.gradients(maxsim_from_hidden_reference)
    with pytest.MonkeyPatch.context() as patch:
        limit_scratch(patch, scratch)
        torch.testing.assert_close(problem(maxsim_from_hidden), scores.float(), rtol=1e-5, atol=1e-5)
        actual = problem.gradients(maxsim_from_hidden)
    # Gradients may cancel to rounding noise.
    noise = 1e-5 * max(1.0, *(gradient.norm().item() for gradient in expected.values()))
    for name, gradient in actual.items():
        assert gradient.dtype == torch.float32
        error = (gradient.double() - expected[name]).norm().item()
        assert error <= 1e-5 * expected[name].norm().item() + noise, name


def as_rounded(problem: Problem) -> Callable[..., Tensor]:
    """The definition on the rounded embeddings of a half-precision problem, so that the argmax is the same.

    Call it with the problem's tensors in float64; gradients flow as if nothing had been rounded.
    """

    def replaced(exact: Tensor, rounded: Tensor) -> Tensor:
        return exact + (rounded.to(exact) - exact).detach()

    def units(exact: Tensor, half: Tensor) -> Tensor:
        rounded = torch.nn.functional.normalize(half.float(), dim=-1).to(half.dtype)
        return replaced(torch.nn.functional.normalize(exact, dim=-1), rounded)

    def scores(
        queries: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, **rest: Tensor | None
    ) -> Tensor:
        half = problem.tensors
        projected = torch.nn.functional.linear(half["hidden"], half["weight"], half.get("bias")).cpu()
        documents = replaced(torch.nn.functional.linear(hidden, weight, bias), projected)
        return maxsim_from_hidden_reference(
            units(queries, half["queries"].cpu()),
            units(documents, projected),
            torch.eye(weight.shape[0], dtype=weight.dtype),
            normalize=False,
            **rest,
        )

    return scores


def problem(**rest) -> Problem:
    torch.manual_seed(0)
    shapes = {"queries": (3, 4, 6), "hidden": (5, 7, 10), "weight": (6, 10), "bias": (6,)}
    return Problem({name: torch.randn(shape) for name, shape in shapes.items()}, rest)


def test_one_layer_for_both_sides_gets_the_sum_of_both_gradients() -> None:
    queries, hidden = torch.randn(3, 4, 10), torch.randn(5, 7, 10)
    actual, expected = [], []
    for function, dtype, gradients in (
        (maxsim_from_hidden, torch.float32, actual),
        (maxsim_from_hidden_reference, torch.float64, expected),
    ):
        torch.manual_seed(1)
        layer = torch.nn.Linear(10, 6).to(dtype)
        scores = function(
            queries.to(dtype), hidden.to(dtype), *layer.parameters(), queries_weight=layer.weight,
            queries_bias=layer.bias,
        )  # fmt: skip
        scores.square().sum().backward()
        gradients += [parameter.grad for parameter in layer.parameters()]
    for gradient, reference in zip(actual, expected, strict=True):
        assert relative_error(gradient, reference) <= 1e-5


@pytest.mark.parametrize("scratch", [module.SCRATCH_BYTES, 300])
@pytest.mark.parametrize("name", ["queries", "hidden", "weight", "bias"])
def test_only_the_needed_gradients(name: str, scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_scratch(monkeypatch, scratch)
    recorded, compute = [], hidden.compute_hidden_gradients
    monkeypatch.setattr(
        hidden, "compute_hidden_gradients", lambda *arguments: recorded.append(compute(*arguments)) or recorded[-1]
    )
    result = problem().gradients(maxsim_from_hidden, (name,))[name]
    assert relative_error(result, problem().gradients(maxsim_from_hidden_reference)[name]) <= 1e-5
    (gradients,) = recorded
    order = ("weight", "bias", "queries", "hidden")
    assert [gradient is not None for gradient in gradients] == [n == name for n in order]


@pytest.mark.parametrize("layout", ["in-batch", "candidates", "packed"])
def test_the_scratch_stays_within_its_bound(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 documents of 64 tokens project to 1 MiB; with 128 KiB of scratch nothing larger is ever projected."""
    hidden, weight, queries = torch.randn(256, 64, 24), torch.randn(16, 24), torch.randn(4, 4, 16)
    options = {}
    if layout == "candidates":
        hidden = hidden.unflatten(0, (4, 64))
    elif layout == "packed":
        hidden, options["documents_cu_seqlens"] = pack(list(hidden))
    bound, sizes, project, backward = 128 << 10, [], module._project, module.compute_gradients

    def projecting(layer, states, scratch):
        sizes.append(scratch.values.untyped_storage().nbytes())
        return project(layer, states, scratch)

    def differentiating(*arguments):
        grad_queries, gradient = backward(*arguments)
        sizes.append(2 * gradient.untyped_storage().nbytes())
        return grad_queries, gradient

    limit_scratch(monkeypatch, bound)
    monkeypatch.setattr(module, "_project", projecting)
    monkeypatch.setattr(module, "compute_gradients", differentiating)
    Problem({"queries": queries, "hidden": hidden, "weight": weight}, options).gradients(maxsim_from_hidden)
    # 8 blocks forward, 16 in the backward, which projects again.
    assert len(sizes) == 8 + 2 * 16
    assert bound / 2 <= max(sizes) <= bound


def test_no_allocation_of_the_projected_documents() -> None:
    """2**15 documents of 32 tokens project to 512 MiB; beyond the scratch, the call allocates next to nothing."""
    hidden, weight, queries = torch.zeros(1, 1, 2).expand(1 << 15, 32, 2), torch.ones(128, 2), torch.ones(1, 1, 128)
    with torch.profiler.profile(profile_memory=True) as profile:
        maxsim_from_hidden(queries, hidden, weight)
    assert max(event.cpu_memory_usage for event in profile.events()) < module.SCRATCH_BYTES + (24 << 20)


def test_the_projection_is_kept_only_where_it_and_its_gradient_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    projections, project = [], module._project
    monkeypatch.setattr(module, "_project", lambda *arguments: projections.append(1) or project(*arguments))
    expected = problem().gradients(maxsim_from_hidden)
    assert len(projections) == 1
    # The projected embeddings take 5 * 7 * 6 * 4 bytes.
    limit_scratch(monkeypatch, 840)
    actual = problem().gradients(maxsim_from_hidden)
    assert len(projections) == 1 + 1 + 3
    for name, gradient in actual.items():
        assert relative_error(gradient, expected[name]) <= 1e-6


@pytest.mark.parametrize(("share", "at_once"), [(2, True), (3, False)])
def test_a_step_has_a_share_of_the_bytes_of_the_hidden_states(
    share: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states have 24 elements, projected to 6; a call without gradients gets no share."""
    monkeypatch.setattr(module, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(module, "STATES_PER_SCRATCH", share)
    projections, project = [], module._project
    monkeypatch.setattr(module, "_project", lambda *arguments: projections.append(1) or project(*arguments))
    torch.manual_seed(0)
    tensors = {"queries": torch.randn(3, 4, 6), "hidden": torch.randn(5, 7, 24), "weight": torch.randn(6, 24)}
    call = Problem(tensors, {})
    scores = call(maxsim_from_hidden)
    assert len(projections) == 5
    projections.clear()
    actual, expected = call.gradients(maxsim_from_hidden), call.gradients(maxsim_from_hidden_reference)
    # Not at once: in the forward all documents are one block, in the backward three of them and then two.
    assert len(projections) == (1 if at_once else 3)
    torch.testing.assert_close(scores, call(maxsim_from_hidden_reference), rtol=1e-5, atol=1e-5)
    for name, gradient in actual.items():
        assert relative_error(gradient, expected[name]) <= 1e-5


@pytest.mark.parametrize("scratch", [module.SCRATCH_BYTES, 300])
def test_bfloat16_gradients_are_close(scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the definition on the same projected embeddings, which rounding to bfloat16 changes."""
    limit_scratch(monkeypatch, scratch)
    half = problem().to(torch.bfloat16)
    actual = half.gradients(maxsim_from_hidden)
    for name, expected in half.to(torch.float64).gradients(as_rounded(half)).items():
        assert actual[name].dtype == torch.bfloat16
        assert torch.cosine_similarity(actual[name].double().flatten(), expected.flatten(), dim=0) >= 0.9999
        assert relative_error(actual[name], expected) <= 1e-2


class Casts(TorchDispatchMode):
    """Records the shapes of tensors that are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default:
            self.shapes.append(args[0].shape)
        return function(*args, **(kwargs or {}))


def test_autocast_casts_each_tensor_once() -> None:
    """Hidden states of float32 are the largest tensor of all."""
    queries, hidden, weight, bias = problem().tensors.values()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), Casts() as casts:
        maxsim_from_hidden(hidden[:3], hidden, weight, bias, queries_weight=weight.clone(), queries_bias=bias.clone())
    for tensor, times in ((hidden, 1), (hidden[:3], 1), (weight, 2), (bias, 2)):
        assert casts.shapes.count(tensor.shape) == times


Q, H, W, B = problem().tensors.values()
P, CU = H.flatten(0, 1), torch.arange(0, 36, 7)


test_bad_input_names_the_argument = mistakes(
    wrong(ValueError, r"hidden must have shape \[Nd, Ld, d_model\]", maxsim_from_hidden, Q, H[0], W),
    wrong(ValueError, "weight must project to at least 1", maxsim_from_hidden, Q, H, W[:0]),
    wrong(ValueError, "projects to, 6, got 10: hidden states need queries_weight", maxsim_from_hidden, H, H, W),
    wrong(ValueError, "queries_weight must project to .* 6", maxsim_from_hidden, H, H, W, queries_weight=W[:5]),
    wrong(ValueError, "queries_bias needs queries_weight", maxsim_from_hidden, H, H, W, queries_bias=B),
    wrong(ValueError, "one row of candidates per query, Nq = 3", maxsim_from_hidden, Q, H[None], W),
    wrong(ValueError, "max_document_length must be None where", maxsim_from_hidden, Q, H, W, max_document_length=7),
    wrong(ValueError, r"queries must have shape \[Nq, Lq, d\], got", maxsim_from_hidden, Q[0], H, W),
    wrong(ValueError, "documents_mask must be None where documents are packed",
          maxsim_from_hidden, Q, P, W, documents_mask=CU, documents_cu_seqlens=CU),
    wrong(ValueError, r"queries of shape \[Tq, d\] need queries_cu_seqlens",
          maxsim_from_hidden, Q[0], P, W, documents_cu_seqlens=CU),
    wrong(ValueError, "documents_cu_seqlens must rise from 0 to the number of tokens of documents, 35, got 0 to 28",
          maxsim_from_hidden, Q, P, W, documents_cu_seqlens=CU[:-1]),
    wrong(ValueError, r"candidates_cu_seqlens must have Nq \+ 1 = 4 entries",
          maxsim_from_hidden, Q, P, W, documents_cu_seqlens=CU, candidates_cu_seqlens=CU),
)  # fmt: skip


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_masked_query_tokens_do_not_meet_the_tokens_of_packed_documents(value: float, normalize: bool) -> None:
    """Not even infinite ones: a query without active tokens scores 0, and masked tokens have no gradient."""
    queries, hidden, weight, bias = problem().tensors.values()
    hidden[1, 3, 0] = value
    mask = torch.tensor([[True, False, True, True], [False] * 4, [False, True, False, False]])
    packed_hidden, bounds = pack(list(hidden))
    tensors = {"queries": queries, "hidden": packed_hidden, "weight": weight, "bias": bias}
    options = {"queries_mask": mask, "documents_cu_seqlens": bounds, "normalize": normalize}
    masked = Problem(tensors, options)
    expected = masked(maxsim_from_hidden_reference)
    assert (expected[1] == 0).all()
    for reduction in ("sum", "mean"):
        options["reduction"] = reduction
        torch.testing.assert_close(
            masked(maxsim_from_hidden), masked(maxsim_from_hidden_reference), equal_nan=True, rtol=1e-5, atol=1e-5
        )
    assert (masked.gradients(maxsim_from_hidden)["queries"][~mask] == 0).all()
