"""The backward: every query token takes one row from, and sends one row to, the document token that won.

Layout as in `kernels.forward`; `winners` is [documents, rows], documents counted over all groups of the layout, with
rows = Nq / G * Lq, and -1 where no gradient flows. Everything is summed in float32 registers and written once, in the
type of the embeddings, with the Jacobian of `normalize` applied on the way.

Gradient of the queries: `_gather_kernel` sums, for a block of query rows, the winning document rows over the documents
in their order. Programs walk the documents side by side, so the rows come out of L1 and L2. Where there are too few
query rows to fill the GPU, several programs share the documents, and `_finish_kernel` adds up their sums in order.

Gradient of the documents, one of three ways:

"csr" lists each document's query rows by the token that they chose, and sums the rows of each token: `winner_lists`.
"onehot" finds the rows of a token by comparing the winners of all rows with each other, for few rows, and "atomic" adds
    every row to a float32 sum in memory, in any order, which is not reproducible: `scatter`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gradients import Problem, Slot, bind_finish, joined, through_norm
from .launch import Launcher, Sequence
from .norms import inverse_norms
from .overlap import wait_for_previous_kernel
from .scatter import add_atomics, add_products, sums_are_the_gradient
from .tiles import architecture
from .winner_lists import add_lists, wants_transposed_scores

# The times beside a constant are milliseconds on an H200 in bfloat16 at d = 128, at 1024 x 1024 (32 x 180 tokens), at
# 512 x 512 (32 x 180) and at 64 x 64 (1024 x 1024), in this order, with uniform winners.

# Query rows x documents in flight in a gather, 8 of them to a warp, at d = 128: 1.23, 0.39, 0.18. The first of these
# that gives every multiprocessor `_GATHER_PROGRAMS` is taken. 32 rows: 1.22, 0.66, 0.17, but 0.047 instead of 0.052 at
# 128 x 128 (32 x 300 tokens), where (32, 4) is left of it.
_GATHERS = ((64, 1), (64, 4), (32, 4))
_GATHER_PROGRAMS = 2
# Programs per multiprocessor at which the documents of a gather are split no more, and documents of a part at least.
_SPLIT_PROGRAMS = 8
_SPLIT_DOCUMENTS = 32

# "auto" takes "onehot" where at most so many query rows choose tokens of a document, and "csr" where more do, whose
# program for every token, chosen or not, costs more than few rows do. Milliseconds of grad_D on an H200:
#   1024 documents of 300 tokens,   32 rows   csr 0.221   onehot 0.036   atomic 0.111
#                                  128 rows       0.220          0.066          0.142
#                                  512 rows       0.222          0.347          0.225
#   1024 documents of 40 tokens,    32 rows   csr 0.054   onehot 0.017   atomic 0.024
#                                  128 rows       0.055          0.055          0.039
#   128 documents of 300 tokens,  4096 rows   csr 0.060   onehot never   atomic 0.093
_FEW_ROWS = 128


Gradients = tuple[Tensor | None, Tensor | None]


def maxsim_backward(
    grad_scores: Tensor,
    queries: Tensor,
    documents: Tensor,
    winners: Tensor,
    normalize: bool,
    need_queries: bool,
    need_documents: bool,
    backward: str = "auto",
) -> Gradients:
    """Gradients [Nq, Lq, d] and [G, K, Ld, d] in the type of the embeddings; no dimension is 0.

    `grad_scores` [Nq, K] is float32 with any strides, `winners` [G, K, Nq / G * Lq] contiguous. `backward` is "auto",
    "csr", "onehot" or "atomic".
    """
    compute = bound_backward(
        queries.shape, queries.stride(), queries.dtype, queries.device, documents.shape, documents.stride(), normalize,
        backward,
    )  # fmt: skip
    return compute(grad_scores, queries, documents, winners, need_queries, need_documents)


@functools.lru_cache(maxsize=4096)
def bound_backward(
    shape: torch.Size,
    query_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    documents_shape: tuple[int, ...],
    document_strides: tuple[int, ...],
    normalize: bool,
    backward: str,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, bool, bool], Gradients]:
    """`maxsim_backward` with everything decided but the values, the layout of `grad_scores` and what is needed.

    The function returned takes the documents in any view of [G, K, Ld, d], and returns their gradient in its shape.
    """
    groups, candidates, length, size = documents_shape
    plans: dict[tuple, Callable[..., Gradients]] = {}

    def compute(
        grad_scores: Tensor,
        queries: Tensor,
        documents: Tensor,
        winners: Tensor,
        need_queries: bool,
        need_documents: bool,
    ) -> Gradients:
        key = grad_scores.stride(), winners.dtype, need_queries, need_documents
        plan = plans.get(key)
        if plan is None:
            problem = Problem(
                shape[0], shape[1], size, groups, groups * candidates, candidates, length,
                groups * candidates * length, key[0], query_strides, document_strides[:3],
                False, False, normalize, device, dtype, key[1],
            )  # fmt: skip
            plan = plans[key] = _plan(problem, need_queries, need_documents, backward)
        scales = (inverse_norms(queries), inverse_norms(documents)) if normalize else (None, None)
        return plan(grad_scores, queries, documents, *scales, None, None, winners)

    return compute


def maxsim_varlen_backward(
    grad_scores: Tensor,
    queries: Tensor,
    documents: Tensor,
    cu_seqlens: Tensor,
    winners: Tensor,
    candidates: Tensor | None,
    max_document_length: int,
    need_queries: bool,
    need_documents: bool,
    backward: str = "auto",
) -> Gradients:
    """Gradients [Nq, Lq, d] and [T, d] in the type of the embeddings; no dimension is 0, but a document may be empty.

    `queries` [Nq, Lq, d] are padded, `documents` [T, d] packed with `cu_seqlens` [Nd + 1], int32 or int64 on the
    device, the longest of them of `max_document_length` tokens. `winners` count from the start of their document:
    [Nd, Nq * Lq] for `grad_scores` [Nq, Nd], or, with `candidates` [Nq + 1] on the device (query i owns documents
    candidates[i] to candidates[i + 1]), [Nd, Lq] for `grad_scores` [Nd].
    """
    compute = _bound_varlen_backward(
        queries.shape, queries.stride(), queries.dtype, queries.device, documents.shape[0], documents.stride(0),
        cu_seqlens.shape[0] - 1, cu_seqlens.dtype, None if candidates is None else candidates.dtype,
        max_document_length, grad_scores.stride(), winners.dtype, need_queries, need_documents, backward,
    )  # fmt: skip
    return compute(grad_scores, queries, documents, None, None, cu_seqlens, candidates, winners)


@functools.lru_cache(maxsize=4096)
def _bound_varlen_backward(
    shape: torch.Size,
    query_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    n_tokens: int,
    token_stride: int,
    n_documents: int,
    cu_seqlens_dtype: torch.dtype,
    candidates_dtype: torch.dtype | None,
    max_document_length: int,
    grad_strides: tuple[int, ...],
    winners_dtype: torch.dtype,
    need_queries: bool,
    need_documents: bool,
    backward: str,
) -> Callable[..., Gradients]:
    """The plan of such a backward. Every type that a tensor of its launches may have is among the arguments."""
    has_candidates = candidates_dtype is not None
    n_queries, query_length, size = shape
    problem = Problem(
        n_queries, query_length, size, n_queries if has_candidates else 1, n_documents, n_documents,
        max_document_length, n_tokens, (0, *grad_strides) if has_candidates else grad_strides, query_strides,
        (0, 0, token_stride), True, has_candidates, False, device, dtype, winners_dtype,
    )  # fmt: skip
    return _plan(problem, need_queries, need_documents, backward)


def _plan(problem: Problem, need_queries: bool, need_documents: bool, backward: str) -> Callable[..., Gradients]:
    """A function of the tensors from `Slot.GRAD_SCORES` to `Slot.WINNERS` that returns the gradients."""
    sequence = Sequence(len(Slot))
    if backward == "auto":
        backward = auto_backward(problem)
    transposed = need_documents and backward == "csr" and wants_transposed_scores(problem)
    add_backward(problem, sequence, need_queries, need_documents, backward, transposed)
    atomic = need_documents and backward == "atomic"
    allocate = torch.empty if backward == "csr" or (atomic and not sums_are_the_gradient(problem)) else torch.zeros
    dtype, device = problem.dtype, problem.device

    def compute(grad_scores: Tensor, queries: Tensor, documents: Tensor, *rest: Tensor | None) -> Gradients:
        grad_queries = torch.empty(queries.shape, dtype=dtype, device=device) if need_queries else None
        grad_documents = allocate(documents.shape, dtype=dtype, device=device) if need_documents else None
        weights, sums = grad_scores, None
        if transposed:
            weights = grad_scores.t().contiguous()
        elif atomic:
            sums = grad_documents
            if allocate is torch.empty:
                sums = torch.zeros(documents.shape, dtype=torch.float32, device=device)
        sequence(grad_scores, queries, documents, *rest, grad_queries, grad_documents, weights, sums, None)
        return grad_queries, grad_documents

    return compute


def auto_backward(problem: Problem) -> str:
    """The way that "auto" stands for. "onehot" adds to a gradient of zeros."""
    return "onehot" if problem.rows <= _FEW_ROWS else "csr"


def add_backward(
    problem: Problem,
    sequence: Sequence,
    need_queries: bool,
    need_documents: bool,
    backward: str,
    transposed: bool = False,
) -> None:
    """Add both gradients. `transposed`: the scores' gradient in `Slot.WEIGHTS` is [Nd, Nq], and `problem`'s is not."""
    if need_documents and backward == "csr":
        strides = (1, problem.n_queries) if transposed else problem.grad_strides
        add_lists(problem._replace(grad_strides=strides), sequence, need_queries)
    elif need_documents:
        (add_products if backward == "onehot" else add_atomics)(problem, sequence)
    if need_queries:
        _add_gather(problem, sequence)


@triton.jit(
    do_not_specialize=[
        "n_rows", "query_length", "n_documents", "document_length", "n_splits", "stride_grad_query",
        "stride_grad_document",
    ]
)  # fmt: skip
def _gather_kernel(
    grad_scores_ptr, queries_ptr, documents_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, winners_ptr, grad_queries_ptr,
    n_rows, query_length, n_documents, document_length, n_splits, stride_grad_query, stride_grad_document,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DOCUMENTS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """grad_queries[row] = sum over documents of grad_score * documents[winner], [Nq * Lq, d]; the rows of one group.

    Grid: (blocks of rows x groups, splits of the documents). BLOCK_DOCUMENTS documents are in flight at once. Under
    SPLIT the sums stay in float32, [splits, Nq * Lq, d], and their Jacobian is `_finish_kernel`'s. NARROW: an offset
    within a document, or among the scores of one, fits into 32 bits.

    A row is loaded in halves: at d = 128 that is 8 threads to a row and not 16, so a thread looks up half as many rows,
    which takes as many instructions as summing them does.
    """
    wait_for_previous_kernel()
    n_blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    group = (tl.program_id(0) // n_blocks).to(tl.int64)
    first_row = tl.program_id(0) % n_blocks * BLOCK_ROWS
    slots = tl.arange(0, BLOCK_ROWS * BLOCK_DOCUMENTS)
    rows = first_row + slots % BLOCK_ROWS
    row_exists = rows < n_rows
    query = group * (n_rows // query_length) + rows // query_length
    dims = tl.arange(0, BLOCK_EMBEDDING)
    dim_exists = dims < EMBEDDING

    origin = group * n_documents
    first = origin
    last = origin + n_documents
    if HAS_CANDIDATES:
        origin = group * 0
        first = tl.load(candidates_ptr + group).to(tl.int64)
        last = tl.load(candidates_ptr + group + 1).to(tl.int64)
    share = tl.cdiv(last - first, n_splits)
    first += tl.program_id(1) * share
    count = tl.maximum(tl.minimum(share, last - first), 0).to(tl.int32)
    to_query = query * stride_grad_query
    if NARROW:
        to_query = to_query.to(tl.int32)
    HALF: tl.constexpr = BLOCK_EMBEDDING // 2
    halves = tl.arange(0, HALF)
    documents_ptr += group * stride_group
    low = tl.zeros([BLOCK_ROWS * BLOCK_DOCUMENTS, HALF], tl.float32)
    high = tl.zeros([BLOCK_ROWS * BLOCK_DOCUMENTS, HALF], tl.float32)
    for step in tl.range(0, count, BLOCK_DOCUMENTS):
        if BLOCK_DOCUMENTS == 1:
            document = first + step
            exists = row_exists
        else:
            ahead = step + slots // BLOCK_ROWS
            document = first + ahead
            exists = row_exists & (ahead < count)
        winner = tl.load(winners_ptr + document * n_rows + rows, mask=exists, other=-1).to(tl.int32)
        won = winner >= 0
        weight = tl.load(grad_scores_ptr + (document - origin) * stride_grad_document + to_query, mask=won, other=0.0)
        offset = winner * stride_document_token if NARROW else winner.to(tl.int64) * stride_document_token
        if PACKED:
            # The end of the last document, where several are in flight and some are past it.
            begin = tl.load(cu_seqlens_ptr + tl.minimum(document, last)).to(tl.int64)
            base = documents_ptr + begin * stride_document_token
        else:
            begin = document * document_length
            base = documents_ptr + (document - origin) * stride_document
        if NORMALIZE:
            weight *= tl.load(documents_scale_ptr + begin + winner, mask=won, other=0.0)
        if BLOCK_DOCUMENTS > 1:
            base = base[:, None]
        at = base + halves[None, :] + offset[:, None]
        if BLOCK_EMBEDDING == EMBEDDING:
            left = tl.load(at, mask=won[:, None], other=0.0)
            right = tl.load(at + HALF, mask=won[:, None], other=0.0)
        else:
            left = tl.load(at, mask=won[:, None] & (halves < EMBEDDING)[None, :], other=0.0)
            right = tl.load(at + HALF, mask=won[:, None] & (HALF + halves < EMBEDDING)[None, :], other=0.0)
        low += weight[:, None] * left.to(tl.float32)
        high += weight[:, None] * right.to(tl.float32)

    total = joined(low, high, BLOCK_ROWS * BLOCK_DOCUMENTS, BLOCK_EMBEDDING)
    if BLOCK_DOCUMENTS > 1:
        total = tl.sum(tl.reshape(total, [BLOCK_DOCUMENTS, BLOCK_ROWS, BLOCK_EMBEDDING]), axis=0)
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    mask = (rows < n_rows)[:, None] & dim_exists[None, :]
    if NORMALIZE and not SPLIT:
        query = group * (n_rows // query_length) + rows // query_length
        source = query * stride_query + rows % query_length * stride_query_token
        embeddings = tl.load(queries_ptr + source[:, None] + dims[None, :], mask=mask, other=0.0)
        scale = tl.load(queries_scale_ptr + group * n_rows + rows, mask=rows < n_rows, other=1.0)
        total = through_norm(total, embeddings, scale)
    offset = group * n_rows + rows
    if SPLIT:
        offset += tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // n_blocks) * n_rows
    tl.store(
        grad_queries_ptr + offset[:, None] * EMBEDDING + dims[None, :],
        total.to(grad_queries_ptr.dtype.element_ty),
        mask=mask,
    )


_gather = Launcher(_gather_kernel, follows=True)


def _add_gather(problem: Problem, sequence: Sequence) -> None:
    """Add the gradient of the queries."""
    processors = architecture(problem.device)[1]
    block = problem.block_embedding
    for slots, block_documents in _GATHERS if problem.walked > 1 else ((64, 1), (32, 1)):
        num_warps = slots // 8
        slots = max(2, min(slots, num_warps * 32 * 32 // block))
        block_documents = min(block_documents, slots)
        block_rows = slots // block_documents
        programs = triton.cdiv(problem.rows, block_rows) * problem.groups
        if programs >= _GATHER_PROGRAMS * processors and block_rows < 2 * problem.rows:
            break
    n_splits = 1
    if programs < _GATHER_PROGRAMS * processors:
        n_splits = max(1, min(_SPLIT_PROGRAMS * processors // programs, problem.walked // _SPLIT_DOCUMENTS))
    launch = _gather.bind(
        (programs, n_splits, 1),
        (problem.rows, problem.query_length, problem.per_group, problem.length, n_splits, *problem.grad_strides),
        (*problem.query_strides[:2], *problem.document_strides),
        (
            problem.size, block, block_rows, block_documents, problem.packed, problem.has_candidates,
            problem.normalize, n_splits > 1, problem.narrow_documents,
        ),
        num_warps,
        num_stages=3,
    )  # fmt: skip
    inputs = range(Slot.GRAD_SCORES, Slot.WINNERS + 1)
    if n_splits == 1:
        sequence.add(launch, *inputs, Slot.GRAD_QUERIES)
        return
    rows = problem.n_queries * problem.query_length
    parts = sequence.region(n_splits * rows * problem.size, torch.float32, at=0)
    sequence.add(launch, *inputs, parts)
    finish = bind_finish(
        problem, rows, n_splits, problem.n_queries, problem.query_length, (0, *problem.query_strides[:2])
    )
    sequence.add(finish, parts, Slot.QUERIES, Slot.QUERIES_SCALE, Slot.GRAD_QUERIES)
