"""The suite `losses`: contrastive steps of large batches, whose scores and winners would not all fit.

Embeddings in, the cross entropy of every query against all documents and both gradients out, and above all the memory
that it takes (``--memory``). A batch of 16384 has 2.7e8 scores, and 8.6e9 winners. In the rows named "given" the
embeddings are as a model leaves them under autocast, not normalised and with masks, and the losses of the package,
without their encoder, stand beside the bare operation that they run.

No reference in float64 could hold all of that. The loss is checked as a whole, from scores whose products are float32
(of half embeddings that is exact but for the sums); the gradients of some queries and of some documents are checked in
float64, and those are functions of all scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pylate_flash.bench import calls, loss_steps, training
from pylate_flash.bench.loss_steps import LONG, Given
from pylate_flash.bench.peers import FLASH_MAXSIM, PYLATE
from pylate_flash.bench.protocol import L2, Rounds, make_stopwatch
from pylate_flash.bench.suite import MARGIN, OURS, WRONG, Suite, System
from pylate_flash.bench.training import TEMPERATURE, Batch, Inputs, Step


@dataclass(frozen=True)
class GivenBatch(Batch):
    """A batch of embeddings as a model leaves them: not normalised, with masks of queries and documents."""

    @property
    def shape(self) -> str:
        return f"{super().shape}, masks"


ROWS: tuple[Batch, ...] = (
    *(Batch(f"batch-{size}", size, size, 32, 180) for size in (256, 1024, 4096, 16384, 65536)),
    *(GivenBatch(f"given-{size}", size, size, 32, 180) for size in (128, 1024, 4096)),
)

# Queries, and documents, whose gradients are checked, spread over the batch.
SAMPLED = 16
# Queries that the reference scores at a time.
REFERENCE_QUERIES = 1024
# What a masked document token's similarities are less than those of all others by, in the reference.
FAR = 1e4


def make_inputs(row: Batch, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw random unit vectors; for a `GivenBatch` vectors of other lengths, in the type of autocast, and masks."""
    inputs = training.make_inputs(row, device, dtype)
    if not isinstance(row, GivenBatch):
        return inputs
    generator = torch.Generator(device).manual_seed(1)
    dtype = calls.autocast_type(dtype)

    def stretched(embeddings: torch.Tensor) -> torch.Tensor:
        norms = 0.5 + torch.rand(*embeddings.shape[:-1], 1, device=device, generator=generator)
        return (embeddings.detach() * norms).to(dtype).requires_grad_()

    return Given(
        stretched(inputs.queries),
        stretched(inputs.documents),
        None,
        inputs.lengths,
        0,
        calls.prefixes(row.Nq, row.Lq, generator=generator),
        calls.prefixes(row.Nd, row.Ld, generator=generator),
    )


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
        queries, documents = compared(inputs)
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
        gradients = [grad_queries.view(-1, length, size), grad_documents]
        if isinstance(inputs, Given):
            raw = inputs.queries[of_queries], inputs.documents[of_documents]
            gradients[0] = gradients[0] * inputs.queries_mask[of_queries].unsqueeze(-1)
            gradients = [
                training.through_normalisation(embeddings.double(), found[..., : embeddings.shape[-1]])
                for embeddings, found in zip(raw, gradients, strict=True)
            ]
        return Sample((log_sums - right).mean(), *gradients)


def compared(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and documents whose plain MaxSim is that of the inputs.

    Those of `Given` are normalised. A masked token of a query becomes zeros, whose similarities are 0; documents have
    further elements, which put the similarity of a masked token far below all others.
    """
    queries, documents = inputs.queries.detach(), inputs.documents.detach()
    if not isinstance(inputs, Given):
        return queries, documents
    dtype = queries.dtype
    # As many as keep rows aligned.
    further = torch.zeros(8, dtype=torch.float64, device=queries.device)
    further[0] = 1.0
    queries, documents = (F.normalize(embeddings.double(), dim=-1) for embeddings in (queries, documents))
    queries = torch.cat([queries, further.expand(*queries.shape[:2], -1)], dim=-1)
    masked = (~inputs.documents_mask).unsqueeze(-1) * (-FAR * further)
    documents = torch.cat([documents, masked], dim=-1)
    return (queries * inputs.queries_mask.unsqueeze(-1)).to(dtype), documents.to(dtype)


def log_sums_of(queries: torch.Tensor, documents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of every query's denominator, and the logit of its own document, float64 from float32 products."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        length = queries.shape[1]
        log_sums, right = [], []
        for first in range(0, len(queries), REFERENCE_QUERIES):
            rows = queries[first : first + REFERENCE_QUERIES].flatten(0, 1)
            step = max(1, training.REFERENCE_BYTES // (4 * len(rows) * documents.shape[1]))
            scores = [
                products(rows, part).unflatten(1, (len(part), -1)).amax(dim=-1).double().unflatten(0, (-1, length))
                for part in documents.split(step)
            ]
            logits = torch.cat([part.sum(dim=1) for part in scores], dim=1) / TEMPERATURE
            log_sums.append(logits.logsumexp(dim=1))
            right.append(logits.diagonal(first))
        return torch.cat(log_sums), torch.cat(right)
    finally:
        torch.set_float32_matmul_precision(precision)


def products(rows: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Similarities [R, n * Ld] of rows [R, d] and documents [n, Ld, d], products and sums of them in float32."""
    columns = documents.flatten(0, 1).T
    if rows.is_cuda and rows.dtype != torch.float32:
        # Float32 products of the largest batch would take minutes.
        return torch.mm(rows, columns, out_dtype=torch.float32)
    return rows.float() @ columns.float()


def error(found: Sample, expected: Sample) -> float:
    """The largest of the relative errors of the loss and, in Frobenius norm, of the sampled gradients."""
    return training.error(Step(found.loss, None, *found[1:]), Step(expected.loss, expected.loss, *expected[1:]))


def accuracy_of(inputs: Inputs, dtype: torch.dtype) -> float:
    """The relative error that pylate_flash promises for a row.

    Of `Given`, whether an embedding is divided by its norm before it is rounded or a similarity after it decides which
    token wins in a few of a thousand cases.
    """
    if isinstance(inputs, Given):
        return loss_steps.ROUNDED / MARGIN
    return min(training.accuracy(dtype), WRONG / MARGIN)


def rounds_of(row: Batch, rounds: Rounds) -> Rounds:
    """Fewer calls of a row whose calls take long: about 20 from a tenth of a second, 3 from a second, 2 from ten on."""
    flops = row.work(torch.float32).flops
    if flops < LONG:
        return rounds
    # What was checked has warmed up the longest.
    warmup, repetitions = (2, 20) if flops < 10 * LONG else (1, 3) if flops < 100 * LONG else (0, 2)
    return Rounds(min(warmup, rounds.warmup), min(repetitions, rounds.repetitions), rounds.flush_bytes)


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="losses",
        title="MaxSim contrastive step of large batches",
        rows=ROWS,
        systems=(
            System(
                OURS,
                "pylate_flash",
                loss_steps.ours,
                about="`maxsim_cross_entropy`",
                tolerance=loss_steps.ROUNDED,
            ),
            System(
                f"{OURS}_loop",
                "loop",
                loss_steps.loop,
                about=f"`maxsim_cross_entropy` of {loss_steps.LOOP_QUERIES} queries at a time",
                tolerance=loss_steps.ROUNDED,
            ),
            System(
                f"{OURS}_contrastive",
                "Contrastive",
                loss_steps.contrastive,
                about="`losses.Contrastive` on given embeddings",
                tolerance=loss_steps.ROUNDED,
                counted=True,
            ),
            System(
                f"{OURS}_cached",
                "CachedContrastive",
                loss_steps.cached_contrastive,
                about="`losses.CachedContrastive` on given embeddings, in one mini-batch",
                tolerance=loss_steps.ROUNDED,
                counted=True,
            ),
            System(
                "pylate",
                "PyLate",
                loss_steps.pylate,
                peer=PYLATE,
                about="PyLate's cached loss, the fastest of its backends and chunks",
                tolerance=loss_steps.ROUNDED,
            ),
            System(
                "sentence_transformers",
                "ST 6",
                loss_steps.sentence_transformers,
                about="the cached loss of sentence-transformers 6",
                tolerance=loss_steps.ROUNDED,
            ),
            System(
                "flash_maxsim",
                "FM",
                loss_steps.flash_maxsim,
                peer=FLASH_MAXSIM,
                about="flash-maxsim's `colbert_contrastive_step`",
                tolerance=loss_steps.ROUNDED,
            ),
        ),
        compiled=(),
        make_inputs=make_inputs,
        reference=reference,
        accuracy=training.accuracy,
        accuracy_of=accuracy_of,
        error=error,
        # Of calls of seconds one time is enough.
        stopwatch=make_stopwatch,
        rounds_of=rounds_of,
        ceilings=L2,
    )
