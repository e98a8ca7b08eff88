"""Mini-batches of one length: what the cached loss encodes and stores, and that neither changes its value."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pylate.losses.contrastive import extract_skiplist_mask
from pylate.models import ColBERT
from torch import Tensor, nn

from pylate_flash import losses
from pylate_flash.training import contrast, grad_cache
from pylate_flash.training.mini_batches import Limits, encode, kept_tokens, mini_batches, pack_padded, unpack_padded
from tests.encoders import Watch, WordVectors, with_dropout
from tests.encoding.test_projection import bert, modernbert  # noqa: F401  (fixtures)
from tests.recorded import recorded
from tests.test_losses import assert_same, value_and_gradients

TEXT = "sort the list in place, and return: a copy! of it? else (raise) an error; then stop"
WORDS = TEXT.split()
QUERIES = ["sort a list", "what is a hash table and what is it for", "open", "sum of squares", "trim", "join", "is"]
DOCUMENTS = [" ".join(WORDS[start % 5 : start % 5 + length]) for start, length in enumerate((3, 16, 1, 9, 12, 2, 5))]
NEGATIVES = [" ".join(reversed(text.split())) for text in reversed(DOCUMENTS)]


@pytest.fixture(params=["bert", "modernbert"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ColBERT:
    model = request.getfixturevalue(request.param)
    monkeypatch.setattr(model, "do_query_expansion", True)
    # Padding makes most texts much longer.
    monkeypatch.setattr(model, "document_length", 30)
    return model


def batch(model: ColBERT) -> list[dict[str, Tensor]]:
    documents = [model.tokenize(texts, is_query=False, pad=True) for texts in (DOCUMENTS, NEGATIVES)]
    return [model.tokenize(QUERIES, is_query=True, pad=True), *documents]


@pytest.mark.parametrize("expansion", [True, False], ids=["expansion", "no-expansion"])
@pytest.mark.parametrize("masking", ["exclude", "zero"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"mini_batch_size": 2},
        {"mini_batch_num_tokens": 50},
        {"mini_batch_num_tokens": 50, "mini_batch_size": 3, "size_average": False, "temperature": 0.3},
        {"mini_batch_num_tokens": 10**9},
    ],
)
def test_value_and_gradients_are_those_of_the_whole_batch(
    model: ColBERT, arguments: dict, masking: str, expansion: bool
) -> None:
    model.do_query_expansion = expansion
    loss_kwargs = {name: value for name, value in arguments.items() if "mini" not in name}
    expected = value_and_gradients(losses.Contrastive(model, masking=masking, **loss_kwargs), batch(model))
    with Watch(model) as watch:
        actual = value_and_gradients(losses.CachedContrastive(model, masking=masking, **arguments), batch(model))
    assert_same(actual, expected)
    # All texts are encoded twice, most of them with less padding.
    sizes = [ids.shape for ids in watch.ids]
    assert sum(rows for rows, _ in sizes) == 2 * 3 * len(QUERIES)
    if "mini_batch_size" in arguments:
        assert max(rows for rows, _ in sizes) == arguments["mini_batch_size"]
        assert len({length for _, length in sizes}) > 2
    if "mini_batch_num_tokens" in arguments:
        limit = arguments["mini_batch_num_tokens"]
        assert all(rows == 1 or rows * length <= limit for rows, length in sizes)
        assert (len(sizes) == 6) == (limit == 10**9)


def test_a_document_without_any_masked_token_under_zero(model: ColBERT) -> None:
    """The similarity of 0 comes from masked tokens, and this document has none."""
    columns = batch(model)
    full = columns[1]["attention_mask"].sum(dim=1).argmax()
    columns[1]["input_ids"][full] = torch.arange(2000, 2000 + columns[1]["input_ids"].shape[1])
    columns[1]["attention_mask"][full] = 1
    assert extract_skiplist_mask(columns, model.skiplist)[1].all(dim=1).sum() == 1
    for fused in (False, True):
        loss = losses.CachedContrastive(model, masking="zero", mini_batch_size=3, fuse_projection=fused)
        expected = value_and_gradients(losses.Contrastive(model, masking="zero"), columns)
        assert_same(value_and_gradients(loss, columns), expected)


def test_padding_on_the_left_is_not_cut(model: ColBERT) -> None:
    columns = batch(model)
    for column in columns[1:]:
        shift = column["attention_mask"].shape[1] - column["attention_mask"].sum(dim=1, keepdim=True)
        positions = (torch.arange(column["attention_mask"].shape[1]) - shift) % column["attention_mask"].shape[1]
        for name in ("input_ids", "attention_mask"):
            column[name] = column[name].gather(1, positions)
    expected = value_and_gradients(losses.Contrastive(model), columns)
    assert_same(value_and_gradients(losses.CachedContrastive(model, mini_batch_size=2), columns), expected)


@pytest.mark.parametrize("expansion", [True, False], ids=["expansion", "no-expansion"])
def test_only_what_is_scored_is_kept(model: ColBERT, expansion: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding and skiplist tokens are dropped; queries with expansion keep all tokens."""
    model.do_query_expansion = expansion
    scored = recorded(monkeypatch, contrast, "maxsim_cross_entropy")
    columns = batch(model)
    masks = extract_skiplist_mask(columns, model.skiplist)
    losses.CachedContrastive(model, mini_batch_size=2)(columns).backward()
    ((_, options),) = scored
    assert len(options["documents"]) == masks[1].sum() + masks[2].sum() < columns[1]["attention_mask"].sum() * 2
    assert options["documents"].shape[1] == (32 if model[0].get_word_embedding_dimension() == 32 else 16)
    assert options["max_document_length"] == max(mask.sum(dim=1).max() for mask in masks[1:])
    assert options["queries"].shape[1] == (columns[0]["input_ids"].shape[1] if expansion else masks[0].sum(dim=1).max())


def test_the_second_pass_has_the_dropout_of_the_first(model: ColBERT) -> None:
    with with_dropout(model):
        loss = losses.CachedContrastive(model, mini_batch_num_tokens=60)
        with Watch(model) as watch:
            torch.manual_seed(0)
            before = loss(batch(model))
            # Other random draws do not matter.
            torch.rand(7)
            before.backward()
        half = len(watch.outputs) // 2
        assert half > 3
        for first, second in zip(watch.outputs[:half], watch.outputs[half:], strict=True):
            assert torch.equal(first, second)
        torch.manual_seed(1)
        assert loss(batch(model)) != before, "the dropout must matter"


def test_embeddings_are_freed_before_the_second_pass(model: ColBERT, monkeypatch: pytest.MonkeyPatch) -> None:
    refs: list[weakref.ref] = []
    batch_of = grad_cache._batch_of

    def observed(options, queries, documents, leaves):
        refs.extend(weakref.ref(leaf) for leaf in leaves if leaf is not None)
        return batch_of(options, queries, documents, leaves)

    monkeypatch.setattr(grad_cache, "_batch_of", observed)
    loss = losses.CachedContrastive(model, mini_batch_size=3)
    value = loss(batch(model))
    assert len(refs) == 2
    assert all(leaf() is not None for leaf in refs)
    alive = []
    hook = model.register_forward_pre_hook(lambda *_: alive.append([leaf() is not None for leaf in refs]))
    value.backward()
    hook.remove()
    assert len(alive) > 6
    assert not any(any(leaves) for leaves in alive)
    with pytest.raises(RuntimeError, match="the gradient of a cached loss is computed once"):
        value.backward()


def test_a_scaled_loss_scales_all_gradients(model: ColBERT) -> None:
    temperature = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    loss = losses.CachedContrastive(model, mini_batch_size=2, temperature=temperature)
    _, expected = value_and_gradients(loss, batch(model))
    learned, temperature.grad = temperature.grad, None
    model.zero_grad()
    value = loss(batch(model))
    assert temperature.grad is None
    (1024 * value).backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad / 1024, expected[name], rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(temperature.grad / 1024, learned)


@pytest.mark.parametrize("kind", [losses.Contrastive, losses.CachedContrastive])
def test_gradients_of_a_scaled_float16_loss_are_not_lost(kind: type) -> None:
    """A temperature so high that float16 holds no gradient of an embedding before the loss is scaled."""
    torch.manual_seed(0)
    model = WordVectors(torch.randn(40, 16).tolist()).float()
    columns = [{"input_ids": torch.randint(0, 40, shape)} for shape in ((6, 5), (6, 9), (6, 9))]
    for column in columns:
        column["attention_mask"] = torch.ones_like(column["input_ids"])
    loss = kind(model, temperature=1e9)
    _, gradients = value_and_gradients(loss, columns)
    assert 0 < gradients["vectors"].abs().max() < 2.0**-26
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        value = loss(columns)
    (2.0**30 * value).backward()
    expected = gradients["vectors"] * 2.0**30
    assert (model.vectors.grad - expected).norm() <= 0.02 * expected.norm()


def test_nothing_but_the_temperature_is_learned(model: ColBERT) -> None:
    temperature = nn.Parameter(torch.tensor(0.5))
    try:
        model.requires_grad_(False)
        model.zero_grad()
        losses.CachedContrastive(model, mini_batch_size=2, temperature=temperature)(batch(model)).backward()
        assert temperature.grad.abs() > 0
        assert all(parameter.grad is None for parameter in model.parameters())
    finally:
        model.requires_grad_(True)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    texts=st.none() | st.integers(1, 5),
    tokens=st.none() | st.integers(1, 120),
    zero_masked=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_every_text_is_encoded_once_and_its_kept_tokens_are_kept(lengths, texts, tokens, zero_masked, random) -> None:
    padded = max(lengths) + 3
    attended = torch.tensor([[position < length for position in range(padded)] for length in lengths])
    inputs = attended & torch.tensor([[random.random() < 0.7 for _ in range(padded)] for _ in lengths])
    ids = torch.arange(attended.numel()).view(attended.shape)
    features = {"input_ids": ids, "attention_mask": attended.long(), "of_text": torch.arange(len(lengths))}
    shared = {"prompt_length": torch.ones(len(lengths)), "modality": "text", "scale": torch.tensor(2.0)}
    (column,) = mini_batches([features | shared], [inputs], Limits(texts, tokens), [zero_masked], [{"task": "query"}])
    seen = []

    def model(features: dict[str, Tensor], task: str) -> dict[str, Tensor]:
        seen.append(features)
        assert task == "query"
        # Features that are not per text are passed on unchanged.
        assert all(features[name] is value for name, value in shared.items())
        assert features["attention_mask"].shape == features["input_ids"].shape
        return {"token_embeddings": features["input_ids"].unsqueeze(-1).double() + 1}

    actual = encode(column.batches, model, {"device_type": "cpu", "enabled": False})
    assert torch.cat([features["of_text"] for features in seen]).tolist() == column.order.tolist()
    assert sorted(column.order.tolist()) == list(range(len(lengths)))
    for features in seen:
        rows, length = features["input_ids"].shape
        longest = max(lengths[text] for text in features["of_text"].tolist())
        assert longest <= length <= min(padded, max(1, longest) + 7)
        assert texts is None or rows <= texts
        assert tokens is None or rows == 1 or rows * length <= tokens
    assert column.ends == sorted(column.ends, reverse=True)
    expected = []
    for text in column.order.tolist():
        row = (ids[text][inputs[text]] + 1).tolist()
        expected.append(row + [0] * zero_masked)
    assert column.lengths == column.n_kept.tolist() == [len(row) for row in expected]
    assert actual.flatten().tolist() == [value for row in expected for value in row]

    # Pad again, and pack the result.
    values, mask = unpack_padded(actual, column.n_kept, max(column.lengths))
    mask = torch.ones(values.shape[:2], dtype=torch.bool) if mask is None else mask
    assert torch.equal(values[mask], actual)
    assert not values[~mask].any()
    packed = pack_padded(values, mask, False)
    assert torch.equal(packed.tokens, actual)
    assert packed.lengths.tolist() == column.lengths
    assert packed.longest == max(column.lengths)
    assert packed.cu_seqlens.tolist() == [sum(column.lengths[:i]) for i in range(len(lengths) + 1)]


def test_kept_tokens_are_differentiable() -> None:
    values, mask = torch.randn(2, 3, 2, requires_grad=True), torch.tensor([[True, False, True], [False, True, False]])
    result = kept_tokens(values, mask, 3)
    assert torch.equal(result, values[mask])
    (gradient,) = torch.autograd.grad(result.sum(), values)
    assert torch.equal(gradient, mask.unsqueeze(-1).expand_as(values).float())
