"""The suite `losses`: contrastive steps of large batches, whose scores and argmax would not fit in memory.

A step maps embeddings to the cross entropy of every query against all documents and to both gradients; its memory
matters most (``--memory``). A batch of 16384 has 2.7e8 scores, and 8.6e9 entries of the argmax. In the rows named
"given" the embeddings are as a model outputs them under autocast, not normalised and with masks, and the losses of the
package, without their encoder, are measured beside the bare operation that they call.

A full float64 reference would not fit. The loss is checked in full, from scores with float32 products (exact for half
embeddings, except for the sums); the gradients of a sample of queries and of documents are checked in float64, and
those depend on all scores.
"""

from __future__ import annotations

from dataclasses import replace
from operator import methodcaller

import torch

from pylate_flash.bench import calls, exact, training
from pylate_flash.bench.exact import Step, einsum_scores
from pylate_flash.bench.loss_steps import LOOP_QUERIES, LargeStep
from pylate_flash.bench.peers import PYLATE, SENTENCE_TRANSFORMERS
from pylate_flash.bench.protocol import make_stopwatch
from pylate_flash.bench.rows import L2, Row
from pylate_flash.bench.suite import FLASH_MAXSIM_SYSTEM, MARGIN, OUR_SYSTEM, WRONG, Suite, System, another_way
from pylate_flash.bench.training import TEMPERATURE

# Kind of the rows with embeddings as a model outputs them: not normalised, with masks of queries and documents.
GIVEN = "masks"
ROWS = (
    *(Row(f"batch-{size}", size, size, 32, 180, step=True) for size in (256, 1024, 4096, 16384, 65536)),
    *(Row(f"given-{size}", size, size, 32, 180, step=True, kind=GIVEN) for size in (128, 1024, 4096)),
)

# Number of queries, and of documents, whose gradients are checked, spread over the batch.
SAMPLED = 16
# Queries that the reference scores at a time.
REFERENCE_QUERIES = 1024


def make_inputs(row: Row, device: torch.device, dtype: torch.dtype) -> LargeStep:
    """Draw random unit vectors; for a "given" row unnormalised vectors in the autocast dtype, and masks."""
    inputs = training.make_inputs(row, device, dtype)
    if row.kind != GIVEN:
        return LargeStep(inputs.queries, inputs.documents, temperature=TEMPERATURE)
    generator = torch.Generator(device).manual_seed(1)
    cast = calls.autocast_type(dtype)

    def stretched(embeddings: torch.Tensor) -> torch.Tensor:
        norms = 0.5 + torch.rand(*embeddings.shape[:-1], 1, device=device, generator=generator)
        return (embeddings.detach() * norms).to(cast).requires_grad_()

    queries, documents = stretched(inputs.queries), stretched(inputs.documents)
    queries_mask, documents_mask = (
        calls.prefixes(*part.shape[:2], generator=generator) for part in (queries, documents)
    )
    return LargeStep(queries, documents, queries_mask, documents_mask, cast, temperature=TEMPERATURE)


def sampled(size: int) -> torch.Tensor:
    """The indices of the sample."""
    return torch.linspace(0, size - 1, min(size, SAMPLED)).long()


def sample_of(step: Step) -> Step:
    """The part of a step that is checked: the loss, and the gradients of the sampled queries and documents."""
    queries, documents = step.grad_queries, step.grad_documents
    return Step(step.loss, None, queries[sampled(len(queries))], documents[sampled(len(documents))])


def reference(inputs: LargeStep) -> Step:
    """The loss and the sampled gradients."""
    embeddings = inputs.queries.detach(), inputs.documents.detach()

    def score(*embeddings: torch.Tensor, **masks: torch.Tensor) -> torch.Tensor:
        if inputs.is_given:
            embeddings = tuple(exact.normalized(part, inputs.queries.dtype) for part in embeddings)
        return einsum_scores(*embeddings, **masks)

    log_sums, right = log_sums_of(inputs)
    n_queries, n_documents = map(len, embeddings)
    sampled_queries, sampled_documents = sampled(n_queries), sampled(n_documents)
    grads = []
    # Sampled queries against all documents, then all queries against sampled documents.
    for queries, documents in ((sampled_queries, slice(None)), (slice(None), sampled_documents)):
        part = embeddings[0][queries], embeddings[1][documents]
        index = {"queries_mask": queries, "documents_mask": documents}
        masks = {name: mask[index[name]] for name, mask in inputs.masks.items()}
        scores = exact.scores(*part, **masks, score=score)
        softmax = (scores / TEMPERATURE - log_sums[queries].unsqueeze(1)).exp()
        own = torch.arange(n_queries)[queries].unsqueeze(1) == torch.arange(n_documents)[documents]
        weights = (softmax - own.to(scores)) / (TEMPERATURE * n_queries)
        grads.append(exact.gradients(*part, weights, **masks, score=score))
    return Step((log_sums - right).mean(), None, grads[0][0], grads[1][1])


@exact.float32_products()
def log_sums_of(inputs: LargeStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Per query: logsumexp of its logits, and the logit of its own document, in float64 from float32 products."""
    queries, documents = inputs.queries.detach(), inputs.documents.detach()
    if inputs.is_given:
        dtype = queries.dtype
        queries, documents = (exact.normalized(part.double(), dtype).to(dtype) for part in (queries, documents))
    queries_mask, documents_mask = inputs.both_masks
    length = queries.shape[1]
    log_sums, right = [], []
    for first in range(0, len(queries), REFERENCE_QUERIES):
        chosen = slice(first, first + REFERENCE_QUERIES)
        rows = queries[chosen].flatten(0, 1)
        step = max(1, exact.REFERENCE_BYTES // (4 * len(rows) * documents.shape[1]))
        scores = []
        for start in range(0, len(documents), step):
            part = documents[start : start + step]
            similarities = products(rows, part).unflatten(1, (len(part), -1))
            if documents_mask is not None:
                similarities.masked_fill_(~documents_mask[start : start + step], -torch.inf)
            best = similarities.amax(dim=-1).double().unflatten(0, (-1, length))
            if queries_mask is not None:
                best *= queries_mask[chosen].unsqueeze(-1)
            scores.append(best.sum(dim=1))
        logits = torch.cat(scores, dim=1) / TEMPERATURE
        log_sums.append(logits.logsumexp(dim=1))
        right.append(logits.diagonal(first))
    return torch.cat(log_sums), torch.cat(right)


def products(rows: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Similarities [R, n * Ld] of rows [R, d] and documents [n, Ld, d], with float32 products and accumulation."""
    columns = documents.flatten(0, 1).T
    if rows.is_cuda and rows.dtype != torch.float32:
        # Float32 products of the largest batch would take minutes.
        return torch.mm(rows, columns, out_dtype=torch.float32)
    return rows.float() @ columns.float()


def error(result: Step, expected: Step) -> float:
    """The larger of the relative errors of the loss and of the sampled gradients (Frobenius norm)."""
    return exact.error(sample_of(result), expected)


def accuracy(inputs: LargeStep, dtype: torch.dtype) -> float:
    """The relative error that pylate_flash promises for a row.

    For given embeddings, dividing them by the norm before rounding or the similarity afterwards decides the argmax in a
    few of a thousand cases.
    """
    return exact.ROUNDED / MARGIN if inputs.is_given else min(exact.accuracy(dtype, gradients=True), WRONG / MARGIN)


def suite() -> Suite:
    """Return the suite."""
    cached = "`losses.CachedContrastive` on given embeddings, in one mini-batch"
    pylate = "PyLate's cached loss, the fastest of its backends and chunks"
    of_st = methodcaller("sentence_transformers")
    systems = (
        replace(OUR_SYSTEM, about="`maxsim_cross_entropy`"),
        another_way("loop", about=f"`maxsim_cross_entropy` of {LOOP_QUERIES} queries at a time"),
        another_way("contrastive", "Contrastive", about="`losses.Contrastive` on given embeddings", counted=True),
        another_way("cached", "CachedContrastive", about=cached, counted=True),
        System("pylate", "PyLate", methodcaller("pylate"), peer=PYLATE, about=pylate),
        System("sentence_transformers", "ST", of_st, SENTENCE_TRANSFORMERS, "the cached loss of sentence-transformers"),
        replace(FLASH_MAXSIM_SYSTEM, about="flash-maxsim's `colbert_contrastive_step`"),
    )
    return Suite(
        name="losses",
        title="MaxSim contrastive step of large batches",
        rows=ROWS,
        systems=[replace(system, tolerance=exact.ROUNDED) for system in systems],
        make_inputs=make_inputs,
        reference=reference,
        accuracy=accuracy,
        error=error,
        # Calls take seconds, so the device time alone is not measured as well.
        stopwatch=make_stopwatch,
        ceilings=L2,
    )
