"""Sphinx: `./scripts/docs` builds the site from the Markdown here and the docstrings of the package."""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

project = "diloco_jax"
author = "the diloco_jax authors"
copyright = "the diloco_jax authors, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
# An option such as --run-dir keeps both of its hyphens.
smartquotes_action = "qe"
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# The site is built without PyTorch.
autodoc_mock_imports = ["torch"]
python_maximum_signature_line_length = 100
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = "diloco_jax"
html_static_path = ["_static"]
# The report of a real run, which stands alone.
html_extra_path = ["demo.html"]
# Each page starts with a link to the glossary.
templates_path = ["_templates"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "monokai"

MARKS = re.compile(r"(?<!\\)([*|_])(?=\W|$)|(?<=\s)([*|])")


def as_plain_text(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Escape characters of docstrings that reStructuredText would take for markup; a star there is a product."""
    for index, line in enumerate(lines):
        pieces = re.split(r"(:\w+:`[^`]*`|``?[^`]+``?)", line)
        pieces[::2] = [piece if re.match(r"\s*:\w+", piece) else MARKS.sub(r"\\\1\2", piece) for piece in pieces[::2]]
        pieces[1::2] = [f"`{piece}`" if re.fullmatch(r"`[^`]+`", piece) else piece for piece in pieces[1::2]]
        lines[index] = "".join(pieces)


def cell_blocks(cell: dict[str, Any]) -> Iterator[str]:
    """Yield the Markdown of a cell: its text, or its code with what that printed and drew."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            yield f"```text\n{''.join(output['text'])}```"
        else:
            picture = base64.b64encode("".join(output["data"]["image/svg+xml"]).encode()).decode()
            yield f'<img src="data:image/svg+xml;base64,{picture}" alt="what the cell drew">'


class NotebookParser(MystParser):
    """A parser of notebooks: their text as it is, their code and its outputs in fences, their pictures."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        blocks = [block for cell in json.loads(inputstring)["cells"] for block in cell_blocks(cell)]
        super().parse("\n\n".join(blocks), document)


def setup(app: Sphinx) -> None:
    app.add_source_parser(NotebookParser)
    app.connect("autodoc-process-docstring", as_plain_text)
