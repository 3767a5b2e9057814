"""A rehearsal: the settings that it keeps, the faults that it draws, and a short run that needs no operator."""

import json
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from environments import python_with

from diloco_jax.settings.packed import find_config
from diloco_jax.settings.text import load
from rehearsal.faults import CARDS, draw
from rehearsal.shrink import shrink

ROOT = Path(__file__).resolve().parents[3]


def test_a_rehearsal_keeps_the_settings_of_the_12b_run_and_draws_all_kinds() -> None:
    whole = load(find_config("tpu/gemma_12b_4x_v5p"))
    small = shrink(whole, 2400, Path("root"))
    assert all(getattr(small, name) == getattr(whole, name) for name in ("wire", "merge", "outer", "fragments"))
    assert replace(small.protocol, snapshot_every=0) == replace(whole.protocol, snapshot_every=0)
    assert small.transport.encrypted and small.data.path.startswith("gs://")
    for name in whole.islands.names:
        island = small.island(name)
        assert (island.hosts, island.devices, island.mesh.data, island.mesh.fsdp) == (2, 4, 2, 2)
        assert (island.batch_size, island.zone) == (8, whole.island(name).zone)
    schedule = draw(1, small, 40, 20.0, ",".join(CARDS))
    assert Counter(fault.kind for fault in schedule) == {kind: 2 * count for kind, count in CARDS.items()}
    assert {fault.duration_s for fault in schedule if fault.kind == "lost-region"} == {120.0}


@pytest.mark.slow
@pytest.mark.net
def test_a_short_rehearsal_needs_no_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'scripts'}")
    python = python_with("rehearsal", ("gcp-storage-emulator>=2026.7", "gcsfs>=2026.1"), ours=True)
    words = ["-m", "rehearsal", "--minutes", "8", "--faults", "4", "--json", "--out", str(tmp_path / "out")]
    done = subprocess.run([python, *words], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout)["needed"] == []
