"""MaxSim, the score of late interaction: for every query token its best document token, summed over the query.

    score[i, j] = sum over active s of  max over active t of  <queries[i, s], documents[j, t]>

(Khattab and Zaharia, "ColBERT", SIGIR 2020.) `maxsim_reference` is the definition, in plain torch. `maxsim` and
`maxsim_pairwise` compute the same without its [Nq, Nd, Lq, Ld] tensor: by Triton kernels on CUDA (`kernels.forward`),
and in blocks of plain torch elsewhere (`ops.blocked`).

The gradient of a maximum flows to the token that attains it. So if a gradient is needed, the forward saves the argmax
[documents, rows] (-1: no gradient), and the backward gathers and sums the rows of queries and documents by it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..problem import Options, Tensors
from .checks import check_mask_layout, check_tensor, checked_flag
from .maxsim_operator import maxsim_operation, reference_scores, scores_of_arguments
from .quantization import QuantizedEmbeddings
from .quantized import scores_of_quantized


def maxsim_reference(
    queries: Tensor,
    documents: Tensor,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
) -> Tensor:
    """The definition of `maxsim` in plain torch: materializes the full similarity tensor; differentiable by autograd.

    Arguments and result are those of `maxsim`, except that it checks nothing, and that it computes in, and returns, the
    widened dtype: float64 for float64 inputs, else float32. Products are computed in that dtype.
    """
    options: dict[str, Any] = {"normalize": normalize, "reduction": reduction}
    options |= {"masking": masking, "empty_score": empty_score}
    return reference_scores(queries, documents, queries_mask, documents_mask, **options)


def maxsim(
    queries: Tensor,
    documents: Tensor | QuantizedEmbeddings,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    quantize_queries: bool = True,
    implementation: str = "auto",
) -> Tensor:
    """MaxSim scores of queries against documents, differentiable, in memory that does not grow with Lq * Ld.

    Parameters
    ----------
    queries
        [Nq, Lq, d], float16, bfloat16, float32 or float64. Under autocast, inputs are cast to the autocast dtype.
    documents
        [Nd, Ld, d]: every query meets every document. [Nq, K, Ld, d]: each query meets its own K candidates. Of the
        dtype of the queries, or quantized to 8 bits (`quantize`): then there is no gradient, and scores are those of
        the dequantized embeddings.
    queries_mask
        [Nq, Lq], bool or 0/1 of uint8, a signed integer or a floating dtype of at least 16 bits, 1 where a token is
        active; active tokens need not be a prefix. None: all. A floating mask may hold weights, which multiply the best
        similarity of each token. No gradient flows to them. Negative and infinite weights, NaN, and integers other
        than 0 and 1 are an error on the CPU. On a GPU, where a check would synchronize, such a weight is used as is,
        and such an integer counts as 1.
    documents_mask
        [Nd, Ld] or [Nq, K, Ld], bool or 0/1 of these dtypes. None: all. Other values are an error on the CPU, and
        count as 1 on a GPU.
    normalize
        Divide every embedding by its Euclidean norm (at least 1e-12) first. Embeddings with an infinite norm, or on a
        GPU a norm of 2**64 or more, become NaN.
    reduction
        "sum" over the active query tokens, or "mean": divided by their number (MeanMaxSim).
    masking
        "exclude": a masked document token never wins. "zero": its similarity counts as 0, as in PyLate's torch scorer,
        so that the best similarity is at least 0 if the document has a masked token; where that 0 wins, no gradient
        flows.
    empty_score
        Score of a document with no active token: 0 as in PyLate, or a large negative number to rank it last. A query
        with no active token scores 0 against every other document.
    quantize_queries
        For quantized documents only. True: queries are quantized too, to fp8 if documents are, else to int8, and
        tensor cores multiply 8 bits, at twice the rate of 16; scores are those of dequantized queries. That changes a
        similarity about as much as quantizing the documents did. False: queries keep their dtype, to which documents
        are widened inside the product.
    implementation
        "auto", or by name: "triton" (CUDA, compute capability >= 8.0, 8.9 for fp8, at most 4096 dimensions, no float64)
        or "blocked" (plain torch in blocks). `explain` reports which one serves a call, and why.

    Returns
    -------
    Tensor
        [Nq, Nd] or [Nq, K], float32, or float64 for float64 inputs. Half inputs multiply in their own dtype and
        accumulate in float32; float32 inputs follow torch's setting for float32 products, which is
        `torch.backends.cuda.matmul.fp32_precision` on a GPU. NaN in an active token gives NaN, and infinities behave as
        in a matrix product of torch. Ties go to the lowest token index, except that on a CPU the similarities of two
        equal tokens may round to different last bits; the gradient flows to the winner only. Scores and gradients are
        bitwise reproducible. Tensor cores accumulate fp8 products with about 13 bits, a relative error of up to 1e-3.

    Raises
    ------
    TypeError
        If an argument is not a dense tensor, has a dtype not named above, or the two dtypes differ.
    ValueError
        If shapes, devices or embedding sizes do not fit together, a mask holds invalid values or requires a gradient,
        an option is not one of its choices, or an implementation requested by name does not support the input.
    RuntimeError
        If the call is differentiated by `torch.func`, in forward mode, or twice; with quantized documents, if at all.

    Examples
    --------
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, -1.0], [-1.0, 0.0]]])
    >>> maxsim(queries, documents)
    tensor([[1.5000, 0.0000]])
    """
    # The fields of `Options`, as a plain tuple: a replayed call needs no `Options` object.
    options = 0, 0, 0, checked_flag("normalize", normalize), reduction, masking, empty_score, implementation
    if isinstance(documents, QuantizedEmbeddings):
        tensors = Tensors(queries, documents.values, queries_mask, documents_mask)
        return scores_of_quantized("maxsim", tensors, Options(*options), documents, quantize_queries)
    checked_flag("quantize_queries", quantize_queries)
    return maxsim_operation((queries, documents, queries_mask, documents_mask, None, None, None, *options), "maxsim")


def maxsim_pairwise(
    queries: Tensor,
    documents: Tensor,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """MaxSim score of every query with the document of the same index: the diagonal of `maxsim`.

    Parameters
    ----------
    queries
        [N, Lq, d], of the dtypes that `maxsim` takes.
    documents
        [N, Ld, d].
    queries_mask, documents_mask
        [N, Lq], which may hold weights, and [N, Ld], or None, as in `maxsim`.
    normalize, reduction, masking, empty_score, implementation
        As in `maxsim`.

    Returns
    -------
    Tensor
        [N]; dtype, precision, NaN, ties and gradients as in `maxsim`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim`; ValueError also if the numbers of queries and documents differ.

    Examples
    --------
    >>> queries = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> maxsim_pairwise(queries, torch.tensor([[[2.0, 0.0]], [[0.0, 3.0]]]))
    tensor([2., 3.])
    """
    options = 0, 0, 0, checked_flag("normalize", normalize), reduction, masking, empty_score, implementation
    arguments = queries, documents, queries_mask, documents_mask, None, None, None, *options
    return scores_of_arguments(arguments, "maxsim_pairwise", _as_candidates).squeeze(1)


def _as_candidates(arguments: tuple) -> tuple:
    """Turn pairs into queries with one candidate each."""
    queries, documents, queries_mask, documents_mask, *rest = arguments
    check_tensor("queries", queries, {3: "[N, Lq, d]"})
    check_tensor("documents", documents, {3: "[N, Ld, d]"})
    if queries.shape[0] != documents.shape[0]:
        raise ValueError(
            f"documents must have one document per query, {queries.shape[0]}, got {documents.shape[0]} documents"
        )
    if documents_mask is not None:
        check_mask_layout("documents_mask", documents_mask, documents)
        documents_mask = documents_mask.unsqueeze(1)
    return queries, documents.unsqueeze(1), queries_mask, documents_mask, *rest
