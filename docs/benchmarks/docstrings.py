"""A collection in BEIR's layout that needs no network: docstrings of Python and torch, with first lines as queries.

    python docs/benchmarks/docstrings.py FOLDER [DOCUMENTS]

A document is a docstring without its first line, and a query is the first line of one. The collection depends only on
the versions of Python and torch.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

SHORTEST, QUERIES, DOCUMENTS = 12, 300, 6000


def docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield names and docstrings of functions and classes in the modules of a folder."""
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.relative_to(folder).parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            # Some test files are invalid on purpose.
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(folder).with_suffix('')}:{node.lineno}:{node.name}", text


def write(folder: Path, number: int) -> None:
    """Write the collection into a new folder."""
    by_text: dict[str, tuple[str, str]] = {}
    for root in (Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent):
        for name, text in docstrings(root):
            first, _, rest = text.partition("\n")
            # Deduplicate by text.
            if len(first.split()) >= 4 and len(rest.split()) >= SHORTEST:
                by_text.setdefault(" ".join(rest.split()), (f"{root.name}/{name}", first.strip()))
    order = sorted(by_text, key=lambda text: hashlib.sha256(text.encode()).digest())[:number]
    (folder / "qrels").mkdir(parents=True)
    with (folder / "corpus.jsonl").open("x") as corpus, (folder / "queries.jsonl").open("x") as queries:
        for text in order:
            corpus.write(json.dumps({"_id": by_text[text][0], "text": text}) + "\n")
        for i, text in enumerate(order[:QUERIES]):
            queries.write(json.dumps({"_id": f"q{i}", "text": by_text[text][1]}) + "\n")
    lines = [f"q{i}\t{by_text[text][0]}\t1\n" for i, text in enumerate(order[:QUERIES])]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else DOCUMENTS)
