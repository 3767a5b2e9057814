"""What launch writes for a few configs, word for word. ./scripts/bless_launch takes a difference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launch.helpers import TESTDATA, plan

BLESS = "DILOCO_BLESS"
CASES = [("small", way) for way in ("gke", "gce", "tpu-vm")]


def as_text(files: dict[str, str]) -> str:
    return "\n".join(f"==> {name} <==\n{files[name]}" for name in files)


@pytest.mark.parametrize("config, way", CASES)
def test_golden(config: str, way: str) -> None:
    golden: Path = TESTDATA / f"{config}.{way}.txt"
    text = as_text(plan(way, config).files)
    if os.environ.get(BLESS):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), f"{golden.name}: see ./scripts/bless_launch"
