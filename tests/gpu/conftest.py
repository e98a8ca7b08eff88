"""Skip all tests in this folder without a CUDA GPU that the kernels support."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.tools import products_in


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    served = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    folder = Path(__file__).parent
    for item in items:
        if folder not in item.path.parents:
            continue
        if not served:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU of compute capability 8.0 or higher"))
        # A process that waits for a kernel handles no signal, so a thread ends it, and the test fails by name.
        item.add_marker(pytest.mark.timeout(300, method="thread"))


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """Release cached memory for other processes that run tests on the same GPU."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    """Use exact float32 products, unless a test asks for less."""
    with products_in("highest"):
        yield


@pytest.fixture(scope="session")
def colbert_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a small ColBERT with random weights and a tokenizer of letters; needs no files of other packages."""
    pytest.importorskip("pylate")
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
    from tokenizers.models import WordPiece
    from transformers import PreTrainedTokenizerFast

    from tests.pylate_checkpoint import save_colbert

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = string.ascii_lowercase + string.digits
    tokens = [*special, *string.punctuation, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, special, strict=True)))
    return save_colbert(tmp_path_factory.mktemp("colbert"), fast, 64, 32, 100)
