"""Small stand-ins for an encoder; helpers that enable dropout and record forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WordVectors(nn.Module):
    """A model with one fixed unit vector per token, so that similarities can be read off."""

    skiplist: list[int] = []
    do_query_expansion = True

    def __init__(self, vectors: list[list[float]]) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.tensor(vectors, dtype=torch.float64))

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"token_embeddings": self.vectors[features["input_ids"]]}


def tokens(*rows: list[int], masked: int = -1) -> dict[str, torch.Tensor]:
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != masked).long()}


class Wrapped(nn.Module):
    """A wrapper with the interface of DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: dict) -> dict:
        return self.module(features)


@contextmanager
def with_dropout(model: nn.Module) -> Iterator[None]:
    """Training mode with a dropout rate of 0.3; on exit, evaluation mode with the original rates."""
    dropouts = {module: module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    try:
        for dropout in dropouts:
            dropout.p = 0.3
        model.train()
        yield
    finally:
        model.eval()
        for dropout, rate in dropouts.items():
            dropout.p = rate


class Watch:
    """Record the token ids and the output embeddings of each forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.ids: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._hook = model.register_forward_hook(self._see)

    def _see(self, module: nn.Module, arguments: tuple, output: dict) -> None:
        self.ids.append(arguments[0]["input_ids"])
        self.outputs.append(output["token_embeddings"].detach().clone())

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()
