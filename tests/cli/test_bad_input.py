"""Wrong input that only a started process finds, and input that looks wrong and is right."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import diloco_jax
from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.runtime.syncer import run as syncer_run
from diloco_jax.settings import text as config_file
from tests.limits import HANGS_S
from tests.runtime.helpers import SMALL, call, environment, run, start, wait_for, write_config

pytestmark = pytest.mark.net


def check_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Check that the command ended with one message, and that the message has these words."""
    said = " ".join((result.stdout + result.stderr).replace("│", " ").split())
    assert result.returncode not in (0, -6, -11), said
    assert "Traceback" not in said, said
    for word in words:
        assert word in said, f"{word!r} is not in: {said}"


def test_a_syncer_by_itself_finds_too_little_text_before_it_listens(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("x" * 100)
    config = config_file.load(write_config(tmp_path, data={"path": str(tmp_path / "some.txt")}))
    with pytest.raises(ValueError, match="0 held-out windows of 32; give more text"):
        Evaluator(config)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a syncer without its model: it draws one, and compiles merges, before it reads its folder and listens."""
    digests = [0] * SMALL["protocol"]["num_fragments"]
    model = Mock(**{"digests": digests, "value_bytes.return_value": 1, "delta_bytes.return_value": 0})
    monkeypatch.setattr(syncer_run, "Arithmetic", Mock())
    monkeypatch.setattr(syncer_run, "make_model", Mock(return_value=model))
    monkeypatch.setattr(Evaluator, "initial_parameters", lambda _: {})


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("command", ["audit", "syncer"])
def test_a_folder_of_an_unknown_release_gets_one_line(tmp_path: Path, command: str) -> None:
    config = write_config(tmp_path)
    (tmp_path / "tape.jsonl").write_text('["begin",0.0,[],[9,"9.8.7"]]\n["tick",1.0]\n')
    arguments = [tmp_path] if command == "audit" else [config, "--run-dir", tmp_path]
    result = call(command, *arguments)
    told = f"diloco {command}: the tape from line 1 on is of diloco-jax 9.8.7, protocol 9; this is"
    check_refused(result, f"{told} {diloco_jax.__version__}, which reads", "continue with 9.8.7, or start a new run")
    assert result.returncode == 2


def test_version() -> None:
    result = call("--version")
    assert result.returncode == 0 and result.stdout.startswith(f"diloco-jax {diloco_jax.__version__}, jax ")


def test_settings_of_a_command_line_are_those_of_a_file(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    words = ["--train.steps", "7", "--train.batch-size=4", "--optimizer.learning_rate", "1e-3"]
    words += ["--trackers", "--callbacks", "my.code:Told", "--transport.allow-plaintext", "True"]
    words += ["--data.patterns", "*.md", "*.txt", "--model.args.dim", "16", "--wire.up", "int8"]
    words += ["--outer.momentum=5e-1", "--islands.each.island-1.batch-size", "2"]
    words += ["--islands.each.island-1.devices", "None"]
    made = config_file.load(path, words)
    changes = {
        "train": {"steps": 7, "batch_size": 4},
        "optimizer": {"learning_rate": 0.001},
        "trackers": [],
        "callbacks": ["my.code:Told"],
        "transport": {"allow_plaintext": True},
        "data": {"patterns": ["*.md", "*.txt"]},
        "model": {"args": SMALL["model"]["args"] | {"dim": 16}},
        "wire": {"up": "int8"},
        "outer": {"momentum": 0.5},
        "islands": {"each": {"island-1": {"batch_size": 2, "devices": None}}},
    }
    assert made == config_file.load(write_config(tmp_path, **changes))


@pytest.mark.usefixtures("no_model")
def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = write_config(tmp_path, transport={"address": address})
        check_refused(call("syncer", config, "--run-dir", tmp_path / "run"), address, "choose another")


def test_a_learner_without_its_token_ends_before_it_waits_or_loads(tmp_path: Path) -> None:
    config = write_config(tmp_path, transport={"token_file": str(tmp_path / "none"), "connect_timeout_s": 600.0})
    result = call("learner", config, "--island", "island-0", "--syncer", "127.0.0.1:1")
    check_refused(result, f"transport.token_file {tmp_path / 'none'} cannot be read", "copy this machine's files")
    assert result.returncode == 2 and "importing" not in result.stderr


def test_unreachable_syncer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path, transport={"connect_timeout_s": 1.0})
    with socket.socket() as unused:
        # The port is bound, but does not listen, so nothing answers there.
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        result = call("learner", config, "--island", "island-0", "--syncer", address)
        check_refused(result, f"no syncer answered at {address} within 1 s", "start it")
        monkeypatch.setattr("diloco_jax.runtime.records.status.ANSWER_TIMEOUT_S", 1.0)
        check_refused(call("status", address), f"no syncer answered at {address}")


@pytest.mark.long
def test_learner_with_another_model_is_told_what_differs(tmp_path: Path) -> None:
    run_dir, other, config = tmp_path / "run", tmp_path / "other", write_config(tmp_path)
    other.mkdir()
    args = {"dim": 48, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "mlp_dim": 64}
    other_config = write_config(other, model={"args": args})
    syncer = start("syncer", config, "--run-dir", run_dir)
    try:
        told = run_dir / "syncer.address"
        address = wait_for(lambda: told.exists() and told.read_text(), "the syncer's address")
        result = run("learner", other_config, "--island", "island-0", "--syncer", address)
        check_refused(result, "refused this learner", "model differs", '"dim": 32', '"dim": 48', "same config")
        status = call("status", address, "--json")
        assert status.returncode == 0 and '"waiting_for"' in status.stdout, status.stderr
    finally:
        syncer.terminate()
        output, _ = syncer.communicate(timeout=HANGS_S)
    assert syncer.returncode == 0, output


def test_a_reader_that_has_seen_enough_is_not_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    # This command starts without JAX.
    command = [sys.executable, "-m", "diloco_jax", "simulate", "--settings"]
    ended = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment(), timeout=HANGS_S
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")
