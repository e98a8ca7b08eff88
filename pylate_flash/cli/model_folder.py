"""Checks of a model's folder before loading: loaders report little, run code that it names, and fill gaps."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Configurations that are JSON objects; others, such as MiniLM's data_config.json, are ignored.
_CONFIGURATIONS = (
    "config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "router_config.json",
)
# No encoder has more; building as many as a corrupt number says would exhaust time and memory.
_MOST_LAYERS = 10_000
_MODULES = ("sentence_transformers.", "pylate.")
_PARTS = ("torch.nn.", "transformers.", *_MODULES)


def check_model_folder(folder: Path, trust_remote_code: bool) -> None:
    """Check the JSON of a model's folder, and that loading it runs no code but that of the known libraries.

    sentence-transformers imports whatever the `type` of an entry of modules.json names, from the folder itself or from
    another repository of the hub, and ignores `trust_remote_code` if the model is a folder; names in the configurations
    of its modules are imported too, and called. Raises a ValueError naming a file that its loader would fail on, or
    that would run other code.
    """
    folders = [""]
    if (folder / "modules.json").exists():
        for entry in _modules(folder):
            if not trust_remote_code:
                _check_known("modules.json", entry["type"], _MODULES)
            folders.append(entry["path"])
    for subfolder in dict.fromkeys(folders):
        for name in _CONFIGURATIONS:
            file = os.path.join(subfolder, name)
            if not (folder / file).is_file():
                continue
            config = _read(folder, file)
            if not isinstance(config, dict):
                raise ValueError(f"its {file} must hold a JSON object, found {type(config).__name__}")
            if name == "config.json":
                _check_layers(file, config)
            if not trust_remote_code:
                for reference in _references(config):
                    _check_known(file, reference, _PARTS)


def _modules(folder: Path) -> list[dict[str, str]]:
    modules = _read(folder, "modules.json")
    if not isinstance(modules, list) or not modules:
        raise ValueError("its modules.json must hold a JSON list of at least one module")
    for entry in modules:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "path", "type")):
            raise ValueError('its modules.json must hold objects with strings for "name", "path" and "type"')
    return modules


def _check_layers(file: str, config: dict[str, Any]) -> None:
    for key, value in config.items():
        if re.fullmatch(r"\w+_layers?", key) and isinstance(value, int) and value > _MOST_LAYERS:
            raise ValueError(f"its {file} asks for {value} layers ({key!r})")
        if isinstance(value, dict):
            _check_layers(file, value)


def _references(config: dict[str, Any]) -> Iterator[str]:
    """Dotted names of classes that sentence-transformers' modules import: of Dense, of Router, of WordEmbeddings."""
    types = config.get("types")
    values = [config.get("activation_function"), config.get("tokenizer_class")]
    values += list(types.values()) if isinstance(types, dict) else []
    # transformers resolves names without a dot to its own classes.
    return (value for value in values if isinstance(value, str) and "." in value)


def _check_known(file: str, reference: str, known: tuple[str, ...]) -> None:
    if not reference.startswith(known):
        raise ValueError(f"its {file} names {reference!r}, whose code would run; --trust-remote-code permits this")


def _read(folder: Path, file: str) -> Any:
    try:
        return json.loads((folder / file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"its {file} is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"its {file} is not valid JSON: it is nested too deeply") from None
