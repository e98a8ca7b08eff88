"""Losses over MaxSim scores: cross entropy of contrastive training, and two losses of distillation.

    cross entropy    mean over queries i of  -log q[i, label of i]
    divergence       mean over queries i of  sum over documents j of  p[i, j] log(p[i, j] / q[i, j])
    margin MSE       mean over queries i, and documents j > 0, of  ((s[i, 0] - s[i, j]) - (t[i, 0] - t[i, j]))^2

with q[i] = softmax(s[i] / temperature) of scores s, and p[i] the softmax of a teacher's scores t. (van den Oord et al.,
"Representation Learning with Contrastive Predictive Coding", 2018; Hinton et al., "Distilling the Knowledge in a Neural
Network", 2015; Hofstätter et al., "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge
Distillation", 2020.) The reference definitions (`ops.loss_scores`) take any scores and are differentiable by autograd;
applied to `maxsim_reference`, they are what the operations here are tested against.

All three are one operator, `pylate_flash::maxsim_loss` (`ops.loss_operator`), which computes scores, loss and gradients
one chunk of queries at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..problem import CROSS_ENTROPY, DIVERGENCE, MARGIN_MSE, Comparison
from .checks import checked_flag
from .loss_operator import loss_of


class LossStatistics(NamedTuple):
    """Batch statistics of `maxsim_cross_entropy`: scalars of the dtype and device of the scores, without a gradient.

    Attributes
    ----------
    accuracy
        Fraction of queries whose positive scores higher than every other document that is not left out.
    positive_score
        Mean score of the positives.
    hardest_negative_score
        Highest score of another document, averaged over the queries that have one. NaN if none has.
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
    """Cross entropy over MaxSim scores: the contrastive loss with in-batch negatives, or with per-query candidates.

    The value and the gradients are those of ``F.cross_entropy(maxsim(queries, documents, ...) / temperature, labels)``,
    in memory that does not grow with the number of scores: if they do not fit into the scratch, the queries are
    processed in chunks, and the gradients of a chunk are computed with its loss.

    Parameters
    ----------
    queries
        [Nq, Lq, d].
    documents
        [Nd, Ld, d]: all are candidates of every query, in-batch and hard negatives alike. [Nq, K, Ld, d]: each query
        has its own K candidates. [Td, d] with `documents_cu_seqlens`: all are candidates of every query, packed without
        padding.
    queries_mask, documents_mask
        As in `maxsim`. Packed documents have no mask.
    documents_cu_seqlens, max_document_length
        [Nd + 1], and the length of the longest document or an upper bound, as in `maxsim_varlen`. Without the length,
        the call synchronizes with the GPU to compute it.
    labels
        [Nq], int64 or int32: index of each query's positive among its Nd or K documents. A label out of range is an
        error on the CPU; on a GPU, where a check would synchronize, it makes the loss NaN. None: document i for query
        i, which requires Nd >= Nq; with K candidates the first.
    exclude
        [Nq, Nd] or [Nq, K], bool: True leaves a document out of the query's denominator, as for a false negative. The
        positive cannot be left out: that is an error on the CPU, and makes the loss NaN on a GPU.
    margin
        Also leave out every other document that scores above the positive's score minus `margin`, before the
        temperature is applied (NV-Retriever's and sentence-transformers' absolute margin). Negative: only documents
        that score above the positive by more than that. No gradient flows through the decision.
    temperature
        Divides the scores. A positive number, or a floating tensor with one element on the device of the queries, which
        is differentiable. On a GPU, its value is not checked.
    symmetric
        Average with the loss of the other direction: for each query's positive, cross entropy over the scores of all
        queries for it. What is left out of one denominator is left out of the other. Only for documents that all
        queries share; with several chunks, scores are computed twice.
    loss_reduction
        "mean" or "sum" over the queries, or "none", which materializes all scores.
    with_statistics
        Also return `LossStatistics`, computed along with the loss.
    normalize, reduction, masking, empty_score, implementation
        As in `maxsim`; `reduction` is that of the scores.
    max_scratch_bytes
        Memory limit of a chunk (of at least one query) beside the gradients: argmax, its lists, and scores. Value and
        gradients vary with it by float32 rounding only. None: 256 MiB, or about the size of the documents if that is
        larger. Gradients of documents that several chunks share are summed in float32. Embeddings in float32 may take
        another 1.5 times their bytes, up to 1 GiB, while scores are computed. If the GPU runs out of memory, chunks
        are halved, and a warning is logged once.

    Returns
    -------
    Tensor, or tuple of Tensor and LossStatistics
        A scalar, or [Nq] with loss_reduction="none", of the dtype of the scores. The gradients are computed with a
        scalar loss and held until its backward, those of float16 inputs in float32; `torch.no_grad` avoids them where
        they are not needed.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim` and `maxsim_varlen`; also if there are no documents, `labels` or `exclude` do not fit, an option
        has an invalid type or value, or `symmetric` is used with per-query candidates.

    Examples
    --------
    >>> queries = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> maxsim_cross_entropy(queries, queries, temperature=0.5)
    tensor(0.1269)
    """
    scoring = max_document_length, checked_flag("normalize", normalize), reduction, masking, empty_score, implementation
    scalar, learned = (1.0, temperature) if isinstance(temperature, Tensor) else (temperature, None)
    comparison = Comparison(
        CROSS_ENTROPY, scalar, margin, symmetric, loss_reduction=loss_reduction,
        with_statistics=with_statistics, max_scratch_bytes=max_scratch_bytes,
    )  # fmt: skip
    inputs = queries, documents, learned, queries_mask, documents_mask, documents_cu_seqlens, labels, exclude
    loss, statistics = loss_of(inputs, (*scoring, *comparison))
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
    log_softmax(teacher_scores / teacher_temperature), reduction="batchmean", log_target=True)``, with the memory use of
    `maxsim_cross_entropy`.

    Parameters
    ----------
    queries
        [Nq, Lq, d].
    documents
        [Nq, K, Ld, d]: K candidates per query. [Nd, Ld, d], or packed [Td, d]: all are candidates of every query.
    teacher_scores
        [Nq, K] or [Nq, Nd], floating: the teacher's scores or log-probabilities, whose softmax is the target. -inf
        gives a document probability 0. No gradient flows to them.
    queries_mask, documents_mask, documents_cu_seqlens, max_document_length
        As in `maxsim_cross_entropy`.
    temperature
        Divides the scores, but not the teacher's, as in `maxsim_cross_entropy`.
    teacher_temperature
        Divides the teacher's scores. Positive.
    normalize_scores
        Rescale each query's scores s to (s - min) / (max - min + 1e-8) first, as PyLate's `Distillation` does. The
        teacher's scores are not rescaled.
    loss_reduction
        "mean" or "sum" over the queries, or "none", which materializes all scores.
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
    scalar, learned = (1.0, temperature) if isinstance(temperature, Tensor) else (temperature, None)
    comparison = Comparison(
        DIVERGENCE, scalar, teacher_temperature=teacher_temperature, normalize_scores=normalize_scores,
        loss_reduction=loss_reduction, max_scratch_bytes=max_scratch_bytes,
    )  # fmt: skip
    inputs = queries, documents, learned, queries_mask, documents_mask, documents_cu_seqlens, teacher_scores, None
    return loss_of(inputs, (*scoring, *comparison))[0]


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
    """Margin MSE over MaxSim scores: squared error of the margins between positive and negatives against a teacher's.

    Document 0 is the positive, and the value and the gradients are those of ``F.mse_loss(s[:, :1] - s[:, 1:],
    t[:, :1] - t[:, 1:])`` with scores s and the teacher's t, as in sentence-transformers' `MarginMSELoss`, with the
    memory use of `maxsim_cross_entropy`.

    Parameters
    ----------
    queries
        [Nq, Lq, d].
    documents
        [Nq, K, Ld, d]: the positive of each query, then at least one negative. [Nd, Ld, d], or packed [Td, d]: the same
        documents for all queries.
    teacher_scores
        [Nq, K] or [Nq, Nd], floating and finite. No gradient flows to them.
    queries_mask, documents_mask, documents_cu_seqlens, max_document_length
        As in `maxsim_cross_entropy`.
    loss_reduction
        "mean" or "sum" over the queries, or "none". Each query's loss is the mean over its negatives.
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
    inputs = queries, documents, None, queries_mask, documents_mask, documents_cu_seqlens, teacher_scores, None
    return loss_of(inputs, (*scoring, *comparison))[0]
