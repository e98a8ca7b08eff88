"""The suite `sparse`: one query against many documents, each scored by a few of the query's tokens.

The suite `forward` has the same shapes with all query tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller

import torch

from pylate_flash.bench import exact, forward
from pylate_flash.bench.calls import Padded
from pylate_flash.bench.protocol import Work
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import FLASH_MAXSIM_SYSTEM, OUR_SYSTEM, Candidate, Suite, System


@dataclass(frozen=True)
class Pruned(Row):
    """One query of ``Lq`` tokens against ``Nd`` documents, each of which is scored by ``k`` of them."""

    k: int = 16

    @property
    def shape(self) -> str:
        """The shape for display."""
        return f"{super().shape}, {self.k} chosen"

    def work(self, dtype: torch.dtype) -> Work:
        """The products of the chosen tokens; embeddings and positions (int32) read once, scores written."""
        return Work(
            flops=2.0 * self.Nq * self.Nd * self.k * self.Ld * self.d,
            bytes=super().work(dtype).bytes + 4.0 * self.Nd * self.k,
        )


ROWS = (
    Pruned("pruned-1k", 1, 1000, 32, 300, k=16),
    Pruned("pruned-10k", 1, 10000, 32, 300, k=8),
    Pruned("pruned-visual", 1, 1000, 512, 1024, k=64),
    Pruned("pruned-colpali", 1, 1000, 1024, 1024, k=128),
)


@dataclass(frozen=True)
class Sparse(Padded):
    """Embeddings, and ``chosen`` [Nd, k], int32: positions of query tokens in ascending order."""

    chosen: torch.Tensor | None = None

    @property
    def positions(self) -> torch.Tensor:
        """The positions of the chosen tokens."""
        assert self.chosen is not None
        return self.chosen

    def reference(self) -> torch.Tensor:
        """The scores [1, Nd] of the (already rounded) inputs in float64, in chunks of documents."""
        from pylate_flash.ops import maxsim_sparse_queries_reference

        queries, documents = self.queries.double(), self.documents
        step = max(1, exact.REFERENCE_BYTES // (8 * queries.shape[1] * sum(documents.shape[1:])))
        parts = zip(documents.split(step), self.positions.split(step), strict=True)
        return torch.cat(
            [maxsim_sparse_queries_reference(queries, part.double(), chosen) for part, chosen in parts], dim=1
        )

    def ours(self) -> list[Candidate]:
        """The public `maxsim_sparse_queries`, as a user calls it."""
        from pylate_flash import maxsim_sparse_queries

        call = partial(maxsim_sparse_queries, self.queries, self.documents, self.positions)
        return [Candidate("maxsim_sparse_queries", call)]

    def flash_maxsim(self) -> list[Candidate]:
        """flash-maxsim's function for chosen tokens of one query."""
        # In the package, this name is the module.
        from flash_maxsim.flash_maxsim_sparse import flash_maxsim_sparse

        call = partial(flash_maxsim_sparse, self.queries[0], self.documents, self.positions, self.lengths())
        return [Candidate("flash_maxsim_sparse", lambda: call().unsqueeze(0))]

    def torch(self) -> list[Candidate]:
        """The plain way: gather the chosen query rows per document, and an einsum over chunks of documents."""
        query, documents, chosen = self.queries[0], self.documents, self.positions.long()

        def call() -> torch.Tensor:
            parts = zip(documents.split(1024), chosen.split(1024), strict=True)
            similarities = [torch.einsum("nsd,ntd->nst", query[positions], part) for part, positions in parts]
            return torch.cat([part.amax(dim=2).sum(dim=1, dtype=torch.float32) for part in similarities]).unsqueeze(0)

        return [Candidate("einsum of gathered rows, chunks of 1024", call)]


def make_inputs(row: Pruned, device: torch.device, dtype: torch.dtype) -> Sparse:
    """Draw random unit vectors, and k positions per document, reproducible per row and device type."""
    generator = torch.Generator(device).manual_seed(1)
    order = torch.rand(row.Nd, row.Lq, device=device, generator=generator).argsort(dim=1)
    chosen = order[:, : row.k].sort(dim=1).values.to(torch.int32)
    batch = forward.make_inputs(row, device, dtype)
    return Sparse(batch.queries, batch.documents, chosen=chosen)


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="sparse",
        title="MaxSim of chosen query tokens",
        rows=ROWS,
        systems=(
            replace(OUR_SYSTEM, about="`maxsim_sparse_queries`"),
            replace(FLASH_MAXSIM_SYSTEM, about="flash-maxsim, which rounds embeddings to float16"),
            System(
                "torch",
                "torch",
                methodcaller("torch"),
                about="an einsum of gathered rows, in the type of the inputs",
            ),
        ),
        make_inputs=make_inputs,
    )
