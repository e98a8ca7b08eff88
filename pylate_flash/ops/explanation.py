"""Explain which implementation and kernels serve a call, by the same choices that the call makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..kernels.choice import choose, why
from ..kernels.plan import ForwardPlan, forward_plan
from ..kernels.plan_backward import BackwardPlan, SoftGradientPlan, backward_plan, soft_gradient_plan
from ..kernels.plan_operations import quantized_plan, soft_forward_plan
from ..kernels.tiles import HopperTile, Tile
from ..problem import Options, Tensors
from .checks import check_differentiation, check_layout, check_none, checked_flag, checked_problem
from .maxsim_operator import checked, with_lengths
from .operator import needs_gradient
from .quantization import QuantizedEmbeddings
from .quantized import checked_with_values, problem_of_quantized
from .ragged import call_of_lists


class Explanation(NamedTuple):
    """The implementation and plans of a call; `str` renders them in a few lines.

    Attributes
    ----------
    implementation, reason
        "triton" or "blocked", and why.
    forward
        The plan of the forward: its kernel, tile and grid, and why. None if no kernel serves the call.
    backward
        The plan of the gradient of the documents, and why. None also if no gradient is needed.
    lists
        Whether a list of documents is read in place, or why it is packed. None if documents are not a list.
    gradients
        The plan of the gradients of soft MaxSim. None for other calls, and if no gradient is needed.
    """

    implementation: str
    reason: str
    forward: ForwardPlan | None
    backward: BackwardPlan | None
    lists: str | None = None
    gradients: SoftGradientPlan | None = None

    def __str__(self) -> str:
        lines = [f"{self.implementation}: {self.reason}"]
        if self.forward is not None:
            plan = self.forward
            lines.append(f"forward: the {plan.kernel} kernel, because {plan.reason}; tile: {_words(plan.tile)}")
        if self.lists is not None:
            lines.append(f"list of documents: {self.lists}")
        if self.backward is not None:
            lines.append(f"gradient of the documents: {self.backward.kernel}, because {self.backward.reason}")
        if self.gradients is not None:
            tiles = f"documents: {_words(self.gradients.documents)}; queries: {_words(self.gradients.queries)}"
            lines.append(f"gradients: probabilities computed by each of both; tile of {tiles}")
        return "\n".join(lines)


def _words(tile: Tile | HopperTile) -> str:
    return ", ".join(f"{name} {value}" for name, value in tile._asdict().items())


def explain(
    queries: Tensor | Sequence[Tensor | np.ndarray],
    documents: Tensor | QuantizedEmbeddings | Sequence[Tensor | np.ndarray],
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    queries_cu_seqlens: Tensor | None = None,
    documents_cu_seqlens: Tensor | None = None,
    candidates_cu_seqlens: Tensor | None = None,
    max_query_length: int | None = None,
    max_document_length: int | None = None,
    normalize: bool = False,
    masking: str = "exclude",
    quantize_queries: bool = True,
    implementation: str = "auto",
    soft: bool = False,
) -> Explanation:
    """Explain what serves a call, and why: of `maxsim`, with boundaries `maxsim_varlen`, with lists `maxsim_ragged`.

    It computes nothing, but packs lists as the call does.

    Parameters
    ----------
    queries, documents
        Padded as in `maxsim`, packed as in `maxsim_varlen`, lists as in `maxsim_ragged`; documents may be quantized.
        If one requires a gradient and grad mode is enabled, the backward is explained too.
    queries_mask, documents_mask
        As in `maxsim`, for padded tokens.
    queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens, max_query_length, max_document_length
        As in `maxsim_varlen`, for packed tokens; this synchronizes with a GPU where that call does. Lists of documents
        allow only `candidates_cu_seqlens` of these, and only `queries_mask` of the masks.
    normalize, masking, quantize_queries, implementation
        As in `maxsim`.
    soft
        Explain `soft_maxsim`, or with boundaries `soft_maxsim_varlen`; they take neither lists nor quantized documents.

    Returns
    -------
    Explanation
        The implementation, the plans of its kernels, and the reasons; printable.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As the call does, except that values of masks are not checked.

    Examples
    --------
    >>> explain(torch.zeros(2, 3, 8), torch.zeros(4, 5, 8)).implementation
    'blocked'
    """
    options = Options(normalize=checked_flag("normalize", normalize), masking=masking, implementation=implementation)
    if checked_flag("soft", soft) and not isinstance(documents, Tensor):
        raise TypeError(f"documents must be a torch.Tensor where soft is True, got {type(documents).__name__}")
    lists = offsets = None
    if not isinstance(documents, Tensor | QuantizedEmbeddings):
        check_none(
            "documents are a list",
            documents_mask=documents_mask,
            queries_cu_seqlens=queries_cu_seqlens,
            documents_cu_seqlens=documents_cu_seqlens,
            max_query_length=max_query_length,
            max_document_length=max_document_length,
        )
        if isinstance(documents, str) or not isinstance(documents, Sequence):
            raise TypeError(
                "documents must be a torch.Tensor, QuantizedEmbeddings, or a list of tensors or arrays [L_i, d], got "
                f"{type(documents).__name__}"
            )
        result = call_of_lists("explain", queries, documents, queries_mask, candidates_cu_seqlens, options)
        tensors, options, offsets, reason, _ = result
        lists = "read where they lie" if reason is None else f"packed, because {reason}"
    elif not isinstance(queries, Tensor):
        raise TypeError(f"queries must be a torch.Tensor where documents are one, got {type(queries).__name__}")
    else:
        values = documents.values if isinstance(documents, QuantizedEmbeddings) else documents
        boundaries = queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens
        tensors = Tensors(queries, values, queries_mask, documents_mask, *boundaries)
        check_layout(tensors, max_query_length, max_document_length)
        if documents_cu_seqlens is not None:
            options = with_lengths(tensors, options, max_query_length, max_document_length)
    check_differentiation("explain", *tensors[:2])
    if isinstance(documents, QuantizedEmbeddings):
        tensors, options = checked_with_values("explain", tensors, options)
        problem = problem_of_quantized(tensors, options, checked_flag("quantize_queries", quantize_queries))
    else:
        tensors, options = checked(tensors, options)
        with_gradients = needs_gradient(*tensors[:2])
        problem = checked_problem(tensors, options, with_gradients and not soft, offsets)
    choice_args = implementation, problem.device, problem.deciding_dtype, problem.size
    explanation = Explanation(choose(*choice_args), why(*choice_args), None, None, lists)
    if explanation.implementation == "blocked" or problem.is_empty:
        return explanation
    if soft:
        gradients = soft_gradient_plan(problem) if with_gradients else None
        return explanation._replace(forward=soft_forward_plan(problem), gradients=gradients)
    return explanation._replace(
        forward=forward_plan(problem) if problem.kind.quantized is None else quantized_plan(problem),
        backward=backward_plan(problem) if problem.with_argmax else None,
    )
