"""`diloco clean`: what it shows, what it deletes, and when it refuses."""

import json
from pathlib import Path

import pytest

from diloco_jax.cli.main import main
from diloco_jax.runtime.records.signals import WRONG_INPUT
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.store import leftovers, names
from diloco_jax.transport.store.bucket import Bucket


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    """The bucket of a run whose syncer has left its claim and its sign of life, beside somebody's file."""
    made = Bucket(TransportConfig(address=f"file://{tmp_path}/bucket"))
    made.lead(3, "small", "id")
    made.write(names.alive(3), b"1")
    made.store.put("note.txt", b"mine")
    return made


def test_clean_shows_and_deletes_what_a_run_left(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = bucket.config.address
    assert main(["clean", address, "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown.pop("sign_s_ago") >= 0
    facts = {"address": address, "objects": 2, "copied": 0, "others": 1, "epoch": 3, "run": "small", "deleted": 0}
    assert shown == facts
    monkeypatch.setattr(leftovers.time, "sleep", lambda _: bucket.write(names.alive(3), b"2"))
    assert main(["clean", address]) == WRONG_INPUT
    said = capsys.readouterr().err
    assert f"a syncer is alive at {address}" in said and "--force" in said
    assert main(["clean", address, "--force"]) == 0
    said = capsys.readouterr().out
    assert "the syncer of epoch 3 of run 'small'" in said and said.endswith("deleted: 2\n")
    assert bucket.store.list("") == ["note.txt"]


def test_clean_takes_a_config_and_names_an_address_that_is_no_bucket(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"transport: {{address: '{bucket.config.address}'}}\n")
    # The folder of a run has its config under this name.
    assert main(["clean", str(tmp_path), "--force"]) == main(["clean", str(path), "--force"]) == 0
    assert "deleted: 2" in capsys.readouterr().out
    path.write_text("{}\n")
    assert main(["clean", str(path)]) == WRONG_INPUT
    assert "is 127.0.0.1:0, not a bucket" in capsys.readouterr().err
