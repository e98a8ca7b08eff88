"""The site: guides, reference and measurements. `make docs` builds it into docs/_build/html."""

from pylate_flash import __version__

project = "pylate_flash"
author = "The authors of pylate_flash"
release = version = __version__
html_title = "pylate_flash"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc"]
exclude_patterns = ["_build"]
# Pages link to headings of one another.
myst_heading_anchors = 3
# In docstrings, what stands in single backticks is code, and a link where it names something on these pages.
default_role = "py:obj"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False

html_theme = "furo"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
