"""The suite `hosts`: calls of sentence-transformers 6, by its own code, and by ours while registered.

Scores by `util.maxsim`, of a padded batch, with masks, and of lists as its encoders return them; and the cached loss of
a batch of embeddings (scores and gradients), without the encoder. Nothing is registered here, as systems take turns
within a run and the host's own code would call routed functions. For this package, the function that replaces the
host's is measured.

Every call is timed twice: with the host's part, and on the GPU alone. Its own code bounds the elements that it
multiplies at once; the best of several bounds is measured besides the default.
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

# Bounds to try: elements at once (default 1e8), and queries whose scores the loss computes at once (default 32).
CHUNK_ELEMENTS = (10**8, 4 * 10**8, 16 * 10**8)
SCORED_AT_ONCE = (32, 128, 512)

# Texts per mini-batch of the cached loss.
MINI_BATCH = 32

# The kind of a row is the format of queries and documents: "padded", "masked" or "lists"; a loss has a padded batch.
ROWS = (
    Row("maxsim-padded", 32, 1024, 32, 180, kind="padded"),
    Row("maxsim-masked", 32, 1024, 32, 180, shortest=60, kind="masked"),
    Row("maxsim-lists", 32, 1024, 32, 180, shortest=60, kind="lists"),
    Row("maxsim-10k-lists", 1, 10000, 32, 180, shortest=60, kind="lists"),
    Row("cached-loss-1024", 1024, 1024, 32, 180, step=True, kind="loss"),
)


@dataclass(frozen=True)
class Scores(Padded):
    """`util.maxsim` of queries and documents, with the host's ``arguments``."""

    arguments: dict[str, Any] = field(default_factory=dict)

    def registered(self) -> list[Candidate]:
        """The function that replaces the host's while registered."""
        from pylate_flash.hosts import SENTENCE_TRANSFORMERS as HOST

        return [Candidate("maxsim, registered", partial(HOST.routed(_MAXSIM), **self.arguments))]

    def theirs(self, sweep: bool) -> list[Candidate]:
        """The host's own function, with its default bound or with several."""
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
        """The loss, and a sample of the gradients."""
        return losses.reference(self)

    def columns(self) -> list[list[torch.Tensor]]:
        """Mini-batches [MINI_BATCH, L, d] of queries, and of documents, each a leaf."""
        batch = self.queries, self.documents
        return [[part.detach().clone().requires_grad_() for part in column.split(MINI_BATCH)] for column in batch]

    def calculated(self, label: str, calculate: Callable[..., torch.Tensor], scored_at_once: int) -> Candidate:
        """The candidate that times the loss and its gradients, which are cleared before every call."""
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

        return Candidate(label, call, lambda output: Step(output[0], None, *map(torch.cat, output[1])))

    def registered(self) -> list[Candidate]:
        """The method that replaces the host's while registered."""
        from pylate_flash.hosts import SENTENCE_TRANSFORMERS as HOST

        return [self.calculated("calculate_loss, registered", HOST.routed(_CALCULATE), MINI_BATCH)]

    def theirs(self, sweep: bool) -> list[Candidate]:
        """The host's own method, which scores one mini-batch of queries at once, or one of several numbers."""
        from pylate_flash.hosts import SENTENCE_TRANSFORMERS as HOST

        own = HOST.original(_CALCULATE)
        if not sweep:
            return [self.calculated("calculate_loss", own, MINI_BATCH)]
        return [self.calculated(f"calculate_loss, {size} queries at once", own, size) for size in SCORED_AT_ONCE]


def make_inputs(row: Row, device: torch.device, dtype: torch.dtype) -> Scores | Loss:
    """Draw random unit vectors, reproducible per row and device type."""
    if row.step:
        batch = training.make_inputs(row, device, dtype)
        return Loss(batch.queries, batch.documents, temperature=batch.temperature)
    inputs = forward.make_inputs(row, device, dtype)
    queries, documents, lengths = inputs.queries, inputs.documents, row.lengths()
    active = (torch.arange(row.Ld) < lengths.unsqueeze(1)).to(device)
    arguments: dict[str, Any] = {"a": queries, "b": documents}
    if row.kind == "masked":
        queries_mask = torch.ones(row.Nq, row.Lq, dtype=torch.bool, device=device)
        arguments |= {"a_mask": queries_mask, "b_mask": active}
    if row.kind == "lists":
        # Cloned, as a model returns separate tensors.
        pairs = zip(documents, lengths.tolist(), strict=True)
        arguments = {"a": [q.clone() for q in queries], "b": [document[:n].clone() for document, n in pairs]}
    return Scores(queries, documents, None, active, arguments=arguments)


def error(result: Any, expected: Any) -> float:
    """The relative error of scores; for a step, the largest of the loss and its gradients."""
    return (losses if isinstance(expected, Step) else exact).error(result, expected)


def registered(inputs: Scores | Loss) -> Sequence[Candidate]:
    """The candidates that call the host's code as routed while registered."""
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
