"""The picture of searches shows every corpus that was measured, by the number of its tokens."""

from __future__ import annotations

import pytest

import make_picture
import make_search_picture
from make_tables import newest

pytest.importorskip("matplotlib")


@pytest.fixture
def result(monkeypatch):
    """A result with three corpora."""
    rows = []
    for corpus, scale in (("quora", 10), ("scifact", 1), ("passages-8.8m", 900)):
        for queries in (1, 32, 1000):
            systems = {
                "pylate_flash": {"status": "ok", "median_ms": scale * (1 + queries / 100)},
                "fast_plaid": {"status": "ok", "median_ms": 9.0} if scale == 1 else {"status": "absent"},
                "pylate_flash_operation": {"status": "ok", "median_ms": 0.5},
            }
            rows.append({"name": f"{corpus}-{queries}", "systems": systems})
    measured = {**newest("training"), "suite": "retrieval", "rows": rows}
    monkeypatch.setattr(make_search_picture, "newest", lambda suite, folder: measured)


def test_lines_go_from_the_smallest_corpus_to_the_largest(result, tmp_path):
    contents = make_search_picture.gather()
    assert [panel["title"] for panel in contents["panels"]] == ["1 query", "32 queries", "1,000 queries"]
    lines = contents["panels"][2]["lines"]
    assert set(lines) == {"pylate_flash", "fast_plaid"}
    assert [documents for documents, *_ in lines["pylate_flash"]] == [5_183, 522_931, 8_800_000]
    assert [time for *_, time in lines["pylate_flash"]] == [11, 110, 9900]
    assert lines["fast_plaid"] == [[5_183, 5_183 * 182, 9.0]]
    path = tmp_path / "picture.png"
    make_search_picture.draw(contents, make_picture.THEMES["dark"], path)
    assert make_picture.read_contents(path) == contents
    assert path.stat().st_size < 150 * 1024


@pytest.mark.parametrize("theme", make_picture.THEMES)
def test_the_committed_picture_shows_the_committed_result(theme):
    path = make_search_picture.path_of(theme)
    assert path.exists() == (newest("retrieval") is not None), "run `make bench-docs`"
    if path.exists():
        assert make_picture.read_contents(path) == make_search_picture.gather(), "run `make bench-docs`"


def test_without_a_result_there_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="has no result of the suite 'retrieval'"):
        make_search_picture.gather(tmp_path)
