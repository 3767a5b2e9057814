"""Models cut by class of tensor: even steps, whole classes, and the same plan on both sides."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from diloco_jax.core.kinds import class_of, kind_of
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.settings.fingerprint import fingerprint
from diloco_jax.settings.resolved import ResolvedRun, resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.link import TransportConfig

LAYER = {"q": (64, 64), "k": (64, 32), "v": (64, 32), "out": (64, 64), "up": (64, 256), "gate": (64, 256)}
SHAPES: dict[str, tuple[int, ...]] = {
    **{f"blocks/{i}/{name}/kernel": shape for i in range(6) for name, shape in LAYER.items()},
    **{f"blocks/{i}/down/kernel": (256, 64) for i in range(6)},
    **{f"blocks/{i}/norm_{name}/scale": (64,) for i in range(6) for name in ("mlp", "attention")},
    "embed/embedding": (256, 64),
    "empty": (0, 64),
}
KINDS = {path: kind_of(shape) for path, shape in SHAPES.items()}


def config_of(**protocol: Any) -> RunConfig:
    return RunConfig(protocol=ProtocolConfig(**protocol))


def resolved(config: RunConfig) -> ResolvedRun:
    return resolve(config, SHAPES, KINDS)


def moved(run: ResolvedRun, steps: range) -> list[int]:
    """Elements that each of these steps moves."""
    due = map(run.config.protocol.turns.due, steps)
    return [run.fragments[p].num_elements if p >= 0 else 0 for p in due]


def test_one_period_cuts_as_ever() -> None:
    config = config_of(sync_every=12, num_fragments=12)
    run = resolved(config)
    plan = run.plan
    assert plan == config.fragments.plan(SHAPES, KINDS, 12) and plan.counts == (12,)
    assert run.config is config
    assert run.num_parameters == sum(map(math.prod, SHAPES.values()))
    assert run.payload_bytes("float32") == tuple(4 * fragment.num_elements for fragment in run.fragments)
    later = replace(config, protocol=replace(config.protocol, sync_later={30: 24}))
    assert resolved(later).plan == plan
    same = replace(config, protocol=replace(config.protocol, sync_every={"mlp": 12, "rest": 12}))
    assert resolved(same).plan == plan
    assert not run.fewer_fragments(12)


@pytest.mark.parametrize(("poll_s", "resend_s"), [(0.25, 2.0), (0.5, 2.0), (2.0, 8.0)])
def test_no_request_is_repeated_before_its_answer_can_have_passed_a_bucket(poll_s: float, resend_s: float) -> None:
    config = replace(config_of(), transport=TransportConfig(address="s3://runs/x", poll_s=poll_s))
    assert config.protocol.resend_s == 2.0
    run = resolved(config)
    assert run.config.protocol.resend_s == resend_s and resolved(run.config).config is run.config
    there = replace(config.transport, address="host:1")
    assert resolved(replace(config, transport=there)).config.protocol.resend_s == 2.0


def test_fewer_fragments_than_asked_are_told() -> None:
    config = config_of(sync_every={"mlp": 4, "rest": 24}, num_fragments=24)
    run = resolved(config)
    made = sum(run.plan.counts)
    assert made < 24 and run.config.protocol.num_fragments == made
    assert run.fewer_fragments(24).startswith(f"{made} fragments, fewer than protocol.num_fragments = 24: with periods")


@pytest.mark.parametrize(
    ("periods", "peak"),
    [
        # three of four steps for 94 % of the bytes: 4/3 of 0.94
        ({"mlp": 4, "rest": 24}, 1.27),
        ({"mlp": 8, "rest": 24}, 1.15),
        ({"mlp": 16, "rest": 96}, 1.15),
        # A second fragment of attention would take 49 of 48 steps.
        ({"rest": 48, "mlp": 6, "attention": 12}, 1.33),
        ({"*/down/*": 6, "mlp": 12, "norm": 12, "rest": 24}, 1.25),
        ({"embedding": 6, "rest": 24}, 1.5),
    ],
)
def test_steps_move_about_as_many_bytes_each(periods: dict[str, int], peak: float) -> None:
    config = config_of(sync_every=periods, num_fragments=64)
    moves = moved(resolved(config), range(96))
    size = {name: 0 for name in periods}
    for path, shape in SHAPES.items():
        size[class_of(path, periods)] += math.prod(shape)
    mean = sum(size[name] / period for name, period in periods.items())
    assert sum(moves) / 96 == pytest.approx(mean), "every element moves once in the period of its class"
    assert max(moves) <= peak * mean


def test_a_fragment_has_tensors_of_classes_with_one_period_only() -> None:
    periods = {"mlp": 4, "norm": 24, "rest": 24}
    config = config_of(sync_every=periods)
    plan = resolved(config).plan
    of_mlp = [{class_of(piece.path, periods) == "mlp" for piece in f.slices} for f in plan.fragments]
    assert of_mlp == [{True}] * plan.counts[0] + [{False}] * plan.counts[1]
    assert sum(fragment.num_elements for fragment in plan.fragments) == sum(map(math.prod, SHAPES.values()))
    assert len({(piece.path, piece.start) for f in plan.fragments for piece in f.slices}) == sum(
        len(f.slices) for f in plan.fragments
    )


def test_both_sides_derive_the_same_table_and_say_so() -> None:
    ours = config_of(sync_every={"mlp": 4, "rest": 24})
    theirs = config_of(sync_every={"mlp": 4, "rest": 24})
    run, other = resolved(ours), resolve(theirs, dict(reversed(SHAPES.items())), KINDS)
    counts = run.plan.counts
    assert run == other and run.fingerprint("text") == other.fingerprint("text")
    assert resolved(run.config) == run == ResolvedRun.of_plan(ours, run.plan), "a resolved config stays as it is"
    assert run.config.protocol.num_fragments == sum(counts) == len(run.fragments)
    assert dict(run.fingerprint(""))["protocol"] == f"H={{'mlp': 4, 'rest': 24}} P={counts[0]}+{counts[1]} tau=2"
    assert dict(run.fingerprint(""))["model layout"] == run.plan.fingerprint
    assert moved(run, range(99)) == moved(other, range(99))


def test_settings_with_their_defaults_are_no_difference() -> None:
    """A release that has a setting more agrees with one that lacks it, while nobody uses it."""
    told = dict(fingerprint(config_of(sync_every=6, num_fragments=6), "", ""))
    assert json.loads(told["data"]) == {}
    assert "name" not in json.loads(told["inner optimizer"])


def test_numbers_of_fragments_may_be_given() -> None:
    config = config_of(sync_every={"mlp": 4, "rest": 24}, num_fragments=5, class_fragments=(1, 4))
    assert resolved(config).plan.counts == (1, 4)
    none = config_of(sync_every={"mlp": 4, "rest": 24, "*empty*": 48}, num_fragments=6, class_fragments=(1, 4, 1))
    with pytest.raises(ValueError, match=r"names '\*empty\*', but no tensor is left"):
        resolved(none)
    only = {path: shape for path, shape in SHAPES.items() if class_of(path, ("mlp",)) == "mlp"}
    with pytest.raises(ValueError, match="class_fragments gives 4 fragments to rest, which has 0 elements; leave"):
        resolve(config, only, KINDS)
    assert resolve(config_of(sync_every={"mlp": 4, "rest": 24}), only, KINDS).plan.counts == (4, 0)
