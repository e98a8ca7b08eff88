"""Losses over MaxSim scores: cross entropy of contrastive training, and two losses of distillation.

    cross entropy    mean over queries i of  -log q[i, label of i]
    divergence       mean over queries i of  sum over documents j of  p[i, j] log(p[i, j] / q[i, j])
    margin MSE       mean over queries i, and documents j > 0, of  ((s[i, 0] - s[i, j]) - (t[i, 0] - t[i, j]))^2

with q[i] = softmax(s[i] / temperature) of scores s, and p[i] the softmax of a teacher's scores t. (van den Oord et al.,
"Representation Learning with Contrastive Predictive Coding", 2018; Hinton et al., "Distilling the Knowledge in a Neural
Network", 2015; Hofstätter et al., "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge
Distillation", 2020.) The definitions (`ops.loss_scores`) take any scores, and autograd differentiates them; over
`maxsim_reference` they are what the operations here are tested against.

The operations are one operator, `pylate_flash::maxsim_loss` (`ops.loss_operator`): scores, loss and gradients, a chunk
of queries after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..problem import CROSS_ENTROPY, DIVERGENCE, MARGIN_MSE, Comparison
from .checks import checked_flag
from .loss_operator import loss_of


class LossStatistics(NamedTuple):
    """What `maxsim_cross_entropy` tells of a batch: scalars of the type and device of the scores, without a gradient.

    Attributes
    ----------
    accuracy
        The share of queries whose right document scores higher than every other one that is not left out.
    positive_score
        The mean score of the right documents.
    hardest_negative_score
        The mean, over the queries that have another document, of the highest score of one. NaN where none has.
    """

    accuracy: Tensor
    positive_score: Tensor
    hardest_negative_score: Tensor


def maxsim_cross_entropy(
    queries: Tensor,
    documents: Tensor,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    documents_cu_seqlens: Tensor | None = None,
    max_document_length: int | None = None,
    labels: Tensor | None = None,
    exclude: Tensor | None = None,
    margin: float | None = None,
    temperature: float | Tensor = 1.0,
    symmetric: bool = False,
    loss_reduction: str = "mean",
    with_statistics: bool = False,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    max_scratch_bytes: int | None = None,
    implementation: str = "auto",
) -> Any:
    """Cross entropy over MaxSim scores: the contrastive loss with in-batch negatives, or with candidates of its own.

    The value and the gradients are those of ``F.cross_entropy(maxsim(queries, documents, ...) / temperature, labels)``,
    in memory that does not grow with the number of scores: where they do not fit into a scratch, it goes over the
    queries in chunks, and computes the gradients of a chunk with its loss.

    Parameters
    ----------
    queries
        [Nq, Lq, d].
    documents
        [Nd, Ld, d]: all are candidates of every query, in-batch and hard negatives alike. [Nq, K, Ld, d]: each query
        has K of its own. [Td, d] with `documents_cu_seqlens`: all are candidates of every query, packed one after the
        other without padding.
    queries_mask, documents_mask
        As in `maxsim`. Packed documents have no mask.
    documents_cu_seqlens, max_document_length
        [Nd + 1], and the tokens of the longest document or more, as in `maxsim_varlen`: without the second, the call
        waits for the GPU to find it out.
    labels
        [Nq], int64 or int32: which document, of Nd or of K, is the right one. A label out of range is an error on the
        CPU; on a GPU, where to look would be to wait, it makes the loss NaN. None: document i of query i, for
        Nd >= Nq; of K candidates the first.
    exclude
        [Nq, Nd] or [Nq, K], bool: True leaves a document out of the query's denominator, as for a false negative. The
        right document cannot be left out: that is an error on the CPU, and makes the loss NaN on a GPU.
    margin
        Leave out, too, every document other than the right one that scores above the right one's score less `margin`,
        before the temperature (NV-Retriever's, and sentence-transformers' absolute margin). Negative: only what scores
        above the right one by more than that. No gradient flows to the decision.
    temperature
        Divides the scores. A positive number; or a floating tensor of one element on the device of the queries, whose
        gradient is computed too. On a GPU, its value is taken as it is.
    symmetric
        The mean of this loss and of that of the other direction: cross entropy of the right document of each query,
        over what all queries score it. What is left out of one denominator is left out of the other. For documents
        that all queries meet; several chunks then take another pass of scores.
    loss_reduction
        "mean" or "sum" over the queries, or "none", which keeps all scores.
    with_statistics
        Return `LossStatistics` too, computed on the way.
    normalize, reduction, masking, empty_score, implementation
        As in `maxsim`; `reduction` is that of the scores.
    max_scratch_bytes
        What a chunk, of at least one query, may take beside the gradients: argmax, its lists, and scores. Value and
        gradients vary with it by float32 rounding only. None: 256 MiB, or about as much as the documents take where
        that is more. The gradient of documents that several chunks share is summed in float32. Embeddings in float32
        may take 1.5 times their bytes besides, up to 1 GiB, while scores are computed. On a GPU that is out of memory,
        chunks are halved, and a warning is logged once.

    Returns
    -------
    Tensor, or tuple of Tensor and LossStatistics
        A scalar, or with loss_reduction="none" [Nq], of the type of the scores. The gradients are computed with a
        scalar loss, and held until its backward, those of float16 inputs in float32; where none are wanted,
        `torch.no_grad` spares them.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim`, and `maxsim_varlen`; also if there is no document, `labels` or `exclude` do not fit, an option
        is of another type or out of its range, or `symmetric` is asked of candidates of its own.

    Examples
    --------
    >>> queries = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> maxsim_cross_entropy(queries, queries, temperature=0.5)
    tensor(0.1269)
    """
    scoring = max_document_length, checked_flag("normalize", normalize), reduction, masking, empty_score, implementation
    number, learned = (1.0, temperature) if isinstance(temperature, Tensor) else (temperature, None)
    comparison = Comparison(
        CROSS_ENTROPY, number, margin, symmetric, loss_reduction=loss_reduction,
        with_statistics=with_statistics, max_scratch_bytes=max_scratch_bytes,
    )  # fmt: skip
    given = queries, documents, learned, queries_mask, documents_mask, documents_cu_seqlens, labels, exclude
    loss, statistics = loss_of(given, (*scoring, *comparison))
    return (loss, LossStatistics(*statistics.unbind())) if with_statistics else loss


def maxsim_kl_divergence(
    queries: Tensor,
    documents: Tensor,
    teacher_scores: Tensor,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    documents_cu_seqlens: Tensor | None = None,
    max_document_length: int | None = None,
    temperature: float | Tensor = 1.0,
    teacher_temperature: float = 1.0,
    normalize_scores: bool = False,
    loss_reduction: str = "mean",
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    max_scratch_bytes: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Kullback-Leibler divergence of MaxSim scores from a teacher's: the loss of knowledge distillation.

    The value and the gradients are those of ``F.kl_div(log_softmax(maxsim(queries, documents, ...) / temperature),
    log_softmax(teacher_scores / teacher_temperature), reduction="batchmean", log_target=True)``, in memory as that of
    `maxsim_cross_entropy`.

    Parameters
    ----------
    queries
        [Nq, Lq, d].
    documents
        [Nq, K, Ld, d]: K candidates of each query. [Nd, Ld, d], or packed [Td, d]: all are candidates of every query.
    teacher_scores
        [Nq, K] or [Nq, Nd], floating: the teacher's scores or log-probabilities, whose softmax is the target. -inf
        rules a document out. No gradient flows to them.
    queries_mask, documents_mask, documents_cu_seqlens, max_document_length
        As in `maxsim_cross_entropy`.
    temperature
        Divides the scores, as in `maxsim_cross_entropy`, but not the teacher's.
    teacher_temperature
        Divides the teacher's. Positive.
    normalize_scores
        Bring each query's scores s to (s - min) / (max - min + 1e-8) first, as PyLate's `Distillation` does. The
        teacher's stay as they are.
    loss_reduction
        "mean" or "sum" over the queries, or "none", which keeps all scores.
    normalize, reduction, masking, empty_score, max_scratch_bytes, implementation
        As in `maxsim_cross_entropy`.

    Returns
    -------
    Tensor
        A scalar, or with loss_reduction="none" [Nq], of the type of the scores; gradients as in `maxsim_cross_entropy`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim_cross_entropy`; also if `teacher_scores` do not fit or require a gradient.

    Examples
    --------
    >>> queries = torch.tensor([[[1.0, 0.0]]])
    >>> candidates = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])
    >>> maxsim_kl_divergence(queries, candidates, torch.tensor([[1.0, 0.0]]))
    tensor(0.)
    """
    scoring = max_document_length, checked_flag("normalize", normalize), reduction, masking, empty_score, implementation
    number, learned = (1.0, temperature) if isinstance(temperature, Tensor) else (temperature, None)
    comparison = Comparison(
        DIVERGENCE, number, teacher_temperature=teacher_temperature, normalize_scores=normalize_scores,
        loss_reduction=loss_reduction, max_scratch_bytes=max_scratch_bytes,
    )  # fmt: skip
    given = queries, documents, learned, queries_mask, documents_mask, documents_cu_seqlens, teacher_scores, None
    return loss_of(given, (*scoring, *comparison))[0]


def maxsim_margin_mse(
    queries: Tensor,
    documents: Tensor,
    teacher_scores: Tensor,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    documents_cu_seqlens: Tensor | None = None,
    max_document_length: int | None = None,
    loss_reduction: str = "mean",
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    max_scratch_bytes: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Margin MSE over MaxSim scores: squared differences from a teacher's margins between positive and negatives.

    Document 0 is the positive, and the value and the gradients are those of ``F.mse_loss(s[:, :1] - s[:, 1:],
    t[:, :1] - t[:, 1:])`` with scores s and the teacher's t, as in sentence-transformers' `MarginMSELoss`, in memory as
    that of `maxsim_cross_entropy`.

    Parameters
    ----------
    queries
        [Nq, Lq, d].
    documents
        [Nq, K, Ld, d]: of each query its positive, then at least one negative. [Nd, Ld, d], or packed [Td, d]: the same
        for all queries.
    teacher_scores
        [Nq, K] or [Nq, Nd], floating and finite. No gradient flows to them.
    queries_mask, documents_mask, documents_cu_seqlens, max_document_length
        As in `maxsim_cross_entropy`.
    loss_reduction
        "mean" or "sum" over the queries, or "none", which keeps all scores. A query's is the mean over its negatives.
    normalize, reduction, masking, empty_score, max_scratch_bytes, implementation
        As in `maxsim_cross_entropy`.

    Returns
    -------
    Tensor
        A scalar, or with loss_reduction="none" [Nq], of the type of the scores; gradients as in `maxsim_cross_entropy`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim_cross_entropy`; also if there are fewer than two documents, or `teacher_scores` do not fit or
        require a gradient.

    Examples
    --------
    >>> queries = torch.tensor([[[1.0, 0.0]]])
    >>> candidates = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])
    >>> maxsim_margin_mse(queries, candidates, torch.tensor([[4.0, 1.0]]))
    tensor(4.)
    """
    scoring = max_document_length, checked_flag("normalize", normalize), reduction, masking, empty_score, implementation
    comparison = Comparison(MARGIN_MSE, loss_reduction=loss_reduction, max_scratch_bytes=max_scratch_bytes)
    given = queries, documents, None, queries_mask, documents_mask, documents_cu_seqlens, teacher_scores, None
    return loss_of(given, (*scoring, *comparison))[0]
