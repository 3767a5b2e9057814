"""The scripts call gcloud with flags that it has: by a table with sources, and, where it is installed, by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tools.launch.gcloud_flags import EVERYWHERE, FLAGS, command_of, flags_of
from tests.tools.launch.helpers import Stage, plan

VARIANTS = ((), ("--cloud.spot", "True", "--cloud.external", "True", "--cloud.source_ranges", "34.1.2.0/24"))


def calls_of_gcloud(folder: Path) -> list[list[str]]:
    """One call for each command and set of flags."""
    found: dict[tuple[str, ...], list[str]] = {}
    for way in ("gke", "gce", "tpu-vm"):
        for number, overrides in enumerate(VARIANTS):
            place = folder / f"{way}-{number}"
            place.mkdir()
            stage = Stage(place, plan(way, *overrides))
            for name, there in (("./create.sh", "nothing"), ("./delete.sh", "all")):
                assert stage.run(name, there=there).returncode == 0
                for words in stage.calls:
                    if words[0] == "gcloud":
                        found[command_of(words), *sorted(flags_of(words))] = words
    return list(found.values())


def test_flags_are_known(tmp_path: Path) -> None:
    used: dict[str, set[str]] = {name: set() for name in FLAGS}
    for words in calls_of_gcloud(tmp_path):
        command = command_of(words)
        assert command, f"{words} is none of the commands in gcloud_flags.py"
        used[command] |= flags_of(words)
        assert "--node-count" not in words, "several nodes of one resource are a multislice job"
    unknown = {name: flags - FLAGS[name] - EVERYWHERE for name, flags in used.items()}
    assert not {name: flags for name, flags in unknown.items() if flags}
    unused = {name: FLAGS[name] - flags for name, flags in used.items()}
    assert not {name: flags for name, flags in unused.items() if flags}, "nothing uses them any more"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_parses_every_call(tmp_path: Path) -> None:
    """Without an account it reads all flags, and then says that there is no account."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("CLOUDSDK_", "GOOGLE_"))},
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        # on a machine in Google Cloud it must not find that machine's account, nor reach anything
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_PROXY_TYPE": "http",
        "CLOUDSDK_PROXY_ADDRESS": "127.0.0.1",
        "CLOUDSDK_PROXY_PORT": "9",
    }
    calls = calls_of_gcloud(tmp_path)
    files = tmp_path / "gce-0" / "out"  # it reads those that are named
    wrong = []
    for words in calls:
        result = subprocess.run(
            words, cwd=files, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        if "do not currently have an active account" not in result.stderr:
            wrong.append(f"{words}: {result.stderr}")
    assert len(calls) > 30 and not wrong, "\n".join(wrong)
