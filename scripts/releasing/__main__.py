"""A release of this repository: ./scripts/release VERSION [--tag]. Nothing is uploaded.

It refuses a repository that is not ready. Otherwise it builds the sdist and the wheel, checks both, installs the wheel
into an empty environment and trains there. With --tag it makes the annotated tag; without, it only names the tag.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from environments import python_with
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("build>=1.3", "twine>=6.2")
# Folders in the wheel, by folder of the repository.
PLACES = {"diloco_jax": "diloco_jax", "configs": "diloco_jax/configs"}
RELEASES = "diloco_jax/protocol/releases.py"
PINS = "constraints-py311.txt"
ONE_SMALL_ISLAND = "--islands.count=1 --train.batch_size=4 --train.steps=2 --train.final_eval_batches=1"
TINY = f"train quickstart --json {ONE_SMALL_ISLAND} --model.args.num_layers=1 --optimizer.warmup_steps=0"


def git(root: Path, *words: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def problems(root: Path, version: str) -> Iterator[str]:
    """Yield the reasons why a repository cannot be released as this version."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        yield f"{version!r} is not a version; write one such as 0.2.0"
        return
    if lines := git(root, "status", "--porcelain").splitlines():
        yield f"the tree has {len(lines)} uncommitted changes ({lines[0].strip()}); commit or remove them"
    package = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    source = re.search(r'(?m)^RELEASE = "(.+)"$', (root / RELEASES).read_text(encoding="utf-8"))
    cited = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    versions = {"pyproject.toml": package, RELEASES: source and source[1], "CITATION.cff": cited["version"]}
    for place, found in versions.items():
        if found != version:
            yield f"{place} has version {found}, not {version}; change it there, or release {found}"
    tags = [Version(tag[1:]) for tag in git(root, "tag", "--list", "v[0-9]*").splitlines()]
    if tags and wanted <= max(tags):
        yield f"{version} is not newer than the last tag, v{max(tags)}; raise the version"
    heading = rf"(?m)^## \[{re.escape(version)}\] - (\d{{4}}-\d{{2}}-\d{{2}})$"
    dated = re.search(heading, (root / "CHANGELOG.md").read_text(encoding="utf-8"))
    if dated is None:
        yield f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'; rename the section Unreleased"
    elif (cited_on := str(cited.get("date-released"))) != dated[1]:
        yield f"CITATION.cff has the date {cited_on}, the section of CHANGELOG.md {dated[1]}; make them equal"


def content_problems(root: Path, built: Path) -> Iterator[str]:
    """Compare a wheel (package and configs) or an sdist (nearly all files) with the files that git tracks."""
    known = set(git(root, "ls-files").splitlines())
    parts = [(folder, rest) for folder, _, rest in (name.partition("/") for name in known)]
    wanted = {f"{PLACES[folder]}/{rest}" for folder, rest in parts if folder in PLACES}
    if built.suffix == ".whl":
        known = wanted
        names = {name for name in zipfile.ZipFile(built).namelist() if ".dist-info/" not in name}
    else:
        wanted = {f"{folder}/{rest}" for folder, rest in parts if folder in PLACES}
        with tarfile.open(built) as files:
            names = {file.name.partition("/")[2] for file in files if file.isfile()} - {"PKG-INFO"}
    for what, found in (("lacks", wanted - names), ("should not have", names - known)):
        if found:
            yield f"{built.name} {what} {', '.join(sorted(found)[:5])} ({len(found)} files)"


def build(root: Path, out: Path) -> Path:
    """Build sdist and wheel into an empty folder, check them, and return the wheel.

    Raises:
        ValueError: their files are not those of the repository.
    """
    python = python_with("release", TOOLS)
    subprocess.run([python, "-m", "build", "--outdir", out, root], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([python, "-m", "twine", "check", "--strict", *out.iterdir()], check=True)
    if found := [each for built in out.iterdir() for each in content_problems(root, built)]:
        raise ValueError("; ".join(found))
    return next(out.glob("*.whl"))


def try_out(root: Path, wheel: Path, version: str, home: Path) -> dict[str, object]:
    """Install a wheel into an empty environment, run a tiny training there, and return the run's summary."""
    venv.create(home / "env", with_pip=True)
    python, diloco = home / "env/bin/python", home / "env/bin/diloco"
    pins = ["--constraint", root / PINS] if sys.version_info[:2] == (3, 11) else []
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel, *pins], check=True)
    around = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}

    def call(*words: str) -> str:
        return subprocess.run(
            [diloco, *words], cwd=home, env=around, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    if not (found := call("--version")).startswith(f"diloco-jax {version}, "):
        raise ValueError(f"the installed wheel has version {found.strip()}, not {version}")
    call("--help")
    summary: dict[str, object] = json.loads(call(*TINY.split()).splitlines()[-1])
    return summary


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rehearse or make a release, and return the exit status: 2 if it is refused."""
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__.splitlines()[0])
    parser.add_argument("version", help="version, such as 0.2.0")
    parser.add_argument("--tag", action="store_true", help="make the tag; without it this is a rehearsal")
    options = parser.parse_args(arguments)
    if found := list(problems(root, options.version)):
        print("\n".join(f"release: {each}" for each in found), file=sys.stderr)
        return 2
    tag, commit, dist = f"v{options.version}", git(root, "rev-parse", "--short", "HEAD"), root / "dist"
    with tempfile.TemporaryDirectory(prefix="diloco-release-") as folder:
        (out := Path(folder, "dist")).mkdir()
        wheel = build(root, out)
        summary = try_out(root, wheel, options.version, Path(folder))
        if not summary["complete"]:
            raise ValueError(f"the run from the wheel did not complete: {summary}")
        dist.mkdir(exist_ok=True)
        for file in out.iterdir():
            (dist / file.name).write_bytes(file.read_bytes())
            print(f"{dist / file.name}: {file.stat().st_size:,} bytes, checked")
    print(f"the wheel trained from an empty environment: evaluation loss {summary['eval_loss']:.3f}")
    if options.tag:
        git(root, "tag", "--annotate", tag, "--message", f"diloco-jax {options.version}")
        print(f"made tag {tag} at {commit}; `git push origin {tag}` publishes it")
    else:
        print(f"a rehearsal: --tag would make the annotated tag {tag} at {commit}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"release: {error}")
