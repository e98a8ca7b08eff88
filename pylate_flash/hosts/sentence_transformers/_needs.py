"""Imported first by the modules that import sentence-transformers 6: the error says what to install."""

from .. import HOSTS

HOSTS["sentence-transformers"].check(strict=False)
