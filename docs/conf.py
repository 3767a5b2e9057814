"""Sphinx: `pip install -e '.[docs]'`, then `python -m sphinx -W docs docs/_build`."""

project = "diloco_jax"
author = "the diloco_jax authors"
copyright = "the diloco_jax authors, Apache-2.0"

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3

html_theme = "alabaster"
html_title = "diloco_jax"
html_theme_options = {"description": "Decoupled DiLoCo in JAX", "fixed_sidebar": True}
