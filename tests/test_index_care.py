"""`Flat`: refused arguments, adding and replacing documents, and index maintenance."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from pylate_flash.index import catalog, checksums
from pylate_flash.index.catalog import Catalog
from pylate_flash.indexes import Flat
from tests.recorded import recorded
from tests.stores import documents_of, integers_of, small
from tests.test_indexes import flat


@pytest.mark.parametrize(
    ("ids", "documents", "error", "message"),
    [
        (["c"], [], ValueError, "must have the same length, got 1 ids and 0 documents"),
        (["c", "c"], documents_of([1, 1]), ValueError, "documents_ids: 'c' is given twice"),
        (["c", "a"], documents_of([1, 1]), ValueError, "documents_ids: 'a' is already in the index"),
        ([3], documents_of([1]), TypeError, r"documents_ids\[0\] must be a string, got 3 of type int"),
        (3, documents_of([1]), TypeError, "documents_ids must be a list of strings, got int"),
        (["c"], documents_of([1], size=5), ValueError, "document 'c' have size 5, expected 4 as in the index in"),
        (["c"], [torch.full((2, 4), torch.nan)], ValueError, "document 'c' hold NaN"),
        (["c"], [torch.ones(4)], ValueError, r"documents_embeddings\[0\] must have shape \[L, d\] .* got \[4\]"),
        (["c"], torch.ones(4), ValueError, r"documents_embeddings must have shape \[L, d\] or \[N, L, d\], got \[4\]"),
        (["c"], [torch.ones(2, 0)], ValueError, r"d of at least 1, got \[2, 0\]"),
        (["c"], [torch.ones(2, 4, dtype=torch.int64)], TypeError, "floating dtype, got torch.int64"),
        (["c"], [np.array([["x"]])], TypeError, r"documents_embeddings\[0\] must be an array or tensor of numbers"),
        (["c"], "text", TypeError, "documents_embeddings must be a list of"),
    ],
)
def test_a_refused_addition_changes_nothing(tmp_path: Path, ids, documents, error, message: str) -> None:
    index = flat(tmp_path, ["a", "b"], documents_of([1, 2]))
    files = sorted(index.index_path.iterdir())
    with pytest.raises(error, match=message):
        index.add_documents(ids, documents)
    assert index.documents_ids == ["a", "b"]
    assert sorted(index.index_path.iterdir()) == files


@pytest.mark.parametrize("memory", [False, True])
def test_threads_search_what_another_one_changes(tmp_path: Path, memory: bool) -> None:
    """Every score belongs to its id, and an addition is found by the next search."""
    index = small(None if memory else tmp_path)

    def document(number: int) -> torch.Tensor:
        return torch.tensor([[float(number), 1.0]])

    index.add_documents(["0"], [document(0)])
    failures: list[object] = []
    done = threading.Event()

    def search() -> None:
        while not done.is_set():
            try:
                results = index([torch.tensor([[1.0, 0.0]])], k=50)[0]
                failures.extend(result for result in results if result["score"] != float(result["id"]))
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1, 60):
        index.add_documents([str(number)], [document(number)])
        best = index([torch.tensor([[1.0, 0.0]])], k=1)[0][0]["id"]
        failures.extend([best] if best != str(number) else [])
        if number % 3 == 0:
            index.remove_documents([str(number - 2)])
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_removal_that_took_effect_is_no_error(tmp_path: Path) -> None:
    """What is left of it is removed from the disk later: here a segment is damaged, which the rewriting reads."""
    index = flat(tmp_path, list("abcdefgh"), documents_of([2] * 8))
    index._store.close()
    (segment,) = index.index_path.glob("segment*")
    content = bytearray(segment.read_bytes())
    content[-5] ^= 64
    segment.write_bytes(content)
    index = small(tmp_path)
    with pytest.warns(UserWarning, match="documents were removed, but their space is not reclaimed: .* is damaged"):
        index.remove_documents(["a", "b", "c"])
    assert len(index) == len(small(tmp_path)) == 5


def test_an_index_that_was_deleted_takes_no_documents(tmp_path: Path) -> None:
    index = flat(tmp_path, ["a"], documents_of([1]))
    shutil.rmtree(index.index_path)
    with pytest.raises(OSError, match=r"cannot write to the index in .*catalog.sqlite was deleted or replaced"):
        index.add_documents(["b"], documents_of([1]))
    assert flat(tmp_path, ["c"], documents_of([1])).documents_ids == ["c"]
    with pytest.raises(OSError, match=r"catalog.sqlite was deleted or replaced since it was opened here"):
        index.remove_documents(["a"])


def test_an_interrupt_while_a_transaction_begins_ends_it() -> None:
    class Interrupted:
        def __init__(self, connection: sqlite3.Connection) -> None:
            self.connection = connection

        def __getattr__(self, name: str) -> object:
            return getattr(self.connection, name)

        def execute(self, statement: str) -> None:
            self.connection.execute(statement)
            if statement.startswith("BEGIN"):
                raise KeyboardInterrupt

    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        with pytest.raises(KeyboardInterrupt), catalog._transaction(Interrupted(connection), "IMMEDIATE"):
            pass
        assert not connection.in_transaction


def test_documents_are_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = flat(tmp_path, ["a", "b", "c"], documents_of([3, 2, 4]))
    new = documents_of([5, 1])
    commits = recorded(monkeypatch, Catalog, "turn")
    assert index.add_documents(["b", "d"], new, replace=True) is index
    assert len(commits) == 1
    for view in (index, small(tmp_path)):
        assert view.documents_ids == ["a", "c", "b", "d"]
        for actual, expected in zip(view.get_documents_embeddings([["b", "d"]])[0], new, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert [result["id"] for result in view([new[0]], k=1)[0]] == ["b"]
    with pytest.raises(ValueError, match="documents_ids: 'd' is given twice"):
        index.add_documents(["d", "d"], new, replace=True)
    bad = [new[0], torch.full((1, 4), torch.nan)]
    with pytest.raises(ValueError, match="document 'c' hold NaN"):
        index.add_documents(["a", "c"], bad, replace=True)
    assert index.documents_ids == ["a", "c", "b", "d"]
    # Replacing all documents at once, and `replace=True` with only new ids.
    index.add_documents(index.documents_ids, documents_of([1, 2, 3, 4]), replace=True)
    index.add_documents(["e"], documents_of([2]), replace=True)
    assert index.verify().documents == 5
    assert index.documents_ids == ["a", "c", "b", "d", "e"]


def test_an_index_remembers_its_corpora(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").touch()
    index = flat(tmp_path, ["a"], documents_of([3]))
    assert index.corpora == []
    for _ in range(2):
        index.record_corpus(tmp_path / "corpus.jsonl").record_corpus(tmp_path / "gone")
    assert index.corpora == [tmp_path / "corpus.jsonl", tmp_path / "gone"]
    assert small(tmp_path).corpora == index.corpora
    assert Flat(tmp_path, "index", device="cpu", override=True).corpora == []


def test_a_refused_removal_changes_nothing(tmp_path: Path) -> None:
    index = flat(tmp_path, ["a", "b"], documents_of([1, 2]))
    with pytest.raises(ValueError, match="documents_ids: 'z' is not in the index"):
        index.remove_documents(["a", "z"])
    with pytest.raises(ValueError, match="documents_ids: 'a' is given twice"):
        index.remove_documents(["a", "a"])
    assert small(tmp_path).documents_ids == ["a", "b"]


@pytest.mark.parametrize(
    ("queries", "options", "error", "message"),
    [
        (
            torch.ones(1, 2, 5),
            {},
            ValueError,
            r"queries_embeddings\[0\] has embedding size 5, expected 4 as the index in",
        ),
        ([torch.full((1, 4), torch.nan)], {}, ValueError, r"queries_embeddings\[0\] holds NaN"),
        (torch.ones(1, 2, 4), {"k": 0}, ValueError, "k must be an integer of at least 1, got 0"),
        (torch.ones(1, 2, 4), {"k": 2.5}, ValueError, "k must be an integer of at least 1, got 2.5"),
        (torch.ones(1, 2, 4), {"subset": "a"}, TypeError, "subset must be a list of ids .* got str"),
        (torch.ones(1, 2, 4), {"subset": ["a", ["b"]]}, TypeError, "a mixture of the two"),
        (torch.ones(1, 2, 4), {"subset": [["a"], ["b"]]}, ValueError, "got 2 for 1 queries"),
        (torch.ones(1, 2, 4), {"subset": [[1]]}, TypeError, r"subset\[0\]\[0\] must be a string"),
    ],
)
def test_refused_searches(tmp_path: Path, queries, options: dict, error, message: str) -> None:
    index = flat(tmp_path, ["a", "b"], documents_of([1, 2]))
    with pytest.raises(error, match=message):
        index(queries, **options)


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        ([[1.0, 2.0], [3.0]], ValueError, "must be a list of rows of numbers, all of one length: .*inhomogeneous"),
        ([["one", "two"]], ValueError, "must be a list of rows of numbers, all of one length: could not convert"),
        ([[10**400]], ValueError, "must be a list of rows of numbers"),
        ([torch.ones(2, requires_grad=True)], ValueError, "must be a list of rows of numbers"),
        (torch.ones(1, 2, device="meta"), ValueError, "must hold values, got a tensor on device meta"),
        (torch.ones(1, 2).to_sparse(), TypeError, "must be a dense torch.Tensor, got one of layout torch.sparse_coo"),
        (np.ones((1, 2), dtype=">f4"), TypeError, "must be of a dtype that torch supports, .* in native byte order"),
        (
            np.ones((1, 2), dtype=np.longdouble),
            TypeError,
            r"must be of a dtype that torch supports, .* \(longdouble|float",
        ),
    ],
)
def test_arrays_that_torch_does_not_take_are_named(tmp_path: Path, item: object, error, message: str) -> None:
    index = small(tmp_path)
    with pytest.raises(error, match=rf"documents_embeddings\[1\] {message}"):
        index.add_documents(["a", "b"], [[[1.0, 2.0]], item])
    index.add_documents(["a"], [[[1.0, 2.0]]])
    with pytest.raises(error, match=rf"queries_embeddings\[0\] {message}"):
        index([item])


def test_flags_are_bools_lest_a_text_replaces_or_erases(tmp_path: Path) -> None:
    index = flat(tmp_path, ["a", "b"], documents_of([1, 2]))
    generation = index.info().generation
    with pytest.raises(TypeError, match="^replace must be True or False, got str"):
        index.add_documents(["a"], documents_of([1]), replace="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^erase must be True or False, got str"):
        index.remove_documents(["a"], erase="False")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^matches must be True or False, got int"):
        index.search(documents_of([1]), matches=1)  # type: ignore[arg-type]
    assert index.info().generation == generation
    yes = np.True_
    index.add_documents(["a"], documents_of([1]), batch_size=np.int64(1), replace=yes)  # type: ignore[arg-type]
    assert index.remove_documents("b", erase=yes).search(documents_of([1]), matches=yes)  # type: ignore[arg-type]


def test_other_errors_name_what_is_wrong(tmp_path: Path) -> None:
    index = small(tmp_path)
    with pytest.raises(ValueError, match="the index in .* is empty: add documents before searching"):
        index(torch.ones(1, 2, 4))
    with pytest.raises(ValueError, match="scorer must be one of .* got 'fast'"):
        Flat(tmp_path, "index", scorer="fast")
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        index.add_documents(["a"], documents_of([1]), batch_size=0)
    with pytest.raises(TypeError, match="^documents_ids must be a list of lists of strings, got str"):
        index.get_documents_embeddings("a")
    with pytest.raises(TypeError, match="^subset must be a list of ids .* got str"):
        index.add_documents(np.array("d"), documents_of([1])).search(documents_of([1]), subset=np.array("d"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^name must be that of a model or its folder, or None, got bytes"):
        index.record_model(torch.nn.Linear(1, 1), name=b"name")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"documents_ids\[1\]: 'z' is not in the index"):
        index.add_documents(["a"], documents_of([1])).get_documents_embeddings([["a"], ["z"]])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"index_folder": 1}, TypeError, "index_folder must be the path of a folder, or None, got int"),
        ({"override": "False"}, TypeError, "override must be True or False, got str"),
        ({"dtype": ["float32"]}, ValueError, r"dtype must be one of .*, got \['float32'\]"),
        ({"dtype": "int8", "projection": (torch.ones(2, 4), None)}, ValueError, "projection: .* stores 'int8'"),
        ({"scorer": np.array(["torch", "auto"])}, ValueError, "scorer must be one of .*, got array"),
        ({"device": "gpu"}, ValueError, "device must be a device that torch can use here, got 'gpu': Expected one of"),
        ({"device": ""}, ValueError, "device must be a device that torch can use here, got ''"),
        ({"device": "meta"}, ValueError, "device must be a device whose tensors hold values, got 'meta'"),
        ({"device": ["cpu"]}, TypeError, "device must be a torch.device or the name of one, got list"),
        ({"device": True}, TypeError, "device must be a torch.device or the name of one, got bool"),
        ({"projection": (torch.ones(2, 4).int(), None)}, ValueError, "projection must .* got torch.int32 on cpu"),
        ({"projection": (torch.ones(2, 4, device="meta"), None)}, ValueError, "projection .* torch.float32 on meta"),
        ({"projection": (torch.ones(0, 4), None)}, ValueError, r"projection must be .*, got \[\[0, 4\], None\]"),
        ({"device_memory": np.ones(2)}, ValueError, 'device_memory must be "auto" or bytes'),
        ({"group": 1}, TypeError, "group must be a process group of torch.distributed .*, got int"),
    ],
)
def test_a_wrong_argument_is_named_before_override_empties_the_index(
    tmp_path: Path, arguments: dict, error: type[Exception], message: str
) -> None:
    flat(tmp_path, ["a"], documents_of([1]))
    with pytest.raises(error, match=f"^{message}"):
        Flat(**{"index_folder": tmp_path, "index_name": "index", "override": True, "device": "cpu", **arguments})
    assert Flat(tmp_path, "index", device="cpu").documents_ids == ["a"]


# Index maintenance


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../evil", "a/b", "/tmp/evil", "a\\b", "..\\evil", "C:", "C:evil", "a\0b", 3, None]
)
def test_the_name_of_an_index_is_one_plain_component(tmp_path: Path, name: object) -> None:
    with pytest.raises(ValueError, match="index_name must be the plain name of a folder in index_folder"):
        Flat(tmp_path / "indexes", name, override=True)
    assert list(tmp_path.iterdir()) == []


def test_plain_names_of_all_kinds_are_taken(tmp_path: Path) -> None:
    for name in ("index", ".hidden", "a b", "..a", "ü", "v1:0.5"):
        Flat(tmp_path, name, device="cpu").add_documents(["a"], documents_of([1]))
        assert (tmp_path / name / "catalog.sqlite").is_file()


def test_info_verify_and_compact_say_what_the_index_is(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    index = flat(tmp_path, ["a", "b"], documents_of([3, 2]))
    index.add_documents(["c"], documents_of([4]))
    info = index.verify()
    assert info == index.info() == small(tmp_path).info()
    assert (info.documents, info.tokens, info.segments, info.embedding_size, info.dtype) == (3, 9, 1, 4, "float32")
    files = [file for file in index.index_path.iterdir() if file.name not in ("committed", "reserve")]
    assert info.bytes == sum(file.stat().st_size for file in files)
    assert info.created_with["torch"] == torch.__version__
    assert info.model is None
    assert capsys.readouterr().err == ""
    assert index.compact() is index
    assert index.verify(show_progress=True).segments == 1
    assert "Verifying" in capsys.readouterr().err
    assert index.documents_ids == ["a", "b", "c"]
    assert Flat(tmp_path, "new", device="cpu").info().documents == 0


def test_verify_reads_the_files_as_they_are_now(tmp_path: Path) -> None:
    index = flat(tmp_path, ["a", "b"], documents_of([3, 2])).compact()
    (segment,) = index.index_path.glob("segment-*")
    changed = bytearray(segment.read_bytes())
    changed[-60] ^= 1
    # Replace the file that is open by another one.
    segment.unlink()
    segment.write_bytes(changed)
    with pytest.raises(ValueError, match="is damaged: the checksum of its bytes 0 to 80 differs") as caught:
        index.verify()
    assert str(segment) in str(caught.value)


def test_verify_looks_where_the_index_was_opened_and_misses_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    index = flat(Path("indexes"), ["a"], documents_of([3]))
    monkeypatch.chdir("elsewhere")
    assert index.verify().documents == 1
    shutil.rmtree(tmp_path / "indexes")
    with pytest.raises(ValueError, match=r"indexes/index/catalog\.sqlite is missing"):
        index.verify()


@pytest.mark.parametrize("scorer", ["pylate_flash", "torch"])
def test_products_that_overflow_are_not_called_damage(tmp_path: Path, scorer: str) -> None:
    index = flat(tmp_path, ["a", "b"], [torch.ones(2, 4), torch.full((1, 4), 1e20)], scorer=scorer)
    for subset in (None, [["a", "b"]]):
        with pytest.raises(ValueError, match="the score of document 'b' .* is not finite, .* overflow float32"):
            index(torch.full((1, 2, 4), 1e20), subset=subset)
    index.verify()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scorer", ["pylate_flash", "torch"])
def test_a_search_that_meets_nan_says_so(
    tmp_path: Path, scorer: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = flat(tmp_path, ["a", "b", "c"], integers_of([3, 2, 4], 2, most=1), scorer=scorer)
    segment = index._store.segments[0].path
    torch.from_file(str(segment), shared=True, size=9 * 2).view(9, 2)[3] = value
    monkeypatch.setattr(checksums.CheckedBlocks, "check", lambda *arguments: None)
    for subset in (None, [["a", "b"]]):
        with pytest.raises(ValueError, match="the score of document 'b' is not finite, .* verify.. names the file"):
            index(torch.ones(1, 2, 2), subset=subset)
    assert [r["id"] for r in index(torch.ones(1, 2, 2), subset=["a", "c"])[0]] != []


def test_batches_of_an_iterator_are_added_one_by_one(tmp_path: Path) -> None:
    documents = documents_of([3, 2, 0, 4, 1])
    index = small(tmp_path)
    counts: list[int] = []

    def batches() -> Iterator[tuple]:
        yield ["a", "b"], documents[:2]
        counts.append(len(small(tmp_path)))
        yield "c", documents[2]
        counts.append(len(small(tmp_path)))
        yield ["d", "e"], documents[3:], [{"x": 1}, None]

    assert index.add_documents(batches()) is index
    assert (counts, index.documents_ids) == ([2, 3], list("abcde"))
    assert [r["id"] for r in index(documents[:1], where="x = 1")[0]] == ["d"]
    for actual, expected in zip(index.get_documents_embeddings([list("abcde")])[0], documents, strict=True):
        assert torch.equal(actual, expected)
    # Batches added before the error stay.
    with pytest.raises(ValueError, match="'a' is already in the index"):
        index.add_documents(iter([(["f"], documents[:1]), (["a"], documents[:1])]))
    assert small(tmp_path).documents_ids == list("abcdef")
    index.add_documents([(["a"], documents[1:2])], replace=True)
    assert index.documents_ids == list("bcdefa")
    for batches, got in ((["a"], "str for batch 0"), ("a", "got str"), (3, "got int"), ([("a",)], "tuple for batch 0")):
        with pytest.raises(TypeError, match=got):
            index.add_documents(batches)
