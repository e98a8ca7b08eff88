"""The `scorer` flag of hosts.sentence_transformers.models, and how it is loaded and saved."""

from __future__ import annotations

import json

import pytest
import sentence_transformers
import torch

from pylate_flash import registered
from pylate_flash.hosts import SENTENCE_TRANSFORMERS
from pylate_flash.hosts.sentence_transformers.models import MultiVectorEncoder

CONFIG = "config_sentence_transformers.json"
# The host's float16 sums round every similarity; ours do not.
QUERIES = torch.nn.functional.normalize(
    torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)), dim=-1
).half()
DOCUMENTS = torch.nn.functional.normalize(
    torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1)), dim=-1
).half()


def own(name):
    return SENTENCE_TRANSFORMERS.original(f"sentence_transformers.util.similarity:{name}")(QUERIES, DOCUMENTS)


def is_fused(scores, name):
    assert torch.allclose(scores, own(name), atol=0.02)
    return not torch.equal(scores, own(name))


@pytest.mark.parametrize(
    ("scorer", "plain", "while_registered"),
    [("auto", False, True), (None, False, True), ("pylate_flash", True, True), ("torch", False, False)],
)
def test_similarities_follow_the_flag(scorer, plain, while_registered, tiny_encoder_path):
    model = MultiVectorEncoder(tiny_encoder_path, device="cpu", scorer=scorer)
    for name, function in (("maxsim", model.similarity), ("maxsim_pairwise", model.similarity_pairwise)):
        assert is_fused(function(QUERIES, DOCUMENTS), name) is plain
        with registered("sentence-transformers"):
            assert is_fused(function(QUERIES, DOCUMENTS), name) is while_registered


@pytest.mark.parametrize("scorer", ["pylate_flash", "torch"])
def test_the_mean_and_other_options(scorer, tiny_encoder_path):
    model = MultiVectorEncoder(tiny_encoder_path, device="cpu", scorer=scorer, similarity_fn_name="meanmaxsim")
    queries, documents = QUERIES.float(), DOCUMENTS.float()
    plain = sentence_transformers.MultiVectorEncoder(tiny_encoder_path, device="cpu", similarity_fn_name="meanmaxsim")
    for options in ({}, {"length_normalize": False}, {"a_mask": torch.tensor([[1, 1, 0, 0, 0]])}):
        assert torch.allclose(
            model.similarity(queries, documents, **options), plain.similarity(queries, documents, **options)
        )
    assert torch.allclose(model.similarity_pairwise(queries, documents), plain.similarity_pairwise(queries, documents))


def test_saved_and_loaded_with_and_without_this_package(tiny_encoder_path, texts, tmp_path):
    model = MultiVectorEncoder(tiny_encoder_path, device="cpu", scorer="pylate_flash")
    model.save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / CONFIG).read_text())["scorer"] == "pylate_flash"
    assert MultiVectorEncoder(str(tmp_path), device="cpu").scorer == "pylate_flash"
    assert MultiVectorEncoder(str(tmp_path), device="cpu", scorer="torch").scorer == "torch"
    plain = sentence_transformers.MultiVectorEncoder(str(tmp_path), device="cpu")
    assert type(plain) is sentence_transformers.MultiVectorEncoder
    for mine, theirs in zip(model.encode_query(texts(1, 3)), plain.encode_query(texts(1, 3)), strict=True):
        assert torch.equal(mine, theirs)
    # The modules name nothing of this package, which the host would have to import.
    assert "pylate_flash" not in (tmp_path / "modules.json").read_text()


def test_the_flag_can_be_set(tiny_encoder_path):
    model = MultiVectorEncoder(tiny_encoder_path, device="cpu")
    assert model.scorer == "auto"
    model.scorer = "pylate_flash"
    assert is_fused(model.similarity(QUERIES, DOCUMENTS), "maxsim")
    with pytest.raises(ValueError, match="scorer must be one of 'auto', 'pylate_flash', 'torch', got 'lik'"):
        model.scorer = "lik"
    assert model.scorer == "pylate_flash"


def test_unknown_flags(tiny_encoder_path, tmp_path, caplog):
    with pytest.raises(ValueError, match="scorer must be one of .* got 'fast'"):
        MultiVectorEncoder("a model that is not looked for", scorer="fast")
    MultiVectorEncoder(tiny_encoder_path, device="cpu").save_pretrained(str(tmp_path))
    config = json.loads((tmp_path / CONFIG).read_text())
    for saved, message in (("lik", None), ("fast", "got 'fast'"), (3, "got 3")):
        (tmp_path / CONFIG).write_text(json.dumps(config | {"scorer": saved}))
        if message is None:
            assert MultiVectorEncoder(str(tmp_path), device="cpu").scorer == "auto"
            assert "which only PyLate has" in caplog.text
        else:
            with pytest.raises(ValueError, match=message):
                MultiVectorEncoder(str(tmp_path), device="cpu")
