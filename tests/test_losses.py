"""The losses compared with PyLate's own, scored by PyLate's torch scorer (PyLate's default on a CPU).

In float64: two float32 results differ by rounding, whose size depends on summation order, conditioning and the
processor, whereas in float64 any difference is a bug. The rounding of float32 is measured separately, against float64.
"""

from __future__ import annotations

import copy
import math
from fractions import Fraction

import pylate.losses
import pytest
import torch
from pylate.losses.cached_contrastive import CachedContrastive as PyLateCachedContrastive
from pylate.losses.contrastive import Contrastive as PyLateContrastive
from pylate.losses.contrastive import extract_skiplist_mask
from pylate.losses.distillation import Distillation as PyLateDistillation
from pylate.models import ColBERT
from pylate.scores import XTRScores, xtr_kd_scores
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pylate_flash import losses, registered
from pylate_flash.hosts.pylate.loss_inputs import masks_of
from pylate_flash.register import use_scorer
from pylate_flash.scores import colbert_kd_scores
from pylate_flash.training import contrast
from tests.encoders import WordVectors, Wrapped, tokens

PYLATE = {kind.__name__: kind for kind in (PyLateContrastive, PyLateCachedContrastive, PyLateDistillation)}
QUERIES = ["how to sort a list?", "open a file", "what is a hash table", "sum of squares", "trim white space"]
DOCUMENTS = [
    "Sort the list in place; the sort is stable: equal items keep their order.",
    "Open the file, and return a stream.",
    "A hash table maps keys (hashable objects) to values!",
    "Sum, of, squares: x*x + y*y + z*z.",
    "Strip leading and trailing white-space...",
]
NEGATIVES = [
    "Reverse a list?",
    "Close the file; ignore errors, if any, and return None. Nothing is flushed.",
    "A heap is a binary tree.",
    "The product of: a, b, c.",
    "Split a string on a separator",
]


@pytest.fixture(scope="module")
def encoder(tiny_colbert_path: str) -> ColBERT:
    """PyLate's model in float64, short texts, no dropout: two forward passes give the same embeddings."""
    return ColBERT(tiny_colbert_path, device="cpu", query_length=10, document_length=20).eval().double()


@pytest.fixture
def model(encoder: ColBERT, monkeypatch: pytest.MonkeyPatch) -> ColBERT:
    """The encoder with gradients cleared; its flags are restored after the test."""
    encoder.zero_grad()
    monkeypatch.setattr(encoder, "do_query_expansion", True)
    return encoder


def contrastive_batch(model: ColBERT, columns: int = 3, size: int = 5) -> list[dict[str, torch.Tensor]]:
    batch = [model.tokenize(QUERIES[:size], is_query=True, pad=True)]
    for texts in (DOCUMENTS, NEGATIVES)[: columns - 1]:
        batch.append(model.tokenize(texts[:size], is_query=False, pad=True))
    return batch


def least_spread(model: ColBERT, features: list[dict[str, torch.Tensor]]) -> float:
    """Smallest range of scores over queries (max - min), by which min-max normalisation divides."""
    masks = extract_skiplist_mask(features, model.skiplist)
    with torch.no_grad():
        queries, documents = (nn.functional.normalize(model(dict(f))["token_embeddings"], dim=-1) for f in features)
    scores = colbert_kd_scores(
        queries,
        documents.unflatten(0, (len(queries), -1)),
        None if model.do_query_expansion else masks[0],
        masks[1].unflatten(0, (len(queries), -1)),
    )
    return (scores.amax(dim=1) - scores.amin(dim=1)).min().item()


def distillation_batch(model: ColBERT) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
    candidates = [text for pair in zip(DOCUMENTS, NEGATIVES, reversed(DOCUMENTS), strict=True) for text in pair]
    features = [model.tokenize(texts, is_query=texts is QUERIES, pad=True) for texts in (QUERIES, candidates)]
    return features, torch.linspace(0, 3, 15).reshape(5, 3).sin()


def batch_for(name: str, model: ColBERT) -> tuple:
    return distillation_batch(model) if name == "Distillation" else (contrastive_batch(model), None)


def value_and_gradients(loss: nn.Module, features: list, labels: torch.Tensor | None = None) -> tuple:
    loss.model.zero_grad()
    # PyLate's cached loss keeps a reference to the features until the backward.
    value = loss(copy.deepcopy(features), labels)
    value.backward()
    gradients = {name: p.grad.clone() for name, p in loss.model.named_parameters() if p.grad is not None}
    assert gradients
    return value.detach(), gradients


def pylates(name: str, model: nn.Module, features: list, labels: torch.Tensor | None = None, **arguments) -> tuple:
    """Value and gradients of PyLate's loss; its averaged cached loss has the sum's gradient, which is divided here."""
    value, gradients = value_and_gradients(PYLATE[name](model, **arguments), features, labels)
    if name == "CachedContrastive" and arguments.get("size_average", True):
        size = len(features[0]["input_ids"])
        gradients = {name: gradient / size for name, gradient in gradients.items()}
    return value, gradients


def assert_same_value(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    """A float32 loss of float64 embeddings agrees with PyLate's, which is float64."""
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=1e-7)


def assert_same(ours: tuple, theirs: tuple, tolerance: float = 1e-5) -> None:
    """Values and all parameter gradients agree; gradients that cancel to rounding noise agree within that noise."""
    assert_same_value(ours[0], theirs[0], tolerance)
    assert ours[1].keys() == theirs[1].keys()
    noise = 0.01 * tolerance * torch.stack([g.norm() for g in theirs[1].values()]).norm()
    for name, expected in theirs[1].items():
        error = (ours[1][name] - expected).norm()
        assert error <= tolerance * expected.norm() + noise, f"{name}: {error} of {expected.norm()}"


def no_masked_token_wins(model: ColBERT, features: list) -> bool:
    """Whether every query token's best unmasked similarity is positive, so that both maskings score alike."""
    with torch.no_grad():
        queries, *documents = (nn.functional.normalize(model(dict(f))["token_embeddings"], dim=-1) for f in features)
    masks = extract_skiplist_mask(features, model.skiplist)[1:]
    return all(
        (torch.einsum("qsd,ntd->qnst", queries, column) - 9 * (~mask)[None, :, None]).amax(-1).min() > 0
        for column, mask in zip(documents, masks, strict=True)
    )


CONFIGURATIONS = [
    ("Contrastive", {}),
    ("Contrastive", {"score_mini_batch_size": 2}),
    ("Contrastive", {"size_average": False}),
    ("Contrastive", {"temperature": 0.05}),
    ("CachedContrastive", {"mini_batch_size": 2}),
    ("CachedContrastive", {"mini_batch_size": 3, "score_mini_batch_size": 1, "size_average": False}),
    ("CachedContrastive", {"mini_batch_size": 2, "temperature": 0.05}),
    ("Distillation", {}),
    ("Distillation", {"normalize_scores": False}),
    ("Distillation", {"normalize_scores": False, "size_average": False}),
]


@pytest.mark.parametrize("expansion", [True, False], ids=["expansion", "no-expansion"])
@pytest.mark.parametrize(("name", "arguments"), CONFIGURATIONS)
def test_value_and_gradients_are_pylates(model: ColBERT, name: str, arguments: dict, expansion: bool) -> None:
    model.do_query_expansion = expansion
    features, labels = batch_for(name, model)
    assert not all(mask.all() for mask in extract_skiplist_mask(features, model.skiplist)[1:])
    # Our scores are rounded to float32, by up to 2^-21 for scores of 8 to 16: 2^-19 of this range.
    assert name != "Distillation" or least_spread(model, features) > 0.25
    theirs = pylates(name, model, features, labels, **arguments)

    ours = getattr(losses, name)(model, **arguments, masking="zero")
    assert isinstance(ours, PYLATE[name])
    assert_same(value_and_gradients(ours, features, labels), theirs)

    assert no_masked_token_wins(model, features)
    assert_same(value_and_gradients(getattr(losses, name)(model, **arguments), features, labels), theirs)


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_without_hard_negatives(model: ColBERT, name: str) -> None:
    features = contrastive_batch(model, columns=2)
    theirs = pylates(name, model, features)
    assert_same(value_and_gradients(getattr(losses, name)(model), features), theirs)


@pytest.mark.parametrize("scorer", ["pylate_flash", "torch"])
def test_pylates_cached_gradient_is_that_of_the_sum(model: ColBERT, scorer: str) -> None:
    """As documented: our gradient is that of the mean, and that of the sum when registered as PyLate's class."""
    features = contrastive_batch(model)
    arguments = {"masking": "zero", "scorer": scorer}
    mean, total = (value_and_gradients(losses.Contrastive(model, size_average=s), features) for s in (True, False))
    assert_same(value_and_gradients(losses.CachedContrastive(model, mini_batch_size=2, **arguments), features), mean)
    with registered():
        loss = pylate.losses.CachedContrastive(model, mini_batch_size=2, **arguments)
        assert_same(value_and_gradients(loss, features), (mean[0], total[1]))
    value, gradients = value_and_gradients(PyLateCachedContrastive(model, mini_batch_size=2), features)
    assert_same((value, gradients), (mean[0], total[1]))


@pytest.mark.parametrize("name", PYLATE)
def test_the_skiplist_matters(model: ColBERT, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding common words to the skiplist changes the loss to PyLate's value: the tests above depend on it."""
    features, labels = batch_for(name, model)
    before = getattr(losses, name)(model, masking="zero")(copy.deepcopy(features), labels)
    monkeypatch.setattr(model, "skiplist", [*model.skiplist, *features[1]["input_ids"][:, 2::3].unique().tolist()])
    ours = value_and_gradients(getattr(losses, name)(model, masking="zero"), features, labels)
    assert not torch.isclose(before, ours[0], rtol=1e-4)
    assert_same(ours, pylates(name, model, features, labels))


@pytest.mark.parametrize("skiplist", [[], [0], [7, 3, 7], list(range(5, 40))])
@pytest.mark.parametrize("expansion", [True, False])
def test_the_tokens_that_are_scored_are_pylates(skiplist: list[int], expansion: bool) -> None:
    model = WordVectors([[1.0]])
    model.skiplist, model.do_query_expansion = skiplist, expansion
    torch.manual_seed(0)
    columns = [
        {"input_ids": torch.randint(0, 50, (4, length)), "attention_mask": torch.randint(0, 2, (4, length))}
        for length in (6, 9, 11)
    ]
    expected = extract_skiplist_mask(columns, skiplist)
    queries, documents = masks_of(losses.Contrastive(model), columns)
    assert queries is None if expansion else torch.equal(queries, expected[0])
    for actual, mask in zip(documents, expected[1:], strict=True):
        assert torch.equal(actual, mask)


def two_documents() -> tuple[WordVectors, list[dict[str, torch.Tensor]]]:
    """Document 0 has similarity -1 and a masked token: -1 under "exclude", 0 under "zero"; document 1 has 0.6."""
    batch = [tokens([0], [0]), tokens([1, 9], [2, 2], masked=9)]
    batch[1]["input_ids"].clamp_(max=2)
    return WordVectors([[1.0, 0.0], [-1.0, 0.0], [0.6, 0.8]]), batch


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_masking_decides_where_a_masked_token_would_win(name: str) -> None:
    model, batch = two_documents()

    def expected(first: float) -> float:
        scores = torch.tensor([first, 0.6], dtype=torch.float64)
        return float(torch.logsumexp(scores, 0) - scores.mean())

    for masking, first in (("exclude", -1.0), ("zero", 0.0)):
        loss = getattr(losses, name)(model, masking=masking)
        assert math.isclose(loss(copy.deepcopy(batch)).item(), expected(first), rel_tol=1e-6)
    assert math.isclose(PYLATE[name](model)(copy.deepcopy(batch)).item(), expected(0.0), rel_tol=1e-6)


def test_masking_decides_in_distillation() -> None:
    model, (_, documents) = two_documents()
    inputs = [tokens([0]), documents], torch.tensor([[-1.0, 0.6]])
    arguments = {"normalize_scores": False}
    assert abs(losses.Distillation(model, **arguments)(*inputs).item()) < 1e-6
    zero = losses.Distillation(model, **arguments, masking="zero")(*inputs).item()
    assert zero > 0.05
    assert math.isclose(zero, PyLateDistillation(model, **arguments)(*inputs).item(), rel_tol=1e-5)


@pytest.mark.parametrize("name", PYLATE)
def test_the_models_flags_are_followed_when_the_loss_is_called(name: str) -> None:
    """Flags may change after construction, and the model may be wrapped; the loss's own keywords take precedence."""
    (model, batch), labels = two_documents(), None
    if name == "Distillation":
        batch[1] = {key: value.repeat(2, 1) for key, value in batch[1].items()}
        labels = torch.tensor([[0.0, 1.0], [2.0, 1.0]])
    loss = getattr(losses, name)(model, **({"normalize_scores": False} if name == "Distillation" else {}))
    excluded = loss(batch, labels).item()

    model.scorer, model.masking = "pylate_flash", "zero"
    zeroed = loss(batch, labels).item()
    assert not math.isclose(excluded, zeroed, rel_tol=1e-3)
    loss.model = Wrapped(model)
    assert loss(batch, labels).item() == zeroed
    loss.masking = "exclude"
    assert loss(batch, labels).item() == excluded

    # "torch" is PyLate's own code, which scores masked tokens as 0 whatever `masking` is.
    model.scorer = "torch"
    assert math.isclose(loss(batch, labels).item(), zeroed, rel_tol=1e-6)
    loss.scorer = "pylate_flash"
    assert loss(batch, labels).item() == excluded

    # A scorer requested by name that cannot run here raises, with no fallback.
    loss.scorer = None
    model.scorer = "flash"
    with pytest.raises(RuntimeError, match="flash"):
        loss(batch, labels)
    # "auto" names no scorer: the enclosing `use_scorer` block decides.
    model.scorer = "auto"
    with use_scorer("torch"):
        assert math.isclose(loss(batch, labels).item(), zeroed, rel_tol=1e-6)


def test_own_score_metric_is_called_as_pylate_calls_it(model: ColBERT) -> None:
    calls = []

    def score_metric(*args, **kwargs):
        calls.append([(value.shape, value.dtype) for value in args] + sorted(kwargs))
        return XTRScores(k=4)(*args, **kwargs)

    model.do_query_expansion = False
    features = contrastive_batch(model)
    for name in ("Contrastive", "CachedContrastive"):
        theirs = pylates(name, model, features, score_metric=score_metric)
        ours = value_and_gradients(getattr(losses, name)(model, score_metric), features)
        assert_same(ours, theirs, tolerance=1e-14)
        assert calls[: len(calls) // 2] == calls[len(calls) // 2 :] != []
        calls.clear()

    features, labels = distillation_batch(model)
    metric = lambda *args, **kwargs: xtr_kd_scores(*args, **kwargs) / 2  # noqa: E731
    assert torch.equal(
        losses.Distillation(model, metric)(features, labels), PyLateDistillation(model, metric)(features, labels)
    )


@pytest.mark.parametrize("scorer", ["pylate_flash", "torch"])
@pytest.mark.parametrize("name", PYLATE)
def test_in_bfloat16_autocast(model: ColBERT, name: str, scorer: str) -> None:
    """The loss is a finite float32 near float32's, also where the second pass of GradCache runs outside autocast."""
    # Autocast leaves float64 unchanged, so use float32.
    model = copy.deepcopy(model).float()
    features, labels = batch_for(name, model)
    # Without min-max normalisation, which divides by small score ranges and amplifies their rounding.
    arguments = {"CachedContrastive": {"mini_batch_size": 2}, "Distillation": {"normalize_scores": False}}
    loss = getattr(losses, name)(model, **arguments.get(name, {}), scorer=scorer)
    expected, gradients = value_and_gradients(loss, features, labels)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(copy.deepcopy(features), labels)
    value.backward()
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.detach(), expected, rtol=0.03, atol=0.01)
    ours = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    theirs = torch.cat([g.flatten() for g in gradients.values()])
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.95


@pytest.mark.parametrize("name", PYLATE)
def test_batch_of_one(model: ColBERT, name: str) -> None:
    if name == "Distillation":
        # The query with the largest range of scores.
        features, labels = distillation_batch(model)
        features = [{k: v[-size:] for k, v in f.items()} for f, size in zip(features, (1, 3), strict=True)]
        labels = labels[-1:]
        assert least_spread(model, features) > 1
    else:
        features, labels = contrastive_batch(model, size=1), None
    theirs = pylates(name, model, features, labels)
    assert_same(value_and_gradients(getattr(losses, name)(model), features, labels), theirs)
    if name != "Distillation":
        alone = getattr(losses, name)(model)(contrastive_batch(model, columns=2, size=1))
        assert alone.item() == 0


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_columns_of_different_padded_lengths(model: ColBERT, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from tokenizing without `pad`, not from PyLate's collator; padding does not change the loss."""
    monkeypatch.setattr(model, "tokenizer", copy.deepcopy(model.tokenizer))
    model.tokenizer.pad_token = "[unused5]"
    texts = (DOCUMENTS[1:3], NEGATIVES[2:4])
    queries = model.tokenize(QUERIES[:2], is_query=True)
    ragged = [model.tokenize(column, is_query=False) for column in texts]
    padded = [model.tokenize(column, is_query=False, pad=True) for column in texts]
    assert len({column["input_ids"].shape for column in (*ragged, padded[0])}) == 3
    theirs = pylates(name, model, [queries, *padded])
    assert_same(value_and_gradients(getattr(losses, name)(model), [queries, *ragged]), theirs)
    # The features that PyLate's code encodes are padded with the padding token.
    encoded: list[dict] = []
    with model[0].register_forward_pre_hook(lambda _, arguments: encoded.append(arguments[0])):
        value_and_gradients(getattr(losses, name)(model, scorer="torch"), [queries, *ragged])
    padding = [column["input_ids"][column["attention_mask"] == 0] for column in encoded]
    assert torch.cat(padding).unique().tolist() == [model.tokenizer.pad_token_id] != [0]


def test_evaluation_without_gradients(model: ColBERT) -> None:
    features = contrastive_batch(model)
    with torch.no_grad():
        expected = PyLateContrastive(model)(features)
        for name in ("Contrastive", "CachedContrastive"):
            assert_same_value(getattr(losses, name)(model)(features), expected)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", PYLATE)
def test_columns_are_not_changed(model: ColBERT, name: str, fused: bool) -> None:
    features, labels = batch_for(name, model)
    before = [dict(column) for column in features]
    getattr(losses, name)(model, fuse_projection=fused)(features, labels)
    assert [list(column) for column in features] == [list(column) for column in before]
    assert all(column[key] is old[key] for column, old in zip(features, before, strict=True) for key in old)


class Halved(losses.CachedContrastive):
    def calculate_loss(self, *args, **kwargs) -> torch.Tensor:
        return super().calculate_loss(*args, **kwargs) / 2


def test_an_overridden_method_of_the_cached_loss_is_called(model: ColBERT) -> None:
    features = contrastive_batch(model)
    whole, half = (kind(model)(features) for kind in (losses.CachedContrastive, Halved))
    torch.testing.assert_close(half, whole / 2)
    with pytest.raises(ValueError, match="mini_batch_num_tokens=9: needs.* or a calculate_loss of its own"):
        Halved(model, mini_batch_num_tokens=9)(features)


@pytest.mark.parametrize("scorer", ["torch", "pylate_flash"])
@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_a_fraction_as_temperature(model: ColBERT, name: str, scorer: str) -> None:
    loss, features = getattr(losses, name), contrastive_batch(model)
    values = [loss(model, scorer=scorer, temperature=number)(features) for number in (Fraction(1, 4), 0.25)]
    assert values[0] == values[1]


@pytest.mark.parametrize("name", PYLATE)
def test_wrong_arguments(model: ColBERT, name: str) -> None:
    loss = getattr(losses, name)
    with pytest.raises(ValueError, match="scorer.*'pylate_flash'.*got 'cuda'"):
        loss(model, scorer="cuda")
    with pytest.raises(ValueError, match="masking.*'exclude'.*got 'none'"):
        loss(model, masking="none")
    with pytest.raises(ValueError, match="score_metric.*scorer='torch'"):
        loss(model, XTRScores(), scorer="torch")
    with pytest.raises(TypeError, match="positional"):
        loss(*[None] * 9, "torch")
    with pytest.raises(TypeError, match="model: str; expected a ColBERT model"):
        loss("bert-base-uncased")
    with pytest.raises(TypeError, match="score_metric: str; expected a function"):
        loss(model, "maxsim")
    for flag in ("size_average", "normalize_scores" if name == "Distillation" else "gather_across_devices"):
        with pytest.raises(TypeError, match=f"{flag}: 'no'; expected True or False"):
            loss(model, **{flag: "no"})


def test_wrong_batches(model: ColBERT) -> None:
    query, documents, _ = contrastive_batch(model)
    for name in ("Contrastive", "CachedContrastive"):
        loss = getattr(losses, name)(model)
        with pytest.raises(ValueError, match="sentence_features: got only the queries"):
            loss([query])
        with pytest.raises(ValueError, match=r"sentence_features: columns of \[5, 4\] texts"):
            loss([query, {key: value[:4] for key, value in documents.items()}])
        with pytest.raises(ValueError, match="sentence_features: column 0 has no texts"):
            loss([{key: value[:0] for key, value in column.items()} for column in (query, documents)])
        with pytest.raises(ValueError, match="sentence_features: no columns"):
            loss([])
        shorter = documents | {"attention_mask": documents["attention_mask"][:, :-1]}
        for column in (shorter, {key: value[0] for key, value in documents.items()}):
            with pytest.raises(ValueError, match=r"input_ids and attention_mask of column 1 have shapes .*; expected"):
                loss([query, column])
        for batch, message in (
            (query, "dict; expected a list of tokenized columns"),
            (QUERIES, "column 0 is a str; expected a dictionary of tensors"),
            ([query, {"input_ids": documents["input_ids"]}], "attention_mask of column 1 is a NoneType"),
        ):
            with pytest.raises(TypeError, match=f"sentence_features: {message}"):
                loss(batch)
    features, labels = distillation_batch(model)
    fewer = [features[0], {key: value[:14] for key, value in features[1].items()}]
    for arguments, message in (
        (([*features, documents], labels), "sentence_features: 3 columns"),
        ((features, labels[:, 0]), r"labels: shape \(5,\)"),
        ((features, None), "labels: NoneType"),
        ((fewer, labels), "for 5 queries and 14 candidates"),
    ):
        with pytest.raises(ValueError, match=message):
            losses.Distillation(model)(*arguments)


class Launches(TorchDispatchMode):
    """Record the names of dispatched ops, except views and detach."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function.overloadpacket.__name__ != "detach":
            self.names.append(function.overloadpacket.__name__)
        return result


def test_between_embeddings_and_operation_there_is_the_mask_of_the_documents(
    model: ColBERT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other op is launched: no labels, and no copy, cast or normalisation of the embeddings."""
    columns = contrastive_batch(model, columns=2)
    columns = [{**features, "attention_mask": features["attention_mask"].bool()} for features in columns]
    embeddings = [model(dict(features))["token_embeddings"].detach() for features in columns]
    arguments = iter(embeddings)
    monkeypatch.setattr(type(model), "forward", lambda self, features: {"token_embeddings": next(arguments)})
    calls = []

    def operation(queries, **options):
        calls.append((queries, options))
        return queries.new_zeros(())

    monkeypatch.setattr(contrast, "maxsim_cross_entropy", operation)
    loss = losses.Contrastive(model, scorer="pylate_flash")
    with Launches() as launches:
        loss(columns)
    assert launches.names == ["clamp", "take", "bitwise_and", "new_zeros"]
    ((queries, options),) = calls
    assert queries is embeddings[0]
    assert options["documents"] is embeddings[1]
    assert options["labels"] is None
    assert torch.equal(options["documents_mask"], masks_of(loss, columns)[1][0])
