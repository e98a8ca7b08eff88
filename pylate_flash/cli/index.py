"""`pylate-flash index`: build an index of texts, change it, and look at it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.filesize import decimal
from typer.core import TyperGroup

from ..data.files import Corpus, read_lines
from . import options
from .common import UserError, command, explained, loading, note, say
from .files import check_file, writable_folder
from .indexing import (
    DEFAULT_INDEX,
    INDEX_ERRORS,
    add_texts,
    check_codec,
    check_index,
    check_new_index,
    check_place,
    counted,
    escaped,
    holds_index,
    holds_old_index,
    index_path,
    load_model_of,
    noted,
    open_corpus,
    open_flat,
    open_store,
    read_ids,
    record_corpus,
    train_codec,
)
from .models import check_encoding_host, check_model_name, load_model
from .ranks import device_of_rank, together

if TYPE_CHECKING:
    from ..index.store import PackedStore
    from ..indexes import Flat


class _BuildsByDefault(TyperGroup):
    """`pylate-flash index --data ...` is `pylate-flash index build --data ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("-h", "--help"):
            args = ["build", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_BuildsByDefault,
    help="Build an index of texts, change it, and look at it. `build` may be left out: "
    "`pylate-flash index --data corpus.jsonl --model my-colbert`.",
    no_args_is_help=True,
)


# How embeddings are stored: the keys of `index.layout.DTYPES`, which takes seconds to import.
Dtype = Literal[
    "float32", "float16", "bfloat16", "int8", "uint8", "fp8", "residual4", "residual2",
    "int8+float16", "int8+bfloat16", "uint8+float16", "uint8+bfloat16", "fp8+float16", "fp8+bfloat16",
    "residual4+float16", "residual4+bfloat16", "residual2+float16", "residual2+bfloat16",
]  # fmt: skip
DTYPES = get_args(Dtype)

Index = Annotated[Path, typer.Option(help="Folder of the index.")]
Data = Annotated[
    Path,
    typer.Option(
        help='corpus.jsonl, as in BEIR: `{"_id": "d1", "title": "optional", "text": "..."}` per line, and `"metadata": '
        '{"year": 2020}` for `search --where`. Or a folder: its corpus.jsonl, or else all its .txt and .md files, '
        "named by their paths in it. Pipes (/dev/fd/N) too."
    ),
]


@app.command(
    epilog="Example: `pylate-flash index --data corpus.jsonl --model my-colbert --index my-index`, then "
    '`pylate-flash search "..." --index my-index`'
)
@command
def build(
    data: Data,
    model: Annotated[str, typer.Option(help="ColBERT model or MultiVectorEncoder: a folder or a name.")],
    index: Index = DEFAULT_INDEX,
    batch_size: options.BatchSize = options.BATCH_SIZE,
    query_length: options.QueryLength = None,
    document_length: options.DocumentLength = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="TYPE",
            help=f"How embeddings are kept: {', '.join(DTYPES[:8])}. 16 bits halve the index, 8 about halve it again, "
            "and residual codes (4 or 2 bits) once and twice more. `residual4+bfloat16`, and so on, keeps 16 bits too, "
            "for `search --rescore`. Default: float32.",
        ),
    ] = None,
    device: options.Device = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Empty an index that is already there, and begin anew.")
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Encode the documents of a corpus, and keep them in an index that remembers the model.

    After an interruption of whatever kind, the same command goes on where it stopped (then without `--overwrite`): it
    adds the documents whose ids are not in the index yet. An index that holds documents of another corpus, or was
    built with another model, is left as it is.

    Under `torchrun --nproc-per-node N $(which pylate-flash) index ...`, N processes encode a share of the documents
    each, on a GPU of their own, and the first adds them in order. If one ends, all do.
    """
    check_encoding_host("pylate-flash index build")
    path = index_path(index)
    flat: Flat | None = None

    def check() -> tuple[Corpus, list[str]]:
        nonlocal flat
        check_new_index(path)
        check_model_name(model)
        if dtype is not None and (overwrite or not holds_index(path)):
            check_codec(dtype, "--dtype")
        corpus = open_corpus(data)
        ids = read_ids(corpus)
        if overwrite:
            check_place(path)
        else:
            # Checked before loading the model, which takes longer.
            flat = open_flat(path, device, dtype=dtype)
            _check_belongs(flat, corpus, set(ids))
        return corpus, ids

    def record() -> set[str]:
        nonlocal flat
        if flat is None:
            flat = open_flat(path, device, dtype=dtype, override=True)
        with explained(kinds=INDEX_ERRORS):
            # Raises if the documents in the index are by another model.
            flat.record_model(encoder, name=model)
            record_corpus(flat, data)
        return set(flat.documents_ids)

    with together() as ranks:
        corpus, ids = ranks.agreed(check)
        loading(f"the model {model}")
        encoder = load_model(
            model,
            searching=True,
            device=device_of_rank(device, ranks),
            query_length=query_length,
            document_length=document_length,
            trust_remote_code=trust_remote_code,
        )
        present_ids = ranks.agreed(record)
        before = len(present_ids)
        if before == len(ids):
            count = counted(before, "document")
            say(f"Nothing to do: {path} holds the {count} of {corpus.path}, by their ids, already")
            return
        if before:
            count = f"{before:,} of the {len(ids):,} documents"
            say(f"Going on: {path} holds {count} of {corpus.path}, by their ids, already")
        elif flat is not None:
            train_codec(flat, encoder, corpus, len(ids), batch_size)
        try:
            documents = (document for document in corpus if document.id not in present_ids)
            add_texts(flat, encoder, documents, len(ids) - before, batch_size, ranks=ranks)
        except KeyboardInterrupt:
            if flat is not None:
                note(
                    f"{len(flat):,} of {len(ids):,} documents are in {path}; the same command"
                    f"{' without --overwrite' if overwrite else ''} goes on"
                )
            raise
        say(f"{path} holds {counted(len(ids), 'document')}")
        print(f'Next: pylate-flash search "..." {shlex.join(["--index", str(path)])}')


@app.command(epilog="Example: `pylate-flash index add --data more.jsonl --index my-index`")
@command
def add(
    data: Data,
    index: Index = DEFAULT_INDEX,
    model: Annotated[
        str | None, typer.Option(help="Where the index's model lies, if it is no longer where the index says.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Put documents in the place of those that have their ids in the index.")
    ] = False,
    batch_size: options.BatchSize = options.BATCH_SIZE,
    device: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Add documents to an index, encoded by the model that it was built with.

    Documents whose ids are in the index already are skipped, so after an interruption the same command goes on where
    it stopped. With `--replace` they are encoded, and replace those there: then the same command begins anew.
    """
    check_encoding_host("pylate-flash index add")
    path = index_path(index)
    check_index(path)
    corpus = open_corpus(data)
    ids = read_ids(corpus)
    flat = open_flat(path, device)
    n_new = sum(id_ not in flat for id_ in ids)
    n_present = len(ids) - n_new
    if n_present and not replace:
        say(f"{n_present} of the {len(ids)} documents of {corpus.path} are in {path} already; --replace replaces them")
    if n_new or replace:
        encoder = load_model_of(flat, model, device, trust_remote_code)
        with explained(kinds=INDEX_ERRORS):
            record_corpus(flat, data)
        known = set() if replace else set(flat.documents_ids)
        documents = (document for document in corpus if document.id not in known)
        add_texts(flat, encoder, documents, len(ids) if replace else n_new, batch_size, replace)
    replaced = f", replaced {n_present:,}" if replace else ""
    say(f"Added {counted(n_new, 'document')}{replaced}; {path} holds {len(flat):,}")


@app.command(epilog="Example: `pylate-flash index remove d1 d2 --index my-index`")
@command
def remove(
    documents: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of documents.", show_default=False)
    ] = None,
    ids: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with an id per line, in place of ID: `d1`.")
    ] = None,
    index: Index = DEFAULT_INDEX,
) -> None:
    """Remove documents from an index, and from the disk: all of them or, if one is not there, none."""
    path = index_path(index)
    if bool(documents) == (ids is not None):
        raise UserError("give either IDs or --ids FILE" + (", not both" if documents else ""))
    check_index(path)
    unwanted = dict.fromkeys(documents or [], "") if ids is None else _read_ids(ids)
    store = open_store(path)
    for id_, where in unwanted.items():
        if store.positions_of([id_])[0] < 0:
            raise UserError(f"{where}{ascii(id_):.100} is not in the index in {path}; nothing was removed")
    with explained(kinds=INDEX_ERRORS), noted():
        store.remove(store.positions_of(list(unwanted)))
    say(f"Removed {counted(len(unwanted), 'document')}; {path} holds {len(store):,}")


@app.command()
@command
def info(
    index: Index = DEFAULT_INDEX,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, in place of the table.")] = False,
) -> None:
    """Say what an index holds: documents, tokens, size on the disk, and the model that it was built with."""
    path = index_path(index)
    described = _describe(open_store(path))
    if as_json:
        print(json.dumps(described))
        return
    model = described["model"]
    rows = {
        "index": path,
        "documents": f"{described['documents']:,}",
        "tokens": f"{described['tokens']:,}",
        "embeddings": f"{described['embedding_size']} numbers each, {described['dtype']}",
        "searched": f"{decimal(described['scored_bytes'])}, which a search of all documents reads",
        "size": f"{decimal(described['bytes'])} in {counted(described['files'], 'file')}",
        "texts": ", ".join(described["corpora"]) or "unknown",
        "model": "unknown" if model is None else model["name"] or "known by its weights only",
    }
    if model is not None:
        rows["weights"] = f"sha256 {model['fingerprint']}"
        rows["lengths"] = f"queries {model['query_length']} tokens, documents {model['document_length']} at most"
        rows["prefixes"] = f"queries {model['query_prefix']!r}, documents {model['document_prefix']!r}"
    if described["embedding_size"] is None:
        rows["embeddings"] = described["dtype"]
    for name, value in rows.items():
        print(f"{name:<12}{escaped(str(value))}")


@app.command()
@command
def verify(index: Index = DEFAULT_INDEX) -> None:
    """Read every file of an index, and compare it with its checksum.

    Exit code 0 if everything is as it was written; 2, and a sentence that names the file, if anything is not.
    """
    path = index_path(index)
    store = open_store(path)
    with explained():
        store.verify(show_progress=sys.stderr.isatty())
    say(f"{path} is as it was written: {counted(len(store), 'document')}")


@app.command()
@command
def compact(index: Index = DEFAULT_INDEX) -> None:
    """Merge the files of an index into as few as there can be.

    Additions and removals see to it that there are not many; this makes it the least, and takes as much room on the
    disk, for a while, as what it merges.
    """
    path = index_path(index)
    store = open_store(path)
    before = _describe(store)["files"]
    with explained(kinds=INDEX_ERRORS):
        store.compact()
    after = _describe(store)["files"]
    say(f"{path} holds {counted(len(store), 'document')} in {counted(after, 'file')}, {before} before")


@app.command(epilog="Example: `pylate-flash index convert --index my-index --to my-new-index`")
@command
def convert(
    to: Annotated[Path, typer.Option(help="Folder of the new index: none that holds anything.")],
    index: Index = DEFAULT_INDEX,
) -> None:
    """Write an index that has the format before this one into a new folder, embeddings as they are.

    The old one is only read, and compared with its checksums; delete it when you no longer need it. After an
    interruption the same command begins anew.
    """
    path, new = index_path(index), index_path(to)
    if not holds_old_index(path):
        check_index(path)
        raise UserError(f"the index in {path} needs no conversion")
    check_place(new)
    with writable_folder(new, "--to"):
        if os.listdir(new):
            raise UserError(f"--to: {new} is not empty; name another folder")
    loading(f"the index in {path}")
    from .old_index import convert as converted

    with explained(kinds=INDEX_ERRORS), noted():
        store = converted(path, new, show_progress=sys.stderr.isatty())
    say(f"{new} holds the {counted(len(store), 'document')} of {path}, which is as it was")


def _describe(store: PackedStore) -> dict[str, Any]:
    """The contents of a store, as JSON values."""
    state = store.state
    return {
        "path": str(store.path),
        "documents": len(store),
        "tokens": store.tokens,
        "bytes": store.nbytes,
        "scored_bytes": store.tokens * store.layout.nbytes,
        "files": 1 + len(store.segments),
        "dtype": state.dtype,
        "embedding_size": state.embedding_size,
        "model": None if state.model is None else state.model.to_json(),
        "corpora": [absolute for absolute, _ in state.corpora],
        "written_with": state.created_with,
    }


def _check_belongs(flat: Flat, corpus: Corpus, ids: set[str]) -> None:
    """Check that an existing index belongs to this corpus, and records its model."""
    if not len(flat):
        return
    path = flat.index_path
    stranger = next((id_ for id_ in flat.documents_ids if id_ not in ids), None)
    if stranger is not None:
        raise UserError(
            f"the index in {path} holds the document {ascii(stranger):.100}, which is not in {corpus.path}: "
            "`index add` adds documents to it, --overwrite empties it first"
        )
    if flat.model is None:
        raise UserError(
            f"the index in {path} does not say which model it was built with, so that no other should go on with it; "
            "--overwrite builds it anew"
        )


def _read_ids(path: Path) -> dict[str, str]:
    """Read ids from a file -> "file, line n: " for error messages."""
    check_file(path)
    with explained(), path.open("rb") as file:
        ids = {line: f"{where}: " for _, where, line in read_lines(file, path)}
    if not ids:
        raise UserError(f"{path} holds no ids")
    return ids
