"""The description of a call: its tensors, its options, and the `Problem` built from them.

`problem_of` reads tensor metadata only (shapes, strides, dtypes) and builds the description that implementations and
kernels take in place of twenty arguments. `ops.checks` validates user inputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _get_fp32_precision_getter

# Largest quantized value of each precision. int8 and fp8 are symmetric; uint8 is affine, and its smallest value is 0.
LARGEST_VALUES = {"int8": 127.0, "uint8": 255.0, "fp8": 448.0}
# Smallest scale of a quantized row: the smallest normal float32, whose reciprocal is finite.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Kinds of losses over scores.
CROSS_ENTROPY, DIVERGENCE, MARGIN_MSE = "cross entropy", "divergence", "margin MSE"


class Tensors(NamedTuple):
    """The tensors of a call.

    Padded: `queries` [Nq, Lq, d]; `documents` [Nd, Ld, d], shared by all queries, or [Nq, K, Ld, d]; token masks.
    Packed, with `documents_cu_seqlens` [Nd + 1]: `documents` [Td, d], and `candidates_cu_seqlens` [Nq + 1] if query i
    is scored against documents candidates[i] to candidates[i + 1] only; `queries` [Tq, d] with `queries_cu_seqlens`,
    or padded with their mask.
    """

    queries: Tensor
    documents: Tensor
    queries_mask: Tensor | None = None
    documents_mask: Tensor | None = None
    queries_cu_seqlens: Tensor | None = None
    documents_cu_seqlens: Tensor | None = None
    candidates_cu_seqlens: Tensor | None = None


class Sets(NamedTuple):
    """The tensors of a Chamfer distance: sets [N, Lx, d] and [N, Ly, d] with masks, or packed [Tx, d] and [Ty, d]."""

    x: Tensor
    y: Tensor
    x_mask: Tensor | None = None
    y_mask: Tensor | None = None
    x_cu_seqlens: Tensor | None = None
    y_cu_seqlens: Tensor | None = None


# One value for x and one for y.
Pair = tuple[Tensor, Tensor]


class Options(NamedTuple):
    """The options of a call; for packed sequences, the lengths are upper bounds on the sequence lengths.

    `max_candidates` per query is a guess where reading it would synchronize: kernels distribute the actual candidates.
    """

    max_query_length: int = 0
    max_document_length: int = 0
    max_candidates: int = 0
    normalize: bool = False
    reduction: str = "sum"
    masking: str = "exclude"
    empty_score: float = 0.0
    implementation: str = "auto"


class DocumentOffsets(NamedTuple):
    """Offsets of packed documents that are not adjacent in memory, relative to `documents` of `Tensors`.

    `starts` [Nd], int64 on the device, in units of `unit` elements: 16 bytes if every document starts at a multiple of
    16 bytes, else 1; for quantized documents, whose scales are stored separately, a row. The documents have `n_tokens`
    in total; the rows of each are contiguous, and their number comes from its boundaries.
    """

    starts: Tensor
    unit: int
    n_tokens: int


@dataclass(frozen=True, eq=False)
class Kind:
    """Everything but the sizes of a problem: the key that kernels are specialized on; one interned object per kind."""

    dtype: torch.dtype
    device: torch.device
    # Embedding size.
    size: int
    # Dtypes of masks and boundaries; None if absent.
    queries_mask: torch.dtype | None
    documents_mask: torch.dtype | None
    cu_seqlens: torch.dtype | None
    candidates: torch.dtype | None
    normalize: bool
    masking: str
    # "tf32" or another setting.
    float32_precision: str
    with_argmax: bool
    # The unit of `DocumentOffsets`; 0: packed documents are adjacent.
    offset_unit: int = 0
    # Dtype of quantized document values (None: documents have the dtype of queries), and whether queries are quantized
    # too before the product.
    quantized: torch.dtype | None = None
    quantize_queries: bool = False

    @cached_property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @cached_property
    def has_candidates(self) -> bool:
        return self.candidates is not None

    @cached_property
    def zero_masked(self) -> bool:
        return self.masking == "zero" and self.documents_mask is not None

    @cached_property
    def weighted(self) -> bool:
        """Whether the query mask holds weights."""
        return self.queries_mask is not None and self.queries_mask.is_floating_point


kind_of = functools.cache(Kind)
# Reads `torch.backends.cuda.matmul.fp32_precision`, which `torch.set_float32_matmul_precision` sets too.
# `torch.get_float32_matmul_precision` raises if it was set directly, or for all backends at once.
float32_precision = functools.partial(_get_fp32_precision_getter, "cuda", "matmul")


def _of_kind(name: str) -> Any:
    return property(attrgetter(f"kind.{name}"))


@functools.cache
def replaced(kind: Kind, field: str, value: object) -> Kind:
    """The kind with this field replaced."""
    return kind_of(*[value if item.name == field else getattr(kind, item.name) for item in fields(kind)])


class _Fields(NamedTuple):
    """The fields of `Problem`, which adds attributes that a NamedTuple class body cannot define."""

    kind: Kind
    n_queries: int
    query_length: int
    groups: int
    n_documents: int
    document_length: int
    n_tokens: int
    max_candidates: int
    query_strides: tuple[int, ...]
    document_strides: tuple[int, ...]
    empty_score: float
    # Whether documents start at a multiple of 16 bytes.
    aligned: bool


class Problem(_Fields):
    """The full description of a call, except for the values of its tensors.

    Documents come in groups: one shared by all queries (`groups` 1), or one per query (`groups` = `n_queries`).
    Padded documents are [groups, n_documents, document_length, size] with the given strides. Packed ones number
    `n_documents` in total, with `n_tokens` tokens and a longest length of `document_length`; with candidates, every
    query has a group. Queries are [n_queries, query_length, size]; packed ones count as padded to the longest.
    """

    __slots__ = ()
    # attrgetter runs in C: plans read these properties often.
    device: torch.device = _of_kind("device")
    dtype: torch.dtype = _of_kind("dtype")
    size: int = _of_kind("size")
    packed: bool = _of_kind("packed")
    has_candidates: bool = _of_kind("has_candidates")
    normalize: bool = _of_kind("normalize")
    with_argmax: bool = _of_kind("with_argmax")

    @property
    def deciding_dtype(self) -> torch.dtype:
        """The dtype that selects the implementation: that of quantized documents, unless queries are float64."""
        quantized = self.kind.quantized
        return self.dtype if quantized is None or self.dtype == torch.float64 else quantized

    @property
    def all_documents(self) -> int:
        """Number of documents of all groups."""
        return self.n_documents if self.packed else self.groups * self.n_documents

    @property
    def counted_tokens(self) -> int:
        """Tokens of all documents; rounded up if packed, so that cached plans are shared by similar totals."""
        return rounded_total(self.n_tokens) if self.packed else self.n_tokens

    @property
    def documents_follow(self) -> bool:
        """Whether padded documents are adjacent in memory, across all groups."""
        next_group, next_document, row = self.document_strides
        follows = next_document == self.document_length * row
        return follows and (self.groups == 1 or next_group == self.n_documents * next_document)

    @property
    def rows(self) -> int:
        """Query tokens, padding included, that each document of a group is scored against."""
        return self.n_queries // self.groups * self.query_length if self.groups else 0

    @property
    def scores_shape(self) -> tuple[int, ...]:
        return (self.n_documents,) if self.has_candidates else (self.n_queries, self.n_documents)

    @property
    def argmax_shape(self) -> tuple[int, int]:
        """Shape of the argmax: for every document of every group, the token that each row selects."""
        return self.all_documents, self.rows

    @property
    def scores_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.dtype)

    @property
    def argmax_dtype(self) -> torch.dtype:
        return argmax_dtype(self.document_length)

    @property
    def is_empty(self) -> bool:
        """Whether there are no scores, or no tokens to compute them from."""
        some_queries, some_documents = self.n_queries and self.query_length, self.n_documents and self.document_length
        return not (some_queries and some_documents and self.n_tokens)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which embeddings of `dtype` are multiplied and accumulated, which is that of the scores."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded_total(n_tokens: int) -> int:
    """A number of packed tokens, rounded up by less than 1/32 so that many totals share one plan."""
    step = 1 << max(0, n_tokens.bit_length() - 6)
    return -(-n_tokens // step) * step


def argmax_dtype(document_length: int) -> torch.dtype:
    """The dtype that holds an argmax over `document_length` tokens, or -1 for none."""
    return torch.int16 if document_length <= 32767 else torch.int32


def _sizes(tensors: Tensors, options: Options) -> tuple[Any, Any, Any, Any, Any]:
    """n_queries, query_length, groups, n_documents, document_length as in `Problem`; symbolic under a compiler."""
    queries, documents, _, _, queries_cu_seqlens, cu_seqlens, candidates = tensors
    n_queries, query_length = queries.shape[:2]
    if queries_cu_seqlens is not None:
        n_queries, query_length = queries_cu_seqlens.shape[0] - 1, options.max_query_length
    if cu_seqlens is not None:
        groups = 1 if candidates is None else n_queries
        return n_queries, query_length, groups, cu_seqlens.shape[0] - 1, options.max_document_length
    groups = documents.shape[0] if documents.dim() == 4 else 1
    return n_queries, query_length, groups, documents.shape[-3], documents.shape[-2]


def empty_results(tensors: Tensors, options: Options, with_argmax: bool = True) -> tuple[Tensor, Tensor]:
    """Uninitialised scores and argmax; the argmax has no rows without `with_argmax`.

    Sizes may be symbolic: a compiler has no `Problem`.
    """
    n_queries, query_length, groups, n_documents, document_length = _sizes(tensors, options)
    has_candidates = tensors.candidates_cu_seqlens is not None
    shape = (n_documents,) if has_candidates else (n_queries, n_documents)
    all_documents = n_documents if has_candidates else groups * n_documents
    rows = query_length if has_candidates or tensors.documents.dim() == 4 else n_queries * query_length
    scores = tensors.queries.new_empty(shape, dtype=accumulation_dtype(tensors.queries.dtype))
    return scores, scores.new_empty((all_documents if with_argmax else 0, rows), dtype=argmax_dtype(document_length))


def problem_of(
    tensors: Tensors,
    options: Options,
    with_argmax: bool = False,
    offsets: DocumentOffsets | None = None,
) -> Problem:
    """The problem of tensors with matching shapes; with `offsets`, documents are located by them."""
    queries, documents, queries_mask, documents_mask, _, cu_seqlens, candidates = tensors
    size = queries.shape[-1]
    n_tokens, aligned, unit = documents.numel() // documents.shape[-1], documents.data_ptr() % 16 == 0, 0
    if offsets is not None:
        n_tokens, unit = offsets.n_tokens, offsets.unit
        aligned = unit * documents.element_size() % 16 == 0
    kind = kind_of(
        queries.dtype,
        queries.device,
        size,
        None if queries_mask is None else queries_mask.dtype,
        None if documents_mask is None else documents_mask.dtype,
        None if cu_seqlens is None else cu_seqlens.dtype,
        None if candidates is None else candidates.dtype,
        options.normalize,
        options.masking,
        float32_precision(),
        with_argmax,
        unit,
    )
    sizes = _sizes(tensors, options)
    query_strides = queries.stride()[:2]
    if tensors.queries_cu_seqlens is not None:
        query_strides = sizes[1] * queries.stride(0), queries.stride(0)
    document_strides = (0, 0, *documents.stride())[-4:-1]
    counts = *sizes, n_tokens, options.max_candidates
    return Problem(kind, *counts, query_strides, document_strides, options.empty_score, aligned)


class Targets(NamedTuple):
    """The tensors that a loss compares scores [Nq, N] with.

    `target`: labels [Nq], or None for document i of query i (the first candidate); or teacher scores [Nq, N].
    `exclude` [Nq, N], bool. `temperature`, with one element, replaces the number in `Comparison`.
    """

    target: Tensor | None
    exclude: Tensor | None = None
    temperature: Tensor | None = None


class Comparison(NamedTuple):
    """The loss: its kind, one of the three above, and the options of all three."""

    kind: str
    temperature: float = 1.0
    margin: float | None = None
    symmetric: bool = False
    teacher_temperature: float = 1.0
    normalize_scores: bool = False
    loss_reduction: str = "mean"
    with_statistics: bool = False
    max_scratch_bytes: int | None = None


class Rule(NamedTuple):
    """How query tokens retrieve document tokens, and how retrieved tokens score."""

    # Tokens that each row retrieves, at most all of them.
    k: int
    # Whether a token that is not retrieved counts as 0; then it matters which documents are retrieved in full.
    with_whole: bool
    # The smallest divisor of scores.
    least: float


class Results(NamedTuple):
    """Output tensors of a call: the scores [Nq, Nd], their divisors, and the tokens that score.

    `argmax` [Nd, Nq * Lq], -1 where no token scores, may be a column slice of a larger tensor.
    """

    scores: Tensor
    argmax: Tensor
    divisors: Tensor
