"""The first minutes: a config to begin with, a bare name, a shell that completes, a wheel without the repository."""

import contextlib
import io
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import diloco_jax
from diloco_jax.cli.commands import COMMANDS, EXAMPLES, GROUPS, HIDDEN, make_parser
from diloco_jax.cli.main import main
from diloco_jax.settings.packed import find_config, packed
from diloco_jax.settings.text import load
from tests.limits import HANGS_S
from tests.runtime.helpers import ROOT, environment
from tests.tools.page.made import made_run


@pytest.mark.parametrize("name", ["quickstart", "tpu/moe_v6e"])
def test_init_writes_a_config_and_its_schema_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import jsonschema

    target = tmp_path / "made" / f"{Path(name).name}.yaml"
    assert main(["init", name, "--dir", str(target.parent)]) == 0
    text = target.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=diloco.schema.json\n# ")
    assert str(target) in text and str(target) in capsys.readouterr().out and load(target) == load(packed()[name])
    jsonschema.validate(yaml.safe_load(text), json.loads((tmp_path / "made/diloco.schema.json").read_text()))
    target.write_text("name: mine\n", encoding="utf-8")
    assert main(["init", name, "--dir", str(target.parent)]) == 2
    assert "exists already" in capsys.readouterr().err and target.read_text(encoding="utf-8") == "name: mine\n"


def test_help_lists_each_command_once_in_its_group_and_ends_with_examples() -> None:
    text = make_parser().format_help()
    groups = dict(zip(GROUPS, re.split("|".join(f"{title}:\n" for title in GROUPS), text)[1:], strict=True))
    for title, commands in GROUPS.items():
        assert re.findall(r"(?m)^  ([a-z]+)\b", groups[title].partition("options:")[0]) == [c.name for c in commands]
    assert all(each.name not in text for each in HIDDEN if each.name != "compile") and len(HIDDEN) == 2
    assert text.splitlines()[-3:] == [f"  {each}" for each in EXAMPLES] and "  compile " not in text


def test_commands_import_nothing_heavy_before_they_are_called() -> None:
    heavy = {"jax", "numpy", "pydantic", "grpc", "rich", "yaml", "diloco_jax.settings.run"}
    code = f"import sys, diloco_jax.cli.commands; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_status_of_a_folder_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = {
        "jax",
        "numpy",
        "pydantic",
        "grpc",
        "google.protobuf",
        "rich",
        "yaml",
        "diloco_jax.protocol.syncer.machine",
    }
    folder = made_run(tmp_path / "run")
    code = f"import sys; from diloco_jax.cli.main import main; main(['status', {str(folder)!r}]); "
    code += f"print('heavy:', *({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S)
    assert done.stdout.startswith("made is running: global step 1 of 10")
    assert (done.stdout.splitlines()[-1], done.stderr) == ("heavy:", "")


def test_example_lines_are_command_lines() -> None:
    examples = [*EXAMPLES, *(each.example for each in COMMANDS if each.example)]
    for each in examples:
        words = re.split(r"  +", each)[0].split()
        assert words[0] == "diloco" and make_parser().parse_known_args(words[1:])[0].name == words[1]
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit):
        main(["train", "--help"])
    example = "  diloco train quickstart --train.steps 200 --run-dir runs/mine"
    assert said.getvalue().splitlines()[-2:] == ["example:", example]


@pytest.mark.parametrize(
    ("there", "word", "found"),
    [
        ([], "quickstart", str(packed()["quickstart"])),
        ([], "tpu/moe_v6e", str(packed()["tpu/moe_v6e"])),
        (["quickstart.yaml"], "quickstart", "quickstart.yaml"),  # somebody's own copy
        (["quickstart", "quickstart.yaml"], "quickstart", "quickstart"),
        ([], "quickstart.yaml", "quickstart.yaml"),
        ([], "none", "none"),
    ],
)
def test_a_bare_name_is_a_file_or_a_config_of_the_package(
    there: list[str], word: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in there:
        Path(name).touch()
    assert find_config(word) == found


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tra"], {"train"}),
        # Commands that only processes start are not offered.
        (["chaos-"], set()),
        (["train", "quick"], {"quickstart"}),
        (["plan", "quickstart", "--train.st"], {"--train.steps"}),
    ],
)
def test_bash_completes(words: list[str], offered: set[str], script: str) -> None:
    ask = f'COMP_WORDS=(diloco {" ".join(words)}); COMP_CWORD={len(words)}; _shtab_diloco; echo "${{COMPREPLY[@]}}"'
    result = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=HANGS_S)
    assert set(result.stdout.split()) == offered, result.stderr


@pytest.fixture(scope="module")
def script() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["completion", "bash"]) == 0
    return said.getvalue()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=HANGS_S)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def call(site: Path, home: Path, *words: str) -> str:
    env = environment() | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, *words], cwd=home, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.extra("dev")
def test_a_wheel_has_what_the_commands_need(installed: Path, tmp_path: Path) -> None:
    assert (installed / "diloco_jax" / "py.typed").exists()
    monitoring = {path.name for path in (installed / "diloco_jax" / "configs" / "monitoring").iterdir()}
    assert monitoring == {"alerts.yml", "grafana.json", "prometheus.yml"}
    code = "import diloco_jax.settings.packed as p; print(p.__file__, *p.packed().values(), sep='\\n')"
    found = call(installed, tmp_path, "-c", code).splitlines()
    assert len(found) == 1 + len(packed()) and all(line.startswith(str(installed)) for line in found)
    assert f"diloco-jax {diloco_jax.__version__}" in call(installed, tmp_path, "-m", "diloco_jax", "--version")


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.extra("dev")
def test_a_wheel_trains_without_the_repository(installed: Path, tmp_path: Path) -> None:
    small = "--islands.count=1 --train.batch_size=4 --train.steps=2 --train.final_eval_batches=1"
    small += " --model.args.num_layers=1 --optimizer.warmup_steps=0"
    words = ("-m", "diloco_jax", "train", "quickstart", "--json", *small.split())
    summary = json.loads(call(installed, tmp_path, *words))
    assert summary["complete"] and (tmp_path / summary["run_dir"] / "report.html").exists()
