"""The texts that launch writes for a small config, word for word. ./scripts/bless_launch takes a difference.

The settings are left out, because every new setting would be a difference here.
"""

import os

import pytest

from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load
from diloco_jax.tools.launch import gke, gpu, launcher, pathways
from diloco_jax.tools.launch.sites import WAYS
from tests.tools.launch.helpers import GPU, PATHWAYS, TESTDATA

BLESS = "DILOCO_BLESS"
CASES = {"small.gke": ("gke", ()), "small.pathways": ("pathways", PATHWAYS), "small.slurm": ("slurm", GPU)}


def say_where(config: RunConfig) -> str:
    return f"# {config.name} at {config.transport.address}\ncertificate: {config.transport.tls_certificate}\n"


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, overrides = CASES[name]
    for module in (gke, gpu, launcher, pathways):
        monkeypatch.setattr(module, "dump", say_where)
    files = WAYS[way].plan(load(TESTDATA / "small.yaml", overrides)).files
    text = "\n".join(f"==> {each} <==\n{files[each]}" for each in files)
    golden = TESTDATA / f"{name}.txt"
    if os.environ.get(BLESS):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), f"{golden.name}: see ./scripts/bless_launch"
