"""Killed writers: the store holds the result of the last finished call, or of the call in flight."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pylate_flash.index.store import PackedStore
from tests.stores import assert_content, documents_of, run_python, segments_in

# For each of `kills`, a child opens the store, writes, and is killed before its n-th change to the disk, or halfway
# through it if it is a write. Before each call, the child logs the resulting ids to a file of lines, which its parent
# compares with the store.
WRITER = """
import hashlib, json, os, random, signal, sys
import numpy as np, torch
from pylate_flash.index import catalog, store
from pylate_flash.index.store import PackedStore

folder, said, seed, kills = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
# Small, so that additions come to segments, and segments are rewritten and full, all the time.
store.SEGMENT_BYTES, store.SMALL_PARTS = 4000, 3

def document(id_):
    bits = hashlib.sha256(id_.encode()).digest()
    return torch.tensor(list(bits), dtype=torch.float32).view(8, 4)[: bits[0] % 9]

def expect(opened, ids):
    assert opened.ids == ids, (opened.ids, ids)
    for i, id_ in zip(opened.positions_of(ids).tolist(), ids, strict=True):
        assert torch.equal(opened.read(np.array([i])), document(id_)), id_
        assert opened.positions_where(("name = ?", [id_])).tolist() == [i]

def die_at(step, halfway):
    left = [step]
    def watched(name, write=False):
        call = getattr(os, name)
        def watch(*arguments, **options):
            left[0] -= 1
            if left[0] <= 0:
                if write and halfway:
                    descriptor, data, *rest = arguments
                    call(descriptor, memoryview(data)[: len(data) // 2], *rest)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        setattr(os, name, watch)
    for name in ("fsync", "unlink", "truncate"):
        watched(name)
    watched("pwrite", write=True)
    class Connection(catalog.sqlite3.Connection):
        # Before a statement, or in the middle of it.
        def execute(self, *arguments):
            left[0] -= 1
            if left[0] <= 0:
                if not halfway:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.set_progress_handler(lambda: os.kill(os.getpid(), signal.SIGKILL), step % 7 + 1)
            return super().execute(*arguments)
    connect = catalog.sqlite3.connect
    catalog.sqlite3.connect = lambda *arguments, **options: connect(*arguments, factory=Connection, **options)

def write(pick, number):
    log = open(said, "a")
    override = pick.random() < 0.1
    if override:
        print("[]", file=log, flush=True)
    if pick.random() < 0.3:
        # Or at any time.
        signal.setitimer(signal.ITIMER_REAL, pick.uniform(0.001, 0.2))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    else:
        die_at(pick.randint(1, 150), pick.random() < 0.5)
    opened = PackedStore(folder, override=override)
    for call in range(1000):
        operation = pick.choice(["add", "add", "add", "many", "replace", "remove", "erase", "compact"])
        ids, gone = list(opened.ids), []
        if operation in ("add", "many"):
            new = [f"{number}-{call}-{i}" for i in range(1 if operation == "add" else pick.randint(2, 60))]
            ids += new
        elif operation == "replace":
            new = sorted({f"{number}-{call}", *pick.sample(ids, min(3, len(ids)))})
            ids = [id_ for id_ in ids if id_ not in new] + new
        elif operation in ("remove", "erase"):
            gone = sorted(pick.sample(range(len(ids)), pick.randint(0, len(ids))))
            ids = [id_ for i, id_ in enumerate(ids) if i not in gone]
        print(json.dumps(ids), file=log, flush=True)
        if operation in ("add", "many", "replace"):
            metadata = [{"name": id_, pick.choice("xyz"): call} for id_ in new]
            opened.add(new, [document(id_) for id_ in new], replace=operation == "replace", metadata=metadata)
        elif operation in ("remove", "erase"):
            opened.remove(opened.documents.live[np.array(gone, dtype=np.int64)], erase=operation == "erase")
        else:
            opened.compact()
        expect(opened, ids)

before = after = 0
ids = []
for number in range(kills):
    pick = random.Random(f"{seed} {number}")
    open(said, "w").close()
    child = os.fork()
    if child == 0:
        write(pick, number)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGALRM), (number, status)
    states = [ids, *map(json.loads, open(said))]
    opened = PackedStore(folder)
    opened.verify()
    ids = opened.ids
    assert ids in states[-2:], (number, ids, states[-2:])
    if len(states) > 1 and states[-1] != states[-2]:
        before, after = before + (ids == states[-2]), after + (ids == states[-1])
    expect(opened, ids)
    assert not os.path.exists(folder) or len(os.listdir(folder)) < 60
# Both happen: that a call which was killed had taken effect, and that it had not.
assert before and after, (before, after)
opened.add(["last"], [document("last")], metadata=[{"name": "last"}])
opened.compact()
files = {"catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "committed", "reserve"}
files |= {segment.path.name for segment in opened.segments}
assert set(os.listdir(folder)) == files
print(kills, "kills")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_killed_writer_leaves_what_the_last_finished_call_made_or_the_one_in_flight(
    tmp_path: Path, seed: int
) -> None:
    process = run_python(WRITER, tmp_path / "index", tmp_path / "said", seed, 20)
    assert (process.returncode, process.stdout) == (0, "20 kills\n"), process.stderr


# Three children each add documents one at a time, and reopen the store when another one wrote first.
RIVALS = """
import os, sys, torch
from pylate_flash.index import store
from pylate_flash.index.store import PackedStore
store.SEGMENT_BYTES, store.SMALL_PARTS = 10000, 5
for name in "abc":
    if os.fork():
        continue
    opened = PackedStore(sys.argv[1])
    for i in range(30):
        while True:
            try:
                opened.add([f"{name}-{i}"], [torch.full((2, 4), float(i))])
                break
            except RuntimeError as error:
                assert "writing to the index" in str(error) or "has been written to since" in str(error), error
                opened = PackedStore(sys.argv[1])
    os._exit(0)
sys.exit(sum(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(3)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    assert run_python(RIVALS, tmp_path / "index").returncode == 0
    opened = PackedStore(tmp_path / "index")
    opened.verify()
    assert sorted(opened.ids) == sorted(f"{name}-{i}" for name in "abc" for i in range(30))
    for name in "abc":
        assert [id_ for id_ in opened.ids if id_[0] == name] == [f"{name}-{i}" for i in range(30)]


# One process writes while eight children reopen the store in a loop: each must see the result of one of the writes.
READERS = """
import hashlib, json, os, random, sys
import numpy as np, torch
from pylate_flash.index import store
from pylate_flash.index.store import PackedStore
store.SEGMENT_BYTES, store.SMALL_PARTS = 4000, 5
folder, said = sys.argv[1:]

def document(id_):
    bits = hashlib.sha256(id_.encode()).digest()
    return torch.tensor(list(bits), dtype=torch.float32).view(8, 4)[: bits[0] % 9]

def look(opened):
    ids = opened.ids
    for i, id_ in zip(opened.positions_of(ids).tolist(), ids, strict=True):
        assert torch.equal(opened.read(np.array([i])), document(id_)), id_
    return ids

PackedStore(folder).add(["0"], [document("0")], metadata=[{"even": 1}])
open(said, "w").write('["0"]\\n')
readers = []
for number in range(8):
    reader = os.fork()
    if reader:
        readers.append(reader)
        continue
    seen = []
    while not seen or "last" not in seen[-1]:
        opened = PackedStore(folder)
        seen.append(look(opened))
        assert set(opened.positions_where("even").tolist()) <= set(opened.documents.live.tolist())
    # It stays what it was.
    assert look(opened) == seen[-1]
    states = [json.loads(line) for line in open(said)]
    assert all(ids in states for ids in seen)
    assert len({len(ids) for ids in seen}) > 1
    os._exit(0)
pick, opened = random.Random(0), PackedStore(folder)
for call in range(80):
    operation, ids = pick.choice(["add", "add", "many", "replace", "remove", "erase", "compact"]), opened.ids
    new = [f"{call}-{i}" for i in range({"add": 1, "many": 20}.get(operation, 0))]
    if operation == "replace":
        new = pick.sample(ids, min(3, len(ids)))
    if call == 79:
        operation, new = "add", ["last"]
    gone = pick.sample(range(len(ids)), len(ids) // 3) if operation in ("remove", "erase") else []
    after = [id_ for i, id_ in enumerate(ids) if i not in gone and id_ not in new] + new
    # Before it is so, as a reader may be faster than this.
    with open(said, "a") as file:
        print(json.dumps(after), file=file)
    if new:
        metadata = [{"even": call % 2}] * len(new)
        opened.add(new, [document(id_) for id_ in new], replace=operation == "replace", metadata=metadata)
    elif gone:
        opened.remove(opened.documents.live[gone], erase=operation == "erase")
    elif operation == "compact":
        opened.compact()
    assert opened.ids == after
print([os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) for reader in readers])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_eight_readers_beside_a_writer_find_what_a_write_has_made(tmp_path: Path) -> None:
    process = run_python(READERS, tmp_path / "index", tmp_path / "said")
    assert (process.returncode, process.stdout) == (0, f"{[0] * 8}\n"), process.stderr


# First writes, each killed before its n-th SQLite statement.
FIRST = """
import os, signal, sys, torch
from pylate_flash.index import catalog, checksums, store
from pylate_flash.index.store import PackedStore
left = 0
class Connection(catalog.sqlite3.Connection):
    def execute(self, *arguments):
        global left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(*arguments)
connect = catalog.sqlite3.connect
catalog.sqlite3.connect = lambda *arguments, **options: connect(*arguments, factory=Connection, **options)
for step in sys.argv[2:]:
    child, left = os.fork(), int(step)
    if child == 0:
        PackedStore(os.path.join(sys.argv[1], step)).add(["a"], [torch.ones(2, 4)])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, step
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_first_write_that_is_killed_can_be_repeated(tmp_path: Path) -> None:
    steps, with_segments = (1, 2, 4, 6, 8, 12, 16, 19), 0
    process = run_python(FIRST, tmp_path, *steps)
    assert process.returncode == 0, process.stderr
    for step in steps:
        path = tmp_path / str(step)
        with_segments += bool(segments_in(path))
        opened = PackedStore(path)
        assert opened.ids == []
        opened.add(["a"], documents_of([2]))
        assert_content(path, ["a"], documents_of([2]))
        assert segments_in(path) == {segment.path.name for segment in opened.segments}
    assert with_segments
