"""Arrows go down only: `kernels` knows the problem, and nothing of the operations that ask for it."""

from __future__ import annotations

import ast
from pathlib import Path

import pylate_flash

PACKAGE = Path(pylate_flash.__file__).parent


def imported(path: Path) -> set[str]:
    """The modules of this package that a file imports, by their dotted names within it."""
    found, parents = set(), path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join((*parents[: len(parents) - node.level + 1], *filter(None, [node.module])))
            found |= {base, *(f"{base}.{name.name}".lstrip(".") for name in node.names)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pylate_flash"):
            found.add((node.module or "").partition(".")[2])
        elif isinstance(node, ast.Import):
            found |= {name.name.partition(".")[2] for name in node.names if name.name.startswith("pylate_flash")}
    return found


def test_kernels_import_nothing_of_the_operations() -> None:
    files = sorted((PACKAGE / "kernels").rglob("*.py"))
    assert any("kernels.tables" in imported(path) for path in files)
    for path in files:
        others = {name.partition(".")[0] for name in imported(path)} - {"", "kernels", "problem"}
        assert others <= {"_extras"}, path


def test_the_problem_imports_nothing_of_the_package() -> None:
    assert not imported(PACKAGE / "problem.py")


# What README, docs and examples say that users import.
PUBLIC = {
    *("losses", "models", "rank", "scores", "retrieve", "indexes", "evaluation", "trainer"),
    *("beir", "negatives", "register"),
}


def test_the_top_floor_holds_what_users_import_and_what_a_call_is_made_of() -> None:
    behind = {"problem", "_config", "_extras", "__init__", "__main__"}
    assert {path.stem for path in PACKAGE.glob("*.py")} == PUBLIC | behind
