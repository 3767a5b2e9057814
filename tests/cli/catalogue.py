"""The catalogue of wrong inputs: each with the value, the limit and the remedy that its one line of error must name.

FOUND is what `diloco doctor` finds before the run, SETTINGS is wrong in a config (configs.yaml, but for what YAML
cannot say), WORDS on a command line (words.txt, a row in a line). Paths are in the folder that
`tests/cli/test_catalogue.py` makes.
"""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from diloco_jax.runtime.records.signals import WRONG_INPUT


class Wrong(NamedTuple):
    """A wrong input."""

    given: dict[str, Any] | str  # changes of the small config; the text of a config; or the words of a command line
    value: str
    limit: str
    remedy: str
    status: int = WRONG_INPUT


HERE = Path(__file__).parent
CONFIGS = yaml.safe_load((HERE / "configs.yaml").read_text(encoding="utf-8"))
GROWING = [f"&{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcde", "bcdef", strict=True)]
BOMB = f"seed: [&a [1, 1], {', '.join(GROWING)}]\n"  # 66,430 pairs, if somebody wrote them out

FOUND = tuple(Wrong(*row) for row in CONFIGS["found"])
FIRST = 20  # of these at least, doctor finds

SETTINGS = (
    Wrong("\udc89PNG", "config.yaml is not UTF-8", "invalid start byte", "name a YAML file, or a config"),
    Wrong("name: a\0b\n", "config.yaml", "#x0000", "correct it there"),
    Wrong("a: " + "x" * (1 << 20), "config.yaml has more than", "1048576 bytes, the limit", "name a YAML file, or a"),
    Wrong("seed: " + "[" * 2000, "config.yaml is not valid YAML", "recursion depth", "correct it there"),
    Wrong("seed: " + "1" * 5000, "config.yaml is not valid YAML", "limit (4300 digits)", "correct it there"),
    Wrong(BOMB, "seed is [[1, 1], [[...], [...]", "a valid integer", "it must be"),
    *(Wrong(*row) for row in CONFIGS["settings"]),
)

WORDS = tuple(
    Wrong(*(part.strip() for part in line.split("|")))
    for line in (HERE / "words.txt").read_text(encoding="utf-8").splitlines()
)
