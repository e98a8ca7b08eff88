"""Three ways to let PyLate score through pylate_flash, and a check that the scores stay the same.

    python examples/swap_scorer.py

Uses the output of `pylate-flash demo` in demo-output/; without it, a small collection is built first.
"""

from __future__ import annotations

import time

import torch
from pylate import scores

from pylate_flash import demo, models, registered
from pylate_flash.evaluation import load_beir_folder

documents, queries, _ = load_beir_folder(demo.data_folder())
model = models.ColBERT(demo.model_folder(), device="cpu")


def embed(texts: list[str], is_query: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded token embeddings [N, L, d] and their mask [N, L]."""
    ragged = model.encode(texts, is_query=is_query, convert_to_tensor=True)
    padded = torch.nn.utils.rnn.pad_sequence(ragged, batch_first=True)
    lengths = torch.tensor([len(tokens) for tokens in ragged])
    return padded, torch.arange(padded.shape[1]) < lengths[:, None]


queries_embeddings, _ = embed(list(queries.values())[:32], is_query=True)
documents_embeddings, documents_mask = embed([document["text"] for document in documents[:200]], is_query=False)


def score(backend: str | None = None) -> torch.Tensor:
    return scores.colbert_scores(
        queries_embeddings, documents_embeddings, documents_mask=documents_mask, backend=backend
    )


start = time.perf_counter()
reference = score(backend="torch")
print(f"PyLate's torch scorer: {tuple(reference.shape)} scores in {time.perf_counter() - start:.3f} s")

# PyLate's torch scorer lets a padding token win if all real similarities are negative. masking="zero" does the same, so
# that the scores can be compared; the default, "exclude", never lets a masked token win.

# 1. PyLate's own function, anywhere in existing code: register() adds the backend, and "auto" prefers it.
with registered(masking="zero"):
    start = time.perf_counter()
    ours = score()
    print(f"after register():      the same, in {time.perf_counter() - start:.3f} s")

    # 2. By name; the environment variable PYLATE_SCORES_BACKEND=pylate_flash does the same.
    by_name = score(backend="pylate_flash")

# 3. By flags of the model, which are saved with it; the losses, the evaluators and rank.rerank follow them.
model.scorer, model.masking = "pylate_flash", "zero"
by_flag = model.similarity(queries_embeddings, documents_embeddings, documents_mask=documents_mask)

assert torch.equal(ours, by_name)
assert torch.equal(ours, by_flag)
print(f"largest difference:    {(ours - reference).abs().max():.1e}, scores being about {reference.mean():.0f}")
print(f"same best document:    {int((ours.argmax(1) == reference.argmax(1)).sum())} of {len(ours)} queries")
