"""How many tokens a GPU encodes at once in training, found by trying."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from ..encoding.projection import unwrapped
from ..encoding.texts import is_multi_vector_encoder, read_lengths
from .mini_batches import scored_tokens

__all__ = ["largest_token_budget"]

# Of the memory that the process may have: what other texts, and the allocator's fragments, may need beyond the trial.
_RESERVE = 0.1
# Bytes per parameter of Adam's two moments, which are there from the first step's end on.
_OPTIMIZER_BYTES = 8


def largest_token_budget(loss: Any, documents: int, dtype: torch.dtype | None = None) -> int:
    """The largest `mini_batch_num_tokens` of a cached loss that fits into the memory of its model's GPU, by trial.

    Documents of the model's greatest length are encoded in training mode, and the way back is gone, with twice as many
    each time until memory does not suffice, beside what a step will hold: the embeddings of the whole batch with their
    gradients, the gradients of the parameters, Adam's moments, and a tenth of the memory for what is not foreseen.
    Random states are as before; gradients that there are, are dropped. What the trainer puts around the model later
    (gradient checkpointing, DistributedDataParallel) is not tried.

    Parameters
    ----------
    loss
        `losses.CachedContrastive`, or `CachedMultiVectorMultipleNegativesRankingLoss` of
        `hosts.sentence_transformers.losses`. Its model lies where it will be trained.
    documents
        Of a batch, all columns together: more tokens than they have are not tried.
    dtype
        That of autocast in the training. None: no autocast.

    Returns
    -------
    int
        Tokens.

    Raises
    ------
    torch.OutOfMemoryError
        If not even one document fits.
    ValueError
        If nothing limits the length of a document, or the texts of a `MultiVectorEncoder` cannot be sorted by length,
        so that a number of tokens would not limit the memory.

    Examples
    --------
    >>> loss = losses.CachedContrastive(model.cuda())  # doctest: +SKIP
    >>> loss.mini_batch_num_tokens = largest_token_budget(loss, 4096, torch.bfloat16)  # doctest: +SKIP
    """
    model = unwrapped(loss.model)
    of_host, training, device = is_multi_vector_encoder(model), model.training, model.device
    length = read_lengths(model)[1] if of_host else model.document_length
    if length is None:
        raise ValueError("nothing limits the length of a document; set the model's document_length")
    if of_host and scored_tokens(model, {**model.preprocess(["a"], task="document"), "task": "document"}) is None:
        raise ValueError(
            "the texts of this model cannot be sorted by length, so that a number of tokens would not limit the "
            "memory; give mini_batch_size"
        )

    def fits(texts: int) -> bool:
        found = True
        try:
            _try(model, texts, length, documents * length, dtype)
        except torch.OutOfMemoryError:
            found = False
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            # What the error's frames held is gone by now, but for cycles.
            gc.collect()
            torch.cuda.empty_cache()
        return found

    try:
        model.train()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            texts = _largest(fits, documents)
    finally:
        model.zero_grad(set_to_none=True)
        model.train(training)
    if texts == 0:
        raise torch.OutOfMemoryError(f"not even one document of {length} tokens can be encoded beside the batch")
    return texts * length


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number tried that fits, at most `most`: a power of two or one and a half; 0 if not even 1 does."""
    found, size = 0, 1
    while fits(size):
        found = size
        if size == most:
            return found
        size = min(2 * size, most)
    between = found + found // 2
    return between if found < between < size and fits(between) else found


def _try(model: Any, texts: int, length: int, tokens: int, dtype: torch.dtype | None) -> None:
    """Encode so many documents and go the way back, beside what a step with so many tokens will hold."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    held = _held(model, tokens, parameters)
    # From the second mini-batch on, they are there while the encoder's activations grow.
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    _encode_and_back(model, texts, length, dtype)
    del held


def _held(model: Any, tokens: int, parameters: list[torch.Tensor]) -> torch.Tensor:
    """As many bytes as a step will hold beside what the encoder needs and the gradients of the parameters."""
    if model.device.type != "cuda":
        return torch.empty(0)
    of_host = is_multi_vector_encoder(model)
    embedding = (model.get_embedding_dimension() if of_host else model.get_sentence_embedding_dimension()) or 128
    # Embeddings and gradients in four bytes at most, and the operation's float32 sums.
    size = tokens * embedding * 12 + _OPTIMIZER_BYTES * sum(parameter.numel() for parameter in parameters)
    return torch.empty(size + int(_RESERVE * _most(model.device)), dtype=torch.uint8, device=model.device)


def _most(device: torch.device) -> int:
    """The bytes of a GPU that this process may have: what others leave, up to its limit if it has been given one."""
    free, total = torch.cuda.mem_get_info(device)
    # Older versions of PyTorch do not tell it.
    limit = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    return min(free + torch.cuda.memory_reserved(device), int(limit * total))


def _encode_and_back(model: Any, texts: int, length: int, dtype: torch.dtype | None) -> None:
    arguments: dict[str, str] = {}
    if is_multi_vector_encoder(model):
        arguments["task"] = "document"
        features = {
            name: value.new_zeros(texts, length) if isinstance(value, torch.Tensor) and value.ndim == 2 else value
            for name, value in model.preprocess(["a"], task="document").items()
        }
    else:
        features = model.tokenize(["a"] * texts, is_query=False, pad=True)
    # No token is like another, as in the batch that needs most.
    features["input_ids"] = torch.randint(0, len(model.tokenizer), features["input_ids"].shape)
    features["attention_mask"] = torch.ones_like(features["attention_mask"])
    # Where nothing is padded, attention makes no mask of all pairs of tokens, and other kernels may compute it.
    features["attention_mask"][0, -1] = 0
    features = {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in features.items()
    }
    with torch.autocast(model.device.type, dtype=dtype, enabled=dtype is not None):
        embeddings = model(features, **arguments)["token_embeddings"]
    embeddings.backward(torch.zeros_like(embeddings))
