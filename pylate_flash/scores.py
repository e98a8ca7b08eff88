"""PyLate's scoring functions with the fused MaxSim as one of their backends.

    from pylate_flash import scores                     # instead of: from pylate import scores

    scores.colbert_scores(queries, documents)            # fused
    scores.colbert_scores(queries, documents, backend="torch")  # PyLate's own

The arguments, the shapes and the meaning of the scores are PyLate's; what is computed is `pylate_flash.ops`. Scores
are float32 whatever the embeddings' type, and a masked document token does not take part (see `masking`).

`backend` is one of

- `"pylate_flash"`: this package. An input that it cannot take is an error.
- `"torch"`, `"flash"`, `"lik"`: PyLate's own code with that backend, its masking included; `masking` has no say there.
- `"auto"`: this package, on any device. Embeddings of an integer type are left to PyLate's `"auto"`.
- None: what `use_scorer` set, else the environment variable `PYLATE_SCORES_BACKEND`, else `"auto"`.
"""

from __future__ import annotations

from . import _needs_pylate  # noqa: F401

# isort: split
import functools
import logging
from contextlib import suppress
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from pylate import scores as pylate_scores
from pylate.utils import convert_to_tensor
from torch import Tensor

from ._switches import backend_in_force, check_backend, check_masking, masking_in_force
from .hosts.pylate import original, original_xtr
from .ops import maxsim, maxsim_pairwise, maxsim_ragged_pairwise
from .ops import xtr_scores as scores_by_xtr
from .ops.checks import FLOATING
from .ops.staging import concatenate

__all__ = [
    "ColBERTScores",
    "XTRKDScores",
    "XTRScores",
    "colbert_kd_scores",
    "colbert_scores",
    "colbert_scores_pairwise",
    "scorer_of",
    "xtr_kd_scores",
    "xtr_scores",
]

logger = logging.getLogger(__name__)

Embeddings = Tensor | np.ndarray | list


def colbert_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    backend: str | None = None,
    *,
    masking: str | None = None,
) -> Tensor:
    """Score every query against every document: for each query token its best document token, summed.

    Parameters
    ----------
    queries_embeddings
        [Nq, Lq, d], a tensor, an array, or a list of equally long ones.
    documents_embeddings
        [Nd, Ld, d], likewise. If the two types differ, both are promoted to their common type.
    queries_mask
        [Nq, Lq], bool or 0/1: tokens with 0 add nothing; or floating weights, as in `maxsim`. None: all count.
    documents_mask
        [Nd, Ld], bool or 0/1. None: all count.
    backend
        See the module's description.
    masking
        `"exclude"`: a masked document token never wins the max. `"zero"`: its similarity counts as 0, as in PyLate's
        torch scorer. None: as set by `use_scorer` or `register`, else `"exclude"`.

    Returns
    -------
    Tensor
        [Nq, Nd], float32 (PyLate's own backends choose their own type), differentiable.

    Raises
    ------
    ValueError, TypeError
        If a shape, a device or a type does not fit, or `backend` or `masking` is unknown.

    Examples
    --------
    >>> import torch
    >>> queries = torch.tensor([[[1.0], [2.0]]])
    >>> documents = torch.tensor([[[1.0], [3.0]], [[-1.0], [-2.0]]])
    >>> colbert_scores(queries, documents)
    tensor([[ 9., -3.]])
    """
    return _scores(
        "colbert_scores",
        "[Nd, Ld, d]",
        queries_embeddings,
        documents_embeddings,
        queries_mask,
        documents_mask,
        backend,
        masking,
    )


def colbert_scores_pairwise(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    backend: str | None = None,
    *,
    masking: str | None = None,
) -> Tensor:
    """Score query i against document i, for each i. Padded batches and lists of different lengths are one call alike.

    Parameters
    ----------
    queries_embeddings
        [N, Lq, d], or a list of N [Lq_i, d]: tensors, arrays or nested lists.
    documents_embeddings
        [N, Ld, d], or a list of N [Ld_i, d], likewise. A document without tokens scores 0.
    backend
        See the module's description.
    masking
        Accepted as by the other scoring functions. Pairs have no masks, so that both maskings agree.

    Returns
    -------
    Tensor
        [N], float32 (PyLate's own backends choose their own type), differentiable.

    Raises
    ------
    ValueError, TypeError
        If a shape, a device or a type does not fit, or `backend` or `masking` is unknown.

    Examples
    --------
    >>> import torch
    >>> queries = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
    >>> documents = [torch.tensor([[1.0]]), torch.tensor([[1.0], [2.0]])]
    >>> colbert_scores_pairwise(queries, documents)
    tensor([3., 6.])
    """
    backend = backend_in_force(backend)
    masking_in_force(masking)
    if backend not in ("auto", "pylate_flash"):
        return original("colbert_scores_pairwise")(queries_embeddings, documents_embeddings, backend=backend)
    if len(queries_embeddings) != len(documents_embeddings):
        raise ValueError(
            "documents_embeddings must hold one document per query, "
            f"{len(queries_embeddings)}, got {len(documents_embeddings)}"
        )
    if not isinstance(queries_embeddings, list) and not isinstance(documents_embeddings, list):
        queries = _tensor("queries_embeddings", queries_embeddings, "[N, Lq, d]")
        documents = _tensor("documents_embeddings", documents_embeddings, "[N, Ld, d]")
        if backend == "auto" and left_to_pylate(queries, documents):
            return original("colbert_scores_pairwise")(queries, documents, backend="auto")
        return maxsim_pairwise(*_promoted(queries, documents))

    queries_list = tokens_of(queries_embeddings, "queries_embeddings")
    documents_list = tokens_of(documents_embeddings, "documents_embeddings")
    if not queries_list:
        return torch.zeros(0)
    queries_list, documents_list = of_one_type(queries_list, documents_list)
    if backend == "auto" and left_to_pylate(queries_list[0], documents_list[0]):
        return original("colbert_scores_pairwise")(queries_list, documents_list, backend="auto")
    return maxsim_ragged_pairwise(queries_list, documents_list)


def colbert_kd_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    backend: str | None = None,
    *,
    masking: str | None = None,
) -> Tensor:
    """Score every query against its own candidates, as knowledge distillation does.

    Parameters
    ----------
    queries_embeddings
        [Nq, Lq, d], a tensor, an array, or a list of equally long ones.
    documents_embeddings
        [Nq, K, Ld, d], likewise: the K candidates of each query.
    queries_mask
        [Nq, Lq], bool or 0/1: tokens with 0 add nothing; or floating weights, as in `maxsim`. None: all count.
    documents_mask
        [Nq, K, Ld], bool or 0/1. None: all count.
    backend
        See the module's description.
    masking
        As in `colbert_scores`.

    Returns
    -------
    Tensor
        [Nq, K], float32 (PyLate's own backends choose their own type), differentiable.

    Raises
    ------
    ValueError, TypeError
        If a shape, a device or a type does not fit, or `backend` or `masking` is unknown.
    """
    return _scores(
        "colbert_kd_scores",
        "[Nq, K, Ld, d]",
        queries_embeddings,
        documents_embeddings,
        queries_mask,
        documents_mask,
        backend,
        masking,
    )


class ColBERTScores(pylate_scores.ColBERTScores):
    """The score metric of PyLate's contrastive losses, in one fused call instead of one per document group.

    Parameters
    ----------
    backend
        See the module's description. None: decided at each call.
    masking
        As in `colbert_scores`. None: decided at each call.

    Raises
    ------
    ValueError
        If `backend` or `masking` is unknown.
    """

    def __init__(self, backend: str | None = None, masking: str | None = None) -> None:
        self.backend = None if backend is None else check_backend(backend)
        self.masking = None if masking is None else check_masking(masking)

    def __call__(
        self,
        queries_embeddings: Embeddings,
        documents_embeddings: Embeddings,
        queries_mask: Tensor | None = None,
        documents_mask: Tensor | None = None,
        backend: str | None = None,
    ) -> Tensor:
        """Score every query against every document of every group.

        Parameters
        ----------
        queries_embeddings
            [Nq, Lq, d].
        documents_embeddings
            [G, N, Ld, d]: G groups of N documents.
        queries_mask
            [Nq, Lq], bool or 0/1, or None.
        documents_mask
            [G, N, Ld], bool or 0/1, or None.
        backend
            Replaces the one of the constructor for this call.

        Returns
        -------
        Tensor
            [Nq, G * N]: column g * N + n belongs to document n of group g.
        """
        backend = backend_in_force(self.backend if backend is None else backend)
        if backend not in ("auto", "pylate_flash"):
            # PyLate walks the groups, which keeps the memory of its torch scorer down.
            return super().__call__(
                queries_embeddings, documents_embeddings, queries_mask, documents_mask, backend=backend
            )
        documents = _tensor("documents_embeddings", documents_embeddings, "[G, N, Ld, d]")
        return colbert_scores(
            queries_embeddings,
            documents.flatten(0, 1),
            queries_mask,
            _flat_mask(_mask("documents_mask", documents_mask), documents),
            backend=backend,
            masking=self.masking,
        )


class XTRScores(pylate_scores.XTRScores):
    """XTR's scores as the score metric of PyLate's contrastive losses, without the grid of all similarities.

    Each query token retrieves its k best document tokens of the whole batch, and documents score by these alone
    (`pylate_flash.xtr_scores`). Values are PyLate's. Of equally similar tokens, the first are retrieved, as on PyLate's
    GPUs; where there are fewer than k, all are, which PyLate refuses. Half embeddings are accumulated in float32.

    Parameters
    ----------
    k
        How many document tokens each query token retrieves.
    document_chunk_size
        Accepted for PyLate's sake: similarities are not kept. Where PyLate's own code scores, because another backend
        is in force, so many documents at a time.

    Examples
    --------
    >>> import torch
    >>> documents = torch.tensor([0.9, 0.8, 0.3, 0.2]).view(2, 2, 1, 1)
    >>> XTRScores(k=3)(torch.ones(1, 1, 1), documents)
    tensor([[0.9000, 0.8000, 0.3000, 0.0000]])
    """

    def _score(
        self,
        queries_embeddings: Tensor,
        documents_embeddings: Tensor,
        queries_mask: Tensor | None,
        documents_mask: Tensor | None,
    ) -> Tensor:
        return score_by_xtr(self, queries_embeddings, documents_embeddings, queries_mask, documents_mask)


class XTRKDScores(pylate_scores.XTRKDScores, XTRScores):
    """`XTRScores` for distillation: each query's scores [Nq, K] of its own candidates [Nq, K, Ld, d].

    A query token retrieves from the candidates of all queries. The parameters are those of `XTRScores`.
    """


def score_by_xtr(
    metric: Any,
    queries_embeddings: Tensor,
    documents_embeddings: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
) -> Tensor:
    """Scores [Nq, G * N] of documents [G, N, Ld, d] by an XTR metric, PyLate's or ours, and the backend in force."""
    backend = backend_in_force(None)
    queries = _tensor("queries_embeddings", queries_embeddings, "[Nq, Lq, d]")
    documents = _tensor("documents_embeddings", documents_embeddings, "[G, N, Ld, d]")
    queries_mask, documents_mask = _mask("queries_mask", queries_mask), _mask("documents_mask", documents_mask)
    if backend not in ("auto", "pylate_flash") or (backend == "auto" and left_to_pylate(queries, documents)):
        return original_xtr()(metric, queries, documents, queries_mask, documents_mask)
    documents_mask = _flat_mask(documents_mask, documents)
    return scores_by_xtr(
        *_promoted(queries, documents.flatten(0, 1)),
        k=metric.k,
        queries_mask=queries_mask,
        documents_mask=documents_mask,
    )


# The instances that PyLate has under these names.
xtr_scores = XTRScores()
xtr_kd_scores = XTRKDScores()


def scorer_of(model: Any) -> tuple[str, str]:
    """The scoring flags of a model: `models.ColBERT` has them, also inside DDP or another wrapper with `.module`.

    Parameters
    ----------
    model
        Any model, or None.

    Returns
    -------
    tuple[str, str]
        Backend and masking. A model without flags gives `"auto"` and the masking in force, see `masking_in_force`.
    """
    while not hasattr(model, "scorer") and hasattr(model, "module"):
        model = model.module
    return getattr(model, "scorer", "auto"), masking_in_force(getattr(model, "masking", None))


def _scores(
    name: str,
    documents_shape: str,
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    backend: str | None,
    masking: str | None,
) -> Tensor:
    """PyLate's function `name`, whose documents have `documents_shape`, by the backend in force."""
    backend, masking = backend_in_force(backend), masking_in_force(masking)
    if backend not in ("auto", "pylate_flash"):
        return original(name)(queries_embeddings, documents_embeddings, queries_mask, documents_mask, backend=backend)
    queries = _tensor("queries_embeddings", queries_embeddings, "[Nq, Lq, d]")
    documents = _tensor("documents_embeddings", documents_embeddings, documents_shape)
    queries_mask, documents_mask = _mask("queries_mask", queries_mask), _mask("documents_mask", documents_mask)
    if backend == "auto" and left_to_pylate(queries, documents):
        return original(name)(queries, documents, queries_mask, documents_mask, backend="auto")
    return maxsim(
        *_promoted(queries, documents), queries_mask=queries_mask, documents_mask=documents_mask, masking=masking
    )


def left_to_pylate(*embeddings: Tensor) -> bool:
    """Whether `"auto"` leaves these embeddings to PyLate, because the op does not take their type; logged once."""
    for tensor in embeddings:
        if tensor.dtype not in FLOATING:
            _log_left_to_pylate(tensor.dtype)
            return True
    return False


@functools.cache
def _log_left_to_pylate(dtype: torch.dtype) -> None:
    logger.warning('backend "auto": PyLate scores embeddings of %s, which pylate_flash does not take', dtype)


def _tensor(name: str, value: Any, shape: str) -> Tensor:
    """`value` as a tensor of as many dimensions as `shape` names, converted as PyLate converts it."""
    try:
        tensor = convert_to_tensor(value)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{name} must be {shape}, and the items of the list do not stack into that ({error}); pad them, for "
            "example with torch.nn.utils.rnn.pad_sequence, and mask the padding"
        ) from error
    if tensor is None:
        raise TypeError(f"{name} must be a tensor, an array or a list of them of shape {shape}, got {_kind(value)}")
    if tensor.dim() != shape.count(",") + 1:
        raise ValueError(f"{name} must be {shape}, got shape {list(tensor.shape)}")
    return tensor


def _mask(name: str, value: Any) -> Tensor | None:
    """A mask as a tensor; its shape is left to the op."""
    if value is None:
        return None
    tensor = convert_to_tensor(value)
    if tensor is None:
        raise TypeError(f"{name} must be a tensor, an array, a nested list or None, got {_kind(value)}")
    return tensor


def _flat_mask(mask: Tensor | None, documents: Tensor) -> Tensor | None:
    """The mask [G, N, Ld] of documents in groups as [G * N, Ld]."""
    if mask is None:
        return None
    if mask.shape != documents.shape[:3]:
        raise ValueError(f"documents_mask must have shape {list(documents.shape[:3])}, got {list(mask.shape)}")
    return mask.flatten(0, 1)


def _kind(value: Any) -> str:
    return f"list of {type(value[0]).__name__}" if isinstance(value, list) and value else type(value).__name__


def tokens_of(values: Any, name: str, *index: int) -> list[Tensor]:
    """Queries or documents, `name[index...][i]` in errors, each as a tensor [L, d], or [0] if it is an empty list."""
    found = [torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in values]
    # Of a thousand, what is asked of each alone takes longer than a kernel that scores them.
    if set(map(type, found)) == {Tensor} and set(map(Tensor.dim, found)) == {2}:
        return found
    return [_tokens(value, name, *index, i) for i, value in enumerate(found)]


def _tokens(value: Any, name: str, *index: int) -> Tensor:
    if isinstance(value, list):
        with suppress(RuntimeError, ValueError):  # a ragged list stays one, and is refused below
            value = convert_to_tensor(value)
    if isinstance(value, Tensor) and (value.dim() == 2 or value.shape == (0,)):
        return value
    found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else _kind(value)
    raise (ValueError if isinstance(value, (Tensor, list)) else TypeError)(
        f"{name}{''.join(f'[{i}]' for i in index)} must be a tensor, an array or a nested list of shape "
        f"[tokens, embedding size], got {found}"
    )


def of_one_type(queries: list[Tensor], documents: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Query tokens and document tokens [L_i, d] of what `tokens_of` gave, each in the common type of all.

    Raises
    ------
    ValueError
        If the queries or the documents lie on several devices, or if there are two embedding sizes.
    """
    # Mostly all are alike, which one look at each tells.
    looks = set(map(attrgetter("device", "dtype", "shape"), (*queries, *documents)))
    if len({(device, dtype, *shape[1:]) for device, dtype, shape in looks}) == 1 and queries[0].dim() == 2:
        return queries, documents
    found = []
    for name, sequences in (("queries_embeddings", queries), ("documents_embeddings", documents)):
        devices = sorted(map(str, {tokens.device for tokens in sequences}))
        if len(devices) > 1:
            raise ValueError(f"{name} must lie on one device, got {' and '.join(devices)}")
        sizes = sorted({tokens.shape[1] for tokens in sequences if tokens.dim() == 2})
        if len(sizes) > 1:
            raise ValueError(f"{name} must have one embedding size, got {' and '.join(map(str, sizes))}")
        found.append(sizes)
    # An empty list has no embedding size of its own, and any will do if there are no others.
    size = next((sizes[0] for sizes in found if sizes), 1)
    if found[0] and found[1] and found[0] != found[1]:
        raise ValueError(
            f"documents_embeddings must have the embedding size of queries_embeddings, {found[0][0]}, got {found[1][0]}"
        )
    dtype = _common_type(*queries, *documents)
    return _alike(queries, size, dtype), _alike(documents, size, dtype)


def _alike(sequences: list[Tensor], size: int, dtype: torch.dtype | None) -> list[Tensor]:
    """Sequences [L_i, size], also those without tokens, in a type; None: in their own."""
    found = [tokens if tokens.dim() == 2 else tokens.new_empty(0, size) for tokens in sequences]
    return found if dtype is None else [tokens if tokens.dtype is dtype else tokens.to(dtype) for tokens in found]


def concatenated(
    queries: list[Tensor], documents: list[Tensor], device: str | torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """All query tokens [Tq, d] and all document tokens [Td, d] of what `tokens_of` gave, `of_one_type`.

    They go to `device`, or stay where they are if that is None.
    """
    of_queries, of_documents = of_one_type(queries, documents)
    return concatenate(of_queries, device), concatenate(of_documents, device)


def cu_seqlens(lengths: list[int]) -> Tensor:
    """Boundaries [N + 1] of sequences of these lengths in their concatenation, int32, on the CPU."""
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))


def _promoted(queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Both in their common floating type: float16 with float32 gives float32, float16 with bfloat16 too."""
    dtype = _common_type(queries, documents)
    return queries.to(dtype or queries.dtype), documents.to(dtype or documents.dtype)


def _common_type(*embeddings: Tensor) -> torch.dtype | None:
    """The floating type that all of them have in common; None where one has none, for the operation to refuse."""
    dtypes = {tensor.dtype for tensor in embeddings}
    return functools.reduce(torch.promote_types, dtypes) if all(dtype.is_floating_point for dtype in dtypes) else None
