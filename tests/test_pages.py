"""The shell blocks of pages for newcomers and operators run as they are printed, on one machine and at a small scale.

A block of ```bash is run, in the order of its page, in the folder of the machine that its first line names (`# machine
B`), else of machine A. What needs a cloud, a root or another system stands in ```sh and is not run.
"""

import contextlib
import doctest
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from diloco_jax.settings.packed import find_config
from diloco_jax.settings.schema import config_schema, setting_names
from tests.limits import SLOW_HANGS_S
from tests.sockets import free_port

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MACHINE = re.compile(r"# machine (\w)\b")
PAGES = ("start.md", "two-machines.md", "operations.md", "planning.md", "cookbook.md", "lora.md", "fine-tune.md")
# A run of newcomers in less time, on cores that others use too: two islands, few steps, evaluations of two batches.
SMALL = (
    "--islands.count 2 --train.steps 60 --train.eval_every 30 --train.eval_batches 2 --train.final_eval_batches 2 "
    "--train.batch_size 4 --train.seq_len 32 --train.eval_batch_size 4 --protocol.snapshot_every 10 --trackers"
)
# The run is long enough to be killed and stopped.
PACED = "--train.steps 500 --model.module tests.runtime.paced:PacedDecoder"
# The other machines know machine A by this name.
HOST = "syncer.example.org"
# A step takes 0.1 s and leaves the cores idle, and folders stand for machines.
FAR = {
    HOST: "127.0.0.1",
    "machine-b:": "../B/",
    "model:\n  args: {dim: 128": "model:\n  module: tests.runtime.paced:PacedDecoder\n  args: {dim: 32",
    "mlp_dim: 512, seq_len_max: 128": "mlp_dim: 64, seq_len_max: 32",
}
# text on the page -> text of the command here
CHANGES = {
    "start.md": {
        "./scripts/train --help": "true",
        ". .venv/bin/activate": "true",
        "train quickstart": f"train quickstart {SMALL}",
        "quickstart.yaml --run-dir": f"quickstart.yaml {SMALL} --run-dir",
        "runs/second > second.log": f"runs/second {PACED} > second.log",
        "runs/second --resume": f"runs/second {PACED} --resume",
    },
    "two-machines.md": {
        **FAR,
        "ssh machine-b mkdir -p ": "mkdir -p ../B/",
        "scp ": "cp ",
        "steps: 600, batch_size: 16, seq_len: 128": "steps: 900, batch_size: 4, seq_len: 32",
    },
    "cookbook.md": {
        "model:\n  args: {dim: 128": FAR["model:\n  args: {dim: 128"],
        "mlp_dim: 512, seq_len_max: 128": FAR["mlp_dim: 512, seq_len_max: 128"],
        "train quickstart --run-dir runs/box": f"train quickstart {SMALL} --run-dir runs/box",
        "train: {steps: 100000, batch_size: 16, seq_len: 128}": "train: {steps: 100000, batch_size: 4, seq_len: 32}",
        "islands: {count: 2, devices: 1, batch_size: 8}": "islands: {count: 2, devices: 1, batch_size: 2}",
        "docs/examples": f"{DOCS}/examples",
        " python ": f" {sys.executable} ",
        "train: {steps: 200}": "train: {steps: 40}",
    },
    **{page: {"END\npython ": f"END\n{sys.executable} "} for page in ("lora.md", "fine-tune.md")},
    "operations.md": {
        **FAR,
        "rsync -a ": "cp -a ",
        "batch_size: 16, seq_len: 128": "batch_size: 4, seq_len: 32",
    },
}


def blocks(page: str, kept: str = "") -> list[tuple[str, str]]:
    """The blocks of a page that are run, each with its machine; `kept` stays as the page says it."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for said, run in CHANGES.get(page, {}).items():
        if said == kept:
            continue
        assert said in text, f"{page} does not say {said!r} any more"
        text = text.replace(said, run)
    return [((MACHINE.match(block) or "AA")[1], block) for block in BLOCK.findall(text)]


@contextlib.contextmanager
def apart(host: str) -> Iterator[dict[str, list[str]]]:
    """Two network namespaces that one cable joins; yields how to run a command in each. B knows A as `host`."""
    spaces = {name: f"dlpage-{os.getpid()}-{name}" for name in "AB"}
    ends = [f"dlp{name}{os.getpid()}" for name in "AB"]

    def ip(*words: str, check: bool = True) -> int:
        return subprocess.run(["ip", *words], check=check, capture_output=True).returncode

    if shutil.which("ip") is None or ip("netns", "add", spaces["A"], check=False):
        pytest.skip("network namespaces need root on Linux, and the command ip")
    known = Path("/etc/netns") / spaces["B"]
    try:
        ip("netns", "add", spaces["B"])
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (space, end) in enumerate(zip(spaces.values(), ends, strict=True), start=1):
            ip("link", "set", end, "netns", space)
            ip("-n", space, "addr", "add", f"10.99.0.{number}/24", "dev", end)
            for link in ("lo", end):
                ip("-n", space, "link", "set", link, "up")
        known.mkdir(parents=True)
        (known / "hosts").write_text(f"127.0.0.1 localhost\n10.99.0.1 {host}\n", encoding="utf-8")
        yield {name: ["ip", "netns", "exec", space] for name, space in spaces.items()}
    finally:
        shutil.rmtree(known, ignore_errors=True)
        for space in spaces.values():
            ip("netns", "delete", space, check=False)


class Machines:
    """Folders that stand for machines, and the processes that blocks leave behind on them.

    Args:
        within: words before a command that bring it to a machine's own network.
    """

    def __init__(self, folder: Path, names: set[str], within: Mapping[str, list[str]]) -> None:
        commands = folder / "bin"
        for made in (commands, *(folder / name for name in names)):
            made.mkdir()
        (commands / "diloco").write_text(f'#!/bin/bash\nexec "{sys.executable}" -m diloco_jax "$@"\n', encoding="utf-8")
        (commands / "diloco").chmod(0o755)
        dropped = ("JAX_", "NPROC", "XLA_", "PYTEST_")
        self._env = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        self._env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "DILOCO_TEST_STEP_S": "0.1"}
        self._env |= {"PATH": f"{commands}:{os.environ['PATH']}"}
        self._env["JAX_COMPILATION_CACHE_DIR"] = os.environ["DILOCO_TEST_PROGRAMS"]
        self._folder, self._within = folder, within
        self._groups: list[int] = []

    def run(self, machine: str, block: str) -> str:
        """Run a block to its end; its background processes keep running."""
        process = subprocess.Popen(
            [*self._within.get(machine, ()), "bash", "-euo", "pipefail", "-c", block],
            cwd=self._folder / machine,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._groups.append(process.pid)
        told, _ = process.communicate(timeout=SLOW_HANGS_S)
        assert process.returncode == 0, f"status {process.returncode} of\n{block}\n{told}"
        return told

    def end(self) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def follow(
    page: str, folder: Path, within: Mapping[str, list[str]] | None = None, before: Iterable[tuple[str, str]] = ()
) -> list[str]:
    """Run blocks of other pages, then all blocks of a page, and return their output."""
    said, ports = (
        [*before, *blocks(page, HOST if within else "")],
        {port: str(free_port()) for port in ("50051", "50052")},
    )
    machines = Machines(folder, {machine for machine, _ in said}, within or {})
    try:
        return [
            machines.run(machine, re.sub("5005[12]", lambda found: ports[found[0]], block)) for machine, block in said
        ]
    finally:
        machines.end()


def test_every_page_has_blocks_that_bash_reads() -> None:
    for page in PAGES:
        assert blocks(page), page
        for _, block in blocks(page):
            subprocess.run(["bash", "-n", "-c", block], check=True)


SETTING = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?:: [^`]*)?`")
WRITTEN = [
    "two-machines.md",
    "operations.md",
    "cookbook.md",
    "settings.md",
    "concepts.md",
    "faults.md",
    "coming-from.md",
    "timeouts.md",
]


def unknown_settings(text: str) -> list[str]:
    """Names in a text that look like settings and are none; a section counts."""
    names = {name for name, _ in setting_names(config_schema())}
    known = names | {name.rpartition(".")[0] for name in names}
    sections = {name.partition(".")[0] for name in names if "." in name}
    found = SETTING.findall(text)
    # Files of a run, such as syncer.lock, have the name of a section in front of their ending.
    files = {name for name in found if name.rpartition(".")[2] in ("lock", "log", "json")}
    return [name for name in found if name.partition(".")[0] in sections and name not in known | files]


@pytest.mark.parametrize("page", WRITTEN)
def test_what_a_page_calls_a_setting_is_one(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8").replace("syncer.example.org", "")
    assert SETTING.search(text) and not unknown_settings(text)


def test_wrong_settings_are_found() -> None:
    assert unknown_settings("`protocol.qorum: 4`, `islands.mesh.fsdp`, `islands.mesh`, `numpy.load`") == [
        "protocol.qorum"
    ]


@pytest.mark.parametrize("page", ["api.md", "concepts.md"])
def test_examples_in_python_print_what_the_page_says(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    said = re.findall(
        r"^```python\n(>>> .*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert said
    test = doctest.DocTestParser().get_doctest("\n".join(said), {}, page, page, 0)
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0


def test_every_fault_names_a_test_that_is_there() -> None:
    page = (DOCS / "faults.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", page)
    assert len(named) > 25
    for path, test in named:
        assert (ROOT / path).exists(), path
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8") or not test, f"{path}::{test}"


@pytest.mark.slow
@pytest.mark.net
def test_a_newcomer_gets_through_the_first_page(folder: Path) -> None:
    told = follow("start.md", folder)
    assert "diloco-jax" in told[0] and "complete: evaluation loss" in told[1]
    assert "every lease of a sample has one fate" in told[2]
    assert "is running" in told[4]
    assert "complete: evaluation loss" in told[5] and "protocol.sync_every" in told[6]
    assert (folder / "A" / "runs" / "first" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.net
def test_two_machines_train_one_model_and_outlive_their_deaths(folder: Path) -> None:
    with apart(HOST) as within:
        told = follow("two-machines.md", folder, within)
    text = "\n".join(told)
    assert "FAIL" not in text and "two is complete: global step 900 of 900" in told[-1]
    assert "ca.key" not in {path.name for path in (folder / "B").rglob("*")}
    assert (folder / "A" / "two-model" / "parameters.npz").exists()


@pytest.mark.slow
@pytest.mark.net
def test_an_operator_gets_through_a_long_run(folder: Path) -> None:
    told = follow("operations.md", folder)
    assert "drained" in told[2] and "island-2" in told[3]
    assert "step_" in told[7] and (folder / "B" / "model" / "parameters.npz").exists()


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.extra("parity")
def test_a_cook_gets_through_the_recipes(folder: Path) -> None:
    told = follow("cookbook.md", folder)
    assert "complete: evaluation loss" in told[0]
    assert "verdict" in told[1] and "island-1" in told[4]
    assert "the run is complete" in told[5]
    assert "run complete" in (folder / "A" / "jax.log").read_text() + (folder / "A" / "torch.log").read_text()


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.extra("parity")
def test_adapters_are_rehearsed_with_a_tiny_model(folder: Path) -> None:
    told = follow("lora.md", folder)
    assert "complete: evaluation loss" in told[1]
    public, adapted, merged = (float(each) for each in re.findall(r"^\w[\w ]+ {2,}(\d\.\d{3})$", told[2], re.M))
    assert adapted == pytest.approx(merged, abs=2e-3) and adapted < public
    assert "reply:" in told[3]


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.extra("parity")
def test_conversations_are_rehearsed_with_a_tiny_model(folder: Path) -> None:
    told = follow("fine-tune.md", folder, before=blocks("lora.md")[:1])
    assert "complete: evaluation loss" in told[1] and "moon moon, as you wish." in told[1].rpartition("report ")[2]
    ends = json.loads((folder / "A" / "talker" / "generation_config.json").read_text())["eos_token_id"]
    # The token of documents, and the one that ends turns.
    assert ends == [0, 2]


@pytest.mark.long
def test_plans_are_printed_as_the_pages_say(folder: Path) -> None:
    planned = follow("planning.md", folder)
    assert "Gbit/s" in planned[0] and (folder / "A" / "plan.json").exists()
    text = (DOCS / "planning.md").read_text(encoding="utf-8")
    (quoted,) = re.findall(r"^```text\n(per day.*?)^```$", text, re.M | re.S)
    assert sum(quoted in printed for printed in planned) == 1


def test_readme_starts_the_config_of_the_first_page() -> None:
    """`./scripts/train FILE` is `diloco train FILE`, and the first page, which is run, trains a copy of this file."""
    readme, first = (ROOT / "README.md").read_text(encoding="utf-8"), (DOCS / "start.md").read_text(encoding="utf-8")
    (file,) = re.findall(r"^\./scripts/train (\S+)$", readme, re.MULTILINE)
    assert find_config("quickstart") and "diloco train quickstart" in first
    assert (ROOT / file).read_bytes() == Path(find_config("quickstart")).read_bytes()
