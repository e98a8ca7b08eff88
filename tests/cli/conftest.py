from __future__ import annotations

import json
import shutil

import pytest
import torch


@pytest.fixture
def output(tiny_demo):
    """What a tiny demo left."""
    return tiny_demo[0]


@pytest.fixture(scope="session")
def other_colbert_path(tiny_colbert_path, tmp_path_factory):
    """A model of the same shape with other weights."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("other") / "colbert"
    shutil.copytree(tiny_colbert_path, folder)
    weights = folder / "1_Dense" / "model.safetensors"
    save_file({name: -tensor for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """A ColBERT of one layer that knows few words, loaded in a moment; its encoder, without projection, lies beside it.

    The encoder has positions for 16 tokens.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from pylate_flash.models import ColBERT

    folder = tmp_path_factory.mktemp("small")
    special = [f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")]
    words = [*special, "cats", "dogs", "planes", "trains", "and", *"abcdefghijklmnopqrstuvwxyz.,!?;:"]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = {f"{token.strip('[]').lower()}_token": token for token in special}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    BertModel(config).save_pretrained(folder / "encoder")
    model = ColBERT(str(folder / "encoder"), embedding_size=4, query_length=8, document_length=12, device="cpu")
    model.save_pretrained(str(folder / "model"))
    return folder / "model"


@pytest.fixture
def beir(tmp_path):
    """A small BEIR folder that a test may spoil."""
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    texts = {"d1": "cats and dogs", "d2": "planes and trains", "d3": "bread and butter"}
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": id_, "title": "", "text": text}) + "\n" for id_, text in texts.items())
    )
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q1", "text": "trains"}) + "\n")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t1\n")
    return folder


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "train.jsonl"
    rows = [{"query": f"question {i}", "positive": f"answer number {i}"} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
