"""The suite `soft`: scores by a smooth maximum, and training steps with them.

The peer is the plain way, in which colpali-engine computes its smooth maximum: an einsum of all similarities, and
torch's logsumexp of them.

The floor of scores is the longer of their products and their exponentials, at the rates that this machine reached. A
step has four products of every query token with every document token, one of them in the forward, and computes its
exponentials twice; its floor is the sum of both, though a machine can do both at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pylate_flash.bench import training
from pylate_flash.bench.protocol import Rounds, Work, make_stopwatch, measure, relative_error
from pylate_flash.bench.suite import OURS, Candidate, Suite, System
from pylate_flash.bench.training import Batch, Inputs, Step

# How sharp the maximum is: one over 0.1, as colpali-engine has it.
BETA = 10.0
# Bytes that hold the partial sums of every row.
PARTIAL_SUMS = 8 << 30
# Relative error of a score that the package promises for half inputs and exact products.
SCORE_ACCURACY = 2e-6
# The same of sums of exponentials of rounded similarities: 1 % of a gradient of bfloat16.
ROUNDED = 0.1


@dataclass(frozen=True)
class SoftBatch(Batch):
    """``Nq`` queries against ``Nd`` documents: their scores, or a training step (``step``)."""

    step: bool = False

    @property
    def shape(self) -> str:
        """The shape, for people."""
        return f"{super().shape}, {'step' if self.step else 'scores'}"

    def work(self, dtype: torch.dtype) -> Work:
        """Products and exponentials of all pairs of tokens; embeddings read, and gradients of them written, once."""
        pairs = float(self.Nq * self.Nd * self.Lq * self.Ld)
        embeddings = dtype.itemsize * self.d * (self.Nq * self.Lq + self.Nd * self.Ld)
        return Work(
            flops=2.0 * pairs * self.d * (4 if self.step else 1),
            bytes=float(embeddings * (2 if self.step else 1) + 4 * self.Nq * self.Nd),
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


class SoftInputs(NamedTuple):
    """The tensors of a training step, and whether it is one."""

    tensors: Inputs
    step: bool


def make_inputs(row: SoftBatch, device: torch.device, dtype: torch.dtype) -> SoftInputs:
    """Draw random unit vectors, the same ones for the same row on the same kind of device."""
    return SoftInputs(training.make_inputs(row, device, dtype), row.step)


def reference(inputs: SoftInputs) -> torch.Tensor | Step:
    """Return scores, or a step, in float64, of the (already rounded) inputs, so many documents at a time."""
    queries, documents = (tensor.detach().double() for tensor in (inputs.tensors.queries, inputs.tensors.documents))
    pairs = queries.shape[:2].numel() * documents.shape[1]
    parts = documents.split(max(1, training.REFERENCE_BYTES // (8 * pairs)))
    with torch.no_grad():
        scores = torch.cat([einsum_scores(queries, part) for part in parts], dim=1)
    if not inputs.step:
        return scores
    with torch.enable_grad():
        loss = inputs.tensors.loss(scores.requires_grad_())
    (weights,) = torch.autograd.grad(loss, scores)
    grad_queries, gradients, first = torch.zeros_like(queries), [], 0
    for part in parts:
        leaves = queries.requires_grad_(), part.detach().requires_grad_()
        with torch.enable_grad():
            of_part = einsum_scores(*leaves)
        weight = weights[:, first : first + len(part)]
        of_queries, of_documents = torch.autograd.grad(of_part, leaves, weight)
        grad_queries += of_queries
        gradients.append(of_documents)
        first += len(part)
    return Step(loss.detach(), scores.detach(), grad_queries, torch.cat(gradients))


def error(found: torch.Tensor | Step, expected: torch.Tensor | Step) -> float:
    """Return the relative error of scores, or the largest of a step's."""
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        return relative_error(found, expected)
    assert isinstance(found, Step)
    assert isinstance(expected, Step)
    return training.error(found, expected)


def accuracy(inputs: SoftInputs, dtype: torch.dtype) -> float:
    """Return the relative error that pylate_flash stays within, of scores or of a step's gradients."""
    if inputs.step or (dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"):
        return training.accuracy(dtype)
    return SCORE_ACCURACY


def einsum_scores(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """The plain way: all similarities, in the type of the inputs."""
    similarities = torch.einsum("qsd,ntd->qnst", queries, documents)
    return (torch.logsumexp(BETA * similarities, dim=-1) / BETA).sum(dim=-1)


def widened_scores(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """The same, with logarithms and scores in float32, as torch takes them under autocast."""
    similarities = torch.einsum("qsd,ntd->qnst", queries, documents)
    return (torch.logsumexp((BETA * similarities).float(), dim=-1) / BETA).sum(dim=-1)


def candidate(inputs: SoftInputs, label: str, score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Candidate:
    """The call of a system that scores so."""
    tensors = inputs.tensors
    if inputs.step:
        return Candidate(label, partial(training.step, tensors, score))
    return Candidate(label, partial(score, tensors.queries, tensors.documents))


def ours(inputs: SoftInputs) -> list[Candidate]:
    """The public `soft_maxsim`, as a user calls it."""
    from pylate_flash import soft_maxsim

    return [candidate(inputs, "soft_maxsim", partial(soft_maxsim, beta=BETA))]


def einsum(inputs: SoftInputs) -> list[Candidate]:
    """The plain way, and if that rounds similarities, the one that widens them before it sums."""
    candidates = [candidate(inputs, "einsum", einsum_scores)]
    if inputs.tensors.queries.dtype != torch.float32:
        candidates.append(candidate(inputs, "einsum, float32 sums", widened_scores))
    return candidates


def once(inputs: SoftInputs) -> list[Candidate]:
    """The same with memory for partial sums, in steps."""
    from pylate_flash import soft_maxsim

    if not inputs.step:
        return []
    return [candidate(inputs, "soft_maxsim", partial(soft_maxsim, beta=BETA, max_scratch_bytes=PARTIAL_SUMS))]


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
            System(OURS, "pylate_flash", ours, about="`soft_maxsim`, and torch's loss of its scores"),
            System(
                f"{OURS}_once",
                "once",
                once,
                about="the same with 8 GiB for partial sums (`max_scratch_bytes`), so that probabilities are computed "
                "once for both gradients",
            ),
            System(
                "torch",
                "einsum",
                einsum,
                about="an einsum and torch's logsumexp, as colpali-engine's losses have it, with sums in the type of "
                "the inputs, or in float32 as under autocast: the faster that is right within 10 % (a sum of 1024 "
                "bfloat16 logarithms rounds scores by whole units, and the loss of them is another one)",
                tolerance=ROUNDED,
            ),
        ),
        compiled=(),
        make_inputs=make_inputs,
        reference=reference,
        accuracy=lambda dtype: SCORE_ACCURACY,
        accuracy_of=accuracy,
        error=error,
        ceilings={"exponentials_per_second": measure_exponentials},
    )
