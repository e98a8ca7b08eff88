"""Asynchronous copies from the host to a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# A copy of more pageable bytes than this may synchronize with work queued on the GPU.
_STAGED_BY_THE_DRIVER = 64 << 10


def on_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy an array or tensor to a device without synchronizing."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda" and tensor.nbytes > _STAGED_BY_THE_DRIVER and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
