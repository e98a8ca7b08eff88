"""Metadata and `where`: which documents a filter selects, and that it can read only metadata."""

from __future__ import annotations

import enum
import math
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pylate_flash.index import filters
from pylate_flash.index.store import PackedStore
from pylate_flash.indexes import Flat
from tests.stores import documents_of

METADATA: list[dict[str, Any] | None] = [
    {"year": 2019, "lang": "en", "score": 0.5},
    {"year": 2020, "lang": "de", "open access": True},
    None,
    {"year": 2021, "lang": "en", "select": "from"},
    {"lang": "O'Neill", "year": None, "größe": -(2**63)},
    {"year": np.int64(2022), "lang": 'a"b', "score": np.float32(0.25)},
]
IDS = list("abcdef")


@pytest.fixture(params=["disk", "memory"])
def index(tmp_path: Path, request: pytest.FixtureRequest) -> Flat:
    index = Flat(tmp_path if request.param == "disk" else None, "index", device="cpu", show_progress=False)
    documents = documents_of([3, 2, 4, 1, 2, 5])
    index.add_documents(IDS[:3], documents[:3], metadata=METADATA[:3])
    return index.add_documents(IDS[3:], documents[3:], metadata=METADATA[3:])


def kept(index: Flat, where: Any, **options: Any) -> str:
    (results,) = index(documents_of([3], seed=9), k=10, where=where, **options)
    return "".join(sorted(result["id"] for result in results))


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ("year >= 2020 and lang = 'en'", "d"),
        (("year >= ?", [2020]), "bdf"),
        (("year >= :year and lang = :lang", {"year": 2020, "lang": "en", "other": 1}), "d"),
        (("lang = ?", ["O'Neill"]), "e"),
        (("lang = ?", ('a"b',)), "f"),
        # SQLite prepares these anew once it knows the pattern.
        (("lang LIKE ?", ["E%"]), "ad"),
        (("lang GLOB :pattern and year > 2019", {"pattern": "e*"}), "d"),
        (("like(?, lang)", ["e%"]), "ad"),
        ("lang is null", "c"),
        ("year is null", "ce"),
        ('"open access"', "b"),
        ("`select` = 'from' -- a remark", "d"),
        ("größe < 0", "e"),
        ("YEAR = 2019 or score between 0.2 and 0.3", "af"),
        ("upper(lang) like 'e%' or lang in ('de', '\"nothing\"')", "abd"),
        ("coalesce(year, 0) = 0", "ce"),
        ("date('2020-01-01') = '2020-01-01' and typeof(year) = 'integer'", "abdf"),
        ("0", ""),
    ],
)
def test_a_filter_keeps_what_fulfils_it(index: Flat, where: Any, ids: str) -> None:
    for _ in range(2):
        assert kept(index, where) == ids
    # Same results as with a list of ids.
    query = documents_of([3], seed=9)
    assert index(query, where=where) == index(query, subset=list(ids))


def test_a_filter_goes_with_a_subset(index: Flat) -> None:
    assert kept(index, "year >= 2020", subset=["a", "b", "f", "nothing"]) == "bf"
    queries = documents_of([3, 2], seed=9)
    results = index(queries, where="year >= 2020", subset=[["f", "a"], ["c"]])
    assert [[result["id"] for result in hits] for hits in results] == [["f"], []]


def test_a_filter_follows_the_index(index: Flat) -> None:
    assert kept(index, "year > 2019") == "bdf"
    index.remove_documents(["d"])
    assert kept(index, "year > 2019") == "bf"
    index.add_documents(["b", "x"], documents_of([1, 1]), replace=True, metadata=[{"year": 2000}, {"new": 1}])
    assert kept(index, "year > 2019") == "f"
    assert kept(index, "new or year = 2000") == "bx"
    index.compact()
    index.add_documents(["y"], documents_of([1]))
    assert kept(index, "new is null") == "abcefy"
    assert index.verify().documents == 7


def test_what_another_process_removed_is_left_out(tmp_path: Path) -> None:
    index = Flat(tmp_path, "index", device="cpu")
    index.add_documents(["a", "b"], documents_of([1, 2]), metadata=[{"x": 1}, {"x": 2}])
    reader = Flat(tmp_path, "index", device="cpu")
    index.remove_documents(["a"])
    index.add_documents(["c"], documents_of([1]), metadata=[{"x": 3}])
    assert kept(reader, "x > 0") == "b"
    assert "".join(reader.documents_ids) == "ab"


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("yeer > 2020", "no such column: yeer; keys are .*lang.*year"),
        ('"yeer" > 2020', "no document has the key 'yeer'; keys are"),
        ("year >", "is not a valid filter: it is incomplete"),
        (" ", "the expression is empty"),
        ("year ? 1", "syntax error"),
        *(
            (text, "its parentheses are not balanced")
            for text in ("(", "1) -- ", "1) limit (1", "y = 9) or (1", "1) /*")
        ),
        ("year = 'a\0b'", "is not a valid filter"),
        ("year = ?", "is not a valid filter"),
        (("year = ?", [1, 2]), "is not a valid filter"),
        (("year = :year", {"lang": "en"}), "is not a valid filter"),
        (("year = :year", {"year": math.inf}), "parameter 'year' is inf, expected a finite number"),
        ("year; DROP TABLE documents", "syntax error"),
        ("lang REGEXP 'x'", "no such function"),
        # Columns of the catalog, and SQLite's own tables.
        ("`#id` IS NOT NULL", "may read metadata and call plain functions, and nothing else"),
        ("documents.`#crc` > 0", "and nothing else"),
        ("year IN (SELECT record FROM state)", "and nothing else"),
        ("EXISTS (SELECT sql FROM sqlite_master)", "and nothing else"),
        ("EXISTS (SELECT 1)", "and nothing else"),
        ("0) UNION SELECT number FROM parts WHERE (1", "its parentheses are not balanced"),
        ("year = (SELECT max(year) FROM documents)", "and nothing else"),
        ("`year` LIKE (SELECT `year` FROM documents LIMIT 1)", "and nothing else"),
        pytest.param(
            "lang LIKE '" + "%a" * 600 + "'",
            "pattern too complex",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 sets no limits of SQLite"),
        ),
        ("(WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n)", "and nothing else"),
        ("year IN pragma_table_info('parts')", "and nothing else"),
        ("RAISE(ABORT, 'x')", "is not a valid filter"),
        ("load_extension('x')", "not authorized to use function: load_extension"),
        ("length(randomblob(1000000000)) > 0", "not authorized to use function: randomblob"),
        ("length(zeroblob(1000000000)) > 0", "not authorized to use function: zeroblob"),
        ("printf('%1000000000d', 1) > 0", "not authorized to use function"),
        ("sqlite_version() > 0", "not authorized to use function"),
        ("max(year) > 0", "misuse of aggregate"),
        ("row_number() OVER ()", "is not a valid filter"),
        ("year = 1" + " OR 1" * 5000, "are too many, expected at most 10000"),
        ("NOT " * 2000 + "1", "is not a valid filter"),
    ],
)
def test_a_wrong_filter_is_one_sentence(index: Flat, where: Any, said: str) -> None:
    generation = index.info().generation
    with pytest.raises(ValueError, match=f"where: .*{said}") as caught:
        kept(index, where)
    assert len(str(caught.value)) < 700
    assert kept(index, "year = 2019") == "a"
    assert index.verify().generation == generation


def test_many_parentheses_are_a_filter_or_none(index: Flat) -> None:
    """SQLite's parser stack holds a hundred of them, or any number since 3.46."""
    where = "(" * 4000 + "year = 2019" + ")" * 4000
    try:
        result = kept(index, where)
    except ValueError as error:
        result = str(error)
    assert result == "a" or re.match("where: .* is not a valid filter: parser stack overflow", result)


@pytest.mark.parametrize(
    "where", [3, ["year"], ("year", 3), ("year", "abc"), ("a", [], []), ("year = ?", [object()]), ("1", {3: 1})]
)
def test_what_is_no_filter_is_a_type_error(index: Flat, where: Any) -> None:
    with pytest.raises(TypeError, match="where"):
        kept(index, where)


def test_a_filter_does_not_wait_for_a_writer(index: Flat) -> None:
    with index._store._catalog.turn() as connection:
        connection.execute("UPDATE documents SET lang = lang")
        assert kept(index, "year >= 2020") == "bdf"


def test_few_filters_are_kept_in_mind(index: Flat) -> None:
    for year in range(2000, 2100):
        assert kept(index, ("year = ?", [year])) == {2019: "a", 2020: "b", 2021: "d", 2022: "f"}.get(year, "")
    assert len(index._store._filtered) <= 16
    # Equal parameters of different types are cached separately.
    assert kept(index, ("typeof(?) = 'integer'", [1])) == "abcdef"
    assert kept(index, ("typeof(?) = 'integer'", [1.0])) == ""


def test_a_filter_ends(index: Flat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "FILTER_SECONDS", 0.0)
    monkeypatch.setattr(filters, "_STEPS_BETWEEN_LOOKS", 1)
    with pytest.raises(ValueError, match="it takes longer than 0 s"):
        kept(index, "year > 1")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python cannot tell SQLite how long strings may be")
def test_a_filter_looks_at_no_long_strings(index: Flat) -> None:
    """Searching one string in another is a single SQLite step, which the time limit cannot interrupt."""
    for where in (("instr(?, ?)", ["a" * 300_000, "b"]), ("instr(:a || :a, :a || 'b')", {"a": "a" * 200_000})):
        with pytest.raises(ValueError, match="looks at a string of more than 262144 bytes"):
            kept(index, where)
    index.add_documents(["long"], documents_of([1]), metadata=[{"year": 2030, "text": "a" * 300_000}])
    assert index.search(documents_of([1]), where="year = 2030")[0][0]["id"] == "long"
    with pytest.raises(ValueError, match="looks at a string of more than 262144 bytes"):
        kept(index, "text like 'a%'")


@pytest.mark.parametrize(
    ("metadata", "kind", "said"),
    [
        ([{"a": 1}], ValueError, "one dictionary for each document, got 1 for 2"),
        ({"a": 1}, TypeError, "must be a list of dictionaries"),
        ("ab", TypeError, "must be a list of dictionaries"),
        ([{"a": 1}, 3], TypeError, r"metadata\[1\] must be a dictionary, got int"),
        ([{"a": [1]}, {}], TypeError, r"metadata\[0\]\['a'\] must be a string, a number, .* got list"),
        ([{"a": float("nan")}, {}], ValueError, r"metadata\[0\]\['a'\] is nan, expected a finite number"),
        ([{"a": 2**63}, {}], ValueError, "an integer of 64 bits and a sign, expected an integer of at most 64 bits"),
        ([{"a": 10**400}, {}], ValueError, "an integer of 1329 bits and a sign, expected"),
        ([{"a": "\ud800"}, {}], ValueError, r"metadata\[0\]\['a'\] is '.ud800', expected a string that UTF-8 can"),
        ([{3: 1}, {}], TypeError, "keys must be strings, got 3"),
        ([{"#id": 1}, {}], ValueError, "'#id' cannot be a key"),
        ([{"": 1}, {}], ValueError, "'' cannot be a key"),
        ([{"a\0": 1}, {}], ValueError, "cannot be a key"),
        ([{"\ud800": 1}, {}], ValueError, "cannot be a key"),
        ([{"a": 1}, {"A": 1}], ValueError, "'A' and 'a' are the same key|'a' and 'A' are the same key"),
        ([{"YEAR": 1}, {}], ValueError, "'YEAR' and 'year' are the same key"),
        ([{f"k{i}": 1 for i in range(2000)}, {}], ValueError, "have more than 1000 keys"),
    ],
)
def test_wrong_metadata_change_nothing(index: Flat, metadata: Any, kind: type, said: str) -> None:
    with pytest.raises(kind, match=said):
        index.add_documents(["x", "y"], documents_of([1, 1]), metadata=metadata)
    assert index.documents_ids == IDS
    assert index.add_documents(["x"], documents_of([1]), metadata=[{"new": 1}]).verify().documents == 7


def test_metadata_may_be_of_subclasses(tmp_path: Path) -> None:
    class Language(str, enum.Enum):
        GERMAN = "de"

    class Year(enum.IntEnum):
        LAST = 2020

    metadata = [{np.str_("lang"): np.str_("en"), "year": 2019}, {"lang": Language.GERMAN, "year": Year.LAST}]
    index = Flat(tmp_path, "index", device="cpu").add_documents(["a", "b"], documents_of([1, 2]), metadata=metadata)
    assert index.verify().documents == 2
    assert kept(index, "lang = 'de' and year = 2020") == "b"


def test_names_are_quoted_as_sqlite_quotes_them(tmp_path: Path) -> None:
    metadata = [{"it's": 1, "ä": 1, 'say "so"': 1}]
    index = Flat(tmp_path, "index", device="cpu").add_documents(["a"], documents_of([1]), metadata=metadata)
    for where in ('"it\'s" = 1 and "it\'s" < 2', '"ä" = 1 -- a (remark', '"IT\'S" /* ( */ = 1', '"say ""so""" = 1'):
        assert kept(index, where) == "a"
    # SQLite would take it for a string.
    with pytest.raises(ValueError, match="where: no document has the key 'Ä'; keys are"):
        kept(index, '"Ä" = 1')


def test_an_index_that_starts_again_has_no_keys_and_other_numbers(tmp_path: Path) -> None:
    """A reader that still holds the previous documents must not take the new ones for them."""
    index = Flat(tmp_path, "index", device="cpu")
    index.add_documents(["a", "b"], documents_of([1, 2]), metadata=[{"lang": 1}, {"lang": 2}])
    reader = Flat(tmp_path, "index", device="cpu")
    index = Flat(tmp_path, "index", device="cpu", override=True)
    index.add_documents(["c", "d"], documents_of([1, 2]), metadata=[{"Lang": 2}, {"Lang": 1}])
    assert kept(reader, "lang = 1") == ""
    assert kept(index, "lang = 1") == "d"
    assert index.verify().documents == 2


def test_metadata_of_an_iterator_are_in_its_batches(index: Flat) -> None:
    with pytest.raises(TypeError, match="metadata must be in the batches of an iterator"):
        index.add_documents(iter([(["x"], documents_of([1]))]), metadata=[{"year": 1}])
    assert index.documents_ids == IDS


def test_verify_finds_metadata_that_have_changed(tmp_path: Path) -> None:
    index = Flat(tmp_path, "index", device="cpu").add_documents(["a"], torch.ones(1, 2, 4), metadata=[{"x": 1}])
    index.verify()
    with closing(sqlite3.connect(index.index_path / "catalog.sqlite")) as connection:
        connection.execute("UPDATE documents SET x = 2")
        connection.commit()
    with pytest.raises(ValueError, match="is damaged: its documents are not those of its parts"):
        index.verify()


def test_removed_metadata_leave_the_disk(tmp_path: Path) -> None:
    store = PackedStore(tmp_path)
    store.add(["a", "b"], documents_of([1, 1]), metadata=[{"x": "secret"}, {"x": "open"}])
    store.remove(np.array([0]), erase=True)
    files = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"secret" not in files
    assert b"open" in files
