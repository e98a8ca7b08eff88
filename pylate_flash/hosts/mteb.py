"""Exact search in mteb with models of PyLate or sentence-transformers, encoding each corpus once.

    mteb.evaluate(pylate_flash.hosts.mteb.search(model, "encoded"), tasks)

It supports text tasks, retrieval and reranking, in all their languages and subsets. `pylate_flash.register("mteb")`
makes mteb's own wrappers of these models use this search.
"""

# ruff: noqa: E402
from __future__ import annotations

from .._extras import check_host

check_host("mteb", "pylate_flash.hosts.mteb")

# isort: split
import functools
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from mteb._create_dataloaders import create_dataloader
from mteb.models import ModelMeta, MultiVectorSearchEncoderWrapper
from mteb.models.abs_encoder import get_prompt
from mteb.types import PromptType

from ..beir import add_encoded
from ..encoding.model_record import ModelRecord
from ..encoding.texts import check_encodes, encoder_of, is_multi_vector_encoder
from ..index.layout import DTYPES
from ..indexes import Flat
from ..ops.checks import check_choice
from . import _MTEB_WRAPPERS, MTEB

__all__ = ["ExactSearch", "search"]

# Constructed from values: a type checker for Python 3.10 takes the enum's members for strings.
_QUERY, _DOCUMENT = PromptType("query"), PromptType("document")

# Arguments of `encode` that change how embeddings are computed or returned, but not which.
_WITHOUT_EFFECT = {
    "batch_size", "show_progress_bar", "device", "pool", "chunk_size", "convert_to_numpy", "convert_to_tensor",
}  # fmt: skip
_PLAIN = bool, int, float, str, type(None)


def search(
    model: Any,
    folder: str | os.PathLike[str] | None = None,
    *,
    dtype: str | None = None,
    device: str | torch.device | None = None,
) -> ExactSearch:
    """Wrap a model of either library so that mteb evaluates it by exact search.

    Parameters
    ----------
    model
        A ColBERT model of this package or of PyLate, or a `MultiVectorEncoder` of sentence-transformers. Its prompts
        are those of mteb's own wrappers.
    folder
        Where encoded corpora are stored, one index per model and corpus: evaluating the same weights on the same texts
        encodes no document again, and an interrupted evaluation resumes where it stopped. None: the latest corpus is
        kept in memory.
    dtype
        Storage format of the embeddings, as in `indexes.Flat`.
    device
        Device of the search. None: the model's device.

    Returns
    -------
    ExactSearch
        A model for `mteb.evaluate`.

    Raises
    ------
    TypeError, ValueError
        If `model` is not a model, for example a name, or `dtype` is not one of those of `indexes.Flat`.
    MissingExtraError
        When this module is imported, if mteb is not installed.

    Examples
    --------
    >>> import mteb  # doctest: +SKIP
    >>> mteb.evaluate(search(model, "encoded"), mteb.get_tasks(["SciFact", "NFCorpus"]))  # doctest: +SKIP
    """
    return ExactSearch(model, folder, dtype=dtype, device=device)


class ExactSearch:
    """A model as mteb's `SearchProtocol`, see `search`.

    Attributes
    ----------
    index_path
        Folder of the most recent index; None before the first one, or without `folder`.
    """

    def __init__(
        self,
        model: Any,
        folder: str | os.PathLike[str] | None = None,
        *,
        dtype: str | None = None,
        device: str | torch.device | None = None,
        prompts: Mapping[str, str] | None = None,
    ) -> None:
        check_encodes(model)
        if dtype is not None:
            check_choice("dtype", dtype, tuple(DTYPES))
        self.model = model
        self.folder = None if folder is None else Path(folder)
        self.dtype, self.device = dtype, device
        self._prompts = dict(getattr(model, "prompts", None) or {} if prompts is None else prompts)
        self._name = ""
        self._flat: Flat | None = None

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """Return the model's metadata, by which mteb keys results; a hash of the weights stands in for no revision."""
        if is_multi_vector_encoder(self.model):
            meta = ModelMeta.from_multi_vector_encoder_model(self.model)
        else:
            card = self.model.model_card_data
            about: dict[str, Any] = {
                "name": card.model_name or card.base_model,
                "revision": card.base_model_revision,
                "embed_dim": self.model.get_sentence_embedding_dimension(),
                "max_tokens": self.model.document_length,
                "similarity_fn_name": "MaxSim",
                "framework": ["PyLate", "PyTorch"],
                "model_type": ["late-interaction"],
            }
            meta = ModelMeta.create_empty(overwrites=about)
        if meta.revision == ModelMeta.create_empty().revision:
            meta = meta.model_copy(update={"revision": self._record().fingerprint[:40]})
        return meta

    @property
    def index_path(self) -> Path | None:
        return None if self._flat is None or self.folder is None else self._flat.index_path

    def index(
        self,
        corpus: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        encode_kwargs: Mapping[str, Any],
        num_proc: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Encode the documents that are not in the corpus's index yet; arguments are those of mteb's protocol.

        Raises
        ------
        ValueError
            If the task is not a pure text task, or a document's id is repeated.
        """
        texts = self._texts(corpus, task_metadata, _DOCUMENT, encode_kwargs, num_proc)
        prompt = get_prompt(self._prompts, task_metadata, _DOCUMENT)
        ids = list(corpus["id"])
        record = self._record()
        model = _digest([json.dumps(record.to_json(), sort_keys=True)])
        name = _digest([self.dtype or "", prompt or "", *_texts_of(encode_kwargs), *ids, *texts])
        if self._flat is None or self._name != f"{model}/{name}":
            self._flat = None  # Free its memory before the next index is filled.
            folder = None if self.folder is None else self.folder / model
            device = self.model.device if self.device is None else self.device
            self._flat = Flat(folder, name, dtype=self.dtype, device=device, show_progress=False)
            self._flat.record_model(self.model)
            self._name = f"{model}/{name}"
        # Documents are added in order, so an incomplete index holds the first ones.
        start = len(self._flat)
        documents = [{"id": id_, "text": text} for id_, text in zip(ids[start:], texts[start:], strict=True)]
        encode = self._encoder(_DOCUMENT, prompt, encode_kwargs)
        add_encoded(self._flat, documents, encode, encode_kwargs.get("batch_size", 32))

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        top_k: int,
        encode_kwargs: Mapping[str, Any],
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        num_proc: int | None = None,
        **kwargs: Any,
    ) -> dict[str, dict[str, float]]:
        """Score all documents of the corpus, or those of `top_ranked`; arguments are those of mteb's protocol.

        Returns
        -------
        dict
            For every query id, the scores of its `top_k` best documents by document id.

        Raises
        ------
        ValueError
            If no corpus has been indexed yet.
        """
        if self._flat is None:
            raise ValueError("there is no corpus to search: call index() before search()")
        ids = list(queries["id"])
        texts = self._texts(queries, task_metadata, _QUERY, encode_kwargs, num_proc)
        prompt = get_prompt(self._prompts, task_metadata, _QUERY)
        embeddings = self._encoder(_QUERY, prompt, encode_kwargs)(texts)
        subset = None if top_ranked is None else [list(top_ranked.get(id_, ())) for id_ in ids]
        results = self._flat(embeddings, k=top_k, subset=subset)
        # An index sums over the tokens of a query.
        is_mean = getattr(self.model, "similarity_fn_name", None) == "meanmaxsim"
        divisors = [max(1, len(tokens)) if is_mean else 1 for tokens in embeddings]
        return {
            id_: {hit["id"]: hit["score"] / divisor for hit in hits}
            for id_, hits, divisor in zip(ids, results, divisors, strict=True)
        }

    def _record(self) -> ModelRecord:
        return ModelRecord.of(self.model, None, Path())

    def _texts(
        self, rows: Any, task_metadata: Any, kind: PromptType, encode_kwargs: Mapping[str, Any], num_proc: int | None
    ) -> list[str]:
        """Build texts as mteb does: from title and body, query and instruction, or the turns of a conversation."""
        if task_metadata.modalities != ["text"]:
            raise ValueError(
                f"task {task_metadata.name} has modalities {', '.join(task_metadata.modalities)}; expected text only"
            )
        batches = create_dataloader(
            rows,
            task_metadata=task_metadata,
            prompt_type=kind,
            batch_size=encode_kwargs.get("batch_size", 32),
            num_proc=num_proc,
        )
        return [text for batch in batches for text in batch["text"]]

    def _encoder(
        self, kind: PromptType, prompt: str | None, encode_kwargs: Mapping[str, Any]
    ) -> Callable[[list[str]], list[Any]]:
        return functools.partial(encoder_of(self.model, kind == _QUERY), prompt=prompt, **encode_kwargs)


def _texts_of(encode_kwargs: Mapping[str, Any]) -> list[str]:
    """Texts that differ where arguments of `encode` do, which may change the embeddings of documents."""
    return [f"{name}={_text_of(name, encode_kwargs[name])}" for name in sorted(encode_kwargs.keys() - _WITHOUT_EFFECT)]


def _text_of(name: str, value: object) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    try:
        return pickle.dumps(value).hex()
    except Exception as error:
        raise TypeError(
            f"encode_kwargs[{name!r}] must be a value that pickle takes, which tells its index from others, got "
            f"{type(value).__name__}: {error}"
        ) from error


def _digest(parts: Iterable[str]) -> str:
    """Hash strings to a name, including their lengths, so that moving characters between strings changes it."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:32]


# The search of each of mteb's wrappers while it is registered.
_searches: WeakKeyDictionary[Any, ExactSearch] = WeakKeyDictionary()


def served_index(
    self: Any,
    corpus: Any,
    task_metadata: Any,
    hf_split: str,
    hf_subset: str,
    encode_kwargs: Any,
    num_proc: int | None,
    **kwargs: Any,
) -> None:
    """Serve `index` of mteb's wrappers while they are routed; tasks that are not pure text run mteb's own code."""
    options = {"task_metadata": task_metadata, "hf_split": hf_split, "hf_subset": hf_subset, **kwargs}
    options |= {"encode_kwargs": encode_kwargs, "num_proc": num_proc}
    if task_metadata.modalities != ["text"]:
        return _own(self, "index")(self, corpus, **options)
    if self not in _searches:
        folder, prompts = getattr(self, "base_index_dir", None), getattr(self, "model_prompts", None)
        _searches[self] = ExactSearch(self.model, folder, prompts=prompts)
    return _searches[self].index(corpus, **options)


def served_search(
    self: Any,
    queries: Any,
    task_metadata: Any,
    hf_split: str,
    hf_subset: str,
    top_k: int,
    encode_kwargs: Any,
    top_ranked: Any,
    num_proc: int | None,
    timer: Any = None,
    **kwargs: Any,
) -> dict[str, dict[str, float]]:
    """Serve `search` of mteb's wrappers while they are routed."""
    options = {"task_metadata": task_metadata, "hf_split": hf_split, "hf_subset": hf_subset, "top_k": top_k, **kwargs}
    options |= {"encode_kwargs": encode_kwargs, "top_ranked": top_ranked, "num_proc": num_proc}
    # Without an index of ours, mteb's own code has indexed the corpus.
    if task_metadata.modalities != ["text"] or self not in _searches:
        return _own(self, "search")(self, queries, **options, **({} if timer is None else {"timer": timer}))
    return _searches[self].search(queries, **options)


def _own(wrapper: Any, name: str) -> Callable[..., Any]:
    pylate_path, encoder_path = _MTEB_WRAPPERS
    path = encoder_path if isinstance(wrapper, MultiVectorSearchEncoderWrapper) else pylate_path
    return MTEB.original(f"{path}.{name}")
