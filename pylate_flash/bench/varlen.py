"""The suite `varlen`: packed documents of variable lengths, and reranking through PyLate.

Packed documents have no padding to store or read; documents padded to the longest work with any batched function. Both
are measured, and the floor counts real tokens only. The row `rerank` times all of `rank.rerank`, from numpy arrays in
host memory to sorted lists, so its time is that of the host and the device together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from pylate_flash.bench.calls import Varlen, unit_vectors
from pylate_flash.bench.protocol import Work
from pylate_flash.bench.rerank import Rerank, ids_of
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import (
    FLASH_MAXSIM_SYSTEM,
    LIK_SYSTEM,
    OUR_SYSTEM,
    TORCH_SYSTEM,
    Candidate,
    Suite,
    another_way,
)


@dataclass(frozen=True)
class Arrays(Row):
    """Queries with their own candidates, in float32: what PyLate's models return as arrays."""

    own: bool = True

    def work(self, dtype: torch.dtype) -> Work:
        return super().work(torch.float32)


ROWS = (
    Row("varlen-uniform", 1, 10000, 32, 192, shortest=64),
    Row("varlen-ragged", 32, 4000, 32, 512, shortest=16),
    # Long enough that PyLate's padding, which `rerank` there does not mask, is never the argmax.
    Arrays("rerank", 100, 100, 32, 180, shortest=40),
)


class Packed(Varlen):
    """Packed documents; other packages may also be called with padding."""

    def ours(self) -> list[Candidate]:
        """`maxsim_varlen`, which synchronises with the device unless the maximum lengths are given."""
        (packed,) = super().ours()
        with_lengths = partial(packed.call, **self.longest_lengths)
        return [Candidate(f"{packed.label}, longest lengths given", with_lengths), packed]

    def lik(self) -> list[Candidate]:
        return super().lik() + as_padded(self.padded().lik())

    def flash_maxsim(self) -> list[Candidate]:
        """Also from float16, which saves it a cast."""
        candidates = super().flash_maxsim()
        if self.documents.dtype != torch.float16:
            (halved,) = Varlen(self.queries.half(), self.documents.half(), self.lengths).flash_maxsim()
            candidates.append(halved._replace(label=f"{halved.label}, from float16"))
        return candidates + as_padded(self.padded().flash_maxsim())


def as_padded(candidates: list[Candidate]) -> list[Candidate]:
    """Mark the labels of candidates that use padding."""
    return [candidate._replace(label=f"{candidate.label}, padded") for candidate in candidates]


def ours_padded(inputs: Packed | Rerank) -> list[Candidate]:
    """`maxsim` of padded documents and their mask; no candidate for arrays."""
    return inputs.padded().ours() if isinstance(inputs, Packed) else []


def make_inputs(row: Row, device: torch.device, dtype: torch.dtype) -> Packed | Rerank:
    """Draw random unit vectors, reproducible per row and device type."""
    reranked = isinstance(row, Arrays)
    lengths = row.lengths()
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(unit_vectors, generator=generator, dtype=torch.float32 if reranked else dtype)
    queries, documents = draw(row.Nq, row.Lq, row.d), draw(int(lengths.sum()), row.d)
    if not reranked:
        return Packed(queries, documents, lengths)
    # Copies, as a model returns every document as a separate array.
    arrays = [tokens.numpy().copy() for tokens in documents.cpu().split(lengths.tolist())]
    return Rerank(
        ids=ids_of(row),
        queries=list(queries.cpu().numpy()),
        documents=[arrays[first : first + row.Nd] for first in range(0, row.documents, row.Nd)],
        where=device,
    )


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="varlen",
        title="MaxSim of packed documents",
        rows=ROWS,
        systems=(
            OUR_SYSTEM,
            another_way("padded", candidates=ours_padded, about="pylate_flash with padding and a mask"),
            replace(LIK_SYSTEM, about="late-interaction-kernels, the faster of packed and padded"),
            replace(FLASH_MAXSIM_SYSTEM, about="flash-maxsim, the faster of both ways"),
            replace(TORCH_SYSTEM, about="a masked einsum over chunks of documents"),
        ),
        make_inputs=make_inputs,
    )
