"""Wrong input: one clear error that names the value and the remedy, a status that is not 0, and no traceback."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import diloco_jax
from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.settings import text as config_file
from tests.runtime.helpers import SMALL, call, environment, run, start, wait_for, write_config

pytestmark = [pytest.mark.net, pytest.mark.timeout(200)]


def check_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """The command ended with one message that has these words."""
    said = " ".join((result.stdout + result.stderr).replace("│", " ").split())
    assert result.returncode not in (0, -6, -11), said
    assert "Traceback" not in said, said
    for word in words:
        assert word in said, f"{word!r} is not in: {said}"


MIXED = {"mlp": 4, "rest": 24}
BUILT_IN = {"module": "diloco_jax.training.models.decoder:Decoder"}
BUILT_IN_MODEL = BUILT_IN | {"args": {}}
DROPLESS = {"module": "diloco_jax.training.models.moe:MoeDecoder", "args": {"routing": "dropless"}}
WRONG_AXIS = {"data": -1, "rules": {"embd": ["fsdp"]}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"stepz": 5}}, ["unknown setting train.stepz (value 5)", "did you mean train.steps"]),
        ({"train": {"steps": "many"}}, ["train.steps is 'many'", "valid integer"]),
        ({"train": {"steps": 0}}, ["train.steps is 0", "at least 1"]),
        ({"train": {"tokens": -5}}, ["train.tokens is -5", "0 for a run of train.steps"]),
        ({"train": {"tokens": 255}}, ["train.tokens is 255", "256 of one global step", "raise it"]),
        ({"train": {"tokens": 81 * 256}}, ["train.steps 80 ends", "81 global steps", "set train.steps to 0"]),
        ({"train": {"steps": 0, "tokens": 1025}, "optimizer": {"warmup_steps": 6}}, ["warmup_steps 6", "5 global"]),
        ({"train": 7}, ["train is 7", "section"]),
        ({"protocol": {"quorum": 9}}, ["quorum (K) is 9", "2 islands (M)", "lower protocol.quorum"]),
        ({"protocol": {"num_fragments": 0}}, ["num_fragments is 0", "at least 1"]),
        ({"protocol": {"num_fragments": 30}}, ["num_fragments is 30", "sync_every = 6"]),
        (
            {"protocol": {"sync_every": MIXED | {"mpl": 4}}},
            ["'mpl'", "no class of tensors", "use norm, embedding, mlp"],
        ),
        ({"protocol": {"sync_every": MIXED | {"mlp": 0}}}, ["sync_every.mlp is 0", "at least 1"]),
        ({"protocol": {"sync_every": MIXED | {"mlp": 5}}}, ["the periods 5 and 24", "use 20 or 25 for 24"]),
        ({"protocol": {"sync_every": MIXED | {"mlp": 2}}}, ["overlap_steps is 2", "less than the shortest period, 2"]),
        ({"protocol": {"sync_every": MIXED | {"*/x": 24}}}, ["'*/x'", "no tensor is left for it", "the model has"]),
        ({"protocol": {"sync_every": {"mlp": 4}, "num_fragments": 4}}, ["no period for 'blocks/", "add rest"]),
        ({"protocol": {"sync_every": {"mlp": "x"}}}, ["protocol.sync_every is {'mlp': 'x'}", "valid integer"]),
        ({"protocol": {"sync_later": {80: 12}}}, ["begins at global step 80", "the run has 80", "leave it out"]),
        ({"protocol": {"overlap_steps": 0}}, ["overlap_steps is 0", "set the quorum to 2"]),
        ({"data": {"format": "tokens", "path": "x"}, "model": BUILT_IN}, ["model.args.vocab_size is 256", "65536"]),
        ({"train": {"seq_len": 9999}, "model": BUILT_IN}, ["train.seq_len is 9999", "or lower train.seq_len"]),
        ({"islands": {"mesh": {"expert": 2}}, "model": DROPLESS}, ["islands.mesh.expert is 2; make it 1"]),
        ({"islands": {"mesh": WRONG_AXIS}, "model": BUILT_IN}, ["logical axis 'embd'", "choose from batch"]),
        ({"train": {"batch_size": 7}}, ["batch_size is 7", "multiple of islands.count"]),
        ({"islands": {"devices": 3}}, ["batch of 4", "islands.mesh"]),
        ({"wire": {"up": "int3"}}, ["wire.up", "int3"]),
        ({"islands": {"devices": 65}}, ["devices is 65; use 1 to 64, or auto"]),
        ({"islands": {"restart_delay_s": float("nan")}}, ["restart_delay_s nan must be at least 0"]),
        ({"watchdog": {"least_s": 60.0, "start_s": 5.0}}, ["least_s is 60.0 and start_s 5.0"]),
        ({"watchdog": {"median_factor": 0.5}}, ["median_factor is 0.5; it must be at least 1"]),
        ({"islands": {"standby": True, "hosts": 2, "devices": 2}}, ["islands.standby needs islands of one process"]),
        ({"syncer": {"restart_delay_s": float("inf")}}, ["restart_delay_s inf must be at least 0"]),
    ],
)
def test_wrong_settings(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    config = write_config(tmp_path, **changes)
    check_refused(call("train", config, "--run-dir", tmp_path / "run", "--quiet"), *words)


WRONG_MODELS = """
from flax import nnx
from diloco_jax.training.models.decoder import Decoder


class NoArgs(Decoder):
    @classmethod
    def from_config(cls, args, *, rngs):
        return super().from_config({"dim": args["width"]}, rngs=rngs)


class BadLoss(Decoder):
    def loss(self, batch):
        return batch["tokens"] @ batch["tokens"], {}


class BadValue(Decoder):
    def loss(self, batch):
        raise ValueError("not ours")
"""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"path": "/does/not/exist"}}, ["data.path '/does/not/exist' does not exist", "give a file"]),
        ({"data": {"path": ".", "patterns": ["*.nothing"]}}, ["no file that matches", "data.patterns"]),
        ({"data": {"path": "short.txt"}}, ["short.txt' has 401 tokens", "give more text"]),
        ({"data": {"path": "some.txt"}}, ["held-out windows make no batch of 16", "lower train.eval_batch_size"]),
        ({"model": {"module": "nowhere:Thing"}}, ["nowhere", "model.module", "cannot be imported"]),
        ({"model": {"module": "Thing"}}, ["model.module is 'Thing'", "package.module:Name"]),
        ({"model": {"module": "wrong_models:Thing"}}, ["has no attribute 'Thing'", "model.module"]),
        ({"model": {"module": "broken_model:Thing"}}, ["broken_model.py, line 1", "SyntaxError", "model.module"]),
        ({"model": {"module": "wrong_models:NoArgs"}}, ["KeyError: 'width'", "wrong_models.py, line 9", "model.args"]),
        ({"model": {"module": "wrong_models:BadLoss"}}, ["TypeError", "wrong_models.py, line 14", "model.module"]),
        ({"model": {"module": "wrong_models:BadValue"}}, ["ValueError: not ours", "wrong_models.py, line 19"]),
        ({"model": {"args": {"dimm": 4}}}, ["dimm", "model.args"]),
        ({"seed": -1}, ["seed is -1", "[0, 2^31)"]),
        ({"transport": {"address": "0.0.0.0:0"}}, ["'0.0.0.0:0' is not loopback", "allow_plaintext"]),
        ({"transport": {"token_file": "/no/token"}}, ["transport.token_file /no/token cannot be read"]),
        ({"transport": {"address": "TAKEN"}}, ["cannot listen on transport.address", "choose another"]),
    ],
)
def test_what_a_run_would_stumble_over_is_found_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wrong_models", raising=False)
    (tmp_path / "wrong_models.py").write_text(WRONG_MODELS)
    (tmp_path / "broken_model.py").write_text("class Thing(\n")
    (tmp_path / "short.txt").write_text("x" * 400)
    (tmp_path / "some.txt").write_text("x" * 10000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = write_config(tmp_path, **changes)
        config.write_text(config.read_text().replace("TAKEN", address))
        result = call("train", config, "--run-dir", tmp_path / "run")
    check_refused(result, *words)
    assert result.returncode == 2 and not (tmp_path / "run").exists()
    assert len((result.stdout + result.stderr).splitlines()) == 1, "one line"


def test_a_syncer_by_itself_finds_too_little_text_before_it_listens(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("x" * 10000)
    config = config_file.load(write_config(tmp_path, data={"path": str(tmp_path / "some.txt")}))
    with pytest.raises(ValueError, match="held-out windows make no batch of 16"):
        Evaluator(config)


def test_chaos_checks_before_anything_starts_too(tmp_path: Path) -> None:
    changes = {"islands": {"count": 3}, "train": {"batch_size": 12}, "data": {"path": "/does/not/exist"}}
    result = call("chaos", write_config(tmp_path, **changes), "--run-dir", tmp_path / "run")
    check_refused(result, "data.path '/does/not/exist' does not exist")
    assert result.returncode == 2 and not (tmp_path / "run").exists()


def test_wrong_override_and_missing_config(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    check_refused(call("train", config, "--outer.learning_rate", "-1"), "learning_rate is -1", "above 0")
    check_refused(call("train", tmp_path / "none.yaml"), "none.yaml cannot be read", "quickstart")
    (tmp_path / "broken.yaml").write_text("train: [1,")
    check_refused(call("train", tmp_path / "broken.yaml"), "broken.yaml is not valid YAML")
    check_refused(call("eval", tmp_path), "holds no checkpoint", "folder of a run")
    check_refused(call("report", tmp_path), "metrics.jsonl")
    check_refused(call("status", tmp_path), "has said nothing yet", "logs")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "name a command"),
        (["trian", "CONFIG"], "no command 'trian'; did you mean train?"),
        (["train"], "required: config; `diloco train --help`"),
        (["plan", "CONFIG", "--chips", "x"], "--chips: invalid int value: 'x'"),
        (["train", "CONFIG", "--train.stepz", "5"], "unknown setting train.stepz (value 5); did you mean train.steps?"),
        (["train", "CONFIG", "--train.steps"], "--train.steps needs a value"),
        (["train", "CONFIG", "--train.steps", "4", "5"], "--train.steps takes one value, not 2 (4 5)"),
        (["train", "CONFIG", "--train.steps", "x"], "train.steps is 'x'"),
        (["train", "CONFIG", "--wire.up=int3"], "wire.up is 'int3'"),
        (["train", "CONFIG", "--optimizer.warmup_steps", "5000"], "lower warmup_steps"),
        (["train", "CONFIG", "--model.args", "{"], "--model.args is '{', which is no YAML"),
        (["train", "CONFIG", "--islands.each.island-0.device", "1"], "did you mean islands.each.island-0.devices?"),
        (["train", "CONFIG", "train.steps=5"], "'train.steps' is no setting"),
        (["train", "--train.steps", "5", "CONFIG"], "the config comes first, settings follow it"),
        (["train", "CONFIG", "--run-dir", "CONFIG"], "is a file; name a folder"),
        (["certs", "CONFIG", "--learners", "a"], "File exists"),
        (["status", "nowhere"], "nowhere has no status.json"),
        (["drain", "island-0", "nowhere"], "nowhere is not the folder of a run"),
        (["audit", "nowhere"], "nowhere is not the folder of a run"),
        (["replay", "nowhere"], "nowhere is not the folder of a run"),
        (["eval", "nowhere"], "give the folder of a run"),
        (["sample", "nowhere"], "give the folder of a run"),
        (["sample", "nowhere", "--tokens", "0"], "use at least one token"),
        (["sample", "nowhere", "--temperature", "1e-40"], "a temperature of 0 or from 1e-06 to 1e+06"),
        (["sample", "nowhere", "--seed", "-1"], r"must be in [0, 2^31)"),
        (["eval", "nowhere", "--tasks", "x", "--tasks-folder", "nowhere"], "is no folder"),
        (["launch", "aws", "CONFIG"], "choose from 'gke', 'gce', 'tpu-vm'"),
        (["learner", "CONFIG"], "required: --island"),
    ],
)
def test_a_wrong_command_line_gets_one_line(tmp_path: Path, words: list[str], told: str) -> None:
    config = write_config(tmp_path, model=BUILT_IN_MODEL)
    result = call(*(config if word == "CONFIG" else word for word in words))
    check_refused(result, told)
    assert result.returncode == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1, result.stderr
    assert "chaos-learner" not in result.stderr and "merge-shard" not in result.stderr


@pytest.mark.parametrize("command", ["audit", "syncer"])
def test_a_folder_of_a_release_that_is_not_read_gets_one_line(tmp_path: Path, command: str) -> None:
    config = write_config(tmp_path)
    (tmp_path / "tape.jsonl").write_text('["begin",0.0,[],[9,"9.8.7"]]\n["tick",1.0]\n')
    result = call("audit", tmp_path) if command == "audit" else run("syncer", config, "--run-dir", tmp_path)
    told = f"diloco {command}: the tape from line 1 on is of diloco-jax 9.8.7, protocol 9; this is"
    check_refused(result, f"{told} {diloco_jax.__version__}, which reads", "go on with 9.8.7, or begin a new run")
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


def test_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    result = call("train", write_config(tmp_path), "--run-dir", tmp_path / "run")
    check_refused(result, "holds a run already", "--run-dir")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n"


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = write_config(tmp_path, transport={"address": address})
        check_refused(run("syncer", config, "--run-dir", tmp_path / "run"), address, "choose another")


def test_unreachable_syncer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path, transport={"connect_timeout_s": 1.0})
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        result = run("learner", config, "--island", "island-0", "--syncer", address)
        check_refused(result, f"no syncer answered at {address} within 1 s", "start it")
        monkeypatch.setattr("diloco_jax.runtime.records.status.ANSWER_TIMEOUT_S", 1.0)
        check_refused(call("status", address), f"no syncer answered at {address}")


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
        output, _ = syncer.communicate(timeout=60)
    assert syncer.returncode == 0, output


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "diloco_jax", "simulate", "--settings"]  # starts without JAX
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment(), timeout=100)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")
