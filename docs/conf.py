"""How Sphinx builds the documentation: `make docs`."""

from typing import Any

from pygments.lexers.special import TextLexer

import ft_wrapper

project = "ft_wrapper"
author = "the ft_wrapper authors"
copyright = author
version = release = ft_wrapper.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_title = f"{project} {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Docstrings are Google's style; `name` in them is a reference where there is such a name.
default_role = "py:obj"
napoleon_numpy_docstring = False
autodoc_mock_imports = ["transformers", "lightning", "opentelemetry"]  # they need not be installed
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True


def setup(app: Any) -> None:
    """Shows Mermaid fences as text: GitHub draws them, and the built pages load no script to do so."""
    app.add_lexer("mermaid", TextLexer)
