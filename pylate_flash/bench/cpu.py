"""The suite `cpu`: scores of float32 batches on the processor, and reranking, with as many threads as torch uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from pylate_flash.bench import forward, varlen
from pylate_flash.bench.peers import MAXSIM_CPU, PYLATE
from pylate_flash.bench.suite import OURS, Candidate, Suite, System, Unavailable

ROWS = (
    forward.Shape("rerank-300", 1, 1000, 32, 300),
    forward.Shape("rerank-180", 1, 1000, 32, 180),
    forward.Shape("in-batch", 32, 256, 32, 180),
    varlen.Rerank("rerank", 100, 100, 32, 40, 180),
)

Inputs = forward.Inputs | varlen.Request


def make_inputs(row: forward.Shape | varlen.Ragged, device: torch.device, dtype: torch.dtype) -> Any:
    """As the row's own suite."""
    if isinstance(row, forward.Shape):
        return forward.make_inputs(row, device, dtype)
    return varlen.make_inputs(row, device, dtype)


def reference(inputs: Inputs) -> torch.Tensor:
    """As the inputs' own suite."""
    return forward.reference(inputs) if isinstance(inputs, forward.Inputs) else varlen.reference(inputs)


def ours(inputs: Inputs) -> Sequence[Candidate]:
    """`maxsim` of padded batches, `rank.rerank` of requests."""
    return forward.ours(inputs) if isinstance(inputs, forward.Inputs) else varlen.ours(inputs)


def pylate(inputs: Inputs) -> list[Candidate]:
    """PyLate's own scorer in torch, and its `rank.rerank` with it."""
    if isinstance(inputs, varlen.Request):
        return varlen.torch_eager(inputs)
    from pylate.scores import colbert_scores

    return [Candidate("colbert_scores", partial(colbert_scores, inputs.queries, inputs.documents, backend="torch"))]


def maxsim_cpu(inputs: Inputs) -> list[Candidate]:
    """maxsim-cpu: a query at a time, which is all that it offers."""
    if isinstance(inputs, varlen.Request):
        return []
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


# The similarities that the yardstick computes at a time: few enough to stay in the cache.
BLOCK = 1 << 20


def products(inputs: Inputs) -> list[Candidate]:
    """The similarities alone, in blocks that are thrown away: by MKL, either way round, and by oneDNN.

    Of a request, the documents of each query are packed already.
    """
    if isinstance(inputs, varlen.Request):
        pairs = [
            (torch.from_numpy(query), torch.from_numpy(np.concatenate(documents)))
            for query, documents in zip(inputs.queries, inputs.documents, strict=True)
        ]
    else:
        pairs = [(inputs.queries.flatten(0, 1), inputs.documents.flatten(0, 1))]
    blocks = [
        (queries, part) for queries, documents in pairs for part in documents.split(max(1, BLOCK // len(queries)))
    ]
    return [
        Candidate(label, partial(_each, product, blocks))
        for label, product in (
            ("queries first", lambda queries, documents: queries @ documents.T),
            ("documents first", lambda queries, documents: documents @ queries.T),
            ("convolution", _convolution),
        )
    ]


def _each(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], blocks: list[Any]) -> None:
    for queries, documents in blocks:
        product(queries, documents)


def _convolution(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """The product as `ops.blocked` computes it: documents are the pixels of an image, and the kernel has one."""
    image = documents[None, None].permute(0, 3, 1, 2)
    return torch.nn.functional.conv2d(image, queries[:, :, None, None], dilation=(2, 1))


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="cpu",
        title="MaxSim on the CPU",
        rows=ROWS,
        systems=(
            System(OURS, "pylate_flash", ours),
            System("pylate", "PyLate", pylate, peer=PYLATE, about="its scorer in torch"),
            System("maxsim_cpu", "maxsim-cpu", maxsim_cpu, peer=MAXSIM_CPU),
            System("products", "products alone", products, about="of all tokens, the fastest of three", yardstick=True),
        ),
        compiled=(),
        make_inputs=make_inputs,
        reference=reference,
        accuracy=forward.accuracy,
        device="cpu",
    )
