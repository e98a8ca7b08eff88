"""Hard negatives by exact search over the embeddings of a multi-vector model, of PyLate or of sentence-transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .encoding.texts import encode
from .hosts.sentence_transformers.scoring import EMPTY_DOCUMENT_SCORE
from .ops import maxsim_varlen, pack

__all__ = ["mine_hard_negatives"]

# Queries that are scored against the whole corpus at a time.
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
    """Find for every pair the texts that score highest and are no positive of its anchor.

    The embeddings of all texts are kept where the model is. Texts that differ only in the whitespace around them are
    one text.

    Parameters
    ----------
    model
        A ColBERT model of this package or of PyLate, or a `MultiVectorEncoder` of sentence-transformers, which scores
        by the mean over a query's tokens if that is its similarity.
    anchors, positives
        N queries, and a text that answers each. An anchor may come several times, with a positive each.
    corpus
        Texts among which to look. None: the positives. A text that is there twice is looked at once.
    other_forms
        Of a positive, texts of the corpus that are the same document, for example with a title before it: they are no
        negatives of its anchor either.
    num_negatives
        Negatives of every pair.
    range_min
        How many of the highest ranks to pass over, positives not counted: what is that close may be an answer too.
    max_score
        The most that a negative may score.
    absolute_margin
        By how much at least a negative scores less than the positive of the pair.
    relative_margin
        The same as a part of the positive's score: 0.05 asks for at most 95 % of it. That score has to be positive.
    batch_size
        Texts that are encoded at a time.
    show_progress_bar
        Show the progress of the encoding, and of the search.

    Returns
    -------
    list of dict
        `{"anchor", "positive", "negative_1", ..., "negative_n"}` of every pair that has as many negatives, in the order
        of the pairs: what `datasets.Dataset.from_list` takes, and its losses.

    Raises
    ------
    ValueError
        If there are not as many positives as anchors, or a number is out of range.

    Examples
    --------
    >>> rows = mine_hard_negatives(model, queries, answers, relative_margin=0.05)  # doctest: +SKIP
    >>> datasets.Dataset.from_list(rows).column_names  # doctest: +SKIP
    ['anchor', 'positive', 'negative_1', 'negative_2', 'negative_3']
    """
    if len(anchors) != len(positives):
        raise ValueError(f"positives must have one text per anchor, {len(anchors)}, got {len(positives)}")
    for name, number, least in (("num_negatives", num_negatives, 1), ("range_min", range_min, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {number!r}")
    if relative_margin is not None and not 0 <= relative_margin < 1:
        raise ValueError(f"relative_margin must be at least 0 and less than 1, got {relative_margin}")
    if not anchors:
        return []
    texts: list[str] = []
    place: dict[str, int] = {}
    n_candidates = _add(positives if corpus is None else corpus, texts, place)
    _add(positives, texts, place)
    same = {positive.strip(): {positive.strip()} for positive in positives}
    for positive, forms in (other_forms or {}).items():
        same.setdefault(positive.strip(), set()).update(form.strip() for form in forms)
    queries: list[str] = []
    query_of: dict[str, int] = {}
    _add(anchors, queries, query_of)
    # Of each query, its pairs, and the places of its answers.
    pairs: list[list[int]] = [[] for _ in queries]
    answers: list[set[int]] = [set() for _ in queries]
    for index, (anchor, positive) in enumerate(zip(anchors, positives, strict=True)):
        query = query_of[anchor.strip()]
        pairs[query].append(index)
        answers[query] |= {place[form] for form in same[positive.strip()] if form in place}
    reduction = "mean" if getattr(model, "similarity_fn_name", None) == "meanmaxsim" else "sum"
    documents, documents_bounds = _packed(model, texts, False, batch_size, show_progress_bar)
    tokens, bounds = _packed(model, queries, True, batch_size, show_progress_bar)
    found: list[dict[str, str] | None] = [None] * len(anchors)
    blocks = range(0, len(queries), _QUERIES)
    for start in tqdm(blocks, desc="Searching", unit="block", disable=not show_progress_bar):
        some = bounds[start : start + _QUERIES + 1]
        scores = maxsim_varlen(
            tokens[some[0] : some[-1]],
            documents,
            some - some[0],
            documents_bounds,
            reduction=reduction,
            empty_score=EMPTY_DOCUMENT_SCORE,
        )
        for query, row in enumerate(scores, start):
            # Beyond the candidates are positives that the corpus lacks: their scores are asked for, and no more.
            candidates = row[:n_candidates].clone()
            candidates[[i for i in answers[query] if i < n_candidates]] = -torch.inf
            for index in pairs[query]:
                bound = _bound(row[place[positives[index].strip()]], max_score, absolute_margin, relative_margin)
                chosen = _best(candidates, range_min, num_negatives, bound)
                if len(chosen) == num_negatives:
                    negatives = {f"negative_{n}": texts[i] for n, i in enumerate(chosen, 1)}
                    found[index] = {"anchor": anchors[index], "positive": positives[index], **negatives}
    return [row for row in found if row is not None]


def _add(some: Sequence[str], texts: list[str], place: dict[str, int]) -> int:
    """Append the texts that are not there, say where each stripped text is, and return how many there are then."""
    for text in some:
        if place.setdefault(text.strip(), len(texts)) == len(texts):
            texts.append(text)
    return len(texts)


def _packed(
    model: Any, texts: list[str], is_query: bool, batch_size: int, show_progress: bool
) -> tuple[Tensor, Tensor]:
    """Embeddings of texts, one after the other, and their boundaries, on the model's device."""
    found = encode(model, texts, is_query=is_query, batch_size=batch_size, show_progress=show_progress)
    packed, bounds = pack([torch.as_tensor(embeddings) for embeddings in found])
    return packed.to(model.device), bounds.to(model.device)


def _bound(
    positive: Tensor, max_score: float | None, absolute_margin: float | None, relative_margin: float | None
) -> float:
    """The most that a negative of a pair may score."""
    score = positive.item()
    bounds = [torch.inf if max_score is None else max_score]
    if absolute_margin is not None:
        bounds.append(score - absolute_margin)
    if relative_margin is not None:
        bounds.append(score * (1 - relative_margin))
    return min(bounds)


def _best(scores: Tensor, range_min: int, count: int, bound: float) -> list[int]:
    """The places of the highest scores of at most `bound` after the first `range_min`, and none of -inf."""
    order = torch.sort(scores, descending=True, stable=True)
    values, places = order.values[range_min:], order.indices[range_min:]
    return places[(values <= bound) & (values > -torch.inf)][:count].tolist()
