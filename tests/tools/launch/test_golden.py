"""The texts that launch writes for a few configs, word for word. ./scripts/bless_launch takes a difference.

Without the settings themselves, in which every new setting would be a difference here.
"""

import os

import pytest

from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load
from diloco_jax.tools.launch import gke, gpu, launcher
from diloco_jax.tools.launch.write import WAYS
from tests.tools.launch.helpers import CONFIGS, GPU, TESTDATA

BLESS = "DILOCO_BLESS"
PLACE = ("--cloud.project", "my-project", "--cloud.image", "us-docker.pkg.dev/my-project/diloco/diloco:1")
PLACE += ("--cloud.syncer_machine_type", "n2-highmem-64", "--cloud.bucket", "my-bucket")
PLACE += ("--cloud.service_account", "diloco@my-project.iam.gserviceaccount.com")
ASKED = ("--syncer.metrics", "0.0.0.0:9464")
IMAGE = ("--cloud.tpu_image_family", "my-family")
CASES = {
    "small.gke": (TESTDATA / "small.yaml", "gke", ()),
    "small.gce": (TESTDATA / "small.yaml", "gce", ()),
    "small.tpu-vm": (TESTDATA / "small.yaml", "tpu-vm", ()),
    "small.slurm": (TESTDATA / "small.yaml", "slurm", GPU),
    "small.sky": (TESTDATA / "small.yaml", "sky", GPU),
    "two_regions.gke": (CONFIGS / "tpu" / "two_regions.yaml", "gke", (*PLACE, *ASKED)),
    "gemma_12b_4x_v5p.gke": (CONFIGS / "tpu" / "gemma_12b_4x_v5p.yaml", "gke", PLACE),
    "mixed_v5p_v6e.gce": (CONFIGS / "tpu" / "mixed_v5p_v6e.yaml", "gce", (*PLACE, *IMAGE)),
}


def say_where(config: RunConfig) -> str:
    return f"# {config.name} at {config.transport.address}\ncertificate: {config.transport.tls_certificate}\n"


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, way, overrides = CASES[name]
    for module in (gke, gpu, launcher):
        monkeypatch.setattr(module, "dump", say_where)
    files = WAYS[way].plan(load(path, overrides)).files
    text = "\n".join(f"==> {each} <==\n{files[each]}" for each in files)
    golden = TESTDATA / f"{name}.txt"
    if os.environ.get(BLESS):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), f"{golden.name}: see ./scripts/bless_launch"
