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
from dataclasses import dataclass, field, replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from pylate_flash.bench import exact, forward, losses, training
from pylate_flash.bench.calls import Padded, named
from pylate_flash.bench.exact import Step
from pylate_flash.bench.peers import SENTENCE_TRANSFORMERS
from pylate_flash.bench.rows import L2, Row
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

# A row's kind is how queries and documents are given: "padded", "masked" or "lists"; a loss has a padded batch.
ROWS = (
    Row("maxsim-padded", 32, 1024, 32, 180, kind="padded"),
    Row("maxsim-masked", 32, 1024, 32, 180, shortest=60, kind="masked"),
    Row("maxsim-lists", 32, 1024, 32, 180, shortest=60, kind="lists"),
    Row("maxsim-10k-lists", 1, 10000, 32, 180, shortest=60, kind="lists"),
    Row("cached-loss-1024", 1024, 1024, 32, 180, step=True, kind="loss"),
)


@dataclass(frozen=True)
class Scores(Padded):
    """`util.maxsim` of queries and documents as the host is given them: ``arguments``."""

    arguments: dict[str, Any] = field(default_factory=dict)

    def registered(self) -> list[Candidate]:
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

    def ours(self) -> list[Candidate]:
        """The operation itself."""
        from pylate_flash import maxsim, maxsim_ragged

        queries, documents = self.arguments["a"], self.arguments["b"]
        if isinstance(documents, list):
            return [Candidate("maxsim_ragged", partial(maxsim_ragged, queries, documents))]
        masks = named(self.arguments.get("a_mask"), self.arguments.get("b_mask"))
        return [Candidate("maxsim", partial(maxsim, queries, documents, **masks))]


class Loss(losses.LargeStep):
    """The cached loss's scores and gradients of a batch: `calculate_loss` of the embeddings of all mini-batches."""

    def reference(self) -> Step:
        """The loss, and some of the gradients."""
        return losses.reference(self)

    def columns(self) -> list[list[torch.Tensor]]:
        """Mini-batches [MINI_BATCH, L, d] of queries, and of documents, each a leaf."""
        whole = self.queries, self.documents
        return [[part.detach().clone().requires_grad_() for part in column.split(MINI_BATCH)] for column in whole]

    def calculated(self, label: str, calculate: Callable[..., torch.Tensor], scored_at_once: int) -> Candidate:
        """What is timed: the loss with its gradients, of embeddings that have none yet."""
        from sentence_transformers.multi_vector_encoder import losses as host

        scale = 1 / self.temperature
        loss = getattr(host, _LOSS)(torch.nn.Identity(), scale=scale, score_mini_batch_size=scored_at_once)
        columns = self.columns()
        masks = [[torch.ones(part.shape[:2], dtype=torch.bool, device=part.device) for part in c] for c in columns]

        def call() -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
            for column in columns:
                for part in column:
                    part.grad = None
            with torch.enable_grad():
                value = calculate(loss, columns, masks, with_backward=True)
            return value, [[part.grad for part in column if part.grad is not None] for column in columns]

        return Candidate(label, call, lambda found: Step(found[0], None, *map(torch.cat, found[1])))

    def registered(self) -> list[Candidate]:
        """What the host's method is while registered."""
        from pylate_flash.hosts import SENTENCE_TRANSFORMERS as HOST

        return [self.calculated("calculate_loss, registered", HOST.routed(_CALCULATE), MINI_BATCH)]

    def theirs(self, sweep: bool) -> list[Candidate]:
        """The host's own method, which scores as many queries at once as a mini-batch has, or several numbers."""
        from pylate_flash.hosts import SENTENCE_TRANSFORMERS as HOST

        own = HOST.original(_CALCULATE)
        if not sweep:
            return [self.calculated("calculate_loss", own, MINI_BATCH)]
        return [self.calculated(f"calculate_loss, {size} queries at once", own, size) for size in SCORED_AT_ONCE]


def make_inputs(row: Row, device: torch.device, dtype: torch.dtype) -> Scores | Loss:
    """Draw random unit vectors, the same ones for the same row on the same kind of device."""
    if row.step:
        given = training.make_inputs(row, device, dtype)
        return Loss(given.queries, given.documents, temperature=given.temperature)
    inputs = forward.make_inputs(row, device, dtype)
    queries, documents, lengths = inputs.queries, inputs.documents, row.lengths()
    active = (torch.arange(row.Ld) < lengths.unsqueeze(1)).to(device)
    arguments: dict[str, Any] = {"a": queries, "b": documents}
    if row.kind == "masked":
        of_queries = torch.ones(row.Nq, row.Lq, dtype=torch.bool, device=device)
        arguments |= {"a_mask": of_queries, "b_mask": active}
    if row.kind == "lists":
        # Each with memory of its own, as a model returns them.
        cut = zip(documents, lengths.tolist(), strict=True)
        arguments = {"a": [q.clone() for q in queries], "b": [document[:n].clone() for document, n in cut]}
    return Scores(queries, documents, None, active, arguments=arguments)


def error(found: Any, expected: Any) -> float:
    """The relative error of scores, or the largest of a loss and of its gradients."""
    return (losses if isinstance(expected, Step) else exact).error(found, expected)


def registered(inputs: Scores | Loss) -> Sequence[Candidate]:
    """What calls the host's code, routed."""
    if reason := SENTENCE_TRANSFORMERS.unavailable(inputs.device):
        raise Unavailable(f"sentence-transformers: {reason}")
    return inputs.registered()


def suite() -> Suite:
    """Return the suite."""
    theirs = System(
        "sentence_transformers",
        "sentence-transformers",
        methodcaller("theirs", sweep=False),
        peer=SENTENCE_TRANSFORMERS,
        about="its own code as it is called by default",
        tolerance=exact.ROUNDED,
    )
    return Suite(
        name="hosts",
        title="Calls of sentence-transformers 6",
        rows=ROWS,
        systems=(
            System(OURS, "registered", registered, about="the host's function while pylate_flash is registered"),
            System(
                f"{OURS}_operation",
                "operation",
                methodcaller("ours"),
                about="the operation of pylate_flash on the same tensors",
            ),
            theirs,
            replace(
                theirs,
                name="sentence_transformers_best",
                title="its best",
                candidates=methodcaller("theirs", sweep=True),
                about="the same with the best of several bounds on what it multiplies at once",
            ),
        ),
        make_inputs=make_inputs,
        error=error,
        ceilings=L2,
    )
