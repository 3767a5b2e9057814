"""Replay: what it reads from tapes, its requests when they are broken, and that it repeats an incarnation exactly.

That a real run is repeated bit for bit is in test_replay_run.py.
"""

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from diloco_jax.core.fragments import take
from diloco_jax.protocol.corpora import THE_RUNS
from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.protocol.releases import OtherRelease
from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.runtime.records.checkpoint import complete, load_parameters
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import AdoptConfig, RunConfig
from diloco_jax.settings.text import parse
from diloco_jax.tools.replay.learner_tapes import NeededIncarnations, TapedStep, TookState, outline, read_entries
from diloco_jax.tools.replay.replay import Replay, digest_of, replay_run, replay_synthetic
from diloco_jax.tools.replay.replica import Replica, Trainer, Values
from diloco_jax.tools.replay.script import (
    Back,
    Brought,
    LearnerIncarnation,
    MergedRound,
    Name,
    Script,
    SnapshotPoint,
    fingerprint_of,
    read_script,
)
from diloco_jax.training.parts import Part, PartSteps
from tests.runtime.helpers import SMALL, merged
from tests.runtime.taped_pair import TapedPair

# Whether a repetition is the same does not depend on what LLVM optimizes.
pytestmark = pytest.mark.usefixtures("quick_compiler")

STEPS = 100
SAMPLES = 4


def config_of(pair: TapedPair, **changes: Any) -> RunConfig:
    """A run with the protocol of a story."""
    settings = {
        "islands": {"count": 2, "devices": 1, "batch_size": SAMPLES},
        "train": {"steps": STEPS, "eval_every": 0},
        "protocol": asdict(pair.config),
        # Half of the code to compile.
        "model": {"args": {**SMALL["model"]["args"], "scan_layers": True}},
    }
    return parse(merged(merged(SMALL, settings), changes), "the test")


def trained(folder: Path, steps: int, *names: str, **settings: Any) -> TapedPair:
    """Make a quiet run of these learners and its tapes."""
    pair = TapedPair(folder, **settings)
    pair.join(*names)
    pair.steps(steps, *names)
    pair.finish()
    return pair


def rounds_of(script: Script) -> list[MergedRound]:
    return [event for event in script.events if isinstance(event, MergedRound)]


def script_of(pair: TapedPair, until: int | None = None) -> Script:
    tape = pair.finish() / "tape.jsonl"
    return read_script(tape, pair.config, STEPS, until)


def eventful(folder: Path, **settings: Any) -> TapedPair:
    """Run a pair whose learners join, crash and recover; the syncer crashes, then all do, and the run resumes."""
    pair = TapedPair(folder, step_samples=SAMPLES, recover_from_peers=True, snapshot_every=4, **settings)
    pair.join("a", "b")
    pair.steps(6, "a", "b")
    pair.join("c")
    pair.steps(3, "a", "b")
    pair.steps(3, "a", "b", "c")
    pair.crash("b")
    pair.steps(2, "a", "c")
    pair.join("b", incarnation=2)
    pair.steps(4, "a", "b", "c")
    pair.restart_syncer()
    pair.connect("a", "b", "c")
    pair.steps(3, "a", "b", "c")
    pair.rewind()
    pair.join("a", "b", incarnation=3)
    pair.steps(4, "a", "b")
    return pair


def test_script_tells_what_happened(tmp_path: Path) -> None:
    pair = eventful(tmp_path)
    script = script_of(pair)
    rounds = rounds_of(script)
    orders = {(order.global_step, order.fragment_id) for order in pair.merges()}
    assert {(this.order.global_step, this.order.fragment_id) for this in rounds} == orders
    assert len(rounds) == sum('["merged"' in line for line in pair.tape)
    assert all(len(this.incarnations) == len(this.order.contributions) for this in rounds)
    incarnations = [("b", 1), ("b", 2), ("b", 3), ("c", 1)]
    assert {each for this in rounds for each in this.incarnations} >= {LearnerIncarnation(*i) for i in incarnations}
    restart = next(json.loads(line) for line in pair.tape if line.startswith('["restart"'))
    rewind = next(json.loads(line) for line in pair.tape if line.startswith('["rewind"'))
    assert [event.moment.global_step for event in script.events if isinstance(event, Back)] == [restart[4], rewind[2]]
    assert any(isinstance(event, Brought) for event in script.events)
    at = {type(event): index for index, event in reversed(list(enumerate(script.events)))}
    assert at[SnapshotPoint] < at[Back] < at[Brought]
    assert script.global_step == pair.syncer.global_step


def test_script_until(tmp_path: Path) -> None:
    pair = trained(tmp_path, 9, "a")
    assert [this.order.global_step for this in rounds_of(script_of(pair, until=5))] == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"--until is 90, but .* ends at global step"):
        script_of(pair, until=90)


def test_script_leaves_out_rounds_without_a_usable_value(tmp_path: Path) -> None:
    pair = trained(tmp_path, 2, "a", strikes_max=100)
    pair.poisoned = {"a"}
    pair.steps(3, "a")
    assert len(rounds_of(script_of(pair))) < len(pair.merges())


def test_only_what_is_needed_is_asked_for(tmp_path: Path) -> None:
    """Of c nothing was merged, so its tape may be missing; of a what the receiver took, and the last merged value."""
    pair = trained(tmp_path, 6, "a", step_samples=SAMPLES, recover_from_peers=True)
    pair.join("b")
    pair.steps(2, "a")
    pair.steps(2, "a", "b")
    took = next(e for _, e in read_entries(pair.path_of("b")) if isinstance(e, TookState))
    pair.join("c")
    pair.path_of("c").unlink()
    script = script_of(pair)
    needs = NeededIncarnations(tmp_path, script)
    assert set(needs.incarnations) == {LearnerIncarnation("a", 1), LearnerIncarnation("b", 1)}
    need = needs.incarnations[LearnerIncarnation("a", 1)]
    assert took.donor == LearnerIncarnation("a", 1) and need.copies == Counter({took.donor_step: 1})
    parts = [
        (event.order.fragment_id, each.local_step)
        for event in rounds_of(script)
        for each in event.order.contributions
        if each.learner_id == "a"
    ]
    assert need.values == Counter(parts)
    assert need.stop == need.steps[max(step for _, step in parts) - 1]


def test_a_donor_is_repeated_as_far_as_its_receiver_needs(tmp_path: Path) -> None:
    """Nothing of the donor was merged; it is needed all the same, with the donor that it had itself."""
    script = Script((), (0,), [])
    _write_tape(tmp_path, "a", [["step", 1, 0, [[0, 1]], 1.0], ["staged_state", 1], ["step", 2, 0, [[1, 2]], 1.0]])
    _write_tape(tmp_path, "b", [["state", "a", 1, 1, [0]], ["step", 1, 0, [[2, 3]], 1.0], ["saved", 1, 4]])
    _write_tape(tmp_path, "c", [["state", "b", 1, 1, []], ["step", 1, 0, [[3, 4]], 1.0]])
    order = Merge(1, 0, (Contribution("c", 1, 1, 10, 0, 1),))
    script.events.append(MergedRound(order, (LearnerIncarnation("c", 1),), 5, (), ()))
    needs = NeededIncarnations(tmp_path, script)
    assert {name: need.stop for (name, _), need in needs.incarnations.items()} == {"a": 3, "b": 4, "c": 3}


def _write_tape(folder: Path, name: str, lines: list[list[Any]]) -> Path:
    path = folder / "tapes" / f"{name}.1.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in [["begin", name, 1, 1], *lines]))
    return path


def test_short_or_missing_learner_tape_is_named(tmp_path: Path) -> None:
    pair = trained(tmp_path, 6, "a", "b")
    path, script = pair.path_of("b"), script_of(pair)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(('["step",5', '["step",6'))))
    with pytest.raises(ValueError, match=r"b\.1\.jsonl ends after local step 4, but step 6 was reported to the syncer"):
        NeededIncarnations(tmp_path, script)
    script.newest.clear()
    with pytest.raises(ValueError, match=r"b\.1\.jsonl ends after local step 4, but its value in round"):
        NeededIncarnations(tmp_path, script)
    path.unlink()
    with pytest.raises(ValueError, match=r"tapes/b\.1\.jsonl is missing: .* copy the tapes folder"):
        NeededIncarnations(tmp_path, script)


def test_torn_last_line_does_no_harm(tmp_path: Path) -> None:
    path = trained(tmp_path, 4, "a").path_of("a")
    whole = list(read_entries(path))
    path.write_text(path.read_text() + '["step",5,4,[[8,')
    assert list(read_entries(path)) == whole


@pytest.mark.parametrize(
    ("number", "line", "says"),
    [
        (3, '["step",2,1', "line 3 cannot be read"),
        (3, '["step","2",1,[[0,1]],2.0]', "line 3 cannot be read"),
        (3, '["walk",2]', "line 3 cannot be read"),
        (3, '["step",3,1,[[0,1]],2.0]', "line 3 is of local step 3, expected 2: steps are missing"),
        (3, '["state","b",1,1,[0]]', "line 3: a state can be loaded only before the first step"),
        (3, '["begin","a",1,1]', "line 3: 'begin' must be the first line"),
        (1, '["step",1,1,[[0,1]],2.0]', "line 1: 'begin' must be the first line"),
    ],
)
def test_broken_line_is_named(tmp_path: Path, number: int, line: str, says: str) -> None:
    path = _write_tape(tmp_path, "a", [["step", n, 0, [[n, n + 1]], None] for n in (1, 2, 3)])
    lines = path.read_text().splitlines()
    lines[number - 1] = line
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"a\.1\.jsonl {says}"):
        outline(path)


def test_tapes_of_a_release_that_is_not_read_are_refused(tmp_path: Path) -> None:
    path = _write_tape(tmp_path, "a", [])
    path.write_text('["begin","a",1,1,[9,"9.8.7"]]\n')
    with pytest.raises(OtherRelease, match=r"the tape of a, incarnation 1 is of diloco-jax 9\.8\.7, protocol 9"):
        outline(path)
    (tmp_path / "tape.jsonl").write_text('["begin",0.0,[0],[9,"9.8.7"]]\n["Hello",1.0,"of another kind"]\n')
    with pytest.raises(OtherRelease, match=r"the tape from line 1 on is of diloco-jax 9\.8\.7, protocol 9"):
        fingerprint_of(tmp_path / "tape.jsonl")


def test_the_data_of_a_run_is_told_by_the_first_learner_that_shares_it(tmp_path: Path) -> None:
    """Even if one with a separate corpus greeted before."""
    tape = tmp_path / "tape.jsonl"

    def hello(name: str, corpus: str) -> str:
        return json.dumps(["Hello", 1.0, name, 1, [["corpus", corpus], ["data", corpus], ["seed", "0"]]])

    def report(name: str) -> str:
        return json.dumps(["StepReport", 2.0, name, 1, 1])

    separate, shared, refused = hello("a", "separate corpus fr"), hello("b", "9 tokens"), hello("c", "8 tokens")
    lines = ['["begin",0.0,[0]]', separate, refused, shared, report("a"), report("a")]
    for more, expected in (([], ""), ([report("b")], "9 tokens")):
        tape.write_text("".join(f"{line}\n" for line in (*lines, *more)))
        assert dict(fingerprint_of(tape)) == {"corpus": expected, "data": expected, "seed": "0"}


def test_lines_that_a_full_disk_refused(tmp_path: Path) -> None:
    """What was before can be repeated, what came after cannot."""
    steps = [["step", n, 0, [[n, n + 1]], 1.0] for n in (1, 2, 4)]
    found = outline(_write_tape(tmp_path, "a", [*steps[:2], ["lost", 3], steps[2]]))
    assert found.line_of(2, "it") == 3
    with pytest.raises(ValueError, match=r"lacks lines before line 4 .* use --until"):
        found.line_of(3, "it")


def test_a_state_in_memory_was_kept_after_its_step_or_after_a_value_that_followed(tmp_path: Path) -> None:
    """No line says which; a state on disk, or for a peer, has its own line, and both may be of one step."""
    steps = [["step", n, n, [[n, n + 1]], 0.5] for n in (1, 2, 3)]
    adopted = [["adopt", fragment_id, 7, 1, 99, -1] for fragment_id in range(4)]
    found = outline(
        _write_tape(
            tmp_path, "a", [adopted[0], steps[0], *adopted[1:3], steps[1], ["saved", 2, 7], adopted[3], steps[2]]
        )
    )
    assert found.lines_of_copy(1, "b", own=True) == [3, 4, 5] and found.kept == {3: 1, 4: 1, 5: 1}
    assert found.lines_of_copy(2, "b", own=False) == [7] and found.lines_of_copy(3, "b", own=True) == [9]
    assert found.lines_of_copy(2, "b", own=True) == [6, 7, 8] and {6: 2, 8: 2}.items() <= found.kept.items()
    assert 7 not in found.kept, "its own line makes the copy"


def test_a_state_before_the_first_step_is_the_one_that_was_loaded(tmp_path: Path) -> None:
    """A leader may be lost in its first step; the slices then have its first state."""
    adopted = [["adopt", fragment_id, 7, 1, 99, -1] for fragment_id in range(3)]
    loaded = ["state", "", 1, 4, [0, 1]]
    step = ["step", 1, 1, [[0, 1]], 0.5]
    found = outline(_write_tape(tmp_path, "a", [*adopted[:2], loaded, adopted[2], step]))
    assert found.lines_of_copy(0, "b", own=True) == [4, 5]
    fresh = outline(_write_tape(tmp_path, "c", [*adopted[:2]]))
    assert fresh.lines_of_copy(0, "b", own=True) == [1, 2, 3]


def test_broken_syncer_tapes_are_named(tmp_path: Path) -> None:
    pair = TapedPair(tmp_path)
    config = config_of(pair)
    with pytest.raises(ValueError, match=r"tape\.jsonl does not exist; give the folder of a run"):
        Replay(config, tmp_path)
    pair = trained(tmp_path, 3, "a")
    good = list(pair.tape)
    for tape, says in (
        ([], r"tape\.jsonl has no step of any learner"),
        ([*good[:-1], '["merged",1.0,99,1,[]]'], rf"tape\.jsonl: tape line {len(good)} cannot be replayed"),
        (good[1:], "does not start with the digests"),
    ):
        pair.tape = tape
        pair.finish()
        with pytest.raises(ValueError, match=says):
            Replay(config, tmp_path)


def test_another_config_is_refused(tmp_path: Path) -> None:
    pair = trained(tmp_path, 3, "a")
    with pytest.raises(ValueError, match="seed is 0, the tape has None"):
        replay_run(config_of(pair), tmp_path)
    with pytest.raises(ValueError, match=r"2 initial fragments, not 1.*is the config that of its run\?"):
        Replay(config_of(pair, protocol={"num_fragments": 1}), tmp_path)


class Alone:
    """The world of an incarnation that has no others, with these global values."""

    def __init__(self, values: dict[Name, Values]) -> None:
        self.take = values.__getitem__
        self.losses: list[float] = []

    def state_of(self, took: TookState, receiver: LearnerIncarnation, held: dict[int, int]) -> Any:
        raise AssertionError("nobody gives a state")

    def on_loss(self, incarnation: LearnerIncarnation, step: TapedStep, loss: float) -> None:
        self.losses.append(loss)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, quick_compiler: None) -> Trainer:
    """One island for all tests of single incarnations."""
    config = config_of(TapedPair(tmp_path_factory.mktemp("trainer")), wire={"up": "int8"}, adopt={"mode": "rebase"})
    model = Evaluator(config)
    return Trainer(resolve(config, model.shapes, model.kinds))


@pytest.mark.long
def test_a_step_of_slices_is_repeated_in_parts(tmp_path: Path) -> None:
    config = config_of(TapedPair(tmp_path), islands={"slices": 2})
    model = Evaluator(config)
    trainer = Trainer(resolve(config, model.shapes, model.kinds))
    trainer.read(LearnerIncarnation("island-0", 1), THE_RUNS)
    loss = trainer.step(TapedStep(1, 9, ((0, 1), (5, 8)), None))
    # A slice was missing, and the batch had shrunk to one part.
    shrunk = trainer.step(TapedStep(2, 10, ((8, 10),), None))
    replayed = trainer.island.parameters()

    island, loop = trainer.island, trainer._loop
    island.state = trainer.fresh()
    start, steps = island.parameters(), PartSteps(island)

    def part(*ranges: tuple[int, int]) -> Part:
        loop.put_batch(ranges)
        return steps.take(steps.gradient(*loop.take_batch()))

    first, second = part((0, 1), (5, 6)), part((6, 8))
    island.wait(steps.apply((first.flat + second.flat) / np.float32(2), loop.rate(9), {}))
    assert loss == np.float32(first.metrics["loss"] + second.metrics["loss"]) / np.float32(2)
    third = part((8, 10))
    island.wait(steps.apply(third.flat, loop.rate(10), {}))
    assert shrunk == third.metrics["loss"]
    assert digest_of(island.parameters()) == digest_of(replayed) != digest_of(start)
    with pytest.raises(ValueError, match=r"has 3 samples, which are not parts of 2; replay with the islands\.slices"):
        trainer.step(TapedStep(3, 11, ((0, 3),), None))


@pytest.mark.parametrize("mode", ["overwrite", "blend", "rebase"])
def test_incarnation_is_repeated_step_by_step(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, mode: Literal["overwrite", "blend", "rebase"]
) -> None:
    """Against an island that is led by hand; another incarnation that advances in between changes nothing."""
    adopt = AdoptConfig(mode=mode, alpha=0.25)
    monkeypatch.setattr(trainer, "how", adopt)
    island, loop = trainer.island, trainer._loop
    first = trainer.fragments[0]
    island.state, island.exchange.held = trainer.fresh(), {}
    start = island.parameters()
    moved = {path: value + np.float32(0.01) for path, value in start.items()}
    names = {p: Name(p, 0, 10 + p) for p in (0, 1)}
    values = {names[p]: take(start, trainer.fragments[p]) for p in (0, 1)}
    values[Name(0, 2, 22)] = take(moved, first)
    reads = [[[0, SAMPLES]], [[SAMPLES, 2 * SAMPLES]], [[4 * SAMPLES, 5 * SAMPLES]]]
    lines = [["adopt", 0, 0, 1, 10, -1], ["adopt", 1, 0, 1, 11, -1], ["step", 1, 3, reads[0], 1.0], ["sent", 0, 2, 1]]
    lines += [["step", 2, 4, reads[1], 1.0], ["adopt", 0, 2, 1, 22, 2], ["step", 3, 5, reads[2], 1.0]]
    found = outline(_write_tape(tmp_path, "a", lines))

    def replica(world: Alone) -> Replica:
        need = replace(found, stop=found.steps[2], values=Counter({(0, 1): 1, (0, 3): 1, (1, 3): 1}))
        return Replica(LearnerIncarnation("a", 1), need, trainer, world)

    for p in (0, 1):
        island.adopt(trainer.fragments[p], values[names[p]])
    losses = []
    staged = None
    for index, read in enumerate(reads):
        loop.put_batch([(start, stop) for start, stop in read])
        losses.append(loop.wait(loop.step(3 + index))["loss"])
        if index == 0:
            staged = island.exchange.stage(island.state.params, first)
        if index == 1:
            kept_back = staged.residual()
            assert kept_back is not None and any(np.asarray(v).any() for v in kept_back.on_devices.values())
            island.adopt(first, take(moved, first), mode=mode, alpha=0.25, sent=staged)
    assert staged is not None
    payloads = {p: island.exchange.stage(island.state.params, trainer.fragments[p]).encode() for p in (0, 1)}
    island.exchange.held = {}
    world = Alone(values)
    this, other = replica(world), replica(Alone(values))
    assert this.value(0, 1) == staged.encode()
    other.advance(found.steps[1])
    assert this.value(0, 3) == payloads[0]
    assert this.value(1, 3) == payloads[1]
    assert world.losses == losses
    assert other.value(0, 3) == payloads[0]


@pytest.mark.slow
def test_synthetic_tapes_train_a_model(tmp_path: Path) -> None:
    """Twice the same; and the checkpoint is that of the model."""
    pair = eventful(tmp_path / "tapes")
    pair.finish()
    config = config_of(pair)
    result = replay_synthetic(config, pair.folder, tmp_path / "out")
    again = Replay(config, pair.folder, compare=False)
    again.run()
    assert digest_of(again.model.parameters()) == result["sha256"]
    assert result["merged_rounds"] == len(rounds_of(script_of(pair)))
    assert result["eval_loss"] < 5.5, "below the uniform ln 256: something was learned"
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == result
    checkpoint = complete(tmp_path / "out" / "checkpoints")[0]
    parameters, meta = load_parameters(checkpoint)
    assert digest_of(parameters) == result["sha256"] and meta["global_step"] == result["global_steps"]


def test_going_back_leaves_no_trace(tmp_path: Path) -> None:
    """Rounds between a snapshot and the death of all processes do not change the model of the resumed run."""
    pair = trained(tmp_path, 10, "a", "b", step_samples=SAMPLES, snapshot_every=4)
    pair.rewind()
    rewound = json.loads(pair.tape[-1])[2]
    pair.join("a", "b", incarnation=2)
    pair.finish()
    this = Replay(config_of(pair), tmp_path, compare=False)
    captured = ""
    for event in this.script.events:
        if isinstance(event, Back):
            assert digest_of(this.model.parameters()) != captured
        this.repeat(event)
        if isinstance(event, SnapshotPoint) and event.moment.global_step == rewound:
            captured = digest_of(this.model.parameters())
    assert isinstance(event, Back) and digest_of(this.model.parameters()) == captured
