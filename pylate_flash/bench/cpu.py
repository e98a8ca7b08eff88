"""The suite `cpu`: scores of float32 batches on the processor, reranking, and steps of distillation, in which a query
has a few candidates; with as many threads as torch uses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pylate_flash.bench import calls, forward, steps, training, varlen
from pylate_flash.bench.peers import MAXSIM_CPU, PYLATE
from pylate_flash.bench.suite import OURS, Candidate, Suite, System, Unavailable

ROWS = (
    forward.Shape("rerank-300", 1, 1000, 32, 300),
    forward.Shape("rerank-180", 1, 1000, 32, 180),
    forward.Shape("in-batch", 32, 256, 32, 180),
    varlen.Rerank("rerank", 100, 100, 32, 40, 180),
    training.Batch("distill-2", 256, 2, 32, 32, candidates=True),
    training.Batch("distill-4", 64, 4, 32, 32, candidates=True),
)
# Share of a candidate's tokens that it has at least.
SHORTEST = 0.25


@dataclass(frozen=True)
class Distillation:
    """A model's embeddings for a step of distillation, which require gradients, and what comes with them.

    ``queries`` [Nq, Lq, d], ``documents`` [Nq * K, Ld, d], ``mask`` [Nq * K, Ld] bool, ``teacher`` [Nq, K].
    """

    queries: torch.Tensor
    documents: torch.Tensor
    mask: torch.Tensor
    teacher: torch.Tensor

    def step(self, loss: Callable[..., torch.Tensor]) -> Callable[[], calls.Result]:
        """From the embeddings to a PyLate user's loss, and back to their gradients.

        Scores are not rescaled to [0, 1]: of two that is a constant, whose gradient is rounding.
        """
        masks = torch.ones(self.queries.shape[:2], dtype=torch.bool), self.mask
        texts = [{"input_ids": torch.full_like(mask, 100, dtype=torch.int64), "attention_mask": mask} for mask in masks]

        def loss_of(*embeddings: torch.Tensor) -> torch.Tensor:
            columns = [{**text, "token_embeddings": some} for text, some in zip(texts, embeddings, strict=True)]
            return loss(columns, self.teacher)

        return partial(steps.differentiated, loss_of, self.queries, self.documents)

    def reference(self) -> calls.Result:
        """The loss, and both gradients, by float64."""
        queries, documents = (leaf.detach().double().requires_grad_() for leaf in (self.queries, self.documents))

        def loss_of(*leaves: torch.Tensor) -> torch.Tensor:
            rows, tokens = (F.normalize(leaf, dim=-1) for leaf in leaves)
            similarities = torch.einsum("qsd,qktd->qkst", rows, tokens.unflatten(0, self.teacher.shape))
            masked = ~self.mask.view(*self.teacher.shape, 1, -1)
            scores = similarities.masked_fill(masked, 0.0).max(dim=-1).values.sum(dim=-1)
            teacher = self.teacher.double().log_softmax(dim=1)
            return F.kl_div(scores.log_softmax(dim=1), teacher, reduction="batchmean", log_target=True)

        return steps.differentiated(loss_of, queries, documents)


Inputs = forward.Inputs | varlen.Request | Distillation


def make_inputs(row: forward.Shape | varlen.Ragged | training.Batch, device: torch.device, dtype: torch.dtype) -> Any:
    """As the row's own suite; of a step, candidates of several lengths."""
    if isinstance(row, forward.Shape):
        return forward.make_inputs(row, device, dtype)
    if not isinstance(row, training.Batch):
        return varlen.make_inputs(row, device, dtype)
    given = training.make_inputs(row, device, dtype)
    assert given.teacher is not None
    generator = torch.Generator(device).manual_seed(1)
    shortest = max(1, int(SHORTEST * row.Ld))
    lengths = torch.randint(shortest, row.Ld + 1, (row.documents, 1), generator=generator, device=device)
    mask = torch.arange(row.Ld, device=device) < lengths
    documents = given.documents.detach().flatten(0, 1).requires_grad_()
    return Distillation(given.queries, documents, mask, given.teacher)


def reference(inputs: Inputs) -> calls.Result:
    """As the inputs' own suite."""
    if isinstance(inputs, Distillation):
        return inputs.reference()
    return forward.reference(inputs) if isinstance(inputs, forward.Inputs) else varlen.reference(inputs)


def accuracy_of(inputs: Inputs, dtype: torch.dtype) -> float:
    """As the inputs' own suite."""
    return (training if isinstance(inputs, Distillation) else forward).accuracy(dtype)


def ours(inputs: Inputs) -> Sequence[Candidate]:
    """`maxsim` of padded batches, `rank.rerank` of requests, `losses.Distillation` of steps."""
    if isinstance(inputs, Distillation):
        varlen._need_pylate()
        from pylate_flash import losses

        model: Any = steps.Embedded()
        loss = losses.Distillation(model, normalize_scores=False, scorer="pylate_flash", masking="zero")
        return [Candidate("Distillation", inputs.step(loss))]
    return forward.ours(inputs) if isinstance(inputs, forward.Inputs) else varlen.ours(inputs)


def pylate(inputs: Inputs) -> list[Candidate]:
    """PyLate's own scorer in torch, and its `rank.rerank` and its distillation with it."""
    if isinstance(inputs, varlen.Request):
        return varlen.torch_eager(inputs)
    if isinstance(inputs, Distillation):
        from pylate.losses.distillation import Distillation as PyLateDistillation
        from pylate.scores import colbert_kd_scores

        model: Any = steps.Embedded()
        score = partial(colbert_kd_scores, backend="torch")
        loss = PyLateDistillation(model, score, normalize_scores=False)
        return [Candidate("pylate.losses.Distillation", inputs.step(loss))]
    from pylate.scores import colbert_scores

    return [Candidate("colbert_scores", partial(colbert_scores, inputs.queries, inputs.documents, backend="torch"))]


def maxsim_cpu(inputs: Inputs) -> list[Candidate]:
    """maxsim-cpu: a query at a time, which is all that it offers."""
    if not isinstance(inputs, forward.Inputs):
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

    Of a request, the documents of each query are packed already. A step is more than products.
    """
    if isinstance(inputs, Distillation):
        return []
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
    """The product as `ops.products` computes it: documents are the pixels of an image, and the kernel has one."""
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
            System("pylate", "PyLate", pylate, peer=PYLATE, about="its scorer and its losses in torch"),
            System("maxsim_cpu", "maxsim-cpu", maxsim_cpu, peer=MAXSIM_CPU),
            System("products", "products alone", products, about="of all tokens, the fastest of three", yardstick=True),
        ),
        compiled=(),
        make_inputs=make_inputs,
        reference=reference,
        accuracy=forward.accuracy,
        accuracy_of=accuracy_of,
        error=calls.error,
        device="cpu",
    )
