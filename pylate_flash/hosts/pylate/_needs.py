"""Imported first by the modules that need PyLate: if it is not installed, the error names the extra."""

from ..._extras import check_host

check_host("pylate", "this part of pylate_flash")
