"""Build an exact index of a BEIR folder, retrieve through PyLate's retriever, and compute the usual metrics.

    python examples/evaluate_beir.py [BEIR_FOLDER] [MODEL]

Defaults: the collection and the model that `pylate-flash demo` has written to demo-output/. Without them, a small
collection is built first, and the encoder is untrained.
"""

from __future__ import annotations

import sys
import tempfile

from pylate_flash import demo, evaluation, indexes, models, retrieve

folder = sys.argv[1] if len(sys.argv) > 1 else demo.data_folder()
model = models.ColBERT(sys.argv[2] if len(sys.argv) > 2 else demo.model_folder(), scorer="pylate_flash")
documents, queries, qrels = evaluation.load_beir_folder(folder)

with tempfile.TemporaryDirectory() as index_folder:
    index = indexes.Flat(index_folder, "beir")
    embeddings = model.encode([document["text"] for document in documents], is_query=False, show_progress_bar=True)
    index.add_documents([document["id"] for document in documents], embeddings)

    # By hand: PyLate's retriever, PyLate's evaluate().
    retriever = retrieve.ColBERT(index=index)
    results = retriever.retrieve(model.encode(list(queries.values()), is_query=True), k=100)
    metrics = evaluation.evaluate(results, qrels, queries=list(queries), metrics=["ndcg@10", "recall@100"])
    print("by hand:", {name: round(float(value), 4) for name, value in metrics.items()})

    # In one call, with the same index.
    result = evaluation.evaluate_retrieval(model, documents, queries, qrels, index=index)
    print("one call:", {name: round(value, 4) for name, value in result.metrics.items()})

question, best = queries[next(iter(queries))], result.run[next(iter(queries))][0]
print(f"{question!r} finds {best['id']}")
