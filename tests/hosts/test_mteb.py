"""mteb's evaluation, offline, of a model that both libraries load, by whichever is installed."""

from __future__ import annotations

import re
from collections import Counter

import mteb
import pytest
import torch
from datasets import Dataset
from mteb.models import ModelMeta, MultiVectorSearchEncoderWrapper, MultiVectorWrapper
from mteb.models.model_implementations.pylate_models import MultiVectorModel, PylateSearchEncoder

import pylate_flash
from pylate_flash.beir import load_beir_folder
from pylate_flash.encoding.texts import encode, is_multi_vector_encoder
from pylate_flash.hosts import HOSTS
from pylate_flash.hosts.mteb import _texts_of, search
from pylate_flash.indexes import Flat
from tests.mteb_tasks import local_task
from tests.pylate_checkpoint import WORDS, write_checkpoint

METRICS = ("ndcg_at_10", "map_at_100", "recall_at_100", "mrr_at_10")


def small_collection(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def text():
        length = int(torch.randint(2, 9, (), generator=generator))
        return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (length,), generator=generator))

    documents = [{"id": f"d{i}", "title": text() if i % 2 else "", "text": text()} for i in range(150)]
    queries = {f"q{i}": text() for i in range(20)}
    judged = torch.randint(len(documents), (len(queries), 4), generator=generator).tolist()
    return documents, queries, {f"q{i}": {f"d{j}": 1 for j in row} for i, row in enumerate(judged)}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Folder of the model, whose words include those of the small collection."""
    folder = tmp_path_factory.mktemp("mteb") / "model"
    folder.mkdir()
    words = ["flow", "wing", "pressure", "boundary", "layer", "heat", "shock", "velocity", "of", "in", "the", "mach"]
    write_checkpoint(folder, [*WORDS, *words])
    return str(folder)


@pytest.fixture
def model(checkpoint):
    """A raw model of the installed library."""
    if HOSTS["sentence-transformers"].is_there():
        from sentence_transformers import MultiVectorEncoder

        return MultiVectorEncoder(checkpoint, device="cpu")
    from pylate.models import ColBERT

    return ColBERT(checkpoint, device="cpu")


@pytest.fixture
def wrapper(checkpoint):
    """mteb's own wrapper of the model."""
    if HOSTS["sentence-transformers"].is_there():
        return MultiVectorWrapper(checkpoint, device="cpu")
    wrapped = MultiVectorModel(checkpoint, device="cpu")
    wrapped.mteb_model_meta = ModelMeta.create_empty()
    return wrapped


@pytest.fixture
def calls(monkeypatch):
    """The number of encoded documents, and of searches of an index."""
    counts = Counter()
    result = Flat.__call__

    def call(self, *args, **kwargs):
        counts["searches"] += 1
        return result(self, *args, **kwargs)

    monkeypatch.setattr(Flat, "__call__", call)
    if HOSTS["sentence-transformers"].is_there():
        from sentence_transformers import MultiVectorEncoder as Model

        name = "encode_document"
    else:
        from pylate.models import ColBERT as Model

        name = "encode"
    encoding = getattr(Model, name)

    def record(self, texts, *args, **kwargs):
        if not kwargs.get("is_query", False):
            counts["documents"] += len(texts)
        return encoding(self, texts, *args, **kwargs)

    monkeypatch.setattr(Model, name, record)
    return counts


class SearchByTorch:
    """Exact search by all similarities, their maxima, and the sums of these."""

    mteb_model_meta = ModelMeta.create_empty()

    def __init__(self, model):
        self.model = model

    def index(self, corpus, **kwargs):
        self.ids = corpus["id"]
        texts = [f"{row.get('title', '')} {row['text']}".strip() for row in corpus]
        self.documents = [torch.as_tensor(result) for result in encode(self.model, texts, is_query=False)]

    def search(self, queries, *, top_k, top_ranked=None, **kwargs):
        results = {}
        for id_, query in zip(queries["id"], encode(self.model, list(queries["text"]), is_query=True), strict=True):
            embedding = torch.as_tensor(query)
            result = [
                (float((embedding @ document.T).amax(dim=1).sum()), name)
                for name, document in zip(self.ids, self.documents, strict=True)
                if top_ranked is None or name in top_ranked.get(id_, ())
            ]
            results[id_] = {name: score for score, name in sorted(result, reverse=True)[:top_k]}
        return results


def metrics(model, task):
    """The metrics of every subset, by mteb."""
    (result,) = mteb.evaluate(model, task, cache=None, show_progress_bar=False).task_results
    return {scores["hf_subset"]: [scores[name] for name in METRICS] for scores in result.scores["test"]}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for subset, values in expected.items():
        assert all(0 < value <= 1 for value in values)
        assert actual[subset] == pytest.approx(values, abs=5e-5)


@pytest.fixture(params=["small", "cranfield"])
def collection(request):
    if request.param == "small":
        return small_collection()
    documents, queries, qrels = load_beir_folder(request.getfixturevalue("cranfield"))
    relevant = {id_: {name: max(value, 0) for name, value in judged.items()} for id_, judged in qrels.items()}
    return documents, queries, relevant


def test_metrics_are_those_of_torch_and_documents_are_encoded_once(collection, model, wrapper, calls, tmp_path):
    task = local_task({"default": collection})
    expected = metrics(SearchByTorch(model), task)
    calls.clear()
    assert_equal(metrics(search(model, tmp_path), task), expected)
    assert calls == {"documents": len(collection[0]), "searches": 1}
    assert_equal(metrics(search(model, tmp_path), task), expected)
    assert calls == {"documents": len(collection[0]), "searches": 2}, "the second run has encoded documents"
    calls.clear()
    with pylate_flash.registered("mteb"):
        assert_equal(metrics(wrapper, task), expected)
        assert_equal(metrics(wrapper, task), expected)
    assert calls == {"documents": len(collection[0]), "searches": 2}, "mteb's wrapper has searched by itself"


def test_the_wrappers_are_mtebs_own_again_afterwards(model, wrapper, calls):
    classes = (PylateSearchEncoder, MultiVectorSearchEncoderWrapper)
    before = [(cls.index.__code__, cls.search.__code__) for cls in classes]
    pylate_flash.register()
    try:
        assert [(cls.index.__code__, cls.search.__code__) for cls in classes] == before, "without being named"
        with pylate_flash.registered("mteb"):
            assert all(cls.search.__code__ != code for cls, (_, code) in zip(classes, before, strict=True))
    finally:
        pylate_flash.unregister()
    assert [(cls.index.__code__, cls.search.__code__) for cls in classes] == before
    if HOSTS["sentence-transformers"].is_there():
        # It needs no approximate index, whose metrics may differ.
        task = local_task({"default": small_collection()})
        assert_equal(metrics(wrapper, task), metrics(search(model), task))
        assert calls["searches"] == 1


@pytest.mark.parametrize("by_wrapper", [False, True], ids=["ours", "registered"])
def test_candidates_are_reranked(model, wrapper, by_wrapper):
    documents, queries, qrels = small_collection()
    candidates = {
        id_: [*judged, *(f"d{(7 * i + 11 * j) % len(documents)}" for j in range(8))]
        for i, (id_, judged) in enumerate(qrels.items())
    }
    candidates = {id_: sorted(set(result)) for id_, result in candidates.items()}
    task = local_task({"default": (documents, queries, qrels)}, candidates)
    task.load_data()
    with pylate_flash.registered("mteb"):
        assert_equal(metrics(wrapper if by_wrapper else search(model), task), metrics(SearchByTorch(model), task))


def test_a_name_instead_of_a_model_or_a_dtype_of_torch_is_refused_before_any_task_is_loaded(model):
    with pytest.raises(TypeError, match="model must be a ColBERT model or a MultiVectorEncoder, got str"):
        search("some/model")
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got torch\.float16"):
        search(model, dtype=torch.float16)


def test_results_of_reranking_are_among_the_candidates(model):
    documents, queries, qrels = small_collection()
    data = local_task({"default": (documents, queries, qrels)}, {"q0": ["d3", "d5", "d8"], "q1": ["d1"]})
    data.load_data()
    split = data.dataset["default"]["test"]
    options = {
        "task_metadata": data.metadata, "hf_split": "test", "hf_subset": "default", "encode_kwargs": {"batch_size": 8}
    }  # fmt: skip
    ours = search(model)
    with pytest.raises(ValueError, match=r"no corpus to search: call index\(\)"):
        ours.search(split["queries"], top_k=2, **options)
    ours.index(split["corpus"], **options)
    result = ours.search(split["queries"], top_k=2, top_ranked=split["top_ranked"], **options)
    assert result.keys() == queries.keys()
    assert set(result["q0"]) < {"d3", "d5", "d8"}
    assert [len(result[id_]) for id_ in ("q0", "q1", "q2")] == [2, 1, 0]


def test_languages_are_evaluated_apart_and_a_corpus_that_they_share_is_encoded_once(model, calls, tmp_path):
    german, english = small_collection(1), small_collection(2)
    french = (german[0], english[1], {id_: dict.fromkeys(judged, 1) for id_, judged in english[2].items()})
    task = local_task({"deu": german, "eng": english, "fra": french})
    expected = metrics(SearchByTorch(model), task)
    assert len({tuple(values) for values in expected.values()}) == 3
    calls.clear()
    assert_equal(metrics(search(model, tmp_path), task), expected)
    assert calls == {"documents": len(german[0]) + len(english[0]), "searches": 3}


@pytest.mark.parametrize("change", ["weights", "texts", "kept"])
def test_what_makes_other_embeddings_has_an_index_of_its_own(change, model, calls, tmp_path):
    documents, queries, qrels = small_collection()
    metrics(search(model, tmp_path), local_task({"default": (documents, queries, qrels)}))
    calls.clear()
    if change == "weights":
        with torch.no_grad():
            next(iter(model[1].parameters())).neg_()
    elif change == "texts":
        documents = [{**documents[0], "text": "cats"}, *documents[1:]]
    task = local_task({"default": (documents, queries, qrels)})
    ours = search(model, tmp_path, dtype="float16" if change == "kept" else None)
    result = metrics(ours, task)
    assert calls["documents"] == len(documents)
    if change != "kept":
        assert_equal(result, metrics(SearchByTorch(model), task))
    assert ours.index_path is not None
    assert ours.index_path.is_relative_to(tmp_path)
    assert Flat(ours.index_path.parent, ours.index_path.name).info().dtype == (
        "float16" if change == "kept" else "float32"
    )


def test_scores_of_meanmaxsim_are_means(model, monkeypatch):
    if not is_multi_vector_encoder(model):
        pytest.skip("PyLate has no such models")
    documents, queries, _ = small_collection()
    arguments = {
        "task_metadata": local_task({"default": small_collection()}).metadata, "hf_split": "test",
        "hf_subset": "default", "encode_kwargs": {},
    }  # fmt: skip
    rows = Dataset.from_list([{"id": id_, "text": text} for id_, text in queries.items()])
    ours, scores = search(model), []
    ours.index(Dataset.from_list([{"title": "", **document} for document in documents]), **arguments)
    for name in ("maxsim", "meanmaxsim"):
        monkeypatch.setattr(model, "similarity_fn_name", name, raising=False)
        scores.append(ours.search(rows, top_k=3, **arguments))
    sums, means = scores
    for id_, text in queries.items():
        (tokens,) = encode(model, [text], is_query=True)
        assert means[id_] == pytest.approx({document: score / len(tokens) for document, score in sums[id_].items()})


def test_options_that_change_embeddings_name_another_index():
    assert _texts_of({"batch_size": 8, "show_progress_bar": False, "pool": object()}) == []
    with pytest.raises(TypeError, match=r"encode_kwargs\['token_pooling'\] must be a value that pickle takes"):
        _texts_of({"token_pooling": lambda tokens: tokens})
    named = [_texts_of({"normalize_embeddings": value}) for value in (True, False, torch.nn.Linear(1, 1))]
    assert len({text for (text,) in named}) == 3


def test_in_memory_a_model_that_learns_encodes_anew(model, calls):
    task, ours = local_task({"default": small_collection()}), search(model)
    before = metrics(ours, task), ours.mteb_model_meta.revision
    assert before == (metrics(ours, task), ours.mteb_model_meta.revision)
    assert calls["documents"] == 150
    assert ours.index_path is None
    with torch.no_grad():
        next(iter(model[1].parameters())).neg_()
    assert_equal(metrics(ours, task), metrics(SearchByTorch(model), task))
    # mteb caches results by name and revision, and those of other weights differ.
    assert re.fullmatch("[0-9a-f]{40}", before[1])
    assert ours.mteb_model_meta.revision != before[1]


def test_an_interrupted_encoding_goes_on_where_it_was(model, calls, tmp_path, monkeypatch):
    monkeypatch.setattr("pylate_flash.beir.ADDITION_BYTES", 1)
    task, add, added = local_task({"default": small_collection()}), Flat.add_documents, []

    def add_once(self, ids, embeddings):
        if added:
            raise KeyboardInterrupt
        added.extend(ids)
        return add(self, ids, embeddings)

    with monkeypatch.context() as patch:
        patch.setattr(Flat, "add_documents", add_once)
        with pytest.raises(KeyboardInterrupt):
            mteb.evaluate(search(model, tmp_path), task, cache=None, encode_kwargs={"batch_size": 4})
    calls.clear()
    result = metrics(search(model, tmp_path), task)
    assert calls["documents"] == 150 - len(added) > 0
    assert_equal(result, metrics(SearchByTorch(model), task))


def test_prompts_are_those_of_mtebs_wrappers(checkpoint, model, wrapper):
    prompts = {"query": "old ", "Local-document": "blue and "}
    model.prompts = dict(prompts)
    wrapper.model_prompts = dict(prompts)
    documents, queries, qrels = small_collection()
    task = local_task({"default": (documents, queries, qrels)})
    prompted = metrics(search(model), task)
    with pylate_flash.registered("mteb"):
        assert_equal(metrics(wrapper, task), prompted)
    model.prompts = {"query": "", "document": ""}
    by_hand = (
        [{"id": row["id"], "text": f"blue and {row['title']} {row['text']}".replace("  ", " ")} for row in documents],
        {id_: f"old {text}" for id_, text in queries.items()},
        qrels,
    )
    assert metrics(search(model), task) != prompted
    assert_equal(metrics(SearchByTorch(model), local_task({"default": by_hand})), prompted)


def test_a_task_of_other_than_texts_is_refused(model, wrapper, monkeypatch):
    task = local_task({"default": small_collection()})
    task.metadata = task.metadata.model_copy(update={"modalities": ["text", "image"]})
    task.load_data()
    corpus = task.dataset["default"]["test"]["corpus"]
    options = {
        "task_metadata": task.metadata, "hf_split": "test", "hf_subset": "default", "encode_kwargs": {}, "num_proc": 1
    }  # fmt: skip
    with pytest.raises(ValueError, match="task Local has modalities text, image; expected text only"):
        search(model).index(corpus, **options)
    with pylate_flash.registered("mteb"):
        wrapper.index(corpus, **options)
    assert wrapper.task_corpus is corpus, "mteb's own code keeps it"
