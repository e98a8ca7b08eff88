"""The suite `cpu`: scores of padded float32 batches on the processor, with as many threads as torch uses."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import torch

from pylate_flash.bench import forward
from pylate_flash.bench.peers import MAXSIM_CPU, PYLATE
from pylate_flash.bench.suite import OURS, Candidate, Suite, System, Unavailable

ROWS = (
    forward.Shape("rerank-300", 1, 1000, 32, 300),
    forward.Shape("rerank-180", 1, 1000, 32, 180),
    forward.Shape("in-batch", 32, 256, 32, 180),
)


def pylate(inputs: forward.Inputs) -> list[Candidate]:
    """PyLate's own scorer in torch."""
    from pylate.scores import colbert_scores

    return [Candidate("colbert_scores", partial(colbert_scores, inputs.queries, inputs.documents, backend="torch"))]


def maxsim_cpu(inputs: forward.Inputs) -> list[Candidate]:
    """maxsim-cpu: a query at a time, which is all that it offers."""
    if inputs.queries.dtype != torch.float32:
        raise Unavailable(f"takes float32 only, not {inputs.queries.dtype}")
    # It reads this when it first computes; by itself it would take every core, and torch possibly fewer.
    os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))
    from maxsim_cpu import maxsim_scores

    queries, documents = inputs.queries.numpy(), inputs.documents.numpy()
    return [
        Candidate(
            "maxsim_scores",
            lambda: [maxsim_scores(query, documents) for query in queries],
            lambda scores: torch.from_numpy(np.stack(scores)),
        )
    ]


def matmul(inputs: forward.Inputs) -> list[Candidate]:
    """The product of all query tokens with all document tokens, into memory that is there, either way round."""
    queries, documents = inputs.queries.flatten(0, 1), inputs.documents.flatten(0, 1)
    output = queries.new_empty(len(queries) * len(documents))
    return [
        Candidate(label, partial(torch.mm, left, right.T, out=output.view(len(left), len(right))))
        for label, left, right in (
            ("queries first", queries, documents),
            ("documents first", documents, queries),
        )
    ]


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="cpu",
        title="MaxSim on the CPU",
        rows=ROWS,
        systems=(
            System(OURS, "pylate_flash", forward.ours),
            System("pylate", "PyLate", pylate, peer=PYLATE, about="its scorer in torch"),
            System("maxsim_cpu", "maxsim-cpu", maxsim_cpu, peer=MAXSIM_CPU),
            System(
                "matmul", "one matmul", matmul, about="of all query tokens with all document tokens", yardstick=True
            ),
        ),
        compiled=(),
        make_inputs=forward.make_inputs,
        reference=forward.reference,
        accuracy=forward.accuracy,
        device="cpu",
    )
