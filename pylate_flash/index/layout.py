"""How a token's embedding is kept: in a floating type as it is, or in fewer bits with its scale, in one row of bytes.

A row of 8 bits begins with the scale and the offset of the token (float32, an offset of 0 where there is none) and 8
bytes of zeros, then come the values (`ops.quantization`), and zeros up to a multiple of 16 bytes. So the rows are read,
copied and merged like any others; on a GPU, scales, offsets and values lie apart (`columns`). Those of residual codes
are told in `codes`. Behind the rows of a part, those of 16 bits may lie (`Layout.beside`), of which a search reads the
few that it scores again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.quantization import PRECISIONS, QuantizedEmbeddings, quantize
from .codes import Codec, codes_of, form_of
from .columns import Form, Held, packed_rows

__all__ = ["DTYPES", "Layout", "is_finite"]

# Bits of an element of residual codes.
_CODES = {"residual4": 4, "residual2": 2}
# In 16 bits beside them, embeddings in fewer bits may be kept as well.
_BESIDE = ("float16", "bfloat16")
_FEWER = {**PRECISIONS, **dict.fromkeys(_CODES, torch.uint8)}
DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, **_FEWER,
    **{f"{name}+{beside}": dtype for name, dtype in _FEWER.items() for beside in _BESIDE},
}  # fmt: skip
# Bytes before the values of a token in 8 bits; rows are multiples of as many.
_HEAD = 16


@dataclass(frozen=True)
class Layout:
    """The rows of a store: `kept_as` is one of `DTYPES`, `size` the elements of an embedding, `codec` that of codes."""

    kept_as: str
    size: int
    codec: Codec | None = None

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The type of a row's elements."""
        return DTYPES[self.kept_as]

    @functools.cached_property
    def quantized(self) -> bool:
        """Whether a row holds 8 bits or fewer for each element of an embedding."""
        return self.scored in _FEWER

    @property
    def scored(self) -> str:
        """What `kept_as` says of the rows that a search scores."""
        return self.kept_as.partition("+")[0]

    @functools.cached_property
    def beside(self) -> Layout | None:
        """The rows that are kept beside these, to score few documents again; or None."""
        *_, name = self.kept_as.partition("+")
        return Layout(name, self.size) if name else None

    @functools.cached_property
    def all_nbytes(self) -> int:
        """Bytes of a row, and of the one beside it."""
        return self.nbytes + (self.beside.nbytes if self.beside else 0)

    @functools.cached_property
    def nbits(self) -> int:
        """Bits of an element of residual codes, 0 of what is none."""
        return _CODES.get(self.scored, 0)

    @functools.cached_property
    def width(self) -> int:
        """Elements of a row."""
        return self.form.width if self.form else self.size

    @functools.cached_property
    def form(self) -> Form | None:
        """What rows of fewer bits hold, None of others."""
        if not self.quantized or not self.size:
            return None
        if self.nbits:
            return form_of(self.size, self.nbits)
        width = _HEAD + -(-self.size // _HEAD) * _HEAD
        offsets = [(4, 8, torch.float32)] * (self.scored == "uint8")
        return Form(width, ((0, 4, torch.float32), *offsets, (_HEAD, width, self.dtype)))

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize

    @property
    def given(self) -> torch.dtype:
        """The type that embeddings are brought to before they are kept."""
        return torch.float32 if self.quantized else self.dtype

    @property
    def asked(self) -> torch.dtype:
        """The type that queries are brought to before they are scored, and codes are decompressed to."""
        return torch.float16 if self.nbits else self.given

    def empty(self, rows: int, device: torch.device) -> Held:
        """Memory for so many rows, in the form in which they are scored."""
        # A CPU scores those of 8 bits as they are read.
        if self.form and (self.nbits or device.type == "cuda"):
            return self.form.empty(rows, device)
        return torch.empty(rows, self.width, dtype=self.dtype, device=device)

    def rows(self, embeddings: Tensor) -> Tensor:
        """Rows [T, width] from embeddings [T, size] of the type `given`."""
        if not self.quantized:
            return embeddings
        if self.codec is not None:
            return self.codec.rows(embeddings)
        assert self.form is not None
        found = quantize(embeddings, self.scored)
        numbers = [column.unsqueeze(1) for column in (found.scales, found.offsets) if column is not None]
        values = F.pad(found.values.view(torch.uint8), (0, -self.size % _HEAD)).view(self.dtype)
        return packed_rows(self.form, (*numbers, values)).view(self.dtype)

    def embeddings(self, rows: Held) -> Tensor | QuantizedEmbeddings:
        """Embeddings [T, size] from rows: without a copy, unless they are codes."""
        if self.codec is not None:
            bounds = torch.tensor([0, len(rows)], device=rows.device)
            return codes_of(rows, self.codec.on(rows.device), bounds).decompress(self.asked)
        if self.form is None:
            assert isinstance(rows, Tensor)
            return rows
        *numbers, values = self.form.of(rows).tensors
        return QuantizedEmbeddings(values[:, : self.size], *(column[:, 0] for column in numbers))


def is_finite(rows: Tensor) -> Tensor:
    """Whether the embedding of a row is finite; of 8 bits, whether its scale and offset are. Shape: [T], bool.

    Of codes, no number of a centroid is so large that its bits are those of a float that is not.
    """
    numbers = rows[:, :8].view(torch.float32) if rows.dtype in PRECISIONS.values() else rows
    return torch.isfinite(numbers).all(dim=1)
