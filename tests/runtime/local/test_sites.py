"""Three sites with a corpus each, which only their own user can read: kills, a ban, and what their links carry."""

import json
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.limits import SLOW_HANGS_S
from tests.runtime.helpers import SMALL, call, merged, notes, wait_for
from tests.runtime.helpers import run as repeat
from tests.runtime.local.sites import PORT, Site, found_in, networks, python_for_anybody, recorded, words_of

NAMES = ("island-0", "island-1", "island-2")
# No two sites have a file in common, and no file has a sentence of this project, which its messages could contain too.
TEXTS = ("email", "asyncio", "xml")
TLS = {"tls_ca": "certs/ca.pem", "tls_certificate": "certs/{name}.pem", "tls_key": "certs/{name}.key"}


def settings(steps: int, *, tls: bool) -> dict[str, Any]:
    transport: dict[str, Any] = {"address": f"0.0.0.0:{PORT}", **(TLS if tls else {"allow_plaintext": True})}
    changes = {
        "name": "sites",
        "islands": {"count": 3, "devices": 1, "batch_size": 4},
        "train": {"steps": steps, "eval_every": 40, "eval_batch_size": 4},
        "protocol": {"snapshot_every": 20, "quorum": 1},
        "transport": transport,
    }
    return merged(SMALL, changes)


class Run:
    """A syncer and three sites; `start` starts a process, or starts it again."""

    def __init__(self, folder: Path, networks: list[list[str]], config: dict[str, Any]) -> None:
        python = python_for_anybody()
        self.sites = [
            Site(folder / name, number, within, python)
            for number, (name, within) in enumerate(zip(("syncer", *NAMES), networks, strict=True))
        ]
        self.texts = []
        if "tls_ca" in config["transport"]:
            made = self.sites[0].command("certs", "certs", "--learners", ",".join(NAMES))
            assert made.returncode == 0, made.stderr
        for site, package in zip(self.sites[1:], TEXTS, strict=True):
            (site.folder / "text").mkdir()
            for path in (Path(sysconfig.get_path("stdlib")) / package).rglob("*.py"):
                shutil.copy(path, site.folder / "text" / f"{path.parent.name}-{path.name}")
            self.texts.append(b"\0".join(path.read_bytes() for path in sorted((site.folder / "text").iterdir())))
        for site in self.sites:
            (site.folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
            if site is not self.sites[0] and (self.sites[0].folder / "certs").exists():
                (site.folder / "certs").mkdir()
                for name in ("ca.pem", f"{site.folder.name}.pem", f"{site.folder.name}.key"):
                    shutil.copy(self.sites[0].folder / "certs" / name, site.folder / "certs")
            site.own()
        self.run_dir = self.sites[0].folder / "run"

    def start(self, number: int) -> None:
        if number == 0:
            self.sites[0].start("syncer", "config.yaml", "--run-dir", "run")
            return
        words = ["--island", NAMES[number - 1], "--syncer", f"10.98.{number}.1:{PORT}", "--data", "text"]
        self.sites[number].start("learner", "config.yaml", "--run-dir", "run", *words)

    def start_all(self) -> None:
        """Start the syncer, and once it listens the sites: its merge may compile for longer than they wait."""
        self.start(0)
        wait_for((self.run_dir / "syncer.address").exists, "the syncer's port", within_s=SLOW_HANGS_S)
        for number in range(1, 4):
            self.start(number)

    def merges(self, *names: str, more: int = 3) -> None:
        """Wait until rounds have merged these islands more often."""
        before = {name: notes(self.run_dir, "merged", name) for name in names}
        wait_for(
            lambda: all(notes(self.run_dir, "merged", name) >= before[name] + more for name in names),
            f"rounds that merge {names}",
            within_s=SLOW_HANGS_S,
        )

    def gathered(self, folder: Path) -> Path:
        """Copy the run's folder and the tapes of all sites to one place, as an auditor of all sites would."""
        shutil.copytree(self.run_dir, folder / "run", ignore=shutil.ignore_patterns("logs"))
        (folder / "run" / "tapes").mkdir(exist_ok=True)
        for site in self.sites[1:]:
            for tape in (site.folder / "run" / "tapes").iterdir():
                shutil.copy(tape, folder / "run" / "tapes")
        return folder / "run"


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a folder that every user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="diloco-sites-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.nightly
@pytest.mark.net
def test_three_sites_survive_a_kill_a_ban_and_the_end_of_the_syncer(place: Path) -> None:
    with networks(3) as spaces:
        run = Run(place, spaces, settings(900, tls=True))
        syncer, first, second, third = run.sites
        try:
            for site in run.sites[1:]:
                other = run.sites[1] if site is not run.sites[1] else run.sites[2]
                read = site.command("tokenize", str(other.folder / "text"), "--tokenizer", "bytes", "--out", "stolen")
                assert read.returncode != 0, "a site can read the text of another one"
            run.start_all()
            run.merges(*NAMES)
            first.kill()
            run.start(1)
            run.merges(NAMES[0], NAMES[1])
            banned = syncer.command("ban", NAMES[2], "run", "--why", "its text is not licensed")
            assert banned.returncode == 0, banned.stderr
            assert third.process is not None and third.process.wait(SLOW_HANGS_S) == 2
            syncer.kill()
            run.start(0)
            run.merges(NAMES[0], NAMES[1])
            run.start(3)
            assert third.process.wait(SLOW_HANGS_S) == 2
            assert "banned from this run" in (place / f"{NAMES[2]}.log").read_text().splitlines()[-1]
            for site in (first, second, syncer):
                assert site.process is not None and site.process.wait(SLOW_HANGS_S) == 0, site.folder.name
        finally:
            for site in run.sites:
                site.kill()
        summary = json.loads((run.run_dir / "summary.json").read_text(encoding="utf-8"))
        assert summary["complete"] and {"island-0 loss", "island-1 loss"} <= summary["eval_scores"].keys()
        # Only somebody who may read every site can repeat the whole run.
        whole = run.gathered(place)
        audit = call("audit", whole, "--json")
        found = json.loads(audit.stdout)
        assert audit.returncode == 0 and found["violations"] == 0, found
        assert {*NAMES} <= found["corpora"].keys() and all(found["corpora"][name]["merged"] for name in NAMES)
        assert [each["action"] for each in found["operations"]] == ["ban"]
        data = [f"{name}={site.folder / 'text'}" for name, site in zip(NAMES, run.sites[1:], strict=True)]
        replay = repeat("replay", whole, "--json", *(word for each in data for word in ("--data", each)), step_s=0)
        assert replay.returncode == 0 and json.loads(replay.stdout)["identical"], replay.stdout + replay.stderr


@pytest.mark.nightly
@pytest.mark.net
def test_no_run_of_a_text_is_on_any_link(place: Path) -> None:
    """Without encryption, so that the recording could be read: what 16 bytes of a text would show is not there."""
    recording = place / "frames"
    with networks(3) as spaces:
        run = Run(place, spaces, settings(60, tls=False))
        try:
            with recorded(spaces[0], recording):
                run.start_all()
                for site in run.sites:
                    assert site.process is not None and site.process.wait(SLOW_HANGS_S) == 0, site.folder.name
        finally:
            for site in run.sites:
                site.kill()
    assert recording.stat().st_size > 1_000_000 and b"island-1" in recording.read_bytes(), "nothing was recorded"
    for name, text in zip(NAMES, run.texts, strict=True):
        assert not (found := found_in(recording, text)), f"of the text of {name}: {found[:3]}"


def test_a_run_of_a_text_would_be_found(tmp_path: Path) -> None:
    text = bytes(range(40, 120))
    assert words_of(text).shape == (65, 2)
    recording = tmp_path / "frames"
    recording.write_bytes(b"x" * 1001 + text[10:26] + b"y" * 7)
    assert found_in(recording, text) == [text[10:26]]
    recording.write_bytes(b"x" * 1001 + text[10:25] + b"y" * 7)
    assert found_in(recording, text) == []
    assert found_in(recording, b"x" * 64) == [], "monotonous"
