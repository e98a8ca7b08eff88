"""MaxSim, the score of late interaction: for every query token its best document token, summed over the query.

    score[i, j] = sum over active s of  max over active t of  <queries[i, s], documents[j, t]>

(Khattab and Zaharia, "ColBERT", SIGIR 2020.) `maxsim_reference` is the definition, in plain torch. `maxsim` and
`maxsim_pairs` compute the same without its [Nq, Nd, Lq, Ld] tensor: by Triton kernels on CUDA (`kernels.forward`), and
in blocks of plain torch elsewhere (`ops.blocked`).

Everything below the definition works in one grouped layout: `queries` [Nq, Lq, d] and `documents` [G, K, Ld, d], with
G = 1 where all queries meet the same K documents and G = Nq where each query has K of its own. The gradient of a
maximum flows to the token that attains it, so the forward keeps the winners [G, K, Nq / G * Lq] (-1: no gradient), and
the backward moves rows between winners and query tokens.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .blocked import blocked_backward, blocked_forward
from .checks import (
    check_choice,
    check_differentiation,
    check_embeddings,
    check_mask,
    check_same,
    no_second_derivative,
)
from .dispatch import BACKWARDS, IMPLEMENTATIONS, check_backward, choose
from .norms import scales

REDUCTIONS = ("sum", "mean")
MASKINGS = ("exclude", "zero")

_QUERIES = {3: "[Nq, Lq, d]"}
_DOCUMENTS = {3: "[Nd, Ld, d]", 4: "[Nq, K, Ld, d]"}


def maxsim_reference(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
) -> Tensor:
    """The definition of `maxsim`, in plain torch: builds the whole similarity tensor, and autograd differentiates it.

    Arguments and result are those of `maxsim`, except that it checks nothing, and computes in, and returns, the type
    that the inputs widen to: float64 for float64 inputs, else float32. Products are taken in that type.
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    # One group of candidates for all queries, [1, Nd, Ld, d], or one for each, [Nq, K, Ld, d].
    groups = documents if documents.dim() == 4 else documents.unsqueeze(0)
    on = queries.new_ones(queries.shape[:-1]) if queries_mask is None else queries_mask
    there = groups.new_ones(groups.shape[:-1]) if documents_mask is None else documents_mask.view(groups.shape[:-1])
    on, there = on.bool(), there.bool()
    # What a masked token is, a NaN even, does not matter.
    queries = queries.to(wide).masked_fill(~on.unsqueeze(-1), 0.0)
    groups = groups.to(wide).masked_fill(~there.unsqueeze(-1), 0.0)
    if normalize:
        queries, groups = F.normalize(queries, dim=-1), F.normalize(groups, dim=-1)
    similarities = queries.unsqueeze(1) @ groups.transpose(-1, -2)
    similarities = similarities.masked_fill(~there.unsqueeze(-2), 0.0 if masking == "zero" else -torch.inf)
    # One more token, which never wins, as there is no maximum of none.
    best = F.pad(similarities, (0, 1), value=-torch.inf).max(dim=-1).values
    empty = ~there.any(dim=-1)
    best = best.masked_fill(empty.unsqueeze(-1) | ~on.unsqueeze(1), 0.0)
    scores = best.sum(dim=-1)
    if reduction == "mean":
        scores = scores / on.sum(dim=-1, keepdim=True).clamp(min=1)
    return scores.masked_fill(empty, empty_score)


def maxsim(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    implementation: str = "auto",
    backward: str = "auto",
) -> Tensor:
    """MaxSim scores of queries against documents, differentiable, in memory that does not grow with Lq * Ld.

    Parameters
    ----------
    queries
        [Nq, Lq, d], float16, bfloat16, float32 or float64. Under autocast, the inputs take the autocast type.
    documents
        [Nd, Ld, d]: every query meets every document. [Nq, K, Ld, d]: each query meets its own K candidates.
    queries_mask
        [Nq, Lq], bool or 0/1 of any dtype, 1 where a token is active; active tokens need not be a prefix. None: all.
        Other values are an error on the CPU. On a GPU, where to look would be to wait, they count as 1.
    documents_mask
        [Nd, Ld] or [Nq, K, Ld], likewise.
    normalize
        Divide every embedding by its Euclidean norm (at least 1e-12) first.
    reduction
        "sum" over the active query tokens, or "mean": divided by their number (MeanMaxSim).
    masking
        "exclude": a masked document token never wins. "zero": its similarity counts as 0, as in PyLate's torch scorer,
        so that a query token's best is at least 0 where the document has a masked token; where that 0 wins, no gradient
        flows.
    empty_score
        Score of a document with no active token: 0 as in PyLate, or a large negative number to rank it last. A query
        with no active token scores 0 against every other document.
    implementation
        "auto", or by name: "triton" (CUDA, compute capability >= 8.0, at most 4096 dimensions, no float64) or
        "blocked" (plain torch in blocks).
    backward
        How the kernels sum the gradient of the documents: "auto", or by name: "csr" (lists of each token's rows),
        "onehot" (winners compared, for few rows) or "atomic" (atomic additions, and float32 sums of the documents'
        size: not reproducible). "blocked" has one way of its own, which "auto" and "csr" name.

    Returns
    -------
    Tensor
        float32, [Nq, Nd] or [Nq, K]. Half inputs multiply in their own type and accumulate in float32; float32 inputs
        follow `torch.get_float32_matmul_precision()`; float64 inputs compute in float64. NaN in an active token gives
        NaN, and infinities behave as in a product of torch. Ties go to the lowest token index, and the gradient flows
        to the winner only. Scores and gradients are bitwise reproducible, except under backward="atomic".

    Raises
    ------
    TypeError
        If an argument is no tensor, of another dtype than named above, or the two dtypes differ.
    ValueError
        If shapes, devices or embedding sizes do not fit together, a mask holds other values than 0 and 1, an option is
        none of its choices, or implementation="triton" cannot take the input.
    RuntimeError
        If a gradient is needed, backward="atomic" and `torch.use_deterministic_algorithms(True)` is set; if the call is
        differentiated by `torch.func` or in forward mode.

    Examples
    --------
    >>> import torch
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, -1.0], [-1.0, 0.0]]])
    >>> maxsim(queries, documents)
    tensor([[1.5000, 0.0000]])
    """
    if queries_mask is None and documents_mask is None and reduction == "sum" and backward == "auto":
        decided = _decided(queries, documents, normalize, masking, implementation)
        if decided is not None:
            if decided.backward is None:
                return decided.forward(queries, documents)[0]
            return _Maxsim.apply(queries, documents, decided)
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    check_choice("backward", backward, BACKWARDS)
    queries, documents, queries_mask, documents_mask = _checked(
        queries, documents, queries_mask, documents_mask, reduction, masking
    )
    masks = queries_mask, documents_mask if documents_mask is None else _grouped(documents_mask, 3)
    options = normalize, masking == "zero"
    with_winners = needs_gradient(queries, documents)
    # The dispatcher takes longer than a small kernel; what does not need it goes past it.
    if not _is_plain(queries, documents):
        grouped = _grouped(documents)
        scores = _maxsim(queries, grouped, *masks, *options, with_winners, implementation, backward)[0]
    elif with_winners:
        scores = _Maxsim.apply(queries, documents, None, *masks, *options, implementation, backward)
    else:
        scores = _compute(queries, _grouped(documents), *masks, *options, False, implementation, backward)[0]
    return _finish(scores, queries, documents, queries_mask, documents_mask, reduction, empty_score)


def maxsim_pairs(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    implementation: str = "auto",
    backward: str = "auto",
) -> Tensor:
    """MaxSim score of every query with the document of the same index: the diagonal of `maxsim`.

    Parameters
    ----------
    queries
        [N, Lq, d].
    documents
        [N, Ld, d].
    queries_mask, documents_mask
        [N, Lq] and [N, Ld], or None.
    normalize, reduction, masking, empty_score, implementation, backward
        As in `maxsim`.

    Returns
    -------
    Tensor
        float32, [N].

    Raises
    ------
    TypeError, ValueError
        As in `maxsim`, and if there are not as many documents as queries.
    """
    check_embeddings("queries", queries, {3: "[N, Lq, d]"})
    check_embeddings("documents", documents, {3: "[N, Ld, d]"})
    if queries.shape[0] != documents.shape[0]:
        raise ValueError(
            f"documents must have one document per query, {queries.shape[0]}, got {documents.shape[0]} documents"
        )
    documents_mask = check_mask("documents_mask", documents_mask, documents)
    scores = maxsim(
        queries,
        documents.unsqueeze(1),
        queries_mask,
        None if documents_mask is None else documents_mask.unsqueeze(1),
        normalize=normalize,
        reduction=reduction,
        masking=masking,
        empty_score=empty_score,
        implementation=implementation,
        backward=backward,
    )
    return scores.squeeze(1)


def _checked(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    reduction: str,
    masking: str,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The four tensors after every check, in the autocast type under autocast, with bool masks."""
    check_embeddings("queries", queries, _QUERIES)
    check_embeddings("documents", documents, _DOCUMENTS)
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("masking", masking, MASKINGS)
    check_differentiation("maxsim", queries, documents)
    queries, documents = _autocast(queries, documents)
    check_same(queries, documents)
    if documents.dim() == 4 and documents.shape[0] != queries.shape[0]:
        raise ValueError(
            f"documents of shape [Nq, K, Ld, d] must have one row of candidates per query, Nq = {queries.shape[0]}, "
            f"got {list(documents.shape)}"
        )
    return (
        queries,
        documents,
        check_mask("queries_mask", queries_mask, queries),
        check_mask("documents_mask", documents_mask, documents),
    )


def _autocast(queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the autocast type under autocast, which leaves float64 alone, as for torch's own operations."""
    device = queries.device.type
    if queries.is_meta or not torch.is_autocast_enabled(device):
        return queries, documents
    autocast = torch.get_autocast_dtype(device)
    return (
        queries if queries.dtype == torch.float64 else queries.to(autocast),
        documents if documents.dtype == torch.float64 else documents.to(autocast),
    )


def _grouped(embeddings: Tensor, dims: int = 4) -> Tensor:
    """Documents, or their mask of one dimension less, in the grouped layout."""
    return embeddings if embeddings.dim() == dims else embeddings.unsqueeze(0)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether the result of an operation on these tensors is to be differentiated."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


class _Decided(NamedTuple):
    """What computes scores and winners, and, where a gradient is needed, the gradients, as `kernels` has decided.

    And the options of the operator's backward that this was decided for.
    """

    forward: Callable[..., tuple[Tensor, Tensor | None]]
    backward: Callable[..., tuple[Tensor | None, Tensor | None]] | None
    options: tuple[bool, str, str]


def _decided(queries: Tensor, documents: Tensor, normalize: bool, masking: str, implementation: str) -> _Decided | None:
    """The launches that serve such tensors, if there is nothing else to a call on them.

    The checks take twice as long as a launch and depend on no value, so they are made once for tensors of a kind.
    """
    if not (goes_straight_to_the_kernel(queries, documents) and type(masking) is type(implementation) is str):
        return None
    return _launches_of(
        queries.shape, queries.stride(), queries.dtype, queries.device,
        documents.shape, documents.stride(), documents.dtype, documents.device,
        documents.data_ptr() % 16 == 0, needs_gradient(queries, documents), bool(normalize), masking,
        implementation,
    )  # fmt: skip


def goes_straight_to_the_kernel(queries: Tensor, documents: Tensor) -> bool:
    """Whether a call on these tensors, if they fit together, is a launch on the current device and nothing more."""
    return not torch.is_autocast_enabled("cuda") and is_for_the_kernel(queries, documents)


def is_for_the_kernel(queries: Tensor, documents: Tensor) -> bool:
    """The same of tensors that have the autocast type already."""
    return (
        type(queries) is Tensor
        and type(documents) is Tensor
        and queries.dtype is not torch.float32
        and queries.is_cuda
        and _is_plain(queries, documents)
        and _is_current(queries)
    )


def _is_current(tensor: Tensor) -> bool:
    """Whether the current device is that of a CUDA tensor: `torch.cuda.current_device`, less what it first looks at."""
    return torch._C._cuda_getDevice() == tensor.get_device()


@functools.lru_cache(maxsize=4096)
def _launches_of(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    documents_shape: torch.Size,
    documents_strides: tuple[int, ...],
    documents_dtype: torch.dtype,
    documents_device: torch.device,
    aligned: bool,
    with_winners: bool,
    normalize: bool,
    masking: str,
    implementation: str,
) -> _Decided | None:
    """The kernels' launches for such tensors, or None where an error is due or the kernels do not serve them."""
    in_batch = len(documents_shape) == 3
    if (
        len(shape) != 3
        or len(documents_shape) not in _DOCUMENTS
        or not (in_batch or documents_shape[0] == shape[0])
        or documents_dtype != dtype
        or documents_device != device
        or masking not in MASKINGS
        or not are_halves_of_one_size(shape, strides, dtype, documents_shape, documents_strides)
        or implementation not in ("auto", "triton")
        or choose(implementation, device, dtype, shape[-1]) != "triton"
    ):
        return None
    if in_batch:
        documents_shape, documents_strides = (1, *documents_shape), (0, *documents_strides)  # type: ignore[assignment]
    layout = (shape, strides, dtype, device, documents_shape, documents_strides)
    return _Decided(
        kernels().bound_maxsim(
            *layout, aligned, False, False, with_winners, normalize, False, product_precision(dtype)
        ),
        kernels().bound_backward(*layout, normalize, "auto") if with_winners else None,
        (normalize, implementation, "auto"),
    )


def are_halves_of_one_size(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    documents_shape: torch.Size,
    documents_strides: tuple[int, ...],
) -> bool:
    """Whether such embeddings are of half precision and of one size, with contiguous rows."""
    return (
        dtype in (torch.float16, torch.bfloat16)
        and documents_shape[-1] == shape[-1]
        and strides[-1] == 1
        and documents_strides[-1] == 1
    )


def _is_plain(queries: Tensor, documents: Tensor) -> bool:
    """Whether nothing needs the operator: no compiler, subclass, mode, transform, tangent, empty or meta tensor."""
    return (
        type(queries) is Tensor
        and type(documents) is Tensor
        and not queries.is_meta
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and queries.numel() > 0
        and documents.numel() > 0
    )


def _finish(
    scores: Tensor,
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    reduction: str,
    empty_score: float,
) -> Tensor:
    """The mean over active query tokens, and the score of empty documents, from sums [Nq, Nd or K]."""
    if reduction == "mean":
        if queries_mask is None:
            scores = scores / max(1, queries.shape[1])
        else:
            scores = scores / queries_mask.sum(dim=-1, keepdim=True).clamp(min=1)
    if empty_score != 0.0:
        if documents.shape[-2] == 0:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool), empty_score)
        elif documents_mask is not None:
            scores = scores.masked_fill(~documents_mask.any(dim=-1), empty_score)
    return scores


# The operator below takes the grouped layout. Its schema is written out, because inference from annotations costs more
# host time per call than the launch of a kernel.
_LIBRARY = torch.library.Library("pylate_flash", "DEF")
_LIBRARY.define(
    "maxsim(Tensor queries, Tensor documents, Tensor? queries_mask, Tensor? documents_mask, bool normalize, "
    "bool zero_masked, bool with_winners, str implementation, str backward) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "maxsim_backward(Tensor grad_scores, Tensor queries, Tensor documents, Tensor winners, bool normalize, "
    "bool need_queries, bool need_documents, str implementation, str backward) -> (Tensor, Tensor)"
)
_maxsim = torch.ops.pylate_flash.maxsim.default
_maxsim_backward = torch.ops.pylate_flash.maxsim_backward.default


def _forward(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    normalize: bool,
    zero_masked: bool,
    with_winners: bool,
    implementation: str,
    backward: str,
) -> tuple[Tensor, Tensor]:
    """Scores [Nq, K] float32, and winners [G, K, Nq / G * Lq], or an empty tensor unless asked for."""
    if with_winners:
        check_backward(backward, choose(implementation, queries.device, queries.dtype, queries.shape[-1]))
    if 0 in queries.shape or 0 in documents.shape:
        choose(implementation, queries.device, queries.dtype, queries.shape[-1])
        scores, winners = _forward_shapes(queries, documents, with_winners)
        return scores.zero_(), winners.fill_(-1)
    scores, found = _compute(
        queries, documents, queries_mask, documents_mask, normalize, zero_masked, with_winners, implementation, backward
    )
    if found is None:
        return scores, queries.new_empty(0, dtype=torch.int16)
    return scores, found.to(_winners_dtype(documents.shape[2]))


def _compute(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    normalize: bool,
    zero_masked: bool,
    with_winners: bool,
    implementation: str,
    backward: str,
) -> tuple[Tensor, Tensor | None]:
    """Scores [Nq, K] float32 and, if asked for, winners [G, K, Nq / G * Lq], where no dimension is 0.

    `backward` is the operator's, and of no concern to its forward.
    """
    if choose(implementation, queries.device, queries.dtype, queries.shape[-1]) == "triton":
        with kernels().on_device(queries):
            return kernels().maxsim_forward(
                rows_contiguous(queries),
                rows_contiguous(documents),
                None if queries_mask is None else queries_mask.contiguous(),
                None if documents_mask is None else documents_mask.contiguous(),
                normalize,
                zero_masked,
                with_winners,
                product_precision(queries.dtype),
            )
    # Under autocast the inputs have the autocast type already; the products inside must not be rounded to it.
    with torch.autocast(queries.device.type, enabled=False):
        queries_scale, documents_scale = scales(queries, documents, normalize)
        scores, winners = blocked_forward(
            queries,
            documents,
            queries_mask,
            documents_mask,
            queries_scale,
            documents_scale,
            zero_masked,
            with_winners,
        )
    return scores.float(), winners


@functools.cache
def kernels() -> ModuleType:
    """The package of kernels, imported when first needed, because Triton is not everywhere."""
    return importlib.import_module("pylate_flash.kernels")


def _backward(
    grad_scores: Tensor,
    queries: Tensor,
    documents: Tensor,
    winners: Tensor,
    normalize: bool,
    need_queries: bool,
    need_documents: bool,
    implementation: str,
    backward: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and documents, in their type; an empty tensor for one that is not needed."""
    implementation = choose(implementation, queries.device, queries.dtype, queries.shape[-1])
    check_backward(backward, implementation)
    empty = queries.new_empty(0), documents.new_empty(0)
    if 0 in queries.shape or 0 in documents.shape:
        return (
            torch.zeros_like(queries, memory_format=torch.contiguous_format) if need_queries else empty[0],
            torch.zeros_like(documents, memory_format=torch.contiguous_format) if need_documents else empty[1],
        )
    if implementation == "triton":
        with kernels().on_device(queries):
            grad_queries, grad_documents = kernels().maxsim_backward(
                grad_scores,
                rows_contiguous(queries),
                rows_contiguous(documents),
                winners,
                normalize,
                need_queries,
                need_documents,
                backward,
            )
    else:
        queries_scale, documents_scale = scales(queries, documents, normalize)
        grad_queries, grad_documents = blocked_backward(
            grad_scores.contiguous(),
            queries,
            documents,
            winners,
            queries_scale,
            documents_scale,
            need_queries,
            need_documents,
        )
    return empty[0] if grad_queries is None else grad_queries, empty[1] if grad_documents is None else grad_documents


def rows_contiguous(embeddings: Tensor) -> Tensor:
    """The embeddings with contiguous rows, which is all that the kernels need."""
    return embeddings if embeddings.stride(-1) == 1 else embeddings.contiguous()


def product_precision(dtype: torch.dtype) -> str:
    """Triton's name for `torch.get_float32_matmul_precision()`; half inputs are multiplied exactly either way."""
    return "ieee" if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest" else "tf32"


def _winners_dtype(document_length: int) -> torch.dtype:
    return torch.int16 if document_length <= 32767 else torch.int32


def _forward_shapes(queries: Tensor, documents: Tensor, with_winners: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised outputs of the forward."""
    groups, candidates, length, _ = documents.shape
    scores = queries.new_empty(queries.shape[0], candidates, dtype=torch.float32)
    if not with_winners:
        return scores, queries.new_empty(0, dtype=torch.int16)
    # Without queries there are no rows, and G may be 0 as well.
    rows = queries.shape[0] // groups * queries.shape[1] if groups else 0
    return scores, queries.new_empty(groups, candidates, rows, dtype=_winners_dtype(length))


def _backward_shapes(
    grad_scores, queries, documents, winners, normalize, need_queries, need_documents, implementation, backward
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(queries, memory_format=torch.contiguous_format) if need_queries else queries.new_empty(0),
        torch.empty_like(documents, memory_format=torch.contiguous_format) if need_documents else queries.new_empty(0),
    )


def _save_for_backward(ctx, inputs, output) -> None:
    queries, documents, _, _, normalize, _, with_winners, implementation, backward = inputs
    if not with_winners and (queries.requires_grad or documents.requires_grad):
        raise RuntimeError("pylate_flash::maxsim: a gradient needs with_winners=True")
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(queries, documents, output[1])
    ctx.normalize = normalize
    ctx.implementation = implementation
    ctx.backward = backward


def _gradient(ctx, grad_scores, _):
    queries, documents, winners = ctx.saved_tensors
    need_queries, need_documents = ctx.needs_input_grad[:2]
    grad_queries, grad_documents = _maxsim_backward(
        grad_scores,
        queries,
        documents,
        winners,
        ctx.normalize,
        need_queries,
        need_documents,
        ctx.implementation,
        ctx.backward,
    )
    return (
        grad_queries if need_queries else None,
        grad_documents if need_documents else None,
        *(None for _ in range(7)),
    )


class _Maxsim(torch.autograd.Function):
    """What the operator does to plain tensors, without the dispatcher between.

    `decided` is what there is to it if that was decided before; else the operator's arguments follow, but documents are
    not in the grouped layout.
    """

    @staticmethod
    def forward(
        ctx, queries, documents, decided,
        queries_mask=None, documents_mask=None, normalize=False, zero_masked=False, implementation="auto",
        backward="auto",
    ):  # fmt: skip
        if decided is not None:
            scores, winners = decided.forward(queries, documents)
            ctx.options = decided.options
        else:
            scores, winners = _forward(
                queries, _grouped(documents), queries_mask, documents_mask, normalize, zero_masked, True,
                implementation, backward,
            )  # fmt: skip
            ctx.options = normalize, implementation, backward
        ctx.save_for_backward(queries, documents, winners)
        ctx.decided = decided
        return scores

    @staticmethod
    def backward(ctx, grad_scores):
        queries, documents, winners = ctx.saved_tensors
        gradients = gradients_of_scores(
            grad_scores, queries, documents, winners, ctx.decided, ctx.options, ctx.needs_input_grad
        )
        return *gradients, *_NO_GRADIENTS


# Of the arguments of `_Maxsim` after the documents; more than were given are not looked at.
_NO_GRADIENTS = (None,) * 7


def gradients_of_scores(
    grad_scores: Tensor,
    queries: Tensor,
    documents: Tensor,
    winners: Tensor,
    decided: _Decided | None,
    options: tuple[bool, str, str],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of queries and documents, in the backward of a node that was given both first.

    `decided` and `options` are those of its forward, and `needs` tells of every input whether its gradient is needed.
    """
    need_queries, need_documents = needs[:2]
    if decided is not None and _is_current(queries) and not torch.is_grad_enabled():
        return decided.backward(grad_scores, queries, documents, winners, need_queries, need_documents)  # type: ignore[misc]
    # A graph of the backward is asked for: the operator has one, which says that there is no second derivative.
    compute = _maxsim_backward if torch.is_grad_enabled() else _backward
    grad_queries, grad_documents = compute(
        grad_scores, queries, _grouped(documents), winners, options[0], need_queries, need_documents, *options[1:]
    )
    return (
        grad_queries if need_queries else None,
        grad_documents.view(documents.shape) if need_documents else None,
    )


_LIBRARY.impl("maxsim", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("maxsim_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "pylate_flash::maxsim",
    lambda queries, documents, queries_mask, documents_mask, normalize, zero_masked, with_winners, *names: (
        _forward_shapes(queries, documents, with_winners)
    ),
)
torch.library.register_fake("pylate_flash::maxsim_backward", _backward_shapes)
torch.library.register_autograd("pylate_flash::maxsim", _gradient, setup_context=_save_for_backward)
torch.library.register_autograd("pylate_flash::maxsim_backward", no_second_derivative("maxsim"))
