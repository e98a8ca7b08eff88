"""Mini-batches of texts of similar length, encoded twice: without a graph, and with one (GradCache).

(Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021.) `mini_batches` sorts the
texts of every column by length and splits them; a mini-batch is as long as its longest text. `encode` returns the
scored tokens, packed; `encode_again` takes their gradients and propagates them to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
import tqdm
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import get_device_states, set_device_states

from ..encoding.projection import masks_of

# Padded lengths are rounded up to a multiple of this: half-precision matmuls of other lengths are slow.
_MULTIPLE = 8

# Features that describe the column as a whole, whatever their shape.
_OF_A_COLUMN = ("prompt_length",)


_T = TypeVar("_T")


class Limits(NamedTuple):
    """Maximum size of a mini-batch: texts, and tokens including padding. None: no limit of this kind."""

    texts: int | None
    tokens: int | None


class Packed(NamedTuple):
    """Documents concatenated to [T, d], the longest with `longest` tokens; `lengths` [N] are int64."""

    tokens: Tensor
    lengths: Tensor
    longest: int

    @property
    def cu_seqlens(self) -> Tensor:
        return F.pad(self.lengths.cumsum(0), (1, 0)).int()


class MiniBatch:
    """Texts of a column that are encoded at once.

    Attributes
    ----------
    lengths : list of int
        Number of kept tokens of each text.
    """

    def __init__(self, column: Column, start: int, stop: int) -> None:
        self._column, self._texts = column, slice(start, stop)
        self.lengths = column.lengths[start:stop]
        self._padded_length = column.ends[start]
        # States of the CPU's generator, and of the generators of the features' devices.
        self._random_states: tuple[Tensor, tuple[list[int], list[Tensor]]] | None = None

    def encode(self, model: Callable[..., dict[str, Tensor]]) -> dict[str, Tensor]:
        """Run the model, always with the random state of the first call."""
        column = self._column
        features = {
            name: self._cut(value) if name in column.of_texts else value for name, value in column.features.items()
        }
        if self._random_states is None:
            self._random_states = torch.get_rng_state(), get_device_states(*features.values())
            return model(features, **column.arguments)
        cpu_state, (devices, device_states) = self._random_states
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(cpu_state)
            set_device_states(devices, device_states)
            return model(features, **column.arguments)

    def _cut(self, value: Tensor) -> Tensor:
        """Slice a tensor [N, ...] to the texts of this mini-batch, and a tensor [N, L] to their tokens too."""
        if value.ndim == 2 and value.shape[1] == self._column.keep.shape[1]:
            return value[self._texts, : self._padded_length]
        return value[self._texts]

    def pack(self, output: Tensor) -> Tensor:
        """Select the kept tokens [tokens, d] of an output [texts, padded length, d]."""
        keep = self._column.keep[self._texts]
        keep_cut = keep[:, : self._padded_length]
        if self._column.zero_masked:
            output, keep_cut = F.pad(output, (0, 0, 0, 1)), torch.cat([keep_cut, ~keep.all(dim=1, keepdim=True)], dim=1)
        return kept_tokens(output, keep_cut, sum(self.lengths))


class Column:
    """A tokenized column, its texts sorted by length and split into mini-batches, longest first.

    Attributes
    ----------
    order : Tensor
        The original index of the text at each sorted position, int64, on the host.
    features : dict
        Features of the texts in this order; features that belong to no single text are unchanged.
    arguments : dict
        Further arguments of the model.
    lengths, ends : list of int
        Per text, in the new order: the number of kept tokens, and of encoded tokens (up to its last).
    n_kept : Tensor
        `lengths` on the device.
    batches : list of MiniBatch
    """

    def __init__(
        self,
        features: dict[str, Tensor],
        keep: Tensor,
        lengths: Tensor,
        ends: Tensor,
        limits: Limits,
        zero_masked: bool,
        arguments: dict[str, Any],
    ) -> None:
        # Longest first: if memory does not suffice, the first mini-batch fails.
        self.order = ends.argsort(descending=True, stable=True)
        lengths, ends = lengths[self.order], ends[self.order]
        on_device, self.n_kept = torch.stack([self.order, lengths]).to(keep.device)
        self.of_texts = of_texts(features)
        self.features = {
            name: value.index_select(0, on_device) if name in self.of_texts else value
            for name, value in features.items()
        }
        self.arguments = arguments
        self.keep, self.zero_masked = keep.index_select(0, on_device), zero_masked
        self.lengths, self.ends = lengths.tolist(), ends.tolist()
        self.batches: list[MiniBatch] = []
        start = 0
        while start < len(self.ends):
            size = len(self.ends) if limits.texts is None else limits.texts
            if limits.tokens is not None:
                size = min(size, max(1, limits.tokens // self.ends[start]))
            self.batches.append(MiniBatch(self, start, min(start + size, len(self.ends))))
            start += size


def of_texts(features: dict[str, Any]) -> list[str]:
    """Return the names of a column's features that are tensors [N, ...] of its N texts."""
    size = len(features["input_ids"])
    return [
        name
        for name, value in features.items()
        if isinstance(value, Tensor) and value.ndim > 0 and len(value) == size and name not in _OF_A_COLUMN
    ]


def scored_tokens(model: Any, features: dict[str, Any]) -> Tensor | None:
    """Mask [N, L] of the tokens of a column of padded texts that a `MultiVectorEncoder` scores.

    None for other columns, such as images or flattened texts, and if only the model's forward can tell.
    """
    ids, masks = features.get("input_ids"), masks_of(model)
    if masks is None or not isinstance(ids, Tensor) or ids.ndim != 2 or features.get("modality", "text") != "text":
        return None
    tensors = {name for name, value in features.items() if isinstance(value, Tensor) and name not in _OF_A_COLUMN}
    if "attention_mask" not in tensors or "cu_seq_lens_q" in features or not tensors <= set(of_texts(features)):
        return None
    names = ("input_ids", "attention_mask", "query_expansion_positions")
    inputs = {name: value for name, value in features.items() if name in names}
    for mask in masks:
        inputs = mask(inputs, task=features["task"])
    return inputs["attention_mask"].bool()


def mini_batches(
    columns: Sequence[dict[str, Any]],
    keep_masks: Sequence[Tensor],
    limits: Limits,
    zero_masked: Sequence[bool],
    arguments: Sequence[dict[str, Any]] | None = None,
) -> list[Column]:
    """Split columns into mini-batches of texts of similar length.

    Waits once for the device, to read all lengths.

    Parameters
    ----------
    columns
        Tokenized, with ``input_ids`` and ``attention_mask`` [N, L].
    keep_masks
        Per column [N, L], bool: the tokens whose embeddings are kept. A text is cut after the last token that is kept
        or attended to.
    limits
        Limits of a mini-batch. A single text may have more tokens.
    zero_masked
        Per column: whether a text with tokens that are not kept gets a token of zeros in their place, whose similarity
        to any query token is 0, as ``masking="zero"`` defines for masked tokens.
    arguments
        Per column: arguments of the model besides the features.
    """
    arguments = [{} for _ in columns] if arguments is None else arguments
    counts = []
    for features, keep in zip(columns, keep_masks, strict=True):
        positions = torch.arange(1, keep.shape[1] + 1, device=keep.device)
        # The last position, not the number of tokens: padding may be on the left.
        last = (positions * (keep | features["attention_mask"].bool())).amax(dim=1)
        counts += [keep.sum(dim=1), last]
    # The device idles until the mini-batches exist: build them with a few vectorized operations on the host.
    numbers = iter(torch.cat(counts).cpu().split([len(values) for values in counts]))
    result = []
    for features, keep, zeros, extra_arguments in zip(columns, keep_masks, zero_masked, arguments, strict=True):
        padded = keep.shape[1]
        lengths, ends = next(numbers), next(numbers)
        ends = (ends.clamp(min=1) + (_MULTIPLE - 1)).div(_MULTIPLE, rounding_mode="floor") * _MULTIPLE
        ends = ends.clamp(max=padded)
        if zeros:
            lengths = lengths + (lengths < padded)
        result.append(Column(features, keep, lengths, ends, limits, zeros, extra_arguments))
    return result


def right_documents(queries: Column, documents: Column) -> Tensor:
    """Return [Nq], int64: the sorted position of the document that was in the same row as each sorted query."""
    # argsort of a permutation is its inverse.
    return documents.order.argsort()[queries.order].to(queries.keep.device)


def encode(
    batches: Sequence[MiniBatch],
    model: Callable[..., dict[str, Tensor]],
    autocast: dict[str, Any],
    show_progress: bool = False,
) -> Tensor:
    """Encode all mini-batches without a graph, and return their kept tokens [T, d] in order.

    `autocast` holds the arguments of `torch.autocast`, as in `encode_again`, where the caller's autocast is not active.
    If enabled, the tokens are stored in its dtype, to which they would be cast next, except float64 ones.
    """
    tokens, start = torch.empty(0), 0
    for number, batch in enumerate(_shown(batches, show_progress)):
        with torch.no_grad(), torch.autocast(**autocast):
            packed = batch.pack(batch.encode(model)["token_embeddings"])
        if number == 0:
            cast = autocast["enabled"] and packed.dtype != torch.float64
            dtype = autocast["dtype"] if cast else packed.dtype
            tokens = packed.new_empty(sum(sum(batch.lengths) for batch in batches), packed.shape[1], dtype=dtype)
        tokens[start : start + len(packed)] = packed
        start += len(packed)
    # Autocast inside the model may have cached weights cast without a graph; the second pass needs one.
    torch.clear_autocast_cache()
    return tokens


def encode_again(
    parts: Sequence[tuple[Sequence[MiniBatch], Tensor]],
    model: Callable[..., dict[str, Tensor]],
    autocast: dict[str, Any],
    show_progress: bool = False,
    extra_gradients: dict[str, Tensor] | None = None,
) -> None:
    """Encode with a graph, and propagate the gradients of the kept tokens to the parameters.

    DistributedDataParallel averages the sums over all mini-batches once, with the last one: ranks may have different
    numbers of them.

    Parameters
    ----------
    parts
        The mini-batches of each call of `encode`, and the gradient [T, d] of its result.
    model, autocast, show_progress
        As in `encode`.
    extra_gradients
        Gradients of further outputs of the model, by name, which do not depend on the texts.
    """
    slices = [
        (batch, part)
        for batches, gradient in parts
        for batch, part in zip(batches, gradient.split([sum(batch.lengths) for batch in batches]), strict=True)
    ]
    for number, (batch, gradient) in enumerate(_shown(slices, show_progress)):
        is_last = number == len(slices) - 1
        with nullcontext() if is_last else _no_sync(model), torch.enable_grad():
            with torch.autocast(**autocast):
                output = batch.encode(model)
                outputs = [(batch.pack(output["token_embeddings"]), gradient)]
            if is_last:
                outputs += [(output[name], value) for name, value in (extra_gradients or {}).items()]
            outputs = [(tensor, value.to(tensor.dtype)) for tensor, value in outputs if tensor.requires_grad]
            if outputs:
                torch.autograd.backward([tensor for tensor, _ in outputs], [value for _, value in outputs])


def _shown(items: Sequence[_T], show_progress: bool) -> Iterable[_T]:
    return tqdm.tqdm(items, desc="Embed mini-batches") if show_progress else items


def _no_sync(model: Any) -> AbstractContextManager:
    """Context in which a model in DistributedDataParallel does not synchronize its gradients."""
    inner = getattr(model, "_orig_mod", model)
    return inner.no_sync() if isinstance(inner, DistributedDataParallel) else nullcontext()


def kept_tokens(values: Tensor, mask: Tensor, total: int) -> Tensor:
    """Select the rows [total, d] of values [N, L, d] where `mask` [N, L] is true."""
    return values.flatten(0, 1).index_select(0, _first_true(mask, total))


def pack_padded(values: Tensor, mask: Tensor, zero_masked: bool) -> Packed:
    """Pack the unmasked tokens of documents [N, L, d]; `zero_masked` as in `mini_batches`. Waits for the device."""
    if zero_masked:
        values, mask = F.pad(values, (0, 0, 0, 1)), torch.cat([mask, ~mask.all(dim=1, keepdim=True)], dim=1)
    lengths = mask.sum(dim=1)
    total, longest = torch.stack([lengths.sum(), lengths.max()]).tolist()
    return Packed(kept_tokens(values, mask, total), lengths, longest)


def unpack_padded(values: Tensor, lengths: Tensor, padded_length: int) -> tuple[Tensor, Tensor | None]:
    """Pad packed tokens [T, d] to [N, padded_length, d]; return them and their mask, None if there is no padding."""
    if len(values) == len(lengths) * padded_length:
        return values.view(len(lengths), padded_length, values.shape[1]), None
    mask = torch.arange(padded_length, device=values.device) < lengths.unsqueeze(1)
    indices = _first_true(mask, len(values))
    padded = values.new_zeros(mask.numel(), values.shape[1]).index_copy(0, indices, values)
    return padded.view(*mask.shape, -1), mask


def _first_true(mask: Tensor, total: int) -> Tensor:
    """Return the flat indices of the `total` true elements of a mask, in order, without waiting for the device."""
    return torch.nonzero_static(mask.flatten(), size=total).squeeze(1)
