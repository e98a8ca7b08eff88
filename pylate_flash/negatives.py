"""Hard negatives by exact search over the embeddings of a multi-vector model, of PyLate or of sentence-transformers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .encoding.texts import encode
from .hosts.sentence_transformers.scoring import EMPTY_DOCUMENT_SCORE
from .ops import maxsim_varlen, pack
from .ops.checks import check_integer

__all__ = ["mine_hard_negatives"]

# Queries scored against the whole corpus at a time.
_QUERIES = 256


def mine_hard_negatives(
    model: Any,
    anchors: Sequence[str],
    positives: Sequence[str],
    corpus: Sequence[str] | None = None,
    *,
    other_forms: Mapping[str, Collection[str]] | None = None,
    num_negatives: int = 3,
    range_min: int = 0,
    max_score: float | None = None,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
    batch_size: int = 32,
    show_progress_bar: bool = False,
) -> list[dict[str, str]]:
    """Find for every pair the highest-scoring texts that are not positives of its anchor.

    The embeddings of all texts are kept on the model's device. Texts that differ only in leading or trailing whitespace
    count as one.

    Parameters
    ----------
    model
        A ColBERT model of this package or of PyLate, or a `MultiVectorEncoder` of sentence-transformers, which scores
        by the mean over a query's tokens if that is its similarity.
    anchors, positives
        N queries, and a text that answers each. An anchor may occur several times, each time with a positive.
    corpus
        Texts to search. None: the positives. Duplicates are searched once.
    other_forms
        For a positive, texts of the corpus that are the same document, for example with its title prepended: they are
        not negatives of its anchor either.
    num_negatives
        Negatives of every pair.
    range_min
        Number of highest ranks to skip, not counting positives: texts that close may be answers, too.
    max_score
        Maximum score of a negative.
    absolute_margin
        Minimum by which a negative scores less than the positive of the pair.
    relative_margin
        The same as a fraction of the absolute value of the positive's score: 0.05 allows at most 95 % of a score above
        0, and at most 105 % of one below.
    batch_size
        Texts that are encoded at a time.
    show_progress_bar
        Show the progress of the encoding, and of the search.

    Returns
    -------
    list of dict
        `{"anchor", "positive", "negative_1", ..., "negative_n"}` for every pair with enough negatives, in the order of
        the pairs, as `datasets.Dataset.from_list` and the losses take them.

    Raises
    ------
    ValueError
        If there are not as many positives as anchors, or a number is out of range.
    TypeError
        If an argument is not a list of texts where one is expected, `model` is no model, `other_forms` no mapping, or
        `batch_size` not an integer.

    Examples
    --------
    >>> rows = mine_hard_negatives(model, queries, answers, relative_margin=0.05)  # doctest: +SKIP
    >>> datasets.Dataset.from_list(rows).column_names  # doctest: +SKIP
    ['anchor', 'positive', 'negative_1', 'negative_2', 'negative_3']
    """
    anchors, positives = _texts("anchors", anchors), _texts("positives", positives)
    corpus = positives if corpus is None else _texts("corpus", corpus)
    if other_forms is not None and not isinstance(other_forms, Mapping):
        raise TypeError(f"other_forms must be a mapping of texts to lists of texts, got {type(other_forms).__name__}")
    _texts("list(other_forms)", other_forms or ())
    other_forms = {key: _texts(f"other_forms[{key!r:.100}]", forms) for key, forms in (other_forms or {}).items()}
    if len(anchors) != len(positives):
        raise ValueError(f"positives must have one text per anchor, {len(anchors)}, got {len(positives)}")
    for name, number, minimum in (("num_negatives", num_negatives, 1), ("range_min", range_min, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < minimum:
            raise ValueError(f"{name} must be an integer of at least {minimum}, got {number!r}")
    check_integer("batch_size", batch_size, minimum=1)
    bounds_of_scores = {"max_score": max_score, "absolute_margin": absolute_margin, "relative_margin": relative_margin}
    for name, value in bounds_of_scores.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real) or value != value):
            raise ValueError(f"{name} must be None or a number other than NaN, got {value!r:.100}")
    if relative_margin is not None and not 0 <= relative_margin < 1:
        raise ValueError(f"relative_margin must be at least 0 and less than 1, got {relative_margin}")
    if not anchors:
        return []
    texts: list[str] = []
    position_of: dict[str, int] = {}
    n_candidates = _add(corpus, texts, position_of)
    _add(positives, texts, position_of)
    forms_of = {positive.strip(): {positive.strip()} for positive in positives}
    for positive, forms in other_forms.items():
        forms_of.setdefault(positive.strip(), set()).update(form.strip() for form in forms)
    queries: list[str] = []
    query_of: dict[str, int] = {}
    _add(anchors, queries, query_of)
    # For each query, its pairs, and the indices of its answers.
    pairs: list[list[int]] = [[] for _ in queries]
    answers: list[set[int]] = [set() for _ in queries]
    for index, (anchor, positive) in enumerate(zip(anchors, positives, strict=True)):
        query = query_of[anchor.strip()]
        pairs[query].append(index)
        answers[query] |= {position_of[form] for form in forms_of[positive.strip()] if form in position_of}
    reduction = "mean" if getattr(model, "similarity_fn_name", None) == "meanmaxsim" else "sum"
    documents, documents_bounds = _packed(model, texts, False, batch_size, show_progress_bar)
    tokens, bounds = _packed(model, queries, True, batch_size, show_progress_bar)
    mined: list[dict[str, str] | None] = [None] * len(anchors)
    blocks = range(0, len(queries), _QUERIES)
    for start in tqdm(blocks, desc="Searching", unit="block", disable=not show_progress_bar):
        block_bounds = bounds[start : start + _QUERIES + 1]
        scores = maxsim_varlen(
            tokens[block_bounds[0] : block_bounds[-1]],
            documents,
            block_bounds - block_bounds[0],
            documents_bounds,
            reduction=reduction,
            empty_score=EMPTY_DOCUMENT_SCORE,
        )
        for query, row in enumerate(scores, start):
            # After the candidates come positives missing from the corpus: only their scores are needed.
            candidates = row[:n_candidates].clone()
            candidates[[i for i in answers[query] if i < n_candidates]] = -torch.inf
            for index in pairs[query]:
                bound = _bound(row[position_of[positives[index].strip()]], max_score, absolute_margin, relative_margin)
                chosen = _best(candidates, range_min, num_negatives, bound)
                if len(chosen) == num_negatives:
                    negatives = {f"negative_{n}": texts[i] for n, i in enumerate(chosen, 1)}
                    mined[index] = {"anchor": anchors[index], "positive": positives[index], **negatives}
    return [row for row in mined if row is not None]


def _texts(name: str, texts: Iterable[str]) -> list[str]:
    """Return texts as a list; TypeError if they are a single string, or one of them is not a string."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise TypeError(f"{name} must be a list of strings, got {texts!r:.100} of type {type(texts).__name__}")
    texts = list(texts)
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{i}] must be a string, got {text!r:.100} of type {type(text).__name__}")
    return texts


def _add(new_texts: Sequence[str], texts: list[str], position_of: dict[str, int]) -> int:
    """Append new texts, record the index of each stripped text, and return the number of texts."""
    for text in new_texts:
        if position_of.setdefault(text.strip(), len(texts)) == len(texts):
            texts.append(text)
    return len(texts)


def _packed(
    model: Any, texts: list[str], is_query: bool, batch_size: int, show_progress: bool
) -> tuple[Tensor, Tensor]:
    """Packed embeddings of texts, and their boundaries, on the model's device."""
    encoded = encode(model, texts, is_query=is_query, batch_size=batch_size, show_progress=show_progress)
    packed, bounds = pack([torch.as_tensor(embeddings) for embeddings in encoded])
    return packed.to(model.device), bounds.to(model.device)


def _bound(
    positive: Tensor, max_score: float | None, absolute_margin: float | None, relative_margin: float | None
) -> float:
    """Maximum score of a negative of a pair."""
    score = positive.item()
    bounds = [torch.inf if max_score is None else max_score]
    if absolute_margin is not None:
        bounds.append(score - absolute_margin)
    if relative_margin is not None:
        bounds.append(score - relative_margin * abs(score))
    return min(bounds)


def _best(scores: Tensor, range_min: int, count: int, bound: float) -> list[int]:
    """Indices of the highest scores, after skipping `range_min`, that are at most `bound` and not -inf."""
    order = torch.sort(scores, descending=True, stable=True)
    values, indices = order.values[range_min:], order.indices[range_min:]
    return indices[(values <= bound) & (values > -torch.inf)][:count].tolist()
