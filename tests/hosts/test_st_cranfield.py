"""The host's evaluator on real text, a collection of abstracts: the same metrics, registered or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from transformers import AutoTokenizer, BertConfig, BertModel

from pylate_flash import registered
from pylate_flash.beir import load_beir_folder


@pytest.fixture
def model(minilm_path, tmp_path):
    """Random weights, and the tokenizer of a real model."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    bert = BertModel(config)
    with torch.no_grad():
        # Equal words get nearly equal embeddings at any position, so that some relevant documents are retrieved.
        bert.embeddings.position_embeddings.weight.zero_()
    bert.save_pretrained(tmp_path / "bert")
    AutoTokenizer.from_pretrained(minilm_path).save_pretrained(tmp_path / "bert")
    token = {"module_input_name": "token_embeddings"}
    modules: list[Any] = [
        Transformer(str(tmp_path / "bert"), query_length=16, document_length=64),
        Dense(32, 16, bias=False, activation_function=None, **token),
        Normalize(**token),
        MultiVectorMask(skiplist_words=["."]),
    ]
    return MultiVectorEncoder(modules=modules, device="cpu").eval()


def test_the_metrics_are_equal_to_four_decimals(cranfield, model):
    documents, queries, qrels = load_beir_folder(cranfield)
    relevant = {query_id: {id_ for id_, grade in qrels[query_id].items() if grade > 0} for query_id in queries}
    evaluator = MultiVectorInformationRetrievalEvaluator(
        queries,
        {document["id"]: document["text"] for document in documents},
        relevant,
        # Several chunks, so that their results are merged.
        corpus_chunk_size=500,
        write_csv=False,
    )
    theirs = evaluator(model)
    with registered("sentence-transformers"):
        ours = evaluator(model)
    assert {name: round(value, 4) for name, value in ours.items()} == {
        name: round(value, 4) for name, value in theirs.items()
    }
    assert next(value for name, value in ours.items() if "ndcg@10" in name) > 0.05
