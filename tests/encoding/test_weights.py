"""encoding.weights: missing weights are an error, and reports that the library would not log stay hidden."""

from __future__ import annotations

import logging

import pytest

from pylate_flash.encoding.weights import no_missing_weights

REPORT = "LOAD REPORT\nKey | Status\nlayer.{0, 1}.key | MISSING\npooler.bias | MISSING\nother | UNEXPECTED"


@pytest.mark.parametrize("level", [logging.ERROR, logging.WARNING])
def test_missing_weights_are_named_and_shown_as_the_library_says_by_then(level, monkeypatch, caplog):
    """The library may be imported only while a model is loaded."""
    library = logging.getLogger("transformers")
    monkeypatch.setattr(library, "propagate", True)
    monkeypatch.setattr(library, "level", library.level)

    def load():
        with no_missing_weights():
            library.setLevel(level)
            logging.getLogger("transformers.modeling_utils").warning(REPORT)

    with pytest.raises(ValueError, match=r"^its weights lack layer.\{0, 1\}.key$"):
        load()
    assert ("LOAD REPORT" in caplog.text) == (level == logging.WARNING)
