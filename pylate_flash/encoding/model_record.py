"""A record of the model that made the embeddings of an index, so that no other model searches it."""

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

# Attributes of PyLate's ColBERT that change the output of `encode`, besides those with their own fields.
_SETTINGS = ("do_query_expansion", "attend_to_expansion_tokens", "skiplist_words", "prompts", "default_prompt_name")
# Settings of `MultiVectorEncoder` modules that change the output of `encode`.
_OF_MODULES = (
    "query_length", "document_length", "query_expansion", "skiplist_words", "skiplist_tasks", "keep_only_token_ids",
)  # fmt: skip
_PREFIXES = ("query_prefix", "document_prefix")


@dataclass(frozen=True)
class ModelRecord:
    """The model of an index.

    Attributes
    ----------
    name
        The name it was loaded from, as given by the user; for a folder, its absolute path. None if unknown.
    relative
        For a folder, its path relative to the index folder, so that both can be moved together; else None.
    fingerprint
        `fingerprint` of the model.
    query_length, document_length
        Maximum number of tokens of a query and of a document.
    query_prefix, document_prefix
        Prefixes of the texts.
    settings
        Other settings that change the embeddings: whether they are hidden states, module types, query expansion,
        skipped words, prompts. JSON values.
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

        With `hidden_states`, only its encoder counts: other projections may search an index of hidden states.

        Raises
        ------
        ValueError
            If `model` is not a `torch.nn.Module`, or its weights are not in memory.
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
            configs = [cast(Any, module).get_config_dict() for module in modules]
            settings["tokens"] = [{key: config[key] for key in _OF_MODULES if key in config} for config in configs]
        return cls(
            name=name,
            relative=relative,
            fingerprint=fingerprint(modules[0] if hidden_states and modules else model),
            **text_lengths(model)._asdict(),
            **{key: getattr(model, key, None) for key in _PREFIXES},
            # A JSON round trip, as through the manifest: tuples become lists.
            settings=json.loads(json.dumps(settings, default=repr)),
        )

    def locate(self, index_path: str | os.PathLike[str]) -> str:
        """Return the folder or the name from which to load the model.

        Parameters
        ----------
        index_path
            The current index folder.

        Returns
        -------
        str
            For a folder: the recorded path relative to the index if it exists, else the recorded absolute path.
            Otherwise the recorded name.

        Raises
        ------
        ValueError
            If no name was recorded, or the folder exists at neither path.
        """
        if self.name is None:
            raise ValueError(f"the index in {index_path} does not record where its model is: name the model")
        if self.relative is None:
            return self.name
        paths = list(dict.fromkeys(places_of(self.name, self.relative, index_path)))
        for path in paths:
            if os.path.isdir(path):
                return path
        where = f" in {paths[0]}" if len(paths) == 1 else f", neither in {paths[0]} nor in {paths[1]}"
        raise ValueError(f"the model of the index in {index_path} no longer exists{where}: name the model")

    def differences(self, other: ModelRecord) -> list[str]:
        """Descriptions of how `other` differs from this model; empty if it is the same. Names do not count."""
        differences = []
        if self.fingerprint != other.fingerprint:
            recorded, here = self.fingerprint[:12], other.fingerprint[:12]
            differences.append(f"weights (sha256 {recorded}... recorded, {here}... here)")
        pairs = [(key, getattr(self, key), getattr(other, key)) for key in (*TextLengths._fields, *_PREFIXES)]
        keys = sorted(self.settings.keys() | other.settings.keys())
        pairs += [(key, self.settings.get(key), other.settings.get(key)) for key in keys]
        differences += [f"{key} ({mine!r} recorded, {theirs!r} here)" for key, mine, theirs in pairs if mine != theirs]
        return differences

    def __str__(self) -> str:
        return f"{self.name or 'a model without a name'} (weights sha256 {self.fingerprint[:12]}...)"

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> ModelRecord:
        """Create a record from JSON values.

        Raises
        ------
        ValueError
            If they are not the values of a record.
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
        Its `state_dict` is hashed: names, dtypes, shapes and bytes of parameters and persistent buffers.

    Returns
    -------
    str
        64 digits, the same on every device.

    Raises
    ------
    ValueError
        If `model` is not a `torch.nn.Module`, or a weight is on the device "meta".
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, whose weights identify it, got {type(model).__name__}")
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
    """A path relative to the index folder, so that both can be moved together; None if there is none."""
    try:
        return os.path.relpath(os.path.abspath(name), os.path.abspath(index_path))
    except ValueError:  # on Windows, another drive
        return None


def places_of(name: str, relative: str | None, index_path: str | os.PathLike[str]) -> list[str]:
    """Candidate locations of a path recorded in absolute and relative form; the relative one comes first."""
    return [name] if relative is None else [os.path.normpath(os.path.join(os.path.abspath(index_path), relative)), name]


def _activation(module: nn.Module) -> list[str]:
    function = getattr(module, "activation_function", None)
    return [] if function is None else [type(function).__name__]
