"""The suite `losses`: contrastive steps of large batches, whose scores and winners would not all fit.

Embeddings in, the cross entropy of every query against all documents and both gradients out, and above all the memory
that it takes (``--memory``). A batch of 16384 has 2.7e8 scores, and 8.6e9 winners.

No reference in float64 could hold all of that. The loss is checked as a whole, from scores whose products are float32
(of half embeddings that is exact but for the sums); the gradients of some queries and of some documents are checked in
float64, and those are functions of all scores.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from pylate_flash.bench import training
from pylate_flash.bench.suite import OURS, Candidate, Suite, System
from pylate_flash.bench.training import TEMPERATURE, Batch, Inputs, Step

ROWS = tuple(Batch(f"batch-{size}", size, size, 32, 180) for size in (1024, 4096, 16384, 65536))

# Queries, and documents, whose gradients are checked, spread over the batch.
SAMPLED = 16
# Queries that the loop scores at a time: with a batch of 16384, their winners take 1 GiB.
LOOP_QUERIES = 1024


def sampled(size: int) -> torch.Tensor:
    """The indices of the sample."""
    return torch.linspace(0, size - 1, min(size, SAMPLED)).long()


class Sample(NamedTuple):
    """What is checked of a step: the loss, and the gradients of the sampled queries and documents."""

    loss: torch.Tensor
    grad_queries: torch.Tensor
    grad_documents: torch.Tensor


def sample_of(step: Step) -> Sample:
    """What is checked of what a system computed."""
    queries, documents = step.grad_queries, step.grad_documents
    return Sample(step.loss, queries[sampled(len(queries))], documents[sampled(len(documents))])


def reference(inputs: Inputs) -> Sample:
    """The loss and the sampled gradients."""
    with torch.no_grad():
        queries, documents = inputs.queries.detach(), inputs.documents.detach()
        (n_queries, length, size), n_documents = queries.shape, len(documents)
        of_queries, of_documents = sampled(n_queries), sampled(n_documents)
        log_sums, right = log_sums_of(queries, documents)
        rows = queries.double().flatten(0, 1)

        def weights(scores: torch.Tensor, chosen: torch.Tensor, positives: torch.Tensor) -> torch.Tensor:
            """The gradient of scores [n, queries], of documents times queries, that are `positives` or not."""
            softmax = (scores / TEMPERATURE - log_sums[chosen]).exp()
            return (softmax - positives.double()) / (TEMPERATURE * n_queries)

        # Some queries meet all documents, and all queries some documents.
        some_rows = queries[of_queries].double().flatten(0, 1)
        every = torch.arange(n_documents).unsqueeze(1)
        best, winners = training._winners(some_rows, documents.double())
        scores = best.unflatten(1, (-1, length)).sum(-1)
        positives = (every == of_queries).to(scores.device)
        gradient = weights(scores, of_queries, positives).repeat_interleave(length, dim=1)
        grad_queries, _ = training._gradients(some_rows, documents.double(), winners, gradient)
        some_documents = documents[of_documents].double()
        best, winners = training._winners(rows, some_documents)
        scores = best.unflatten(1, (-1, length)).sum(-1)
        positives = (of_documents.unsqueeze(1) == torch.arange(n_queries)).to(scores.device)
        gradient = weights(scores, torch.arange(n_queries), positives).repeat_interleave(length, dim=1)
        _, grad_documents = training._gradients(rows, some_documents, winners, gradient)
        return Sample((log_sums - right).mean(), grad_queries.view(-1, length, size), grad_documents)


def log_sums_of(queries: torch.Tensor, documents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of every query's denominator, and the logit of its own document, float64 from float32 products."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        wide = documents.flatten(0, 1).T.float()
        step = max(1, training.REFERENCE_BYTES // (4 * queries.shape[1] * wide.shape[1]))
        log_sums, right = [], []
        for first in range(0, len(queries), step):
            similarities = (queries[first : first + step].float() @ wide).unflatten(2, (len(documents), -1))
            logits = similarities.amax(dim=-1).double().sum(dim=1) / TEMPERATURE
            log_sums.append(logits.logsumexp(dim=1))
            right.append(logits.diagonal(first))
        return torch.cat(log_sums), torch.cat(right)
    finally:
        torch.set_float32_matmul_precision(precision)


def error(found: Sample, expected: Sample) -> float:
    """The largest of the relative errors of the loss and, in Frobenius norm, of the sampled gradients."""
    return training.error(Step(found.loss, None, *found[1:]), Step(expected.loss, expected.loss, *expected[1:]))


def ours(inputs: Inputs) -> list[Candidate]:
    """`maxsim_cross_entropy`, as a user calls it."""
    return [candidate._replace(read=sample_of) for candidate in training.ours(inputs)]


def loop(inputs: Inputs) -> list[Candidate]:
    """`maxsim` and torch's loss, so many queries at a time, each time again in the backward."""
    return [Candidate(f"{LOOP_QUERIES} queries at a time", partial(loop_step, inputs), sample_of)]


def loop_step(inputs: Inputs) -> Step:
    """A step by that loop: autograd adds up the gradient of the documents, in their type."""
    from pylate_flash import maxsim

    def part(queries: torch.Tensor, documents: torch.Tensor, first: int) -> torch.Tensor:
        scores = maxsim(queries, documents) / TEMPERATURE
        labels = torch.arange(first, first + len(queries), device=scores.device)
        return F.cross_entropy(scores, labels, reduction="sum")

    with torch.enable_grad():
        parts = [
            torch.utils.checkpoint.checkpoint(
                part, queries, inputs.documents, LOOP_QUERIES * index, use_reentrant=False
            )
            for index, queries in enumerate(inputs.queries.split(LOOP_QUERIES))
        ]
        loss = torch.stack(parts).sum() / len(inputs.queries)
    return Step(loss.detach(), None, *torch.autograd.grad(loss, (inputs.queries, inputs.documents)))


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="losses",
        title="MaxSim contrastive step of large batches",
        rows=ROWS,
        systems=(
            System(OURS, "pylate_flash", ours, about="`maxsim_cross_entropy`"),
            System(
                f"{OURS}_loop",
                "loop",
                loop,
                about=f"`maxsim` and torch's loss for {LOOP_QUERIES} queries at a time, each checkpointed",
            ),
        ),
        compiled=(),
        make_inputs=training.make_inputs,
        reference=reference,
        accuracy=training.accuracy,
        error=error,
    )
