"""The suite `sparse`: one query against many documents, each scored by a few of the query's tokens.

The suite `forward` has the same shapes with all of the query's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from pylate_flash.bench import forward
from pylate_flash.bench.forward import Shape
from pylate_flash.bench.peers import FLASH_MAXSIM
from pylate_flash.bench.protocol import Work
from pylate_flash.bench.suite import OURS, Candidate, Suite, System


@dataclass(frozen=True)
class Pruned(Shape):
    """One query of ``Lq`` tokens against ``Nd`` documents, each of which is scored by ``k`` of them."""

    k: int = 16

    @property
    def shape(self) -> str:
        """The shape, for people."""
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
class Inputs:
    """A row's tensors: those of `forward.Inputs`, and ``chosen`` [Nd, k], int32, positions in rising order."""

    tensors: forward.Inputs
    chosen: torch.Tensor


def make_inputs(row: Pruned, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw random unit vectors, and k positions of each document, the same ones for the same row and kind of device."""
    generator = torch.Generator(device).manual_seed(1)
    order = torch.rand(row.Nd, row.Lq, device=device, generator=generator).argsort(dim=1)
    chosen = order[:, : row.k].sort(dim=1).values.to(torch.int32)
    return Inputs(forward.make_inputs(row, device, dtype), chosen)


def reference(inputs: Inputs) -> torch.Tensor:
    """Return the scores [1, Nd] in float64, of the (already rounded) inputs, so many documents at a time."""
    from pylate_flash.ops import maxsim_sparse_queries_reference

    queries, documents = inputs.tensors.queries.double(), inputs.tensors.documents
    step = max(1, forward.REFERENCE_BYTES // (8 * queries.shape[1] * sum(documents.shape[1:])))
    parts = zip(documents.split(step), inputs.chosen.split(step), strict=True)
    return torch.cat([maxsim_sparse_queries_reference(queries, part.double(), chosen) for part, chosen in parts], dim=1)


def ours(inputs: Inputs) -> list[Candidate]:
    """The public `maxsim_sparse_queries`, as a user calls it."""
    from pylate_flash import maxsim_sparse_queries

    tensors = inputs.tensors
    call = partial(maxsim_sparse_queries, tensors.queries, tensors.documents, inputs.chosen)
    return [Candidate("maxsim_sparse_queries", call)]


def flash_maxsim(inputs: Inputs) -> list[Candidate]:
    """flash-maxsim's function for chosen tokens of one query."""
    # The package itself names only the module so.
    from flash_maxsim.flash_maxsim_sparse import flash_maxsim_sparse

    queries, documents, lengths = inputs.tensors.queries, inputs.tensors.documents, inputs.tensors.lengths

    def call() -> torch.Tensor:
        return flash_maxsim_sparse(queries[0], documents, inputs.chosen, lengths).unsqueeze(0)

    return [Candidate("flash_maxsim_sparse", call)]


def gathered(inputs: Inputs) -> list[Candidate]:
    """The plain way: the chosen rows of every document gathered, and an einsum of them over chunks of documents."""
    query, documents, chosen = inputs.tensors.queries[0], inputs.tensors.documents, inputs.chosen.long()

    def call() -> torch.Tensor:
        parts = zip(documents.split(1024), chosen.split(1024), strict=True)
        found = [torch.einsum("nsd,ntd->nst", query[positions], part) for part, positions in parts]
        return torch.cat([part.amax(dim=2).sum(dim=1, dtype=torch.float32) for part in found]).unsqueeze(0)

    return [Candidate("einsum of gathered rows, chunks of 1024", call)]


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="sparse",
        title="MaxSim of chosen query tokens",
        rows=ROWS,
        systems=(
            System(OURS, "pylate_flash", ours, about="`maxsim_sparse_queries`"),
            System(
                "flash_maxsim",
                "FM",
                flash_maxsim,
                peer=FLASH_MAXSIM,
                about="flash-maxsim, which rounds embeddings to float16",
            ),
            System("torch", "torch", gathered, about="an einsum of gathered rows, in the type of the inputs"),
        ),
        compiled=(),
        make_inputs=make_inputs,
        reference=reference,
        accuracy=forward.accuracy,
    )
