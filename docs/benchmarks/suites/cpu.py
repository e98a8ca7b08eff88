"""The suite `cpu`: scores of float32 batches on the CPU, reranking, and distillation steps with a few candidates per
query; with as many threads as torch uses.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pylate_flash.bench import exact, forward, steps, training, varlen
from pylate_flash.bench.calls import Padded
from pylate_flash.bench.peers import MAXSIM_CPU, PYLATE
from pylate_flash.bench.rerank import Rerank, need_pylate
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import OUR_SYSTEM, WRONG, Candidate, Suite, System, Unavailable

ROWS = (
    Row("rerank-300", 1, 1000, 32, 300),
    Row("rerank-180", 1, 1000, 32, 180),
    Row("in-batch", 32, 256, 32, 180),
    varlen.Arrays("rerank", 100, 100, 32, 180, shortest=40),
    Row("distill-2", 256, 2, 32, 32, own=True, step=True),
    Row("distill-4", 64, 4, 32, 32, own=True, step=True),
)
# The least share of the full length that a candidate has.
SHORTEST = 0.25


class Distillation(steps.Step):
    """A distillation step from a model's embeddings with PyLate's masking: a masked similarity is 0."""

    def through(self, label: str, loss: Any) -> list[Candidate]:
        """The step by a PyLate user's loss, whose documents are [Nq * K, Ld, d].

        Scores are not rescaled to [0, 1]: for two candidates that is constant, and its gradient only rounding.
        """
        assert self.documents_mask is not None
        masks = torch.ones(self.queries.shape[:2], dtype=torch.bool), self.documents_mask.flatten(0, 1)
        loss_of = steps.loss_of_embedded(loss, masks, self.teacher)
        return [self.step(label, lambda queries, documents: loss_of(queries, documents.flatten(0, 1)))]

    def reference(self) -> exact.Step:
        def score(queries: torch.Tensor, documents: torch.Tensor, documents_mask: torch.Tensor) -> torch.Tensor:
            rows, tokens = F.normalize(queries, dim=-1), F.normalize(documents, dim=-1)
            similarities = torch.einsum("qsd,qktd->qkst", rows, tokens)
            return similarities.masked_fill(~documents_mask.unsqueeze(2), 0.0).max(dim=-1).values.sum(dim=-1)

        return exact.step(self.queries, self.documents, **self.masks, loss=self.loss, score=score)

    def ours(self) -> list[Candidate]:
        need_pylate()
        from pylate_flash import losses

        model: Any = steps.Embedded()
        loss = losses.Distillation(model, normalize_scores=False, scorer="pylate_flash", masking="zero")
        return self.through("Distillation", loss)

    def torch(self) -> list[Candidate]:
        from pylate.losses.distillation import Distillation as PyLateDistillation
        from pylate.scores import colbert_kd_scores

        model: Any = steps.Embedded()
        score = partial(colbert_kd_scores, backend="torch")
        return self.through("pylate.losses.Distillation", PyLateDistillation(model, score, normalize_scores=False))


def make_inputs(row: Row, device: torch.device, dtype: torch.dtype) -> Padded | Rerank:
    """Draw inputs as the suites `forward` and `varlen` do; for a step, candidates of several lengths."""
    if not row.step:
        inputs = (varlen if isinstance(row, varlen.Arrays) else forward).make_inputs(row, device, dtype)
        assert isinstance(inputs, Padded | Rerank)
        return inputs
    batch = training.make_inputs(row, device, dtype)
    generator = torch.Generator(device).manual_seed(1)
    shortest = max(1, int(SHORTEST * row.Ld))
    lengths = torch.randint(shortest, row.Ld + 1, (row.Nq, row.Nd, 1), generator=generator, device=device)
    mask = torch.arange(row.Ld, device=device) < lengths
    return Distillation(batch.queries, batch.documents, None, mask, teacher=batch.teacher)


def pylate(inputs: Padded | Rerank) -> list[Candidate]:
    """PyLate's own torch scorer, and its `rank.rerank` and distillation loss with it."""
    if isinstance(inputs, Rerank | Distillation):
        return inputs.torch()
    from pylate.scores import colbert_scores

    return [Candidate("colbert_scores", partial(colbert_scores, inputs.queries, inputs.documents, backend="torch"))]


def maxsim_cpu(inputs: Padded | Rerank) -> list[Candidate]:
    """maxsim-cpu, one query at a time, as it offers nothing else."""
    if isinstance(inputs, Rerank | Distillation):
        return []
    if inputs.queries.dtype != torch.float32:
        raise Unavailable(f"takes float32 only, not {inputs.queries.dtype}")
    # Read when it first computes; the default is every core, while torch may use fewer.
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


# Similarities that the yardstick computes at a time: few enough to stay in cache.
BLOCK = 1 << 20


def products(inputs: Padded | Rerank) -> list[Candidate]:
    """The similarities alone, in blocks that are discarded: by MKL, in either operand order, and by oneDNN.

    For reranking, the documents of each query are packed beforehand. Steps have no such yardstick.
    """
    if isinstance(inputs, Distillation):
        return []
    if isinstance(inputs, Rerank):
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
    """The product as `ops.products` computes it: a convolution of 1 x 1 kernels with documents as pixels."""
    image = documents[None, None].permute(0, 3, 1, 2)
    return torch.nn.functional.conv2d(image, queries[:, :, None, None], dilation=(2, 1))


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="cpu",
        title="MaxSim on the CPU",
        rows=ROWS,
        systems=(
            OUR_SYSTEM,
            System("pylate", "PyLate", pylate, peer=PYLATE, about="its scorer and its losses in torch"),
            System("maxsim_cpu", "maxsim-cpu", maxsim_cpu, peer=MAXSIM_CPU),
            System("products", "products alone", products, about="of all tokens, the fastest of three", yardstick=True),
        ),
        make_inputs=make_inputs,
        error=partial(exact.error, wrong=WRONG),
        device="cpu",
    )
