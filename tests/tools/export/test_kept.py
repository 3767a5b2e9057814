"""The folder of a followed model: always a whole newest model, and the same files over HTTP."""

import http.client
import json
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from diloco_jax.cli.main import main
from diloco_jax.core.kinds import kind_of
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.runtime.subscriber.subscription import FollowedModel, FollowedRun
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.export import serving
from diloco_jax.tools.export.files import ModelWriter
from diloco_jax.tools.export.kept import NEWEST, VERSION_FILE, KeptModels
from diloco_jax.tools.export.serving import ModelServer
from tests.limits import HANGS_S
from tests.tools.export.folders import drawn, make_run, model_of

pytestmark = pytest.mark.net
Parameters = Iterable[tuple[str, np.ndarray]]


def model(global_step: int) -> FollowedModel:
    parameters = {"b/c": np.full((2, 3), global_step, np.float32), "a": np.arange(4, dtype=np.float32)}
    return FollowedModel("small", global_step, 1, (global_step, 0), True, parameters)


def all_of(parameters: Parameters, count: int) -> Parameters:
    assert count == 2
    return parameters


def run_of(name: str = "small", began_unix_s: float = 1e9) -> FollowedRun:
    shapes: dict[str, tuple[int, ...]] = {"b/c": (2, 3), "a": (4,)}
    config = RunConfig(name=name, protocol=ProtocolConfig(num_fragments=1))
    return FollowedRun(resolve(config, shapes, {path: kind_of(shape) for path, shape in shapes.items()}), began_unix_s)


def kept(out: Path, form: str = "npz", keep: int = 2, run: FollowedRun | None = None) -> KeptModels:
    return KeptModels(out, run or run_of(), ModelWriter(RunConfig(), form, "float32"), form, keep)


def value(folder: Path) -> float:
    with np.load(folder / "parameters.npz") as found:
        assert sorted(found) == ["a", "b/c"]
        return float(found["b/c"][0, 0])


def test_the_newest_model_is_whole_and_older_ones_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with kept(out) as models:
        for step in (1, 2, 3):
            folder = models.put(model(step), all_of)
            assert (out / NEWEST).resolve() == folder and folder.name == f"step-{step:08d}" and value(folder) == step
        with pytest.raises(ValueError, match=f"writes {out}: stop it first, or choose another --out"):
            kept(out)
    assert sorted(path.name for path in out.iterdir()) == [".lock", NEWEST, "step-00000002", "step-00000003"]
    about = json.loads((out / NEWEST / VERSION_FILE).read_text())
    assert about.pop("written_unix_s") > 0
    assert about == {
        "run": "small", "global_step": 3, "epoch": 1, "exact": True, "versions": [3, 0], "format": "npz",
        "began_unix_s": 1e9,
    }  # fmt: skip


def test_a_failure_leaves_the_model_before(tmp_path: Path) -> None:
    def fails(parameters: Parameters, count: int) -> Iterator[tuple[str, np.ndarray]]:
        yield from all_of(parameters, count)
        raise OSError("the disk is full")

    with kept(tmp_path / "model") as models:
        models.put(model(1), all_of)
        with pytest.raises(OSError, match="the disk is full"):
            models.put(model(2), fails)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [".lock", NEWEST, "step-00000001"]
    assert value(tmp_path / "model" / NEWEST) == 1
    # The next process starts from the same folder.
    with kept(tmp_path / "model") as models:
        models.put(model(3), all_of)
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert names == [".lock", NEWEST, "step-00000001", "step-00000003"]


def test_a_step_that_comes_again_has_another_folder(tmp_path: Path) -> None:
    with kept(tmp_path / "model", keep=1) as models:
        models.put(model(7), all_of)
        before = (tmp_path / "model" / NEWEST).resolve()
        again = models.put(model(7), all_of)
    assert again.name == "step-00000007-2" and not before.exists()
    assert (tmp_path / "model" / NEWEST).resolve() == again


def test_orbax_opens_the_folder(tmp_path: Path) -> None:
    from orbax.checkpoint import v1 as ocp

    with kept(tmp_path / "model", "orbax") as models:
        models.put(model(5), all_of)
    found = ocp.load((tmp_path / "model" / NEWEST).resolve())
    assert {path: np.asarray(array).tobytes() for path, array in found.items()} == {
        path: array.tobytes() for path, array in model(5).parameters.items()
    }


@pytest.mark.extra("parity")
def test_transformers_opens_the_folder_and_finds_what_export_writes(tmp_path: Path) -> None:
    import transformers

    config = RunConfig(model=model_of())
    values = drawn(config.model)
    assert main(["export", str(make_run(tmp_path / "run", config.model, values)), "--out", str(tmp_path / "out")]) == 0
    out = tmp_path / "model"
    with KeptModels(out, run_of(), ModelWriter(config, "hf", "float32"), "hf", 2) as models:
        models.put(FollowedModel("small", 1, 1, (1,), True, values), lambda parameters, _: parameters)
    theirs = tmp_path / "out" / "model.safetensors"
    assert (out / NEWEST / theirs.name).read_bytes() == theirs.read_bytes()
    ours = transformers.AutoModelForCausalLM.from_pretrained(out / NEWEST).state_dict()
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert {name: value.tolist() for name, value in ours.items()} == {k: v.tolist() for k, v in expected.items()}


def test_models_of_another_run_stay(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with kept(out) as models:
        first = models.put(model(9), all_of)
    ours, remedy = rf"{out} holds models of run 'small' that started on 2001-09-09 01:46:40 UTC", "choose another --out"
    # The first has the same name and the same config, and was started later in another folder.
    for other, theirs in (
        (run_of(began_unix_s=1e9 + 100), "run 'small' that started on 2001-09-09 01:48:20 UTC"),
        (run_of("large"), "run 'large'"),
    ):
        with pytest.raises(ValueError, match=f"{ours}, and this is {theirs}.*; {remedy}"):
            kept(out, keep=1, run=other)
    assert (out / NEWEST).resolve() == first and value(first) == 9
    # A syncer that was restarted names the same start, and one of an older release none.
    for same in (run_of(), run_of(began_unix_s=0.0)):
        with kept(out, run=same):
            pass
    (first / VERSION_FILE).write_text("[]")
    with pytest.raises(ValueError, match=r"model_version\.json cannot be read"):
        kept(out)
    assert value(first) == 9


def test_other_peoples_files_stay(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"holds other files, such as thesis\.tex; choose another --out"):
        kept(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        kept(tmp_path / "thesis.tex")
    with pytest.raises(ValueError, match="--keep is 0; use at least 1"):
        kept(tmp_path / "model", keep=0)


@pytest.mark.parametrize("name", ["step-00000100", "step-by-step", NEWEST])
def test_a_folder_of_another_program_with_the_name_of_ours_stays(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / "checkpoints" / name / "weights"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    with pytest.raises(ValueError, match=f"holds other files, such as {name}; choose another --out"):
        kept(theirs.parents[1])
    theirs.parent.rename(tmp_path / "aside")
    with kept(theirs.parents[1], keep=1) as models:
        # It appears while the models are renewed.
        (tmp_path / "aside").rename(theirs.parents[1] / "step-mine")
        for step in (1, 2):
            models.put(model(step), all_of)
    assert (theirs.parents[1] / "step-mine" / "weights").exists()


def test_a_kill_while_a_model_is_removed_leaves_a_folder_that_can_be_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """The process ends at this place."""

    def remove_some(path: Path, ignore_errors: bool = False) -> None:
        if (path / VERSION_FILE).exists():
            (path / VERSION_FILE).unlink()
            raise Killed

    with kept(tmp_path / "model", keep=1) as models:
        models.put(model(1), all_of)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(shutil, "rmtree", remove_some)
            models.put(model(2), all_of)
    with kept(tmp_path / "model", keep=1) as models:
        models.put(model(3), all_of)
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert names == [".lock", NEWEST, "step-00000003"]


def test_the_server_has_the_files_of_the_models_and_no_others(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with kept(out) as models:
        models.put(model(4), all_of)
    (tmp_path / "secret").write_text("x")
    (out / "other").write_text("x")
    with ModelServer(out, "127.0.0.1:0", allow_plaintext=False) as server:
        with urllib.request.urlopen(server.url) as answer:
            told = json.loads(answer.read())
        assert (told["global_step"], told["folder"]) == (4, "step-00000004")
        assert sorted(told["files"]) == [VERSION_FILE, "parameters.npz"]
        for name, size in told["files"].items():
            with urllib.request.urlopen(f"{server.url}{told['folder']}/{name}") as answer:
                content = answer.read()
            assert content == (out / NEWEST / name).read_bytes() and len(content) == size
        for path in (
            "../secret",
            "other",
            "step-00000004/../../secret",
            "step-9/x",
            "step-00000004",
            "%2e%2e/secret",
            ".",
            "%00",
            "/[",
        ):
            # http.client sends the path as it is.
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=HANGS_S)
            connection.request("GET", f"/{path}")
            assert connection.getresponse().status == 404, path
            connection.close()
        # The model disappears.
        shutil.rmtree(out / "step-00000004")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url)


def test_the_server_takes_few_connections_and_no_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--serve 0\.0\.0\.0:0 is not loopback, and anyone who reaches it can read"):
        ModelServer(tmp_path, "0.0.0.0:0", allow_plaintext=False)
    monkeypatch.setattr(serving, "CALLERS_MAX", 1)
    with kept(tmp_path / "model") as models:
        models.put(model(4), all_of)
    with (
        ModelServer(tmp_path / "model", "127.0.0.1:0", allow_plaintext=False) as server,
        socket.create_connection(("127.0.0.1", server.server_port), 20) as first,
    ):
        first.sendall(b"GET / HTTP/1.0\r\n")
        with socket.create_connection(("127.0.0.1", server.server_port), 20) as second:
            assert second.recv(1) == b"", "one place, and it is taken"
        first.sendall(b"\r\n")
        assert first.recv(1 << 16).startswith(b"HTTP/1.0 200")


def test_a_request_under_a_foreign_name_is_refused(tmp_path: Path) -> None:
    """A page of another site may point its own name at this address, and let a browser read the model."""
    with kept(tmp_path / "model") as models:
        models.put(model(4), all_of)
    with ModelServer(tmp_path / "model", "127.0.0.1:0", allow_plaintext=False) as server:
        port = server.server_port
        ours = [f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST", f"[::1]:{port}", ""]
        foreign = [f"evil.example:{port}", "127.0.0.1.evil.example", "["]
        for host, status in [*((each, 200) for each in ours), *((each, 421) for each in foreign)]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANGS_S)
            connection.request("GET", "/", headers={"Host": host})
            assert connection.getresponse().status == status, host
            connection.close()
