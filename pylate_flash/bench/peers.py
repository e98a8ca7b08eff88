"""The other packages that the suites measure: their availability, version and tuning.

Each is measured at its best: through its public functions, with every argument that saves it work, the fastest of
several where it has several, tile sizes tuned for the exact shape (`Peer.forget_tuning`), and without gradients.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from pylate_flash._extras import installed_version


@dataclass(frozen=True)
class Peer:
    """Another package that computes MaxSim."""

    distribution: str  # its name on PyPI
    module: str  # its import name
    device: str | None = "cuda"  # the only device type that it supports, or None for any
    since: str | None = None  # the first version with the measured functions, or None for any

    def __getitem__(self, name: str) -> Any:
        """Import the module of a dotted name, and return the object."""
        module, _, name = f"{self.module}.{name}".rpartition(".")
        return getattr(importlib.import_module(module), name)

    def unavailable(self, device: torch.device) -> str | None:
        """Return why the package cannot be measured on a device, or None if it can."""
        if self.device is not None and device.type != self.device:
            return "its kernels need a CUDA GPU" if self.device == "cuda" else "it computes on the CPU only"
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            return f"not installed ({error})"
        except Exception as error:
            # A broken package (a missing library or device, say) must not stop the measurement of the rest.
            return f"cannot be imported ({type(error).__name__}: {error})"
        if self.since is None:
            return None
        version = self.version()
        try:
            has_it = version is not None and Version(version) >= Version(self.since)
        except InvalidVersion:
            return f"version {version!r} is installed, not a version number; expected {self.since} or later"
        return None if has_it else f"version {version} is installed, expected {self.since} or later"

    def version(self) -> str | None:
        """Return the installed version, or None."""
        if version := installed_version(self.distribution):
            return version
        try:
            return str(importlib.import_module(self.module).__version__)
        except Exception:
            return None

    def forget_tuning(self) -> None:
        """Clear the autotuner caches of the package's kernels, so that the next call tunes for its own shape.

        A Triton autotuner caches its choice under a key that omits much of the shape (here the document length and both
        batch sizes), so the first shape decides for all that follow. Compiled kernels stay cached.
        """
        from triton.runtime.autotuner import Autotuner

        for name, module in list(sys.modules.items()):
            if name == self.module or name.startswith(self.module + "."):
                for value in vars(module).values():
                    if isinstance(value, Autotuner):
                        value.cache.clear()
                        # The choice is also cached on disk, under the same key.
                        value.cache_results = False


LIK = Peer("late-interaction-kernels", "late_interaction_kernels")
FLASH_MAXSIM = Peer("flash-maxsim", "flash_maxsim")
PYLATE = Peer("pylate", "pylate", device=None)
MAXSIM_CPU = Peer("maxsim-cpu", "maxsim_cpu", device="cpu")
SENTENCE_TRANSFORMERS = Peer("sentence-transformers", "sentence_transformers", device=None, since="6.0")
PEERS = (LIK, FLASH_MAXSIM, PYLATE, MAXSIM_CPU, SENTENCE_TRANSFORMERS)
