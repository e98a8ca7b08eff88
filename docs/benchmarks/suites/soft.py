"""The suite `soft`: scores by a smooth maximum, and training steps with them.

The peer is the plain way, in which colpali-engine computes its smooth maximum: an einsum of all similarities, and
torch's logsumexp of them.

The floor of scores is the longer of their products and their exponentials, at the rates that this machine reached. A
step has four products of every query token with every document token, one of them in the forward, and computes its
exponentials twice; its floor is the sum of both, though a machine can do both at a time.
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

# How sharp the maximum is: one over 0.1, as colpali-engine has it.
BETA = 10.0
# The same of sums of exponentials of rounded similarities: 1 % of a gradient of bfloat16.
ROUNDED = 0.1


class SoftBatch(Row):
    """``Nq`` queries against ``Nd`` documents: their scores, or a training step (``step``)."""

    @property
    def shape(self) -> str:
        """The shape, for people."""
        return f"{super().shape}, {'step' if self.step else 'scores'}"

    def work(self, dtype: torch.dtype) -> Work:
        """Products and exponentials of all pairs of tokens; embeddings read, and gradients of them written, once."""
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
    """The plain way: all similarities, in the type of the inputs."""
    similarities = torch.einsum("qsd,ntd->qnst", queries, documents)
    return (torch.logsumexp(BETA * similarities, dim=-1) / BETA).sum(dim=-1)


def widened_scores(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """The same, with logarithms and scores in float32, as torch takes them under autocast."""
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
        """What pylate_flash promises of scores, or of a step's gradients."""
        return exact.accuracy(dtype, gradients=self.is_step)

    def ours(self) -> list[Candidate]:
        """The public `soft_maxsim`, as a user calls it."""
        from pylate_flash import soft_maxsim

        return [self.candidate("soft_maxsim", partial(soft_maxsim, beta=BETA))]

    def torch(self) -> list[Candidate]:
        """The plain way, and if that rounds similarities, the one that widens them before it sums."""
        candidates = [self.candidate("einsum", einsum_scores)]
        if self.queries.dtype != torch.float32:
            candidates.append(self.candidate("einsum, float32 sums", widened_scores))
        return candidates


def make_inputs(row: SoftBatch, device: torch.device, dtype: torch.dtype) -> Soft:
    """As of the suite `training`."""
    given = training.make_inputs(row, device, dtype)
    return Soft(given.queries, given.documents, temperature=given.temperature, is_step=row.step)


# Values of a program of eight warps, and how often it takes the exponentials of all.
TILE = 4096
REPEATS = 1024


@triton.jit
def _exponentials(sums, repeats, TILE: tl.constexpr):
    """Each program takes powers of 2 of its own values, again and again, all in registers."""
    values = tl.arange(0, TILE).to(tl.float32) / TILE
    for _ in range(repeats):
        # Which goes to the one value that is its own: never to 0, infinity or a subnormal number.
        values = tl.exp2(-values)
    tl.store(sums + tl.program_id(0), tl.sum(values))


def measure_exponentials(device: torch.device) -> float:
    """Return the powers of 2 per second, float32, that all of a GPU computes."""
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
