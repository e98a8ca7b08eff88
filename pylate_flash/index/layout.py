"""How a token's embedding is stored: unchanged in a floating dtype, or in fewer bits with its scale, as a row of bytes.

An 8-bit row begins with the scale and the offset of the token (float32, 0 if there is no offset) and 8 bytes of zeros,
followed by the values (`ops.quantization`), padded with zeros to a multiple of 16 bytes. So these rows are read, copied
and merged like any others; on a GPU, scales, offsets and values are separate tensors (`columns`). The rows of residual
codes are described in `codes`. The rows of a part may be followed by 16-bit rows (`Layout.beside`), of which a search
reads the few that it scores again.
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

# Bits of an element of residual codes.
_CODES = {"residual4": 4, "residual2": 2}
# Dtypes of the 16-bit copies that may be stored beside embeddings of fewer bits.
_BESIDE = ("float16", "bfloat16")
_FEWER = {**PRECISIONS, **dict.fromkeys(_CODES, torch.uint8)}
DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, **_FEWER,
    **{f"{name}+{beside}": dtype for name, dtype in _FEWER.items() for beside in _BESIDE},
}  # fmt: skip
# Bytes before the values of an 8-bit row; the size of a row is a multiple of this.
_HEAD = 16


@dataclass(frozen=True)
class Layout:
    """The rows of a store: `kept_as` is one of `DTYPES`, `size` the embedding size, `codec` that of residual codes."""

    kept_as: str
    size: int
    codec: Codec | None = None

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of a row's elements."""
        return DTYPES[self.kept_as]

    @functools.cached_property
    def quantized(self) -> bool:
        """Whether a row holds 8 bits or fewer per element of an embedding."""
        return self.scored in _FEWER

    @property
    def scored(self) -> str:
        """The part of `kept_as` that names the rows which a search scores."""
        return self.kept_as.partition("+")[0]

    @functools.cached_property
    def beside(self) -> Layout | None:
        """Layout of the 16-bit rows stored beside these, from which few documents are scored again; or None."""
        *_, name = self.kept_as.partition("+")
        return Layout(name, self.size) if name else None

    @functools.cached_property
    def all_nbytes(self) -> int:
        """Bytes of a row plus its 16-bit row, if any."""
        return self.nbytes + (self.beside.nbytes if self.beside else 0)

    @functools.cached_property
    def nbits(self) -> int:
        """Bits per element of residual codes, 0 for other layouts."""
        return _CODES.get(self.scored, 0)

    @functools.cached_property
    def width(self) -> int:
        """Elements of a row."""
        return self.form.width if self.form else self.size

    @functools.cached_property
    def form(self) -> Form | None:
        """Row format of quantized embeddings, None for others."""
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
    def input_dtype(self) -> torch.dtype:
        """The dtype that embeddings are converted to before they are stored."""
        return torch.float32 if self.quantized else self.dtype

    @property
    def asked(self) -> torch.dtype:
        """The dtype that queries are converted to before they are scored, and codes are decompressed to."""
        return torch.float16 if self.nbits else self.input_dtype

    def empty(self, rows: int, device: torch.device) -> Held:
        """Allocate rows in the form in which they are scored."""
        # A CPU scores 8-bit rows in the form in which they are stored.
        if self.form and (self.nbits or device.type == "cuda"):
            return self.form.empty(rows, device)
        return torch.empty(rows, self.width, dtype=self.dtype, device=device)

    def rows(self, embeddings: Tensor) -> Tensor:
        """Rows [T, width] from embeddings [T, size] of `input_dtype`."""
        if not self.quantized:
            return embeddings
        if self.codec is not None:
            return self.codec.rows(embeddings)
        assert self.form is not None
        quantized = quantize(embeddings, self.scored)
        columns = [column.unsqueeze(1) for column in (quantized.scales, quantized.offsets) if column is not None]
        values = F.pad(quantized.values.view(torch.uint8), (0, -self.size % _HEAD)).view(self.dtype)
        return packed_rows(self.form, (*columns, values)).view(self.dtype)

    def embeddings(self, rows: Held) -> Tensor | QuantizedEmbeddings:
        """Embeddings [T, size] from rows; a view, unless they are residual codes."""
        if self.codec is not None:
            bounds = torch.tensor([0, len(rows)], device=rows.device)
            return codes_of(rows, self.codec.on(rows.device), bounds).decompress(self.asked)
        if self.form is None:
            assert isinstance(rows, Tensor)
            return rows
        *columns, values = self.form.of(rows).tensors
        return QuantizedEmbeddings(values[:, : self.size], *(column[:, 0] for column in columns))


def is_finite(rows: Tensor) -> Tensor:
    """Whether the embedding of each row is finite; for 8 bits, whether its scale and offset are. Shape: [T], bool.

    For codes, centroid indices are viewed as floats too, but are too small to have the bits of a non-finite one.
    """
    values = rows[:, :8].view(torch.float32) if rows.dtype in PRECISIONS.values() else rows
    return torch.isfinite(values).all(dim=1)
