"""Upgrades: the commit that they need, and runs that mix releases of one protocol or of two."""

import re
import subprocess
from pathlib import Path

import pytest

from releasing import upgrade

TREE_OF = upgrade.tree_of


def test_a_missing_tag_and_a_missing_commit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    with pytest.raises(ValueError, match=r"no release has a tag yet; name the commit .*scripts/upgrade OLD_REF"):
        upgrade.last_tag(tmp_path)
    with pytest.raises(SystemExit) as ended:
        upgrade.main(["no-such-commit"])
    assert ended.value.code == 2 and "'no-such-commit' names no commit" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.parametrize("raised", [False, True])
def test_a_run_is_upgraded_while_it_trains(
    raised: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def newer(ref: str, folder: Path) -> Path:
        tree = TREE_OF("HEAD", folder)
        if raised and folder.name == "new":
            source = tree / "diloco_jax/protocol/releases.py"
            source.write_text(source.read_text().replace("PROTOCOL, OLDEST = 2, 1", "PROTOCOL, OLDEST = 3, 1"))
        return tree

    monkeypatch.setattr(upgrade, "tree_of", newer)
    assert upgrade.main(["HEAD"]) == 0
    said = capsys.readouterr().out
    came_back = re.findall(r"(\S+) came back", said)
    islands = list(upgrade.ISLANDS)
    assert came_back == (["syncer", *islands] if raised else [*islands, "syncer"]), said
    refused = "REFUSED island-0 .*upgrade the syncer first, then the islands"
    assert bool(re.search(refused, said)) == raised, said
