"""Losses of random MaxSim problems, and their definition in float64, for every implementation's tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from pylate_flash import maxsim_cross_entropy, maxsim_kl_divergence
from pylate_flash.ops import cross_entropy_reference, kl_divergence_reference, maxsim_reference
from tests.ops.cases import Case, cases

LOSSES = ("cross entropy", "divergence")


@dataclass(frozen=True)
class LossCase:
    """A problem, labels or a teacher's scores (or None), and the options of the loss."""

    case: Case
    loss: str
    target: Tensor | None
    options: dict

    def run(self, **options) -> tuple[Tensor, ...]:
        """The loss, and both gradients."""
        leaves = self.leaves(self.case)
        options |= self.case.keywords | self.options
        if self.loss == "divergence":
            loss = maxsim_kl_divergence(*leaves, self.target, **options)
        else:
            loss = maxsim_cross_entropy(*leaves, labels=self.target, **options)
        return self.differentiated(loss, leaves)

    def expected(self) -> tuple[Tensor, ...]:
        """The same by autograd through the definitions, in float64."""
        doubled = self.case.doubled()
        leaves = self.leaves(doubled)
        scores = maxsim_reference(*leaves, **doubled.keywords)
        if self.loss == "divergence":
            loss = kl_divergence_reference(scores, self.target, **self.options)
        else:
            labels = self.target
            if labels is None and doubled.documents.dim() == 4:
                labels = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
            loss = cross_entropy_reference(scores, labels, **self.options)
        return self.differentiated(loss, leaves)

    @staticmethod
    def leaves(case: Case) -> tuple[Tensor, Tensor]:
        return case.queries.detach().requires_grad_(), case.documents.detach().requires_grad_()

    @staticmethod
    def differentiated(loss: Tensor, leaves: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Under a gradient of the loss that is not 1, and differs from query to query."""
        weight = 1.5 + torch.cos(torch.arange(loss.numel(), device=loss.device, dtype=loss.dtype)).view(loss.shape)
        return loss.detach(), *torch.autograd.grad((loss * weight).sum(), leaves)

    def check(self, rounding: float, **options) -> None:
        """`rounding` is that of the gradients' type."""
        (loss, *found), (expected_loss, *expected) = self.run(**options), self.expected()
        assert loss.dtype == torch.float32
        assert loss.shape == expected_loss.shape
        torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-5)
        scale = max(gradient.norm() for gradient in expected)
        for gradient, reference in zip(found, expected, strict=True):
            assert gradient.dtype == self.case.queries.dtype
            # A gradient may vanish where the right document is certain, and what is left is the softmax's rounding.
            assert (gradient.double() - reference).norm() <= rounding * reference.norm() + 1e-6 * scale + 1e-6


@st.composite
def loss_cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float32,), **limits) -> LossCase:
    case = draw(cases(dtypes=dtypes, **limits))
    loss = draw(st.sampled_from(LOSSES))
    shape = case.queries.shape[0], case.documents.shape[-3]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if loss == "divergence":
        target: Tensor | None = torch.randn(shape, generator=generator)
        if shape[1] > 1 and draw(st.booleans()):
            target[:, 0] = -torch.inf  # type: ignore[index]
    elif shape[0] <= shape[1] and draw(st.booleans()):
        target = None
    else:
        target = torch.randint(shape[1], shape[:1], generator=generator)
    options = {
        "temperature": draw(st.sampled_from([1.0, 0.3, 20])),
        "loss_reduction": draw(st.sampled_from(["mean", "sum", "none"])),
    }
    return LossCase(case, loss, target, options)
