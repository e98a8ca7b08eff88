"""The suite `soft`: scores by a smooth maximum, and training steps with them.

The peer computes the smooth maximum as colpali-engine does: an einsum of all similarities, and torch's logsumexp of
them.

The floor of scores is the longer of products and exponentials, at the measured rates. A step has four products of every
query token with every document token, one of them in the forward, and computes exponentials twice; its floor is the sum
of both, although a GPU can overlap them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller

import torch
import triton
import triton.language as tl

from pylate_flash.bench import exact, training
from pylate_flash.bench.exact import Score
from pylate_flash.bench.protocol import Rounds, Work, make_stopwatch, measure
from pylate_flash.bench.rows import Row
from pylate_flash.bench.steps import Step
from pylate_flash.bench.suite import OUR_SYSTEM, Candidate, Suite, System

# Sharpness of the maximum: 1 / 0.1, as in colpali-engine.
BETA = 10.0
# The same of sums of exponentials of rounded similarities: 1 % of a gradient of bfloat16.
ROUNDED = 0.1


class SoftBatch(Row):
    """``Nq`` queries against ``Nd`` documents: their scores, or a training step (``step``)."""

    @property
    def shape(self) -> str:
        """The shape for display."""
        return f"{super().shape}, {'step' if self.step else 'scores'}"

    def work(self, dtype: torch.dtype) -> Work:
        """Products and exponentials of all token pairs; embeddings read once, and in a step gradients written once."""
        forward = super().work(dtype)
        pairs = float(self.Nq * self.Nd * self.Lq * self.Ld)
        return Work(
            flops=forward.flops * (4 if self.step else 1),
            bytes=forward.bytes,
            exponentials=pairs * (2 if self.step else 1),
            exponentials_follow=self.step,
        )


SHAPES = (
    SoftBatch("batch-128", 128, 128, 32, 300),
    SoftBatch("batch-512", 512, 512, 32, 180),
    SoftBatch("colpali-16", 16, 16, 1024, 1024),
    SoftBatch("colpali-64", 64, 64, 1024, 1024),
)
ROWS = (*SHAPES, *(replace(shape, name=f"{shape.name}-step", step=True) for shape in SHAPES))


def einsum_scores(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Plain scores: all similarities, in the dtype of the inputs."""
    similarities = torch.einsum("qsd,ntd->qnst", queries, documents)
    return (torch.logsumexp(BETA * similarities, dim=-1) / BETA).sum(dim=-1)


def widened_scores(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Plain scores, with logsumexp and sums in float32, as torch computes them under autocast."""
    similarities = torch.einsum("qsd,ntd->qnst", queries, documents)
    return (torch.logsumexp((BETA * similarities).float(), dim=-1) / BETA).sum(dim=-1)


@dataclass(frozen=True)
class Soft(Step):
    """Scores by a smooth maximum, or a training step with them (``is_step``)."""

    is_step: bool = False

    def candidate(self, label: str, score: Score) -> Candidate:
        if self.is_step:
            return super().candidate(label, score)
        return Candidate(label, partial(score, self.queries, self.documents))

    def reference(self) -> exact.Result:
        """Scores, or a step, in float64."""
        if not self.is_step:
            return exact.scores(self.queries, self.documents, score=einsum_scores)
        return exact.step(self.queries, self.documents, loss=self.loss, score=einsum_scores)

    def accuracy(self, dtype: torch.dtype) -> float:
        """The relative error that pylate_flash promises, for scores or for the gradients of a step."""
        return exact.accuracy(dtype, gradients=self.is_step)

    def ours(self) -> list[Candidate]:
        """The public `soft_maxsim`, as a user calls it."""
        from pylate_flash import soft_maxsim

        return [self.candidate("soft_maxsim", partial(soft_maxsim, beta=BETA))]

    def torch(self) -> list[Candidate]:
        """The plain einsum and, unless inputs are float32, the one with float32 sums."""
        candidates = [self.candidate("einsum", einsum_scores)]
        if self.queries.dtype != torch.float32:
            candidates.append(self.candidate("einsum, float32 sums", widened_scores))
        return candidates


def make_inputs(row: SoftBatch, device: torch.device, dtype: torch.dtype) -> Soft:
    """Draw the inputs of the suite `training`."""
    batch = training.make_inputs(row, device, dtype)
    return Soft(batch.queries, batch.documents, temperature=batch.temperature, is_step=row.step)


# Values per program of eight warps, and repetitions of the exponentials of all.
TILE = 4096
REPEATS = 1024


@triton.jit
def _exponentials(sums, repeats, TILE: tl.constexpr):
    """Each program repeatedly computes powers of 2 of its own values, all in registers."""
    values = tl.arange(0, TILE).to(tl.float32) / TILE
    for _ in range(repeats):
        # Converges to the fixed point, so never to 0, infinity or a subnormal number.
        values = tl.exp2(-values)
    tl.store(sums + tl.program_id(0), tl.sum(values))


def measure_exponentials(device: torch.device) -> float:
    """Return the float32 powers of 2 per second that the whole GPU computes."""
    programs = 8 * torch.cuda.get_device_properties(device).multi_processor_count
    sums = torch.empty(programs, device=device)

    def compute() -> None:
        _exponentials[(programs,)](sums, REPEATS, TILE=TILE, num_warps=8)

    timings = measure({"exponentials": compute}, make_stopwatch(device, flush_bytes=0), Rounds(5, 20))
    return TILE * REPEATS * programs / (timings["exponentials"].median_ms / 1e3)


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="soft",
        title="Soft MaxSim, scores and training steps",
        rows=ROWS,
        systems=(
            replace(OUR_SYSTEM, about="`soft_maxsim`, and torch's loss of its scores"),
            System(
                "torch",
                "einsum",
                methodcaller("torch"),
                about="an einsum and torch's logsumexp, as colpali-engine's losses have it, with sums in the type of "
                "the inputs, or in float32 as under autocast: the faster that is right within 10 % (a sum of 1024 "
                "bfloat16 logarithms rounds scores by whole units, and the loss of them is another one)",
                tolerance=ROUNDED,
            ),
        ),
        make_inputs=make_inputs,
        ceilings={"exponentials_per_second": measure_exponentials},
    )
