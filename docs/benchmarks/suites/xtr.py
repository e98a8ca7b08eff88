"""The suite `xtr`: contrastive steps with XTR's scores, for which query tokens retrieve from the whole batch.

Embeddings in, the cross entropy of every query against all documents and both gradients out, with PyLate's normalizer.
Its own scores keep the similarities of all query tokens with all document tokens, several times over (``--memory``).

What is retrieved hangs on the last bits where two similarities lie on either side of a threshold, so that errors are
those of all scores and all gradients together.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from pylate_flash.bench import training
from pylate_flash.bench.peers import PYLATE
from pylate_flash.bench.protocol import L2
from pylate_flash.bench.suite import OURS, Candidate, Suite, System
from pylate_flash.bench.training import TEMPERATURE, Batch, Inputs, Step

ROWS = tuple(Batch(f"xtr-{size}", size, size, 32, 180) for size in (64, 256, 1024))

# Document tokens that each query token retrieves, as many as by default.
RETRIEVED = 256


def reference(inputs: Inputs) -> Step:
    """Scores and gradients in float64, of the (already rounded) inputs, by the definition."""
    from pylate_flash.ops import xtr_scores_reference

    leaves = [tensor.detach().double().requires_grad_() for tensor in (inputs.queries, inputs.documents)]
    queries, documents = leaves
    similarities = 8 * queries.shape[1] * documents[..., 0].numel()
    step = max(1, training.REFERENCE_BYTES // similarities)
    found, total = [], torch.zeros((), dtype=torch.float64, device=queries.device)
    with torch.enable_grad():
        for first in range(0, len(queries), step):
            scores = xtr_scores_reference(queries[first : first + step], documents, k=RETRIEVED)
            labels = torch.arange(first, first + len(scores), device=scores.device)
            loss = F.cross_entropy(scores / TEMPERATURE, labels, reduction="sum") / len(queries)
            loss.backward()
            found.append(scores.detach())
            total += loss.detach()
    grad_queries, grad_documents = (leaf.grad for leaf in leaves)
    assert grad_queries is not None
    assert grad_documents is not None
    return Step(total, torch.cat(found), grad_queries, grad_documents)


def error(found: Step, expected: Step) -> float:
    """The largest of the relative errors, in Frobenius norm, of loss, scores and gradients."""
    assert found.scores is not None
    assert expected.scores is not None
    return max(training.frobenius(*pair) for pair in zip(found, expected, strict=True))  # type: ignore[arg-type]


def ours(inputs: Inputs) -> list[Candidate]:
    """`xtr_scores`, as a user calls it."""
    from pylate_flash import xtr_scores

    return [Candidate("xtr_scores", partial(training.step, inputs, partial(xtr_scores, k=RETRIEVED)))]


def pylate(inputs: Inputs) -> list[Candidate]:
    """PyLate's `XTRScores`, of all documents at once, and of a quarter at a time."""
    from pylate.scores import XTRScores

    def score(queries: torch.Tensor, documents: torch.Tensor, chunk: int | None) -> torch.Tensor:
        return XTRScores(RETRIEVED, chunk)(queries, documents.unsqueeze(1))

    quarter = -(-len(inputs.documents) // 4)
    return [
        Candidate(label, partial(training.step, inputs, partial(score, chunk=chunk)))
        for label, chunk in (("XTRScores", None), (f"XTRScores, chunks of {quarter}", quarter))
    ]


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="xtr",
        title="Contrastive step with XTR's scores",
        rows=ROWS,
        systems=(
            System(OURS, "pylate_flash", ours, about="`xtr_scores` and torch's loss"),
            System(
                "pylate",
                "PyLate",
                pylate,
                peer=PYLATE,
                about="PyLate's `XTRScores` and torch's loss, which rounds similarities to the type of the inputs, so "
                "that other tokens are retrieved",
                tolerance=1.0,
            ),
        ),
        compiled=(),
        make_inputs=training.make_inputs,
        reference=reference,
        accuracy=lambda dtype: 1e-2,
        error=error,
        ceilings=L2,
    )
