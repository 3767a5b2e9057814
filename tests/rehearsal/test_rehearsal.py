"""A rehearsal: what it keeps of a config, what it draws, and one short run that leaves nothing to do."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from environments import python_with
from rehearsal.faults import AT_SYNCER, CARDS, draw, region
from rehearsal.shrink import changes, shrink

from diloco_jax.settings.packed import find_config
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load

ROOT = Path(__file__).resolve().parents[2]
PINS = ("gcp-storage-emulator>=2026.7", "gcsfs>=2026.1")


def made(name: str) -> tuple[RunConfig, RunConfig]:
    whole = load(find_config(f"tpu/{name}"))
    return whole, shrink(whole, 2400, Path("root"))


def test_what_a_rehearsal_keeps_of_the_12b_run() -> None:
    whole, small = made("gemma_12b_4x_v5p")
    kept = ("sync_every", "num_fragments", "overlap_steps", "quorum", "grace_steps_max", "lease_s")
    assert all(getattr(small.protocol, name) == getattr(whole.protocol, name) for name in kept)
    assert (small.wire, small.merge, small.outer, small.fragments) == (
        whole.wire, whole.merge, whole.outer, whole.fragments
    )  # fmt: skip
    assert small.transport.encrypted and small.transport.token_file and small.transport.stripes == 2
    assert small.data.path.startswith("gs://") and small.syncer.shards == 2
    for name in whole.islands.names:
        island = small.island(name)
        assert (island.hosts, island.devices, island.mesh.data, island.mesh.fsdp) == (2, 4, 2, 2)
        assert (island.batch_size, island.zone) == (8, whole.island(name).zone)
    told = changes(whole, small)
    assert f"train.seq_len {whole.train.seq_len} -> 64" in told
    assert not [line for line in told if line.startswith(("protocol.quorum", "wire", "outer", "fragments"))]


@pytest.mark.parametrize("name", ["moe_v6e", "mixed_v5p_v6e", "two_regions"])
def test_other_configs_for_slices_can_be_rehearsed(name: str) -> None:
    _, small = made(name)
    islands = [small.island(each) for each in small.islands.names]
    assert small.train.batch_size == sum(island.batch_size for island in islands)
    assert {island.hosts for island in islands} <= {1, 2}


def test_the_schedule_has_all_kinds_in_their_shares_and_is_the_seeds() -> None:
    _, small = made("gemma_12b_4x_v5p")
    schedule = draw(1, small, 40, 20.0, ",".join(CARDS))
    assert Counter(fault.kind for fault in schedule) == {kind: 2 * count for kind, count in CARDS.items()}
    assert schedule == draw(1, small, 40, 20.0, ",".join(CARDS)) != draw(2, small, 40, 20.0, ",".join(CARDS))
    assert all((fault.target == "syncer") == (fault.kind in AT_SYNCER) for fault in schedule)
    assert {fault.duration_s for fault in schedule if fault.kind == "lost-region"} == {120.0}
    zones = {"island-0": "r-a", "island-1": "s-a", "island-2": "r-b", "island-3": ""}
    each = {name: replace(small.islands.each[name], zone=zone) for name, zone in zones.items()}
    here = replace(small, islands=replace(small.islands, each=each))
    assert [region(here, name) for name in ("island-0", "island-3")] == [{"island-0", "island-2"}, {"island-3"}]


@pytest.mark.slow
@pytest.mark.net
def test_a_short_rehearsal_leaves_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'scripts'}")
    python = python_with("rehearsal", PINS, ours=True)
    words = ["-m", "rehearsal", "--minutes", "2", "--faults", "4", "--json", "--out", str(tmp_path / "out")]
    done = subprocess.run([python, *words], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert (result["needed"], result["recovered"], result["samples"]["violations"]) == ([], result["recoveries"], 0)
