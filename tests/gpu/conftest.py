"""Skip everything here without a CUDA GPU that the kernels run on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU of compute capability 8.0 or higher"))


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """What a test's tensors took is there for the other processes that test on the same GPU."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def colbert_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a small ColBERT with random weights and a tokenizer of letters: needs no other package's files."""
    pytest.importorskip("pylate")
    import string

    from pylate import models
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
    from tokenizers.models import WordPiece
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = string.ascii_lowercase + string.digits
    tokens = [*special, *string.punctuation, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")

    folder = tmp_path_factory.mktemp("colbert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=128,
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder / "bert")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, special, strict=True))).save_pretrained(
        folder / "bert"
    )
    model = models.ColBERT(str(folder / "bert"), embedding_size=64, query_length=32, document_length=100, device="cpu")
    model.save_pretrained(str(folder / "colbert"))
    return str(folder / "colbert")
