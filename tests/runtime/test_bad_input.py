"""Wrong input: one clear error that names the value and the remedy, a status that is not 0, and no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco_jax import cli
from tests.runtime.helpers import environment, run, start, wait_for, write_config

pytestmark = [pytest.mark.net, pytest.mark.timeout(200)]


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in this process: what a config is refused with is the same, and nothing has to start."""
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as ended:  # of the parsers of arguments
        assert isinstance(ended.code, int)
        status = ended.code
    said = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, status, said.out, said.err)


def check_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """The command ended with one message that has these words."""
    said = " ".join((result.stdout + result.stderr).replace("│", " ").split())
    assert result.returncode not in (0, -6, -11), said
    assert "Traceback" not in said, said
    for word in words:
        assert word in said, f"{word!r} is not in: {said}"


BUILT_IN = {"module": "diloco_jax.training.models.decoder:Decoder"}
WRONG_AXIS = {"data": -1, "rules": {"embd": ["fsdp"]}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"stepz": 5}}, ["unknown setting train.stepz (value 5)", "did you mean train.steps"]),
        ({"train": {"steps": "many"}}, ["train.steps is 'many'", "valid integer"]),
        ({"train": 7}, ["train is 7", "section"]),
        ({"protocol": {"quorum": 9}}, ["quorum (K) is 9", "2 islands (M)", "lower protocol.quorum"]),
        ({"protocol": {"num_fragments": 0}}, ["num_fragments is 0", "at least 1"]),
        ({"protocol": {"num_fragments": 30}}, ["num_fragments is 30", "sync_every = 6"]),
        ({"protocol": {"overlap_steps": 0}}, ["overlap_steps is 0", "set the quorum to 2"]),
        ({"data": {"format": "tokens", "path": "x"}, "model": BUILT_IN}, ["model.args.vocab_size is 256", "65536"]),
        (
            {"train": {"seq_len": 9999}, "model": BUILT_IN},
            ["train.seq_len is 9999", "raise it, or lower train.seq_len"],
        ),
        ({"islands": {"mesh": WRONG_AXIS}, "model": BUILT_IN}, ["logical axis 'embd'", "choose from batch"]),
        ({"train": {"batch_size": 7}}, ["batch_size is 7", "multiple of islands.count"]),
        ({"islands": {"devices": 3}}, ["batch of 4", "islands.mesh"]),
        ({"wire": {"up": "int3"}}, ["wire.up", "int3"]),
    ],
)
def test_wrong_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: list[str]
) -> None:
    config = write_config(tmp_path, **changes)
    check_refused(call(capsys, "train", config, "--run-dir", tmp_path / "run", "--quiet"), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"stepz": 5}}, ["unknown setting train.stepz (value 5)", "did you mean train.steps"]),
        ({"data": {"path": "/does/not/exist"}}, ["data.path '/does/not/exist' does not exist", "give a file"]),
        ({"model": {"module": "nowhere:Thing"}}, ["nowhere", "model.module"]),
        ({"model": {"args": {"dimm": 4}}}, ["dimm", "model.args"]),
        ({"transport": {"address": "0.0.0.0:0"}}, ["'0.0.0.0:0' is not loopback", "allow_plaintext"]),
    ],
)
def test_wrong_settings_in_a_process_of_its_own(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    check_refused(run("train", write_config(tmp_path, **changes), "--run-dir", tmp_path / "run", "--quiet"), *words)


def test_wrong_override_and_missing_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    check_refused(call(capsys, "train", config, "--train.stepz", "5"), "--train.stepz", "--train.steps")
    check_refused(call(capsys, "train", config, "--outer.learning_rate", "-1"), "learning_rate is -1", "above 0")
    check_refused(call(capsys, "train", tmp_path / "none.yaml"), "none.yaml cannot be read", "configs/")
    (tmp_path / "broken.yaml").write_text("train: [1,")
    check_refused(call(capsys, "train", tmp_path / "broken.yaml"), "broken.yaml is not valid YAML")
    check_refused(call(capsys, "eval", tmp_path), "holds no checkpoint", "folder of a run")
    check_refused(call(capsys, "report", tmp_path), "metrics.jsonl")
    check_refused(call(capsys, "status", tmp_path), "no status.json", "host:port")


def test_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    result = run("train", write_config(tmp_path), "--run-dir", tmp_path / "run")
    check_refused(result, "holds a run already", "--run-dir")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n"


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = write_config(tmp_path, transport={"address": address})
        check_refused(run("syncer", config, "--run-dir", tmp_path / "run"), address, "choose another")


def test_unreachable_syncer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, transport={"connect_timeout_s": 1.0})
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        result = run("learner", config, "--island", "island-0", "--syncer", address)
        check_refused(result, f"no syncer answered at {address} within 1 s", "start it")
        monkeypatch.setattr("diloco_jax.runtime.status.ANSWER_TIMEOUT_S", 1.0)
        check_refused(call(capsys, "status", address), f"no syncer answered at {address}")


def test_learner_with_another_model_is_told_what_differs(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    args = {"dim": 48, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "mlp_dim": 64}
    other_config = write_config(other, model={"args": args})
    syncer = start("syncer", config, "--run-dir", run_dir)
    try:
        address = wait_for(lambda: (run_dir / "syncer.address").exists() and _read(run_dir), "the syncer's address")
        result = run("learner", other_config, "--island", "island-0", "--syncer", address)
        check_refused(result, "refused this learner", "model differs", '"dim": 32', '"dim": 48', "same config")
        told = run("status", address, "--json")
        assert told.returncode == 0 and '"waiting_for"' in told.stdout, told.stderr
    finally:
        syncer.terminate()
        output, _ = syncer.communicate(timeout=60)
    assert syncer.returncode == 0, output


def _read(run_dir: Path) -> str:
    return (run_dir / "syncer.address").read_text()


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    config = write_config(tmp_path, islands={"count": 3}, train={"batch_size": 12})
    command = [sys.executable, "-m", "diloco_jax", "chaos", str(config)]
    ended = subprocess.run(
        [*command, "--dry-run"], stdout=writer, stderr=subprocess.PIPE, text=True, env=environment(), timeout=100
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")
