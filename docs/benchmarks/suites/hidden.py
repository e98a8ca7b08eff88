"""The suite `hidden`: scores from an encoder's hidden states, projection and normalisation included.

In the rows named "step", the cross entropy of every query against all documents is differentiated with respect to the
queries, the hidden states and the projection's weight. Queries are already projected: there are few of them, and every
system would do the same.

The reference projects as a linear layer does, rounded to the inputs' dtype, rounds again after normalisation, and
computes everything else in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller

import torch
import torch.nn.functional as F

from pylate_flash.bench import exact
from pylate_flash.bench.calls import FromHidden, bounds_of, unit_vectors
from pylate_flash.bench.peers import LIK
from pylate_flash.bench.protocol import Work
from pylate_flash.bench.rows import L2, Row
from pylate_flash.bench.suite import LIK_SYSTEM, OUR_SYSTEM, Candidate, Suite, System, Unavailable
from pylate_flash.bench.training import TEMPERATURE


@dataclass(frozen=True)
class States(Row):
    """Queries against documents as hidden states of size ``d_model``, which are packed if ``shortest`` is set."""

    d_model: int = 768

    @property
    def shape(self) -> str:
        """The shape for display."""
        return f"{super().shape}, {self.d_model} to {self.d}"

    def work(self, dtype: torch.dtype) -> Work:
        """Hidden states read once and their gradient written once; one projection, and two products in its backward;
        the products of MaxSim once; the rows that its backward gathers per argmax.
        """
        projected = super().work(dtype)
        tokens, passes = int(self.lengths().sum()), 2 if self.step else 1
        inputs = tokens * self.d_model + self.d * (self.Nq * self.Lq + self.d_model)
        projection = 2.0 * tokens * self.d_model * self.d
        return Work(
            flops=projected.flops + projection * (3 if self.step else 1),
            bytes=float(passes * dtype.itemsize * inputs + 4 * self.Nq * self.Nd),
            l2_bytes=projected.l2_bytes,
        )


ROWS = (
    States("rerank", 1, 1000, 32, 300),
    States("rerank-8k", 1, 8000, 32, 180),
    States("rerank-packed", 1, 8000, 32, 180, shortest=45),
    States("serve-32", 32, 1024, 32, 300),
    States("serve-32-packed", 32, 1024, 32, 300, shortest=75),
    States("in-batch-256", 256, 256, 32, 180),
    States("step-64", 64, 64, 32, 180, step=True),
    States("step-128", 128, 128, 32, 180, step=True),
    States("step-256", 256, 256, 32, 180, step=True),
    States("step-256-packed", 256, 256, 32, 180, step=True, shortest=45),
)


Result = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Inputs(FromHidden):
    """A row's tensors: hidden states may be packed [T, d_model] with ``cu_seqlens`` [Nd + 1] (int32).

    In a step they require gradients.
    """

    cu_seqlens: torch.Tensor | None = None
    longest: int = 0
    step: bool = False

    @property
    def options(self) -> dict:
        """The arguments of `maxsim_varlen` and `maxsim_from_hidden` for packed documents."""
        if self.cu_seqlens is None:
            return {}
        return {"documents_cu_seqlens": self.cu_seqlens, "max_document_length": self.longest}

    def loss(self, scores: torch.Tensor) -> torch.Tensor:
        """The loss of scores [Nq, Nd]."""
        return F.cross_entropy(scores / TEMPERATURE, torch.arange(len(scores), device=scores.device))

    def computed(self, score: Callable[[], torch.Tensor]) -> Result:
        """The scores [Nq, Nd]; in a step also the gradients of queries, hidden states and weight."""
        if not self.step:
            return (score(),)
        with torch.enable_grad():
            scores = score()
            loss = self.loss(scores)
        return scores.detach(), *torch.autograd.grad(loss, (self.queries, self.hidden, self.weight))

    def candidate(self, label: str, score: Callable[[], torch.Tensor]) -> Candidate:
        """The candidate that times ``score``."""
        return Candidate(label, partial(self.computed, score))

    def reference(self) -> Result:  # type: ignore[override]
        """Scores, and in a step gradients, in float64, from the rounded embeddings."""
        dtype = self.queries.dtype

        def score(*embeddings: torch.Tensor, **masks: torch.Tensor) -> torch.Tensor:
            return exact.einsum_scores(*(exact.normalized(part, dtype) for part in embeddings), **masks)

        projected, mask = F.linear(self.hidden.detach(), self.weight.detach()), None
        if self.cu_seqlens is not None:
            lengths = self.cu_seqlens.diff()
            mask = torch.arange(self.longest, device=lengths.device) < lengths.unsqueeze(1)
            projected = projected.new_zeros(*mask.shape, projected.shape[-1]).masked_scatter(
                mask.unsqueeze(-1), projected
            )
        if not self.step:
            return (exact.scores(self.queries, projected, documents_mask=mask, score=score),)
        step = exact.step(self.queries, projected, documents_mask=mask, loss=self.loss, score=score)
        assert step.scores is not None
        grad = step.grad_documents if mask is None else step.grad_documents[mask]
        grad_weight = grad.flatten(0, -2).T @ self.hidden.detach().flatten(0, -2).double()
        return step.scores, step.grad_queries, grad @ self.weight.detach().double(), grad_weight

    def ours(self) -> list[Candidate]:
        return [
            self.candidate(candidate.label, partial(candidate.call, **self.options)) for candidate in super().ours()
        ]

    def unfused(self, normalized: bool) -> list[Candidate]:
        """A linear layer and our `maxsim`, with normalisation by `F.normalize` or inside `maxsim`."""
        from pylate_flash import maxsim, maxsim_varlen

        queries, cu_seqlens = self.queries, self.cu_seqlens
        queries_cu_seqlens = torch.arange(len(queries) + 1, dtype=torch.int32, device=queries.device) * queries.shape[1]

        def score() -> torch.Tensor:
            documents = F.linear(self.hidden, self.weight)
            if normalized:
                documents = F.normalize(documents, dim=-1)
            if cu_seqlens is None:
                return maxsim(queries, documents, normalize=not normalized)
            return maxsim_varlen(
                queries.flatten(0, 1),
                documents,
                queries_cu_seqlens,
                cu_seqlens,
                max_query_length=queries.shape[1],
                max_document_length=self.longest,
                normalize=not normalized,
            )

        label = "linear, normalize, maxsim" if normalized else "linear, maxsim(normalize=True)"
        return [self.candidate(label, score)]

    def lik(self) -> list[Candidate]:
        self._need_padded()
        return [self.candidate(candidate.label, candidate.call) for candidate in super().lik()]

    def lik_unfused(self) -> list[Candidate]:
        """A linear layer and `maxsim` of late-interaction-kernels, with normalisation before or inside it."""
        self._need_padded()
        maxsim = LIK["maxsim"]

        def score(normalize: bool) -> torch.Tensor:
            documents = F.linear(self.hidden, self.weight)
            embeddings = documents if normalize else F.normalize(documents, dim=-1)
            return maxsim(self.queries, embeddings, normalize=normalize)

        return [
            self.candidate(label, partial(score, normalize))
            for label, normalize in (("linear, normalize, maxsim", False), ("linear, maxsim(normalize=True)", True))
        ]

    def _need_padded(self) -> None:
        if self.cu_seqlens is not None:
            raise Unavailable("it takes no packed hidden states")


def make_inputs(row: States, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw random states, reproducible per row and device type."""
    generator = torch.Generator(device).manual_seed(0)
    lengths, packed = row.lengths(), row.shortest is not None
    shape = (int(lengths.sum()),) if packed else (row.Nd, row.Ld)
    # Drawn in the inputs' dtype, as float32 would take gigabytes in the largest row.
    hidden = torch.randn(*shape, row.d_model, device=device, generator=generator, dtype=dtype)
    weight = torch.randn(row.d, row.d_model, device=device, generator=generator, dtype=dtype) / math.sqrt(row.d_model)
    queries = unit_vectors(row.Nq, row.Lq, row.d, generator=generator, dtype=dtype)
    cu_seqlens = bounds_of(lengths).to(device) if packed else None
    for tensor in (queries, hidden, weight):
        tensor.requires_grad_(row.step)
    return Inputs(queries, hidden, weight, None, None, cu_seqlens, int(lengths.max()), row.step)


def error(result: Result, expected: Result) -> float:
    """Return the largest of the scores' relative error and the gradients' relative Frobenius errors."""
    if len(result) != len(expected):
        return math.inf
    gradients = zip(result[1:], expected[1:], strict=True)
    return max(exact.relative_error(result[0], expected[0]), *(exact.frobenius(*pair) for pair in gradients), 0.0)


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="hidden",
        title="MaxSim from hidden states",
        rows=ROWS,
        systems=(
            OUR_SYSTEM,
            System(
                "unfused",
                "linear + ours",
                methodcaller("unfused", normalized=False),
                about="a linear layer and our `maxsim(normalize=True)`, which does not round the normalised embeddings",
                tolerance=exact.ROUNDED,
            ),
            System(
                "unfused_normalized",
                "linear + normalize + ours",
                methodcaller("unfused", normalized=True),
                about="with `F.normalize` in between, which rounds the norms as well",
                tolerance=exact.ROUNDED,
            ),
            replace(LIK_SYSTEM, about="late-interaction-kernels, fused", tolerance=exact.ROUNDED),
            System(
                "lik_unfused",
                "linear + LIK",
                methodcaller("lik_unfused"),
                peer=LIK,
                about="the faster of the two unfused ways with its `maxsim`",
                tolerance=exact.ROUNDED,
            ),
        ),
        make_inputs=make_inputs,
        error=error,
        ceilings=L2,
    )
