"""The collections that `evaluate` reads: BEIR folders, and downloads by name."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from .._extras import check_installed
from .common import UserError, cause, explained, loading

_BEIR = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/{}.zip"
_NANO_BEIR = "sentence-transformers/NanoBEIR-en"


class Collection(NamedTuple):
    """A collection to evaluate on; `data` is its `--data` argument."""

    name: str
    data: str
    documents: list[dict[str, str]]
    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]


def load_collections(sources: list[str], split: str) -> list[Collection]:
    """Load the collections of `--data`: folders, `beir:NAME`, `nanobeir` (all thirteen), or `nanobeir:NAME`."""
    collections: list[Collection] = []
    for source in sources:
        kind, _, name = source.partition(":")
        if kind == "nanobeir":
            collections += _load_nano_beir(name)
        else:
            folders = _fetch_beir(name) if kind == "beir" and name else [Path(source)]
            collections += [_load_folder(folder, split) for folder in folders]
    names = [collection.name for collection in collections]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--data: two collections are named {name!r}; give each one once")
    return collections


def _load_folder(folder: Path, split: str) -> Collection:
    from ..beir import load_beir_folder

    with explained():
        return Collection(folder.resolve().name, str(folder), *load_beir_folder(folder, split=split))


def _fetch_beir(name: str) -> list[Path]:
    """The folder of a BEIR collection, or those of its parts; downloaded once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pylate-flash" / "beir"
    if not (cache / name).is_dir():
        check_installed("beir", f"--data beir:{name}", "eval")
        loading(f"the collection {name} from {_BEIR.format(name)}")
        from beir.util import download_and_unzip

        try:
            cache.mkdir(parents=True, exist_ok=True)
            # Move it into place when complete, or the next call would take a partial download for all of it.
            with tempfile.TemporaryDirectory(dir=cache, prefix=".") as folder:
                download_and_unzip(_BEIR.format(name), folder)
                os.rename(Path(folder, name), cache / name)
        # requests and zipfile raise many types.
        except Exception as error:
            raise UserError(f"--data beir:{name} could not be downloaded: {cause(error, named=True)}") from error
    if (cache / name / "corpus.jsonl").exists():
        return [cache / name]
    return sorted(path.parent for path in (cache / name).glob("*/corpus.jsonl")) or [cache / name]


def _load_nano_beir(name: str) -> list[Collection]:
    from datasets import get_dataset_split_names, load_dataset

    def rows(subset: str, split: str) -> Any:
        return load_dataset(_NANO_BEIR, subset, split=split)

    loading(f"{name or 'collections'} of {_NANO_BEIR}")
    collections = []
    try:
        names = [f"Nano{name}"] if name else get_dataset_split_names(_NANO_BEIR, "corpus")
        for split in names:
            documents = [{"id": row["_id"], "text": row["text"]} for row in rows("corpus", split) if row["text"]]
            queries = {row["_id"]: row["text"] for row in rows("queries", split) if row["text"]}
            qrels: dict[str, dict[str, int]] = {}
            for row in rows("qrels", split):
                qrels.setdefault(row["query-id"], {})[row["corpus-id"]] = int(row.get("score", 1))
            collections.append(Collection(split, f"nanobeir:{split.removeprefix('Nano')}", documents, queries, qrels))
    # The hub client raises many types, without a network or for an unknown name.
    except Exception as error:
        given = f"nanobeir:{name}" if name else "nanobeir"
        raise UserError(f"--data {given} could not be downloaded: {cause(error, named=True)}") from error
    return collections
