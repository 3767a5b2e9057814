"""A folder that always has the newest global model of a run, for programs that open it while it is renewed.

    OUT/step-00000120/    one model in the chosen format, with model_version.json
    OUT/newest            link to the newest one

A folder appears under its name when it is complete, and the link is replaced in one step. So a program that opens
OUT/newest always finds a whole model. A program that reads several files should resolve the link once, because the next
model replaces it; the folders of the models before stay for `keep` models.
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Self

from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.records.folder_lock import FolderLock
from diloco_jax.runtime.subscriber.subscription import FollowedModel, FollowedRun, other_run, utc
from diloco_jax.tools.export.files import ModelWriter, Watch

NEWEST, VERSION_FILE = "newest", "model_version.json"
# The time of the run's start in VERSION_FILE.
BEGAN = "began_unix_s"
PREFIX, _PARTIAL, _NEXT_LINK, _LOCK = "step-", ".partial", ".newest", ".lock"


class KeptModels:
    """The newest models of a run in one folder, which only this process writes.

    Args:
        run: the run whose models these are; a folder never holds models of two runs.
        writer: writes the models.
        form: name of their format, for their description.
        keep: number of models that stay, the newest one included.

    Raises:
        ValueError: `out` holds other files or models of another run, another process writes it, or `keep` is below 1.
    """

    def __init__(self, out: Path, run: FollowedRun, writer: ModelWriter, form: str, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"--keep is {keep}; use at least 1")
        if out.exists() and not out.is_dir():
            raise ValueError(f"{out} is a file; choose another --out")
        if foreign := sorted(path.name for path in out.iterdir() if not _is_ours(path)) if out.exists() else []:
            raise ValueError(f"{out} holds other files, such as {foreign[0]}; choose another --out, or a new folder")
        _check_same_run(out, run)
        self._out, self._run, self._writer, self._form, self._keep = out, run, writer, form, keep
        out.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(out, _LOCK, "--out")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A model that could not be written takes space on a full disk.
        shutil.rmtree(self._out / _PARTIAL, ignore_errors=True)
        self._lock.close()

    def put(self, model: FollowedModel, watch: Watch) -> Path:
        """Write a model, make it the newest one, and remove the oldest; return its folder."""
        part = self._out / _PARTIAL
        shutil.rmtree(part, ignore_errors=True)
        whole, parameters = part / "whole", dict(sorted(model.parameters.items()))
        whole.mkdir(parents=True)
        snapshot = part / "snapshot"
        if self._form == "orbax":
            snapshot = checkpoint.save_parameters(snapshot, parameters, {"global_step": model.global_step})
        self._writer.write(whole, iter(parameters.items()), len(parameters), watch, snapshot)
        about = describe(model) | {BEGAN: self._run.began_unix_s, "format": self._form, "written_unix_s": time.time()}
        (whole / VERSION_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        target = self._free_name(model.global_step)
        os.replace(whole, target)
        shutil.rmtree(part, ignore_errors=True)
        link = self._out / _NEXT_LINK
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        os.replace(link, self._out / NEWEST)
        self._prune(target)
        return target

    def _free_name(self, global_step: int) -> Path:
        """Return a new folder's name; a run that went back to a snapshot reaches a global step again."""
        first = self._out / f"{PREFIX}{global_step:08d}"
        later = (first.with_name(f"{first.name}-{number}") for number in range(2, 1 << 30))
        return first if not first.exists() else next(path for path in later if not path.exists())

    def _prune(self, newest: Path) -> None:
        others = [path for path in self._out.glob(f"{PREFIX}*") if path != newest and _is_ours(path)]
        others.sort(key=lambda path: path.stat().st_mtime)
        for path in others[: max(0, len(others) - self._keep + 1)]:
            # A process that is killed here leaves no half of a model under a model's name.
            path.rename(self._out / f"{_PARTIAL}-{path.name}")
        # On NFS a file that a reader has open is removed later.
        for path in self._out.glob(f"{_PARTIAL}-*"):
            shutil.rmtree(path, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    """Return whether this module made a file of the folder; others must neither be replaced nor removed."""
    if path.name == NEWEST:
        return path.is_symlink()
    if path.name.startswith(PREFIX):
        return (path / VERSION_FILE).is_file()
    return path.name in (_NEXT_LINK, _LOCK) or path.name.startswith(_PARTIAL)


def _check_same_run(out: Path, run: FollowedRun) -> None:
    """Check that all models of a folder are of this run, since they would be removed in its favour.

    Raises:
        ValueError: a model is of another run, or its description cannot be read.
    """
    for path in sorted(out.glob(f"{PREFIX}*/{VERSION_FILE}")):
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            name, began_unix_s = str(about["run"]), float(about.get(BEGAN, 0.0))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read ({error!r}); choose another --out, or remove {out}") from None
        if name != run.name or other_run(began_unix_s, run.began_unix_s):
            raise ValueError(
                f"{out} holds models of run {name!r} that started on {utc(began_unix_s)}, and this is run "
                f"{run.name!r} that started on {utc(run.began_unix_s)}; choose another --out, or remove that folder"
            )


def describe(model: FollowedModel) -> dict[str, Any]:
    """Return what identifies a followed model, as in its model_version.json."""
    told = {"run": model.run, "global_step": model.global_step, "epoch": model.epoch, "exact": model.exact}
    return told | {"versions": list(model.versions)}
