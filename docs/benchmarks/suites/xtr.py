"""The suite `xtr`: contrastive steps with XTR's scores, for which query tokens retrieve from the whole batch.

A step maps embeddings to the cross entropy of every query against all documents and to both gradients, with PyLate's
normalizer. PyLate's own scores hold all token similarities of the batch several times over (``--memory``).

Similarities close to the threshold are retrieved or not depending on their last bits, so errors are taken over all
scores and all gradients together.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import methodcaller

import torch
import torch.nn.functional as F

from pylate_flash.bench import exact, training
from pylate_flash.bench.peers import PYLATE
from pylate_flash.bench.rows import L2, Row
from pylate_flash.bench.steps import Step
from pylate_flash.bench.suite import OUR_SYSTEM, Candidate, Suite, System

ROWS = tuple(Row(f"xtr-{size}", size, size, 32, 180, step=True) for size in (64, 256, 1024))

# Document tokens that each query token retrieves (the default).
RETRIEVED = 256


class XTRStep(Step):
    """A step of scores in which query tokens retrieve from the whole batch."""

    def reference(self) -> exact.Step:
        """Scores and gradients of the (already rounded) inputs in float64, by definition."""
        from pylate_flash.ops import xtr_scores_reference

        leaves = [tensor.detach().double().requires_grad_() for tensor in (self.queries, self.documents)]
        queries, documents = leaves
        similarities = 8 * queries.shape[1] * documents[..., 0].numel()
        step = max(1, exact.REFERENCE_BYTES // similarities)
        chunk_scores, total = [], torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.enable_grad():
            for chunk, labels in zip(queries.split(step), self.labels.split(step), strict=True):
                scores = xtr_scores_reference(chunk, documents, k=RETRIEVED)
                loss = F.cross_entropy(scores / self.temperature, labels, reduction="sum") / len(queries)
                loss.backward()
                chunk_scores.append(scores.detach())
                total += loss.detach()
        grad_queries, grad_documents = (leaf.grad for leaf in leaves)
        assert grad_queries is not None
        assert grad_documents is not None
        return exact.Step(total, torch.cat(chunk_scores), grad_queries, grad_documents)

    def accuracy(self, dtype: torch.dtype) -> float:
        """The relative error over all scores and gradients."""
        return 1e-2

    def ours(self) -> list[Candidate]:
        """`xtr_scores`, as users call it."""
        from pylate_flash import xtr_scores

        return [self.candidate("xtr_scores", partial(xtr_scores, k=RETRIEVED))]

    def pylate(self) -> list[Candidate]:
        """PyLate's `XTRScores`, with all documents at once, or a quarter at a time."""
        from pylate.scores import XTRScores

        def score(queries: torch.Tensor, documents: torch.Tensor, chunk: int | None) -> torch.Tensor:
            return XTRScores(RETRIEVED, chunk)(queries, documents.unsqueeze(1))

        quarter = -(-len(self.documents) // 4)
        return [
            self.candidate(label, partial(score, chunk=chunk))
            for label, chunk in (("XTRScores", None), (f"XTRScores, chunks of {quarter}", quarter))
        ]


def make_inputs(row: Row, device: torch.device, dtype: torch.dtype) -> XTRStep:
    """Draw the inputs of the suite `training`."""
    batch = training.make_inputs(row, device, dtype)
    return XTRStep(batch.queries, batch.documents, temperature=batch.temperature)


def error(result: exact.Step, expected: exact.Step) -> float:
    """The largest relative error (Frobenius norm) of loss, scores and gradients."""
    assert result.scores is not None
    assert expected.scores is not None
    return max(exact.frobenius(*pair) for pair in zip(result, expected, strict=True))  # type: ignore[arg-type]


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="xtr",
        title="Contrastive step with XTR's scores",
        rows=ROWS,
        systems=(
            replace(OUR_SYSTEM, about="`xtr_scores` and torch's loss"),
            System(
                "pylate",
                "PyLate",
                methodcaller("pylate"),
                peer=PYLATE,
                about="PyLate's `XTRScores` and torch's loss, which rounds similarities to the type of the inputs, so "
                "that other tokens are retrieved",
                tolerance=1.0,
            ),
        ),
        make_inputs=make_inputs,
        error=error,
        ceilings=L2,
    )
