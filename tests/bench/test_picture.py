"""The README's picture shows the committed results, all of them for each group, and names their machine."""

from __future__ import annotations

import shutil

import pytest

import make_picture
from make_tables import RESULTS, newest
from pylate_flash.bench import results

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("theme", make_picture.THEMES)
def test_the_committed_picture_shows_the_committed_results(theme):
    path = make_picture.path_of(theme)
    assert make_picture.read_contents(path) == make_picture.gather(), "run `make bench-docs`"
    assert path.stat().st_size < 150 * 1024


def test_what_is_shown_is_what_was_measured():
    contents = make_picture.gather()
    training = {row["name"]: row["systems"] for row in newest("training")["rows"]}
    shown = contents["times"][2]
    assert shown["about"] == "training train-512: 512 x 512, 32 x 180 tokens"
    assert shown["bars"] == {name: training["train-512"][name]["median_ms"] for name in make_picture.TIMED_SYSTEMS}
    shown = contents["memory"][1]
    assert shown["about"] == "train-512: all similarities at once would be 2,880 MiB"
    assert shown["bars"] == {
        name: training["train-512"][name]["memory_bytes"] for name in make_picture.MEASURED_SYSTEMS
    }
    assert newest("training")["machine"]["name"] in contents["caption"]
    assert newest("forward")["date"][:10] in contents["caption"]


def test_no_number_is_cut_off_or_drawn_over_the_other_panel(tmp_path, monkeypatch):
    figures = []
    from matplotlib.backends import backend_agg

    class Canvas(backend_agg.FigureCanvasAgg):
        def __init__(self, figure):
            super().__init__(figure)
            figures.append(figure)

    monkeypatch.setattr(backend_agg, "FigureCanvasAgg", Canvas)
    make_picture.draw(make_picture.gather(), make_picture.THEMES["light"], tmp_path / "picture.png")
    for panel in figures[0].axes:
        limits = panel.get_window_extent()
        for text in panel.texts:
            extent = text.get_window_extent()
            assert limits.x0 <= extent.x0, text.get_text()
            assert extent.x1 <= limits.x1, text.get_text()
    caption = figures[0].texts[0].get_window_extent()
    assert caption.y0 >= 0
    assert caption.x1 <= figures[0].bbox.x1


def test_what_cannot_be_drawn_is_an_error_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="has no complete result of the suite 'forward'"):
        make_picture.gather(tmp_path)
    for suite in ("forward", "training"):
        for path in RESULTS.glob(f"{suite}-*.json"):
            shutil.copy(path, tmp_path)
    result = newest("training", tmp_path)
    path = results.place(tmp_path, result)

    result["machine"]["name"] = "another card"
    results.save(result, path)
    with pytest.raises(ValueError, match="one picture cannot show results of two kinds.*another card"):
        make_picture.gather(tmp_path)

    del result["rows"][0]["systems"]["lik"]["memory_bytes"]
    results.save(result, path)
    with pytest.raises(ValueError, match=r"row 'train-128' has no memory_bytes of lik$"):
        make_picture.gather(tmp_path)

    result["rows"] = result["rows"][1:]
    results.save(result, path)
    with pytest.raises(ValueError, match="the suite 'training' has no row 'train-128'"):
        make_picture.gather(tmp_path)
