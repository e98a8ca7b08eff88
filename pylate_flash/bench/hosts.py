"""The suite `hosts`: what a user of sentence-transformers 6 calls, by its own code, and as it is while registered.

Scores by `util.maxsim`, of a padded batch, with masks, and of lists as its encoders return them; and the cached loss of
a batch of embeddings, scores and gradients, without the encoder. Nothing is registered here: systems take turns within
a run, and the host's own code calls what would be routed. What is measured of this package is the function that the
host's becomes.

Every call is timed twice: with the host's part in view, and as the GPU's alone. Its own code bounds the elements that
it multiplies at once; beside the bound that it has by itself, the best of several is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from pylate_flash.bench import forward, losses, training
from pylate_flash.bench.launch import GRADIENT_TOLERANCE
from pylate_flash.bench.losses import Sample
from pylate_flash.bench.peers import SENTENCE_TRANSFORMERS
from pylate_flash.bench.protocol import L2, Rounds, Work, relative_error
from pylate_flash.bench.suite import OURS, Candidate, Suite, System, Unavailable

_MAXSIM = "sentence_transformers.util.similarity:maxsim"
_LOSS = "CachedMultiVectorMultipleNegativesRankingLoss"
_CALCULATE = (
    "sentence_transformers.multi_vector_encoder.losses.cached_multiple_negatives_ranking:" + _LOSS + ".calculate_loss"
)

# Its bounds that are tried: of elements (its own is 1e8), and of queries whose scores the loss computes at once (32).
CHUNK_ELEMENTS = (10**8, 4 * 10**8, 16 * 10**8)
SCORED_AT_ONCE = (32, 128, 512)

# Texts that a mini-batch of the cached loss holds.
MINI_BATCH = 32


@dataclass(frozen=True)
class Row:
    """``Nq`` queries of ``Lq`` tokens against ``Nd`` documents of ``Ld``, or of ``shortest`` to ``Ld``.

    ``form``: how they are given, "padded", "masked" or "lists", or "loss" for the cached loss of a padded batch.
    """

    name: str
    form: str
    Nq: int = 32
    Nd: int = 1024
    Lq: int = 32
    Ld: int = 180
    shortest: int | None = None
    d: int = 128

    @property
    def shape(self) -> str:
        """The shape, for people."""
        longest = f"{self.Ld}" if self.shortest is None else f"{self.shortest}..{self.Ld}"
        return f"{self.Nq} x {self.Nd}, {self.Lq} x {longest}, {self.form}"

    def work(self, dtype: torch.dtype) -> Work:
        """Products of the tokens that there are, and embeddings; of a loss, gradients and the rows of winners too."""
        length = self.Ld if self.shortest is None else (self.shortest + self.Ld) / 2
        if self.form == "loss":
            return training.Batch(self.name, self.Nq, self.Nd, self.Lq, self.Ld, d=self.d).work(dtype)
        return Work(
            flops=2.0 * self.Nq * self.Nd * self.Lq * length * self.d,
            bytes=dtype.itemsize * self.d * (self.Nq * self.Lq + self.Nd * length) + 4.0 * self.Nq * self.Nd,
        )

    def within(self, flops: float) -> Row:
        """The same row with fewer queries and documents, costing no more than ``flops``."""
        if self.form == "loss":
            batch = training.Batch(self.name, self.Nq, self.Nd, self.Lq, self.Ld, d=self.d).within(flops)
            return replace(self, Nq=batch.Nq, Nd=batch.Nd)
        shape = forward.Shape(self.name, self.Nq, self.Nd, self.Lq, self.Ld, self.d).within(flops)
        return replace(self, Nq=shape.Nq, Nd=shape.Nd)


ROWS = (
    Row("maxsim-padded", "padded"),
    Row("maxsim-masked", "masked", shortest=60),
    Row("maxsim-lists", "lists", shortest=60),
    Row("maxsim-10k-lists", "lists", Nq=1, Nd=10000, shortest=60),
    Row("cached-loss-1024", "loss", Nq=1024),
)


@dataclass(frozen=True)
class Scores:
    """`util.maxsim` of queries and documents as the host is given them; `padded` and `active` are what they hold."""

    arguments: dict[str, Any]
    padded: forward.Inputs
    active: torch.Tensor

    def reference(self) -> torch.Tensor:
        """The scores in float64."""
        return forward.reference(self.padded, self.active)

    def ours(self) -> list[Candidate]:
        """What the host's function is while registered."""
        from pylate_flash.hosts import SENTENCE_TRANSFORMERS as HOST

        return [Candidate("maxsim, registered", partial(HOST.routed(_MAXSIM), **self.arguments))]

    def theirs(self, sweep: bool) -> list[Candidate]:
        """The host's own function, with its own bound or with several."""
        from pylate_flash.hosts import SENTENCE_TRANSFORMERS as HOST

        own = partial(HOST.original(_MAXSIM), **self.arguments)
        if not sweep:
            return [Candidate("maxsim", own)]
        return [
            Candidate(f"maxsim, chunk_elements={elements}", partial(own, chunk_elements=elements))
            for elements in CHUNK_ELEMENTS
        ]

    def operation(self) -> list[Candidate]:
        """The operation itself."""
        from pylate_flash import maxsim, maxsim_ragged

        queries, documents = self.arguments["a"], self.arguments["b"]
        if isinstance(documents, list):
            return [Candidate("maxsim_ragged", partial(maxsim_ragged, queries, documents))]
        queries_mask, documents_mask = self.arguments.get("a_mask"), self.arguments.get("b_mask")
        call = partial(maxsim, queries, documents, queries_mask=queries_mask, documents_mask=documents_mask)
        return [Candidate("maxsim", call)]


class Found(NamedTuple):
    """What a call of the loss leaves: its value, and the gradients of the embeddings of each mini-batch."""

    loss: torch.Tensor
    grad_queries: list[torch.Tensor]
    grad_documents: list[torch.Tensor]


@dataclass(frozen=True)
class Loss:
    """The cached loss's scores and gradients of a batch: `calculate_loss` of the embeddings of all mini-batches."""

    inputs: training.Inputs

    def reference(self) -> Sample:
        """The loss, and some of the gradients."""
        return losses.reference(self.inputs)

    def columns(self) -> list[list[torch.Tensor]]:
        """Mini-batches [MINI_BATCH, L, d] of queries, and of documents, each a leaf."""
        whole = self.inputs.queries, self.inputs.documents
        return [[part.detach().clone().requires_grad_() for part in column.split(MINI_BATCH)] for column in whole]

    def candidate(self, label: str, calculate: Callable[..., torch.Tensor], scored_at_once: int) -> Candidate:
        """What is timed: the loss with its gradients, of embeddings that have none yet."""
        from sentence_transformers.multi_vector_encoder import losses as host

        loss = getattr(host, _LOSS)(
            torch.nn.Identity(), scale=1 / training.TEMPERATURE, score_mini_batch_size=scored_at_once
        )
        columns = self.columns()
        masks = [[torch.ones(part.shape[:2], dtype=torch.bool, device=part.device) for part in c] for c in columns]

        def call() -> Found:
            for column in columns:
                for part in column:
                    part.grad = None
            with torch.enable_grad():
                value = calculate(loss, columns, masks, with_backward=True)
            gradients = [[part.grad for part in column if part.grad is not None] for column in columns]
            return Found(value, *gradients)

        return Candidate(label, call, read)

    def ours(self) -> list[Candidate]:
        """What the host's method is while registered."""
        from pylate_flash.hosts import SENTENCE_TRANSFORMERS as HOST

        return [self.candidate("calculate_loss, registered", HOST.routed(_CALCULATE), MINI_BATCH)]

    def theirs(self, sweep: bool) -> list[Candidate]:
        """The host's own method, which scores as many queries at once as a mini-batch has, or several numbers."""
        from pylate_flash.hosts import SENTENCE_TRANSFORMERS as HOST

        own = HOST.original(_CALCULATE)
        if not sweep:
            return [self.candidate("calculate_loss", own, MINI_BATCH)]
        return [self.candidate(f"calculate_loss, {size} queries at once", own, size) for size in SCORED_AT_ONCE]

    def operation(self) -> list[Candidate]:
        """The operation itself."""
        return [candidate._replace(read=losses.sample_of) for candidate in training.ours(self.inputs)]


def read(found: Found) -> Sample:
    """What is compared of what the loss has left."""
    queries, documents = torch.cat(found.grad_queries), torch.cat(found.grad_documents)
    return losses.sample_of(training.Step(found.loss, None, queries, documents))


Inputs = Scores | Loss


def make_inputs(row: Row, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw random unit vectors, the same ones for the same row on the same kind of device."""
    if row.form == "loss":
        batch = training.Batch(row.name, row.Nq, row.Nd, row.Lq, row.Ld, d=row.d)
        return Loss(training.make_inputs(batch, device, dtype))
    padded = forward.make_inputs(forward.Shape(row.name, row.Nq, row.Nd, row.Lq, row.Ld, row.d), device, dtype)
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.randint(row.shortest or row.Ld, row.Ld + 1, (row.Nd,), generator=drawn)
    active = (torch.arange(row.Ld) < lengths.unsqueeze(1)).to(device)
    arguments: dict[str, Any] = {"a": padded.queries, "b": padded.documents}
    if row.form == "masked":
        of_queries = torch.ones(row.Nq, row.Lq, dtype=torch.bool, device=device)
        arguments |= {"a_mask": of_queries, "b_mask": active}
    if row.form == "lists":
        # Each with memory of its own, as a model returns them.
        cut = zip(padded.documents, lengths.tolist(), strict=True)
        arguments = {"a": [q.clone() for q in padded.queries], "b": [document[:n].clone() for document, n in cut]}
    return Scores(arguments, padded, active)


def error(found: Any, expected: Any) -> float:
    """The relative error of scores, or the largest of a loss and of its gradients."""
    if isinstance(expected, torch.Tensor):
        return relative_error(found, expected)
    return losses.error(found, expected)


def accuracy_of(inputs: Inputs, dtype: torch.dtype) -> float:
    """What this package promises."""
    return training.accuracy(dtype) if isinstance(inputs, Loss) else forward.accuracy(dtype)


def rounds_of(row: Row, rounds: Rounds) -> Rounds:
    """Two fifths of the calls of a loss, 20 of 50: the host's own takes a tenth of a second, and is made twice."""
    if row.form != "loss":
        return rounds
    # What was checked is warm.
    return Rounds(rounds.warmup // 5, -(-2 * rounds.repetitions // 5), rounds.flush_bytes)


def _of_host(candidates: Callable[[Inputs], Sequence[Candidate]], inputs: Inputs) -> Sequence[Candidate]:
    """Of what calls the host's code, routed or not."""
    where = inputs.padded.queries.device if isinstance(inputs, Scores) else inputs.inputs.queries.device
    if reason := SENTENCE_TRANSFORMERS.unavailable(where):
        raise Unavailable(f"sentence-transformers: {reason}")
    return candidates(inputs)


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="hosts",
        title="Calls of sentence-transformers 6",
        rows=ROWS,
        systems=(
            System(
                OURS,
                "registered",
                partial(_of_host, lambda inputs: inputs.ours()),
                about="the host's function while pylate_flash is registered",
            ),
            System(
                f"{OURS}_operation",
                "operation",
                lambda inputs: inputs.operation(),
                about="the operation of pylate_flash on the same tensors",
            ),
            System(
                "sentence_transformers",
                "sentence-transformers",
                lambda inputs: inputs.theirs(sweep=False),
                peer=SENTENCE_TRANSFORMERS,
                about="its own code as it is called by default",
                tolerance=GRADIENT_TOLERANCE,
            ),
            System(
                "sentence_transformers_best",
                "its best",
                lambda inputs: inputs.theirs(sweep=True),
                peer=SENTENCE_TRANSFORMERS,
                about="the same with the best of several bounds on what it multiplies at once",
                tolerance=GRADIENT_TOLERANCE,
            ),
        ),
        compiled=(),
        make_inputs=make_inputs,
        reference=lambda inputs: inputs.reference(),
        accuracy=forward.accuracy,
        accuracy_of=accuracy_of,
        error=error,
        rounds_of=rounds_of,
        ceilings=L2,
    )
