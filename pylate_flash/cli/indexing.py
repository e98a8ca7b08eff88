"""What `index` and `search` share: where an index lies, the model that belongs to it, and adding texts to it."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
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
# How much work is lost, at most, when the process is killed; the step that is under way comes on top.
SECONDS_BETWEEN_WRITES = 10.0
SECONDS_BETWEEN_NOTES = 30.0
# Batches between two looks at the clock: texts are sorted by length within them, so few would waste work on padding,
# and many would leave the progress bar standing still.
_BATCHES_PER_STEP = 8
# Texts on which a codec is trained, at least, if there are as many.
_SAMPLE = 2000
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# What an index says of a change: RuntimeError where another process writes to it.
INDEX_ERRORS = (ValueError, OSError, RuntimeError)
# What a first write may leave that failed or was interrupted.
LEFTOVERS = {"catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "committed"}


def index_path(index: Path) -> Path:
    """The same folder by a path that ends in the folder's own name, as those of `.` and `x/..` do not."""
    return index if index.name not in ("", "..") else index.resolve()


def holds_index(place: Path) -> bool:
    return os.path.isfile(place / "catalog.sqlite") or holds_old_index(place)


def holds_old_index(place: Path) -> bool:
    """Whether the index there has the format before this one."""
    return not os.path.isfile(place / "catalog.sqlite") and os.path.isfile(place / "manifest.json")


def check_index(place: Path) -> None:
    if not holds_index(place):
        raise UserError(
            f"there is no index in {place}; build one with `pylate-flash index --data ... --model ...`, or name one "
            "with --index"
        )


def check_new_index(place: Path) -> None:
    """An index can be built there: in an empty folder, one that can be made, or in place of an index.

    What is left of one whose first write was interrupted counts as nothing.
    """
    with writable_folder(place, "--index"), explained("--index: "):
        others = set(os.listdir(place)) - LEFTOVERS
    if others and not holds_index(place):
        raise UserError(f"--index: {place} holds files that are no index; name another folder")


def escaped(text: str) -> str:
    r"""`text` with its control characters written as `\t`, `\n`, `\x1b`, which no terminal obeys."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def counted(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def open_corpus(data: Path) -> Corpus:
    if not os.path.isdir(data):
        check_file(data)
    with explained():
        return Corpus(data)


def read_ids(corpus: Corpus) -> list[str]:
    """Ids of all documents. Every line is checked on the way, before a model is loaded."""
    from ..index.filters import checked_metadata

    ids = []
    with explained(kinds=(ValueError, OSError, TypeError)), notes.status(f"Reading {corpus.path}"):
        for document in corpus:
            ids.append(document.id)
            if document.metadata:
                try:
                    checked_metadata([document.metadata], 1)
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{corpus.path}: the document {ascii(document.id):.100}: {error}") from None
    return ids


def record_corpus(flat: Flat, data: Path) -> None:
    """Of a pipe, and of what was fetched by its name, there is nothing to remember."""
    if os.path.isfile(data) or os.path.isdir(data):
        flat.record_corpus(data)


def open_store(place: Path) -> PackedStore:
    """Open an index for what neither encodes nor searches, without PyLate, whose import takes seconds."""
    check_index(place)
    loading(f"the index in {place}")
    from ..index.store import PackedStore

    with explained(), noted():
        return PackedStore(place)


def check_place(place: Path) -> None:
    """The folder of an index must have a name that every system takes."""
    from ..index.arguments import check_name

    try:
        check_name(place.name)
    except ValueError:
        raise UserError(
            f"--index: {place} cannot be the folder of an index: expected a name without backslashes, and without a "
            f"colon after its first character, got {place.name!r}"
        ) from None


def open_flat(place: Path, device: str | None, dtype: str | None = None, override: bool = False) -> Flat:
    """Open an index, or a new one, with options of `indexes.Flat`."""
    there = holds_index(place) and not override
    loading(f"the index in {place}" if there else "PyTorch")
    check_device(device)
    check_place(place)
    from ..indexes import Flat

    with explained(kinds=INDEX_ERRORS), noted():
        flat = Flat(
            place.parent,
            place.name,
            device=device,
            show_progress=False,
            dtype=None if there else dtype,
            override=override,
        )
    kept_as = flat.info().dtype
    if dtype not in (None, kept_as):
        raise UserError(
            f"--dtype {dtype}: the index in {place} keeps {kept_as}; leave out --dtype to use it as it is, or build it "
            "anew with --overwrite"
        )
    return flat


def load_model_of(flat: Flat, model: str | None, device: str | None, trust_remote_code: bool) -> Model:
    """Load the model that an index was built with, from `model` or else from where the index says that it is."""
    record = flat.model
    if record is not None and record.settings.get("hidden_states"):
        raise UserError(
            f"the index in {flat.index_path} keeps hidden states, to be projected while it is searched: use it from "
            "Python, as indexes.Flat(..., projection=model)"
        )
    if model is None:
        if record is None:
            raise UserError(
                f"the index in {flat.index_path} does not say which model it was built with: name it with --model"
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
    """Say on standard error what is warned of, in a line each."""
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

    They are added every few seconds, while the next are encoded, so that what has been encoded outlives the process,
    and memory stays bounded. They are `total`, none of them in the index, or with `replace` some that take the place of
    those there; each rank encodes a share. What was added stays if a document cannot be read, or the index be written.
    """
    from tqdm import tqdm

    from ..index.store import ADDITION_BYTES

    def encoded(some_texts: list[str]) -> list[Any]:
        if writing is not None and writing.done():
            # So that other ranks hear of it.
            _finish(writing)
        return encode(model, some_texts, is_query=False, batch_size=batch_size) if some_texts else []

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
        for some in _steps(documents, step * ranks.size):
            some_texts = [document.text for document in some]
            if not done:
                _note_truncation(model, some_texts[:step])
            share = partial(encoded, some_texts[step * ranks.rank :][:step])
            found = list(itertools.chain(*ranks.to_first(share, "encode")))
            if flat is None:
                continue
            embeddings += found
            nbytes += sum(array.nbytes for array in found)
            ids += [document.id for document in some]
            metadata += [document.metadata for document in some]
            done += len(some)
            progress.update(len(some))
            now = time.monotonic()
            if now - written >= SECONDS_BETWEEN_WRITES or nbytes >= ADDITION_BYTES:
                _finish(writing)
                writing = writer.submit(flat.add_documents, ids, embeddings, replace=replace, metadata=metadata)
                ids, embeddings, metadata, nbytes, written = [], [], [], 0, time.monotonic()
            if not terminal and now - noted >= SECONDS_BETWEEN_NOTES:
                # A bar that is drawn again and again does not suit a log.
                rate, noted = done / (now - started), now
                left = tqdm.format_interval((total - done) / rate)
                note(f"{done:,} of {total:,} documents, {rate:.1f} documents/s, {left} left")
        if ids and flat is not None:
            _finish(writing)
            writing = writer.submit(flat.add_documents, ids, embeddings, replace=replace, metadata=metadata)
        _finish(writing)
    seconds = max(1e-9, time.monotonic() - started)
    note(f"Encoded {counted(done, 'document')} in {seconds:.1f} s, {done / seconds:.1f} documents/s")


def check_codec(dtype: str, option: str) -> None:
    """What trains the codec of residual codes must be there before an index is emptied for them, or texts encoded."""
    if dtype.startswith("residual"):
        check_installed("fastkmeans", f"{option} {dtype}", "residual")


def train_codec(flat: Flat, model: Model, corpus: Corpus, total: int, batch_size: int) -> None:
    """Train the codec of an empty index that keeps residual codes on texts from the whole corpus.

    As in PLAID, their number grows with the square root of that of all.
    """
    if not flat.info().dtype.startswith("residual"):
        return
    sample = max(_SAMPLE, 16 * math.isqrt(total))
    loading("what residual codes are made by")
    with explained(kinds=INDEX_ERRORS):
        texts = [document.text for document in itertools.islice(corpus, 0, None, -(-total // sample))]
        flat.train_codec(encode(model, texts, is_query=False, batch_size=batch_size))


def _finish(writing: Future[Any] | None) -> None:
    if writing is not None:
        with explained(kinds=INDEX_ERRORS):
            writing.result()


def _note_truncation(model: Model, texts: list[str]) -> None:
    """Say how many of the first texts are longer than what is read of them; tokenizing all would cost too much."""
    _, length = read_lengths(model)
    if length is None:
        return
    longer = sum(tokens > length for tokens in document_tokens(model, texts))
    if longer:
        note(
            f"Note: {longer} of the first {len(texts)} documents are longer than the {length} tokens that are read of "
            "each; the rest of them is not indexed"
        )


def _steps(texts: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    iterator = iter(texts)
    while some := list(itertools.islice(iterator, size)):
        yield some
