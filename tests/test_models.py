"""models.ColBERT: flags are validated, saved, loaded and followed, here and in plain PyLate."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import types
from pathlib import Path

import pylate.models
import pylate.scores
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pylate_flash import models, registered
from pylate_flash.models import ColBERT
from pylate_flash.register import use_scorer
from pylate_flash.scores import scorer_of

# Query token 0 prefers the masked token, and its other similarities are negative, so that the maskings differ.
QUERIES = torch.tensor([[[1.0, 2.0], [0.5, -1.0]]])
DOCUMENTS = torch.tensor([[[-1.0, -2.0], [-3.0, 0.5], [9.0, 9.0]]])
MASK = torch.tensor([[True, True, False]])


def saved_config(folder: str | Path) -> dict:
    return json.loads((Path(folder) / "config_sentence_transformers.json").read_text())


def same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def shared(tiny_colbert_path: str) -> ColBERT:
    return ColBERT(tiny_colbert_path, device="cpu")


@pytest.fixture
def model(shared: ColBERT) -> ColBERT:
    """A copy of the model whose flags a test may set."""
    copied = copy.copy(shared)
    copied._model_config = dict(shared._model_config)
    return copied


def test_defaults(model: ColBERT) -> None:
    assert model.scorer == "auto"
    assert model.masking == "exclude"
    assert model.similarity_fn_name == "MaxSim"
    assert scorer_of(model) == ("auto", "exclude")
    with registered(masking="zero"):
        assert model.masking == "zero"
        model.masking = "exclude"
        assert model.masking == "exclude"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"scorer": "fast"}, "scorer must be one of 'auto', 'pylate_flash', 'torch', 'flash', 'lik', got 'fast'"),
        ({"scorer": 1}, "scorer must be one of"),
        ({"masking": "none"}, "masking must be one of 'exclude', 'zero', got 'none'"),
        ({"fuse_projection": "no"}, "fuse_projection must be True or False, got 'no'"),
        ({"fuse_projection": 0}, "fuse_projection must be True or False, got 0"),
    ],
)
def test_unknown_flags(model: ColBERT, flags: dict, message: str) -> None:
    # Raised before anything is loaded, so the missing folder does not matter.
    with pytest.raises(ValueError, match=message):
        ColBERT("/no/such/model", **flags)
    [(name, value)] = flags.items()
    with pytest.raises(ValueError, match=message):
        setattr(model, name, value)
    assert (model.scorer, model.masking) == ("auto", "exclude")


@pytest.mark.parametrize("scorer", ["auto", "pylate_flash", "torch", "flash", "lik"])
def test_every_scorer_can_be_set(model: ColBERT, scorer: str) -> None:
    model.scorer = scorer
    assert model.scorer == scorer
    assert scorer_of(model)[0] == scorer


def test_flags_survive_saving_in_ours_and_in_pylate(tiny_colbert_path: str, tmp_path: Path) -> None:
    ours = ColBERT(tiny_colbert_path, device="cpu", scorer="torch", masking="zero")
    ours.save_pretrained(str(tmp_path / "ours"), create_model_card=False)
    config = saved_config(tmp_path / "ours")
    assert (config["scorer"], config["masking"]) == ("torch", "zero")
    assert (config["model_type"], config["similarity_fn_name"]) == ("ColBERT", "MaxSim")

    # Plain PyLate loads it unchanged, and keeps the keys that it does not know.
    plain = pylate.models.ColBERT(str(tmp_path / "ours"), device="cpu")
    assert type(plain) is pylate.models.ColBERT
    assert same_weights(plain, ours)
    assert plain.query_length == ours.query_length == 16
    plain.save_pretrained(str(tmp_path / "plain"), create_model_card=False)
    assert saved_config(tmp_path / "plain") == config

    again = ColBERT(str(tmp_path / "plain"), device="cpu")
    assert (again.scorer, again.masking) == ("torch", "zero")
    assert same_weights(again, ours)

    overridden = ColBERT(str(tmp_path / "plain"), device="cpu", scorer="lik", masking="exclude")
    assert (overridden.scorer, overridden.masking) == ("lik", "exclude")
    overridden.scorer = "pylate_flash"
    overridden.save(str(tmp_path / "overridden"), create_model_card=False)
    loaded = ColBERT.load(str(tmp_path / "overridden"))
    assert type(loaded) is ColBERT
    assert (loaded.scorer, loaded.masking) == ("pylate_flash", "exclude")


def test_the_model_card_can_be_written(model: ColBERT, tmp_path: Path) -> None:
    model.save_pretrained(str(tmp_path))
    assert "ColBERT" in (tmp_path / "README.md").read_text()
    assert saved_config(tmp_path)["scorer"] == "auto"
    assert "masking" not in saved_config(tmp_path)


def test_embeddings_are_those_of_plain_pylate(model: ColBERT, tiny_colbert_path: str) -> None:
    plain = pylate.models.ColBERT(tiny_colbert_path, device="cpu")
    for texts, is_query in ((["how to sort?"], True), (["Sort, in place.", "A heap."], False)):
        ours, theirs = (m.encode(texts, is_query=is_query) for m in (model, plain))
        for our, their in zip(ours, theirs, strict=True):
            assert (our == their).all()


def test_a_plain_transformer_folder_loads(tiny_colbert_path: str, tmp_path: Path) -> None:
    encoder = Path(tiny_colbert_path).parent / "bert"
    model = ColBERT(str(encoder), device="cpu", embedding_size=8, scorer="pylate_flash")
    assert isinstance(model[-1], models.Dense)
    assert model[-1].out_features == 8
    model.save_pretrained(str(tmp_path), create_model_card=False)
    assert ColBERT(str(tmp_path), device="cpu").scorer == "pylate_flash"
    assert same_weights(pylate.models.ColBERT(str(tmp_path), device="cpu"), model)


def test_a_sentence_transformers_folder_loads(minilm_path: str) -> None:
    model = ColBERT(minilm_path, device="cpu")
    assert model.scorer == "auto"
    assert model.encode("a query").shape == (32, 128)


@pytest.mark.parametrize(
    ("name", "saved", "message", "valid"),
    [
        ("scorer", "warp", "scorer must be one of .* got 'warp'", "auto"),
        ("fuse_projection", "no", "fuse_projection must be True or False, got 'no'", False),
        ("fuse_projection", 0, "fuse_projection must be True or False, got 0", True),
    ],
)
def test_an_unknown_saved_flag_is_an_error(
    model: ColBERT, name: str, saved: object, message: str, valid: object, tmp_path: Path
) -> None:
    model.save_pretrained(str(tmp_path), create_model_card=False)
    config = saved_config(tmp_path) | {name: saved}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        ColBERT(str(tmp_path), device="cpu")
    assert getattr(ColBERT(str(tmp_path), device="cpu", **{name: valid}), name) == valid


def test_a_saved_null_is_a_flag_that_was_not_set(model: ColBERT, tmp_path: Path) -> None:
    model.save_pretrained(str(tmp_path), create_model_card=False)
    config = saved_config(tmp_path) | dict.fromkeys(("scorer", "masking", "fuse_projection"))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    loaded = ColBERT(str(tmp_path), device="cpu")
    assert (loaded.scorer, loaded.masking, loaded.fuse_projection) == ("auto", "exclude", False)


def test_similarity_follows_the_flags(model: ColBERT, monkeypatch: pytest.MonkeyPatch) -> None:
    half = QUERIES.half(), DOCUMENTS.half()
    for scorer, dtype in (("auto", torch.float32), ("torch", torch.float16), ("pylate_flash", torch.float32)):
        model.scorer = scorer
        assert model.similarity(*half).dtype == dtype
        assert model.similarity_pairwise(*half).dtype == dtype
        assert model.similarity(*half, backend="torch").dtype == torch.float16
    assert model.similarity(QUERIES, DOCUMENTS, documents_mask=MASK).item() == -0.5
    model.masking = "zero"
    assert model.similarity(QUERIES, DOCUMENTS, documents_mask=MASK).item() == 1.5

    # A named scorer overrides the environment variable, "auto" does not.
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
    assert model.similarity(*half).dtype == torch.float32
    model.scorer = "auto"
    assert model.similarity(*half).dtype == torch.float16
    with use_scorer("pylate_flash"):
        assert model.similarity(*half).dtype == torch.float32


def test_similarity_has_pylates_values(model: ColBERT) -> None:
    # With multiples of 1/16, products and sums are exact in float32.
    embeddings = torch.randint(-16, 16, (3, 6, 8), generator=torch.Generator().manual_seed(0)) / 16
    model.scorer = "pylate_flash"
    scores = model.similarity(embeddings.numpy(), embeddings)
    assert torch.equal(scores, pylate.scores.colbert_scores(embeddings, embeddings))
    ragged = [embeddings[0], embeddings[1, :2], embeddings[2, :4]]
    pairwise = model.similarity_pairwise(ragged, ragged)
    assert torch.equal(pairwise, pylate.scores.colbert_scores_pairwise(ragged, ragged))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_the_flags_and_are_independent(model: ColBERT, duplicate) -> None:
    model.scorer, model.masking = "torch", "zero"
    other = duplicate(model)
    assert type(other) is ColBERT
    assert (other.scorer, other.masking) == ("torch", "zero")
    assert same_weights(other, model)
    other.scorer = "pylate_flash"
    assert model.scorer == "torch"
    assert other.similarity(QUERIES.half(), DOCUMENTS.half()).dtype == torch.float32


@pytest.fixture
def encoder(tiny_colbert_path: str) -> str:
    """The folder of an encoder without a projection."""
    return str(Path(tiny_colbert_path).with_name("bert"))


def test_a_projection_drawn_at_loading_is_random_until_it_is_trained_replaced_or_saved(
    encoder: str, tiny_colbert_path: str, tmp_path: Path
) -> None:
    model = ColBERT(encoder, device="cpu")
    assert model.projection_is_random
    assert copy.deepcopy(model).projection_is_random
    model.save_pretrained(str(tmp_path / "saved"))
    assert not ColBERT(str(tmp_path / "saved"), device="cpu").projection_is_random
    # Casting to half precision does not change that.
    assert copy.deepcopy(model).half().projection_is_random
    replaced = copy.deepcopy(model)
    replaced[1] = models.Dense(32, 4)
    assert not replaced.projection_is_random
    with torch.no_grad():
        model[1].linear.weight.add_(1e-3)
    assert not model.projection_is_random
    assert not ColBERT(tiny_colbert_path, device="cpu").projection_is_random
    # A layer added for another embedding size is random.
    wider = ColBERT(tiny_colbert_path, embedding_size=8, device="cpu")
    assert len(wider) == 3
    assert wider.projection_is_random


def test_the_projection_in_a_checkpoint_of_stanford_is_not_random(encoder: str, tmp_path: Path) -> None:
    stanford = Path(shutil.copytree(encoder, tmp_path / "stanford"))
    config = json.loads((stanford / "config.json").read_text())
    (stanford / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    tensors = load_file(stanford / "model.safetensors")
    save_file({**tensors, "linear.weight": torch.ones(16, 32)}, stanford / "model.safetensors", {"format": "pt"})
    model = ColBERT(str(stanford), device="cpu")
    assert torch.equal(model[1].linear.weight, torch.ones(16, 32))
    assert not model.projection_is_random


def test_the_longest_input_is_what_the_encoder_has_positions_for(model: ColBERT, tmp_path: Path) -> None:
    assert model.longest_input == 128
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = transformers.RobertaConfig(vocab_size=50, max_position_embeddings=20, pad_token_id=1, **small)
    encoder = transformers.RobertaModel(config)
    other = copy.copy(model)
    other._modules = {"0": types.SimpleNamespace(auto_model=encoder)}
    assert other.longest_input == 18
    encoder(torch.full((1, 18), 5))
    with pytest.raises((IndexError, RuntimeError)):
        encoder(torch.full((1, 19), 5))
    encoder.config.max_position_embeddings = None
    assert other.longest_input is None
