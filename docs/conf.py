"""The site: guides, reference and measurements. `make docs` builds it into docs/_build/html."""

from pylate_flash import __version__

project = "pylate_flash"
author = "The authors of pylate_flash"
release = version = __version__
html_title = "pylate_flash"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc"]
exclude_patterns = ["_build"]
# Guides name files of the repository, which are copied beside the pages.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# In docstrings, what stands in single backticks is code, and a link where it names something on these pages.
default_role = "py:obj"
autosummary_generate = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
# A class of a host has a hundred methods of the host's own.
autodoc_default_options = {"inherited-members": False}

html_theme = "furo"
html_theme_options = {"source_repository": "", "navigation_with_keys": True}
