"""Package layout: public modules are at the top level, imports only go downwards, and none are circular."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pylate_flash

PACKAGE = Path(pylate_flash.__file__).parent
# Public modules, as named in README, docs and examples.
PUBLIC = {
    *("losses", "models", "rank", "scores", "retrieve", "indexes", "evaluation", "trainer"),
    *("beir", "matches", "negatives", "register"),
}


def name_of(path: Path) -> str:
    """Dotted module name of a file within the package; "" is the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def executed(node: ast.AST, in_functions: bool, for_types: bool) -> Iterator[ast.AST]:
    """Yield nodes executed on import; `in_functions` adds function bodies, `for_types` TYPE_CHECKING blocks."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            included = for_types
        else:
            included = in_functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if included:
            yield child
            yield from executed(child, in_functions, for_types)


def imported(path: Path, in_functions: bool = True, for_types: bool = False) -> set[str]:
    """Modules of this package that a file imports, as dotted names within the package."""
    result, parents = set(), path.relative_to(PACKAGE).parent.parts
    for node in executed(ast.parse(path.read_text(encoding="utf-8")), in_functions, for_types):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join((*parents[: len(parents) - node.level + 1], *filter(None, [node.module])))
            names = [f"{base}.{name.name}".lstrip(".") for name in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pylate_flash":
            base = (node.module or "").partition(".")[2]
            names = [f"{base}.{name.name}".lstrip(".") for name in node.names]
        elif isinstance(node, ast.Import):
            names = [name.name.partition(".")[2] for name in node.names if name.name.startswith("pylate_flash.")]
        # An imported name is a module, or is defined in one.
        result |= {name if name in MODULES else name.rpartition(".")[0] for name in names}
    return result - {name_of(path)}


def test_kernels_import_nothing_of_the_operations() -> None:
    files = sorted((PACKAGE / "kernels").rglob("*.py"))
    assert any("kernels.tables" in imported(path) for path in files)
    for path in files:
        dependencies = {name.partition(".")[0] for name in imported(path)} - {"", "kernels", "problem"}
        assert dependencies <= {"_extras"}, path


def test_the_problem_imports_nothing_of_the_package() -> None:
    assert not imported(PACKAGE / "problem.py")


@pytest.mark.parametrize("folder", ["training", "encoding", "data"])
def test_what_serves_users_imports_nothing_of_the_top_floor_or_of_a_host(folder: str) -> None:
    for path in (PACKAGE / folder).rglob("*.py"):
        assert not any(name in PUBLIC or name.partition(".")[0] == "hosts" for name in imported(path)), path


def test_the_top_floor_holds_what_users_import_and_what_a_call_is_made_of() -> None:
    internal = {"problem", "_config", "_extras", "__init__", "__main__"}
    assert {path.stem for path in PACKAGE.glob("*.py")} == PUBLIC | internal


@pytest.mark.parametrize("later", [False, True], ids=["of modules", "of functions and for types too"])
def test_imports_make_no_circle(later: bool) -> None:
    graph = {name: imported(path, later, later) for name, path in MODULES.items()}
    assert {"training.contrast", "encoding.projection", "scores"} <= graph["losses"] | graph["hosts.pylate.loss_inputs"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
