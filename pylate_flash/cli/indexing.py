"""Shared by `index` and `search`: finding and opening an index, loading its model, and adding texts to it."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import sqlite3
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .._extras import check_installed
from ..data.files import Corpus, Document
from ..encoding.texts import encode, read_lengths
from .common import UserError, check_device, explained, loading, note, notes
from .files import check_file, writable_folder
from .models import check_model_name, document_tokens, load_model
from .ranks import Alone

if TYPE_CHECKING:
    from ..index.ranks import Ranks
    from ..index.store import PackedStore
    from ..indexes import Flat
    from .models import Model

_Item = TypeVar("_Item")
DEFAULT_INDEX = Path("index")
# The most work lost if the process is killed, plus the step in progress.
SECONDS_BETWEEN_WRITES = 10.0
SECONDS_BETWEEN_NOTES = 30.0
# Batches per step: texts are sorted by length within a step, so fewer would waste work on padding, and more would
# stall the progress bar.
_BATCHES_PER_STEP = 8
# The least number of texts to train a codec on, if there are as many.
_SAMPLE = 2000
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# Errors of changes to an index: RuntimeError if another process is writing to it.
INDEX_ERRORS = (ValueError, OSError, RuntimeError)
# Files that a failed or interrupted first write may leave.
LEFTOVERS = {"catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "committed"}


def index_path(index: Path) -> Path:
    """A path to the same folder that ends in the folder's own name, unlike `.` and `x/..`."""
    return index if index.name not in ("", "..") else index.resolve()


def holds_index(path: Path) -> bool:
    return os.path.isfile(path / "catalog.sqlite") or holds_old_index(path)


def holds_old_index(path: Path) -> bool:
    """Whether the folder holds an index in the previous format."""
    return not os.path.isfile(path / "catalog.sqlite") and os.path.isfile(path / "manifest.json")


def check_index(path: Path) -> None:
    if not holds_index(path):
        raise UserError(
            f"there is no index in {path}; build one with `pylate-flash index --data ... --model ...`, or choose one "
            "with --index"
        )


def check_new_index(path: Path) -> None:
    """Check that an index can be built there: the folder is empty, can be created, or holds an index.

    Leftovers of an interrupted first write are ignored.
    """
    with writable_folder(path, "--index"), explained("--index: "):
        names = set(os.listdir(path)) - LEFTOVERS
    if names and not holds_index(path):
        raise UserError(f"--index: {path} holds files that are not an index; choose another folder")


def escaped(text: str) -> str:
    r"""Escape the control characters of `text` as `\t`, `\n`, `\x1b`, so that terminals do not interpret them."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def counted(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def open_corpus(data: Path) -> Corpus:
    if not os.path.isdir(data):
        check_file(data)
    with explained():
        return Corpus(data)


def read_ids(corpus: Corpus, index: Path | None = None) -> list[str]:
    """Ids of all documents; also checks every line, before a model is loaded.

    Metadata keys are checked with those of all documents, and of an existing index to which they are added.
    """
    from ..index.filters import DOCUMENTS, checked_metadata, insert

    ids: list[str] = []
    known = set() if index is None else _metadata_keys(index)
    with (
        explained(kinds=(ValueError, OSError, TypeError)),
        notes.status(f"Reading {corpus.path}"),
        contextlib.closing(sqlite3.connect(":memory:")) as table,
    ):
        # Holds no documents, but those that bring new keys, without values.
        table.execute(DOCUMENTS)
        insert(table, [0], [b"0"], [dict.fromkeys(known)])
        for document in corpus:
            ids.append(document.id)
            if document.metadata:
                try:
                    checked_metadata([document.metadata], 1)
                    new = document.metadata.keys() - known
                    if new:
                        insert(table, [len(ids)], [b"%d" % len(ids)], [dict.fromkeys(new)])
                        known |= new
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{corpus.path}: the document {ascii(document.id):.100}: {error}") from None
    return ids


def _metadata_keys(index: Path) -> set[str]:
    """The metadata keys of an index; none if there is no index, or it cannot be read, which opening it reports."""
    from ..index.catalog import Catalog

    catalog = Catalog(index.absolute(), "float32")
    if catalog.exists:
        with contextlib.suppress(*INDEX_ERRORS):
            return set(catalog.metadata_keys())
    return set()


def record_corpus(flat: Flat, data: Path) -> None:
    """Record the path of a corpus; pipes and downloads by name have none to record."""
    if os.path.isfile(data) or os.path.isdir(data):
        flat.record_corpus(data)


def open_store(path: Path) -> PackedStore:
    """Open an index for commands that neither encode nor search, without the slow import of PyLate."""
    check_index(path)
    loading(f"the index in {path}")
    from ..index.store import PackedStore

    with explained(), noted():
        return PackedStore(path)


def check_place(path: Path) -> None:
    """Check that the name of an index's folder is valid on every system."""
    from ..index.arguments import checked_path

    try:
        checked_path(None, path.name)
    except ValueError:
        raise UserError(
            f"--index: {path} cannot be the folder of an index: expected a name without backslashes, and without a "
            f"colon after its first character, got {path.name!r}"
        ) from None


def open_flat(path: Path, device: str | None, dtype: str | None = None, override: bool = False) -> Flat:
    """Open or create an index with options of `indexes.Flat`."""
    exists = holds_index(path) and not override
    loading(f"the index in {path}" if exists else "PyTorch")
    check_device(device)
    check_place(path)
    from ..indexes import Flat

    with explained(kinds=INDEX_ERRORS), noted():
        flat = Flat(
            path.parent,
            path.name,
            device=device,
            show_progress=False,
            dtype=None if exists else dtype,
            override=override,
        )
    stored = flat.info().dtype
    if dtype not in (None, stored):
        raise UserError(
            f"--dtype {dtype}: the index in {path} stores {stored}; omit --dtype to use it as it is, or rebuild it "
            "with --overwrite"
        )
    return flat


def load_model_of(flat: Flat, model: str | None, device: str | None, trust_remote_code: bool) -> Model:
    """Load the model that an index was built with, from `model` or else from the path that the index records."""
    record = flat.model
    if record is not None and record.settings.get("hidden_states"):
        raise UserError(
            f"the index in {flat.index_path} stores hidden states, which are projected during a search: use it from "
            "Python, as indexes.Flat(..., projection=model)"
        )
    if model is None:
        if record is None:
            raise UserError(
                f"the index in {flat.index_path} does not record which model it was built with: give it with --model"
            )
        try:
            model = record.locate(flat.index_path)
        except ValueError as error:
            raise UserError(f"{error} with --model") from error
    check_model_name(model)
    loading(f"the model {model}")
    lengths = {name: getattr(record, name, None) for name in ("query_length", "document_length")}
    loaded = load_model(model, searching=True, device=device, trust_remote_code=trust_remote_code, **lengths)
    with explained():
        flat.check_model(loaded)
    return loaded


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Print warnings as notes on standard error, one line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        note(f"Note: {warning.message}")


def add_texts(
    flat: Flat | None,
    model: Model,
    documents: Iterable[Document],
    total: int,
    batch_size: int,
    replace: bool = False,
    ranks: Ranks | Alone | None = None,
) -> None:
    """Encode documents and add them to an index, which only the first of `ranks` has, with progress on standard error.

    They are added every few seconds, while the next are encoded, so that little work is lost if the process ends, and
    memory stays bounded. There are `total`, none of them in the index unless `replace`; each rank encodes a share.
    Documents added before an error in reading or writing stay in the index.
    """
    from tqdm import tqdm

    from ..index.store import ADDITION_BYTES

    def encoded(texts: list[str]) -> list[Any]:
        if writing is not None and writing.done():
            # Raises a failed write here, so that other ranks are notified.
            _finish(writing)
        return encode(model, texts, is_query=False, batch_size=batch_size) if texts else []

    ranks = ranks or Alone()
    terminal = sys.stderr.isatty()
    started = noted = written = time.monotonic()
    done = nbytes = 0
    ids: list[str] = []
    embeddings: list[Any] = []
    metadata: list[dict[str, Any]] = []
    writing: Future[Any] | None = None
    with (
        explained(),
        ThreadPoolExecutor(1) as writer,
        tqdm(total=total, desc="Encoding", unit="doc", disable=not terminal) as progress,
    ):
        step = batch_size * _BATCHES_PER_STEP
        for step_documents in _steps(documents, step * ranks.size):
            texts = [document.text for document in step_documents]
            if not done:
                _note_truncation(model, texts[:step])
            encode_share = partial(encoded, texts[step * ranks.rank :][:step])
            encoded_share = list(itertools.chain(*ranks.to_first(encode_share, "encode")))
            if flat is None:
                continue
            embeddings += encoded_share
            nbytes += sum(array.nbytes for array in encoded_share)
            ids += [document.id for document in step_documents]
            metadata += [document.metadata for document in step_documents]
            done += len(step_documents)
            progress.update(len(step_documents))
            now = time.monotonic()
            if now - written >= SECONDS_BETWEEN_WRITES or nbytes >= ADDITION_BYTES:
                _finish(writing)
                writing = writer.submit(flat.add_documents, ids, embeddings, replace=replace, metadata=metadata)
                ids, embeddings, metadata, nbytes, written = [], [], [], 0, time.monotonic()
            if not terminal and now - noted >= SECONDS_BETWEEN_NOTES:
                # A log gets lines instead of a redrawn progress bar.
                rate, noted = done / (now - started), now
                time_left = tqdm.format_interval((total - done) / rate)
                note(f"{done:,} of {total:,} documents, {rate:.1f} documents/s, {time_left} left")
        if ids and flat is not None:
            _finish(writing)
            writing = writer.submit(flat.add_documents, ids, embeddings, replace=replace, metadata=metadata)
        _finish(writing)
    seconds = max(1e-9, time.monotonic() - started)
    note(f"Encoded {counted(done, 'document')} in {seconds:.1f} s, {done / seconds:.1f} documents/s")


def check_codec(dtype: str, option: str) -> None:
    """Check that the trainer of residual codecs is installed, before an index is emptied or texts are encoded."""
    if dtype.startswith("residual"):
        check_installed("fastkmeans", f"{option} {dtype}", "residual")


def train_codec(flat: Flat, model: Model, corpus: Corpus, total: int, batch_size: int) -> None:
    """Train the codec of an empty index of residual codes on a sample of the corpus.

    As in PLAID, the sample grows with the square root of the corpus size.
    """
    if not flat.info().dtype.startswith("residual"):
        return
    sample = max(_SAMPLE, 16 * math.isqrt(total))
    loading("the residual codec trainer")
    with explained(kinds=INDEX_ERRORS):
        texts = [document.text for document in itertools.islice(corpus, 0, None, -(-total // sample))]
        flat.train_codec(encode(model, texts, is_query=False, batch_size=batch_size))


def _finish(writing: Future[Any] | None) -> None:
    if writing is not None:
        with explained(kinds=INDEX_ERRORS):
            writing.result()


def _note_truncation(model: Model, texts: list[str]) -> None:
    """Note how many of the first texts will be truncated; tokenizing all would cost too much."""
    _, length = read_lengths(model)
    if length is None:
        return
    longer = sum(tokens > length for tokens in document_tokens(model, texts))
    if longer:
        note(
            f"Note: {longer} of the first {len(texts)} documents are longer than {length} tokens and are truncated; "
            "the rest of them is not indexed"
        )


def _steps(texts: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    iterator = iter(texts)
    while some := list(itertools.islice(iterator, size)):
        yield some
