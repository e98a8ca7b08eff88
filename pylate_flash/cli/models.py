"""Loading the model of a command: the checkpoint decides which library loads it, and broken ones are reported."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._extras import HOSTS as ABOUT
from .._extras import MissingExtraError
from ..encoding.texts import (
    encode,
    is_multi_vector_encoder,
    longest_input,
    prompt_of,
    set_text_lengths,
    text_lengths,
)
from ..encoding.weights import no_missing_weights
from ..hosts import HOSTS
from . import options
from .common import UserError, be_quiet, cause, check_text, explained
from .model_folder import check_model_folder

if TYPE_CHECKING:
    from ..hosts.sentence_transformers.models import MultiVectorEncoder
    from ..models import ColBERT

    Model = ColBERT | MultiVectorEncoder

PYLATE, SENTENCE_TRANSFORMERS = "pylate", "sentence-transformers"
# The PyLate module that sentence-transformers 6 loads as its own.
_PYLATE_DENSE = "pylate.models.Dense.Dense"


def check_encoding_host(needed_by: str) -> None:
    """Raise an error naming the extras if neither PyLate nor sentence-transformers 6 is installed to encode texts.

    Otherwise silence their messages about loading.
    """
    if not any(HOSTS[name].is_there() for name in (PYLATE, SENTENCE_TRANSFORMERS)):
        raise MissingExtraError(
            f"{needed_by} needs PyLate or sentence-transformers 6, and neither is installed: "
            'pip install "pylate-flash[pylate]" or pip install "pylate-flash[sentence-transformers]"',
            name="pylate",
        )
    be_quiet()


def title_of(model: Any) -> str:
    """The name of a loaded model's library."""
    return ABOUT["sentence_transformers" if is_multi_vector_encoder(model) else "pylate"].title


def host_of(model: str, trust_remote_code: bool = False) -> str:
    """Return the library that loads a checkpoint (a folder or a name): "pylate" or "sentence-transformers".

    A `MultiVectorEncoder` needs sentence-transformers 6. PyLate's models and plain encoders are loaded by PyLate if it
    is installed, otherwise by sentence-transformers 6. Raises a `UserError` for configurations that are broken or name
    code of the model that may not run, and if the library is not installed in a supported version.
    """
    what = _described(model)
    if os.path.isdir(model):
        with explained(f"{what} cannot be loaded: "):
            check_model_folder(Path(model), trust_remote_code)
    with _loader_errors(model, what):
        kind = (_read(model, "config_sentence_transformers.json") or {}).get("model_type")
        has_pylate = HOSTS[PYLATE].is_there()
        if has_pylate and kind != "MultiVectorEncoder":
            return PYLATE
        if kind == "MultiVectorEncoder" and not HOSTS[SENTENCE_TRANSFORMERS].is_there():
            raise UserError(
                f"{what} is a MultiVectorEncoder of sentence-transformers 6, which is not installed: "
                'pip install "pylate-flash[sentence-transformers]"'
                + (", in a separate environment, as PyLate requires an older version" if has_pylate else "")
            )
        with explained(kinds=(ImportError,)):
            HOSTS[SENTENCE_TRANSFORMERS].check(what)
        modules = {str(entry.get("type")) for entry in _modules(model)}
        of_pylate = sorted(name for name in modules if name.startswith("pylate.") and name != _PYLATE_DENSE)
        if of_pylate:
            raise UserError(
                f"{what} has the module {of_pylate[0]}, which only PyLate can load, and PyLate is not installed: "
                'pip install "pylate-flash[pylate]"'
            )
        return SENTENCE_TRANSFORMERS


def load_model(
    model: str,
    *,
    searching: bool = False,
    trust_remote_code: bool = False,
    device: str | None = None,
    scorer: str | None = None,
    query_length: int | None = None,
    document_length: int | None = None,
) -> Model:
    """Load a model, a folder or a name on the hub, with the library from `host_of`; a `UserError` says why it fails.

    Checks that it encodes, and that its encoder allows its lengths. If `searching`, a randomly initialised projection
    is rejected. None stands for a GPU if there is one, the saved scorer, and the model's own lengths.
    """
    what, host = _described(model), host_of(model, trust_remote_code)
    lengths: dict[str, Any] = {"query_length": query_length, "document_length": document_length}
    kwargs: dict[str, Any] = {"trust_remote_code": trust_remote_code, "device": device}
    with _loader_errors(model, what):
        loaded: Model
        with no_missing_weights():
            if host == PYLATE:
                from ..models import ColBERT

                loaded = ColBERT(model, scorer=scorer, **kwargs, **lengths)
            else:
                from ..hosts.sentence_transformers.models import MultiVectorEncoder

                _check_scorer_of_encoder(scorer)
                loaded = MultiVectorEncoder(model, scorer=scorer, **kwargs)
        _check_words(loaded)
    with explained(f"{what}: "):
        if host == SENTENCE_TRANSFORMERS:
            set_text_lengths(loaded, **lengths)
    _check_lengths(loaded, what, lengths)
    if searching and has_random_projection(loaded, model):
        raise UserError(
            f"{what} is an encoder without a projection: a random one would make the results meaningless; train it "
            "first with `pylate-flash train`"
        )
    _check_encodes(loaded, what)
    return loaded


def has_random_projection(model: Any, name: str) -> bool:
    """Whether a layer of a model's projection was randomly initialised when it was loaded from `name`."""
    if not is_multi_vector_encoder(model):
        return model.projection_is_random
    if not any(type(module).__name__ == "Dense" for module in model.children()):
        return False
    architectures = (_read(name, "config.json") or {}).get("architectures") or []
    saved = any(str(entry.get("type")).endswith(".Dense") for entry in _modules(name))
    return not saved and "HF_ColBERT" not in architectures


def document_tokens(model: Any, texts: list[str]) -> list[int]:
    """Numbers of tokens of documents without truncation, including the marker or the prompt before them."""
    # PyLate's marker is inserted as one token.
    prompt, marker = prompt_of(model, is_query=False), 0 if is_multi_vector_encoder(model) else 1
    input_ids = model.tokenizer([prompt + text for text in texts], truncation=False)["input_ids"]
    return [len(tokens) + marker for tokens in input_ids]


def check_scorer(scorer: str | None, model: Any) -> None:
    """Score one token, to report a scorer that is not installed or cannot compute here before the work starts."""
    import torch

    one = torch.ones(1, 1, 16, device=model.device)
    try:
        if is_multi_vector_encoder(model):
            _check_scorer_of_encoder(scorer)
            model.similarity(one, one)
        else:
            from ..scores import colbert_scores

            colbert_scores(one, one, backend=scorer)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--scorer {scorer} cannot compute on {model.device}: {cause(error)}") from error


def _check_scorer_of_encoder(scorer: str | None) -> None:
    if scorer in ("flash", "lik"):
        raise UserError(
            f"--scorer {scorer} works with PyLate only, and sentence-transformers loads this model; expected "
            "pylate_flash, torch or auto"
        )


def _described(model: str) -> str:
    return f"the model in {model}" if os.path.isdir(model) else f"the model {model!r}"


def _modules(model: str) -> list[dict[str, Any]]:
    """The entries of modules.json; empty for a model without it."""
    entries = _read(model, "modules.json") or []
    return [entry for entry in entries if isinstance(entry, dict)]


def _read(model: str, file: str) -> Any:
    """The JSON of a file of a model, or None if it has no such file."""
    if os.path.isdir(model):
        path: str | None = os.path.join(model, file)
    else:
        # From the cache or the hub; both hosts depend on sentence-transformers.
        from sentence_transformers.util import load_file_path

        path = load_file_path(model, file)
    if path is None or not os.path.isfile(path):
        return None
    return json.loads(Path(path).read_bytes())


@contextmanager
def _loader_errors(model: str, what: str) -> Iterator[None]:
    """Convert any error of a model loader to a `UserError`."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if "trust_remote_code" in str(error):
            text = f"{what} cannot be loaded: it contains its own code; --trust-remote-code runs it"
        elif "ignore_mismatched_sizes" in str(error):
            text = f"{what} cannot be loaded: the sizes of its weights do not match its config.json"
        elif os.path.isdir(model) or not isinstance(error, OSError):
            text = f"{what} cannot be loaded: {cause(error)}"
        else:
            switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
            offline = [name for name in switches if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
            why = (
                f"it is not in the cache, and {offline[0]} is set, so nothing was downloaded"
                if offline
                else "no model of that name could be downloaded"
            )
            text = f"{what} cannot be loaded: there is no such folder, and {why}"
        raise UserError(text) from error


def _check_words(model: Any) -> None:
    """Check that the tokenizer has words, and the encoder an embedding for each: no loader does."""
    tokenizer = model.tokenizer
    added = tokenizer.get_added_vocab()
    numbers = [number for word, number in tokenizer.get_vocab().items() if word not in added]
    if not numbers:
        raise ValueError("its tokenizer has no words; are tokenizer.json or the vocabulary missing?")
    rows = getattr(model[0].auto_model.get_input_embeddings(), "num_embeddings", None)
    if rows is not None and max(numbers) >= rows:
        raise ValueError(f"its tokenizer has a word of id {max(numbers)}, and its encoder embeddings for {rows} words")


def _check_lengths(model: Any, what: str, requested: dict[str, int | None]) -> None:
    limit = longest_input(model)
    for name, value in text_lengths(model)._asdict().items():
        subject = f"--{name.replace('_', '-')} {value}" if requested[name] else f"{what}: its {name}, {value!r},"
        if value is None and is_multi_vector_encoder(model):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 4:
            raise UserError(f"{subject} must be an integer of at least 4")
        if limit is not None and value > limit:
            more = "" if requested[name] else f"; give a lower --{name.replace('_', '-')}"
            raise UserError(
                f"{subject} is more than the {limit} tokens that {what if requested[name] else 'it'} can read{more}"
            )


def _check_encodes(model: Any, what: str) -> None:
    """Encode a word, to report mismatched or non-finite weights before the work starts."""
    import numpy as np

    for is_query in (True, False):
        try:
            (embeddings,) = encode(model, ["a"], is_query=is_query)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise UserError(f"{what} cannot encode: {cause(error)}") from error
        if not np.isfinite(embeddings).all():
            raise UserError(f"{what} produces NaN or infinite embeddings: its weights are broken")


def check_model_name(model: str) -> None:
    """Check that a folder holds a model and that a path exists; anything else may be a model's name."""
    check_text(model, "--model")
    if os.path.isdir(model):
        if not any(os.path.isfile(os.path.join(model, name)) for name in ("modules.json", "config.json")):
            raise UserError(f"{model} is not a model: it has neither modules.json nor config.json")
    elif os.path.exists(model):
        raise UserError(f"{model} is a file; --model expects a model folder or a name")
    elif (
        model.startswith((".", "/", "~"))
        or model.count("/") > 1
        or Path(model).parts[:1] == options.DEMO_OUTPUT.parts
        or not model.strip()
    ):
        hint = (
            "; run `pylate-flash demo` first, or choose one with --model"
            if model == str(options.DEMO_OUTPUT / "model")
            else ""
        )
        raise UserError(f"there is no model in {model!r}{hint}")
