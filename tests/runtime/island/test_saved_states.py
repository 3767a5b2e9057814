"""What a process of an island saves of itself: back bit for bit, from whichever folder has it, or a reason why not."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from diloco_jax.runtime.island.saved_states import SavedStates, StateName
from diloco_jax.training.whole_state.layout import StateLayout
from diloco_jax.training.whole_state.staging import check_fits, stage_shards


def name(global_step: int, incarnation: int = 5) -> StateName:
    return StateName(incarnation, 40, global_step, (1 << 63, 0, 3))


def layouts(devices: int) -> dict[str, NamedSharding]:
    mesh = jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices])
    rows, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec("fsdp"), PartitionSpec()))
    return {"params/a": rows, "params/none": everywhere, "optimizer/count": everywhere, "optimizer/mu/a": rows}


def arrays(seed: float = 0.0, devices: int = 1) -> dict[str, jax.Array]:
    values = {
        "params/a": np.arange(12, dtype=ml_dtypes.bfloat16).reshape(4, 3) + ml_dtypes.bfloat16(seed),
        "params/none": np.zeros((0, 3), np.float32),
        "optimizer/count": np.asarray(7, np.int32),
        "optimizer/mu/a": np.full((4, 3), np.float32(1 / 3) + seed, np.float32),
    }
    return {key: jax.device_put(value, layouts(devices)[key]) for key, value in values.items()}


def save(saves: SavedStates, global_step: int, kept: int = -1, seed: float = 0.0) -> str:
    return saves.save(stage_shards(arrays(seed)), name(global_step), kept).result()


def assert_restores(saves: SavedStates, global_step: int, seed: float, devices: int = 1) -> None:
    found, want = saves.read(name(global_step)).leaves, arrays(seed)
    check_fits(found, layouts(devices), StateLayout(want).by_name)
    assert found.keys() == want.keys()
    for key, value in want.items():
        assert found[key].dtype == value.dtype and found[key].shape == value.shape
        np.testing.assert_array_equal(np.asarray(found[key]), np.asarray(value))
        for at in layouts(devices)[key].addressable_devices_indices_map(value.shape).values():
            np.testing.assert_array_equal(found[key][at], np.asarray(value)[at])


def test_a_saved_state_names_its_run_and_one_of_an_older_release_names_none(tmp_path: Path) -> None:
    saves, mine = SavedStates([str(tmp_path / "x")]), name(24)._replace(run="5eed")
    assert saves.save(stage_shards(arrays()), mine, -1).result() == ""
    assert saves.names() == [mine] and StateName.parse(json.loads(mine.to_text())) == mine
    (record,) = tmp_path.rglob("*.json")
    told = json.loads(record.read_text())
    del told["name"][4:]
    record.write_text(json.dumps(told))
    assert saves.names() == [name(24)]


@pytest.mark.parametrize("elsewhere", ["memory://states/x", "{}/elsewhere"])
def test_a_saved_state_comes_back_exactly_from_either_place(tmp_path: Path, elsewhere: str) -> None:
    here, there = str(tmp_path / "run" / "x"), elsewhere.format(tmp_path)
    saves = SavedStates([here, there])
    assert saves.names() == []
    for step in (24, 48, 72):
        assert save(saves, step, step - 24, seed=step) == ""
    for places in ([here, there], [here], [there]):
        again = SavedStates(places)
        assert again.names() == [name(72), name(48)]
        assert_restores(again, 72, 72.0)
        # An island with all shards may come back on another mesh.
        assert_restores(again, 48, 48.0, devices=2)
    assert SavedStates([here], 0, 2).names() == [] == SavedStates([here + "y"]).names()
    fsspec.filesystem("memory").store.clear()


def test_a_process_saves_what_its_devices_hold_once() -> None:
    staged = stage_shards(arrays(devices=2))
    spans = [(shard.name, shard.spans) for shard in staged.shards]
    assert sorted(spans) == [
        ("optimizer/count", ()),
        ("optimizer/mu/a", ((0, 2), (0, 3))),
        ("optimizer/mu/a", ((2, 4), (0, 3))),
        ("params/a", ((0, 2), (0, 3))),
        ("params/a", ((2, 4), (0, 3))),
        ("params/none", ((0, 0), (0, 3))),
    ]


def cut(folder: Path) -> None:
    path = folder / "step_00000048.shards"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    path = folder / "step_00000048.shards"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


def without_a_shard(folder: Path) -> None:
    path = folder / "step_00000048.json"
    record = json.loads(path.read_text())
    del record["shards"][-1]
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("harm", "words"), [(cut, "bytes instead of"), (flip, "checksum differs"), (without_a_shard, "bytes instead of")]
)
def test_a_damaged_state_is_refused_in_words(tmp_path: Path, harm: Callable[[Path], None], words: str) -> None:
    saves = SavedStates([str(tmp_path)])
    assert save(saves, 24) == save(saves, 48, 24) == ""
    harm(tmp_path / "host-0-of-1")
    with pytest.raises(ValueError, match=words):
        saves.read(name(48))
    assert_restores(saves, 24, 0.0)


def test_the_position_of_a_loader_is_saved_with_the_shards_of_its_step_or_not_at_all(tmp_path: Path) -> None:
    saves, folder = SavedStates([str(tmp_path)]), tmp_path / "host-0-of-1"
    position = b'{"position": 7}\n'
    assert save(saves, 24) == ""
    assert saves.save(stage_shards(arrays(48.0)), name(48), 24, position).result() == ""
    # A save of a release without loaders, or of an island without one, has none.
    assert saves.read(name(24)).loader is None
    assert "loader" not in json.loads((folder / "step_00000024.json").read_text())
    assert saves.read(name(48)).loader == position
    assert_restores(saves, 48, 48.0)
    (folder / "step_00000048.loader").write_bytes(position[:-1])
    with pytest.raises(ValueError, match="the loader's state is damaged"):
        saves.read(name(48))
    (folder / "step_00000048.loader").unlink()
    with pytest.raises(ValueError, match="FileNotFoundError"):
        saves.read(name(48))
    save(saves, 72, 24)
    assert sorted(path.name for path in folder.iterdir()) == [
        f"step_000000{step}{kind}" for step in (24, 72) for kind in (".json", ".shards")
    ]


def test_unfinished_files_and_other_files_do_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves = SavedStates([str(tmp_path)])
    save(saves, 24)
    folder = tmp_path / "host-0-of-1"
    (folder / "step_00000048.shards").write_bytes(bytes(9))
    (folder / "step_00000072.json").write_text('{"name": [1]}')
    assert saves.names() == [name(24)] and "step_00000072.json" in caplog.text
    save(saves, 96, 24)
    assert sorted(path.name for path in folder.iterdir()) == [
        f"step_000000{step}{kind}" for step in (24, 96) for kind in (".json", ".shards")
    ]
    with caplog.at_level(logging.INFO):
        assert SavedStates([str(tmp_path)], 1, 2).names() == []
    assert "host-0-of-1 only, from another number of hosts" in caplog.text


def test_shards_of_another_model_or_mesh_do_not_fit() -> None:
    whole, described = arrays(), StateLayout(arrays()).by_name
    saves = SavedStates(["memory://fits"])
    save(saves, 24)
    leaves = saves.read(name(24)).leaves
    with pytest.raises(ValueError, match="another model or optimizer, which differs in 'optimizer/count'"):
        check_fits(leaves, layouts(1), described | {"optimizer/count": jnp.zeros(2)})
    staged = stage_shards(arrays(devices=2))
    half = [at for at, shard in enumerate(staged.shards) if shard.spans[:1] != ((2, 4),)]
    kept = staged._replace(shards=[staged.shards[at] for at in half], copies=[staged.copies[at] for at in half])
    saves.save(kept, name(48), 24).result()
    with pytest.raises(ValueError, match="another mesh or other hosts: it lacks a part of 'optimizer/mu/a'"):
        check_fits(saves.read(name(48)).leaves, layouts(1), StateLayout(whole).by_name)
    fsspec.filesystem("memory").store.clear()


def test_a_folder_that_takes_nothing_costs_the_state_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "full").write_text("a file where a folder should be")
    saves = SavedStates([str(tmp_path / "full" / "x"), str(tmp_path / "good")])
    # The state is safe in one place.
    assert save(saves, 24) == ""
    assert "the state of global step 24 was not saved in" in caplog.text
    assert SavedStates([str(tmp_path / "good")]).names() == [name(24)]
    assert "full" in save(SavedStates([str(tmp_path / "full" / "x")]), 24)
    with pytest.raises(ValueError, match="nowhere"):
        SavedStates(["nowhere://x"])


def test_a_state_with_nan_is_not_saved_and_the_one_before_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An island that loads such a state is expelled at every return."""
    saves = SavedStates([str(tmp_path)])
    assert save(saves, 24) == ""
    for step, leaf in ((48, "optimizer/mu/a"), (72, "params/a")):
        values = np.array(arrays()[leaf])
        values[2, 1] = np.nan
        bad = arrays() | {leaf: jax.device_put(values, layouts(1)[leaf])}
        assert saves.save(stage_shards(bad), name(step), 24).result() == f"it is not finite in '{leaf}'"
        assert f"the state of global step {step} was not saved: it is not finite in '{leaf}'" in caplog.text
    assert saves.names() == [name(24)]
    assert_restores(saves, 24, 0.0)
