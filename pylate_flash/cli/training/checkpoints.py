"""The checkpoints of `pylate-flash train`, in a subfolder of the output folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from ..common import UserError

CHECKPOINTS = "checkpoints"


class Checkpoints:
    """The folder `checkpoints` of an output folder: the last checkpoints of a run, and the run's settings."""

    def __init__(self, output: Path) -> None:
        self.folder = output / CHECKPOINTS
        self._settings = self.folder / "run.json"

    def exist(self) -> bool:
        """Whether an earlier run left any; raises for a folder of this name that `train` did not create."""
        if os.path.lexists(self.folder) and not self._settings.is_file() and not _is_empty(self.folder):
            raise UserError(f"{self.folder} was not created by `train`; move it away, or choose another --output")
        return self.last() is not None

    def last(self) -> Path | None:
        """The last complete checkpoint: a trainer writes its state last."""
        checkpoints = []
        for path in self.folder.glob("checkpoint-*"):
            with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
                checkpoints.append((json.loads((path / "trainer_state.json").read_bytes())["global_step"], path))
        return max(checkpoints)[1] if checkpoints else None

    def begin(self, settings: dict[str, Any]) -> None:
        """Start a run with these settings, and remove what an earlier one left."""
        self.remove()
        self.folder.mkdir(exist_ok=True)
        self._settings.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def check(self, settings: dict[str, Any]) -> Path:
        """Return the last checkpoint of the run; raise an error naming settings that differ."""
        checkpoint = self.last()
        if checkpoint is None or not self._settings.is_file():
            raise UserError(f"--resume: there is no checkpoint in {self.folder}; omit --resume to start a new run")
        try:
            before = json.loads(self._settings.read_bytes())
            changed = [name for name in settings if before[name] != settings[name]]
        except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
            raise UserError(f"--resume: {self._settings} is damaged: {error}") from error
        if "--data" in changed:
            raise UserError(f"--resume: --data has changed since the run in {self.folder} was started")
        if changed:
            differences = ", ".join(f"{name} {_shown(before[name])}, not {_shown(settings[name])}" for name in changed)
            raise UserError(f"--resume: the run in {self.folder} was started with {differences}")
        return checkpoint

    def remove(self) -> None:
        """Remove the checkpoints and the settings, and the folder if it is then empty."""
        for path in self.folder.glob("checkpoint-*"):
            if re.fullmatch(r"checkpoint-\d+", path.name):
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._settings.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def tidy(self) -> None:
        """Remove everything if no checkpoint was written."""
        if self.last() is None:
            self.remove()


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
