"""Imported first by the modules that import sentence-transformers 6: the error says what to install."""

from .. import HOSTS

HOSTS["sentence-transformers"].check("this part of pylate_flash", strict=False)
