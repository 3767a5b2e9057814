"""The time that a replay is expected to take, from the files of its run."""

import json
from pathlib import Path

from diloco_jax.tools.replay.estimate import expected_time


def test_a_replay_takes_as_long_as_the_run_trained(tmp_path: Path) -> None:
    assert expected_time(tmp_path) == "", "nothing is known"
    (tmp_path / "status.json").write_text(json.dumps({"wall_s": 100.0, "global_step": 600, "learners": []}))
    assert "about 1 min 40 s, as long as the run trained" in expected_time(tmp_path)
    # A run that was stopped for half of its time, and its first quarter.
    summary = {"wall_s": 200.0, "uptime": 0.5, "global_steps": 600, "learners": {}, "wire": {}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert "about 1 min 40 s" in expected_time(tmp_path)
    assert "about 25 s" in expected_time(tmp_path, 150) and "about 1 min 40 s" in expected_time(tmp_path, 9999)
    (tmp_path / "summary.json").write_text("damaged")
    assert "about 1 min 40 s" in expected_time(tmp_path)
    (tmp_path / "status.json").write_text(json.dumps({"wall_s": 100.0, "global_step": 600, "learners": [{"x": 1}]}))
    assert expected_time(tmp_path) == ""
