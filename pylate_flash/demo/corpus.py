"""A retrieval collection out of what every environment holds: the documentation of its Python packages.

Every module, class and function with a docstring is one document: the docstring minus its first sentence. That first
sentence is the query, and its own document the relevant one. Sources are parsed and never imported, so building the
collection runs none of their code. The collection depends on nothing but the installed versions: the same environment
gives the same texts, in the same order.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..data.files import replace_file

#: What the standard library is called among the packages.
STANDARD_LIBRARY = "python"

#: Packages searched in the evaluation. Like the training's, all come with the dependencies of the `demo` extra.
TEST_PACKAGES = (STANDARD_LIBRARY, "scipy", "networkx", "PIL", "huggingface_hub")

#: Packages whose pairs train the model.
TRAIN_PACKAGES = (
    *("numpy", "torch", "sklearn", "transformers", "pandas", "sympy"),
    *("matplotlib", "numba", "datasets", "accelerate", "seaborn", "fsspec"),
)

# Bundled copies of other packages would put one text on both sides of the split, and nobody reads the docs of tests.
_SKIPPED_FOLDERS = frozenset(
    [
        *("test", "tests", "testing", "_testing", "conftest", "__pycache__"),
        *("_vendor", "vendor", "vendored", "vendored_packages", "extern", "externals", "_external"),
        *("array_api_compat", "array_api_extra", "site-packages", "dist-packages", "ensurepip"),
        *("idlelib", "lib2to3", "turtledemo"),
    ]
)
_QUERY_WORDS = (4, 40)
_DOCUMENT_WORDS = 20

_ROLE = re.compile(r":(?:[a-zA-Z]+:)+`~?([^`]*)`")
_LITERAL = re.compile(r"`{1,2}([^`]+)`{1,2}_{0,2}")
_DIRECTIVE = re.compile(r"^\.\. [a-z-]+::.*$", re.MULTILINE)
_UNDERLINE = re.compile(r"^[-=~^*#]{3,}$", re.MULTILINE)
_DOCTEST = re.compile(r"^\s*(>>>|In \[).*", re.MULTILINE | re.DOTALL)
_SENTENCE_END = re.compile(r"(?<![ (]e\.g)(?<![ (]i\.e)(?<!etc)(?<!\bvs)(?<!\bcf)[.!?](?=\s|$)")


@dataclass(frozen=True)
class Entry:
    """One documented module, class or function."""

    name: str  # public and dotted, such as `scipy.linalg.solve`
    package: str
    query: str  # the first sentence of the docstring
    text: str  # the rest of it, without doctests and markup


@dataclass(frozen=True)
class Corpus:
    """A test collection and training pairs from other packages."""

    documents: list[Entry]  # what is searched
    queries: list[Entry]  # the documents whose first sentences are asked
    train: list[Entry]  # pairs (query, text) of the training packages

    def write(self, folder: Path) -> None:
        """Write a BEIR folder (`corpus.jsonl`, `queries.jsonl`, `qrels/test.tsv`) and `train.jsonl` (query, positive).

        It is created, and files of these names are replaced.
        """
        (folder / "qrels").mkdir(parents=True, exist_ok=True)
        lines = ["query-id\tcorpus-id\tscore", *(f"q-{e.name}\t{e.name}\t1" for e in self.queries)]
        replace_file(folder / "qrels" / "test.tsv", "\n".join(lines) + "\n")
        texts = {"corpus": [{"_id": e.name, "title": "", "text": e.text} for e in self.documents]}
        texts["queries"] = [{"_id": f"q-{e.name}", "text": e.query} for e in self.queries]
        # The last: where it is, the others are (`job.data_folder`).
        texts["train"] = [{"query": e.query, "positive": e.text} for e in self.train]
        for name, rows in texts.items():
            replace_file(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def build_corpus(
    documents: int = 2000,
    queries: int = 400,
    pairs: int = 5000,
    test_packages: Iterable[str] = TEST_PACKAGES,
    train_packages: Iterable[str] = TRAIN_PACKAGES,
) -> Corpus:
    """Build a collection out of the installed packages, split by package.

    Parameters
    ----------
    documents
        Documents of the test collection, at most; the test packages share them evenly, as far as they reach.
    queries
        Documents of it whose first sentence is asked, at most.
    pairs
        Training pairs, at most; shared likewise by the training packages.
    test_packages, train_packages
        Import names, `"python"` being the standard library. Those not installed are left out.

    Returns
    -------
    Corpus
        Every list in an order that looks random but is a function of the names alone. No query and no text occurs
        twice, neither within the two sides nor across them.

    Raises
    ------
    ValueError
        If a package is on both sides, or if a side has no document.
    """
    test_packages, train_packages = list(test_packages), list(train_packages)
    both = sorted(set(test_packages) & set(train_packages))
    if both:
        raise ValueError(f"test_packages and train_packages must not share a package, both have {', '.join(both)}")
    seen: set[str] = set()
    sides = []
    for limit, packages in ((documents, test_packages), (pairs, train_packages)):
        # Small packages leave some of their even share to the others, which have enough with three times theirs.
        enough = 3 * -(-limit // max(1, len(packages)))
        found = {package: list(_unique(read_package(package, enough), seen)) for package in packages}
        entries = [entry for package, share in _shares(limit, found).items() for entry in found[package][:share]]
        if not entries:
            raise ValueError(f"none of the packages {', '.join(packages)} is installed with documentation")
        sides.append(sorted(entries, key=lambda entry: _shuffle_key(entry.name)))
    return Corpus(documents=sides[0], queries=sides[0][:queries], train=sides[1])


def read_package(package: str, enough: int | None = None) -> list[Entry]:
    """Return what is documented in an installed package, in an order that looks random but depends on names alone.

    Parameters
    ----------
    package
        Its import name, or `"python"` for the standard library.
    enough
        Read no more files once there are so many: parsing all of a large package takes seconds. None: all of them.

    Returns
    -------
    list of Entry
        Those with a first sentence of 4 to 40 words and at least 20 words after it; empty if it is not installed.
    """
    entries: dict[str, Entry] = {}
    for path, module in _sources(package):
        if enough is not None and len(entries) >= enough:
            break
        for name, docstring in _docstrings(path, module):
            query, text = split_docstring(docstring)
            words = len(query.split())
            if _QUERY_WORDS[0] <= words <= _QUERY_WORDS[1] and len(text.split()) >= _DOCUMENT_WORDS:
                entries.setdefault(name, Entry(name, package, query, text))
    return sorted(entries.values(), key=lambda entry: _shuffle_key(entry.name))


def split_docstring(docstring: str) -> tuple[str, str]:
    """Return the first sentence of a docstring and the rest of it, both without doctests and markup.

    The sentence is on one line; blank lines separate the remaining paragraphs. Either may be empty.
    """
    docstring = _DIRECTIVE.sub("", inspect.cleandoc(docstring))
    docstring = _LITERAL.sub(r"\1", _ROLE.sub(r"\1", _UNDERLINE.sub("", docstring)))
    paragraphs = [" ".join(_DOCTEST.sub("", block).split()) for block in re.split(r"\n\s*\n", docstring)]
    paragraphs = [block for block in paragraphs if block]
    if not paragraphs:
        return "", ""
    end = _SENTENCE_END.search(paragraphs[0])
    cut = end.end() if end else len(paragraphs[0])
    rest = [paragraphs[0][cut:].strip(), *paragraphs[1:]]
    return paragraphs[0][:cut], "\n\n".join(block for block in rest if block)


def _sources(package: str) -> Iterator[tuple[Path, list[str]]]:
    """The package's source files, in an order that looks random, each with its module's name in parts."""
    if package == STANDARD_LIBRARY:
        root, prefix = Path(sysconfig.get_path("stdlib")), []
    else:
        # Finding a top-level package imports nothing.
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return
        root, prefix = Path(next(iter(spec.submodule_search_locations))), [package]
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for relative in sorted(paths, key=_shuffle_key):
        parts = relative.removesuffix(".py").split("/")
        if not _SKIPPED_FOLDERS.intersection(parts):
            yield paths[relative], prefix + [part for part in parts if part != "__init__"]


def _docstrings(path: Path, module: list[str]) -> Iterator[tuple[str, str]]:
    """Public dotted names and docstrings of a source file; nothing if it is no valid Python."""
    try:
        with warnings.catch_warnings():
            # Sources of others warn about their own escapes; that is not this program's business.
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return
    # `scipy.linalg._basic.solve` is documented and used as `scipy.linalg.solve`.
    public = [part for part in module if not part.startswith("_")]
    nodes: list[tuple[list[str], ast.AST]] = [(public, tree)] if len(public) == len(module) else []
    nodes += [(public, node) for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    while nodes:
        scope, node = nodes.pop(0)
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            if node.name.startswith("_"):
                continue
            scope = [*scope, node.name]
            if isinstance(node, ast.ClassDef):
                nodes += [(scope, child) for child in node.body if isinstance(child, ast.ClassDef | ast.FunctionDef)]
        docstring = ast.get_docstring(node, clean=False)  # type: ignore[arg-type]
        if docstring and scope:
            # A literal may spell half of a pair of surrogates, which no file takes.
            yield ".".join(scope), docstring.encode("utf-8", "ignore").decode()


def _unique(entries: Iterable[Entry], seen: set[str]) -> Iterator[Entry]:
    """Those whose query and whose text were not seen before; both are added to `seen`."""
    for entry in entries:
        keys = {" ".join(entry.query.casefold().split()), " ".join(entry.text.casefold().split())}
        if not keys & seen:
            seen |= keys
            yield entry


def _shares(limit: int, found: dict[str, list[Entry]]) -> dict[str, int]:
    """How many entries each package gives: even shares, and what a small package leaves goes to the larger ones."""
    shares: dict[str, int] = {}
    waiting = sorted(found, key=lambda package: len(found[package]))
    for position, package in enumerate(waiting):
        shares[package] = min(len(found[package]), (limit - sum(shares.values())) // (len(waiting) - position))
    return shares


def _shuffle_key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
