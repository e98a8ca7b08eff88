"""What works without PyLate, sentence-transformers and colpali-engine, and the errors of what needs one of them."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pylate_flash._extras import HOSTS, MissingExtraError, check_host
from tests.stores import run_python

ROOT = Path(__file__).parents[1]
# Installed by a host or an extra, never by the package alone.
BLOCKED = (*HOSTS, "transformers", "datasets", "ranx", "beir", "matplotlib")
PYLATE = "evaluation", "losses", "models", "rank", "retrieve", "scores", "trainer"
# Modules shared by the losses of all hosts.
SHARED = (
    *(f"training.{name}" for name in ("options", "contrast", "grad_cache", "mini_batches", "distributed")),
    *("encoding.texts", "encoding.projection", "data.files", "demo.agreement"),
)
NEEDS_PYLATE = 'needs PyLate, which is not installed: pip install "pylate-flash[pylate]"'
NEEDS_EITHER = (
    'needs PyLate or sentence-transformers 6, and neither is installed: pip install "pylate-flash[pylate]" or pip '
    'install "pylate-flash[sentence-transformers]"'
)


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process in which no module of BLOCKED can be imported."""
    return run_python(f"import sys; sys.modules.update(dict.fromkeys({BLOCKED!r}))\n{code}", *arguments)


def test_every_operation_computes_without_a_host() -> None:
    process = run(
        """
import torch, pylate_flash
from pylate_flash import explain, maxsim, maxsim_cross_entropy, maxsim_from_hidden, maxsim_pairwise, maxsim_varlen, pack
from pylate_flash.ops import maxsim_reference
torch.manual_seed(0)
queries, documents = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 5, 8)
expected = maxsim_reference(queries, documents)
torch.testing.assert_close(maxsim(queries, documents), expected)
torch.testing.assert_close(maxsim_pairwise(queries, documents), expected.diagonal())
(tokens, bounds), (query_tokens, query_bounds) = pack(list(documents)), pack(list(queries))
torch.testing.assert_close(maxsim_varlen(query_tokens, tokens, query_bounds, bounds), expected)
torch.testing.assert_close(maxsim_from_hidden(queries, documents, torch.eye(8), normalize=False), expected)
maxsim_cross_entropy(queries, documents).backward()
assert queries.grad.abs().sum() > 0
print(explain(queries, documents))
"""
    )
    assert process.returncode == 0, process.stderr


def test_what_needs_no_host_imports_without_one() -> None:
    """`ops`, `kernels`, the store, the command line except training, the benchmark, and what losses share."""
    modules = [
        module.name
        for package in ("ops", "kernels", "index", "cli", "bench")
        for module in pkgutil.walk_packages([str(ROOT / "pylate_flash" / package)], f"pylate_flash.{package}.")
        if module.name != "pylate_flash.cli.training.run" and not module.name.endswith("__main__")
    ]
    modules += [f"pylate_flash.{name}" for name in SHARED]
    modules += ["pylate_flash.beir", "pylate_flash.negatives"]
    assert {"pylate_flash.ops.maxsim", "pylate_flash.kernels.backward.lists", "pylate_flash.index.store"} <= {*modules}
    process = run(f"import importlib\nfor name in {modules!r}: importlib.import_module(name)")
    assert process.returncode == 0, process.stderr


def test_an_index_needs_no_host(tmp_path: Path) -> None:
    process = run(
        f"""
import torch
from pylate_flash import indexes
index = indexes.Flat({str(tmp_path)!r}, "example", device="cpu")
index.add_documents(["a", "b"], [torch.eye(2), torch.ones(1, 2)])
print(index([torch.ones(1, 2)], k=2))
print(index.verify().documents)
index.scorer = "torch"
try:
    index([torch.ones(1, 2)])
except ImportError as error:
    print(error)
"""
    )
    assert process.stdout.splitlines() == [
        "[[{'id': 'b', 'score': 2.0}, {'id': 'a', 'score': 1.0}]]",
        "2",
        f"this part of pylate_flash {NEEDS_PYLATE}",
    ], process.stderr


def test_a_module_that_needs_pylate_says_which_extra_installs_it() -> None:
    """Also on the second import, and as a ModuleNotFoundError."""
    process = run(
        f"""
import importlib
for name in {PYLATE * 2!r}:
    try:
        importlib.import_module(f"pylate_flash.{{name}}")
    except ModuleNotFoundError as error:
        print(name, error.name, error)
"""
    )
    expected = [f"{name} pylate this part of pylate_flash {NEEDS_PYLATE}" for name in PYLATE * 2]
    assert process.stdout.splitlines() == expected, process.stderr


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        (("demo",), NEEDS_PYLATE),
        (("train", "--data", "d", "--model", "m", "--output", "o"), NEEDS_EITHER),
        (("mine", "--data", "d", "--model", "m", "--output", "o"), NEEDS_EITHER),
        (("evaluate", "--data", "d", "--model", "m"), NEEDS_EITHER),
        (("search", "text"), NEEDS_EITHER),
        (("index", "add", "--data", "d"), NEEDS_EITHER),
        (("index", "build", "--data", "d", "--model", "m"), NEEDS_EITHER),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_a_command_that_needs_a_host_says_which_extra_installs_it(
    command: tuple[str, ...], needs: str, tmp_path: Path
) -> None:
    process = run(f"import os; os.chdir({str(tmp_path)!r})\nfrom pylate_flash.cli import main; main()", *command)
    name = " ".join(command[: 2 if command[0] == "index" else 1])
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"pylate-flash: pylate-flash {name} {needs}\n"
    assert list(tmp_path.iterdir()) == []


def test_commands_that_need_no_host_work_without_one(tmp_path: Path) -> None:
    """Index maintenance, and `doctor`, which names the extras and says that there is nothing to register."""
    process = run(
        """
import torch
from pathlib import Path
from pylate_flash.cli import app
from pylate_flash.index.store import PackedStore
PackedStore(Path(sys.argv[1])).add(["a", "b"], [torch.ones(2, 16), torch.ones(3, 16)])
for command in (["info"], ["remove", "a"], ["compact"], ["verify"]):
    assert not app(["index", *command, "--index", sys.argv[1]], standalone_mode=False), command
app(["doctor"])
""",
        tmp_path / "index",
    )
    assert process.returncode == 1, process.stderr
    for host in HOSTS.values():
        assert f"pip install 'pylate-flash[{host.extra}]'" in process.stdout
    assert 'register(): no host is installed; for PyLate: pip install "pylate-flash[pylate]"' in process.stdout


@pytest.mark.parametrize("module", HOSTS)
def test_each_host_has_an_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    host = HOSTS[module]
    with pytest.raises(MissingExtraError) as raised:
        check_host(module, "this test")
    assert raised.value.name == module
    assert str(raised.value) == (
        f'this test needs {host.title}, which is not installed: pip install "pylate-flash[{host.extra}]"'
    )
    # The extra installs the supported versions.
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(rf'^{host.extra} = \["{host.distribution}(\[\w+\])?{re.escape(host.supported)}"\]$', project, re.M)
    # So do the other extras that list the host, with their own markers.
    versions = re.findall(rf'"{host.distribution}(?:\[\w+\])?([<>=][^;"]*)', project)
    assert set(versions) == {host.supported}


def test_the_package_alone_installs_no_host() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    dependencies = project.partition("\ndependencies = [")[2].partition("\n]")[0]
    result = set(re.findall(r'^    "([\w-]+)', dependencies, re.M))
    assert result == {"torch", "triton", "safetensors", "numpy", "packaging", "typer", "rich", "tqdm", "xxhash"}


def test_the_scores_of_hosts_need_no_host_and_registering_one_does() -> None:
    process = run("""
import torch
import pylate_flash
from pylate_flash.hosts import colpali, sentence_transformers
assert sentence_transformers.maxsim([torch.eye(2)], [torch.eye(2), torch.ones(1, 2)]).tolist() == [[2.0, 2.0]]
assert colpali.maxsim_inbatch(torch.ones(1, 2, 3), torch.ones(1, 1, 3)).tolist() == [[6.0]]
for arguments in ((), ("pylate",), ("sentence-transformers",), ("colpali-engine",)):
    try:
        pylate_flash.register(*arguments)
    except ImportError as error:
        print(error)
try:
    import pylate_flash.hosts.sentence_transformers.models
except ImportError as error:
    print(error)
""")
    assert process.returncode == 0, process.stderr
    nothing, pylate, transformers, colpali, model = process.stdout.splitlines()
    assert nothing.startswith('there is nothing to register: install a host, with pip install "pylate-flash[pylate]"')
    for line, extra in ((pylate, "pylate"), (transformers, "sentence-transformers"), (colpali, "colpali")):
        assert line.endswith(f'which is not installed: pip install "pylate-flash[{extra}]"')
    assert transformers.startswith('register("sentence-transformers") needs ')
    assert model == transformers.replace('register("sentence-transformers")', "this part of pylate_flash")


def test_what_needs_a_host_is_named_as_it_was_called() -> None:
    """The error names the function called, not `register`; a host may be given by the name of its extra."""
    process = run("""
import pylate_flash
from pylate_flash.register import use_scorer
for call in (lambda: pylate_flash.register("colpali"), lambda: pylate_flash.registered("colpali"), use_scorer):
    try:
        with call(): pass
    except ImportError as error:
        print(error)
""")
    lines = [line.partition(" needs ") for line in process.stdout.splitlines()]
    called = ['register("colpali-engine")', 'registered("colpali-engine")', "use_scorer"]
    assert [line[0] for line in lines] == called, process.stderr
    assert [line[2].partition(",")[0] for line in lines] == ["colpali-engine", "colpali-engine", "PyLate"]


def test_what_comes_with_an_extra_names_it() -> None:
    process = run("""
from pylate_flash.beir import evaluate_retrieval
def load():
    import pylate_flash.data.training
for call in (load, load, lambda: evaluate_retrieval(None, [], {}, {})):
    try:
        call()
    except ImportError as error:
        print(type(error).__name__, error.name, error)
""")
    data = (
        "MissingExtraError datasets pylate_flash.data.training needs datasets, which is not installed: "
        'pip install "pylate-flash[pylate]" or pip install "pylate-flash[sentence-transformers]"'
    )
    metrics = (
        'MissingExtraError ranx evaluate_retrieval needs ranx, which is not installed: pip install "pylate-flash[eval]"'
    )
    assert process.stdout.splitlines() == [data, data, metrics], process.stderr
