"""What the kernels of the backward share: the problem, its tensors, the Jacobian of `normalize`, and sums of parts."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launch, Launcher
from .norms import SMALLEST_NORM
from .overlap import wait_for_previous_kernel

_LARGEST_SCALE = tl.constexpr(1.0 / SMALLEST_NORM)


class Problem(NamedTuple):
    """All that the launches of a backward depend on but the tensors' contents.

    Documents and tokens are counted over all groups; `per_group` documents belong to one, and `length` is the longest
    document.
    """

    n_queries: int
    query_length: int
    size: int
    groups: int
    documents: int
    per_group: int
    length: int
    tokens: int
    grad_strides: tuple[int, ...]
    query_strides: tuple[int, ...]
    document_strides: tuple[int, ...]
    packed: bool
    has_candidates: bool
    normalize: bool
    device: torch.device
    dtype: torch.dtype
    winners_dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.n_queries // self.groups * self.query_length

    @property
    def block_embedding(self) -> int:
        return max(16, triton.next_power_of_2(self.size))

    @property
    def narrow_documents(self) -> bool:
        """Whether offsets within a document, and among one document's scores, fit into 32 bits."""
        return max(self.length * self.document_strides[2], self.n_queries * self.grad_strides[0]) < 1 << 31

    @property
    def narrow_queries(self) -> bool:
        """Whether queries are contiguous, and offsets among one group's, and among their scores, fit into 32 bits."""
        to_query, to_token = self.query_strides[:2]
        return to_query == self.query_length * to_token and (
            max(self.rows * to_token, self.n_queries * self.grad_strides[0]) < 1 << 31
        )

    @property
    def walked(self) -> int:
        """Documents that a query meets (on average, where every query owns its own of the packed ones)."""
        return max(1, self.documents // self.groups) if self.has_candidates else self.per_group

    @property
    def layout(self) -> tuple[int, ...]:
        """The integers that tell a kernel where the rows of a document stand, from `n_rows` to `n_groups`."""
        return (
            self.rows, self.n_queries // self.groups, self.query_length, *division(self.query_length), self.per_group,
            self.length, *self.grad_strides, self.groups,
        )  # fmt: skip


class Slot(IntEnum):
    """Where the tensors of a backward are in the table of its launches."""

    GRAD_SCORES = 0
    QUERIES = 1
    DOCUMENTS = 2
    QUERIES_SCALE = 3
    DOCUMENTS_SCALE = 4
    CU_SEQLENS = 5
    CANDIDATES = 6
    WINNERS = 7
    GRAD_QUERIES = 8
    GRAD_DOCUMENTS = 9
    # `GRAD_SCORES`, or a copy whose layout serves the gradient of the documents better.
    WEIGHTS = 10
    # Of the gradient of the documents, float32.
    SUMS = 11
    # Nothing.
    NONE = 12


@triton.jit
def quotient(value, magic, shift):
    """value // divisor for 0 <= value < 2**31: a product and a shift instead of a division, see `division`."""
    return ((value.to(tl.uint32).to(tl.uint64) * magic.to(tl.uint32).to(tl.uint64)) >> shift.to(tl.uint64)).to(tl.int32)


def division(divisor: int) -> tuple[int, int]:
    """Factor, just above 2**shift / divisor and below 2**32, and shift by which `quotient` divides exactly."""
    shift = 31 + (divisor - 1).bit_length()
    return (1 << shift) // divisor + 1, shift


@triton.jit
def _owner(bounds_ptr, count, value):
    """The sequence, of `count`, whose boundaries bounds[i] <= value < bounds[i + 1] enclose `value`."""
    low = count * 0
    high = count - 1
    while low < high:
        middle = (low + high + 1) // 2
        above = tl.load(bounds_ptr + middle).to(tl.int64) > value
        high = tl.where(above, middle - 1, high)
        low = tl.where(above, low, middle)
    return low


@triton.jit
def group_of(
    flat, grad_scores_ptr, candidates_ptr, n_documents, n_group_queries, n_groups, stride_grad_query,
    stride_grad_document,
    HAS_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Group of the layout that a document belongs to, and where its score with the group's first query stands."""
    if HAS_CANDIDATES:
        group = _owner(candidates_ptr, n_groups, flat).to(tl.int64)
        offset = flat * stride_grad_document
    else:
        group = flat // n_documents
        offset = group * n_group_queries * stride_grad_query + (flat - group * n_documents) * stride_grad_document
    return group, grad_scores_ptr + offset


@triton.jit
def joined(low, high, ROWS: tl.constexpr, BLOCK_EMBEDDING: tl.constexpr):
    """Rows [ROWS, BLOCK_EMBEDDING] from their halves."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [ROWS, BLOCK_EMBEDDING])


@triton.jit
def through_norm(grad, embeddings, scale):
    """The gradient of x [rows, d] from that of y = x * scale, where scale [rows] is one over the norm of x.

    The Jacobian maps g to (g - y <y, g>) / |x|. Where the norm was clamped, y is linear in x.
    """
    return through_unit(grad, embeddings.to(tl.float32) * scale[:, None], scale)


@triton.jit
def through_unit(grad, units, scale):
    """The same from y itself, in float32."""
    along = tl.where(scale < _LARGEST_SCALE, tl.sum(units * grad, axis=1), 0.0)
    return (grad - units * along[:, None]) * scale[:, None]


@triton.jit(do_not_specialize=["n_rows", "n_parts", "n_sequences", "length"])
def _finish_kernel(
    parts_ptr, embeddings_ptr, scales_ptr, grad_ptr,
    n_rows, n_parts, n_sequences, length,
    stride_group, stride_sequence, stride_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """grad[row] from the sum, in order, of parts [n_parts, n_rows, d] in float32; rows [groups, sequences, length]."""
    wait_for_previous_kernel()
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    mask = (rows < n_rows)[:, None] & (dims < EMBEDDING)[None, :]
    offset = rows[:, None] * EMBEDDING + dims[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_EMBEDDING], tl.float32)
    for part in tl.range(0, n_parts):
        total += tl.load(parts_ptr + tl.cast(part, tl.int64) * n_rows * EMBEDDING + offset, mask=mask, other=0.0)
    if NORMALIZE:
        sequence = rows // length
        source = (
            (sequence // n_sequences) * stride_group
            + (sequence % n_sequences) * stride_sequence
            + (rows % length) * stride_token
        )
        embeddings = tl.load(embeddings_ptr + source[:, None] + dims[None, :], mask=mask, other=0.0)
        total = through_norm(total, embeddings, tl.load(scales_ptr + rows, mask=rows < n_rows, other=1.0))
    tl.store(grad_ptr + offset, total.to(grad_ptr.dtype.element_ty), mask=mask)


_finish = Launcher(_finish_kernel, follows=True)


def bind_finish(
    problem: Problem, rows: int, parts: int, sequences: int, length: int, strides: tuple[int, ...]
) -> Launch:
    """A launch of `_finish_kernel` over `rows`, in sequences of `length`, `sequences` of them to a group."""
    block = problem.block_embedding
    num_warps = 4 if block <= 512 else 8
    block_rows = max(1, num_warps * 32 * 16 // block)
    return _finish.bind(
        (triton.cdiv(rows, block_rows), 1, 1),
        (rows, parts, sequences, length),
        strides,
        (problem.size, block, block_rows, problem.normalize),
        num_warps,
        num_stages=3,
    )


def finish_documents(problem: Problem) -> Launch:
    """A launch of `_finish_kernel` over the one float32 sum of every document token."""
    sequences, length = (1, problem.tokens) if problem.packed else (problem.per_group, problem.length)
    return bind_finish(problem, problem.tokens, 1, sequences, length, problem.document_strides)
