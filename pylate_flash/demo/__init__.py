"""The demo: a ColBERT model trained, indexed, searched and evaluated on the documentation of installed packages.

- `corpus`: the texts. Pure Python, without dependencies.
- `job`: the run itself, and the parts of it that the examples use.
- `agreement`: whether two scorers give the same ranking.
- `picture`: draws `demo.png`.
"""

from __future__ import annotations

from .corpus import Corpus, build_corpus
from .job import FULL, QUICK, Settings, data_folder, load_encoder, model_folder, run, train

__all__ = [
    "FULL",
    "QUICK",
    "Corpus",
    "Settings",
    "build_corpus",
    "data_folder",
    "load_encoder",
    "model_folder",
    "run",
    "train",
]
