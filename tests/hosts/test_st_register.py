"""register("sentence-transformers"): what runs fused, references bound before included, and exact restoration."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
from typing import Any

import pytest
import sentence_transformers
import torch
from sentence_transformers.multi_vector_encoder import evaluation
from sentence_transformers.multi_vector_encoder.losses import (
    CachedMultiVectorMultipleNegativesRankingLoss,
    MultiVectorDistillKLDivLoss,
    MultiVectorMarginMSELoss,
    MultiVectorMultipleNegativesRankingLoss,
)
from sentence_transformers.multi_vector_encoder.scoring import (
    colbert_kd_scores,
    colbert_scores,
    colbert_scores_pairwise,
    mean_colbert_kd_scores,
    mean_colbert_scores,
    mean_colbert_scores_pairwise,
)
from sentence_transformers.util import maxsim, maxsim_pairwise, mean_maxsim, mean_maxsim_pairwise
from sentence_transformers.util.similarity import SimilarityFunction

from pylate_flash import register, registered, unregister
from pylate_flash.hosts import SENTENCE_TRANSFORMERS
from pylate_flash.hosts.routes import find

HOST = "sentence-transformers"
FUNCTIONS = [
    maxsim, maxsim_pairwise, mean_maxsim, mean_maxsim_pairwise, colbert_scores, colbert_kd_scores,
    colbert_scores_pairwise, mean_colbert_scores, mean_colbert_kd_scores, mean_colbert_scores_pairwise,
]  # fmt: skip
QUERIES = torch.full((2, 3, 4), 0.3)
DOCUMENTS = torch.full((2, 5, 4), 0.7)


def with_default(a, b, scorer=maxsim):
    """A user's function that holds the host's as a default argument."""
    return scorer(a, b)


@pytest.fixture
def calls(monkeypatch):
    """Records the calls of this package's operations."""
    from pylate_flash.hosts.sentence_transformers import scoring
    from pylate_flash.training import contrast

    recorded: list[str] = []

    def spy(module, name):
        function = getattr(module, name)

        @functools.wraps(function)
        def call(*arguments, **options):
            recorded.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    spy(scoring, "scores_of_arguments")
    spy(contrast, "maxsim_cross_entropy")
    return recorded


def host_state():
    """Every object that a loaded module of the host holds, and the code of what is routed."""
    state: dict[Any, Any] = {
        (module_name, name): value
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] == "sentence_transformers"
        for name, value in vars(module).items()
    }
    for path in SENTENCE_TRANSFORMERS.served:
        function = find(path)
        state["code", path] = function.__code__, function.__defaults__, function.__kwdefaults__
    return state


@pytest.fixture(autouse=True)
def unchanged_host():
    """Each test must leave the host unchanged."""
    before = host_state()
    yield
    after = host_state()
    assert [key for key, value in before.items() if key[0] != "code" and after[key] is not value] == []
    assert [key for key, value in before.items() if key[0] == "code" and after[key] != value] == []
    assert SENTENCE_TRANSFORMERS.holders == 0
    assert SENTENCE_TRANSFORMERS.held == {}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions_imported_before_run_fused(function, calls):
    documents = DOCUMENTS.unsqueeze(1) if function.__name__.endswith(("colbert_scores", "kd_scores")) else DOCUMENTS
    expected = function(QUERIES, documents)
    assert calls == []
    with registered(HOST):
        assert torch.allclose(function(QUERIES, documents), expected, rtol=1e-6)
        assert calls == ["scores_of_arguments"]
    function(QUERIES, documents)
    assert len(calls) == 1


def test_functions_stay_the_same_objects_with_the_same_signature():
    signatures = [inspect.signature(function) for function in FUNCTIONS]
    with registered(HOST):
        for function, signature in zip(FUNCTIONS, signatures, strict=True):
            assert inspect.signature(function) == signature
            assert pickle.loads(pickle.dumps(function)) is function
        assert SimilarityFunction.to_similarity_fn("maxsim") is maxsim


def test_references_bound_before(tiny_encoder, texts, calls):
    queries, documents = tiny_encoder.encode_query(texts(1, 3)), tiny_encoder.encode_document(texts(2, 3))
    assert tiny_encoder.similarity_fn_name == "maxsim"
    held = [
        tiny_encoder.similarity,
        # Bound when the model was first asked for a similarity.
        tiny_encoder._similarity,
        tiny_encoder.similarity_pairwise,
        with_default,
        functools.partial(maxsim, chunk_elements=10**6),
    ]
    expected = [function(queries, documents) for function in held]
    assert calls == []
    with registered(HOST):
        for function, scores in zip(held, expected, strict=True):
            assert torch.allclose(function(queries, documents), scores, rtol=1e-6)
        assert len(calls) == len(held)


@pytest.mark.parametrize(
    "loss_class",
    [
        MultiVectorMultipleNegativesRankingLoss,
        CachedMultiVectorMultipleNegativesRankingLoss,
        MultiVectorDistillKLDivLoss,
        MultiVectorMarginMSELoss,
    ],
)
def test_losses_made_before(loss_class, tiny_encoder, texts, calls):
    loss = loss_class(tiny_encoder)
    columns = [tiny_encoder.preprocess(texts(seed, 3)) for seed in range(3)]
    labels = torch.tensor([[2.0, 1.0]] * 3)
    expected = loss([dict(column) for column in columns], labels)
    assert calls == []
    with registered(HOST):
        value = loss([dict(column) for column in columns], labels)
        assert calls
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)


def test_evaluators(tiny_encoder, texts, calls):
    queries = dict(enumerate(texts(1, 6)))
    corpus = {str(i): text for i, text in enumerate(texts(2, 30))}
    relevant = {query: {str(query), str(query + 7)} for query in queries}
    anchors, positives, negatives = texts(3, 8), texts(4, 8), texts(5, 8)
    evaluators = [
        evaluation.MultiVectorInformationRetrievalEvaluator(
            {str(k): v for k, v in queries.items()},
            corpus,
            {str(k): v for k, v in relevant.items()},
            corpus_chunk_size=11,
        ),
        evaluation.MultiVectorTripletEvaluator(anchors, positives, negatives),
        evaluation.MultiVectorRerankingEvaluator(
            [
                {"query": text, "positive": [positives[i]], "negative": negatives[i : i + 2]}
                for i, text in enumerate(anchors[:6])
            ]
        ),
    ]
    for evaluator in evaluators:
        expected = evaluator(tiny_encoder)
        calls.clear()
        with registered(HOST):
            actual = evaluator(tiny_encoder)
        assert calls
        assert actual == pytest.approx(expected, abs=1e-6)


def test_registering_again_and_the_state_before():
    def is_fused():
        return maxsim.__code__.co_filename.startswith("<route of")

    register(HOST)
    register(HOST)
    assert is_fused()
    unregister(HOST)
    assert not is_fused()
    unregister(HOST)
    with registered(HOST):
        with pytest.raises(KeyError), registered(HOST):
            raise KeyError
        assert is_fused()
    assert not is_fused()


def test_all_installed_hosts():
    with registered():
        assert maxsim.__code__.co_filename.startswith("<route of")


@pytest.mark.parametrize("version", ["5.9.0", "7.0.0"])
def test_another_version_is_an_error_before_anything_changes(version, monkeypatch):
    monkeypatch.setattr(sentence_transformers, "__version__", version)
    before = host_state()
    with pytest.raises(ImportError, match=rf"supports sentence-transformers >=6.0,<7, .* {version} is installed"):
        register(HOST)
    assert host_state() == before | {("sentence_transformers", "__version__"): version}
    if version == "7.0.0":
        with registered(HOST, strict=False):
            assert torch.isfinite(maxsim(QUERIES, DOCUMENTS)).all()
    else:
        with pytest.raises(ImportError, match="5.9.0 is installed"):
            register(HOST, strict=False)
    monkeypatch.undo()


def test_unknown_host():
    for call in (register, unregister):
        with pytest.raises(ValueError, match="host must be one of 'pylate', 'sentence-transformers'.*got 'other'"):
            call("other")


def test_compiled_functions_follow():
    compiled = torch.compile(maxsim, fullgraph=True, backend="eager")
    plain = compiled(QUERIES, DOCUMENTS)
    with registered(HOST):
        assert torch.allclose(compiled(QUERIES, DOCUMENTS), plain, rtol=1e-6)
    assert torch.equal(compiled(QUERIES, DOCUMENTS), plain)


def test_importing_changes_nothing():
    before = host_state()
    from pylate_flash.hosts.sentence_transformers import losses, scoring
    from pylate_flash.hosts.sentence_transformers import maxsim as ours

    assert scoring.maxsim is ours is not maxsim
    assert losses.__all__
    assert host_state() == before
