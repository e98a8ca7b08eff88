"""Documents and queries from files: what is read, and the error of every kind of bad line."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pylate_flash.beir import load_beir_folder
from pylate_flash.data.files import Corpus, Document, Text, read_queries

GOOD = '{"_id": "a", "title": "One", "text": "first"}\n\n{"_id": "b", "title": null, "text": "second"}\n'


def test_a_corpus_is_read_as_beir_reads_it(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text("\ufeff" + GOOD, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("not a document, for there is a corpus.jsonl")
    expected = [Document("a", "One first", "first", {}), Document("b", "second", "second", {})]
    for path in (tmp_path / "corpus.jsonl", tmp_path):
        assert list(Corpus(path)) == expected


def test_a_text_is_read_with_its_title_and_without(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(GOOD + '{"_id": "c", "title": "Only", "text": " "}\n')
    expected = [("a", "One first", "first", {}), ("b", "second", "second", {}), ("c", "Only", "", {})]
    assert list(Corpus(tmp_path)) == expected
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text(" first\n")
    assert list(Corpus(tmp_path / "texts")) == [("one.txt", "first", "first", {})]


# Few bytes, and more than a pipe's buffer holds, so that it must be read while it is written.
@pytest.mark.parametrize("count", [1, 200])
def test_a_corpus_may_be_read_twice_even_from_a_pipe(count: int) -> None:
    read, write = os.pipe()
    lines = "".join(f'{{"_id": "{i}", "text": "{"x" * 1000}"}}\n' for i in range(count))

    def feed() -> None:
        with open(write, "w") as pipe:
            pipe.write(lines)

    writer = threading.Thread(target=feed)
    writer.start()
    corpus = Corpus(f"/dev/fd/{read}")
    writer.join()
    os.close(read)
    assert [text.id for text in corpus] == [text.id for text in corpus] == [str(i) for i in range(count)]


def test_the_texts_of_a_folder_are_named_by_their_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/deep/note.md", "a/README.MD", "a/picture.png", ".git/hidden.txt", ".hidden.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f" text of {name}\n")
    expected = [(name, f"text of {name}", f"text of {name}", {}) for name in ("a/README.MD", "a/deep/note.md", "b.txt")]
    assert list(Corpus(tmp_path)) == expected


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").touch()
    with pytest.raises(ValueError, match=r"neither a corpus\.jsonl nor \.txt or \.md files"):
        Corpus(tmp_path)
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8"):
        list(Corpus(tmp_path))
    (tmp_path / "latin.txt").write_bytes(gzip.compress(b"text"))
    with pytest.raises(ValueError, match=r"latin\.txt is compressed by gzip"):
        list(Corpus(tmp_path))


def test_what_is_no_file_is_not_read_as_a_text_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "null.txt").symlink_to(os.devnull)
    with pytest.raises(ValueError, match=r"null\.txt is not a regular file"):
        list(Corpus(tmp_path))


BAD_LINES = {
    b"{": "not valid JSON",
    b'{"_id": "x", "text": ': "not valid JSON",
    b'{"_id": "x", "text": "caf\xe9"}': "not UTF-8",
    b"[" * 200_000: "not valid JSON: nested too deeply",
    b'{"_id": 1' + b"0" * 5000 + b"}": "(4300",
    b"[1]": "expected a JSON object, got list",
    b'{"id": "x", "text": "t"}': '"_id" is missing; found id, text',
    b'{"_id": "x"}': '"text" is missing',
    b'{"_id": 7, "text": "t"}': '"_id" must be a string, got 7',
    b'{"_id": "x", "text": null}': '"text" must be a string, got None',
    b'{"_id": "x\\ud800", "text": "t"}': '"_id" holds an unpaired surrogate',
    b'{"_id": "x", "text": "t \\udfff"}': '"text" holds an unpaired surrogate',
    b'{"_id": "a", "text": "t"}': """the "_id" 'a' was given before, in line 1""",
    b'{"_id": "x", "text": "", "title": []}': '"title" must be a string',
    b'{"_id": "x", "text": [' + b"1," * 9999 + b"1]}": '"text" must be a string, got [1, 1, 1, 1, 1, 1, ...]',
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named(line: bytes, tmp_path: Path) -> None:
    """By every reader: of a corpus, of queries, and of a BEIR folder."""
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(GOOD.encode() + line + b"\n")
    (tmp_path / "queries.jsonl").write_text(GOOD)
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("a\tb\t1\n")
    readers: list[Callable[[], object]] = [lambda: list(Corpus(path)), lambda: load_beir_folder(tmp_path)]
    if b"title" not in line:
        readers.append(lambda: read_queries(path.read_bytes().splitlines(), path))
    for read in readers:
        with pytest.raises(ValueError, match=r"corpus\.jsonl, line 4: ") as error:
            read()
        assert BAD_LINES[line] in str(error.value)


def test_texts_are_found_by_id_without_reading_on(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(GOOD + "nonsense\n")
    corpus = Corpus(tmp_path)
    assert corpus.find({"b"}) == {"b": "second"}
    assert corpus.find(set()) == {}
    with pytest.raises(ValueError, match="line 4"):
        corpus.find({"a", "unknown"})
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("first")
    (tmp_path / "texts" / "two.txt").write_bytes(b"\xff")
    (tmp_path / "secret.txt").write_text("not in the folder")
    assert Corpus(tmp_path / "texts").find({"one.txt", "../secret.txt"}) == {"one.txt": "first"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"_id": "", "text": "t"}', 'line 1: the "_id" is empty'),
        ('{"_id": "x", "title": 3, "text": "t"}', 'line 1: "title" must be a string, got 3'),
        ("\n\n", "is empty"),
    ],
)
def test_what_only_a_corpus_asks_for(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        list(Corpus(tmp_path))


def test_queries_are_lines_or_objects() -> None:
    assert read_queries([b"one\n", b" \n", b"  {two}\n"], "-") == [Text("1", "one"), Text("3", "{two}")]
    assert read_queries([b"\n", b'{"_id": "q", "text": "one", "metadata": {}}'], "-") == [Text("q", "one")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "queries.txt holds no queries"),
        ([b"\n"], "queries.txt holds no queries"),
        ([b"good\n", b"caf\xe9\n"], "queries.txt, line 2: not UTF-8"),
        ([b"\x1f\x8b\x08\x00\n"], "queries.txt is compressed by gzip"),
        ([b'{"_id": "q", "text": " "}'], "queries.txt, line 1: the query is empty"),
    ],
)
def test_bad_queries_are_named(lines: list[bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_queries(lines, "queries.txt")
