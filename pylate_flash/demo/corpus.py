"""A retrieval collection from the documentation of the installed Python packages.

Every module, class and function with a docstring is one document: the docstring without its first sentence. That first
sentence is the query, and its own document is relevant. Sources are parsed but never imported, so building the
collection runs none of their code. The collection depends only on the installed versions: the same environment gives
the same texts, in the same order.
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

#: The package name that stands for the standard library.
STANDARD_LIBRARY = "python"

#: Packages searched in the evaluation. Like those for training, all are dependencies of the `demo` extra.
TEST_PACKAGES = (STANDARD_LIBRARY, "scipy", "networkx", "PIL", "huggingface_hub")

#: Packages whose pairs train the model.
TRAIN_PACKAGES = (
    *("numpy", "torch", "sklearn", "transformers", "pandas", "sympy"),
    *("matplotlib", "numba", "datasets", "accelerate", "seaborn", "fsspec"),
)

# Vendored packages would put one text on both sides of the split; docs of tests are of no interest.
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

        The folder is created if missing; files with these names are replaced.
        """
        (folder / "qrels").mkdir(parents=True, exist_ok=True)
        lines = ["query-id\tcorpus-id\tscore", *(f"q-{e.name}\t{e.name}\t1" for e in self.queries)]
        replace_file(folder / "qrels" / "test.tsv", "\n".join(lines) + "\n")
        texts = {"corpus": [{"_id": e.name, "title": "", "text": e.text} for e in self.documents]}
        texts["queries"] = [{"_id": f"q-{e.name}", "text": e.query} for e in self.queries]
        # Written last: its presence means that all files are (`job.data_folder`).
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
    """Build a collection from the installed packages, split by package.

    Parameters
    ----------
    documents
        Documents of the test collection, at most; shared evenly by the test packages, as far as they have enough.
    queries
        Documents whose first sentence is a query, at most.
    pairs
        Training pairs, at most; shared in the same way by the training packages.
    test_packages, train_packages
        Import names, or `"python"` for the standard library. Those not installed are skipped.

    Returns
    -------
    Corpus
        Every list in a pseudo-random order that depends only on the names. No query and no text occurs twice, neither
        within a side nor across both.

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
        # Small packages leave part of their share to the others; three times the even share is enough for those.
        enough = 3 * -(-limit // max(1, len(packages)))
        by_package = {package: list(_unique(read_package(package, enough), seen)) for package in packages}
        entries = [
            entry for package, share in _shares(limit, by_package).items() for entry in by_package[package][:share]
        ]
        if not entries:
            raise ValueError(f"none of the packages {', '.join(packages)} is installed with documentation")
        sides.append(sorted(entries, key=lambda entry: _shuffle_key(entry.name)))
    return Corpus(documents=sides[0], queries=sides[0][:queries], train=sides[1])


def read_package(package: str, enough: int | None = None) -> list[Entry]:
    """Return the documented objects of an installed package, in a pseudo-random order that depends only on names.

    Parameters
    ----------
    package
        Its import name, or `"python"` for the standard library.
    enough
        Stop reading files after this many entries: parsing all of a large package takes seconds. None: read all.

    Returns
    -------
    list of Entry
        Those with a first sentence of 4 to 40 words and at least 20 words after it; empty if not installed.
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
    """Split a docstring into its first sentence and the rest, both without doctests and markup.

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
    """Yield the source files of a package in pseudo-random order, each with the parts of its module's name."""
    if package == STANDARD_LIBRARY:
        root, prefix = Path(sysconfig.get_path("stdlib")), []
    else:
        # `find_spec` of a top-level package imports nothing.
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
    """Yield public dotted names and docstrings of a source file; nothing if it is not valid Python."""
    try:
        with warnings.catch_warnings():
            # Ignore warnings about invalid escapes in third-party sources.
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
            # A literal may contain a lone surrogate, which cannot be written to a file.
            yield ".".join(scope), docstring.encode("utf-8", "ignore").decode()


def _unique(entries: Iterable[Entry], seen: set[str]) -> Iterator[Entry]:
    """Yield entries whose query and text are new, and add both to `seen`."""
    for entry in entries:
        keys = {" ".join(entry.query.casefold().split()), " ".join(entry.text.casefold().split())}
        if not keys & seen:
            seen |= keys
            yield entry


def _shares(limit: int, by_package: dict[str, list[Entry]]) -> dict[str, int]:
    """Number of entries per package: even shares; what a small package leaves goes to larger ones."""
    shares: dict[str, int] = {}
    waiting = sorted(by_package, key=lambda package: len(by_package[package]))
    for position, package in enumerate(waiting):
        shares[package] = min(len(by_package[package]), (limit - sum(shares.values())) // (len(waiting) - position))
    return shares


def _shuffle_key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
