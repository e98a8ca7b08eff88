"""The output folder of a trained model: checked before the training, replaced file by file after it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..common import UserError, note
from ..files import other_files

if TYPE_CHECKING:
    from ..models import Model
    from .checkpoints import Checkpoints

# Names of model files that sentence-transformers, transformers and tokenizers read.
_OF_A_MODEL = re.compile(
    r"(modules|config|config_sentence_transformers|sentence_\w+_config|generation_config|(pre)?processor_config)\.json"
    r"|README\.md"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|pytorch_model(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index\.json"
    r"|adapter_config\.json|adapter_model\.(safetensors|bin)"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json"
    r"|vocab\.txt|merges\.txt|tokenizer\.model|spiece\.model|sentencepiece\.bpe\.model|chat_template\.jinja"
)
# These two mark a folder as a model or an encoder, so they are moved out first and moved in last.
_MARKS = ("config.json", "modules.json")
# Prefix of the folders in which a model is written before its files are moved into place.
UNFINISHED = "unfinished-model-"


def holds_model(folder: Path) -> bool:
    """Whether a folder holds a model, judging by its files."""
    return (folder / "modules.json").is_file()


def first_non_finite(model: Model) -> str | None:
    """Name of the first tensor of a model that has NaN or infinity, or None."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return name
    return None


def check_output(output: Path, checkpoints: Checkpoints, overwrite: bool, resume: bool) -> None:
    """Raise unless the output folder is usable, or the options allow to replace or continue what it holds."""
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; expected a folder")
    interrupted = checkpoints.exist()
    if holds_model(output):
        if not overwrite and not (resume and interrupted):
            hint = ", --resume continues the interrupted run" if interrupted else ""
            raise UserError(f"there is already a model in {output}; --overwrite replaces it{hint}")
        return
    unknown_files = other_files(output, checkpoints.folder.name)
    cut_short = [name for name in unknown_files if name.startswith(UNFINISHED)]
    if cut_short:
        raise UserError(
            f"the program was killed while it wrote a model to {output}: both this model and the previous one are in "
            f"{output / cut_short[0]}; move them away first"
        )
    if unknown_files:
        names = ", ".join(unknown_files[:3]) + (", ..." if len(unknown_files) > 3 else "")
        raise UserError(f"{output} holds files that are not a model ({names}); choose another folder")
    if interrupted and not overwrite and not resume:
        raise UserError(
            f"{checkpoints.folder} belongs to an interrupted run; --resume continues it, --overwrite starts a new one"
        )


def write_model(model: Model, folder: Path) -> list[str]:
    """Write a model into a folder, replacing any old one, and return the names of other entries in the folder.

    The model is written to a subfolder, then its files replace the old ones. If the program is killed between these
    moves, the folder does not load as a model, and both models are in the subfolder. If the model cannot be written, a
    `UserError` says where it was saved instead, and the old one is kept.
    """
    try:
        aside = Path(tempfile.mkdtemp(dir=folder, prefix=UNFINISHED))
    except OSError as error:
        raise UserError(saved_elsewhere(model, f"the model could not be written to {folder}: {error}")) from error
    new, old = aside / "model", aside / "old"
    try:
        model.save_pretrained(str(new))
    except Exception as error:  # safetensors has its own exception for a full disk
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(saved_elsewhere(model, f"the model could not be written to {folder}: {error}")) from error
    try:
        _exchange(folder, new, old)
    except OSError as error:
        raise UserError(f"the model could not be moved into {folder}: {error}; it is in {new}") from error
    shutil.rmtree(aside, ignore_errors=True)
    written = {path.relative_to(folder).parts[0] for path in _model_files(folder)}
    return sorted(path.name for path in folder.iterdir() if path.name not in written)


def saved_elsewhere(model: Model, failed: str) -> str:
    """Save a model to a temporary folder; return `failed` with the folder, or with the error if this fails too.

    An incomplete folder is removed.
    """
    folder = Path(tempfile.mkdtemp(prefix="pylate-flash-model-"))
    try:
        model.save_pretrained(str(folder))
    except BaseException as second:
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(second, Exception):  # safetensors has its own for a full disk
            raise
        return f"{failed}; nor could the model be saved to a temporary folder: {second}"
    return f"{failed}; the model is in {folder}"


def _exchange(folder: Path, new: Path, old: Path) -> None:
    """Move the files of a model out of a folder and those of another one in; on failure, move all back."""
    new_files = sorted((path.relative_to(new) for path in new.rglob("*") if path.is_file()), key=_rank)
    old_files = {path.relative_to(folder) for path in _model_files(folder)}
    old_files |= {path for path in new_files if os.path.lexists(folder / path)}
    moves = [(folder / path, old / path) for path in sorted(old_files, key=_rank, reverse=True)]
    moves += [(new / path, folder / path) for path in new_files]
    done: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
            done.append((source, target))
    except BaseException:
        for source, target in reversed(done):
            try:
                target.rename(source)
            except OSError as error:
                note(f"pylate-flash: {target} could not be moved back to {source}: {error}")
        raise
    for path in old_files:
        with contextlib.suppress(OSError):
            # Only empty folders, of modules that the new model does not have.
            (folder / path).parent.rmdir()


def _rank(path: Path) -> tuple[int, str]:
    name = str(path)
    return (_MARKS[::-1].index(name) + 1 if name in _MARKS else 0, name)


def _model_files(folder: Path) -> list[Path]:
    """The files with names of model files in a folder, and in the folders of its modules."""
    folders = [folder]
    try:
        modules = json.loads((folder / "modules.json").read_bytes())
        folders += [folder / module["path"] for module in modules if module["path"]]
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        # No model, or a broken list of modules: a loader would only look in the folder itself.
        pass
    inside = [path for path in folders if path.is_dir() and path.resolve().is_relative_to(folder.resolve())]
    return sorted({path for part in inside for path in part.iterdir() if _OF_A_MODEL.fullmatch(path.name)})
