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
    help="Build, change and inspect an index of texts. `build` may be omitted: "
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
        '{"year": 2020}` for `search --where`. Or a folder: its corpus.jsonl, or else all its .txt and .md files, with '
        "their relative paths as ids. Pipes (/dev/fd/N) work too."
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
            help=f"How embeddings are stored: {', '.join(DTYPES[:8])}. 16 bits halve the index, 8 bits about halve it "
            "again, and residual codes halve it once more (4 bits) or twice more (2 bits). `residual4+bfloat16` and so "
            "on also store 16 bits, for `search --rescore`. Default: float32.",
        ),
    ] = None,
    device: options.Device = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Empty an existing index and start over.")] = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Encode the documents of a corpus, and store them in an index that records the model.

    After any interruption, the same command (without `--overwrite`) resumes the build: it adds the documents whose ids
    are not in the index yet. An index that holds documents of another corpus, or was built with another model, is not
    changed.

    Under `torchrun --nproc-per-node N $(which pylate-flash) index ...`, N processes each encode a share of the
    documents on their own GPU, and the first adds them in order. If one process ends, all end.
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
        ids = read_ids(corpus, None if overwrite else path)
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
            say(f"Nothing to do: {path} already holds the {count} of {corpus.path}, judging by their ids")
            return
        if before:
            count = f"{before:,} of the {len(ids):,} documents"
            say(f"Resuming: {path} already holds {count} of {corpus.path}, judging by their ids")
        elif flat is not None:
            train_codec(flat, encoder, corpus, len(ids), batch_size)
        try:
            documents = (document for document in corpus if document.id not in present_ids)
            add_texts(flat, encoder, documents, len(ids) - before, batch_size, ranks=ranks)
        except KeyboardInterrupt:
            if flat is not None:
                note(
                    f"{len(flat):,} of {len(ids):,} documents are in {path}; the same command"
                    f"{' without --overwrite' if overwrite else ''} resumes the build"
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
        str | None, typer.Option(help="Folder or name of the index's model, if it is not where the index says.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace documents whose ids are already in the index.")
    ] = False,
    batch_size: options.BatchSize = options.BATCH_SIZE,
    device: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Add documents to an index, encoded by the model that it was built with.

    Documents whose ids are already in the index are skipped, so after an interruption the same command resumes. With
    `--replace` they are encoded and replace the old ones; after an interruption, that command starts over.
    """
    check_encoding_host("pylate-flash index add")
    path = index_path(index)
    check_index(path)
    corpus = open_corpus(data)
    ids = read_ids(corpus, path)
    flat = open_flat(path, device)
    n_new = sum(id_ not in flat for id_ in ids)
    n_present = len(ids) - n_new
    if n_present and not replace:
        say(f"{n_present} of the {len(ids)} documents of {corpus.path} are already in {path}; --replace replaces them")
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
        Path | None, typer.Option(metavar="FILE", help="A file with one id per line, such as `d1`, instead of ID.")
    ] = None,
    index: Index = DEFAULT_INDEX,
) -> None:
    """Remove documents from an index and from the disk: all of them, or none if an id is not in the index."""
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Describe an index: documents, tokens, size on disk, and the model that it was built with."""
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
        "searched": f"{decimal(described['scored_bytes'])}, read by a search of all documents",
        "size": f"{decimal(described['bytes'])} in {counted(described['files'], 'file')}",
        "texts": ", ".join(described["corpora"]) or "unknown",
        "model": "unknown" if model is None else model["name"] or "identified by its weights only",
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

    Exits with 0 if all files are intact; otherwise with 2, and a sentence that names the damaged file.
    """
    path = index_path(index)
    store = open_store(path)
    with explained():
        store.verify(show_progress=sys.stderr.isatty())
    say(f"{path} is intact: {counted(len(store), 'document')}")


@app.command()
@command
def compact(index: Index = DEFAULT_INDEX) -> None:
    """Merge the files of an index into as few as possible.

    Additions and removals already keep their number low. Merging temporarily takes as much disk space as the files that
    are merged.
    """
    path = index_path(index)
    store = open_store(path)
    before = _describe(store)["files"]
    with explained(kinds=INDEX_ERRORS):
        store.compact()
    after = _describe(store)["files"]
    say(f"{path} holds {counted(len(store), 'document')} in {counted(after, 'file')}, previously {before}")


@app.command(epilog="Example: `pylate-flash index convert --index my-index --to my-new-index`")
@command
def convert(
    to: Annotated[Path, typer.Option(help="Folder of the new index; must be new or empty.")],
    index: Index = DEFAULT_INDEX,
) -> None:
    """Convert an index in the previous format to a new folder, with unchanged embeddings.

    The old index is only read, and checked against its checksums; delete it when you no longer need it. After an
    interruption, the same command starts over.
    """
    path, new = index_path(index), index_path(to)
    if not holds_old_index(path):
        check_index(path)
        raise UserError(f"the index in {path} needs no conversion")
    check_place(new)
    if new.resolve().is_relative_to(path.resolve()):
        raise UserError(f"--to: {new} is in the folder of the old index; choose another folder")
    with writable_folder(new, "--to"):
        if os.listdir(new):
            raise UserError(f"--to: {new} is not empty; choose another folder")
    loading(f"the index in {path}")
    from .old_index import convert as converted

    with explained(kinds=INDEX_ERRORS), noted():
        store = converted(path, new, show_progress=sys.stderr.isatty())
    say(f"{new} holds the {counted(len(store), 'document')} of {path}, which is unchanged")


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
            f"the index in {path} does not record which model it was built with, so the build cannot be resumed; "
            "--overwrite rebuilds it"
        )


def _read_ids(path: Path) -> dict[str, str]:
    """Read ids from a file -> "file, line n: " for error messages."""
    check_file(path)
    with explained(), path.open("rb") as file:
        ids = {line: f"{where}: " for _, where, line in read_lines(file, path)}
    if not ids:
        raise UserError(f"{path} holds no ids")
    return ids
