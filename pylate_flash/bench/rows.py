"""The rows of suites: named shapes, and the unavoidable work of their scores or training steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from pylate_flash.bench.protocol import Work

AnyRow = TypeVar("AnyRow", bound="Row")


def _measure_l2(device: torch.device) -> float:
    # Imported here, as its kernel needs Triton, which may not be installed.
    from pylate_flash.bench.l2 import measure_l2

    return measure_l2(device)


# The extra ceiling of suites whose steps gather embeddings from the L2 cache.
L2 = {"l2_bytes_per_second": _measure_l2}


@dataclass(frozen=True)
class Row:
    """``Nq`` queries of ``Lq`` tokens against ``Nd`` documents of ``Ld`` tokens, embeddings of size ``d``.

    ``own``: each query has its own ``Nd`` documents. ``shortest``: documents have that many to ``Ld`` tokens.
    ``step``: gradients are computed too. ``kind``: a further property of the inputs.
    """

    name: str
    Nq: int
    Nd: int
    Lq: int
    Ld: int
    d: int = 128
    own: bool = False
    shortest: int | None = None
    step: bool = False
    kind: str = ""

    @property
    def shape(self) -> str:
        """The shape for display; the embedding size is included if it is not 128."""
        lengths = f"{self.Ld}" if self.shortest is None else f"{self.shortest}..{self.Ld}"
        text = f"{self.Nq} x {self.Nd}{' of its own' if self.own else ''}, {self.Lq} x {lengths}"
        if self.d != 128:
            text += f", d = {self.d}"
        return f"{text}, {self.kind}" if self.kind else text

    @property
    def documents(self) -> int:
        """The total number of documents."""
        return self.Nq * self.Nd if self.own else self.Nd

    def lengths(self) -> torch.Tensor:
        """The lengths of all documents, drawn uniformly with a fixed seed."""
        if self.shortest is None:
            return torch.full((self.documents,), self.Ld)
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.shortest, self.Ld + 1, (self.documents,), generator=generator)

    def work(self, dtype: torch.dtype) -> Work:
        """One multiplication and one addition per product; embeddings read once, float32 scores written.

        A step also writes the gradients once, and then gathers two embeddings from L2 per argmax.
        """
        tokens = self.documents * self.Ld if self.shortest is None else int(self.lengths().sum())
        embeddings = self.d * (self.Nq * self.Lq + tokens)
        maxima = self.Nq * self.Nd * self.Lq
        return Work(
            flops=2.0 * self.Lq * tokens * self.d * (1 if self.own else self.Nq),
            bytes=float((2 if self.step else 1) * dtype.itemsize * embeddings + 4 * self.Nq * self.Nd),
            l2_bytes=float(2 * dtype.itemsize * maxima * self.d) if self.step else 0.0,
        )

    def within(self: AnyRow, flops: float) -> AnyRow:
        """The same row with queries and documents halved until it takes at most ``flops`` operations."""
        row = self
        while row.work(torch.float32).flops > flops and (row.Nq > 1 or (row.Nd > 1 and not row.own)):
            row = replace(row, Nq=-(-row.Nq // 2), Nd=row.Nd if row.own else -(-row.Nd // 2))
        return row
