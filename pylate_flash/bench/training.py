"""The suite `training`: the scores' part of a training step, forward, loss and backward for queries and documents.

The in-batch rows take the cross entropy of every query against all documents, its own being the right one; the rows
with candidates take the divergence from a teacher's scores (knowledge distillation). What needs no encoder is all that
is timed: embeddings in, scores and both gradients out.

In the rows named "skewed", half of all wins go to one document token in twenty, as in a model's embeddings, where the
tokens of markers and stopwords win again and again: rows that many winners write to must not wait for each other.

The floor is the forward's operations at the ceiling, and after it the rows that the backward must gather, one from the
documents and one from the queries for every winner, at the speed of the L2 cache, which holds either side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pylate_flash.bench.forward import unit_vectors
from pylate_flash.bench.peers import FLASH_MAXSIM, LIK
from pylate_flash.bench.protocol import L2, MIB, Work, relative_error
from pylate_flash.bench.suite import OURS, Candidate, Suite, System

TEMPERATURE = 0.02


@dataclass(frozen=True)
class Batch:
    """``Nq`` queries against ``Nd`` documents, or each against ``Nd`` candidates of its own."""

    name: str
    Nq: int
    Nd: int
    Lq: int
    Ld: int
    skewed: bool = False
    candidates: bool = False
    d: int = 128

    @property
    def shape(self) -> str:
        """The shape, for people."""
        text = f"{self.Nq} x {self.Nd}{' of its own' if self.candidates else ''}, {self.Lq} x {self.Ld}"
        return f"{text}, skewed" if self.skewed else text

    @property
    def documents(self) -> int:
        """How many documents there are in all."""
        return self.Nq * self.Nd if self.candidates else self.Nd

    def work(self, dtype: torch.dtype) -> Work:
        """The forward's operations; embeddings read and gradients written once; the rows gathered for every winner."""
        embeddings = self.d * (self.Nq * self.Lq + self.documents * self.Ld)
        winners = self.Nq * self.Nd * self.Lq
        return Work(
            flops=2.0 * winners * self.Ld * self.d,
            bytes=float(2 * dtype.itemsize * embeddings + 4 * self.Nq * self.Nd),
            l2_bytes=float(2 * dtype.itemsize * winners * self.d),
        )

    def within(self, flops: float) -> Batch:
        """The same row with fewer queries, and in a batch as many fewer documents, costing no more than ``flops``."""
        share = min(1.0, flops / self.work(torch.float32).flops)
        if self.candidates:
            return replace(self, Nq=max(1, int(self.Nq * share)))
        size = max(1, int(self.Nq * math.sqrt(share)))
        return replace(self, Nq=size, Nd=size * self.Nd // self.Nq)


UNIFORM = (
    Batch("train-128", 128, 128, 32, 300),
    Batch("train-512", 512, 512, 32, 180),
    Batch("train-1024", 1024, 1024, 32, 180),
    Batch("colpali-64", 64, 64, 1024, 1024),
    Batch("colpali-128", 128, 128, 1024, 1024),
)
ROWS = (
    *(row for batch in UNIFORM for row in (batch, replace(batch, name=f"{batch.name}-skewed", skewed=True))),
    Batch("kd-64x16", 64, 16, 32, 300, candidates=True),
    Batch("kd-32x32", 32, 32, 32, 512, candidates=True),
    # A small step, and one in which each query brings five hard negatives beside its own document.
    Batch("train-32", 32, 32, 32, 180),
    Batch("negatives-64x5", 64, 6 * 64, 32, 150),
)

# Of a skewed row's document tokens, and of its wins.
HOT_TOKENS = 0.05
HOT_WINS = 0.5
# How far the share of wins may be from that (a small batch has few wins), and how many are looked at to set it.
HOT_TOLERANCE = 0.1
SAMPLED_ROWS = 256
SAMPLED_DOCUMENTS = 64


@dataclass(frozen=True)
class Inputs:
    """A row's tensors.

    ``queries`` [Nq, Lq, d] and ``documents`` [Nd, Ld, d] or [Nq, Nd, Ld, d], which require gradients; ``teacher``
    [Nq, Nd], log-probabilities, where the documents are candidates; ``lengths`` [documents] (int32, all Ld); ``hot``,
    the number of tokens at the start of every document that share half of all wins, or 0.
    """

    queries: torch.Tensor
    documents: torch.Tensor
    teacher: torch.Tensor | None
    lengths: torch.Tensor
    hot: int

    def loss(self, scores: torch.Tensor) -> torch.Tensor:
        """The loss of scores [Nq, Nd]."""
        scores = scores / TEMPERATURE
        if self.teacher is None:
            return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
        teacher = self.teacher.to(scores.dtype)
        return F.kl_div(scores.log_softmax(dim=-1), teacher, reduction="batchmean", log_target=True)


class Step(NamedTuple):
    """What a step gives: the loss, scores [Nq, Nd] unless they stay inside the loss, and the gradients of the loss."""

    loss: torch.Tensor
    scores: torch.Tensor | None
    grad_queries: torch.Tensor
    grad_documents: torch.Tensor


def make_inputs(row: Batch, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw random unit vectors, the same ones for the same row on the same kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (row.Nq, row.Nd) if row.candidates else (row.Nd,)
    draw = partial(unit_vectors, generator=generator, dtype=torch.float32)
    queries, documents = draw(row.Nq, row.Lq, row.d), draw(*shape, row.Ld, row.d)
    hot = 0
    if row.skewed:
        hot = max(1, round(HOT_TOKENS * row.Ld))
        queries, documents = with_hot_tokens(queries, documents, hot)
    teacher = None
    if row.candidates:
        teacher = torch.randn(row.Nq, row.Nd, device=device, generator=generator).log_softmax(dim=-1)
    return Inputs(
        queries.to(dtype).requires_grad_(),
        documents.to(dtype).requires_grad_(),
        teacher,
        torch.full((row.documents,), row.Ld, dtype=torch.int32, device=device),
        hot,
    )


def with_hot_tokens(queries: torch.Tensor, documents: torch.Tensor, hot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn every query token, and the first ``hot`` tokens of every document, towards one direction.

    The queries share a fixed part of it. How far the documents' tokens turn is found by bisection, until they have half
    of the wins in a sample. All stay unit vectors.
    """
    axis = F.normalize(torch.ones(queries.shape[-1], device=queries.device), dim=0)

    def turned(embeddings: torch.Tensor, cosine: float) -> torch.Tensor:
        across = F.normalize(embeddings - (embeddings @ axis).unsqueeze(-1) * axis, dim=-1)
        return cosine * axis + math.sqrt(1.0 - cosine**2) * across

    queries = turned(queries, 0.4)
    others = turned(documents[..., hot:, :], 0.0)
    sampled_rows = queries.flatten(0, 1)[:SAMPLED_ROWS]
    sampled = slice(0, SAMPLED_DOCUMENTS)
    # In a sample it does not matter whose candidates they are.
    first, rest = documents[..., :hot, :].flatten(0, -3)[sampled], others.flatten(0, -3)[sampled]
    best_of_others = (rest @ sampled_rows.T).amax(dim=1)
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        wins = (turned(first, middle) @ sampled_rows.T).amax(dim=1) > best_of_others
        low, high = (low, middle) if wins.float().mean() > HOT_WINS else (middle, high)
    return queries, torch.cat([turned(documents[..., :hot, :], high), others], dim=-2)


# The similarities that the reference holds at a time, and likewise the rows that it gathers.
REFERENCE_BYTES = 1024 * MIB


def reference(inputs: Inputs) -> Step:
    """Return scores and gradients in float64, of the (already rounded) inputs: all of them, in every row.

    Raises
    ------
    RuntimeError
        If the inputs of a skewed row do not have their wins where they should.
    """
    with torch.no_grad():
        queries = inputs.queries.double()
        documents = inputs.documents.double()
        if inputs.teacher is None:
            groups = [(queries.flatten(0, 1), documents)]
        else:
            groups = list(zip(queries, documents, strict=True))
        found = [_winners(*group) for group in groups]
        Nq, Lq, d = queries.shape
        # [groups, documents, rows of the group] to [Nq, Nd].
        scores = torch.stack([best for best, _ in found]).unflatten(-1, (-1, Lq)).sum(-1).transpose(1, 2).flatten(0, 1)
        if inputs.hot:
            share = torch.cat([winner.flatten() for _, winner in found]).lt(inputs.hot).double().mean().item()
            if abs(share - HOT_WINS) > HOT_TOLERANCE:
                raise RuntimeError(f"{share:.0%} of the wins are on the hot tokens, and not {HOT_WINS:.0%}")
    with torch.enable_grad():
        loss = inputs.loss(scores.requires_grad_())
    (weights,) = torch.autograd.grad(loss, scores)
    weights = weights.view(len(groups), -1, scores.shape[1]).transpose(1, 2).repeat_interleave(Lq, dim=2)
    gradients = [
        _gradients(*group, winner, weight) for group, (_, winner), weight in zip(groups, found, weights, strict=True)
    ]
    return Step(
        loss.detach(),
        scores.detach(),
        torch.stack([grad for grad, _ in gradients]).view(queries.shape),
        torch.stack([grad for _, grad in gradients]).view(documents.shape),
    )


def _winners(rows: torch.Tensor, documents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of query tokens [R, d] and documents [n, Ld, d], the best similarities [n, R] and where they are."""
    step = max(1, REFERENCE_BYTES // (8 * len(rows) * documents.shape[1]))
    parts = [(part @ rows.T).max(dim=1) for part in documents.split(step)]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])


def _gradients(
    rows: torch.Tensor, documents: torch.Tensor, winners: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients [R, d] and [n, Ld, d] where every best similarity [n, R] has a weight in the loss."""
    grad_rows, grad_documents = torch.zeros_like(rows), torch.zeros_like(documents)
    step = max(1, REFERENCE_BYTES // (8 * rows.numel()))
    for start in range(0, len(documents), step):
        part = slice(start, start + step)
        index = winners[part].unsqueeze(-1).expand(-1, -1, rows.shape[1])
        weight = weights[part].unsqueeze(-1)
        grad_rows += (documents[part].gather(1, index) * weight).sum(dim=0)
        grad_documents[part] = grad_documents[part].scatter_add(1, index, rows * weight)
    return grad_rows, grad_documents


def through_normalisation(embeddings: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of the embeddings from that of the normalised ones."""
    with torch.enable_grad():
        leaf = embeddings.detach().requires_grad_()
        return torch.autograd.grad(F.normalize(leaf, dim=-1), leaf, grad)[0]


def error(found: Step, expected: Step) -> float:
    """Return the largest of the relative errors of loss and scores, and of the gradients' relative Frobenius errors.

    A Frobenius error of at most 1e-2 implies a cosine of at least 0.9999.
    """
    assert expected.scores is not None
    return max(
        relative_error(found.loss, expected.loss),
        0.0 if found.scores is None else relative_error(found.scores, expected.scores),
        frobenius(found.grad_queries, expected.grad_queries),
        frobenius(found.grad_documents, expected.grad_documents),
    )


def frobenius(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in Frobenius norm, infinite where it is not finite."""
    if found.numel() != expected.numel():
        return math.inf
    difference = (found.reshape(expected.shape).double() - expected).norm().item()
    norm = expected.norm().item()
    value = difference / norm if norm else difference
    return value if math.isfinite(value) else math.inf


def accuracy(dtype: torch.dtype) -> float:
    """Return the relative error that pylate_flash's gradients stay within."""
    if dtype != torch.float32:
        return 1e-2
    return 1e-3 if torch.get_float32_matmul_precision() != "highest" else 1e-5


def step(inputs: Inputs, score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Step:
    """Score, take the loss, and differentiate it for queries and documents."""
    with torch.enable_grad():
        scores = score(inputs.queries, inputs.documents)
        loss = inputs.loss(scores)
    gradients = torch.autograd.grad(loss, (inputs.queries, inputs.documents))
    return Step(loss.detach(), scores.detach(), *gradients)


def step_of_loss(inputs: Inputs, loss_of: Callable[..., torch.Tensor]) -> Step:
    """Take the loss of queries and documents in one, and differentiate it."""
    targets = [] if inputs.teacher is None else [inputs.teacher]
    with torch.enable_grad():
        loss = loss_of(inputs.queries, inputs.documents, *targets, temperature=TEMPERATURE)
    return Step(loss.detach(), None, *torch.autograd.grad(loss, (inputs.queries, inputs.documents)))


def ours(inputs: Inputs) -> list[Candidate]:
    """The public `maxsim_cross_entropy` or `maxsim_kl_divergence`, as a user calls it: scores and loss in one."""
    from pylate_flash import maxsim_cross_entropy, maxsim_kl_divergence

    loss_of = maxsim_cross_entropy if inputs.teacher is None else maxsim_kl_divergence
    return [Candidate(loss_of.__name__, partial(step_of_loss, inputs, loss_of))]


def lik(inputs: Inputs, *backwards: str) -> list[Candidate]:
    """late-interaction-kernels: `maxsim`, with the named ways through its backward."""
    from late_interaction_kernels import maxsim

    return [
        Candidate(f"maxsim, {backward}", partial(step, inputs, partial(maxsim, backward=backward)))
        for backward in backwards
    ]


def flash_maxsim(inputs: Inputs) -> list[Candidate]:
    """flash-maxsim: `flash_maxsim_batched_train`; given, the lengths spare it a kernel that would fill them in."""
    from flash_maxsim import flash_maxsim_batched_train

    score = partial(flash_maxsim_batched_train, shared_docs=inputs.teacher is None, doc_lengths=inputs.lengths)
    return [Candidate("flash_maxsim_batched_train", partial(step, inputs, score))]


def chunk_size(inputs: Inputs) -> int:
    """Return the largest of Nd, Nd / 2, Nd / 4, ... documents whose similarities fit six times in the free memory.

    So many times the backward of the plain way was seen to hold them.
    """
    Nq, Lq, _ = inputs.queries.shape
    Nd, Ld = inputs.documents.shape[-3:-1]
    device = inputs.queries.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2048 * MIB
    size = Nd
    while size > 1 and 6 * Nq * size * Lq * Ld * inputs.queries.element_size() > free:
        size = (size + 1) // 2
    return size


def einsum_scores(queries: torch.Tensor, documents: torch.Tensor, chunk: int) -> torch.Tensor:
    """The plain way, ``chunk`` documents at a time: similarities in the input's type, and a float32 sum."""
    equation = "qsd,ntd->qnst" if documents.dim() == 3 else "qsd,qntd->qnst"
    scores = [
        torch.einsum(equation, queries, part).max(dim=-1).values.sum(dim=-1, dtype=torch.float32)
        for part in documents.split(chunk, dim=-3)
    ]
    return torch.cat(scores, dim=1)


def torch_eager(inputs: Inputs) -> list[Candidate]:
    """torch: an einsum over as many documents at a time as fit; its autograd keeps where the maxima were."""
    chunk = chunk_size(inputs)
    return [Candidate(f"einsum, chunks of {chunk}", partial(step, inputs, partial(einsum_scores, chunk=chunk)))]


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="training",
        title="MaxSim training step",
        rows=ROWS,
        systems=(
            System(
                OURS,
                "pylate_flash",
                ours,
                about="`maxsim_cross_entropy` or `maxsim_kl_divergence`, scores and loss in one, where the others' "
                "scores go into torch's loss",
            ),
            System(
                "lik",
                "LIK",
                lambda inputs: lik(inputs, "auto", "unified"),
                peer=LIK,
                about="late-interaction-kernels, the faster of its backwards `auto` and `unified`",
            ),
            System("lik_lowmem", "LIK lowmem", lambda inputs: lik(inputs, "lowmem"), peer=LIK, about="its third"),
            System("flash_maxsim", "FM", flash_maxsim, peer=FLASH_MAXSIM, about="flash-maxsim"),
            System(
                "torch",
                "torch",
                torch_eager,
                about="an einsum over chunks of documents, which rounds similarities to the type of the inputs, so "
                "that other tokens win (about 10 to 20 % of a bfloat16 gradient)",
                tolerance=0.3,
            ),
        ),
        compiled=(),
        make_inputs=make_inputs,
        reference=reference,
        accuracy=accuracy,
        error=error,
        ceilings=L2,
    )
