"""PyLate's `rank`: rerank the candidates of each query, embeddings or texts, with one fused call for all queries."""

from __future__ import annotations

from .hosts.pylate import _needs  # noqa: F401

# isort: split
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from pylate.rank import RerankResult, score_xtr
from pylate.rank import rank as _pylate
from torch import Tensor
from tqdm import tqdm

from ._config import backend_in_force
from .encoding.projection import dense_layers, encode_hidden_states, fold_dense, unwrapped
from .hosts.pylate.operands import cu_seqlens, left_to_pylate, of_one_type, tokens_of
from .ops import maxsim_from_hidden, maxsim_varlen
from .ops.checks import check_integer, checked_device, checked_flag
from .ops.staging import concatenate
from .ops.tiles import sequence_blocks
from .problem import accumulation_dtype
from .register import use_scorer
from .scores import scorer_of

__all__ = ["RerankResult", "rerank", "score_xtr"]

# Save PyLate's function: while registered, its name in PyLate refers to the function below.
_pylate_rerank: Callable = _pylate.rerank


def rerank(
    documents_ids: list[list[int | str]],
    queries_embeddings: list | np.ndarray | Tensor,
    documents_embeddings: list | np.ndarray | Tensor,
    device: str | torch.device | None = None,
    *,
    model: Any = None,
    backend: str | None = None,
    fuse_projection: bool | None = None,
    batch_size: int = 32,
    show_progress_bar: bool = False,
) -> list[list[RerankResult]]:
    """Order each query's documents by their MaxSim score, best first.

    All queries and their candidates, of any lengths, are packed without padding, moved to the device once, scored in
    one call and sorted there; documents with equal scores keep their order. On the CPU, a few queries at a time are
    packed, so that their candidates stay in the cache, and are never all copied at once.

    Queries and documents may be texts, which `model` encodes first: every distinct document once, however many queries
    it is a candidate of.

    Parameters
    ----------
    documents_ids
        For each query the ids of its documents.
    queries_embeddings
        For each query its tokens [Lq_i, d]: a list of tensors, arrays or nested lists, or a padded batch [Nq, Lq, d].
        An array or tensor [Lq, d] is a single query. Or, with `model`, a list of texts.
    documents_embeddings
        For each query its documents, in the order of `documents_ids`, each [Ld_ij, d] like the queries. A document
        without tokens scores 0, and a query may have no documents. Texts, if the queries are.
    device
        Where to score. None: the device of the queries or, for texts, of the model.
    model
        The model that encodes texts, and whose flags `scorer` and `masking` apply. With `masking="zero"`, a document
        shorter than the longest candidate of its query is scored as by PyLate, which pads it with zeros: no query
        token's best similarity is then below 0.
    backend
        Replaces the model's `scorer`: `"pylate_flash"`, `"auto"`, or one of PyLate's, `"torch"`, `"flash"` and `"lik"`,
        for which PyLate's own `rerank` runs. None: see `pylate_flash.scores`.
    fuse_projection
        Score texts from the encoder's hidden states: document embeddings are never materialized, and hidden states only
        for a few batches at a time. The scores are the same up to rounding. None: as the model's flag says, if the
        scorer is this package's and masking is "exclude".
    batch_size
        Texts that are encoded at a time.
    show_progress_bar
        Draw progress bars while texts are encoded.

    Returns
    -------
    list[list[RerankResult]]
        For each query a list of `{"id": ..., "score": ...}`, the score a Python float, best first.

    Raises
    ------
    ValueError, TypeError
        If the arguments are no lists, do not have one entry per query, or the ids of a query not one per document; if
        embeddings are not [tokens, d] with the same d everywhere, lie on several devices, or are not floating, unless
        all are of an integer type, which `"auto"` leaves to PyLate; if there are texts without a model, or a mixture of
        texts and embeddings; if `fuse_projection` is True and there are no texts, the scorer or the masking is another
        one, or the model is not an encoder followed by linear Dense layers; if `fuse_projection` is neither None nor a
        bool, torch cannot use `device`, or `batch_size` is not an integer of at least 1.

    Examples
    --------
    >>> import torch
    >>> rerank(
    ...     documents_ids=[["a", "b"]],
    ...     queries_embeddings=[torch.tensor([[1.0, 0.0], [0.0, 1.0]])],
    ...     documents_embeddings=[[torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])]],
    ... )
    [[{'id': 'b', 'score': 2.0}, {'id': 'a', 'score': 1.0}]]
    """
    model = unwrapped(model)
    scorer, masking = scorer_of(model)
    backend = backend_in_force(backend if backend is not None or scorer == "auto" else scorer)
    check_integer("batch_size", batch_size, minimum=1)
    device = None if device is None else checked_device("device", device)
    if fuse_projection is not None:
        fuse_projection = checked_flag("fuse_projection", fuse_projection)
    _check_list("queries_embeddings", queries_embeddings, "one entry per query")
    of_queries = ("documents_ids", documents_ids, "ids"), ("documents_embeddings", documents_embeddings, "documents")
    for name, lists, items in of_queries:
        _check_list(name, lists, "one entry per query")
        for i, entries in enumerate(lists):
            _check_list(f"{name}[{i}]", entries, items)
    if isinstance(queries_embeddings, (np.ndarray, Tensor)) and queries_embeddings.ndim == 2:
        queries_embeddings = queries_embeddings[None]
    texts = _are_texts(queries_embeddings, documents_embeddings)
    _check_lengths(documents_ids, queries_embeddings, documents_embeddings)
    if texts and (isinstance(model, str) or not hasattr(model, "encode")):
        raise ValueError(f"model: texts need a ColBERT model that encodes them, got {type(model).__name__}")
    inputs = queries_embeddings, documents_embeddings, model
    if _fuses(model, texts, backend, masking, fuse_projection):
        return _results(_scores_of_texts(*inputs, device, batch_size, show_progress_bar), documents_ids)
    if texts:
        queries_embeddings, documents_embeddings = _encoded(*inputs, batch_size, show_progress_bar)
    if backend not in ("auto", "pylate_flash"):
        with use_scorer(backend):
            return _by_pylate(documents_ids, queries_embeddings, documents_embeddings, device)

    queries = tokens_of(queries_embeddings, "queries_embeddings")
    documents = [
        tokens
        for i, candidates in enumerate(documents_embeddings)
        for tokens in tokens_of(candidates, "documents_embeddings", i)
    ]
    counts = [len(query_ids) for query_ids in documents_ids]
    first_document = np.cumsum([0, *counts])
    scores = []
    for first, last in _blocks(queries, documents, first_document, device) if documents else ():
        block_documents, block_counts = documents[first_document[first] : first_document[last]], counts[first:last]
        if not block_documents:
            continue
        lengths = [tokens.shape[0] for tokens in block_documents]
        if masking == "zero":
            block_documents, lengths = _with_padding_token(block_documents, lengths, block_counts)
        block_queries, block_documents = of_one_type(queries[first:last], block_documents)
        packed_queries, packed_documents = concatenate(block_queries, device), concatenate(block_documents, device)
        if backend == "auto" and left_to_pylate(packed_queries, packed_documents):
            return _by_pylate(documents_ids, queries_embeddings, documents_embeddings, device)
        if device is None:
            packed_documents = packed_documents.to(packed_queries.device)
        # The boundaries stay on the host, where the operation plans its work.
        queries_bounds = cu_seqlens([tokens.shape[0] for tokens in block_queries])
        with torch.no_grad():
            block_scores = maxsim_varlen(
                packed_queries,
                packed_documents,
                queries_bounds,
                cu_seqlens(lengths),
                candidates_cu_seqlens=cu_seqlens(block_counts),
            )
        scores.append(block_scores)
    return _results(torch.cat(scores) if scores else torch.empty(0), documents_ids)


def _by_pylate(ids: Any, queries: Any, documents: Any, device: Any) -> list[list[RerankResult]]:
    """Rerank by PyLate, which takes no query without documents, and has integer scores for integer embeddings."""
    scored = [i for i, candidates in enumerate(documents) if len(candidates)]
    ranked = iter(_pylate_rerank(*([argument[i] for i in scored] for argument in (ids, queries, documents)), device))
    return [
        [{"id": result["id"], "score": float(result["score"])} for result in next(ranked)] if len(candidates) else []
        for candidates in documents
    ]


def _results(scores: Tensor, documents_ids: list[list[int | str]]) -> list[list[RerankResult]]:
    """Sort the scores [Nd] of the documents of consecutive queries into results.

    A single tensor is copied back from the device.
    """
    counts, ids = list(map(len, documents_ids)), list(chain(*documents_ids))
    # By score, then by query with a stable sort: a segmented sort in two passes.
    order = torch.argsort(scores, descending=True, stable=True)
    query_of_document = torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts)).to(scores.device)
    order = order[torch.argsort(query_of_document[order], stable=True)]
    # View the bits of the scores as integers, so that scores and order are one copy.
    bits = torch.int64 if scores.dtype == torch.float64 else torch.int32
    ranked, order = torch.stack([scores[order].view(bits), order.to(bits)]).cpu()
    results: Iterator[RerankResult] = (
        {"id": ids[index], "score": score}
        for index, score in zip(order.tolist(), ranked.view(scores.dtype).tolist(), strict=True)
    )
    return [list(islice(results, count)) for count in counts]


def _are_texts(queries: Any, documents: Any) -> bool:
    """Whether queries and documents are texts; raise if only some are."""
    lists = [
        ("queries_embeddings", queries),
        *((f"documents_embeddings[{i}]", items) for i, items in enumerate(documents)),
    ]
    for name, items in lists:
        if isinstance(items, str):
            raise ValueError(f"{name} must be a list of texts or of embeddings, got the text {items!r}")
    arrays = (np.ndarray, Tensor)
    kinds = {isinstance(item, str) for _, items in lists for item in ([items] if isinstance(items, arrays) else items)}
    if len(kinds) == 2:
        raise ValueError("queries_embeddings and documents_embeddings must be texts or embeddings, got some of both")
    return kinds == {True}


def _fuses(model: Any, texts: bool, backend: str, masking: str, fuse_projection: bool | None) -> bool:
    """Whether to score from hidden states; raise if that is requested and not possible."""
    reason = None
    if not texts:
        reason = "needs texts, got embeddings"
    elif backend not in ("auto", "pylate_flash"):
        reason = f'needs the scorer "pylate_flash" or "auto", got "{backend}"'
    elif masking != "exclude":
        # With "zero", a document's score depends on the lengths of the other candidates.
        reason = f'needs the masking "exclude", got "{masking}"'
    if fuse_projection and reason:
        raise ValueError(f"fuse_projection: {reason}")
    if fuse_projection is None:
        fuse_projection = getattr(model, "fuse_projection", False)
    return bool(fuse_projection) and reason is None


def _encoded(
    queries: Any, documents: Any, model: Any, batch_size: int, show_progress_bar: bool
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Encode the texts of queries and of their documents; equal documents share one tensor."""

    def encode(texts: list[str], is_query: bool) -> list[Tensor]:
        options = {"batch_size": batch_size, "show_progress_bar": show_progress_bar, "convert_to_numpy": False}
        return model.encode(texts, is_query=is_query, **options) if texts else []

    distinct = list(dict.fromkeys(chain(*documents)))
    embeddings = dict(zip(distinct, encode(distinct, is_query=False), strict=True))
    return encode(queries, is_query=True), [[embeddings[text] for text in candidates] for candidates in documents]


# Texts that are encoded together are sorted by length: with few of them, much of the work would be padding.
_BATCHES_AT_ONCE = 16


@torch.no_grad()
def _scores_of_texts(
    queries: Any,
    documents: Any,
    model: Any,
    device: torch.device | None,
    batch_size: int,
    show_progress_bar: bool,
) -> Tensor:
    """Scores [Nd] of the texts of consecutive queries' documents, from hidden states."""
    encoded, _ = _encoded(queries, [], model, batch_size, show_progress_bar)
    weight, bias = fold_dense(dense_layers(model))
    device = encoded[0].device if device is None else device
    index_of: dict[str, int] = {}
    pairs = [(i, index_of.setdefault(text, len(index_of))) for i, batch in enumerate(documents) for text in batch]
    owners, indices = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    distinct, step = list(index_of), batch_size * _BATCHES_AT_ONCE
    scores = torch.zeros(len(pairs), dtype=accumulation_dtype(weight.dtype), device=device)
    with tqdm(total=len(distinct), desc="Scoring documents", unit="doc", disable=not show_progress_bar) as progress:
        for start in range(0, len(distinct), step):
            states = encode_hidden_states(
                model, distinct[start : start + step], batch_size=batch_size, convert_to_numpy=False
            )
            inside = np.flatnonzero((indices >= start) & (indices < start + step))
            # Score all of these documents for every query that has one of them: cheap compared to encoding.
            query_indices, rows = np.unique(owners[inside], return_inverse=True)
            batch = [encoded[i] for i in query_indices]
            block = maxsim_from_hidden(
                torch.cat(batch).to(device),
                torch.cat(states).to(device),
                weight.to(device),
                None if bias is None else bias.to(device),
                queries_cu_seqlens=cu_seqlens([len(tokens) for tokens in batch]),
                documents_cu_seqlens=cu_seqlens([len(tokens) for tokens in states]),
            )
            scores[torch.from_numpy(inside)] = block[torch.from_numpy(rows), torch.from_numpy(indices[inside] - start)]
            progress.update(len(states))
    return scores


# Bytes of documents packed at a time on the CPU: they stay in its caches between the copy and the product.
_BLOCK_BYTES = 8 << 20


def _blocks(
    queries: list[Tensor], documents: list[Tensor], first_document: np.ndarray, device: torch.device | None
) -> list[tuple[int, int]]:
    """Ranges of queries to score together: few at a time on the CPU, all on other devices.

    Embeddings that differ in device, dtype or size are kept together too, so that they are checked against each other.
    """
    first = queries[0]
    on_cpu = (first.device if device is None else device).type == "cpu"
    if (
        not on_cpu
        or first.device.type != "cpu"
        or len({(tokens.device, tokens.dtype, tokens.shape[-1]) for tokens in (*queries, *documents)}) > 1
    ):
        return [(0, len(queries))]
    lengths = np.fromiter((tokens.shape[0] for tokens in documents), dtype=np.int64, count=len(documents))
    bounds = np.concatenate([[0], lengths.cumsum()])[first_document]
    return sequence_blocks(bounds, _BLOCK_BYTES // (first.element_size() * max(1, first.shape[-1])))


def _check_list(name: str, value: Any, items: str) -> None:
    """Raise TypeError unless `value` is a list or an array; a text in place of documents has an error of its own."""
    is_text = isinstance(value, str) and name.startswith("documents_ids")
    # A set has an order of its own, unlike the keys of a dictionary.
    unordered = isinstance(value, set | frozenset | Mapping)
    if is_text or unordered or not isinstance(value, Collection) or getattr(value, "ndim", 1) == 0:
        raise TypeError(f"{name} must be a list of {items}, got {type(value).__name__}")


def _check_lengths(documents_ids: Any, queries_embeddings: Any, documents_embeddings: Any) -> None:
    if not len(documents_ids) == len(queries_embeddings) == len(documents_embeddings):
        raise ValueError(
            "documents_ids, queries_embeddings and documents_embeddings must have one entry per query, got "
            f"{len(documents_ids)}, {len(queries_embeddings)} and {len(documents_embeddings)}"
        )
    for i, (ids, documents) in enumerate(zip(documents_ids, documents_embeddings, strict=True)):
        if len(ids) != len(documents):
            raise ValueError(
                f"documents_ids[{i}] must have one id per document, {len(documents)} as documents_embeddings[{i}], "
                f"got {len(ids)}"
            )


def _with_padding_token(
    documents: list[Tensor], lengths: list[int], counts: list[int]
) -> tuple[list[Tensor], list[int]]:
    """Append one token of zeros to each document that PyLate would pad; return the pieces and the new lengths.

    One such token stands for all of a document's padding: each has the similarity 0 to every query token.
    """
    pieces: list[Tensor] = []
    padded_lengths = list(lengths)
    start = 0
    for count in counts:
        longest = max(lengths[start : start + count], default=0)
        for i in range(start, start + count):
            pieces.append(documents[i])
            if 0 < lengths[i] < longest:
                pieces.append(documents[i].new_zeros(1, documents[i].shape[1]))
                padded_lengths[i] += 1
        start += count
    return pieces, padded_lengths
