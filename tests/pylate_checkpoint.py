"""Small encoders, and a ColBERT checkpoint in PyLate's format written without PyLate, which both libraries load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

QUERY_LENGTH, DOCUMENT_LENGTH = 8, 12
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["cats", "dogs", "planes", "trains", "bread", "butter", "and", "a", "old", "new", "red", "blue", "."]
_VOCABULARY = {word: number for number, word in enumerate([*_SPECIAL, *WORDS])}
# PyLate adds these to the tokenizer, including the spaces.
_PREFIXES = {"[Q] ": len(_VOCABULARY), "[D] ": len(_VOCABULARY) + 1}


def save_bert(
    folder: Path, tokenizer: Any, hidden_size: int, positions: int = 128, layers: int = 2, wider: int = 2
) -> None:
    """Save a BERT with random weights and no dropout, and its tokenizer."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=wider * hidden_size,
        max_position_embeddings=positions,
        # Larger than BERT's 0.02, so that different tokens get clearly different embeddings.
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_colbert(folder: Path, tokenizer: Any, size: int, query_length: int, document_length: int) -> str:
    """Save a PyLate ColBERT with embedding size = hidden size, next to its encoder; return its path."""
    from pylate import models

    torch.manual_seed(0)
    save_bert(folder / "bert", tokenizer, size)
    lengths = {"query_length": query_length, "document_length": document_length}
    model = models.ColBERT(str(folder / "bert"), embedding_size=size, device="cpu", **lengths)
    model.save_pretrained(str(folder / "colbert"))
    return str(folder / "colbert")


def write_checkpoint(folder: Path, words: Sequence[str] = WORDS) -> None:
    """Random weights: one BERT layer, one token per word, d = 8. The skiplist drops full stops from documents."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*_SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    names = {f"{token.strip('[]').lower()}_token": token for token in _SPECIAL}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **names)
    fast.add_tokens(list(_PREFIXES))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_bert(folder, fast, 16, positions=32, layers=1, wider=1)
        weight = torch.randn(8, 16)
    (folder / "1_Dense").mkdir()
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors", {"format": "pt"})
    for file, content in {
        "1_Dense/config.json": {
            "in_features": 16,
            "out_features": 8,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
            "use_residual": False,
        },
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
        ],
        "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "model_type": "ColBERT",
            "__version__": {"sentence_transformers": "5.3.0", "transformers": "5.3.0", "pytorch": "2.10.0"},
            "prompts": {"query": "", "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "MaxSim",
            "query_prefix": "[Q] ",
            "document_prefix": "[D] ",
            "query_length": QUERY_LENGTH,
            "document_length": DOCUMENT_LENGTH,
            "attend_to_expansion_tokens": False,
            "skiplist_words": ["."],
            "do_query_expansion": True,
        },
    }.items():
        (folder / file).write_text(json.dumps(content))


def embeddings_by_hand(folder: Path, text: str, is_query: bool) -> torch.Tensor:
    """Reference embeddings of a text of WORDS by the model in the folder: unit vectors [L, 8]."""
    from safetensors.torch import load_file
    from transformers import BertModel

    encoder = BertModel.from_pretrained(folder).eval()
    weight = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"]
    length = QUERY_LENGTH if is_query else DOCUMENT_LENGTH
    words = [_VOCABULARY[word] for word in text.split()][: length - 3]
    tokens = [_VOCABULARY["[CLS]"], _PREFIXES["[Q] " if is_query else "[D] "], *words, _VOCABULARY["[SEP]"]]
    attended = len(tokens)
    if is_query:
        # Query expansion: padded with [MASK], which no token attends to.
        tokens += [_VOCABULARY["[MASK]"]] * (length - attended)
    mask = torch.arange(len(tokens)) < attended
    with torch.no_grad():
        states = encoder(torch.tensor([tokens]), attention_mask=mask[None].long()).last_hidden_state[0]
    result = F.normalize(states @ weight.T, dim=-1)
    keep = torch.tensor([is_query or token != _VOCABULARY["."] for token in tokens])
    return result[keep]
