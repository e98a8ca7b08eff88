"""Numbers of the host on their way to a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["on_device"]

# Of more pageable bytes, a copy may wait for what the GPU has been given before.
_STAGED_BY_THE_DRIVER = 64 << 10


def on_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device, without waiting for it."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda" and tensor.nbytes > _STAGED_BY_THE_DRIVER and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
