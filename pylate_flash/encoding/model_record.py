"""Which model made the embeddings of an index, so that no other one searches it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..encoding.projection import unwrapped
from ..encoding.texts import TextLengths, is_multi_vector_encoder, text_lengths

__all__ = ["ModelRecord", "fingerprint", "places_of", "relative_to"]

# Attributes of PyLate's ColBERT that change what `encode` returns, beside those that have fields of their own.
_SETTINGS = ("do_query_expansion", "attend_to_expansion_tokens", "skiplist_words", "prompts", "default_prompt_name")
# Settings of the modules of a `MultiVectorEncoder` that do so.
_OF_MODULES = (
    "query_length", "document_length", "query_expansion", "skiplist_words", "skiplist_tasks", "keep_only_token_ids",
)  # fmt: skip
_PREFIXES = ("query_prefix", "document_prefix")


@dataclass(frozen=True)
class ModelRecord:
    """A model as an index remembers it.

    Attributes
    ----------
    name
        What it was loaded from, as the user gave it; for a folder, its absolute path. None if that was not said.
    relative
        For a folder, its path as seen from the index's own folder, so that both can be moved together; else None.
    fingerprint
        `fingerprint` of the model.
    query_length, document_length
        Tokens of a query, and of a document at most.
    query_prefix, document_prefix
        What is put before the texts.
    settings
        What else changes the embeddings: whether they are hidden states, the kinds of its modules, expansion of
        queries, words that are skipped, prompts. JSON values.
    """

    name: str | None
    relative: str | None
    fingerprint: str
    query_length: int | None = None
    document_length: int | None = None
    query_prefix: str | None = None
    document_prefix: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Any, name: str | os.PathLike[str] | None, index_path: Path, hidden_states: bool = False
    ) -> ModelRecord:
        """Describe `model`, loaded from `name`, for the index in `index_path`.

        With `hidden_states`, only its encoder counts: an index of hidden states may be searched with other projections.

        Raises
        ------
        ValueError
            If `model` is no `torch.nn.Module`, or its weights are not in memory.
        """
        model = unwrapped(model)
        relative = None
        if name is not None:
            name = os.fspath(name)
            if os.path.isdir(name):
                relative = relative_to(name, index_path)
                name = os.path.abspath(name)
        settings = {key: getattr(model, key) for key in _SETTINGS if hasattr(model, key)}
        settings["hidden_states"] = hidden_states
        modules = list(model.children()) if isinstance(model, nn.Module) else []
        modules = modules[:1] if hidden_states else modules
        settings["modules"] = [" ".join([type(module).__name__, *_activation(module)]) for module in modules]
        if is_multi_vector_encoder(model):
            found = [cast(Any, module).get_config_dict() for module in modules]
            settings["tokens"] = [{key: one[key] for key in _OF_MODULES if key in one} for one in found]
        return cls(
            name=name,
            relative=relative,
            fingerprint=fingerprint(modules[0] if hidden_states and modules else model),
            **text_lengths(model)._asdict(),
            **{key: getattr(model, key, None) for key in _PREFIXES},
            # As it comes back from the manifest: a tuple is a list there.
            settings=json.loads(json.dumps(settings, default=repr)),
        )

    def locate(self, index_path: str | os.PathLike[str]) -> str:
        """Return the folder or the name from which to load the model.

        Parameters
        ----------
        index_path
            The index's own folder, where it is now.

        Returns
        -------
        str
            For a folder: the one at the recorded place relative to the index, else the one at the recorded absolute
            path. Otherwise the recorded name.

        Raises
        ------
        ValueError
            If no name was recorded, or the folder is at neither place.
        """
        if self.name is None:
            raise ValueError(
                f"the index in {index_path} does not say where the model that it was built with is: name the model"
            )
        if self.relative is None:
            return self.name
        places = places_of(self.name, self.relative, index_path)
        for place in places:
            if os.path.isdir(place):
                return place
        raise ValueError(
            f"the model that the index in {index_path} was built with is not there any more, neither in {places[0]} "
            f"nor in {places[1]}: name the model"
        )

    def differences(self, other: ModelRecord) -> list[str]:
        """What makes `other` another model, in words; empty if it is the same. Names do not count."""
        found = []
        for key in ("fingerprint", *TextLengths._fields, *_PREFIXES):
            mine, theirs = getattr(self, key), getattr(other, key)
            if mine != theirs:
                if key == "fingerprint":
                    found.append(f"weights (sha256 {mine[:12]}... there, {theirs[:12]}... here)")
                else:
                    found.append(f"{key} ({mine!r} there, {theirs!r} here)")
        for key in sorted(self.settings.keys() | other.settings.keys()):
            if self.settings.get(key) != other.settings.get(key):
                found.append(f"{key} ({self.settings.get(key)!r} there, {other.settings.get(key)!r} here)")
        return found

    def __str__(self) -> str:
        return f"{self.name or 'a model without a name'} (weights sha256 {self.fingerprint[:12]}...)"

    def to_json(self) -> dict[str, Any]:
        """As JSON values, which `from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> ModelRecord:
        """Make a record of JSON values.

        Raises
        ------
        ValueError
            If they are not those of a record.
        """
        names = {item.name for item in fields(cls)}
        if not isinstance(value, dict) or value.keys() != names:
            raise ValueError(f"its model must be an object with the keys {sorted(names)}")
        kinds: dict[str, tuple[type, ...]] = {name: (str, type(None)) for name in names}
        kinds |= {"fingerprint": (str,), "settings": (dict,)}
        kinds |= {"query_length": (int, type(None)), "document_length": (int, type(None))}
        for name in names:
            if not isinstance(value[name], kinds[name]):
                raise ValueError(f"its model's {name} is {value[name]!r:.100}")
        return cls(**value)


def fingerprint(model: nn.Module) -> str:
    """Return a sha256 over all weights of a model, in hexadecimal digits.

    Parameters
    ----------
    model
        Its `state_dict` is what counts: names, dtypes, shapes and bytes of parameters and of buffers that are saved.

    Returns
    -------
    str
        The same on every device. 64 digits.

    Raises
    ------
    ValueError
        If `model` is no `torch.nn.Module`, or a weight is on the device "meta".
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, whose weights can be told apart, got {type(model).__name__}"
        )
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, torch.Tensor):
            digest.update(f"{name} {value!r}\n".encode())
            continue
        if value.is_meta:
            raise ValueError(f"model: its weight {name} is on the device 'meta', so it has no values")
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(memoryview(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def relative_to(name: str | os.PathLike[str], index_path: Path) -> str | None:
    """A path as seen from the index's own folder, so that both can be moved together."""
    try:
        return os.path.relpath(os.path.abspath(name), os.path.abspath(index_path))
    except ValueError:  # on Windows, another drive
        return None


def places_of(name: str, relative: str | None, index_path: str | os.PathLike[str]) -> list[str]:
    """Where to look for a path of which the absolute and the relative form were recorded."""
    return [name] if relative is None else [os.path.normpath(os.path.join(os.path.abspath(index_path), relative)), name]


def _activation(module: nn.Module) -> list[str]:
    function = getattr(module, "activation_function", None)
    return [] if function is None else [type(function).__name__]
