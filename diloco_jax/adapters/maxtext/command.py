"""The place of MaxText, found without its import, which takes half a minute: commands answer --help at once."""

import importlib.util
from pathlib import Path


def configs_folder() -> Path:
    """Return MaxText's folder of configs; ValueError if MaxText is not installed."""
    found = importlib.util.find_spec("maxtext")
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            "MaxText is not installed here: install maxtext and diloco_jax into one environment of Python 3.12 or "
            "newer (docs/maxtext.md)"
        )
    return Path(found.submodule_search_locations[0]) / "configs"
