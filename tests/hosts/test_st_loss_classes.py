"""hosts.sentence_transformers.losses: its classes against the host's, and their additional options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.multi_vector_encoder import losses as host
from sentence_transformers.multi_vector_encoder import scoring
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import Tensor, nn

from pylate_flash.hosts import sentence_transformers as ours
from pylate_flash.hosts.sentence_transformers import losses, mean_colbert_scores
from pylate_flash.hosts.sentence_transformers.loss_inputs import reduction_of, size_of
from pylate_flash.ops import cross_entropy_reference
from pylate_flash.training import contrast
from pylate_flash.training.mini_batches import scored_tokens
from tests.hosts.test_st_losses import (
    CACHED,
    CASES,
    IN_BATCH,
    assert_close,
    columns,
    value_and_gradients,
)

KL, MARGINS = "MultiVectorDistillKLDivLoss", "MultiVectorMarginMSELoss"
# Class, columns of documents, and columns of labels.
FOUR = [(IN_BATCH, 2, 0), (CACHED, 2, 0), (KL, 3, 3), (MARGINS, 3, 3)]

MEAN_SCORES = {
    IN_BATCH: scoring.mean_colbert_scores,
    CACHED: scoring.mean_colbert_scores,
    KL: scoring.mean_colbert_kd_scores,
    MARGINS: scoring.mean_colbert_scores_pairwise,
}


@pytest.fixture
def step(tiny_encoder):
    """Value and gradients of a loss, the host's or ours, on the tiny model."""

    def of(module, name, features, labels=None, **arguments):
        return value_and_gradients(getattr(module, name)(tiny_encoder, **arguments), tiny_encoder, features, labels)

    return of


def labels_of(count):
    return torch.randn(5, count, generator=torch.Generator().manual_seed(0)) if count else None


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_the_hosts(case, tiny_encoder, texts):
    name, arguments, count, n_labels = CASES[case]
    features, labels = columns(tiny_encoder, texts, count), labels_of(n_labels)
    expected = value_and_gradients(getattr(host, name)(tiny_encoder, **arguments), tiny_encoder, features, labels)
    loss = getattr(losses, name)(tiny_encoder, **arguments)
    assert isinstance(loss, getattr(host, name))
    assert_close(value_and_gradients(loss, tiny_encoder, features, labels), expected)
    with torch.no_grad():
        value = loss(features, labels)
    assert value.item() == pytest.approx(expected[0].item(), rel=1e-5)
    assert not value.requires_grad
    assert loss.get_config_dict() == getattr(host, name)(tiny_encoder, **arguments).get_config_dict()


@pytest.mark.parametrize(("name", "count", "n_labels"), FOUR)
def test_a_loss_is_one_operation(name, count, n_labels, tiny_encoder, texts, monkeypatch):
    """No function of the host computes its similarities; the cached loss takes packed documents."""
    recorded: list[dict[str, Any]] = []
    for operation in ("maxsim_cross_entropy", "maxsim_kl_divergence", "maxsim_margin_mse"):
        own = getattr(contrast, operation)

        def call(*arguments, _own=own, **options):
            recorded.append(options)
            return _own(*arguments, **options)

        monkeypatch.setattr(contrast, operation, call)
    loss = getattr(losses, name)(tiny_encoder)
    monkeypatch.setattr(loss, "similarity_fct", MEAN_SCORES[name])
    loss(columns(tiny_encoder, texts, count), labels_of(n_labels))
    (options,) = recorded
    assert (options["reduction"], options["empty_score"]) == ("mean", -1e9)
    assert ("documents_cu_seqlens" in options) == (name == CACHED)


@pytest.mark.parametrize(("name", "count", "n_labels"), FOUR)
@pytest.mark.parametrize("prefix", ["", "mean_"])
def test_scores_of_another_loss_are_called(prefix, name, count, n_labels, tiny_encoder):
    """Scores of candidates or pairs are not those of a batch: their result for a batch is left to the host."""
    for module in (scoring, ours):
        own = MEAN_SCORES[name].__name__.removeprefix("mean_")
        for scores in ("colbert_scores", "colbert_kd_scores", "colbert_scores_pairwise"):
            loss = getattr(losses, name)(tiny_encoder, similarity_fct=getattr(module, prefix + scores))
            expected = (prefix.removesuffix("_") or "sum") if scores == own else None
            assert reduction_of(loss) == expected


@pytest.mark.parametrize("number", [np.float32(2), np.float64(2), np.int64(2)], ids=repr)
@pytest.mark.parametrize("name", [IN_BATCH, CACHED, KL])
def test_numbers_of_other_types(number, name, tiny_encoder, texts, step):
    argument = "temperature" if name == KL else "scale"
    features, labels = columns(tiny_encoder, texts, 3 if name == KL else 2), labels_of(3 if name == KL else 0)
    assert_close(*(step(losses, name, features, labels, **{argument: arguments}) for arguments in (number, 2.0)))


@pytest.mark.parametrize("labels", [(5, 3), (5, 2), (5,)], ids=["scores", "margins", "one margin"])
def test_labels_of_margins(labels, tiny_encoder, texts, step):
    features = columns(tiny_encoder, texts, 3 if len(labels) == 2 else 2)
    teacher = torch.randint(-4, 5, labels, generator=torch.Generator().manual_seed(1))
    for values in (teacher, teacher.double()):
        assert_close(*(step(kind, MARGINS, features, values) for kind in (losses, host)))


@pytest.mark.parametrize("expansion", [False, True])
@pytest.mark.parametrize("arguments", [{"mini_batch_size": 2}, {"mini_batch_num_tokens": 30}])
def test_the_cached_loss_sorts_texts_and_cuts_padding(arguments, expansion, tiny_encoder, texts, step):
    if expansion:
        tiny_encoder[0].query_expansion = {"strategy": "fixed", "length": 20, "attend": False}
    queries = tiny_encoder.preprocess(texts(1, 7, 18), task="query")
    assert ("query_expansion_positions" in queries) == expansion
    documents = [tiny_encoder.preprocess(texts(seed, 7, 25), task="document") for seed in (2, 3)]
    features = [queries, *documents]
    expected = step(losses, IN_BATCH, features)
    assert_close(step(host, IN_BATCH, features), expected)
    shapes: list[tuple[int, int]] = []
    hook = tiny_encoder.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0]["input_ids"].shape)))
    assert_close(step(losses, CACHED, features, **arguments), expected)
    hook.remove()
    # Every text is encoded twice, in forwards of at most the requested texts, or tokens with padding.
    assert sum(rows for rows, _ in shapes) == 2 * 3 * 7
    if "mini_batch_size" in arguments:
        assert max(rows for rows, _ in shapes) == 2
    else:
        assert all(rows == 1 or rows * length <= 30 for rows, length in shapes)
    assert sum(rows * length for rows, length in shapes) < 2 * sum(f["input_ids"].numel() for f in features)


@pytest.mark.parametrize("task", ["query", "document"])
def test_which_tokens_are_scored_is_known_before_the_forward(task, tiny_encoder, texts):
    tiny_encoder[0].query_expansion = {"strategy": "fixed", "length": 12, "attend": False}
    tiny_encoder[3].skiplist_words = [".", "the"]
    tiny_encoder[3].resolve_with_tokenizer(tiny_encoder.tokenizer)
    features = tiny_encoder.preprocess([f"the {text} ." for text in texts(4, 6)], task=task)
    actual = scored_tokens(tiny_encoder, {**features, "task": task})
    expected = tiny_encoder(dict(features), task=task)["attention_mask"].bool()
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, features["attention_mask"].bool())
    # Not known where texts are not rows of a batch, nor where a module changes the tokens.
    for other in ({"modality": "image"}, {"cu_seq_lens_q": torch.arange(7)}, {"pixel_values": torch.zeros(3, 2)}):
        assert scored_tokens(tiny_encoder, {**features, "task": task, **other}) is None
    tiny_encoder.append(HierarchicalTokenPooling(2))
    assert scored_tokens(tiny_encoder, {**features, "task": task}) is None


def test_a_model_that_pools_tokens_goes_by_the_hosts_code(tiny_encoder, texts, step):
    """The host's code calls the loss of embeddings, which has this package's options."""
    features = columns(tiny_encoder, texts, 2)
    tiny_encoder.append(HierarchicalTokenPooling(2))
    assert_close(*(step(kind, CACHED, features, mini_batch_size=2) for kind in (losses, host)))

    def others(columns):
        return torch.arange(10) // 5 == torch.ones(5, 1)

    result = step(losses, CACHED, features, mini_batch_size=2, exclude=others)
    assert_close(result, step(host, CACHED, features[:2], mini_batch_size=2))
    with pytest.raises(ValueError, match="fuse_projection: .*HierarchicalTokenPooling, is not a Dense layer"):
        losses.CachedMultiVectorMultipleNegativesRankingLoss(tiny_encoder, fuse_projection=True)


def excluded(columns):
    """An exclusion mask that differs for every query and document."""
    size = len(columns[0]["input_ids"])
    out = torch.arange(size).unsqueeze(1) * 7 + torch.arange(size * (len(columns) - 1)) * 3
    return (out % 5 == 0) & (torch.arange(size).unsqueeze(1) != torch.arange(size * (len(columns) - 1)))


@pytest.mark.parametrize("name", [IN_BATCH, CACHED])
@pytest.mark.parametrize(
    "options",
    [
        {"margin": 0.2},
        {"margin": 0.0},
        {"margin": -0.5, "symmetric": True},
        {"exclude": excluded, "scale": 3.0},
        {"symmetric": True},
    ],
    ids=["margin", "margin of 0", "negative margin", "exclude", "symmetric"],
)
def test_options_are_those_of_the_definition(name, options, tiny_encoder, texts, step):
    # Long enough that the cached loss reorders them.
    features = [tiny_encoder.preprocess(texts(seed, 5, 30)) for seed in (20, 21, 22)]
    scale = options.get("scale", 1.0)

    class Definition(nn.Module):
        """The definition over the host's scores, the documents of the first column first."""

        def forward(self, columns, labels):
            queries, *documents = [
                tiny_encoder(column, task="document" if index else "query") for index, column in enumerate(columns)
            ]
            scores = [
                scoring.colbert_scores(
                    queries["token_embeddings"],
                    column["token_embeddings"].unsqueeze(1),
                    queries_mask=queries["attention_mask"],
                    documents_mask=column["attention_mask"].unsqueeze(1),
                )
                for column in documents
            ]
            return cross_entropy_reference(
                torch.cat(scores, dim=1),
                exclude=excluded(columns) if "exclude" in options else None,
                margin=options.get("margin"),
                symmetric=options.get("symmetric", False),
                temperature=1 / scale,
            )

    expected = value_and_gradients(Definition(), tiny_encoder, features, None)
    arguments = {"mini_batch_size": 2} if name == CACHED else {}
    loss = getattr(losses, name)(tiny_encoder, **arguments, **options)
    assert_close(value_and_gradients(loss, tiny_encoder, features, None), expected)
    plain, _ = step(losses, name, features, scale=scale, **arguments)
    assert plain != pytest.approx(expected[0].item(), rel=1e-3)
    named = options.keys() - {"scale", "exclude"}
    assert {name: loss.get_config_dict()[name] for name in named} == {name: options[name] for name in named}


@pytest.mark.parametrize("side", ["right", "left"])
def test_duplicates(tiny_encoder, side, monkeypatch):
    """Also in another column, padded to another length."""
    monkeypatch.setattr(tiny_encoder.tokenizer, "padding_side", side)
    batch = [["sea", "cat", "old"], ["a cat", "a dog", "a cat"], ["the big red fish", "a dog", "new"]]
    features = [tiny_encoder.preprocess(column) for column in batch]
    assert losses.duplicates(features).nonzero().tolist() == [[0, 2], [1, 4], [2, 0]]
    loss, cached = (
        getattr(losses, name)(tiny_encoder, exclude=losses.duplicates, mini_batch_size=2) for name in (IN_BATCH, CACHED)
    )
    assert cached(features).item() == pytest.approx(loss(features).item(), rel=1e-5)
    assert loss.get_config_dict()["exclude"].endswith("duplicates")


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.text("ab", max_size=3), st.text("ab", max_size=3)), min_size=1, max_size=7), st.integers(0, 2)
)
def test_duplicates_are_texts_of_the_same_tokens(pairs, padding):
    """Whatever the ids at masked positions, and the lengths of the columns."""

    def column(texts, longest):
        mask = torch.tensor([[position < len(text) for position in range(longest)] for text in texts])
        ids = torch.tensor(
            [[ord(text[position]) if position < len(text) else 7 for position in range(longest)] for text in texts]
        )
        return {"input_ids": ids, "attention_mask": mask.long()}

    positives, negatives = zip(*pairs, strict=True)
    actual = losses.duplicates([column(positives, 3), column(positives, 3), column(negatives, 3 + padding)])
    documents = [*positives, *negatives]
    expected = [[i != j and documents[j] == text for j in range(len(documents))] for i, text in enumerate(positives)]
    assert actual.tolist() == expected


def test_sizes_of_columns_of_other_forms():
    pixels, ids = torch.zeros(12, 3), torch.zeros(4, 5)
    assert size_of({"pixel_values": pixels, "input_ids": ids, "prompt_length": torch.tensor(2)}) == 4
    assert size_of({"input_ids": torch.zeros(1, 20), "cu_seq_lens_q": torch.tensor([0, 5, 20])}) == 2
    assert size_of({"prompt_length": torch.tensor(2), "pixel_values": pixels}) == 12


@pytest.mark.parametrize("name", [IN_BATCH, CACHED])
def test_a_learned_scale(name, tiny_encoder, texts, step):
    mine, theirs = (nn.Parameter(torch.tensor(0.7)) for _ in range(2))
    for kind, scale in ((losses, mine), (host, theirs)):
        step(kind, name, columns(tiny_encoder, texts, 1), scale=scale)
    assert mine.grad.item() == pytest.approx(theirs.grad.item(), rel=1e-5)
    assert abs(theirs.grad.item()) > 1e-3


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("argument", ["temperature", "teacher_temperature"])
def test_a_teachers_temperature_may_be_a_tensor(argument, learned, tiny_encoder, texts, step):
    features, labels = columns(tiny_encoder, texts, 3), labels_of(3)
    results, gradients = [], []
    for module in (losses, host):
        temperature = nn.Parameter(torch.tensor(0.5), requires_grad=learned)
        results.append(step(module, KL, features, labels, **{argument: temperature}))
        gradients.append(temperature.grad.item() if learned else 0.0)
    assert_close(*results)
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-5)


def test_cached_texts_keep_their_dropout(tiny_encoder, texts):
    for module in tiny_encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    tiny_encoder.train()
    outputs: list[Tensor] = []
    hook = tiny_encoder.register_forward_hook(
        lambda module, arguments, output: outputs.append(output["token_embeddings"].detach().clone())
    )
    loss = losses.CachedMultiVectorMultipleNegativesRankingLoss(tiny_encoder, mini_batch_size=3)
    value = loss(columns(tiny_encoder, texts, 2))
    torch.rand(5)
    value.backward()
    hook.remove()
    half = len(outputs) // 2
    assert half > 3
    assert all(torch.equal(*pair) for pair in zip(outputs[:half], outputs[half:], strict=True))
    assert loss(columns(tiny_encoder, texts, 2)) != value
    with pytest.raises(RuntimeError, match="the gradient of a cached loss is computed once"):
        value.backward()


def test_documents_without_tokens(tiny_encoder, step):
    """All tokens are skipped: such a document scores -1e9, and if it is the positive, its query learns nothing."""
    tiny_encoder[3].skiplist_tasks = ["document"]
    tiny_encoder[3].skiplist_words = [".", "[CLS]", "[SEP]"]
    tiny_encoder[3].resolve_with_tokenizer(tiny_encoder.tokenizer)
    features = [tiny_encoder.preprocess(column) for column in (["cat", "dog"], ["a cat", "old dog"], [".", "sea"])]
    for name in (IN_BATCH, CACHED):
        assert_close(*(step(kind, name, features) for kind in (losses, host)))
        swapped = [features[0], features[2], features[1]]
        value = getattr(losses, name)(tiny_encoder)(swapped)
        assert value.item() == pytest.approx(getattr(host, name)(tiny_encoder)(swapped).item(), rel=1e-5)
        assert value > 1e8


FORMS: dict[str, Callable[[list[nn.Module]], list[nn.Module]]] = {
    "as loaded": lambda modules: modules,
    "mask first": lambda modules: [modules[0], modules[1], modules[3], modules[2]],
    "not normalised": lambda modules: [modules[0], modules[1], modules[3]],
    "two layers, biased": lambda modules: [
        modules[0], dense(32, 24), dense(24, 16, use_residual=True), *modules[2:]
    ],
}  # fmt: skip


def dense(*sizes, activation=None, **options):
    torch.manual_seed(0)
    return Dense(*sizes, activation_function=activation, module_input_name="token_embeddings", **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "count", "n_labels"), FOUR)
def test_a_fused_projection_changes_nothing(name, count, n_labels, form, tiny_encoder, texts, monkeypatch):
    model = MultiVectorEncoder(modules=FORMS[form](list(tiny_encoder.children())), device="cpu")
    features, labels = columns(model, texts, count), labels_of(n_labels)
    if form == "not normalised":
        # Scores are as large as the hidden states then.
        with torch.no_grad():
            model[1].linear.weight.mul_(0.1)
    expected = value_and_gradients(getattr(host, name)(model), model, features, labels)
    calls, fused = [], contrast.maxsim_from_hidden
    monkeypatch.setattr(
        contrast, "maxsim_from_hidden", lambda *args, **options: calls.append(1) or fused(*args, **options)
    )
    loss = getattr(losses, name)(model, fuse_projection=True)
    assert_close(value_and_gradients(loss, model, features, labels), expected)
    assert len(calls) == (2 if name == IN_BATCH else 1)
    # The model is as before.
    assert_close(value_and_gradients(getattr(host, name)(model), model, features, labels), expected)


@pytest.mark.parametrize("beyond", [{"margin": 0.05}, {"symmetric": True}, {"exclude": losses.duplicates}])
@pytest.mark.parametrize("name", [IN_BATCH, CACHED])
def test_a_fused_projection_takes_what_the_loss_takes(name, beyond, tiny_encoder, texts, step):
    features = columns(tiny_encoder, texts, 3)
    # The third query's document is the first one's too.
    for value in features[1].values():
        if isinstance(value, Tensor) and value.ndim == 2:
            value[2] = value[0]
    plain, loss, fused = (
        step(losses, name, features, **options) for options in ({}, beyond, {**beyond, "fuse_projection": True})
    )
    assert_close(fused, loss)
    assert not torch.allclose(plain[0], loss[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: [m[0], dense(32, 16, activation=nn.Tanh()), *m[2:]],
            "Dense, has the activation function Tanh",
        ),
        (lambda m: [m[0], *m[2:]], "the model has no Dense layer after its encoder"),
        (lambda m: [m[0], m[2], m[1], m[3]], "the model normalises before its last Dense layer"),
        (lambda m: [*m[:2], Normalize(), m[3]], "a Normalize of the model maps '.*' to 'sentence_embedding'"),
        (lambda m: [*m, HierarchicalTokenPooling(2)], "layer 1, HierarchicalTokenPooling, is not a Dense layer"),
        (lambda m: [m[0], nn.Identity(), *m[1:]], "layer 0, Identity, is not a Dense layer"),
    ],
)
def test_a_model_that_cannot_be_fused_says_why(change, message, tiny_encoder):
    model = MultiVectorEncoder(modules=change(list(tiny_encoder.children())), device="cpu")
    for name, _, _ in FOUR:
        with pytest.raises(ValueError, match=f"fuse_projection: .*{message}"):
            getattr(losses, name)(model, fuse_projection=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0.0}, "scale: 0.0; expected a finite number above 0"),
        ({"scale": "2"}, "scale: str; expected a number or a tensor of one element"),
        ({"scale": torch.ones(2)}, r"scale: a tensor of shape \(2,\); expected"),
        ({"mini_batch_size": 0}, "mini_batch_size: 0; expected at least 1"),
        ({"score_mini_batch_size": 1.5}, "score_mini_batch_size: float; expected an integer"),
        ({"gather": "star"}, "gather must be"),
        ({"symmetric": 1}, "symmetric: 1; expected True or False"),
        ({"gather_across_devices": "no"}, "gather_across_devices: 'no'; expected True or False"),
        ({"exclude": [1]}, "exclude: list; expected a function"),
        ({"fuse_projection": None}, "fuse_projection: None; expected True or False"),
        ({"gather_across_devices": True, "symmetric": True}, "gather_across_devices: given together with symmetric"),
        ({"gather_across_devices": True, "gather": "ring", "margin": 0.1}, 'margin: given together with gather="ring"'),
        ({"margin": "0.1"}, "margin: str; expected a number or None"),
        ({"margin": float("nan")}, "margin: nan; expected a finite number"),
        ({"similarity_fct": "colbert_scores"}, "similarity_fct: str; expected a function of embeddings, or None"),
        ({"similarity_fct": scoring.XTRScores(), "margin": 0.0}, "margin: given together with a similarity_fct"),
        ({"similarity_fct": scoring.XTRScores(), "gather": "ring"}, "gather: given together with a similarity_fct"),
        ({"similarity_fct": scoring.XTRScores(), "fuse_projection": True}, "fuse_projection: given together with a s"),
    ],
)
def test_arguments_that_cannot_be(arguments, message, tiny_encoder):
    for name in (IN_BATCH, CACHED):
        with pytest.raises((TypeError, ValueError), match=message):
            getattr(losses, name)(tiny_encoder, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": True}, "^temperature: bool; expected a number"),
        ({"temperature": None}, "^temperature: NoneType; expected a number"),
        ({"student_temperature": 1e-50}, "^student_temperature: 1e-50; expected a finite number above 0"),
        ({"teacher_temperature": torch.ones(2)}, r"^teacher_temperature: a tensor of shape \(2,\); expected"),
    ],
)
def test_temperatures_that_cannot_be(arguments, message, tiny_encoder):
    with pytest.raises((TypeError, ValueError), match=message):
        losses.MultiVectorDistillKLDivLoss(tiny_encoder, **arguments)


def test_columns_and_labels_that_cannot_be(tiny_encoder, texts):
    three = columns(tiny_encoder, texts, 2)
    for name, least in ((IN_BATCH, 1), (CACHED, 1), (KL, 2), (MARGINS, 2)):
        loss = getattr(losses, name)(tiny_encoder)
        message = f"sentence_features: {least} columns; expected the queries and at least {least} of documents"
        with pytest.raises(ValueError, match=message):
            loss(three[:least], None)
        uneven = [*three[:2], tiny_encoder.preprocess(texts(1, 4))]
        with pytest.raises(ValueError, match=r"sentence_features: columns of \[5, 5, 4\] texts"):
            loss(uneven, labels_of(2))
    for name, labels, message in (
        (KL, torch.zeros(5, 3), r"labels: shape \(5, 3\); expected the teacher's scores \(5, 2\)"),
        (KL, [1.0], r"labels: list; expected the teacher's scores \(5, 2\)"),
        (MARGINS, torch.zeros(5, 4), r"labels: shape \(5, 4\); expected the teacher's scores \(5, 2\), or its margins"),
        (MARGINS, None, "labels: NoneType; expected the teacher's scores"),
    ):
        with pytest.raises(ValueError, match=message):
            getattr(losses, name)(tiny_encoder)(three, labels)
    with pytest.raises(ValueError, match="teacher scores contain NaN"):
        losses.MultiVectorDistillKLDivLoss(tiny_encoder)(three, torch.full((5, 2), torch.nan))
    loss = losses.MultiVectorMultipleNegativesRankingLoss(tiny_encoder, exclude=lambda columns: torch.ones(5, 10))
    with pytest.raises(ValueError, match=r"exclude: returned torch.float32 of shape \(5, 10\); expected torch.bool"):
        loss(three)


def test_the_hosts_trainer(tiny_encoder, texts, tmp_path):
    """Two steps give the same model with the host's loss and with this one."""
    data = Dataset.from_dict({"query": texts(1, 8, 4), "positive": texts(2, 8), "negative": texts(3, 8)})
    path, weights = str(tmp_path / "model"), []
    tiny_encoder.save_pretrained(path)
    for kind in (host, losses):
        model = MultiVectorEncoder(path, device="cpu")
        loss = kind.CachedMultiVectorMultipleNegativesRankingLoss(
            model, mini_batch_size=2, similarity_fct=mean_colbert_scores, scale=5.0
        )
        arguments = MultiVectorEncoderTrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=2, learning_rate=0.01, optim="sgd",
            save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        MultiVectorEncoderTrainer(model=model, args=arguments, train_dataset=data, loss=loss).train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    before = torch.cat([parameter.detach().flatten() for parameter in tiny_encoder.parameters()])
    step = (weights[0] - before).norm()
    assert step > 0.01
    assert (weights[1] - weights[0]).norm() <= 1e-4 * step


def test_a_wrapper_of_the_cached_loss_takes_effect(tiny_encoder, texts):
    """MatryoshkaLoss replaces a method that only the host's code calls; it calls the own one once per size."""
    features = columns(tiny_encoder, texts, 2)

    def result(module, dims, **arguments):
        loss = getattr(module, CACHED)(tiny_encoder, mini_batch_size=2, **arguments)
        wrapped = MatryoshkaLoss(tiny_encoder, loss, dims)
        return value_and_gradients(wrapped, tiny_encoder, features, None)

    assert_close(result(losses, [16, 8, 4]), result(host, [16, 8, 4]))
    excluded = torch.zeros(5, 10, dtype=torch.bool)
    excluded[:, 5:] = True
    value, gradient = result(losses, [16], exclude=lambda columns: excluded)
    assert value < result(losses, [16])[0]
    assert_close(result(losses, [16, 16], exclude=lambda columns: excluded), (2 * value, 2 * gradient))
    with pytest.raises(ValueError, match="fuse_projection: set on a loss whose calculate_loss"):
        result(losses, [16], fuse_projection=True)
