"""A tiny multi-vector model of sentence-transformers, built here, without a model hub or weights from a package."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pylate_flash.hosts import HOSTS

WORDS = [
    "a", "the", "of", "in", "on", "to", "cat", "dog", "bird", "fish", "river", "mountain", "sea", "sky", "red", "green",
    "blue", "old", "new", "big", "small", "runs", "sleeps", "sings",
]  # fmt: skip

# Tests that need the host are in files that cannot be imported without it.
collect_ignore_glob = [] if HOSTS["sentence-transformers"].is_there() else ["test_st_*.py"]


@pytest.fixture(scope="session")
def tiny_encoder_path(tmp_path_factory):
    """Folder of a `MultiVectorEncoder` with random weights: two small BERT layers, words as tokens, d = 16."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    from tests.pylate_checkpoint import save_bert

    folder = tmp_path_factory.mktemp("tiny-encoder")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS, ".", ","])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    torch.manual_seed(0)
    save_bert(folder / "bert", PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names), 32, positions=64)
    token = {"module_input_name": "token_embeddings"}
    modules: list[Any] = [
        Transformer(str(folder / "bert")),
        Dense(32, 16, bias=False, activation_function=None, **token),
        Normalize(**token),
        MultiVectorMask(skiplist_words=["."]),
    ]
    MultiVectorEncoder(modules=modules, device="cpu").save_pretrained(str(folder / "encoder"))
    return str(folder / "encoder")


@pytest.fixture
def tiny_encoder(tiny_encoder_path):
    """The model of `tiny_encoder_path`, loaded afresh."""
    from sentence_transformers import MultiVectorEncoder

    return MultiVectorEncoder(tiny_encoder_path, device="cpu")


@pytest.fixture(scope="session")
def texts():
    """A function that draws texts of several lengths: `texts(seed, count)`."""

    def draw(seed, count, longest=9):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
        return [" ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (n,), generator=generator)) for n in lengths]

    return draw
