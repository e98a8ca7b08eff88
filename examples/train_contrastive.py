"""Train a ColBERT model contrastively with many more in-batch negatives than the encoder's memory would allow.

    python examples/train_contrastive.py

Uses the training pairs of `pylate-flash demo` in demo-output/; without it, a small collection is built first.
"""

from __future__ import annotations

from datasets import load_dataset

from pylate_flash import demo, losses
from pylate_flash.trainer import ColBERTTrainer, ColBERTTrainingArguments

# Lines of {"query": ..., "positive": ...}; a column "negative" would add hard negatives.
pairs = load_dataset("json", data_files=str(demo.data_folder() / "train.jsonl"), split="train")
pairs = pairs.select(range(min(len(pairs), 512)))

# The encoder of the demo, as a ColBERT model with the flag scorer="pylate_flash".
model = demo.load_encoder(settings=demo.QUICK, device="cpu")

# Each query is scored against all 128 documents of the batch, but only 32 texts are encoded at a time. Scoring does not
# store the similarities of all token pairs either: that is what the scorer is for.
loss = losses.CachedContrastive(model, mini_batch_size=32)

trainer = ColBERTTrainer(
    model=model,
    args=ColBERTTrainingArguments(
        output_dir="demo-output/checkpoints",
        per_device_train_batch_size=128,
        num_train_epochs=1,
        learning_rate=2e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,  # one line per step: loss, negatives per query, tokens per second, peak memory
    ),
    train_dataset=pairs,
    loss=loss,
)
trainer.train()
model.save_pretrained("demo-output/example-model")
print("saved demo-output/example-model; `pylate-flash evaluate --data demo-output/data` takes it as --model")
