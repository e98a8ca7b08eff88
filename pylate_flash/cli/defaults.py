"""The defaults of the commands' options."""

from __future__ import annotations

from pathlib import Path

# Of several commands: texts encoded at a time; what is random; where the demo leaves its output.
BATCH_SIZE = 32
SEED = 42
DEMO_OUTPUT = Path("demo-output")
# train
LINES_PER_STEP = 32
MINI_BATCH_SIZE = 32
EPOCHS = 1.0
LEARNING_RATE = 3e-5
TEMPERATURE = 1.0
# mine
NEGATIVES = 3
# evaluate
SPLIT = "test"
