"""The suite `training`: the scores' part of a training step, forward, loss and backward for queries and documents.

The in-batch rows take the cross entropy of every query against all documents, labelled with its own; the rows with
candidates take the divergence from a teacher's scores (knowledge distillation). Only the part without an encoder is
timed: embeddings in, scores and both gradients out.

In the rows named "skewed", one document token in twenty gets half of all argmaxes, as in a model's embeddings, where
marker tokens and stopwords win repeatedly: writes of many tokens to the same gradient row must not serialise.

The floor is the forward's operations at the ceiling, plus the rows that the backward must gather, one from the
documents and one from the queries per argmax, at the bandwidth of the L2 cache, which holds either side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller

import torch
import torch.nn.functional as F

from pylate_flash.bench import exact
from pylate_flash.bench.calls import unit_vectors
from pylate_flash.bench.peers import LIK
from pylate_flash.bench.rows import L2, Row
from pylate_flash.bench.steps import FusedStep
from pylate_flash.bench.suite import FLASH_MAXSIM_SYSTEM, LIK_SYSTEM, OUR_SYSTEM, TORCH_SYSTEM, Suite, System

TEMPERATURE = 0.02

SKEWED = "skewed"
Batch = partial(Row, step=True)
UNIFORM = (
    Batch("train-128", 128, 128, 32, 300),
    Batch("train-512", 512, 512, 32, 180),
    Batch("train-1024", 1024, 1024, 32, 180),
    Batch("colpali-64", 64, 64, 1024, 1024),
    Batch("colpali-128", 128, 128, 1024, 1024),
)
ROWS = (
    *(row for batch in UNIFORM for row in (batch, replace(batch, name=f"{batch.name}-skewed", kind=SKEWED))),
    Batch("kd-64x16", 64, 16, 32, 300, own=True),
    Batch("kd-32x32", 32, 32, 32, 512, own=True),
    # A small step, and one with five hard negatives per query besides its own document.
    Batch("train-32", 32, 32, 32, 180),
    Batch("negatives-64x5", 64, 6 * 64, 32, 150),
    # Embedding sizes of some models of page images.
    Batch("train-64-d320", 64, 64, 32, 180, d=320),
    Batch("pages-16-d2048", 16, 16, 32, 1000, d=2048),
)

# The share of hot tokens among a skewed row's document tokens, and their share of its argmaxes.
HOT_TOKENS = 0.05
HOT_WINS = 0.5
# The tolerance of the latter share (a small batch has few argmaxes), and the size of the sample that sets it.
HOT_TOLERANCE = 0.1
SAMPLED_ROWS = 256
SAMPLED_DOCUMENTS = 64


@dataclass(frozen=True)
class TrainingStep(FusedStep):
    """A step in which the first ``hot`` tokens of every document get half of all argmaxes, unless ``hot`` is 0."""

    hot: int = 0

    def reference(self) -> exact.Result:
        """Scores and gradients in float64.

        Raises
        ------
        RuntimeError
            If the hot tokens of a skewed row do not get their share of the argmaxes.
        """
        if self.hot and abs((share := self.share_of_wins()) - HOT_WINS) > HOT_TOLERANCE:
            raise RuntimeError(f"{share:.0%} of the wins are on the hot tokens, expected {HOT_WINS:.0%}")
        return super().reference()

    def share_of_wins(self) -> float:
        """The share of all argmaxes that are hot tokens."""

        def wins(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
            first, rest = documents[..., : self.hot, :], documents[..., self.hot :, :]
            equation = "qsd,ntd->qnst" if documents.dim() == 3 else "qsd,qntd->qnst"
            best, best_of_rest = (torch.einsum(equation, queries, part).amax(dim=-1) for part in (first, rest))
            return (best >= best_of_rest).double().mean(dim=-1)

        return exact.scores(self.queries, self.documents, score=wins).mean().item()


def make_inputs(row: Row, device: torch.device, dtype: torch.dtype) -> TrainingStep:
    """Draw random unit vectors, reproducible per row and device type."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (row.Nq, row.Nd) if row.own else (row.Nd,)
    draw = partial(unit_vectors, generator=generator, dtype=torch.float32)
    queries, documents = draw(row.Nq, row.Lq, row.d), draw(*shape, row.Ld, row.d)
    hot = max(1, round(HOT_TOKENS * row.Ld)) if row.kind == SKEWED else 0
    if hot:
        queries, documents = with_hot_tokens(queries, documents, hot)
    teacher = None
    if row.own:
        teacher = torch.randn(row.Nq, row.Nd, device=device, generator=generator).log_softmax(dim=-1)
    queries, documents = (embeddings.to(dtype).requires_grad_() for embeddings in (queries, documents))
    return TrainingStep(queries, documents, teacher=teacher, temperature=TEMPERATURE, hot=hot)


def with_hot_tokens(queries: torch.Tensor, documents: torch.Tensor, hot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate every query token, and the first ``hot`` tokens of every document, towards a common direction.

    The queries get a fixed cosine to it. That of the document tokens is found by bisection, so that they get half of
    the argmaxes in a sample. All stay unit vectors.
    """
    axis = F.normalize(torch.ones(queries.shape[-1], device=queries.device), dim=0)

    def turned(embeddings: torch.Tensor, cosine: float) -> torch.Tensor:
        across = F.normalize(embeddings - (embeddings @ axis).unsqueeze(-1) * axis, dim=-1)
        return cosine * axis + math.sqrt(1.0 - cosine**2) * across

    queries = turned(queries, 0.4)
    cold_tokens = turned(documents[..., hot:, :], 0.0)
    sampled_rows = queries.flatten(0, 1)[:SAMPLED_ROWS]
    sampled = slice(0, SAMPLED_DOCUMENTS)
    # For the sample it does not matter which query the candidates belong to.
    first, rest = documents[..., :hot, :].flatten(0, -3)[sampled], cold_tokens.flatten(0, -3)[sampled]
    best_of_rest = (rest @ sampled_rows.T).amax(dim=1)
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        wins = (turned(first, middle) @ sampled_rows.T).amax(dim=1) > best_of_rest
        low, high = (low, middle) if wins.float().mean() > HOT_WINS else (middle, high)
    return queries, torch.cat([turned(documents[..., :hot, :], high), cold_tokens], dim=-2)


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="training",
        title="MaxSim training step",
        rows=ROWS,
        systems=(
            replace(
                OUR_SYSTEM,
                about="`maxsim_cross_entropy` or `maxsim_kl_divergence`, scores and loss in one, where the others' "
                "scores go into torch's loss",
            ),
            replace(
                LIK_SYSTEM,
                candidates=methodcaller("lik", "auto", "unified"),
                about="late-interaction-kernels, the faster of its backwards `auto` and `unified`",
            ),
            System("lik_lowmem", "LIK lowmem", methodcaller("lik", "lowmem"), peer=LIK, about="its third"),
            FLASH_MAXSIM_SYSTEM,
            replace(
                TORCH_SYSTEM,
                about="an einsum over chunks of documents, which rounds similarities to the type of the inputs, so "
                "that other tokens win (about 10 to 20 % of a bfloat16 gradient)",
                tolerance=exact.ROUNDED,
            ),
        ),
        make_inputs=make_inputs,
        ceilings=L2,
    )
