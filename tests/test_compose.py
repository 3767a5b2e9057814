"""compose.yaml starts a run that its containers can reach, and nothing outside the machine; its commands work."""

import json
import os
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_jax.cli.commands import make_parser
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load
from tests.limits import HANGS_S
from tests.runtime.helpers import start, status, wait_for
from tests.runtime.syncer.test_failover import folder
from tests.sockets import free_port

__all__ = ["folder"]  # a fixture
ROOT = Path(__file__).resolve().parent.parent
FILE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
PROGRAMS = {name: service for name, service in SERVICES.items() if service["image"].startswith("diloco_jax")}
ISLANDS = [name for name in PROGRAMS if name != "syncer"]
CONFIG_PATH = "/etc/diloco/run.yaml"

# The fields that this file uses, out of those of the Compose Specification.
OF_FILE = {"name", "x-program", "services", "volumes", "configs"}
OF_SERVICE = {"image", "build", "command", "configs", "depends_on", "environment", "ports", "restart", "volumes"}


def content(name: str) -> Any:
    return yaml.safe_load(FILE["configs"][name]["content"])


def config_in(path: Path, **changes: Any) -> RunConfig:
    """Write the run's config, with other values of whole sections, and load it."""
    path.write_text(yaml.safe_dump({**content("run"), **changes}), encoding="utf-8")
    return load(path)


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_fields_are_known_and_references_exist() -> None:
    assert set(FILE) == OF_FILE
    for service in SERVICES.values():
        assert set(service) <= OF_SERVICE
        assert {each["source"] for each in service.get("configs", ())} <= set(FILE["configs"])
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (ROOT / source).is_file() if source.startswith("./") else source in FILE["volumes"], volume
    used = {each["source"] for service in SERVICES.values() for each in service.get("configs", ())}
    assert used == set(FILE["configs"]), "an unused config"
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    arguments = {line.split()[1].partition("=")[0] for line in lines if line.startswith("ARG")}
    assert set(FILE["x-program"]["build"]["args"]) <= arguments


def test_each_island_is_a_service_of_its_name_with_its_own_folder(tmp_path: Path) -> None:
    assert list(config_in(tmp_path / "run.yaml").islands.names) == ISLANDS
    for name in ISLANDS:
        parsed = make_parser("learner").parse_args(PROGRAMS[name]["command"])
        assert (parsed.name, parsed.config, parsed.island) == ("learner", CONFIG_PATH, name)
    folders = [service["volumes"][0].partition(":")[0] for service in PROGRAMS.values()]
    assert folders == list(PROGRAMS)
    assert make_parser("syncer").parse_args(PROGRAMS["syncer"]["command"]).config == CONFIG_PATH
    for service in PROGRAMS.values():
        assert option(service["command"], "--run-dir").startswith(service["volumes"][0].partition(":")[2])
        assert service["configs"] == [{"source": "run", "target": CONFIG_PATH}]


def test_ports_agree_and_are_open_on_this_machine_only(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run.yaml")
    port = config.transport.address.rpartition(":")[2]
    assert {option(PROGRAMS[name]["command"], "--syncer") for name in ISLANDS} == {f"syncer:{port}"}
    metrics = config.syncer.metrics.rpartition(":")[2]
    assert content("prometheus")["scrape_configs"][0]["static_configs"] == [{"targets": [f"syncer:{metrics}"]}]
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert ports == {"prometheus": ["127.0.0.1:9090:9090"], "grafana": ["127.0.0.1:3000:3000"]}
    assert content("datasource")["datasources"][0]["url"] == "http://prometheus:9090"


def test_prometheus_and_grafana_find_the_mounted_files() -> None:
    rules, grafana = content("prometheus")["rule_files"], SERVICES["grafana"]
    assert SERVICES["prometheus"]["volumes"] == [f"./configs/monitoring/{rules[0]}:/etc/prometheus/{rules[0]}:ro"]
    source, target, _ = grafana["volumes"][0].split(":")
    assert target == grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert str(Path(target).parent) == content("dashboards")["providers"][0]["options"]["path"]
    variables = json.loads((ROOT / source).read_text(encoding="utf-8"))["templating"]["list"]
    assert (variables[0]["name"], variables[0]["query"]) == (
        "datasource",
        content("datasource")["datasources"][0]["type"],
    )


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool, for example of Debian's package prometheus")
def test_promtool_accepts_the_config(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(FILE["configs"]["prometheus"]["content"])
    shutil.copy(ROOT / "configs" / "monitoring" / "alerts.yml", tmp_path)
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], check=True, timeout=HANGS_S)


@pytest.mark.long
@pytest.mark.net
def test_the_commands_train_and_an_island_that_is_killed_returns(folder: Path) -> None:
    """The containers' commands as processes of this machine, in a run of fewer steps."""
    address, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    changes = {"train": {**content("run")["train"], "steps": 150, "eval_every": 0}}
    changes |= {"transport": {**content("run")["transport"], "address": address}, "syncer": {"metrics": metrics}}
    config_in(folder / "run.yaml", **changes)

    def begin(name: str) -> "subprocess.Popen[str]":
        words = {CONFIG_PATH: folder / "run.yaml", "syncer:50051": address, "/var/diloco/run": folder / name}
        return start(*(words.get(word, word) for word in PROGRAMS[name]["command"]), step_s=0)

    def merged_in(name: str) -> int:
        rows = (status(folder / "syncer") or {"learners": []})["learners"]
        return next((row["last_merged_round"] or 0 for row in rows if row["learner"] == name), 0)

    processes = {name: begin(name) for name in PROGRAMS}
    wait_for(lambda: merged_in("island-1") > 10, "rounds that merge island-1", processes["syncer"])
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=HANGS_S) as answer:
        assert b'diloco_island_condition{condition="training",island="island-1"} 1.0' in answer.read()
    os.kill(processes["island-1"].pid, signal.SIGKILL)
    processes["island-1"].communicate()
    before = merged_in("island-0")
    wait_for(lambda: merged_in("island-0") > before, "a round without island-1", processes["syncer"])
    processes["island-1"] = begin("island-1")
    for name, process in processes.items():
        output, _ = process.communicate(timeout=HANGS_S)
        assert process.returncode == 0, f"{name}: {output}"
    summary = json.loads((folder / "syncer" / "summary.json").read_text())
    assert summary["complete"] and summary["learners"]["island-1"]["restarts"] == 1


def test_the_commands_of_the_guide_work_after_the_end_of_the_run() -> None:
    """The syncer's container has stopped then, and a fresh clone has no folder of runs."""
    guide = (ROOT / "docs" / "compose.md").read_text(encoding="utf-8")
    lines = [line.partition("#")[0].split() for line in guide.splitlines()]
    commands = [words for words in lines if words[:2] == ["docker", "compose"]]
    assert not [words for words in commands if words[2] == "exec"]
    started = [words[5:] for words in commands if words[2:5] == ["run", "--rm", "--no-deps"]]
    assert [words[:2] for words in started] == [["syncer", "status"], ["syncer", "report"]]
    for words in started:
        assert make_parser().parse_args(words[1:]).run == option(SERVICES["syncer"]["command"], "--run-dir")
    copy = next(words for words in commands if words[2] == "cp")
    assert lines.index(["mkdir", "-p", str(Path(copy[-1]).parent)]) < lines.index(copy)
