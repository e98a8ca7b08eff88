"""Losses of random MaxSim problems, and their definition in float64, for every implementation's tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from pylate_flash import maxsim_cross_entropy, maxsim_kl_divergence, maxsim_margin_mse
from pylate_flash.ops import (
    cross_entropy_reference,
    kl_divergence_reference,
    margin_mse_reference,
    maxsim_reference,
)
from tests.ops.cases import Case, cases

LOSSES = ("cross entropy", "divergence", "margin MSE")


@dataclass(frozen=True)
class LossCase:
    """A problem, labels or a teacher's scores (or None), and the options of the loss."""

    case: Case
    loss: str
    target: Tensor | None
    options: dict
    # Whether the operation gets packed documents, without their masked tokens.
    packed: bool = False

    def leaves(self) -> tuple[Tensor, ...]:
        """The differentiated tensors: queries, documents (padded), and the temperature if it is a tensor."""
        leaves = self.case.queries, self.case.documents
        temperature = self.options.get("temperature")
        return tuple(
            leaf.detach().requires_grad_() for leaf in (*leaves, temperature) if isinstance(leaf, torch.Tensor)
        )

    def doubled(self) -> LossCase:
        """The same in float64."""
        temperature = self.options.get("temperature")
        widened = {"temperature": temperature.double()} if isinstance(temperature, Tensor) else {}
        return replace(self, case=self.case.doubled(), options=self.options | widened)

    def loss_of(self, leaves: tuple[Tensor, ...], **options) -> Tensor | tuple:
        """The result of the operation on these leaves."""
        queries, documents, *temperature = leaves
        keywords = (
            self.case.keywords | self.options | ({"temperature": temperature[0]} if temperature else {}) | options
        )
        if self.packed:
            documents, bounds = self.pack(documents)
            longest = self.case.documents.shape[1]
            keywords |= {"documents_cu_seqlens": bounds, "max_document_length": longest, "documents_mask": None}
        if self.loss == "divergence":
            return maxsim_kl_divergence(queries, documents, self.target, **keywords)
        if self.loss == "margin MSE":
            return maxsim_margin_mse(queries, documents, self.target, **keywords)
        return maxsim_cross_entropy(queries, documents, labels=self.target, **keywords)

    def pack(self, documents: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.case.documents_mask
        active = torch.ones(documents.shape[:2], dtype=torch.bool) if mask is None else mask != 0
        bounds = torch.tensor([0, *active.sum(dim=1).cumsum(dim=0).tolist()], dtype=torch.int32)
        return documents[active.to(documents.device)], bounds.to(documents.device)

    def definition(self, leaves: tuple[Tensor, ...]) -> Tensor:
        queries, documents, *temperature = leaves
        options = self.options | ({"temperature": temperature[0]} if temperature else {})
        scores = maxsim_reference(queries, documents, **self.case.keywords)
        if self.loss == "divergence":
            return kl_divergence_reference(scores, self.target, **options)
        if self.loss == "margin MSE":
            return margin_mse_reference(scores, self.target, **options)
        labels = self.target
        if labels is None and documents.dim() == 4:
            labels = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
        return cross_entropy_reference(scores, labels, **options)

    def run(self, **options) -> tuple[Tensor, ...]:
        """The loss, and the gradients of all leaves."""
        leaves = self.leaves()
        return differentiated(self.loss_of(leaves, **options), leaves)

    def expected(self) -> tuple[Tensor, ...]:
        """The same by autograd through the definitions, in float64."""
        doubled = self.doubled()
        leaves = doubled.leaves()
        return differentiated(doubled.definition(leaves), leaves)

    def width(self) -> float:
        """The smallest divisor of scores that are normalized to a range of 1; infinite if they are not normalized."""
        if not self.options.get("normalize_scores"):
            return float("inf")
        scores = maxsim_reference(*self.doubled().case.tensors, **self.case.keywords)
        ranges = scores.amax(dim=1) - scores.amin(dim=1)
        return float(self.options.get("temperature", 1.0)) * min(ranges[ranges > 0.0].tolist(), default=1.0)

    def check(self, rounding: float, **options) -> None:
        """Compare with the definition; `rounding` is that of the gradients' dtype."""
        check_results(self.run(**options), self.expected(), rounding, self.case.queries.dtype, self.width())


def check_results(
    actual: tuple[Tensor, ...],
    expected: tuple[Tensor, ...],
    rounding: float,
    dtype: torch.dtype,
    width: float = float("inf"),
) -> None:
    """Compare the loss, the gradients of queries and documents, and that of a temperature, if any.

    Dividing scores by `width` scales up their rounding error, and so that of the probabilities in the gradient, which
    is divided by `width` again.
    """
    loss, expected_loss = actual[0], expected[0]
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.shape == expected_loss.shape
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=max(1e-5, 1e-6 / width))
    noise = 1e-6 * (1.0 + 1.0 / width + 0.5 / width**2)
    scale = max(gradient.norm() for gradient in expected[1:3])
    for gradient, reference in zip(actual[1:3], expected[1:3], strict=True):
        assert gradient.dtype == dtype
        # Where the right document is certain, a gradient may vanish, leaving only the softmax's rounding.
        assert (gradient.double() - reference).norm() <= rounding * reference.norm() + 1e-6 * scale + noise
    for gradient, reference in zip(actual[3:], expected[3:], strict=True):
        assert gradient.shape == reference.shape
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-4, atol=1e-4)


def differentiated(loss: Tensor, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The loss, and gradients under an upstream gradient that is not 1 and differs between queries."""
    weight = 1.5 + torch.cos(torch.arange(loss.numel(), device=loss.device, dtype=loss.dtype)).view(loss.shape)
    return loss.detach(), *torch.autograd.grad((loss * weight).sum(), leaves)


def loss_problem(
    loss: str,
    queries: Tensor,
    documents: Tensor,
    labelled: bool = False,
    masks: str = "",
    scoring: dict | None = None,
    **options,
) -> LossCase:
    """`masks` names what is masked ("queries", "documents"), the dtype ("int64", "float"), and query "weights"."""
    generator = torch.Generator(queries.device).manual_seed(0)
    random_kwargs: dict = {"generator": generator, "device": queries.device}
    mask_list = []
    for name, embeddings in (("queries", queries), ("documents", documents)):
        mask = torch.rand(embeddings.shape[:-1], **random_kwargs) > 0.4
        if name == "queries" and "weights" in masks:
            mask = mask * (0.25 + 2 * torch.rand(mask.shape, **random_kwargs))
        mask = mask.long() if "int64" in masks else mask.float() if "float" in masks else mask
        mask_list.append(mask if name in masks else None)
    shape, target = (len(queries), documents.shape[-3]), None
    if loss != "cross entropy":
        target = torch.randn(shape, **random_kwargs)
    elif labelled:
        target = torch.randint(shape[1], shape[:1], **random_kwargs)
    options = ({} if loss == "margin MSE" else {"temperature": 2.0}) | options
    return LossCase(Case(queries, documents, *mask_list, scoring or {}), loss, target, options)


@st.composite
def loss_cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float32,), **limits) -> LossCase:
    case = draw(cases(dtypes=dtypes, **limits))
    loss = draw(st.sampled_from(LOSSES))
    shape = case.queries.shape[0], case.documents.shape[-3]
    assume(shape[1] > 1 or loss != "margin MSE")
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    options: dict = {"loss_reduction": draw(st.sampled_from(["mean", "sum", "none"]))}
    in_batch = case.documents.dim() == 3
    packed = in_batch and draw(st.booleans())
    if packed:
        case = replace(case, options=case.options | {"masking": "exclude"})
    target: Tensor | None
    if loss != "margin MSE":
        temperature = draw(st.sampled_from([1.0, 0.3, 20]))
        as_tensor = draw(st.sampled_from([None, (), (1,)]))
        options["temperature"] = temperature if as_tensor is None else torch.full(as_tensor, float(temperature))
    scores = maxsim_reference(*case.doubled().tensors, **case.keywords)
    if loss == "cross entropy":
        target = torch.randint(shape[1], shape[:1], generator=generator)
        if shape[0] <= shape[1] and draw(st.booleans()):
            target = None
        options |= _cross_entropy_options(draw, scores, target, in_batch, generator)
    else:
        target = torch.randn(shape, generator=generator)
    if loss == "divergence":
        if shape[1] > 1 and draw(st.booleans()):
            target[:, 0] = -torch.inf  # type: ignore[index]
        options["teacher_temperature"] = draw(st.sampled_from([1.0, 2.5]))
        if options["teacher_temperature"] != 1.0 and draw(st.booleans()):
            options["normalize_scores"] = True
            # Rounding must not change which scores are extreme, and a range near 0 would amplify it.
            ordered = scores.sort(dim=1).values
            assume(shape[1] < 2 or (ordered.diff(dim=1)[:, [0, -1]] > 1e-2).all())
    return LossCase(case, loss, target, options, packed)


def _cross_entropy_options(
    draw: st.DrawFn, scores: Tensor, target: Tensor | None, in_batch: bool, generator: torch.Generator
) -> dict:
    options: dict = {"symmetric": in_batch and draw(st.booleans())}
    labels = torch.arange(len(scores)) * in_batch if target is None else target
    if draw(st.booleans()):
        options["exclude"] = torch.rand(scores.shape, generator=generator) > 0.5
        options["exclude"].scatter_(1, labels.unsqueeze(1), False)
    if draw(st.booleans()):
        options["margin"] = draw(st.sampled_from([0.0, 0.37, -0.61]))
        limits = scores.gather(1, labels.unsqueeze(1)) - options["margin"]
        near = (scores - limits).abs() < 1e-3
        # Rounding must not decide which documents the margin excludes.
        assume(not near.scatter(1, labels.unsqueeze(1), False).any())
    return options


@st.composite
def chunk_cases(draw: st.DrawFn, **limits) -> LossCase:
    """Draw reduced losses of several queries."""
    case = draw(loss_cases(max_batch=7, **limits))
    assume(case.case.queries.shape[0] > 2 and case.options["loss_reduction"] != "none")
    return case


def check_chunks(case: LossCase, **options) -> None:
    """Chunks of queries change results only by rounding, in half precision only by that of the last step."""
    half = case.case.queries.dtype.itemsize == 2
    unchunked = case.run(max_scratch_bytes=1 << 40, **options)
    per_query = case.case.documents.shape[-3] * (8 + case.case.queries.shape[1] * 3)
    for budget in (1, 2 * per_query):
        chunked = case.run(max_scratch_bytes=budget, **options)
        # The same losses are summed; those of a symmetric loss are sums over the queries.
        torch.testing.assert_close(chunked[0], unchunked[0], rtol=1e-6, atol=1e-6)
        scale = max(gradient.float().norm() for gradient in unchunked[1:3])
        for actual, expected in zip(chunked[1:], unchunked[1:], strict=True):
            rounding = 2**-8 if half and actual.dim() > 1 else 2e-6
            difference = (actual.double() - expected.double()).norm()
            assert difference <= rounding * expected.double().norm() + 1e-6 * scale + 1e-6
        again = case.run(max_scratch_bytes=budget, **options)
        assert all(torch.equal(a, b) for a, b in zip(again, chunked, strict=True))
