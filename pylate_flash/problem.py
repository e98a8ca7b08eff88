"""One description of what a call asks for: its tensors, its options, and the `Problem` that they make.

`problem_of` looks at nothing but what tensors say of themselves (shapes, strides, types), and makes the description
that implementations and kernels take in place of twenty arguments. `ops.checks` has the checks of what users pass.
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

# The largest value of the symmetric precisions of quantized documents, and of the affine one, whose smallest is 0.
LARGEST_VALUES = {"int8": 127.0, "uint8": 255.0, "fp8": 448.0}
# The smallest scale of a row that is quantized, the smallest float32 of full precision. One over it is finite.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# The losses of scores.
CROSS_ENTROPY, DIVERGENCE, MARGIN_MSE = "cross entropy", "divergence", "margin MSE"


class Tensors(NamedTuple):
    """The tensors of a call.

    Padded: `queries` [Nq, Lq, d]; `documents` [Nd, Ld, d], which all queries meet, or [Nq, K, Ld, d]; masks of their
    tokens. Packed, with `documents_cu_seqlens` [Nd + 1]: `documents` [Td, d], and `candidates_cu_seqlens` [Nq + 1]
    where query i meets only documents candidates[i] to candidates[i + 1]; `queries` [Tq, d] with `queries_cu_seqlens`,
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


# What there is of x, and of y.
Pair = tuple[Tensor, Tensor]


class Options(NamedTuple):
    """The options of a call; the lengths are those of the longest sequences, or more, where they are packed.

    `max_candidates` of a query is a guess where to look would be to wait: kernels share out those that there are.
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
    """Where packed documents begin that do not follow each other; `documents` of `Tensors` is where it is counted from.

    `starts` [Nd], int64 on the device, in units of `unit` elements, 16 bytes where every document begins at a multiple
    of that, else 1; of quantized documents, whose scales lie elsewhere, a row. The documents have `n_tokens` in all,
    each by its own boundaries of contiguous rows.
    """

    starts: Tensor
    unit: int
    n_tokens: int


@dataclass(frozen=True, eq=False)
class Kind:
    """What a problem is but for its sizes, and so what the code that serves it is compiled for; one object for each."""

    dtype: torch.dtype
    device: torch.device
    # Elements of an embedding.
    size: int
    # The types of masks and boundaries, None where there are none.
    queries_mask: torch.dtype | None
    documents_mask: torch.dtype | None
    cu_seqlens: torch.dtype | None
    candidates: torch.dtype | None
    normalize: bool
    masking: str
    # "tf32", or another.
    float32_precision: str
    with_argmax: bool
    # The unit of `DocumentOffsets`; 0: packed documents follow each other.
    offset_unit: int = 0
    # The type of the values of quantized documents (None: documents have that of queries), and whether queries are
    # quantized too before they are multiplied.
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
        """Whether the queries' mask holds weights."""
        return self.queries_mask is not None and self.queries_mask.is_floating_point


kind_of = functools.cache(Kind)
# Of GPUs' products: `torch.backends.cuda.matmul.fp32_precision`, which `torch.set_float32_matmul_precision` sets too.
# `torch.get_float32_matmul_precision` raises where it was set by its own name, or for all backends together.
float32_precision = functools.partial(_get_fp32_precision_getter, "cuda", "matmul")


def _of_kind(name: str) -> Any:
    return property(attrgetter(f"kind.{name}"))


@functools.cache
def replaced(kind: Kind, field: str, value: object) -> Kind:
    """The kind that differs in this field."""
    return kind_of(*[value if each.name == field else getattr(kind, each.name) for each in fields(kind)])


class _Fields(NamedTuple):
    """Of `Problem`, which has more: a class of fields alone takes no other attributes."""

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
    # Whether documents begin at a multiple of 16 bytes.
    aligned: bool


class Problem(_Fields):
    """What a call asks for, but for the values of its tensors.

    Documents come in groups: one that all queries meet (`groups` 1), or one of each query (`groups` = `n_queries`).
    Padded documents are [groups, n_documents, document_length, size] by their strides; of packed ones there are
    `n_documents` and `n_tokens` in all, the longest of `document_length`, and with candidates every query has a group.
    Queries are [n_queries, query_length, size], where packed ones are padded to the longest.
    """

    __slots__ = ()
    # In C: plans ask for them time and again.
    device: torch.device = _of_kind("device")
    dtype: torch.dtype = _of_kind("dtype")
    size: int = _of_kind("size")
    packed: bool = _of_kind("packed")
    has_candidates: bool = _of_kind("has_candidates")
    normalize: bool = _of_kind("normalize")
    with_argmax: bool = _of_kind("with_argmax")

    @property
    def deciding_dtype(self) -> torch.dtype:
        """The type by which an implementation is chosen: that of quantized documents, if kernels take the queries."""
        quantized = self.kind.quantized
        return self.dtype if quantized is None or self.dtype == torch.float64 else quantized

    @property
    def all_documents(self) -> int:
        """Documents of all groups."""
        return self.n_documents if self.packed else self.groups * self.n_documents

    @property
    def counted_tokens(self) -> int:
        """Tokens of all documents; of packed ones rounded, so that what is repeated of one total serves others."""
        return rounded_total(self.n_tokens) if self.packed else self.n_tokens

    @property
    def documents_follow(self) -> bool:
        """Whether padded documents lie one after the other, those of all groups."""
        next_group, next_document, row = self.document_strides
        follows = next_document == self.document_length * row
        return follows and (self.groups == 1 or next_group == self.n_documents * next_document)

    @property
    def rows(self) -> int:
        """Query tokens, padding included, that every document of a group meets."""
        return self.n_queries // self.groups * self.query_length if self.groups else 0

    @property
    def scores_shape(self) -> tuple[int, ...]:
        return (self.n_documents,) if self.has_candidates else (self.n_queries, self.n_documents)

    @property
    def argmax_shape(self) -> tuple[int, int]:
        """Of every document of every group, which token each of the rows has chosen."""
        return self.all_documents, self.rows

    @property
    def scores_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.dtype)

    @property
    def argmax_dtype(self) -> torch.dtype:
        return argmax_dtype(self.document_length)

    @property
    def is_empty(self) -> bool:
        """Whether there is no score, or nothing to compute one of."""
        some_queries, some_documents = self.n_queries and self.query_length, self.n_documents and self.document_length
        return not (some_queries and some_documents and self.n_tokens)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which embeddings of a type are multiplied and summed, and that of their scores."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded_total(n_tokens: int) -> int:
    """A number of packed tokens rounded up by less than 1/32: what is planned for is the same for many totals."""
    step = 1 << max(0, n_tokens.bit_length() - 6)
    return -(-n_tokens // step) * step


def argmax_dtype(document_length: int) -> torch.dtype:
    """The type that holds an argmax among so many tokens, or -1 for none."""
    return torch.int16 if document_length <= 32767 else torch.int32


def _sizes(tensors: Tensors, options: Options) -> tuple[Any, Any, Any, Any, Any]:
    """Queries, their length, groups, documents of each and their length, as in `Problem`; to a compiler, symbols."""
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
    """Uninitialised scores and argmax, of none if they are not asked for.

    By sizes that may be symbolic: a compiler has no `Problem`.
    """
    n_queries, query_length, groups, n_documents, document_length = _sizes(tensors, options)
    own = tensors.candidates_cu_seqlens is not None
    shape = (n_documents,) if own else (n_queries, n_documents)
    every = n_documents if own else groups * n_documents
    rows = query_length if own or tensors.documents.dim() == 4 else n_queries * query_length
    scores = tensors.queries.new_empty(shape, dtype=accumulation_dtype(tensors.queries.dtype))
    return scores, scores.new_empty((every if with_argmax else 0, rows), dtype=argmax_dtype(document_length))


def problem_of(
    tensors: Tensors,
    options: Options,
    with_argmax: bool = False,
    offsets: DocumentOffsets | None = None,
) -> Problem:
    """The problem of tensors that fit together; with `offsets`, of documents that lie there."""
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
    """The tensors that scores [Nq, N] are compared with.

    `target`: labels [Nq], or None for document i of query i (of candidates the first); or a teacher's scores [Nq, N].
    `exclude` [Nq, N], bool. `temperature`, of one element, in place of the number in `Comparison`.
    """

    target: Tensor | None
    exclude: Tensor | None = None
    temperature: Tensor | None = None


class Comparison(NamedTuple):
    """How they are compared: the kind of the loss, one of the three above, and the options of all of them."""

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
    """How query tokens retrieve, and how what they retrieve scores."""

    # How many tokens each row retrieves, at most as many as there are.
    k: int
    # Whether a token that is not retrieved counts as 0, so that it matters which documents are retrieved as a whole.
    with_whole: bool
    # What scores are divided by at least.
    least: float


class Results(NamedTuple):
    """Where a call's results go: the scores [Nq, Nd] and what they were divided by, and the tokens that score.

    `argmax` [Nd, Nq * Lq], -1 where none does, may be columns of more.
    """

    scores: Tensor
    argmax: Tensor
    divisors: Tensor
