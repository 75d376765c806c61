"""Configuration of the documentation site, built by ``sphinx-build docs docs/_build``."""

from importlib.metadata import version as version_of

project = "ntxent_jax"
author = "The ntxent_jax authors"
copyright = "The ntxent_jax authors. Apache-2.0"
release = version = version_of("ntxent-jax")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "ntxent_jax"
html_static_path = ["_static"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# Docstrings give shapes, dtypes and ranges, which says more than the annotation of an array does.
autodoc_typehints = "none"
napoleon_attr_annotations = False
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
nitpicky = True
