"""`diloco certs`, and the commands that need its files; the output of each command fits the next one."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from diloco_jax.cli import main as cli
from diloco_jax.runtime.records.files import ADDRESS_FILE, CONFIG_FILE
from diloco_jax.settings import text as config
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.endpoints import grpc_link
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.session.operator_requests import DRAIN, OperatorRequest
from diloco_jax.transport.trust.security import credentials
from tests.limits import HANGS_S


def test_certs_prints_settings_that_a_config_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certs"
    assert cli.main(["certs", str(folder), "--learners", "island-0,island-1"]) == 0
    text = capsys.readouterr().out
    assert f"wrote {folder / 'island-1.key'}" in text and "ca.key stays here" in text
    block = text[text.index("transport:") :].split("\n\n")[0]
    made = config.parse(yaml.safe_load(block), "printed").transport
    assert made.encrypted and made.tls_certificate == str(folder / "{name}.pem")
    assert cli.main(["certs", str(folder), "--learners", "island-1,island-2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [Path(path).name for path in answer["written"]] == ["island-2.key", "island-2.pem"]
    assert str(folder / "island-1.pem") in answer["kept"]
    assert TransportConfig(**answer["settings"]) == made


def test_settings_of_a_relative_folder_work_on_another_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed section loads the credentials from a copy of the folder, in the folder where the process starts."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    monkeypatch.chdir(here)
    assert cli.main(["certs", "certs", "--learners", "island-0"]) == 0
    text = capsys.readouterr().out
    assert str(tmp_path) not in text and "copy them into certs there, below the folder where" in text
    block = text[text.index("transport:") :].split("\n\n")[0]
    there.mkdir()
    (here / "certs").rename(there / "certs")
    monkeypatch.chdir(there)
    transport = config.parse(yaml.safe_load(block), "printed").transport
    assert transport.token_file == "certs/token"
    assert credentials(transport, "island-0")


def test_certs_with_wrong_input_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["certs", str(tmp_path / "x"), "--learners", "../island"]) == cli.WRONG_INPUT
    assert cli.main(["certs", str(tmp_path / "x"), "--days", "0"]) == cli.WRONG_INPUT
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "'../island' is not allowed" in errors[0] and "--days is 0" in errors[1]


@pytest.fixture
def run_dir(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Path]:
    """Folder of a run whose syncer asks for certificates and a token; it knows island-0 alone."""
    cli.main(["certs", str(tmp_path / "certs"), "--json"])
    values = json.loads(capsys.readouterr().out)["settings"]
    transport = TransportConfig(**values)
    (tmp_path / CONFIG_FILE).write_text(config.dump(RunConfig(transport=transport)), encoding="utf-8")
    listener = grpc_link.listen(transport, run_id="run")
    (tmp_path / ADDRESS_FILE).write_text(listener.address, encoding="utf-8")
    listener.status_json = json.dumps({"run": "run", "global_step": 3})
    stop = threading.Event()

    def on_operator(request: OperatorRequest) -> str:
        action, name, why = request
        if name != "island-0":
            raise ValueError(f"there is no learner {name!r}")
        return f"{name} leaves" if action == DRAIN else f"{action} of {name} {why}"

    def drive() -> None:
        while not stop.is_set():
            listener.receive(HANGS_S)

    listener.on_operator = on_operator
    driver = threading.Thread(target=drive)
    driver.start()
    yield tmp_path
    stop.set()
    listener.wake()
    driver.join(HANGS_S)
    listener.close(0.1)


@pytest.mark.net
def test_drain_and_status_use_the_credentials_of_the_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address, credentials = (run_dir / ADDRESS_FILE).read_text(), ["--config", str(run_dir / CONFIG_FILE)]
    assert cli.main(["drain", "island-0", str(run_dir)]) == 0
    assert capsys.readouterr().out == "island-0 leaves\n"
    assert cli.main(["drain", "island-7", address, *credentials]) == cli.FAILED
    assert "there is no learner 'island-7'" in capsys.readouterr().err
    assert cli.main(["drain", "island-0", address, *credentials, "--json"]) == 0
    expected = {"learner": "island-0", "ok": True, "message": "island-0 leaves"}
    assert json.loads(capsys.readouterr().out) == expected
    assert cli.main(["status", address, *credentials, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["global_step"] == 3


@pytest.mark.net
def test_ban_and_admit_send_their_requests(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ban", "island-0", str(run_dir), "--why", "bad data"]) == 0
    assert cli.main(["admit", "island-0", str(run_dir), "--json"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "ban of island-0 bad data"
    assert json.loads(shown[1]) == {"learner": "island-0", "ok": True, "message": "admit of island-0 "}
    assert cli.main(["admit", "island-7", str(run_dir)]) == cli.FAILED
    assert capsys.readouterr().err == "diloco admit: there is no learner 'island-7'\n"


@pytest.mark.net
def test_without_credentials_the_message_says_what_is_missing(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_jax.runtime.records.status.ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr("diloco_jax.transport.trust.security.PROBE_TIMEOUT_S", HANGS_S)
    address = (run_dir / ADDRESS_FILE).read_text()
    for command in (["drain", "island-0", address], ["status", address]):
        assert cli.main(command) == cli.FAILED
        assert "the syncer wants TLS: set transport.tls_ca" in capsys.readouterr().err


def test_drain_of_a_run_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / CONFIG_FILE).write_text(config.dump(RunConfig()), encoding="utf-8")
    assert cli.main(["drain", "island-0", str(tmp_path)]) == cli.WRONG_INPUT
    assert ADDRESS_FILE in capsys.readouterr().err
