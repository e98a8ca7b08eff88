"""The suite `hidden`: scores from an encoder's hidden states, projection and normalisation included.

In the rows named "step", the cross entropy of every query against all documents is differentiated for the queries, the
hidden states and the projection's weight. Queries are projected already: there are few of them, and every system would
do the same.

The reference projects as a linear layer does, rounded to the inputs' type, rounds once more what it divided by the
norms, and computes everything after that in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from pylate_flash.bench.forward import unit_vectors
from pylate_flash.bench.peers import LIK
from pylate_flash.bench.protocol import L2, Work, relative_error
from pylate_flash.bench.suite import OURS, Candidate, Suite, System, Unavailable
from pylate_flash.bench.training import TEMPERATURE, _gradients, _winners, frobenius, through_normalisation


@dataclass(frozen=True)
class States:
    """``Nq`` queries of ``Lq`` tokens against ``Nd`` documents of ``Ld`` hidden states of size ``d_model``.

    ``step``: with the loss and its gradients. ``packed``: documents of Ld / 4 to Ld tokens, one after the other.
    """

    name: str
    Nq: int
    Nd: int
    Lq: int
    Ld: int
    step: bool = False
    packed: bool = False
    d: int = 128
    d_model: int = 768

    @property
    def shape(self) -> str:
        """The shape, for people."""
        lengths = f"{self.Ld // 4}..{self.Ld}" if self.packed else f"{self.Ld}"
        return f"{self.Nq} x {self.Nd}, {self.Lq} x {lengths}, {self.d_model} to {self.d}"

    def lengths(self) -> torch.Tensor:
        """The documents' lengths, always the same."""
        if not self.packed:
            return torch.full((self.Nd,), self.Ld)
        return torch.randint(self.Ld // 4, self.Ld + 1, (self.Nd,), generator=torch.Generator().manual_seed(0))

    def work(self, dtype: torch.dtype) -> Work:
        """Hidden states read and their gradient written once; one projection, and two more products in its backward;
        the products of MaxSim once; the rows that its backward gathers for every winner.
        """
        tokens, passes = int(self.lengths().sum()), 2 if self.step else 1
        inputs = tokens * self.d_model + self.d * (self.Nq * self.Lq + self.d_model)
        projection = 2.0 * tokens * self.d_model * self.d
        return Work(
            flops=projection * (3 if self.step else 1) + 2.0 * self.Nq * self.Lq * tokens * self.d,
            bytes=float(passes * dtype.itemsize * inputs + 4 * self.Nq * self.Nd),
            l2_bytes=2.0 * dtype.itemsize * self.Nq * self.Nd * self.Lq * self.d if self.step else 0.0,
        )

    def within(self, flops: float) -> States:
        """The same row with fewer documents, and for a step as many fewer queries, costing no more than ``flops``."""
        row = self
        while row.work(torch.float32).flops > flops and max(row.Nq, row.Nd) > 1:
            row = replace(row, Nq=math.ceil(row.Nq / 2), Nd=math.ceil(row.Nd / 2))
        return row


ROWS = (
    States("rerank", 1, 1000, 32, 300),
    States("rerank-8k", 1, 8000, 32, 180),
    States("rerank-packed", 1, 8000, 32, 180, packed=True),
    States("serve-32", 32, 1024, 32, 300),
    States("serve-32-packed", 32, 1024, 32, 300, packed=True),
    States("in-batch-256", 256, 256, 32, 180),
    States("step-64", 64, 64, 32, 180, step=True),
    States("step-128", 128, 128, 32, 180, step=True),
    States("step-256", 256, 256, 32, 180, step=True),
    States("step-256-packed", 256, 256, 32, 180, step=True, packed=True),
)


@dataclass(frozen=True)
class Inputs:
    """A row's tensors.

    ``queries`` [Nq, Lq, d] of unit vectors, ``hidden`` [Nd, Ld, d_model], or packed [T, d_model] with ``cu_seqlens``
    [Nd + 1] (int32), ``weight`` [d, d_model]. In a step they require gradients.
    """

    queries: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor
    cu_seqlens: torch.Tensor | None
    longest: int
    step: bool

    @property
    def options(self) -> dict:
        """What `maxsim_varlen` and `maxsim_from_hidden` have to know of packed documents."""
        if self.cu_seqlens is None:
            return {}
        return {"documents_cu_seqlens": self.cu_seqlens, "max_document_length": self.longest}


def make_inputs(row: States, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw random states, the same ones for the same row on the same kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    lengths = row.lengths()
    shape = (int(lengths.sum()),) if row.packed else (row.Nd, row.Ld)
    # Drawn in the inputs' type, as the float32 of the largest row would be gigabytes.
    hidden = torch.randn(*shape, row.d_model, device=device, generator=generator, dtype=dtype)
    weight = torch.randn(row.d, row.d_model, device=device, generator=generator, dtype=dtype) / math.sqrt(row.d_model)
    queries = unit_vectors(row.Nq, row.Lq, row.d, generator=generator, dtype=dtype)
    cu_seqlens = None
    if row.packed:
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
    for tensor in (queries, hidden, weight):
        tensor.requires_grad_(row.step)
    return Inputs(queries, hidden, weight, cu_seqlens, int(lengths.max()), row.step)


Result = tuple[torch.Tensor, ...]


def computed(inputs: Inputs, score: Callable[[], torch.Tensor]) -> Result:
    """The scores [Nq, Nd]; in a step also the gradients of queries, hidden states and weight."""
    if not inputs.step:
        return (score(),)
    with torch.enable_grad():
        scores = score()
        loss = F.cross_entropy(scores / TEMPERATURE, torch.arange(len(scores), device=scores.device))
    return scores.detach(), *torch.autograd.grad(loss, (inputs.queries, inputs.hidden, inputs.weight))


def reference(inputs: Inputs) -> Result:
    """Return scores, and in a step the gradients, in float64, from the rounded embeddings."""
    with torch.no_grad():
        projected = F.linear(inputs.hidden, inputs.weight)
        queries, documents = (
            F.normalize(embeddings.double(), dim=-1).to(embeddings.dtype).double()
            for embeddings in (inputs.queries, projected)
        )
        rows, Lq = queries.flatten(0, 1), queries.shape[1]
        if inputs.cu_seqlens is None:
            parts = [documents]
        else:
            parts = [part.unsqueeze(0) for part in documents.split(inputs.cu_seqlens.diff().tolist())]
        found = [_winners(rows, part) for part in parts]
        best = torch.cat([best for best, _ in found])
        scores = best.unflatten(-1, (-1, Lq)).sum(-1).T
    if not inputs.step:
        return (scores,)
    with torch.enable_grad():
        scores.requires_grad_()
        loss = F.cross_entropy(scores / TEMPERATURE, torch.arange(len(scores), device=scores.device))
        (weights,) = torch.autograd.grad(loss, scores)
    by_row = weights.T.repeat_interleave(Lq, dim=1)
    gradients = []
    start = 0
    for part, (_, winner) in zip(parts, found, strict=True):
        gradients.append(_gradients(rows, part, winner, by_row[start : start + len(part)]))
        start += len(part)
    grad_rows = sum((grad for grad, _ in gradients), torch.zeros_like(rows))
    grad_documents = torch.cat([grad.flatten(0, 1) for _, grad in gradients])
    grad_projected = through_normalisation(projected.flatten(0, -2).double(), grad_documents)
    return (
        scores.detach(),
        through_normalisation(inputs.queries.double(), grad_rows.view(queries.shape)),
        (grad_projected @ inputs.weight.detach().double()).view(inputs.hidden.shape),
        grad_projected.T @ inputs.hidden.detach().flatten(0, -2).double(),
    )


def error(found: Result, expected: Result) -> float:
    """Return the largest of the scores' relative errors, and of the gradients' relative Frobenius errors."""
    if len(found) != len(expected):
        return math.inf
    gradients = zip(found[1:], expected[1:], strict=True)
    return max(relative_error(found[0], expected[0]), *(frobenius(*pair) for pair in gradients), 0.0)


def accuracy(dtype: torch.dtype) -> float:
    """Return the relative error that pylate_flash stays within: that of its gradients."""
    if dtype != torch.float32:
        return 1e-2
    return 1e-3 if torch.get_float32_matmul_precision() != "highest" else 1e-5


def ours(inputs: Inputs) -> list[Candidate]:
    """The public `pylate_flash.maxsim_from_hidden`, as a user calls it."""
    from pylate_flash import maxsim_from_hidden

    score = partial(maxsim_from_hidden, inputs.queries, inputs.hidden, inputs.weight, **inputs.options)
    return [Candidate("maxsim_from_hidden", partial(computed, inputs, score))]


def unfused(inputs: Inputs, normalized: bool) -> list[Candidate]:
    """A linear layer and our `maxsim`, which normalises, or is given what `F.normalize` did."""
    from pylate_flash import maxsim, maxsim_varlen

    queries, cu_seqlens = inputs.queries, inputs.cu_seqlens
    queries_cu_seqlens = torch.arange(len(queries) + 1, dtype=torch.int32, device=queries.device) * queries.shape[1]

    def score() -> torch.Tensor:
        documents = F.linear(inputs.hidden, inputs.weight)
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
            max_document_length=inputs.longest,
            normalize=not normalized,
        )

    label = "linear, normalize, maxsim" if normalized else "linear, maxsim(normalize=True)"
    return [Candidate(label, partial(computed, inputs, score))]


def _lik_takes(inputs: Inputs) -> None:
    if inputs.cu_seqlens is not None:
        raise Unavailable("it takes no packed hidden states")


def lik(inputs: Inputs) -> list[Candidate]:
    """late-interaction-kernels: its fused function."""
    from late_interaction_kernels.fused_head import maxsim_from_hidden

    _lik_takes(inputs)
    score = partial(maxsim_from_hidden, inputs.queries, inputs.hidden, inputs.weight)
    return [Candidate("maxsim_from_hidden", partial(computed, inputs, score))]


def lik_unfused(inputs: Inputs) -> list[Candidate]:
    """late-interaction-kernels: a linear layer, and its `maxsim` on what is normalised, or that normalises."""
    from late_interaction_kernels import maxsim

    _lik_takes(inputs)

    def score(normalize: bool) -> torch.Tensor:
        documents = F.linear(inputs.hidden, inputs.weight)
        return maxsim(inputs.queries, documents if normalize else F.normalize(documents, dim=-1), normalize=normalize)

    return [
        Candidate(label, partial(computed, inputs, partial(score, normalize)))
        for label, normalize in (("linear, normalize, maxsim", False), ("linear, maxsim(normalize=True)", True))
    ]


# Embeddings that are rounded elsewhere, or more or less often, let other tokens win.
_ROUNDED = 0.3


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="hidden",
        title="MaxSim from hidden states",
        rows=ROWS,
        systems=(
            System(OURS, "pylate_flash", ours),
            System(
                "unfused",
                "linear + ours",
                partial(unfused, normalized=False),
                about="a linear layer and our `maxsim(normalize=True)`, which does not round the normalised embeddings",
                tolerance=_ROUNDED,
            ),
            System(
                "unfused_normalized",
                "linear + normalize + ours",
                partial(unfused, normalized=True),
                about="with `F.normalize` in between, which rounds the norms as well",
                tolerance=_ROUNDED,
            ),
            System("lik", "LIK", lik, peer=LIK, about="late-interaction-kernels, fused", tolerance=_ROUNDED),
            System(
                "lik_unfused",
                "linear + LIK",
                lik_unfused,
                peer=LIK,
                about="the faster of the two unfused ways with its `maxsim`",
                tolerance=_ROUNDED,
            ),
        ),
        compiled=(),
        make_inputs=make_inputs,
        reference=reference,
        accuracy=accuracy,
        error=error,
        ceilings=L2,
    )
