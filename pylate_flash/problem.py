"""One description of what a call asks for: its tensors, its options, and the `Problem` that they make.

`problem_of` looks at nothing but what tensors say of themselves (shapes, strides, types), and makes the description
that implementations and kernels take in place of twenty arguments. `ops.checks` has the checks of what users pass.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

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


class Options(NamedTuple):
    """The options of a call; the lengths are those of the longest sequences, or more, where they are packed."""

    max_query_length: int = 0
    max_document_length: int = 0
    max_candidates: int = 0
    normalize: bool = False
    reduction: str = "sum"
    masking: str = "exclude"
    empty_score: float = 0.0
    implementation: str = "auto"


class Places(NamedTuple):
    """Where packed documents begin that do not follow each other; `documents` of `Tensors` is where it is counted from.

    `offsets` [Nd], int64 on the device, in units of `unit` elements, 16 bytes where every document begins at a multiple
    of that, else 1. The documents have `n_tokens` in all, each by its own boundaries of contiguous rows.
    """

    offsets: Tensor
    unit: int
    n_tokens: int


@dataclass(frozen=True, eq=False, slots=True)
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
    # `torch.get_float32_matmul_precision()`.
    float32_precision: str
    with_winners: bool
    # The unit of `Places`; 0: packed documents follow each other.
    offset_unit: int = 0
    # The type of the values of quantized documents (None: documents have that of queries), and whether queries are
    # quantized too before they are multiplied.
    quantized: torch.dtype | None = None
    quantize_queries: bool = False

    @property
    def zero_masked(self) -> bool:
        return self.masking == "zero" and self.documents_mask is not None

    @property
    def weighted(self) -> bool:
        """Whether the queries' mask holds weights."""
        return self.queries_mask is not None and self.queries_mask.is_floating_point

    @property
    def precision(self) -> str:
        """Triton's name for the precision of products, where half inputs are multiplied exactly either way."""
        return "ieee" if self.dtype != torch.float32 or self.float32_precision == "highest" else "tf32"


kind_of = functools.cache(Kind)


@functools.cache
def replaced(kind: Kind, field: str, value: object) -> Kind:
    """The kind that differs in this field."""
    return kind_of(*[value if each.name == field else getattr(kind, each.name) for each in fields(kind)])


class Problem(NamedTuple):
    """What a call asks for, but for the values of its tensors.

    Documents come in groups: one that all queries meet (`groups` 1), or one of each query (`groups` = `n_queries`).
    Padded documents are [groups, n_documents, document_length, size] by their strides; of packed ones there are
    `n_documents` and `n_tokens` in all, the longest of `document_length`, and with candidates every query has a group.
    Queries are [n_queries, query_length, size], where packed ones are padded to the longest.
    """

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

    @property
    def dtype(self) -> torch.dtype:
        return self.kind.dtype

    @property
    def deciding_dtype(self) -> torch.dtype:
        """The type by which an implementation is chosen: that of quantized documents, if kernels take the queries."""
        quantized = self.kind.quantized
        return self.dtype if quantized is None or self.dtype == torch.float64 else quantized

    @property
    def device(self) -> torch.device:
        return self.kind.device

    @property
    def size(self) -> int:
        return self.kind.size

    @property
    def normalize(self) -> bool:
        return self.kind.normalize

    @property
    def with_winners(self) -> bool:
        return self.kind.with_winners

    @property
    def packed(self) -> bool:
        return self.kind.cu_seqlens is not None

    @property
    def has_candidates(self) -> bool:
        return self.kind.candidates is not None

    @property
    def all_documents(self) -> int:
        """Documents of all groups."""
        return self.n_documents if self.packed else self.groups * self.n_documents

    @property
    def rows(self) -> int:
        """Query tokens, padding included, that every document of a group meets."""
        return self.n_queries // self.groups * self.query_length if self.groups else 0

    @property
    def scores_shape(self) -> tuple[int, ...]:
        return (self.n_documents,) if self.has_candidates else (self.n_queries, self.n_documents)

    @property
    def winners_shape(self) -> tuple[int, int]:
        """Of every document of every group, which token each of the rows has chosen."""
        return self.all_documents, self.rows

    @property
    def scores_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.dtype)

    @property
    def winners_dtype(self) -> torch.dtype:
        return winners_dtype(self.document_length)

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


def winners_dtype(document_length: int) -> torch.dtype:
    """The type that holds a winner among so many tokens, or -1 for none."""
    return torch.int16 if document_length <= 32767 else torch.int32


def empty_results(tensors: Tensors, options: Options, with_winners: bool = True) -> tuple[Tensor, Tensor]:
    """Uninitialised scores and winners, by sizes that may be symbolic: a compiler has no `Problem`.

    Without winners, theirs have no rows.
    """
    queries, documents, _, _, queries_cu_seqlens, cu_seqlens, candidates = tensors
    n_queries, query_length = queries.shape[:2]
    if queries_cu_seqlens is not None:
        n_queries, query_length = queries_cu_seqlens.shape[0] - 1, options.max_query_length
    if cu_seqlens is not None:
        n_documents = cu_seqlens.shape[0] - 1
        shape = (n_queries, n_documents) if candidates is None else (n_documents,)
        rows = query_length if candidates is not None else n_queries * query_length
        every, length = n_documents, options.max_document_length
    else:
        *groups, n_documents, length, _ = documents.shape
        shape = n_queries, n_documents
        rows = query_length if groups else n_queries * query_length
        every = groups[0] * n_documents if groups else n_documents
    scores = queries.new_empty(shape, dtype=accumulation_dtype(queries.dtype))
    return scores, queries.new_empty((every if with_winners else 0, rows), dtype=winners_dtype(length))


def problem_of(
    tensors: Tensors,
    options: Options,
    with_winners: bool = False,
    places: Places | None = None,
) -> Problem:
    """The problem of tensors that fit together; with `places`, of documents that lie there."""
    queries, documents, queries_mask, documents_mask, queries_cu_seqlens, documents_cu_seqlens, candidates = tensors
    kind = kind_of(
        queries.dtype, queries.device, queries.shape[-1],
        None if queries_mask is None else queries_mask.dtype,
        None if documents_mask is None else documents_mask.dtype,
        None if documents_cu_seqlens is None else documents_cu_seqlens.dtype,
        None if candidates is None else candidates.dtype,
        options.normalize, options.masking, torch.get_float32_matmul_precision(), with_winners,
        0 if places is None else places.unit,
    )  # fmt: skip
    aligned = documents.data_ptr() % 16 == 0
    document_strides: tuple[int, ...]
    if documents_cu_seqlens is not None:
        n_tokens = documents.shape[0]
        groups, n_documents, document_length = 1, documents_cu_seqlens.shape[0] - 1, options.max_document_length
        document_strides = (0, 0, documents.stride(0))
        if places is not None:
            n_tokens, aligned = places.n_tokens, places.unit * documents.element_size() == 16
    elif documents.dim() == 3:
        groups, (n_documents, document_length, _) = 1, documents.shape
        n_tokens, (document, token, _) = n_documents * document_length, documents.stride()
        document_strides = (0, document, token)
    else:
        groups, n_documents, document_length, _ = documents.shape
        n_tokens, document_strides = groups * n_documents * document_length, documents.stride()[:3]
    if queries_cu_seqlens is None:
        n_queries, query_length, _ = queries.shape
        query_strides = queries.stride()[:2]
    else:
        n_queries, query_length = queries_cu_seqlens.shape[0] - 1, options.max_query_length
        query_strides = (query_length * queries.stride(0), queries.stride(0))
    if candidates is not None:
        groups = n_queries
    return Problem(
        kind, n_queries, query_length, groups, n_documents, document_length, n_tokens, options.max_candidates,
        query_strides, document_strides, options.empty_score, aligned,
    )  # fmt: skip


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
    """How query tokens retrieve, and how what they retrieve scores.

    Attributes
    ----------
    k
        How many tokens each row retrieves, at most as many as there are.
    with_whole
        Whether a token that is not retrieved counts as 0, so that it matters which documents are retrieved as a whole.
    least
        What scores are divided by at least.
    """

    k: int
    with_whole: bool
    least: float


class Results(NamedTuple):
    """Where the results of a call go.

    Attributes
    ----------
    scores, divisors
        [Nq, Nd]: the scores, and what they were divided by.
    winners
        [Nd, Nq * Lq]: the tokens that score, -1 where none does. They may be columns of more.
    """

    scores: Tensor
    winners: Tensor
    divisors: Tensor
