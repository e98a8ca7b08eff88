"""The suite `residual`: scores of documents that are residual codes, as they lie in a PLAID index.

Every system is checked against float64, of the embeddings decompressed to the type of the queries. The floor counts
codes, residuals and scales read once, and the table of centroids once: that a row of it is fetched for every token, out
of L2, it does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from pylate_flash.bench import forward
from pylate_flash.bench.forward import Shape, unit_vectors
from pylate_flash.bench.peers import LIK
from pylate_flash.bench.protocol import Work
from pylate_flash.bench.suite import OURS, Candidate, Suite, System
from pylate_flash.ops.residual_codes import ResidualCodes

# Bytes of a token's code and of its scale.
_CODE_AND_SCALE = 8
# The largest bucket weights, of elements of a norm of 1 in all, as those of a codec of a model's embeddings.
_LARGEST_WEIGHT = 1.0


@dataclass(frozen=True)
class Residual(Shape):
    """A shape whose documents are residual codes of so many bits."""

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
    Residual(f"{row.name}-{nbits}", row.Nq, row.Nd, row.Lq, row.Ld, row.d, nbits)
    for row in forward.ROWS
    if row.name in ("textual", "rerank-10k", "serve-32")
    for nbits in (4, 2)
)


@dataclass(frozen=True)
class Inputs:
    """A row's tensors: ``queries`` [Nq, Lq, d], and the documents, each of ``length`` tokens."""

    queries: torch.Tensor
    documents: ResidualCodes
    length: int

    def decompressed(self, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Some of the documents, [n, Ld, d]."""
        tokens = slice(first * self.length, last * self.length)
        return self.documents.decompress_tokens(tokens, dtype).unflatten(0, (-1, self.length))


def make_inputs(row: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Random unit vectors for queries and centroids, random codes and residuals."""
    assert isinstance(row, Residual)
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


def reference(inputs: Inputs) -> torch.Tensor:
    """The scores [Nq, Nd] in float64."""
    n_documents, size = inputs.documents.n_documents, inputs.documents.size
    step = max(1, forward.REFERENCE_BYTES // (8 * inputs.length * size))
    found = []
    for first in range(0, n_documents, step):
        embeddings = inputs.decompressed(first, min(first + step, n_documents), inputs.queries.dtype)
        found.append(forward.reference(forward.Inputs(inputs.queries, embeddings, embeddings[:, 0, 0])))
    return torch.cat(found, dim=1)


def ours(inputs: Inputs) -> list[Candidate]:
    """The public `pylate_flash.maxsim_residual`, as a user calls it."""
    from pylate_flash import maxsim_residual

    return [Candidate("maxsim_residual", partial(maxsim_residual, inputs.queries, inputs.documents))]


def ours_decompressed(inputs: Inputs) -> list[Candidate]:
    """`pylate_flash.maxsim` of documents that are decompressed before it."""
    from pylate_flash import maxsim

    documents = inputs.decompressed(0, inputs.documents.n_documents, inputs.queries.dtype)
    return [Candidate("maxsim", partial(maxsim, inputs.queries, documents))]


def lik(inputs: Inputs) -> list[Candidate]:
    """late-interaction-kernels: padded, and packed. Its indices begin in the lowest bits of a byte."""
    from late_interaction_kernels.plaid import maxsim_residual, maxsim_residual_varlen

    documents, nbits = inputs.documents, inputs.documents.nbits
    residuals = in_other_order(documents.residuals, nbits)
    shape = documents.n_documents, inputs.length
    codes, padded = documents.codes.view(shape), residuals.view(*shape, -1)
    lengths = torch.full(shape[:1], inputs.length, device=codes.device)
    tables = documents.centroids, documents.bucket_weights.float(), nbits
    bounds = documents.cu_seqlens
    return [
        Candidate("maxsim_residual", partial(maxsim_residual, inputs.queries, codes, padded, lengths, *tables)),
        Candidate(
            "maxsim_residual_varlen",
            partial(
                maxsim_residual_varlen, inputs.queries, documents.codes, residuals, bounds, *tables,
                max_seqlen_d=inputs.length,
            ),
        ),
    ]  # fmt: skip


def in_other_order(residuals: torch.Tensor, nbits: int) -> torch.Tensor:
    """Bytes with their indices of so many bits in the other order."""
    places = range(0, 8, nbits)
    parts = [(residuals >> place & (1 << nbits) - 1) << 8 - nbits - place for place in places]
    return torch.stack(parts).sum(dim=0, dtype=torch.uint8)


def decompress_then_score(inputs: Inputs, chunk: int) -> torch.Tensor:
    """The plain way, over ``chunk`` documents at a time."""
    dtype, n_documents = inputs.queries.dtype, inputs.documents.n_documents
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = forward.einsum_scores
    return torch.cat(
        [
            score(inputs.queries, inputs.decompressed(first, min(first + chunk, n_documents), dtype))
            for first in range(0, n_documents, chunk)
        ],
        dim=1,
    )


def torch_eager(inputs: Inputs) -> list[Candidate]:
    """torch: documents decompressed by a look-up of every byte, then an einsum, the chunk size swept."""
    n_documents = inputs.documents.n_documents
    # Of the documents themselves, a few bytes for each element.
    shaped = inputs.queries.new_empty(1).expand(n_documents, inputs.length, inputs.documents.size)
    sizes = forward.chunk_sizes(forward.Inputs(inputs.queries, shaped, shaped[:, 0, 0]))
    return [
        Candidate(f"decompress, einsum, chunks of {chunk}", partial(decompress_then_score, inputs, chunk))
        for chunk in sizes
    ]


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="residual",
        title="MaxSim of residual codes",
        rows=ROWS,
        systems=(
            System(OURS, "pylate_flash", ours),
            System(
                f"{OURS}_decompressed", "decompressed", ours_decompressed,
                about="pylate_flash, documents decompressed before the call",
            ),
            System("lik", "LIK", lik, peer=LIK, about="late-interaction-kernels"),
            System("torch", "torch", torch_eager, about="decompressed in the call, then an einsum"),
        ),
        compiled=(),
        make_inputs=make_inputs,
        reference=reference,
        accuracy=forward.accuracy,
    )  # fmt: skip
