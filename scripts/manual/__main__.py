"""Write the generated pages and pictures of docs/ (./scripts/bless_docs); `test_manual.py` checks them."""

from pathlib import Path

from manual.config_page import LAUNCH_HEAD, config_page, launch_settings
from manual.pictures import PICTURES

from diloco_jax.settings.schema import config_schema

DOCS = Path(__file__).resolve().parents[2] / "docs"


def made() -> dict[str, str]:
    """Return the text of each generated file, by its path in docs/."""
    pictures = {f"pictures/{name}": draw() for name, draw in PICTURES.items()}
    schema, launch = config_schema(), "launch-reference.md"
    by_hand = (DOCS / launch).read_text(encoding="utf-8").partition(LAUNCH_HEAD.partition("\n")[0])[0]
    return {"config.md": config_page(schema), launch: by_hand + launch_settings(schema)} | pictures


if __name__ == "__main__":
    for name, text in made().items():
        (DOCS / name).write_text(text, encoding="utf-8")
