"""Trackers and callbacks get all, each in its own thread; what fails or hangs there costs the run nothing."""

import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.runtime.trackers import outlets
from diloco_jax.runtime.trackers.built_in import OpenTelemetryTracker
from diloco_jax.runtime.trackers.outlets import Aside, Outlets, close_all, find_callbacks, find_trackers
from diloco_jax.settings.run import RunConfig
from tests.limits import HANGS_S

calls: list[tuple[Any, ...]] = []
RECORDS: list[dict[str, Any]] = [
    {"kind": "metrics", "global_step": 3, "learner": "a", "values": {"loss": 2.5, "odd": float("nan"), "none": None}},
    {"kind": "metrics", "global_step": 4, "learner": "b", "values": {"loss": 1.5}},
    {"kind": "merged_metrics", "global_step": 4, "values": {"loss": 2.0}},
    {"kind": "drift", "global_step": 4, "learner": "b", "values": {"drift_norm_ratio": 1.5, "drift_cosine": None}},
    {"kind": "step", "global_step": 4, "learner": "b", "loss": 1.5},
    {"kind": "merged", "global_step": 5, "fragment_id": 2, "members": ["a", "b"], "reason": ""},
    {"kind": "wire", "global_step": 5, "up_bytes": 10, "down_bytes": 20},
    {"kind": "eval", "global_step": 5, "tokens": 350, "loss": 2.25, "bits_per_byte": None},
    {"kind": "left", "global_step": 5, "fragment_id": -1, "members": ["b"], "reason": "bye"},
]


def telling(method: str) -> Any:
    return lambda self, *arguments: calls.append((method, *arguments))


class Tells:
    """Tracker and callback in one."""

    log, close, on_round, on_eval, on_event = map(telling, ("log", "close", "on_round", "on_eval", "on_event"))

    def begin(self, run: str, config: dict[str, Any], folder: Path) -> None:
        calls.append(("begin", run, config["seed"]))


class Raises(Tells):
    def log(self, *arguments: Any) -> None:
        raise RuntimeError("no disk")


class Broken:
    def __init__(self) -> None:
        raise OSError("no key")

    def on_round(self) -> None: ...


def told(folder: Path, records: list[dict[str, Any]] = RECORDS, **settings: Any) -> None:
    out = Outlets(RunConfig(seed=7, **settings), folder)
    for record in records:
        out.write(record)
    out.close()


class InMemory(OpenTelemetryTracker):
    """OpenTelemetry without a network."""

    kept: Any

    def exporter(self) -> Any:
        return self.kept


@pytest.mark.extra("opentelemetry")
def test_opentelemetry_gets_a_span_per_round_and_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    monkeypatch.setattr(InMemory, "kept", InMemorySpanExporter(), raising=False)
    record = {"kind": "round", "t": 7.5, "global_step": 4, "fragment_id": 2, "opened_s": 1.0, "met_s": 2.0}
    record |= {"closed_s": 2.5, "pulled_s": 6.0, "values": {"a": 3.0}}
    told(tmp_path, [record], trackers=[f"{__name__}:InMemory"])
    spans = InMemory.kept.get_finished_spans()
    (whole,) = (span for span in spans if span.name == "round")
    began_s = whole.start_time / 1e9 - 1.0
    assert abs(began_s + 7.5 - time.time()) < 60.0
    times = {s.name: (round(s.start_time / 1e9 - began_s, 3), round(s.end_time / 1e9 - began_s, 3)) for s in spans}
    parts = {"quorum": (1.0, 2.0), "grace": (2.0, 2.5), "pull": (2.5, 6.0), "merge": (6.0, 7.5), "value": (2.5, 5.5)}
    assert times == {"round": (1.0, 7.5), **parts}
    assert dict(whole.attributes) == {"diloco.global_step": 4, "diloco.fragment": 2}
    assert {span.parent.span_id for span in spans if span is not whole} == {whole.context.span_id}


def test_what_a_tracker_and_a_callback_get(tmp_path: Path) -> None:
    calls.clear()
    told(tmp_path, trackers=(f"{__name__}:Tells",))
    assert calls == [
        ("begin", "run", 7),
        ("log", 3, {"loss": 2.5}, "islands/a"),
        ("log", 4, {"loss": 1.5}, "islands/b"),
        ("log", 4, {"loss": 2.0}, "merged"),
        ("log", 4, {"drift_norm_ratio": 1.5}, "islands/b"),
        ("log", 5, {"contributors": 2}, "merged"),
        ("log", 5, {"up_bytes": 10, "down_bytes": 20}, "merged"),
        ("log", 5, {"eval_loss": 2.25, "tokens": 350}, "merged"),
        ("close",),
    ]
    calls.clear()
    told(tmp_path, trackers=(), callbacks=(f"{__name__}:Tells",))
    evaluated = {"eval_loss": 2.25, "eval_bits_per_byte": None, "tokens": 350}
    event = ("on_event", "left", "b left: bye")
    assert calls == [("on_round", 5, 2, ("a", "b")), ("on_eval", 5, evaluated), event]


def test_an_error_is_reported_once_and_others_continue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls.clear()
    told(tmp_path, trackers=(f"{__name__}:Raises", f"{__name__}:Tells"), callbacks=(f"{__name__}:Broken",))
    raised, broken = sorted((r.getMessage() for r in caplog.records), key=lambda text: "Broken" in text)
    assert raised.endswith("Raises failed in log and is not called any more; the run continues: RuntimeError: no disk")
    assert "Broken failed in its constructor" in broken and "OSError: no key" in broken
    assert len([call for call in calls if call[0] == "log"]) == 7 and calls.count(("close",)) == 1


def test_nobody_waits_for_what_hangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(outlets, "WAITING_MAX", 3)
    began, may_end = threading.Event(), threading.Event()

    class Hangs:
        def log(self, number: int) -> None:
            began.set()
            may_end.wait(HANGS_S)

    slow = Aside("slow", Hangs)
    slow.call("log", 0)
    assert began.wait(HANGS_S)
    for number in range(5):
        slow.call("log", number)
    close_all([slow], 0.2)
    assert [record.getMessage() for record in caplog.records] == [
        "slow is too slow: 3 calls wait, later ones are lost",
        "slow did not get every call: 2 were lost, 3 still waited",
    ]
    may_end.set()


@pytest.mark.parametrize(
    ("find", "name", "says"),
    [
        (
            find_trackers,
            "absent",
            r"which is not installed; in a clone run pip install -e '\.\[absent\]', elsewhere pip",
        ),
        (find_trackers, f"{__name__}:Broken", "lacks begin and log and close"),
        (find_trackers, f"{__name__}:RECORDS", "is not a class"),
        (find_callbacks, f"{__name__}:Missing", r"fails: AttributeError: .*; correct it$"),
        (find_callbacks, "pathlib:Path", "has none of on_step, on_round, on_eval, on_event"),
    ],
)
def test_a_name_that_will_not_do_is_one_error(find: Any, name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(outlets.BUILT_IN, "absent", (Tells, "no_such_package"))
    with pytest.raises(ValueError, match=says):
        find([name])


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """(step, tag, value) of every scalar in a folder's event files, read by the published record format."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            at += 12 + length + 4
    return found


def content(path: Path) -> bytes:
    """The bytes of a file, of wandb's without the headers of blocks, which may cut a name in two."""
    raw, block = path.read_bytes(), 32768
    return b"".join(raw[at + 7 : at + block] for at in range(0, len(raw), block)) if path.suffix == ".wandb" else raw


def text_of(found: Sequence[Path]) -> str:
    """The names and contents of all files that these paths are or hold."""
    files = [path for each in found for path in (each, *each.rglob("*")) if path.is_file()]
    return "".join(f"{path.as_posix()}\n{content(path)!r}" for path in files)


# what there must be one of for one run; its folder or file has everything
RUNS = {"tensorboard": "tensorboard", "mlflow": "mlflow/store/[1-9]*/*/metrics", "trackio": "trackio/diloco.db"}
RUNS["wandb"] = "wandb/offline-run-*/*.wandb"


@pytest.mark.parametrize(
    "name", [name if name == "tensorboard" else pytest.param(name, marks=pytest.mark.extra(name)) for name in RUNS]
)
@pytest.mark.filterwarnings("ignore")
def test_one_run_with_groups_even_after_a_restart(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    # A tracker may start a service, which takes long on a busy machine.
    monkeypatch.setattr(outlets, "CLOSE_S", 90.0)
    half = len(RECORDS) // 4
    for records in (RECORDS[:half], RECORDS[half:]):
        told(tmp_path, records, trackers=(name,))
    found = list(tmp_path.glob(RUNS[name]))
    assert len({path.name for path in found}) == 1 and (name == "wandb" or len(found) == 1)
    # The service of wandb writes what it has been given after its caller has ended, on a busy machine seconds later.
    ends_s = time.monotonic() + 90.0
    while not all(word in text_of(found) for word in ("islands/a/", "islands/b/", "merged/", "eval_loss")):
        assert time.monotonic() < ends_s, text_of(found)
        time.sleep(0.5)
    if name == "tensorboard":
        assert scalars(tmp_path / "tensorboard" / "islands" / "a") == [(3, "loss", 2.5)]
