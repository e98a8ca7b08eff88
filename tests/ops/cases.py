"""Random MaxSim problems, drawn by hypothesis, for every implementation's tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

# Embedding sizes; few of them are a power of two.
SIZES = st.integers(1, 40)


@dataclass(frozen=True)
class Case:
    """The tensors and the options of one call."""

    queries: Tensor
    documents: Tensor
    queries_mask: Tensor | None
    documents_mask: Tensor | None
    options: dict

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.queries, self.documents

    @property
    def keywords(self) -> dict:
        """The masks and the options."""
        return {"queries_mask": self.queries_mask, "documents_mask": self.documents_mask, **self.options}

    def doubled(self) -> Case:
        """The same, already rounded, inputs in float64."""
        return replace(self, queries=self.queries.double(), documents=self.documents.double())

    def to(self, device: str) -> Case:
        masks = {
            name: None if mask is None else mask.to(device)
            for name, mask in (("queries_mask", self.queries_mask), ("documents_mask", self.documents_mask))
        }
        return replace(self, queries=self.queries.to(device), documents=self.documents.to(device), **masks)


@st.composite
def cases(
    draw: st.DrawFn,
    layouts: tuple[str, ...] = ("in-batch", "candidates"),
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16, torch.float64),
    max_batch: int = 5,
    max_length: int = 40,
    sizes: st.SearchStrategy[int] = SIZES,
) -> Case:
    """Draw ragged masks, fully masked rows, lengths from 1, non-power-of-two embedding sizes, and all options."""
    layout = draw(st.sampled_from(layouts))
    dtype = draw(st.sampled_from(dtypes))
    n_queries = draw(st.integers(1, max_batch))
    n_documents = n_queries if layout == "pairs" else draw(st.integers(1, max_batch))
    query_length, document_length = draw(st.integers(1, max_length)), draw(st.integers(1, max_length))
    size = draw(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # Unit vectors, as models give them: the tolerances are relative to scores of a known size.
    queries = torch.nn.functional.normalize(torch.randn(n_queries, query_length, size, generator=generator), dim=-1)
    shape = (n_queries, n_documents) if layout == "candidates" else (n_documents,)
    documents = torch.nn.functional.normalize(torch.randn(*shape, document_length, size, generator=generator), dim=-1)
    options = {
        "normalize": draw(st.booleans()),
        "reduction": draw(st.sampled_from(["sum", "mean"])),
        "masking": draw(st.sampled_from(["exclude", "zero"])),
        "empty_score": draw(st.sampled_from([0.0, -100.0])),
    }
    return Case(
        queries.to(dtype),
        documents.to(dtype),
        drawn_mask(draw, queries, generator, weights=True),
        drawn_mask(draw, documents, generator),
        options,
    )


def drawn_mask(draw: st.DrawFn, embeddings: Tensor, generator: torch.Generator, weights: bool = False) -> Tensor | None:
    """Draw a token mask of any kind for these embeddings, or None."""
    kinds = ["none", "prefix", "random", "some rows empty", "float", "int64", *(["weights"] if weights else [])]
    kind = draw(st.sampled_from(kinds))
    shape = embeddings.shape[:-1]
    if kind == "none":
        return None
    if kind == "prefix":
        lengths = torch.randint(1, shape[-1] + 1, (*shape[:-1], 1), generator=generator)
        return torch.arange(shape[-1]) < lengths
    mask = torch.rand(shape, generator=generator) > 0.4
    if kind == "some rows empty":
        mask &= torch.rand((*shape[:-1], 1), generator=generator) > 0.5
    if kind == "weights":
        return mask * (0.25 + torch.rand(shape, generator=generator))
    return mask.to({"float": torch.float32, "int64": torch.int64}.get(kind, torch.bool))


def gradients(function: Callable[..., Tensor], case: Case) -> tuple[Tensor, ...]:
    """Gradients of queries and documents, computed by `differentiated`."""
    return differentiated(function, case.tensors, case.keywords)


def differentiated(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], options: dict, *args: object
) -> tuple[Tensor, ...]:
    """Gradients of a function's first arguments, the tensors, under a fixed, uneven weighting of the scores."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    scores = function(*leaves, *args, **options)
    weight = torch.cos(torch.arange(scores.numel(), device=scores.device, dtype=scores.dtype)).view(scores.shape)
    if not scores.requires_grad:
        # The definition of an empty problem depends on none of its tensors.
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad((scores * weight).sum(), leaves, allow_unused=True, materialize_grads=True)


def check_definition(
    function: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    options: dict,
    *args: object,
    atol: float = 2e-6,
    least: float = 0.0,
    differentiable: bool = True,
    widened: bool = True,
    there: Callable[[Any], Any] = lambda value: value,
) -> None:
    """Check scores and gradients against the definition in float64, up to the rounding of their dtype.

    The function's inputs are moved by `there`. Gradients may be off by `least` in any dtype; the error of a gradient of
    one number, a sum of terms of both signs, is relative to at least 1. If not `widened`, a definition widens itself.
    """
    doubled, dtype = [tensor.double() if widened else tensor for tensor in tensors], tensors[0].dtype
    arguments, args_there, options_there = there(list(tensors)), there(args), there(options)
    with torch.no_grad():
        scores = function(*arguments, *args_there, **options_there)
        check_scores(scores.cpu(), reference(*doubled, *args, **options).cpu(), dtype, atol, least)
    if not differentiable:
        return
    actual = differentiated(function, arguments, options_there, *args_there)
    for gradient, ref in zip(actual, differentiated(reference, doubled, options, *args), strict=True):
        assert gradient.dtype == dtype
        error = relative_error(gradient.cpu(), ref.cpu()) * (min(1.0, ref.abs().item()) if ref.dim() == 0 else 1)
        assert error <= max(least, gradient_tolerance(dtype))


def wrong(error: type[Exception], message: str, function: Callable[..., object], *arguments, **options):
    """A test parameter: a call, and the error that it must raise."""
    return pytest.param(partial(function, *arguments, **options), error, message)


def mistakes(*cases):
    """Return a test that each of these calls raises its error."""

    @pytest.mark.parametrize(("call", "error", "message"), cases)
    def test(call: Callable[[], object], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            call()

    return test


# Tolerance between two results from float64 inputs whose float32 scores are up to 16 in magnitude: each score is
# rounded by at most 2^-21, and a softmax passes that on to the gradients.
FLOAT32_SCORES = {"rtol": 1e-6, "atol": 1e-6}


class Elements:
    """Counts the elements of inputs of torch functions, inside operators too: of the `largest` one, and in `total`."""

    def __enter__(self) -> Elements:
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True
        )
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        shapes = [shape for event in self._profile.events() for shape in event.input_shapes]
        sizes = [math.prod(shape) for shape in shapes if shape and all(isinstance(size, int) for size in shape)]
        self.largest, self.total = max(sizes), sum(sizes)


def check_scores(scores: Tensor, expected: Tensor, dtype: torch.dtype, atol: float = 2e-6, least: float = 0.0) -> None:
    """Check scores of inputs of `dtype` against those computed in float64, up to the rounding of the accumulation."""
    double = dtype == torch.float64
    assert scores.dtype == (torch.float64 if double else torch.float32)
    assert scores.shape == expected.shape
    # Sums of some hundred products, of magnitudes up to 40.
    rtol, atol = (1e-12, 1e-12) if double and least == 0.0 else (2e-6, atol)
    torch.testing.assert_close(scores.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)


def gradient_tolerance(dtype: torch.dtype) -> float:
    """The relative error allowed in gradients of inputs of `dtype`, from rounding sums in it or in float32."""
    return {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-2)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of the expected tensor (absolute where that is 0)."""
    difference, norm = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    return difference / norm if norm > 0 else difference
