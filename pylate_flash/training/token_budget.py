"""The number of tokens that a GPU can encode at once in training, determined by trial."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from ..encoding.projection import unwrapped
from ..encoding.texts import is_multi_vector_encoder, read_lengths
from ..ops.checks import check_integer
from .mini_batches import scored_tokens

# Fraction of the process's memory left free for other texts and allocator fragmentation, which the trial does not see.
_RESERVE = 0.1
# Bytes per parameter of Adam's two moments, which exist from the end of the first step on.
_OPTIMIZER_BYTES = 8


def largest_token_budget(loss: Any, documents: int, dtype: torch.dtype | None = None) -> int:
    """Find the largest `mini_batch_num_tokens` of a cached loss that fits into the memory of its model's GPU, by trial.

    Runs forward and backward in training mode on documents of the model's maximum length, doubling their number until
    memory does not suffice, while holding what a step will hold: the embeddings of the full batch with their gradients,
    the gradients of the parameters, Adam's moments, and a tenth of the memory as a reserve. Random states are restored;
    existing gradients are dropped. What the trainer adds to the model later (gradient checkpointing,
    DistributedDataParallel) is not included.

    Parameters
    ----------
    loss
        `losses.CachedContrastive`, or `CachedMultiVectorMultipleNegativesRankingLoss` of
        `hosts.sentence_transformers.losses`. Its model must be on the device that it will be trained on.
    documents
        Number of documents of a batch, over all columns: no more than their tokens are tried.
    dtype
        Autocast dtype of the training. None: no autocast.

    Returns
    -------
    int
        Number of tokens.

    Raises
    ------
    torch.OutOfMemoryError
        If not even one document fits.
    ValueError
        If `documents` is below 1 or `dtype` no half precision, if nothing limits the length of a document, or if the
        texts of a `MultiVectorEncoder` cannot be sorted by length, so that a number of tokens would not limit the
        memory.
    TypeError
        If `documents` is not an integer.

    Examples
    --------
    >>> # Not `mini_batch_size`, which would limit the texts too, by default to 32.
    >>> loss = losses.CachedContrastive(model.cuda(), mini_batch_num_tokens=1)  # doctest: +SKIP
    >>> loss.mini_batch_num_tokens = largest_token_budget(loss, 4096, torch.bfloat16)  # doctest: +SKIP
    """
    check_integer("documents", documents, minimum=1)
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.bfloat16, torch.float16 or None, got {dtype!r}")
    model = unwrapped(loss.model)
    is_encoder, training, device = is_multi_vector_encoder(model), model.training, model.device
    length = read_lengths(model)[1] if is_encoder else model.document_length
    if length is None:
        raise ValueError("nothing limits the length of a document; set the model's document_length")
    if is_encoder and scored_tokens(model, {**model.preprocess(["a"], task="document"), "task": "document"}) is None:
        raise ValueError(
            "the texts of this model cannot be sorted by length, so a number of tokens would not limit the memory; set "
            "mini_batch_size"
        )

    def fits(texts: int) -> bool:
        succeeded = True
        try:
            _try(model, texts, length, documents * length, dtype)
        except torch.OutOfMemoryError:
            succeeded = False
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            # The tensors held by the error's frames are freed by now, except for reference cycles.
            gc.collect()
            torch.cuda.empty_cache()
        return succeeded

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


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest tried size that fits, up to `limit`: a power of two, or 1.5 times one; 0 if 1 does not fit."""
    largest, size = 0, 1
    while fits(size):
        largest = size
        if size == limit:
            return largest
        size = min(2 * size, limit)
    middle = largest + largest // 2
    return middle if largest < middle < size and fits(middle) else largest


def _try(model: Any, texts: int, length: int, tokens: int, dtype: torch.dtype | None) -> None:
    """Run forward and backward on `texts` documents, holding the memory that a step with `tokens` tokens needs."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    reserved = _held(model, tokens, parameters)
    # From the second mini-batch on, the gradients coexist with the encoder's activations.
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    _encode_and_back(model, texts, length, dtype)
    del reserved


def _held(model: Any, tokens: int, parameters: list[torch.Tensor]) -> torch.Tensor:
    """Allocate the bytes that a step holds in addition to the encoder's memory and the parameters' gradients."""
    if model.device.type != "cuda":
        return torch.empty(0)
    is_encoder = is_multi_vector_encoder(model)
    embedding = (model.get_embedding_dimension() if is_encoder else model.get_sentence_embedding_dimension()) or 128
    # Embeddings and gradients in at most four bytes each, and the operation's float32 accumulators.
    size = tokens * embedding * 12 + _OPTIMIZER_BYTES * sum(parameter.numel() for parameter in parameters)
    return torch.empty(size + int(_RESERVE * _most(model.device)), dtype=torch.uint8, device=model.device)


def _most(device: torch.device) -> int:
    """Return the bytes of a GPU available to this process: what other processes leave, up to its limit if set."""
    free, total = torch.cuda.mem_get_info(device)
    # Older versions of PyTorch lack this function.
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
    # Random tokens: the worst case has no repeated tokens.
    features["input_ids"] = torch.randint(0, len(model.tokenizer), features["input_ids"].shape)
    features["attention_mask"] = torch.ones_like(features["attention_mask"])
    # Mask one token: without padding, attention builds no mask of all token pairs and may use other kernels.
    features["attention_mask"][0, -1] = 0
    features = {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in features.items()
    }
    with torch.autocast(model.device.type, dtype=dtype, enabled=dtype is not None):
        embeddings = model(features, **arguments)["token_embeddings"]
    embeddings.backward(torch.zeros_like(embeddings))
