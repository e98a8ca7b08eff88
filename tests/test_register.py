"""register(): what it changes in PyLate, that everything is restored, and that nothing else changes."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import nullcontext
from contextvars import copy_context
from fractions import Fraction
from importlib.metadata import version

import numpy as np
import pylate
import pylate.evaluation
import pylate.losses
import pylate.rank
import pylate.retrieve
import pylate.scores
import pytest
import torch
from pylate.losses import Contrastive, Distillation
from pylate.rank import rerank
from pylate.scores import ColBERTScores, colbert_kd_scores, colbert_scores, colbert_scores_pairwise
from pylate.scores import colbert as pylate_colbert

import pylate_flash
from pylate_flash import register, registered, unregister
from pylate_flash.hosts.pylate import REBOUND, RENAMED, ROUTES, SCORING_FUNCTIONS
from pylate_flash.ops import maxsim_reference
from pylate_flash.register import use_scorer
from tests.stores import run_python

QUERIES = torch.tensor([[[1.0, 2.0], [0.5, -1.0]]])
DOCUMENTS = torch.tensor([[[-1.0, -2.0], [-3.0, 0.5], [9.0, 9.0]]])
MASK = torch.tensor([[True, True, False]])

EXCLUDE = maxsim_reference(QUERIES, DOCUMENTS, documents_mask=MASK)
ZERO = maxsim_reference(QUERIES, DOCUMENTS, documents_mask=MASK, masking="zero")


def is_fused() -> bool:
    """Whether PyLate's default scorer is ours: it alone returns float32 for half inputs on a CPU."""
    return colbert_scores(QUERIES.half(), DOCUMENTS.half()).dtype == torch.float32


def scores(**options) -> torch.Tensor:
    return colbert_scores(QUERIES, DOCUMENTS, None, MASK, **options)


def pylate_state() -> dict[tuple[str, str], object]:
    """All objects in the namespaces of loaded PyLate modules, and the code of the scoring functions."""
    state = {
        (module_name, name): value
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] == "pylate"
        for name, value in vars(module).items()
    }
    return state | {("code", name): getattr(pylate_colbert, name).__code__ for name in SCORING_FUNCTIONS}


@pytest.fixture(autouse=True)
def unchanged_pylate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts with unmodified PyLate and must leave it unmodified."""
    monkeypatch.delenv("PYLATE_SCORES_BACKEND", raising=False)
    before = pylate_state()
    assert not is_fused()
    yield
    after = pylate_state()
    assert after.keys() >= before.keys()
    assert [key for key, value in before.items() if after[key] is not value] == []
    assert ROUTES.holders == 0


def test_values_of_the_two_maskings_differ_here() -> None:
    assert EXCLUDE.item() == pytest.approx(-2.0 + 1.5)
    assert ZERO.item() == pytest.approx(0.0 + 1.5)


def test_importing_changes_nothing_and_does_not_import_pylate() -> None:
    code = """
import sys
import pylate_flash
from pylate_flash.hosts.pylate import REBOUND, SCORING_FUNCTIONS
assert not [name for name in sys.modules if name.partition(".")[0] == "pylate"]
import pylate.scores, pylate.rank, pylate.losses, pylate.evaluation
code = {name: getattr(pylate.scores, name).__code__ for name in SCORING_FUNCTIONS}
held = {(m, n): getattr(getattr(pylate, m), n) for m, names in REBOUND.items() for n in names}
import pylate_flash.losses, pylate_flash.rank, pylate_flash.models, pylate_flash.evaluation
assert all(getattr(pylate.scores, name).__code__ is value for name, value in code.items())
assert all(getattr(getattr(pylate, m), n) is value for (m, n), value in held.items())
"""
    process = run_python(code)
    assert process.returncode == 0, process.stderr


def test_scoring_functions_imported_before_gain_the_backend() -> None:
    imported = [
        (colbert_scores, DOCUMENTS),
        (pylate.scores.SimilarityFunction.to_similarity_fn("MaxSim"), DOCUMENTS),
        (inspect.signature(Distillation).parameters["score_metric"].default, DOCUMENTS.unsqueeze(0)),
        (colbert_kd_scores, DOCUMENTS.unsqueeze(0)),
        (colbert_scores_pairwise, DOCUMENTS),
    ]
    for function, documents in imported:
        with pytest.raises(ValueError, match="got 'pylate_flash'"):
            function(QUERIES, documents, backend="pylate_flash")
        with registered():
            for backend in ("pylate_flash", "auto", None):
                scores = function(QUERIES.half(), documents.half(), backend=backend)
                assert scores.dtype == torch.float32
            assert function(QUERIES.half(), documents.half(), backend="torch").dtype == torch.float16
        assert function(QUERIES.half(), documents.half()).dtype == torch.float16


def test_scoring_functions_stay_the_same_objects_with_the_same_signature() -> None:
    functions = {name: getattr(pylate.scores, name) for name in SCORING_FUNCTIONS}
    signatures = {name: inspect.signature(function) for name, function in functions.items()}
    with registered():
        for name, function in functions.items():
            assert getattr(pylate.scores, name) is function
            assert getattr(pylate_colbert, name) is function
            assert pickle.loads(pickle.dumps(function)) is function
            actual = inspect.signature(function).parameters
            assert [(p.name, p.default, p.kind) for p in actual.values()] == [
                (p.name, p.default, p.kind) for p in signatures[name].parameters.values()
            ]


def test_arguments_arrive_by_position_and_by_name() -> None:
    candidates, mask, queries_mask = DOCUMENTS[None], MASK[None], torch.tensor([[False, True]])
    both = maxsim_reference(QUERIES, DOCUMENTS, queries_mask=queries_mask, documents_mask=MASK)
    with registered():
        named = {"queries_embeddings": QUERIES, "documents_embeddings": DOCUMENTS, "documents_mask": MASK}
        for actual, expected in (
            (colbert_scores(QUERIES, DOCUMENTS, None, MASK, "pylate_flash"), EXCLUDE),
            (colbert_scores(**named), EXCLUDE),
            (colbert_scores(QUERIES, DOCUMENTS, queries_mask, MASK), both),
            (colbert_kd_scores(QUERIES, candidates, None, mask), EXCLUDE),
            (colbert_kd_scores(QUERIES, candidates, documents_mask=mask, backend="torch"), ZERO),
            (colbert_kd_scores(QUERIES, candidates, queries_mask, mask), both),
        ):
            assert torch.equal(actual, expected)
        assert colbert_scores_pairwise(QUERIES, DOCUMENTS).shape == (1,)


def test_masking_and_registering_again() -> None:
    assert torch.equal(scores(), ZERO)
    try:
        for _ in range(2):
            register()
            assert torch.equal(scores(), EXCLUDE)
        for _ in range(2):
            register(masking="zero")
            assert torch.equal(scores(), ZERO)
            assert is_fused()
    finally:
        unregister()
    assert not is_fused()
    unregister()


@pytest.mark.parametrize("masking", ["none", None, True])
def test_unknown_masking_changes_nothing(masking: object) -> None:
    with pytest.raises(ValueError, match="masking must be one of 'exclude', 'zero', got"):
        register(masking=masking)
    assert not is_fused()
    with registered(masking="zero"):
        with pytest.raises(ValueError, match="masking must be one of"):
            register(masking=masking)
        assert torch.equal(scores(), ZERO)


def test_names_are_rebound_in_every_module_that_holds_them() -> None:
    theirs = {
        (module, name): getattr(importlib.import_module(f"pylate.{module}"), name)
        for module, names in REBOUND.items()
        for name in names
    }
    with registered():
        assert sys.modules["pylate.retrieve.colbert"].rerank is pylate_flash.rank.rerank
        assert sys.modules["pylate.rank.rank"].rerank is pylate_flash.rank.rerank
        assert sys.modules["pylate.losses.contrastive"].ColBERTScores is pylate_flash.scores.ColBERTScores
        state = pylate_state()
        for (module, name), value in theirs.items():
            ours = getattr(importlib.import_module(f"pylate_flash.{module}"), RENAMED.get(name, name))
            assert ours is not value
            assert getattr(importlib.import_module(f"pylate.{module}"), name) is ours
            # A class keeps its name in its defining module, since its methods call super(Name, self).
            holders = {module for (module, _), obj in state.items() if obj is value}
            assert holders <= ({value.__module__} if isinstance(value, type) else set())
            if isinstance(value, type):
                assert issubclass(ours, value)
    assert pylate.rank.rerank is rerank
    assert pylate.losses.Contrastive is Contrastive


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("scores", ["ColBERTScores"]),
        ("rank", ["rerank"]),
        ("losses", ["Contrastive", "CachedContrastive", "Distillation"]),
        ("evaluation", ["ColBERTTripletEvaluator", "ColBERTDistillationEvaluator", "NanoBEIREvaluator",
                        "PyLateInformationRetrievalEvaluator"]),
    ],
)  # fmt: skip
def test_no_name_is_forgotten(module: str, names: list[str]) -> None:
    """The names are listed here, independently of the list that `register` iterates over."""
    theirs, ours = (importlib.import_module(f"{package}.{module}") for package in ("pylate", "pylate_flash"))
    with registered():
        for name in names:
            # PyLate's cached loss has another gradient than ours.
            replacement = {"CachedContrastive": "RegisteredCachedContrastive"}.get(name, name)
            assert getattr(theirs, name) is getattr(ours, replacement)


def test_modules_loaded_while_registered_are_restored_too() -> None:
    late = types.ModuleType("pylate.late")
    try:
        with registered():
            sys.modules["pylate.late"] = late
            late.rerank, late.Contrastive = pylate.rank.rerank, pylate.losses.Contrastive
        assert late.rerank is rerank
        assert late.Contrastive is Contrastive
    finally:
        del sys.modules["pylate.late"]


def test_pylates_and_our_losses_can_be_constructed_while_registered() -> None:
    # PyLate's constructors call super(Contrastive, self): with that name rebound they would recurse forever.
    model = torch.nn.Linear(1, 1)
    losses = {name: getattr(pylate.losses, name) for name in REBOUND["losses"]}
    with registered():
        for name, theirs in losses.items():
            assert type(theirs(model)) is theirs
            assert isinstance(theirs(model), torch.nn.Module)
            ours = getattr(pylate.losses, name)(model)
            assert isinstance(ours, getattr(pylate_flash.losses, name))
            assert isinstance(ours, theirs)
        # A PyLate loss imported earlier gets the single-call score metric.
        assert type(Contrastive(model).score_metric) is pylate_flash.scores.ColBERTScores
    assert type(Contrastive(model).score_metric) is ColBERTScores


def test_a_temperature_of_numpy(tiny_colbert_path: str) -> None:
    from pylate import models

    model = models.ColBERT(tiny_colbert_path, device="cpu").eval()
    texts = ["red", "the sky", "dogs sleep"], ["red fish", "blue sky", "big dogs"]
    features = [model.tokenize(list(column), is_query=index == 0) for index, column in enumerate(texts)]
    with registered():
        for loss in (pylate.losses.Contrastive, pylate.losses.CachedContrastive):
            values = [
                loss(model, temperature=number)([dict(column) for column in features])
                for number in (0.5, np.float32(0.5), Fraction(1, 2))
            ]
            assert values[0].item() == values[1].item() == values[2].item()


def test_registered_restores_the_state_before_it() -> None:
    with registered():
        with registered(masking="zero"):
            assert torch.equal(scores(), ZERO)
            with pytest.raises(KeyError, match=str(EXCLUDE.item())), registered(masking="exclude"):
                raise KeyError(scores().item())
            assert torch.equal(scores(), ZERO)
        assert torch.equal(scores(), EXCLUDE)
        assert is_fused()
    assert not is_fused()
    with pytest.raises(KeyError), registered():
        raise KeyError
    assert not is_fused()


def test_a_host_is_registered_while_anybody_holds_it() -> None:
    with registered(), registered():
        # This only undoes register(), which was not called.
        unregister()
        assert is_fused()
    assert not is_fused()
    register(masking="zero")
    with registered():
        # Registering again makes this the latest.
        register(masking="zero")
        assert torch.equal(scores(), ZERO)
    assert torch.equal(scores(), ZERO)
    with registered():
        assert torch.equal(scores(), EXCLUDE)
        unregister()
        assert is_fused()
        assert pylate.rank.rerank is pylate_flash.rank.rerank
    assert not is_fused()


def test_blocks_that_overlap() -> None:
    """As in threads and tasks: exiting one block neither ends the other nor restores stale state."""
    first, second = registered("pylate"), registered("pylate", masking="zero")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(scores(), ZERO)
    assert pylate.rank.rerank is pylate_flash.rank.rerank
    second.__exit__(None, None, None)
    assert not is_fused()
    assert pylate.rank.rerank is rerank


@pytest.mark.parametrize("version", ["1.5.9", "1.7.0", "2.0.0"])
def test_unsupported_pylate_is_an_error_before_anything_changes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pylate, "__version__", version)
    before = pylate_state()
    message = rf"supports PyLate >=1\.6,<1\.7, but PyLate {version} is installed"
    for call in (register, registered, lambda: use_scorer("torch")):
        with pytest.raises(ImportError, match=message), call() or nullcontext():
            pass
    assert pylate_state() == before
    monkeypatch.undo()


@pytest.mark.parametrize("version", ["1.6.0", "1.6.12", "1.6.1.dev0"])
def test_supported_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pylate, "__version__", version)
    with registered():
        assert is_fused()
    monkeypatch.undo()


def test_a_name_that_pylate_lacks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REBOUND, "losses", ("Contrastive", "Missing"))
    before = pylate_state()
    with pytest.raises(ImportError, match=rf"PyLate {version('pylate')} cannot be registered: .*Missing"):
        register()
    assert pylate_state() == before


def test_a_function_that_pylate_lacks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example one renamed in a newer version, which is only accepted with strict=False."""
    with monkeypatch.context() as patch:
        patch.setattr(pylate, "__version__", "9.0")
        patch.delattr(pylate.rank, "rerank")
        with pytest.raises(ImportError, match=r"PyLate 9\.0 cannot be registered: .*'pylate.rank' .*'rerank'"):
            register("pylate", strict=False)
    with monkeypatch.context() as patch:
        patch.delattr(pylate.scores.XTRScores, "_score")
        with pytest.raises(ImportError, match=r"cannot be registered: pylate.scores.xtr.XTRScores._score is not in"):
            register("pylate")
    assert pylate.losses.Contrastive is Contrastive


def test_use_scorer_sets_the_default_of_the_block() -> None:
    with registered():
        with use_scorer("torch"):
            assert not is_fused()
            assert colbert_scores(QUERIES.half(), DOCUMENTS.half(), backend="auto").dtype == torch.float32
            with use_scorer("pylate_flash"):
                assert is_fused()
            with use_scorer(masking="zero"):
                assert not is_fused()
            assert not is_fused()
        assert is_fused()
        with use_scorer(masking="zero"):
            assert torch.equal(scores(), ZERO)
        assert torch.equal(scores(), EXCLUDE)


def test_use_scorer_goes_before_the_environment_unless_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
    with registered():
        for backend, fused in (("pylate_flash", True), ("auto", False)):
            with use_scorer(backend):
                assert is_fused() == fused
    monkeypatch.delenv("PYLATE_SCORES_BACKEND")


def test_use_scorer_without_register() -> None:
    with use_scorer("pylate_flash", "zero"):
        assert is_fused()
        assert torch.equal(scores(), ZERO)
        assert pylate.rank.rerank is rerank
        with registered(masking="exclude"):
            assert torch.equal(scores(), ZERO)
        assert is_fused()
    assert not is_fused()
    with pytest.raises(KeyError), use_scorer():
        raise KeyError
    assert not is_fused()


def test_register_inside_use_scorer_outlives_it() -> None:
    with use_scorer("torch"):
        register()
        assert not is_fused()
    assert is_fused()
    unregister()


@pytest.mark.parametrize("arguments", [{"backend": "fast"}, {"backend": 1}, {"masking": "none"}])
def test_use_scorer_refuses_unknown_values(arguments: dict) -> None:
    [name] = arguments
    with pytest.raises(ValueError, match=f"{name} must be one of"), use_scorer(**arguments):
        pass


def test_a_block_that_ends_in_another_context_gives_back_what_it_held() -> None:
    """For example in a generator that is closed from another context."""
    block = use_scorer("pylate_flash")
    copy_context().run(block.__enter__)
    with pytest.raises(ValueError, match="was created in a different Context"):
        block.__exit__(None, None, None)
    assert ROUTES.holders == 0


def test_use_scorer_is_not_seen_by_other_threads() -> None:
    results: dict[str, list[bool]] = {"plain": [], "fused": [], "torch": []}
    inside, done = threading.Barrier(4), threading.Barrier(4)

    def run(name: str, context) -> None:
        with context:
            inside.wait(30)
            results[name] += [is_fused() for _ in range(20)]
            done.wait(30)

    # "plain" sets no scorer: PyLate is unchanged there, although its functions are routed for the other threads.
    contexts = {"plain": nullcontext(), "fused": use_scorer("pylate_flash"), "torch": use_scorer("torch")}
    threads = [threading.Thread(target=run, args=item) for item in contexts.items()]
    for thread in threads:
        thread.start()
    inside.wait(30)
    done.wait(30)
    for thread in threads:
        thread.join(30)
    assert results == {"plain": [False] * 20, "fused": [True] * 20, "torch": [False] * 20}


def test_threads_that_register_and_call_at_once() -> None:
    errors: list[BaseException] = []

    def toggle() -> None:
        for _ in range(10):
            register()
            unregister()

    def call() -> None:
        try:
            for _ in range(200):
                assert scores().item() in (EXCLUDE.item(), ZERO.item())
                assert torch.equal(scores(backend="torch"), ZERO)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=target) for target in (toggle, toggle, call, call)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    unregister()
