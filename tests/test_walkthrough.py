"""The walkthrough notebook: its kernels are correct, its byte counts match the formulas, its outputs are current."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "walkthrough.ipynb"
RESULTS = ROOT / "docs" / "benchmarks" / "results" / "traffic"


def cells() -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(source: list[str], variables: dict[str, object]) -> None:
    exec(compile("".join(source), NOTEBOOK.name, "exec"), variables)


@pytest.fixture(scope="module")
def walked() -> dict[str, object]:
    """Variables of the notebook after running all cells."""
    variables: dict[str, object] = {}
    shown: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plt, "show", lambda: shown.append(len(plt.gcf().axes)))
        # The notebook inserts the scripts' folder into sys.path; the tests already have it there.
        patch.syspath_prepend(str(ROOT / "docs" / "benchmarks"))
        for cell in cells():
            is_parameters = "parameters" in cell["metadata"].get("tags", [])
            execute([f"docs = Path({str(ROOT / 'docs')!r})"] if is_parameters else cell["source"], variables)
    plt.close("all")
    variables["shown"] = shown
    return variables


def test_what_is_stepped_through_is_the_operation(walked: dict) -> None:
    assert walked["forward_error"] <= 2e-6
    assert walked["same_argmax"], "the argmax are those of float64"
    # Summed in float32 and rounded once to bfloat16.
    assert all(error <= 2**-8 for error in walked["errors"].values())
    assert len(walked["errors"]) == 2


def test_the_toy_meets_what_real_problems_meet(walked: dict) -> None:
    plan, lists, shares = walked["plan"], walked["lists"], walked["shares"]
    assert plan.kernel == "hopper"
    assert plan.row_blocks > 1
    assert plan.n_runs > 1
    assert walked["Ld"] % plan.tile.columns, "a tile that is not full"
    assert lists.n_chunks > 1
    assert lists.block < walked["Nd"], "more than one block of documents"
    assert any(boundary for _, _, boundary in shares), "a list that programs share"
    rows = walked["problem"].rows
    assert sum(shares.values()) == rows * walked["Nd"], "every row is summed once for every document"


def test_counted_bytes_are_those_of_the_formulas(walked: dict) -> None:
    counts, formula = walked["memory"].counts, walked["formula"]
    assert counts.keys() - formula.keys() == {"_combine_kernel"}
    for kernel, expected in formula.items():
        actual = tuple(counts[kernel].values())
        if kernel == "_sum_kernel":
            assert actual == pytest.approx(expected, rel=0.01)
        else:
            assert actual == expected, kernel
    combined, summed = sum(counts["_combine_kernel"].values()), sum(formula["_sum_kernel"])
    assert 0 < combined < 0.01 * summed


def test_every_picture_is_drawn(walked: dict) -> None:
    assert len(walked["shown"]) == 6
    assert walked["shown"][-2:] == [9, 9]
    # One entry per choice in the tables of docs/tuning.md, with a ratio for each pair of times.
    assert len(walked["measured"]) >= 30
    assert all(ratio > 0 for _, _, ratios in walked["measured"] for ratio in ratios)


def test_a_profile_is_shown_beside_what_is_expected(
    walked: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source,) = [cell["source"] for cell in cells() if "traffic-*.json" in "".join(cell["source"])]
    execute(source, {**walked, "docs": tmp_path})
    assert "not measured yet" in capsys.readouterr().out
    folder = tmp_path / "benchmarks" / "results" / "traffic"
    folder.mkdir(parents=True)
    measured = {"memory_read": 4e6, "memory_written": 2e6, "l2_all": 9e6, "l2_read": 7e6, "l2_written": 3e6}
    counted = {"loaded": 8_000_000, "stored": 3_000_000, "read": 5_000_000, "written": 2_500_000}
    kernels = {
        "_hopper_kernel": {"expected": counted, "measured": measured},
        "_combine_kernel": {"expected": None, "measured": measured},
    }
    content = {
        "machine": {"name": "Test Card"},
        "date": "2026-03-01T12:00:00+00:00",
        "rows": [{"name": "pages", "shape": "64 x 64, 1024 x 1024", "kernels": kernels}],
    }
    (folder / "traffic-test-card.json").write_text(json.dumps(content), encoding="utf-8")
    execute(source, {**walked, "docs": tmp_path})
    printed = capsys.readouterr().out
    assert "Test Card, 2026-03-01" in printed
    assert re.search(r"_hopper_kernel +4\.0 of 5\.0 +2\.0 of 2\.5 +7\.0 of 8\.0\n", printed)
    assert re.search(r"_combine_kernel +4\.0 +2\.0 +7\.0\n", printed)


def test_the_notebook_is_committed_with_what_is_measured() -> None:
    """The notebook must be executed again whenever a new result is committed."""
    outputs = [output for cell in cells() for output in cell["outputs"]]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    dates = [json.loads(path.read_text(encoding="utf-8"))["date"] for path in RESULTS.glob("traffic-*.json")]
    assert (max(dates)[:10] if dates else "not measured yet") in printed
