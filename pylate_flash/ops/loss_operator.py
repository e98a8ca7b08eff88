"""What is between the public losses and what computes them."""

from __future__ import annotations

from torch import Tensor

from .checks import check_tensor
from .loss_call import Comparison, Targets, check_comparison, check_packing, checked_targets
from .loss_scores import compared, reduced, statistics_of
from .maxsim import checked, scores_of
from .problem import Options, Tensors, check
from .varlen import with_lengths


def loss_of(
    tensors: Tensors,
    options: Options,
    max_document_length: int | None,
    targets: Targets,
    comparison: Comparison,
) -> tuple[Tensor, Tensor]:
    """The loss of a call and, where asked for, its statistics [3], after every check."""
    check_comparison(comparison)
    tensors = checked("maxsim", tensors, options)
    check_packing(tensors, max_document_length)
    if tensors.documents_cu_seqlens is not None:
        check_tensor("queries", tensors.queries, {3: "[Nq, Lq, d]"})
        check_tensor("documents", tensors.documents, {2: "[Td, d]"})
        options = with_lengths(tensors, options, None, max_document_length)
    # What is compared with the scores relies on this much.
    check(tensors)
    targets = checked_targets(targets, comparison, tensors)
    scores = scores_of("maxsim", tensors, options)
    found = compared(scores, targets, comparison, tensors.documents.dim() == 4)
    statistics = statistics_of(found) if comparison.with_statistics else scores.new_empty(0)
    return reduced(found.losses, comparison.loss_reduction), statistics
