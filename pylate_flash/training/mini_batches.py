"""The texts of a batch in mini-batches of about one length, encoded twice: without a graph, and with one (GradCache).

(Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021.) `mini_batches` sorts the
texts of every column by length and cuts them; a mini-batch is as long as its longest text. `encode` keeps the tokens
that are scored, packed; `encode_again` takes the gradient of each of these and passes it on to the parameters.
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

# Texts are cut at a multiple of so many tokens, where they are padded at all: half products of other lengths are slow.
_MULTIPLE = 8

# Features that say one thing of a whole column, whatever their shape.
_OF_A_COLUMN = ("prompt_length",)


_T = TypeVar("_T")


class Limits(NamedTuple):
    """What a mini-batch holds at most: texts, and tokens with their padding. None: no limit of this kind."""

    texts: int | None
    tokens: int | None


class Packed(NamedTuple):
    """Documents one after the other in [T, d], of which the longest has `longest` tokens; `lengths` [N] are int64."""

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
        How many tokens of each text are kept.
    """

    def __init__(self, column: Column, start: int, stop: int) -> None:
        self._column, self._texts = column, slice(start, stop)
        self.lengths = column.lengths[start:stop]
        self._padded_length = column.ends[start]
        # Of the CPU's generator, and of those of the devices of the features.
        self._random_states: tuple[Tensor, tuple[list[int], list[Tensor]]] | None = None

    def encode(self, model: Callable[..., dict[str, Tensor]]) -> dict[str, Tensor]:
        """The model's output, always in the random state of the first time."""
        column = self._column
        features = {
            name: self._cut(value) if name in column.of_texts else value for name, value in column.features.items()
        }
        if self._random_states is None:
            self._random_states = torch.get_rng_state(), get_device_states(*features.values())
            return model(features, **column.arguments)
        of_cpu, (devices, of_devices) = self._random_states
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(of_cpu)
            set_device_states(devices, of_devices)
            return model(features, **column.arguments)

    def _cut(self, value: Tensor) -> Tensor:
        """The texts of this mini-batch, of a tensor [N, ...], and their tokens of one [N, L]."""
        if value.ndim == 2 and value.shape[1] == self._column.kept.shape[1]:
            return value[self._texts, : self._padded_length]
        return value[self._texts]

    def pack(self, output: Tensor) -> Tensor:
        """The kept tokens [tokens, d] of an output [texts, padded length, d]."""
        kept = self._column.kept[self._texts]
        cut = kept[:, : self._padded_length]
        if self._column.zero_masked:
            output, cut = F.pad(output, (0, 0, 0, 1)), torch.cat([cut, ~kept.all(dim=1, keepdim=True)], dim=1)
        return kept_tokens(output, cut, sum(self.lengths))


class Column:
    """A tokenized column, its texts sorted by length and cut into mini-batches, the longest first.

    Attributes
    ----------
    order : Tensor
        The text that stands at each place now, int64, on the host.
    features : dict
        Of the texts in this order, and what belongs to no single text as it was.
    arguments : dict
        What the model is called with besides.
    lengths, ends : list of int
        Of each text, in the new order: the tokens that are kept, and those that are encoded, up to its last.
    n_kept : Tensor
        `lengths` on the device.
    batches : list of MiniBatch
    """

    def __init__(
        self,
        features: dict[str, Tensor],
        kept: Tensor,
        lengths: Tensor,
        ends: Tensor,
        limits: Limits,
        zero_masked: bool,
        arguments: dict[str, Any],
    ) -> None:
        # What does not fit into memory fails with the first mini-batch.
        self.order = ends.argsort(descending=True, stable=True)
        lengths, ends = lengths[self.order], ends[self.order]
        on_device, self.n_kept = torch.stack([self.order, lengths]).to(kept.device)
        self.of_texts = of_texts(features)
        self.features = {
            name: value.index_select(0, on_device) if name in self.of_texts else value
            for name, value in features.items()
        }
        self.arguments = arguments
        self.kept, self.zero_masked = kept.index_select(0, on_device), zero_masked
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
    """The names of a column's features that are tensors [N, ...] of its N texts."""
    size = len(features["input_ids"])
    return [
        name
        for name, value in features.items()
        if isinstance(value, Tensor) and value.ndim > 0 and len(value) == size and name not in _OF_A_COLUMN
    ]


def scored_tokens(model: Any, features: dict[str, Any]) -> Tensor | None:
    """Which tokens of a column of padded texts are scored by a `MultiVectorEncoder`, [N, L].

    None of other columns, as of images or flattened, and where only the model's forward can tell.
    """
    ids, masks = features.get("input_ids"), masks_of(model)
    if masks is None or not isinstance(ids, Tensor) or ids.ndim != 2 or features.get("modality", "text") != "text":
        return None
    tensors = {name for name, value in features.items() if isinstance(value, Tensor) and name not in _OF_A_COLUMN}
    if "attention_mask" not in tensors or "cu_seq_lens_q" in features or not tensors <= set(of_texts(features)):
        return None
    names = ("input_ids", "attention_mask", "query_expansion_positions")
    known = {name: value for name, value in features.items() if name in names}
    for mask in masks:
        known = mask(known, task=features["task"])
    return known["attention_mask"].bool()


def mini_batches(
    columns: Sequence[dict[str, Any]],
    kept: Sequence[Tensor],
    limits: Limits,
    zero_masked: Sequence[bool],
    arguments: Sequence[dict[str, Any]] | None = None,
) -> list[Column]:
    """Cut columns into mini-batches of texts of about one length.

    Waits once for the device, to read all lengths.

    Parameters
    ----------
    columns
        Tokenized, with ``input_ids`` and ``attention_mask`` [N, L].
    kept
        Of each column [N, L], bool: the tokens whose embeddings are kept. A text is cut after the last token that is
        kept or attended to.
    limits
        Of a mini-batch. A single text may have more tokens than that.
    zero_masked
        Of each column: whether a text of which not all tokens are kept gets a token of zeros in their place, with which
        the similarity of any query token is 0: what ``masking="zero"`` says of a masked token.
    arguments
        Of each column: what the model is called with besides the features.
    """
    arguments = [{} for _ in columns] if arguments is None else arguments
    measured = []
    for features, keep in zip(columns, kept, strict=True):
        places = torch.arange(1, keep.shape[1] + 1, device=keep.device)
        # Not the number of tokens: padding may stand on the left.
        last = (places * (keep | features["attention_mask"].bool())).amax(dim=1)
        measured += [keep.sum(dim=1), last]
    # The device has nothing to do until mini-batches are made: by a few operations on the host, not text by text.
    numbers = iter(torch.cat(measured).cpu().split([len(values) for values in measured]))
    found = []
    for features, keep, zeros, others in zip(columns, kept, zero_masked, arguments, strict=True):
        padded = keep.shape[1]
        lengths, ends = next(numbers), next(numbers)
        ends = (ends.clamp(min=1) + (_MULTIPLE - 1)).div(_MULTIPLE, rounding_mode="floor") * _MULTIPLE
        ends = ends.clamp(max=padded)
        if zeros:
            lengths = lengths + (lengths < padded)
        found.append(Column(features, keep, lengths, ends, limits, zeros, others))
    return found


def right_documents(queries: Column, documents: Column) -> Tensor:
    """[Nq], int64: where the document of each query's place stands, which was beside it."""
    # A permutation's inverse is what sorts it.
    return documents.order.argsort()[queries.order].to(queries.kept.device)


def encode(
    batches: Sequence[MiniBatch],
    model: Callable[..., dict[str, Tensor]],
    autocast: dict[str, Any],
    show_progress: bool = False,
) -> Tensor:
    """The kept tokens [T, d] of all mini-batches, in their order, without a graph.

    `autocast` are the arguments of `torch.autocast`, as in `encode_again`, where the caller's is not in force. Under
    it the tokens have its type, which they would be cast to next, but for float64.
    """
    tokens, start = torch.empty(0), 0
    for number, batch in enumerate(_shown(batches, show_progress)):
        with torch.no_grad(), torch.autocast(**autocast):
            found = batch.pack(batch.encode(model)["token_embeddings"])
        if number == 0:
            cast = autocast["enabled"] and found.dtype != torch.float64
            dtype = autocast["dtype"] if cast else found.dtype
            tokens = found.new_empty(sum(sum(batch.lengths) for batch in batches), found.shape[1], dtype=dtype)
        tokens[start : start + len(found)] = found
        start += len(found)
    # An autocast of the model's own may have kept weights that it cast without a graph, for a pass that needs one.
    torch.clear_autocast_cache()
    return tokens


def encode_again(
    parts: Sequence[tuple[Sequence[MiniBatch], Tensor]],
    model: Callable[..., dict[str, Tensor]],
    autocast: dict[str, Any],
    show_progress: bool = False,
    others: dict[str, Tensor] | None = None,
) -> None:
    """Encode with a graph, and pass the gradients of the kept tokens on to the parameters.

    DistributedDataParallel averages the sums over all mini-batches, once, with the last one: ranks may have different
    numbers of them.

    Parameters
    ----------
    parts
        What `encode` was given each time, and the gradient [T, d] of what it returned.
    model, autocast, show_progress
        As in `encode`.
    others
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
                reached = [(batch.pack(output["token_embeddings"]), gradient)]
            if is_last:
                reached += [(output[name], value) for name, value in (others or {}).items()]
            reached = [(tensor, value.to(tensor.dtype)) for tensor, value in reached if tensor.requires_grad]
            if reached:
                torch.autograd.backward([tensor for tensor, _ in reached], [value for _, value in reached])


def _shown(items: Sequence[_T], show_progress: bool) -> Iterable[_T]:
    return tqdm.tqdm(items, desc="Embed mini-batches") if show_progress else items


def _no_sync(model: Any) -> AbstractContextManager:
    """In this block, the gradients of a model in DistributedDataParallel stay with the rank."""
    inner = getattr(model, "_orig_mod", model)
    return inner.no_sync() if isinstance(inner, DistributedDataParallel) else nullcontext()


def kept_tokens(values: Tensor, kept: Tensor, total: int) -> Tensor:
    """The rows [total, d] of values [N, L, d] where kept [N, L] is true."""
    return values.flatten(0, 1).index_select(0, _first_true(kept, total))


def pack_padded(values: Tensor, mask: Tensor, zero_masked: bool) -> Packed:
    """Documents [N, L, d] without what is masked; `zero_masked` as in `mini_batches`. Waits for the device."""
    if zero_masked:
        values, mask = F.pad(values, (0, 0, 0, 1)), torch.cat([mask, ~mask.all(dim=1, keepdim=True)], dim=1)
    lengths = mask.sum(dim=1)
    total, longest = torch.stack([lengths.sum(), lengths.max()]).tolist()
    return Packed(kept_tokens(values, mask, total), lengths, longest)


def unpack_padded(values: Tensor, lengths: Tensor, padded_length: int) -> tuple[Tensor, Tensor | None]:
    """Packed tokens [T, d] as [N, padded_length, d], and their mask, None where there is no padding."""
    if len(values) == len(lengths) * padded_length:
        return values.view(len(lengths), padded_length, values.shape[1]), None
    mask = torch.arange(padded_length, device=values.device) < lengths.unsqueeze(1)
    places = _first_true(mask, len(values))
    padded = values.new_zeros(mask.numel(), values.shape[1]).index_copy(0, places, values)
    return padded.view(*mask.shape, -1), mask


def _first_true(mask: Tensor, total: int) -> Tensor:
    """Where a mask is true so many times, of the flattened one, in order: found without waiting for the device."""
    return torch.nonzero_static(mask.flatten(), size=total).squeeze(1)
