"""A real run whose classes of tensors have periods of their own, which change on the way, with two bits both ways."""

import json
from pathlib import Path

import pytest

from diloco_jax.runtime.records.telemetry import read_metrics
from tests.runtime.helpers import call, replayed, trained

PERIODS = {"sync_every": {"mlp": 4, "rest": 12}, "sync_later": {36: {"mlp": 8, "rest": 8}}, "num_fragments": 24}


@pytest.mark.long
def test_each_fragment_is_merged_at_its_turns_and_the_run_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    run_dir = trained(
        tmp_path,
        islands={"count": 2, "devices": 1},
        train={"steps": 60, "eval_every": 0},
        syncer={"shards": 2},
        protocol=PERIODS | {"quorum": 2, "grace_steps_max": 2.0, "snapshot_every": 25},
        adopt={"mode": "rebase"},
        wire={"up": "int2", "down": "int2"},
    )
    merged = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["kind"] == "merged"]
    turns = {row["global_step"]: row["fragment_id"] for row in merged}
    # 12,288 elements of the MLP every 4 steps and 14,496 others every 12 are 4,280 in the mean step: three fragments
    # each, of 4,096 and 4,832, as then every step has one
    first = {0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 5: 1, 6: 2, 7: 4, 8: 0, 9: 1, 10: 2, 11: 5}  # modulo 12
    second = {0: 0, 1: 3, 2: 1, 3: 4, 5: 2, 6: 5}  # modulo 8
    expected = {step: first[step % 12] for step in range(1, 36)}
    expected |= {step: second[step % 8] for step in range(36, 61) if step % 8 in second}
    assert turns == expected

    replayed(run_dir)
    audited = json.loads(call("audit", run_dir, "--json").stdout)
    assert audited["violations"] == 0 and audited["rounds"] == len(merged), audited
