"""A release is refused with all reasons until the repository is ready; a wheel has the files that git tracks."""

import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_jax.protocol.releases import RELEASE
from releasing.__main__ import ROOT, content_problems, git, main, problems

FILES = {
    "pyproject.toml": '[project]\nname = "x"\nversion = "0.2.0"\n',
    "diloco_jax/protocol/releases.py": 'RELEASE = "0.2.0"\n',
    "CITATION.cff": "version: 0.2.0\ndate-released: 2026-11-23\n",
    "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-11-23\n\n- All.\n",
    "configs/one.yaml": "name: one\n",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a small repository that is ready to be released as 0.2.0."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.name", "me")
    git(tmp_path, "config", "user.email", "me@example.org")
    commit(tmp_path)
    git(tmp_path, "tag", "--annotate", "v0.1.9", "--message", "before")
    return tmp_path


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "all")


def change(name: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
        commit(folder)

    return apply


def test_a_ready_repository_is_not_refused(repository: Path) -> None:
    assert list(problems(repository, "0.2.0")) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "new.txt").write_text("new"), "1 uncommitted changes (?? new.txt)"),
        (change("pyproject.toml", "0.2.0", "0.3.0"), "pyproject.toml has version 0.3.0, not 0.2.0"),
        (change("diloco_jax/protocol/releases.py", "0.2.0", "0.3.0"), "releases.py has version 0.3.0, not 0.2.0"),
        (change("CITATION.cff", "0.2.0", "0.1.0"), "CITATION.cff has version 0.1.0, not 0.2.0"),
        (
            change("CITATION.cff", "11-23", "11-22"),
            "CITATION.cff has the date 2026-11-22, the section of CHANGELOG.md 2026-11-23",
        ),
        (change("CHANGELOG.md", " - 2026-11-23", ""), "no section '## [0.2.0] - YYYY-MM-DD'"),
        (lambda folder: git(folder, "tag", "v0.2.0"), "0.2.0 is not newer than the last tag, v0.2.0"),
        (lambda folder: git(folder, "tag", "v0.10.0"), "0.2.0 is not newer than the last tag, v0.10.0"),
    ],
)
def test_each_missing_preparation_is_named(
    repository: Path, spoil: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(repository)
    (found,) = problems(repository, "0.2.0")
    assert message in found
    assert main(["0.2.0", "--tag"], repository) == 2 and message in capsys.readouterr().err


def test_another_version_than_the_packages_is_refused_in_every_place(repository: Path) -> None:
    assert len(list(problems(repository, "0.3.0"))) == 4
    assert list(problems(repository, "next")) == ["'next' is not a version; write one such as 0.2.0"]


def test_a_wheel_has_what_git_has(repository: Path) -> None:
    wheel = repository / "x.whl"

    def holding(*names: str) -> list[str]:
        with zipfile.ZipFile(wheel, "w") as file:
            for name in ("x.dist-info/METADATA", *names):
                file.writestr(name, "")
        return list(content_problems(repository, wheel))

    both = ("diloco_jax/protocol/releases.py", "diloco_jax/configs/one.yaml")
    assert holding(*both) == []
    assert holding(both[0]) == ["x.whl lacks diloco_jax/configs/one.yaml (1 files)"]
    assert holding(*both, "tests/test_x.py") == ["x.whl should not have tests/test_x.py (1 files)"]


def test_an_sdist_with_untracked_files_is_found(repository: Path, tmp_path: Path) -> None:
    def holding(*names: str) -> list[str]:
        with tarfile.open(sdist := tmp_path / "x.tar.gz", "w:gz") as file:
            for name in ("PKG-INFO", *names):
                file.addfile(tarfile.TarInfo(f"x-0.2.0/{name}"))
        return list(content_problems(repository, sdist))

    both = ("diloco_jax/protocol/releases.py", "configs/one.yaml")
    assert holding(*both, "CHANGELOG.md") == []
    assert holding(both[0]) == ["x.tar.gz lacks configs/one.yaml (1 files)"]
    assert holding(*both, "env/lib/a.so") == ["x.tar.gz should not have env/lib/a.so (1 files)"]


def test_this_repository_has_one_version_everywhere() -> None:
    found = [each for each in problems(ROOT, RELEASE) if "has version" in each or "CITATION" in each]
    assert not found
