"""Folding Dense layers, and losses that score from hidden states, against losses that project."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch._dynamo
from pylate.models import ColBERT, Dense
from sentence_transformers.models import Dense as SentenceTransformersDense
from sentence_transformers.models import Normalize
from torch import nn

from pylate_flash import indexes, losses, maxsim_from_hidden, models, rank, retrieve
from pylate_flash.encoding.projection import dense_layers, encode_hidden_states, fold_dense, hidden_states
from pylate_flash.training import contrast
from tests.encoders import Wrapped, with_dropout
from tests.recorded import recorded
from tests.test_losses import (
    DOCUMENTS,
    NEGATIVES,
    QUERIES,
    assert_same,
    batch_for,
    contrastive_batch,
    least_spread,
    no_masked_token_wins,
    value_and_gradients,
)


def apply(modules: list[nn.Module], hidden: torch.Tensor) -> torch.Tensor:
    features = {"token_embeddings": hidden}
    for module in modules:
        features = module(features)
    return features["token_embeddings"]


@pytest.mark.parametrize("bias", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("residual", [False, True])
def test_a_chain_folds_into_one_layer(bias: tuple[bool, bool], residual: bool) -> None:
    torch.manual_seed(0)
    chain = [
        Dense(6, 5, bias[0], use_residual=residual),
        Dense(5, 5, bias[1], use_residual=residual),
        Dense(5, 3, False),
    ]
    hidden = torch.randn(2, 4, 6)
    weight, offset = fold_dense(chain)
    assert (offset is None) == (bias == (False, False))
    torch.testing.assert_close(nn.functional.linear(hidden, weight, offset), apply(chain, hidden))
    # Gradients reach every layer as through the chain.
    weight.square().sum().backward()
    folded = [layer.linear.weight.grad for layer in chain]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in folded)


def test_one_layer_is_its_own_weight() -> None:
    for layer in (Dense(6, 3), SentenceTransformersDense(6, 3, activation_function=nn.Identity())):
        assert fold_dense([layer])[0] is layer.linear.weight
        assert fold_dense([layer])[1] is layer.linear.bias


class OwnDense(Dense):
    pass


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([], "modules must hold at least one Dense layer"),
        ([Normalize()], "layer 0, Normalize, is not a Dense layer"),
        ([Dense(4, 4), OwnDense(4, 4)], "layer 1, OwnDense, is not a Dense layer"),
        ([SentenceTransformersDense(4, 4)], "layer 0, Dense, has the activation function Tanh; only a linear layer"),
        ([Dense(4, 4, activation_function=nn.GELU())], "activation function GELU"),
        ([Dense(4, 3), Dense(4, 2)], "layer 1 takes 4 dimensions, expected 3, which the one before it gives"),
    ],
)
def test_what_cannot_be_folded_is_named(modules: list[nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fold_dense(modules)


@pytest.fixture(scope="module")
def bert(tiny_colbert_path: str) -> ColBERT:
    return ColBERT(tiny_colbert_path, device="cpu", query_length=10, document_length=20).eval().double()


@pytest.fixture(scope="module")
def modernbert(minilm_path: str, tmp_path_factory: pytest.TempPathFactory) -> ColBERT:
    """A small random ModernBERT with MiniLM's tokenizer, and two Dense layers after it."""
    from transformers import AutoTokenizer, ModernBertConfig, ModernBertModel

    folder = str(tmp_path_factory.mktemp("modernbert"))
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=30522, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, pad_token_id=0, cls_token_id=101, sep_token_id=102, initializer_range=0.2,
        reference_compile=False, attention_dropout=0.0, embedding_dropout=0.0, mlp_dropout=0.0,
    )  # fmt: skip
    ModernBertModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm_path).save_pretrained(folder)
    model = ColBERT(folder, embedding_size=32, query_length=10, document_length=20, device="cpu").eval()
    model.append(Dense(32, 16, bias=True))
    return model.double()


@pytest.fixture(params=["bert", "modernbert"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ColBERT:
    model = request.getfixturevalue(request.param)
    monkeypatch.setattr(model, "do_query_expansion", True)
    return model


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Contrastive", {}),
        ("Contrastive", {"size_average": False, "temperature": 0.05, "score_mini_batch_size": 2}),
        # Five texts in mini-batches of two, and in one.
        ("CachedContrastive", {"mini_batch_size": 2}),
        ("CachedContrastive", {"size_average": False, "temperature": 0.05}),
        ("Distillation", {}),
        ("Distillation", {"normalize_scores": False, "size_average": False}),
    ],
)
@pytest.mark.parametrize("masking", ["exclude", "zero"])
def test_the_same_value_and_gradients(model: ColBERT, name: str, arguments: dict, masking: str, monkeypatch) -> None:
    calls = recorded(monkeypatch, contrast, "maxsim_from_hidden")
    for expansion in (True, False):
        model.do_query_expansion = expansion
        features, labels = batch_for(name, model)
        loss = getattr(losses, name)
        expected = value_and_gradients(loss(model, **arguments, masking=masking), features, labels)
        assert not calls
        actual = value_and_gradients(loss(model, **arguments, masking=masking, fuse_projection=True), features, labels)
        # The cached loss scores all columns of documents together.
        assert len(calls) == (1 if name == "CachedContrastive" else len(features) - 1)
        calls.clear()
        # Scores of 8 to 16 are rounded to float32, both ways, by up to 2^-21; min-max normalisation divides them.
        rounding = 2.0**-19 / least_spread(model, features) if arguments == {} and name == "Distillation" else 0.0
        assert_same(actual, expected, tolerance=1e-5 + rounding)


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_inside_a_wrapper(bert: ColBERT, name: str) -> None:
    features = contrastive_batch(bert, columns=2)
    expected = value_and_gradients(getattr(losses, name)(bert), features)
    wrapped = getattr(losses, name)(Wrapped(bert), fuse_projection=True)
    wrapped_value, gradients = value_and_gradients(wrapped, features)
    assert_same((wrapped_value, {name.removeprefix("module."): grad for name, grad in gradients.items()}), expected)


@pytest.mark.parametrize("trained", ["everything", "encoder", "projection"])
def test_cached_hidden_states_give_the_gradients_of_what_is_trained(model: ColBERT, trained: str) -> None:
    """Also without negatives, and when the loss is scaled."""
    features = contrastive_batch(model, columns=2)
    frozen = {"everything": [], "encoder": dense_layers(model), "projection": [model[0]]}[trained]
    try:
        for module in frozen:
            module.requires_grad_(False)
        expected = value_and_gradients(losses.CachedContrastive(model, mini_batch_size=3), features)
        model.zero_grad()
        loss = losses.CachedContrastive(model, mini_batch_size=3, fuse_projection=True)
        (1024 * loss(copy.deepcopy(features))).backward()
        actual = {name: p.grad / 1024 for name, p in model.named_parameters() if p.grad is not None}
        assert_same((expected[0], actual), expected)
    finally:
        model.requires_grad_(True)


def test_cached_hidden_states_are_encoded_again_with_the_same_dropout(model: ColBERT) -> None:
    features, result = contrastive_batch(model), []
    with with_dropout(model):
        for fuse_projection in (False, True):
            torch.manual_seed(0)
            loss = losses.CachedContrastive(model, mini_batch_size=2, fuse_projection=fuse_projection)
            result.append(value_and_gradients(loss, features))
        assert_same(*result)
        torch.manual_seed(1)
        assert loss(features) != result[0][0], "the dropout must matter"


def test_cached_hidden_states_without_gradients(bert: ColBERT) -> None:
    features = contrastive_batch(bert)
    with torch.no_grad():
        value = losses.CachedContrastive(bert, mini_batch_size=2, fuse_projection=True)(features)
        torch.testing.assert_close(value, losses.Contrastive(bert)(features))
    assert not value.requires_grad


def test_cached_hidden_states_take_the_type_of_autocast(bert: ColBERT, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch, contrast, "maxsim_from_hidden")
    bert = copy.deepcopy(bert).float()
    features, loss = contrastive_batch(bert), losses.CachedContrastive(bert, mini_batch_size=2, fuse_projection=True)
    value_and_gradients(loss, features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value_and_gradients(loss, features)
    assert [options["hidden"].dtype for _, options in calls] == [torch.float32, torch.bfloat16]


def test_the_model_is_as_before(bert: ColBERT) -> None:
    features = contrastive_batch(bert)[1]

    def embed() -> torch.Tensor:
        with torch.no_grad():
            return bert(copy.deepcopy(features))["token_embeddings"]

    before = embed()
    with hidden_states(bert):
        states = embed()
    assert torch.equal(embed(), before)
    assert torch.equal(apply([bert[1]], states), before)
    # Also after an error, here one of the model's.
    with pytest.raises(ValueError, match="specify"), hidden_states(bert):
        bert({})
    assert torch.equal(embed(), before)


def test_a_forward_that_a_hook_has_given_a_layer_is_there_again(bert: ColBERT) -> None:
    layer = Dense(4, 2, bias=False)
    model = copy.deepcopy(bert)
    model[1] = layer
    layer.forward = hook = lambda features: features  # type: ignore[method-assign]
    with hidden_states(model):
        assert layer.forward is not hook
    assert layer.forward is hook


def test_the_projection_leads_to_the_output(bert: ColBERT) -> None:
    """DDP follows it to find the parameters that it waits for, and those that it does not."""
    with hidden_states(bert):
        output = bert(contrastive_batch(bert)[0])
    (gradient,) = torch.autograd.grad(output["projection_weight"].sum(), bert[1].linear.weight)
    assert (gradient == 1).all()


def test_encoded_hidden_states_are_those_of_the_embeddings(model: ColBERT, capsys: pytest.CaptureFixture) -> None:
    """Of the same tokens, without skiplist tokens and padding; in the original order after batching by length."""
    texts = [*DOCUMENTS, "a"]
    embeddings = model.encode(texts, is_query=False)
    for convert_to_numpy in (True, False):
        states = encode_hidden_states(Wrapped(model), texts, batch_size=2, convert_to_numpy=convert_to_numpy)
        assert capsys.readouterr().err == ""
        for state, embedding in zip(states, embeddings, strict=True):
            assert isinstance(state, torch.Tensor) != convert_to_numpy
            projected = apply(dense_layers(model), torch.as_tensor(state))
            torch.testing.assert_close(nn.functional.normalize(projected, dim=-1), torch.from_numpy(embedding))
    encode_hidden_states(model, texts, show_progress_bar=True)
    assert "Encoding documents" in capsys.readouterr().err
    assert encode_hidden_states(model, []) == []


def test_hidden_states_of_what_is_no_list_of_texts_or_has_no_batches(bert: ColBERT) -> None:
    with pytest.raises(TypeError, match="documents must be a list of texts, got the text 'cats'"):
        encode_hidden_states(bert, "cats")
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        encode_hidden_states(bert, ["cats"], batch_size=0)


def test_retrieval_from_kept_hidden_states(model: ColBERT, tmp_path: Path) -> None:
    """What users call: an index with the model's projection, PyLate's retriever, and reranking of its results."""
    texts, ids = [*DOCUMENTS, *NEGATIVES], [f"d{i}" for i in range(10)]
    embeddings_index = indexes.Flat(tmp_path, "embeddings", device="cpu", show_progress=False)
    embeddings_index.add_documents(ids, model.encode(texts, is_query=False))
    states_index = indexes.Flat(tmp_path, "states", device="cpu", show_progress=False, projection=model)
    states_index.add_documents(ids, encode_hidden_states(model, texts))
    queries = model.encode(QUERIES, is_query=True)
    expected = retrieve.ColBERT(index=embeddings_index).retrieve(queries, k=6)
    actual = retrieve.ColBERT(index=states_index).retrieve(queries, k=6)
    candidates = [[result["id"] for result in results] for results in expected]
    reranked = rank.rerank(candidates, queries, states_index.get_documents_embeddings(candidates))
    for results in (actual, reranked):
        assert [[result["id"] for result in row] for row in results] == candidates
        for row, reference in zip(results, expected, strict=True):
            assert [r["score"] for r in row] == pytest.approx([r["score"] for r in reference], rel=1e-5)


def test_the_models_flag(tiny_colbert_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.ColBERT(tiny_colbert_path, device="cpu", query_length=10, document_length=20, fuse_projection=True)
    model.save_pretrained(str(tmp_path), create_model_card=False)
    loaded = models.ColBERT(str(tmp_path), device="cpu")
    assert loaded.fuse_projection is True
    assert models.ColBERT(str(tmp_path), device="cpu", fuse_projection=False).fuse_projection is False
    assert models.ColBERT(tiny_colbert_path, device="cpu").fuse_projection is False
    calls = recorded(monkeypatch, contrast, "maxsim_from_hidden")
    features = contrastive_batch(model, columns=2)
    for fuse_projection, expected in ((None, 1), (False, 0), (True, 1)):
        losses.Contrastive(model, fuse_projection=fuse_projection)(copy.deepcopy(features))
        assert len(calls) == expected
        calls.clear()
    model.fuse_projection = False
    losses.Contrastive(model)(copy.deepcopy(features))
    assert not calls
    with pytest.raises(ValueError, match="fuse_projection must be True or False, got 1"):
        model.fuse_projection = 1


def test_a_model_that_cannot_be_fused_says_why(tiny_colbert_path: str, tmp_path: Path) -> None:
    model = models.ColBERT(tiny_colbert_path, device="cpu")
    model.append(Normalize())
    for fuse in (
        lambda: setattr(model, "fuse_projection", True),
        lambda: losses.Contrastive(model, fuse_projection=True),
        lambda: losses.CachedContrastive(model, fuse_projection=True),
        lambda: losses.Distillation(model, fuse_projection=True),
    ):
        with pytest.raises(ValueError, match="fuse_projection: .*layer 1, Normalize, is not a Dense layer"):
            fuse()
    with pytest.raises(ValueError, match="the model must be a ColBERT of PyLate, got Linear"):
        dense_layers(nn.Linear(2, 2))
    del model[2], model[1]
    with pytest.raises(ValueError, match="no Dense layer after its encoder"):
        dense_layers(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"score_metric": lambda *_: None}, "fuse_projection: given together with score_metric"),
        ({"scorer": "torch"}, 'fuse_projection: needs the scorer "pylate_flash" or "auto", got "torch"'),
    ],
)
def test_what_does_not_go_together(bert: ColBERT, arguments: dict, message: str) -> None:
    for loss in (losses.Contrastive, losses.CachedContrastive):
        with pytest.raises(ValueError, match=message):
            loss(bert, **arguments, fuse_projection=True)


def test_a_flag_that_comes_later_is_checked_too(tiny_colbert_path: str) -> None:
    model = models.ColBERT(tiny_colbert_path, device="cpu")
    loss, features = losses.Contrastive(model, scorer="torch"), contrastive_batch(model, columns=2)
    model.fuse_projection = True
    with pytest.raises(ValueError, match='got "torch"'):
        loss(features)


def test_a_score_metric_of_the_caller_is_called_whatever_the_flag(tiny_colbert_path: str) -> None:
    model = models.ColBERT(tiny_colbert_path, device="cpu", fuse_projection=True)
    features = contrastive_batch(model, columns=2)
    loss = losses.Contrastive(model, lambda queries, documents, **_: torch.zeros(len(queries), len(documents)))
    assert loss(features).item() == pytest.approx(torch.tensor(5.0).log().item())


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_with_bfloat16_autocast(bert: ColBERT, name: str) -> None:
    """Fused or not, the loss of a bfloat16 encoder is near that in float64, though rounding changes the argmax."""
    features = contrastive_batch(bert)
    expected, gradients = value_and_gradients(getattr(losses, name)(bert), features)
    # Autocast leaves float64 as it is.
    bert = copy.deepcopy(bert).float()
    assert no_masked_token_wins(bert, features)
    weight = "1.linear.weight"
    for fuse_projection in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = getattr(losses, name)(bert, fuse_projection=fuse_projection)
            value, actual = value_and_gradients(loss, features)
        torch.testing.assert_close(value, expected.float(), rtol=1e-2, atol=1e-2)
        assert gradients.keys() == actual.keys()
        assert torch.cosine_similarity(gradients[weight].flatten(), actual[weight].double().flatten(), dim=0) > 0.95


def checkpointed(model: ColBERT) -> None:
    encoder = model[0].auto_model
    encoder.gradient_checkpointing_enable()
    # Only layers in training mode are checkpointed; the models have no dropout.
    encoder.train()
    assert encoder.is_gradient_checkpointing


def compiled(model: ColBERT) -> None:
    # Graphs that other tests compiled for these layers would be reused, and not counted.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # All of compilation but the last step, which would take a C++ compiler and most of a minute.
    model[0].auto_model.compile(backend="aot_eager")


def with_adapters(model: ColBERT) -> None:
    peft = pytest.importorskip("peft")
    names = ["query", "value"] if "bert.modeling_bert" in type(model[0].auto_model).__module__ else ["Wqkv"]
    # Zeros, the default, would let no gradient reach the other matrices.
    model.add_adapter(peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False))


@pytest.mark.parametrize(
    ("prepare", "name"),
    [
        (checkpointed, "Contrastive"),
        (checkpointed, "CachedContrastive"),
        (compiled, "CachedContrastive"),
        (with_adapters, "Contrastive"),
        (with_adapters, "CachedContrastive"),
    ],
)
def test_with_an_encoder_that_is(prepare: Callable[[ColBERT], None], name: str, model: ColBERT) -> None:
    features, model = contrastive_batch(model), copy.deepcopy(model)
    prepare(model)
    expected = value_and_gradients(getattr(losses, name)(model, fuse_projection=False), features)
    actual = value_and_gradients(getattr(losses, name)(model, fuse_projection=True), features)
    assert_same(actual, expected)
    if prepare is compiled:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    if prepare is with_adapters:
        adapters = [parameter for parameter in expected[1] if ".lora_" in parameter]
        assert len(adapters) >= 4
        assert len(expected[1]) == len(adapters) + sum(len([*layer.parameters()]) for layer in dense_layers(model))


def test_a_compiled_model(bert: ColBERT) -> None:
    """The whole model is compiled: the projection is taken out and put back between its calls."""
    features = contrastive_batch(bert, columns=2)
    expected = value_and_gradients(losses.Contrastive(bert), features)
    model = torch.compile(bert, backend="eager")
    for fuse_projection in (True, False, True):
        value, gradients = value_and_gradients(losses.Contrastive(model, fuse_projection=fuse_projection), features)
        assert_same((value, {name.removeprefix("_orig_mod."): grad for name, grad in gradients.items()}), expected)


def test_unpadded_hidden_states_of_modernbert(modernbert: ColBERT) -> None:
    """One row of all documents' tokens, each attending to its own document, as in flash attention."""
    columns = contrastive_batch(modernbert, columns=2)
    queries, documents = ({name: column[name] for name in ("input_ids", "attention_mask")} for column in columns)
    weight, bias = fold_dense(dense_layers(modernbert))
    encoder = modernbert[0].auto_model
    states = encoder(**queries).last_hidden_state
    active = documents["attention_mask"].bool()
    layers = {"queries_weight": weight, "queries_bias": bias}
    states_of_documents = encoder(**documents).last_hidden_state
    padded = maxsim_from_hidden(states, states_of_documents, weight, bias, documents_mask=active, **layers)
    lengths = active.sum(dim=1)
    assert len(set(lengths.tolist())) > 1
    owners = torch.arange(len(lengths)).repeat_interleave(lengths)
    attends = (owners[:, None] == owners)[None, None]
    unpadded = encoder(
        input_ids=documents["input_ids"][active][None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        attention_mask={"full_attention": attends, "sliding_attention": attends},
    ).last_hidden_state[0]
    bounds = nn.functional.pad(lengths.cumsum(0), (1, 0))
    packed = maxsim_from_hidden(states, unpadded, weight, bias, documents_cu_seqlens=bounds, **layers)
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5)
    parameters = [encoder.layers[0].attn.Wqkv.weight, *modernbert[1].parameters()]
    gradients = [torch.autograd.grad(scores.sin().sum(), parameters, retain_graph=True) for scores in (packed, padded)]
    for actual, expected in zip(*gradients, strict=True):
        assert (actual - expected).norm() <= 1e-5 * expected.norm()
