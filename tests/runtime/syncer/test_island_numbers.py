"""Numbers of islands: stable over restarts of both sides, bounded, and asked for over a real listener."""

import json
import logging
from pathlib import Path

import pytest

from diloco_jax.runtime.own_loop.data_shard import DataShard, find_place
from diloco_jax.runtime.syncer import island_numbers
from diloco_jax.runtime.syncer.island_numbers import IslandNumbers
from diloco_jax.settings.islands import IslandsConfig
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.endpoints.greeting import ask_description
from diloco_jax.transport.endpoints.grpc_link import listen
from diloco_jax.transport.link import TransportConfig, TransportError

NAMES = ("island-0", "island-1", "island-2")


def test_an_island_has_the_same_number_at_every_start_of_it_and_of_the_syncer(tmp_path: Path) -> None:
    path = tmp_path / "islands.json"
    numbers = IslandNumbers(path, NAMES)
    # Islands of the config have their place; other names fill the gaps, and a place that is taken is not shared.
    assert [numbers.number_of(name) for name in ("island-1", "a", "b", "island-0", "island-1")] == [2, 1, 3, 4, 2]
    again = IslandNumbers(path, NAMES)
    assert [again.number_of(name) for name in ("b", "island-0", "island-2")] == [3, 4, 5]
    assert json.loads(path.read_text()) == {"island-1": 2, "a": 1, "b": 3, "island-0": 4, "island-2": 5}


def test_numbers_are_bounded_and_a_damaged_file_or_a_full_disk_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(island_numbers, "NUMBERS_MAX", 2)
    numbers = IslandNumbers(tmp_path / "missing" / "islands.json", NAMES)
    assert [numbers.number_of(name) for name in "aabc"] == [1, 1, 2, 0] and "cannot be written" in caplog.text
    for damage in ("{", "[1]", '{"a": null}', '{"a": "x"}'):
        (tmp_path / "islands.json").write_text(damage)
        assert IslandNumbers(tmp_path / "islands.json", NAMES).number_of("island-1") == 2
        assert "cannot be read" in caplog.text
        caplog.clear()


def test_an_island_finds_its_shard_at_the_syncer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listener = listen(TransportConfig(), run_id="own")
    try:
        there, config = TransportConfig(address=listener.address), RunConfig(islands=IslandsConfig(count=2))
        # A syncer of an earlier release gives no number, and the names of the config are enough.
        assert find_place(there, config, "island-1") == DataShard(1, 2)
        with pytest.raises(ValueError, match=r"gave a no number: .*Use the names island-0 to island-1"):
            find_place(there, config, "a")
        listener.greeter.number_of = IslandNumbers(tmp_path / "islands.json", config.islands.names).number_of
        assert ask_description(there, "a").number == 0 and not (tmp_path / "islands.json").exists()
        assert [find_place(there, config, name) for name in ("a", "b", "a")] == [
            DataShard(0, 2),
            DataShard(1, 2),
            DataShard(0, 2),
        ]
        with caplog.at_level(logging.WARNING):
            assert find_place(there, config, "c") == DataShard(0, 2)
        assert "c is island number 3 of a run with islands.count 2" in caplog.text
        with pytest.raises((TransportError, ValueError), match="x/y"):
            find_place(there, config, "x/y")
    finally:
        listener.close(0.0)
