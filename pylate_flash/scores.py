"""PyLate's scoring functions with the fused MaxSim as one of their backends.

    from pylate_flash import scores                     # instead of: from pylate import scores

    scores.colbert_scores(queries, documents)            # fused
    scores.colbert_scores(queries, documents, backend="torch")  # PyLate's own

Arguments, shapes and the meaning of the scores are PyLate's; the computation is that of `pylate_flash.ops`. Scores are
float32, or float64 for float64 embeddings (but not for a list of arrays, which PyLate rounds to float32), and masked
document tokens are ignored (see `masking`).

`backend` is one of

- `"pylate_flash"`: this package. An input that it cannot take is an error.
- `"torch"`, `"flash"`, `"lik"`: PyLate's own code with that backend, including its masking; `masking` is ignored.
- `"auto"`: this package, on any device. Embeddings of an integer type are left to PyLate's `"auto"`.
- None: what `use_scorer` set, else the environment variable `PYLATE_SCORES_BACKEND`, else `"auto"`.
"""

from __future__ import annotations

from .hosts.pylate import _needs  # noqa: F401

# isort: split
from typing import Any

import torch
from pylate import scores as pylate_scores
from torch import Tensor

from ._config import backend_in_force, check_backend, check_masking, masking_in_force
from .encoding.projection import unwrapped
from .hosts.pylate import original
from .hosts.pylate.operands import (
    Embeddings,
    expanded,
    flat_mask,
    left_to_pylate,
    listed,
    mask_of,
    of_one_type,
    promoted,
    tensor_of,
    tokens_of,
)
from .ops import maxsim, maxsim_pairwise, maxsim_ragged_pairwise
from .ops import xtr_scores as scores_by_xtr

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
        Axes of 1 are expanded, as PyLate does, in all masks.
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
        [Nq, Nd], float32 or float64 (PyLate's own backends choose their own type), differentiable.

    Raises
    ------
    ValueError, TypeError
        If a shape, a device or a type does not match, or `backend` or `masking` is unknown.

    Examples
    --------
    >>> import torch
    >>> queries = torch.tensor([[[1.0], [2.0]]])
    >>> documents = torch.tensor([[[1.0], [3.0]], [[-1.0], [-2.0]]])
    >>> colbert_scores(queries, documents)
    tensor([[ 9., -3.]])
    """
    inputs = queries_embeddings, documents_embeddings, queries_mask, documents_mask
    return _scores("colbert_scores", "[Nd, Ld, d]", inputs, backend, masking)


def colbert_scores_pairwise(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    backend: str | None = None,
    *,
    masking: str | None = None,
) -> Tensor:
    """Score query i against document i, for each i, in one call, for padded batches and for lists of varying lengths.

    Parameters
    ----------
    queries_embeddings
        [N, Lq, d], or a list of N [Lq_i, d]: tensors, arrays or nested lists. An iterator is consumed.
    documents_embeddings
        [N, Ld, d], or a list of N [Ld_i, d], likewise. A document without tokens scores 0.
    backend
        See the module's description.
    masking
        Accepted as by the other scoring functions. Pairs have no masks, so both values are equivalent.

    Returns
    -------
    Tensor
        [N], float32 or float64 (PyLate's own backends choose their own type), differentiable.

    Raises
    ------
    ValueError, TypeError
        If a shape, a device or a type does not match, or `backend` or `masking` is unknown.

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
    queries_embeddings = listed(queries_embeddings, "queries_embeddings")
    documents_embeddings = listed(documents_embeddings, "documents_embeddings")
    if len(queries_embeddings) != len(documents_embeddings):
        raise ValueError(
            "documents_embeddings must hold one document per query, "
            f"{len(queries_embeddings)}, got {len(documents_embeddings)}"
        )
    if not isinstance(queries_embeddings, list) and not isinstance(documents_embeddings, list):
        queries = tensor_of("queries_embeddings", queries_embeddings, "[N, Lq, d]")
        documents = tensor_of("documents_embeddings", documents_embeddings, "[N, Ld, d]")
        if backend == "auto" and left_to_pylate(queries, documents):
            return original("colbert_scores_pairwise")(queries, documents, backend="auto")
        return maxsim_pairwise(*promoted(queries, documents))

    queries_list = tokens_of(queries_embeddings, "queries_embeddings")
    documents_list = tokens_of(documents_embeddings, "documents_embeddings")
    if not queries_list:
        return torch.zeros(0, dtype=torch.float32)
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

    Arguments, types and errors are those of `colbert_scores`, except for documents [Nq, K, Ld, d], the K candidates of
    each query, and their mask [Nq, K, Ld]; the scores are [Nq, K].
    """
    inputs = queries_embeddings, documents_embeddings, queries_mask, documents_mask
    return _scores("colbert_kd_scores", "[Nq, K, Ld, d]", inputs, backend, masking)


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
        """Score every query [Nq, Lq, d] against every document of every group, G groups of N: [G, N, Ld, d].

        The masks are [Nq, Lq] and [G, N, Ld], bool or 0/1, or None. The `backend` replaces the one of the constructor
        for this call. In the scores [Nq, G * N], column g * N + n belongs to document n of group g.
        """
        backend = backend_in_force(self.backend if backend is None else backend)
        if backend not in ("auto", "pylate_flash"):
            # PyLate iterates over the groups, which limits the memory of its torch scorer.
            return super().__call__(
                queries_embeddings, documents_embeddings, queries_mask, documents_mask, backend=backend
            )
        documents = tensor_of("documents_embeddings", documents_embeddings, "[G, N, Ld, d]")
        return colbert_scores(
            queries_embeddings,
            documents.flatten(0, 1),
            queries_mask,
            flat_mask(mask_of("documents_mask", documents_mask), documents),
            backend=backend,
            masking=self.masking,
        )


class XTRScores(pylate_scores.XTRScores):
    """XTR's scores as the score metric of PyLate's contrastive losses, without materializing all similarities.

    Each query token retrieves its k best document tokens of the whole batch, and documents score by these alone
    (`pylate_flash.xtr_scores`). Values are PyLate's. Of equally similar tokens, the first are retrieved, as by PyLate
    on a GPU; if there are fewer than k, all are, which PyLate refuses. Half embeddings are accumulated in float32.

    Parameters
    ----------
    k
        How many document tokens each query token retrieves.
    document_chunk_size
        Accepted for compatibility with PyLate; unused, as similarities are not stored. If another backend is in force,
        PyLate's own code scores this many documents at a time.

    Examples
    --------
    >>> import torch
    >>> documents = torch.tensor([0.9, 0.8, 0.3, 0.2]).view(2, 2, 1, 1)
    >>> XTRScores(k=3)(torch.ones(1, 1, 1), documents)
    tensor([[0.9000, 0.8000, 0.3000, 0.0000]])
    """

    _own_candidates = False

    def __call__(
        self,
        queries_embeddings: Embeddings,
        documents_embeddings: Embeddings,
        queries_mask: Tensor | None = None,
        documents_mask: Tensor | None = None,
    ) -> Tensor:
        """Scores [Nq, G * N] of queries [Nq, Lq, d] and documents [G, N, Ld, d], as of `ColBERTScores`.

        Those of `XTRKDScores` are [Nq, K], of queries and their candidates [Nq, K, Ld, d].
        """
        queries = tensor_of("queries_embeddings", queries_embeddings, "[Nq, Lq, d]")
        shape = "[Nq, K, Ld, d]" if self._own_candidates else "[G, N, Ld, d]"
        documents = tensor_of("documents_embeddings", documents_embeddings, shape)
        if self._own_candidates and len(documents) != len(queries):
            raise ValueError(
                f"documents_embeddings must hold the candidates of each query, {len(queries)}, got {len(documents)}"
            )
        return super().__call__(queries, documents, queries_mask, documents_mask)

    def _score(
        self,
        queries_embeddings: Tensor,
        documents_embeddings: Tensor,
        queries_mask: Tensor | None,
        documents_mask: Tensor | None,
    ) -> Tensor:
        # While registered, PyLate's own instances call this, too.
        backend = backend_in_force(None)
        queries = tensor_of("queries_embeddings", queries_embeddings, "[Nq, Lq, d]")
        documents = tensor_of("documents_embeddings", documents_embeddings, "[G, N, Ld, d]")
        queries_mask, documents_mask = mask_of("queries_mask", queries_mask), mask_of("documents_mask", documents_mask)
        if backend not in ("auto", "pylate_flash") or (backend == "auto" and left_to_pylate(queries, documents)):
            return original("XTRScores._score")(self, queries, documents, queries_mask, documents_mask)
        scores = scores_by_xtr(
            *promoted(queries, documents.flatten(0, 1)),
            k=self.k,
            queries_mask=expanded(queries_mask, queries),
            documents_mask=flat_mask(documents_mask, documents),
        )
        # As in PyLate, float32 even for float64 embeddings.
        return scores.float()


class XTRKDScores(XTRScores, pylate_scores.XTRKDScores):
    """`XTRScores` for distillation: each query's scores [Nq, K] of its own candidates [Nq, K, Ld, d].

    A query token retrieves from the candidates of all queries. The parameters are those of `XTRScores`.
    """

    _own_candidates = True


# Instances, as PyLate defines under these names.
xtr_scores = XTRScores()
xtr_kd_scores = XTRKDScores()


def scorer_of(model: Any) -> tuple[str, str]:
    """Return backend and masking from the flags of a `models.ColBERT`, also inside DDP and other wrappers.

    For any other model, or None: `"auto"` and the masking in force.
    """
    model = unwrapped(model)
    return getattr(model, "scorer", "auto"), masking_in_force(getattr(model, "masking", None))


def _scores(
    name: str, documents_shape: str, inputs: tuple[Any, Any, Any, Any], backend: str | None, masking: str | None
) -> Tensor:
    """Compute PyLate's function `name`, with documents of `documents_shape`, with the backend in force."""
    backend, masking = backend_in_force(backend), masking_in_force(masking)
    if backend not in ("auto", "pylate_flash"):
        return original(name)(*inputs, backend=backend)
    queries = tensor_of("queries_embeddings", inputs[0], "[Nq, Lq, d]")
    documents = tensor_of("documents_embeddings", inputs[1], documents_shape)
    queries_mask, documents_mask = mask_of("queries_mask", inputs[2]), mask_of("documents_mask", inputs[3])
    if backend == "auto" and left_to_pylate(queries, documents):
        return original(name)(queries, documents, queries_mask, documents_mask, backend="auto")
    return maxsim(
        *promoted(queries, documents),
        queries_mask=expanded(queries_mask, queries),
        documents_mask=expanded(documents_mask, documents),
        masking=masking,
    )
