"""The suite `residual`: scores of documents as residual codes, as stored in a PLAID index.

Every system is checked against float64 scores of the embeddings decompressed to the dtype of the queries. The floor
counts one read of codes, residuals and scales, and one of the centroid table, but not the fetch of a centroid from L2
for every token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

import pylate_flash
from pylate_flash.bench import exact, forward
from pylate_flash.bench.calls import Call, chunk_sizes, only, unit_vectors
from pylate_flash.bench.exact import einsum_scores
from pylate_flash.bench.peers import LIK
from pylate_flash.bench.protocol import Work
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import LIK_SYSTEM, OUR_SYSTEM, TORCH_SYSTEM, Candidate, Suite, another_way
from pylate_flash.ops.residual_codes import ResidualCodes

# Bytes of the code and the scale of a token.
_CODE_AND_SCALE = 8
# The largest bucket weight, times sqrt(d), as in a codec of a model's embeddings.
_LARGEST_WEIGHT = 1.0


@dataclass(frozen=True)
class Residual(Row):
    """A shape whose documents are residual codes of ``nbits`` bits."""

    nbits: int = 4

    @property
    def shape(self) -> str:
        return f"{super().shape}, {self.nbits} bits"

    @property
    def n_centroids(self) -> int:
        """16 * sqrt(tokens), rounded down to a power of two, as in PLAID."""
        return min(self.Nd * self.Ld, 1 << int(16 * (self.Nd * self.Ld) ** 0.5).bit_length() - 1)

    def work(self, dtype: torch.dtype) -> Work:
        wide = super().work(dtype)
        of_tokens = self.Nd * self.Ld * (self.d * dtype.itemsize - self.d * self.nbits / 8 - _CODE_AND_SCALE)
        return Work(flops=wide.flops, bytes=wide.bytes - of_tokens + 2 * self.d * self.n_centroids)


ROWS = tuple(
    Residual(f"{row.name}-{nbits}", row.Nq, row.Nd, row.Lq, row.Ld, row.d, nbits=nbits)
    for row in forward.ROWS
    if row.name in ("textual", "rerank-10k", "serve-32")
    for nbits in (4, 2)
)


@dataclass(frozen=True)
class Inputs(Call):
    """A row's tensors: ``queries`` [Nq, Lq, d], and the documents, each of ``length`` tokens."""

    queries: torch.Tensor
    documents: ResidualCodes
    length: int

    def embeddings(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Decompress documents ``first`` to ``last``, [n, Ld, d], to the dtype of the queries."""
        last = self.documents.n_documents if last is None else min(last, self.documents.n_documents)
        tokens = slice(first * self.length, last * self.length)
        return self.documents.decompress_tokens(tokens, self.queries.dtype).unflatten(0, (-1, self.length))

    def reference(self) -> torch.Tensor:
        """The scores [Nq, Nd] in float64."""
        return exact.scores(self.queries, self.embeddings())

    def accuracy(self, dtype: torch.dtype) -> float:
        """The error bound of 8-bit products; at full precision scores are as accurate as any."""
        return 2e-3

    def ours(self) -> list[Candidate]:
        return only(pylate_flash.maxsim_residual, self.queries, self.documents)

    def full(self) -> list[Candidate]:
        """`pylate_flash.maxsim_residual` without 8-bit products."""
        return only(pylate_flash.maxsim_residual, self.queries, self.documents, precision="full")

    def decompressed(self) -> list[Candidate]:
        """`pylate_flash.maxsim` of documents that are decompressed beforehand."""
        return only(pylate_flash.maxsim, self.queries, self.embeddings())

    def lik(self) -> list[Candidate]:
        """late-interaction-kernels, padded and packed. Its bucket indices start at the lowest bits of a byte."""
        documents, nbits = self.documents, self.documents.nbits
        residuals = in_other_order(documents.residuals, nbits)
        shape = documents.n_documents, self.length
        lengths = torch.full(shape[:1], self.length, device=residuals.device)
        tables = documents.centroids, documents.bucket_weights.float(), nbits
        padded = documents.codes.view(shape), residuals.view(*shape, -1), lengths
        packed = documents.codes, residuals, documents.cu_seqlens
        varlen = partial(LIK["plaid.maxsim_residual_varlen"], max_seqlen_d=self.length)
        return [
            Candidate("maxsim_residual", partial(LIK["plaid.maxsim_residual"], self.queries, *padded, *tables)),
            Candidate("maxsim_residual_varlen", partial(varlen, self.queries, *packed, *tables)),
        ]

    def torch(self) -> list[Candidate]:
        """Documents decompressed by a look-up per byte, then an einsum, one candidate per chunk size."""
        n_documents = self.documents.n_documents
        # Only the shape is read; decompressed documents take a few bytes per element.
        like = self.queries.new_empty(1).expand(n_documents, self.length, self.documents.size)
        return [
            Candidate(f"decompress, einsum, chunks of {chunk}", partial(self.decompress_then_score, chunk))
            for chunk in chunk_sizes(self.queries, like)
        ]

    def decompress_then_score(self, chunk: int):
        """Plain scores, over ``chunk`` documents at a time."""
        starts = range(0, self.documents.n_documents, chunk)
        parts = (self.embeddings(first, first + chunk) for first in starts)
        return torch.cat([einsum_scores(self.queries, part) for part in parts], dim=1)


def make_inputs(row: Residual, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw random unit vectors for queries and centroids, and random codes and residuals."""
    generator = torch.Generator(device).manual_seed(0)
    n_tokens = row.Nd * row.Ld
    largest = _LARGEST_WEIGHT / row.d**0.5
    documents = ResidualCodes(
        torch.randint(row.n_centroids, (n_tokens,), dtype=torch.int32, device=device, generator=generator),
        torch.randint(
            256, (n_tokens, row.d * row.nbits // 8), dtype=torch.uint8, device=device, generator=generator
        ),
        unit_vectors(row.n_centroids, row.d, generator=generator, dtype=torch.float16),
        torch.linspace(-largest, largest, 1 << row.nbits, device=device).half(),
        torch.arange(0, n_tokens + 1, row.Ld, dtype=torch.int32, device=device),
    )  # fmt: skip
    return Inputs(unit_vectors(row.Nq, row.Lq, row.d, generator=generator, dtype=dtype), documents, row.Ld)


def in_other_order(residuals: torch.Tensor, nbits: int) -> torch.Tensor:
    """Reverse the order of the ``nbits``-bit indices in each byte."""
    shifts = range(0, 8, nbits)
    parts = [(residuals >> shift & (1 << nbits) - 1) << 8 - nbits - shift for shift in shifts]
    return torch.stack(parts).sum(dim=0, dtype=torch.uint8)


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="residual",
        title="MaxSim of residual codes",
        rows=ROWS,
        systems=(
            OUR_SYSTEM,
            another_way("full", about="pylate_flash, without products of 8 bits"),
            another_way("decompressed", about="pylate_flash, documents decompressed before the call"),
            LIK_SYSTEM,
            replace(TORCH_SYSTEM, about="decompressed in the call, then an einsum"),
        ),
        make_inputs=make_inputs,
    )
