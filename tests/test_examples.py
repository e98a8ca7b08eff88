"""Examples, README and guide snippets, and notebooks run unchanged on the output of a tiny demo."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pylate.scores
import pytest
import torch
import typer
from nbclient import NotebookClient

import pylate_flash
from pylate_flash import beir, indexes, losses, models
from pylate_flash.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
LARGE_BATCHES = ROOT / "notebooks" / "large_batches.ipynb"
RESULTS = ROOT / "docs" / "benchmarks" / "results"


def snippets_of(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


SNIPPETS = snippets_of(README)
# Replaces the notebook's parameters cell in the test.
TINY_PARAMETERS = """
from pathlib import Path
from tests.tiny_demo import TINY as settings
encoder = demo.load_encoder({model!r}, settings, device="cpu")
"""


@pytest.fixture(scope="module")
def folder(tiny_demo: tuple[Path, dict, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a tiny demo-output/."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(tiny_demo[0], folder / "demo-output")
    return folder


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def run_example(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def test_swap_scorer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    variables = run_example("swap_scorer.py", monkeypatch)
    assert (variables["ours"] - variables["reference"]).abs().max() < 1e-4
    assert "same best document:    12 of 12 queries" in capsys.readouterr().out


def test_train_contrastive(folder: Path, tiny_colbert_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pylate_flash.demo.job.default_model", lambda: tiny_colbert_path)
    variables = run_example("train_contrastive.py", monkeypatch)
    log = variables["trainer"].state.log_history
    assert log[0]["in_batch_negatives_per_query"] == len(variables["pairs"]) - 1
    assert models.ColBERT(str(folder / "demo-output" / "example-model"), device="cpu").scorer == "pylate_flash"


def test_evaluate_beir(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    variables = run_example("evaluate_beir.py", monkeypatch)
    assert variables["metrics"]["ndcg@10"] == pytest.approx(variables["result"].metrics["ndcg@10"], abs=1e-6)
    assert "finds" in capsys.readouterr().out
    # The same, with a user's folder and model.
    again = run_example(
        "evaluate_beir.py", monkeypatch, str(folder / "demo-output" / "data"), str(folder / "demo-output" / "model")
    )
    assert again["result"].metrics == variables["result"].metrics


def test_the_readmes_first_screen_shows_the_commands_a_picture_and_a_snippet() -> None:
    screen = "".join(README.splitlines(keepends=True)[:40])
    assert "make demo" in screen
    assert "make test" in screen
    assert "docs/benchmarks/speed-and-memory-light.png" in screen
    assert SNIPPETS[0] in screen
    assert len([line for line in SNIPPETS[0].splitlines() if line.strip()]) <= 6


def test_the_readme_shows_three_ways_of_use() -> None:
    section = README.partition("## Three ways to use it\n")[2].partition("\n## ")[0]
    assert [snippet in section for snippet in SNIPPETS] == [False, True, True, True]
    for snippet in SNIPPETS[1:]:
        assert len([line for line in snippet.splitlines() if line.strip()]) <= 10


def test_readme_and_guide_list_every_command() -> None:
    commands = list(typer.main.get_command(app).commands)
    guide = (ROOT / "docs" / "guides" / "command_line.md").read_text(encoding="utf-8")
    assert re.findall(r"^- `pylate-flash ([\w-]+)", guide, flags=re.MULTILINE) == commands
    (row,) = (line for line in README.splitlines() if line.startswith("| [The command line]"))
    assert set(re.findall(r"`(\w+)`", row)) == set(commands)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    for link in re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", text):
        target, _, anchor = (link[0] or link[1]).partition("#")
        if not target:
            assert anchor in anchors, f"{page}: #{anchor}"
        elif "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_the_readmes_first_snippet_registers() -> None:
    variables: dict[str, object] = {}
    try:
        exec(compile(SNIPPETS[0], "README.md", "exec"), variables)
        assert isinstance(variables["loss"], losses.Contrastive)
        half = torch.ones(1, 2, 4, dtype=torch.float16)
        assert pylate.scores.colbert_scores(half, half).dtype == torch.float32, "PyLate's own keep the type"
    finally:
        pylate_flash.unregister()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_the_snippets_of_a_guide(guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run them in order, except those also in the README and those for sentence-transformers 6."""
    if guide.stem == "evaluate":
        _find_offline(monkeypatch)
    variables: dict[str, object] = {}
    try:
        for snippet in snippets_of(guide.read_text(encoding="utf-8")):
            if snippet not in SNIPPETS and "MultiVectorEncoder" not in snippet:
                exec(compile(snippet, guide.name, "exec"), variables)
    finally:
        pylate_flash.unregister()


def _find_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make mteb return the demo's collection and model for any name."""
    from mteb.models import ModelMeta
    from mteb.models.model_implementations.pylate_models import MultiVectorModel

    from tests.mteb_tasks import take_offline

    def get_model(name: str) -> MultiVectorModel:
        model = MultiVectorModel("demo-output/model", device="cpu")
        model.mteb_model_meta = ModelMeta.create_empty()
        return model

    take_offline(monkeypatch, beir.load_beir_folder("demo-output/data"), get_model)


@pytest.mark.parametrize("snippet", SNIPPETS[1:], ids=["swap", "train", "evaluate"])
def test_readme_snippet(folder: Path, snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    variables: dict[str, object] = {}
    exec(compile(snippet, "README.md", "exec"), variables)
    if "rerank" in snippet:
        printed = capsys.readouterr().out
        assert sorted(re.findall(r"sort|open", printed)) in (["open", "sort"], ["open", "open"], ["sort", "sort"])
    if "Flat" in snippet:
        assert len(indexes.Flat(folder / "demo-output", "readme-index")) == len(variables["documents"])
        assert (
            0
            <= variables["evaluation"].evaluate(
                variables["results"], variables["qrels"], queries=list(variables["queries"]), metrics=["ndcg@10"]
            )
            <= 1
        )


def executed(path: Path, parameters: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Run a notebook with these parameters in a folder; return its number of images and its printed text."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # It would override the notebook's inline backend, which shows the figures.
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(path, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    cell.source = parameters
    done = NotebookClient(
        notebook, timeout=300, startup_timeout=300, resources={"metadata": {"path": str(folder)}}
    ).execute()
    outputs = [output for cell in done.cells for output in cell.get("outputs", [])]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    return pictures, "".join(output.get("text", "") for output in outputs)


def test_the_notebook_runs_at_a_small_size(
    folder: Path, tiny_colbert_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = TINY_PARAMETERS.format(model=tiny_colbert_path)
    assert executed(NOTEBOOK, parameters, folder, monkeypatch)[0] == 3


def test_the_notebook_about_large_batches_measures_where_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = "folder, sizes = Path('.'), (4, 8)"
    pictures, printed = executed(LARGE_BATCHES, parameters, tmp_path, monkeypatch)
    assert pictures == 1
    assert re.search(r"batch-8\n +pylate_flash +[0-9.]+ s +maxsim_cross_entropy", printed)
    assert re.search(r"gradients one query at a time: differ by at most [0-9]e-0[6-9]", printed)
    assert "not trained yet" in printed


def test_the_notebook_about_large_batches_draws_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = {"status": "ok", "error": 1e-3, "iqr_ms": 0.1, "host_ms": 0.1, "repetitions": 3, "over_floor": 2.0}
    record = {
        "schema": 1, "suite": "losses", "date": "2026-03-01T12:00:00+00:00", "complete": True, "quick": False,
        "machine": {"device": "cuda", "name": "Test Card", "compute_capability": "9.0", "memory_bytes": 10**11,
                    "driver": None, "cuda": "13.0"},
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "pylate": "1.6.0"},
        "protocol": {"dtype": "bfloat16", "reduced": False},
        "ceilings": {"flops_per_second": 8e14, "bytes_per_second": 4e12},
        "rows": [
            {
                "name": name, "shape": f"{size} x {size}, 32 x 180", "flops": 1.0, "bytes": 1.0, "floor_ms": 1.0,
                "bound": "compute", "best_peer": None, "best_peer_over_ours": None,
                "multiples": {"pylate_flash_contrastive": 0.8} if name.startswith("given") else {},
                "systems": {
                    "pylate_flash": {**timed, "variant": "maxsim_cross_entropy", "median_ms": 5.6, "memory_bytes": 1e9},
                    "pylate": {"status": "absent", "reason": "a step takes a minute or more"},
                    "pylate_flash_contrastive": {**timed, "variant": "Contrastive", "median_ms": 7.0},
                },
            }
            for name, size in (("batch-1024", 1024), ("batch-65536", 65536), ("given-128", 128))
        ],
    }  # fmt: skip
    (tmp_path / "losses-test-card.json").write_text(json.dumps(record), encoding="utf-8")
    other_result = json.loads(json.dumps({**record, "complete": False, "date": "2026-03-03T12:00:00+00:00"}))
    other_result["rows"] = other_result["rows"][:1]
    other_result["rows"][0]["systems"] = {
        "pylate_flash": {**timed, "variant": "maxsim_cross_entropy", "median_ms": 9.9},
        "sentence_transformers": {**timed, "variant": "32 queries at a time", "median_ms": 150.0},
    }
    (tmp_path / "losses-of-another-environment.json").write_text(json.dumps(other_result), encoding="utf-8")
    runs = [
        {"batch_size": size, "steps": steps, "examples": size * steps, "ndcg@10": 0.5 + size / 1000 + seed / 100}
        for size, steps in ((64, 8), (64, 32), (256, 8))
        for seed in (1, 2)
    ]
    trainings = {
        "date": "2026-03-02T12:00:00+00:00",
        "machine": {"name": "Test Card"},
        "compared": {"steps": 8, "examples": 2048},
        "runs": runs,
    }
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "sizes.json").write_text(json.dumps(trainings), encoding="utf-8")

    drawn = []
    monkeypatch.setattr(plt, "show", lambda: drawn.append([axes.get_title("left") for axes in plt.gcf().axes]))
    variables: dict[str, object] = {}
    for cell in nbformat.read(LARGE_BATCHES, as_version=4).cells:
        if cell.cell_type == "code":
            source = cell.source
            if "parameters" in cell.metadata.get("tags", []):
                source = f"folder, sizes = Path({str(tmp_path)!r}), (4,)"
            exec(compile(source, "large_batches.ipynb", "exec"), variables)
    plt.close("all")
    assert drawn == [
        ["loss and both gradients, s", "memory beyond the embeddings, GB"],
        ["nDCG@10 after 8 steps", "nDCG@10 after 2048 examples"],
    ]
    assert variables["stored"] == [(size, 2e-9 * size**2 * 32 * 180) for size in (1024, 65536)]
    printed = capsys.readouterr().out
    assert "Test Card, compute capability 9.0" in printed
    assert "1.00 GB   maxsim_cross_entropy" in printed
    assert "0.1500 s   32 queries at a time" in printed, "from the other result"
    assert "0.0099 s" not in printed, "the complete one has it"
    assert "given-128 {'Contrastive': 1.25}" in printed
    assert "8 steps, batch of 256: nDCG@10 0.766, 0.776" in printed
    assert "2048 examples, batch of 64: nDCG@10 0.574, 0.584" in printed


@pytest.mark.parametrize(
    "path", [NOTEBOOK, LARGE_BATCHES, NOTEBOOK.with_name("walkthrough.ipynb")], ids=lambda path: path.stem
)
def test_the_notebook_is_committed_with_outputs_and_without_machine_paths(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    trained = (RESULTS / "batches" / "sizes.json").exists()
    expected = {"quickstart": 3, "large_batches": 1 + trained, "walkthrough": 6}[path.stem]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == expected
    assert not any(output.output_type == "error" for output in outputs)
    assert not re.search(r"/(?:home|root|Users|tmp|work|usr)/|[A-Z]:\\\\", path.read_text(encoding="utf-8"))


def test_the_notebook_about_large_batches_shows_what_is_committed() -> None:
    """The notebook must be executed again whenever a new result is committed."""
    notebook = nbformat.read(LARGE_BATCHES, as_version=4)
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    for content in (RESULTS.glob("losses-*.json"), RESULTS.glob("batches/sizes.json")):
        dates = [json.loads(path.read_text(encoding="utf-8"))["date"] for path in content]
        assert max(dates, default="")[:10] in printed
