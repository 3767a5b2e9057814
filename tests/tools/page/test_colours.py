"""Colours of the page stand out from its background, by daylight and in the dark."""

import re

import pytest

from diloco_jax.tools.page.page import FOLDER

NUM_COLOURS = 8
BLOCKS = re.findall(r":root\{([^}]*)\}", (FOLDER / "page.css").read_text(encoding="utf-8"))
LIGHT, DARK = (dict(re.findall(r"--(\w+):(#\w+)", block)) for block in BLOCKS)


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_curves_stand_out_from_the_page(colours: dict[str, str]) -> None:
    def contrast(name: str) -> float:
        one, other = sorted((luminance(colours[name]), luminance(colours["page"])))
        return (other + 0.05) / (one + 0.05)

    assert contrast("ink") > 7
    assert contrast("soft") > 4.5
    assert all(contrast(f"k{index}") > 2 for index in range(NUM_COLOURS))
