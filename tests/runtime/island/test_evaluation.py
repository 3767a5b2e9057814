"""An island's evaluation: of the global values that it adopted, whatever its parameters and mesh are by then."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from diloco_jax.core.fragments import take
from diloco_jax.core.layout import whole
from diloco_jax.core.outer import NOTHING
from diloco_jax.protocol.messages import WITHOUT, GlobalFragment
from diloco_jax.runtime.island.adoptions import ArrivedValue
from diloco_jax.runtime.island.built_in import BuiltInLoop
from diloco_jax.runtime.island.evaluation import Change, make_score
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.runtime.model.global_model import Arrays
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.text import load
from tests.runtime.helpers import write_config

pytestmark = pytest.mark.usefixtures("quick_compiler")

ISLANDS = {"count": 1, "devices": 4, "mesh": {"fsdp": 4}}


class Counts:
    """Numbers of a user's own."""

    def __call__(self, model: Any, step: int) -> dict[str, float]:
        return {"leaves": len(jax.tree.leaves(model)), "step": step, "nothing": float("nan")}


def test_scores_are_those_of_one_device(tmp_path: Path) -> None:
    """On a mesh that does not divide a batch, of fragments that were adopted before the local values changed."""
    train = {"eval_batch_size": 6, "eval_batches": 2, "final_eval_batches": 3}
    module = {"module": f"{__name__}:Counts"}
    config = load(write_config(tmp_path, train=train, evaluation=module, islands=ISLANDS))
    evaluator = Evaluator(config)
    drawn = dict(evaluator.initial_parameters())
    random = np.random.default_rng(0)
    values = {path: value + random.normal(size=value.shape).astype(np.float32) / 50 for path, value in drawn.items()}
    loop = BuiltInLoop(config, "island-0", jax.devices()[:4])
    host = Host(resolve(config, loop.island.shapes, loop.island.kinds), loop.island, loop.warm_up, loop.evaluate)
    for fragment in host.fragments:
        message = GlobalFragment(1, fragment.fragment_id, 1, 1, 0, 0)
        host.adopt(message, ArrivedValue(take(values, fragment), NOTHING))
    # The evaluation must not see what the island trained since.
    loop.island.load(drawn)
    for final, batches in ((False, 2), (True, 3)):
        score, expected = host.evaluate(7, final=final), evaluator.evaluate(values, batches, 7)
        assert score.loss == pytest.approx(expected["loss"], rel=1e-5) and score.tokens == expected["tokens"]
        assert score.bits_per_byte == pytest.approx(expected["bits_per_byte"], rel=1e-5) and score.reason == ""
        told = {name: value for name, value in score.scores if value == value}
        wanted = {name: value for name, value in expected["scores"].items() if value is not None}
        assert told == pytest.approx(wanted, rel=1e-5)
        assert [name for name, value in score.scores if value != value] == ["nothing"] and told["step"] == 7
    check_change(host, evaluator, values, random)
    anchors = jax.device_get(loop.island.exchange.anchors(host.fragments))
    assert all(np.array_equal(anchors[path], values[path].astype(anchors[path].dtype)) for path in values)
    loop.close()


def check_change(host: Host, evaluator: Evaluator, values: Arrays, random: np.random.Generator) -> None:
    """A change is evaluated as the model with it would be, and one that does not fit is left out."""
    layout = whole(host.fragments[1])
    flat = random.normal(size=layout.size).astype(np.float32) / 20
    other = {path: value.copy() for path, value in values.items()}
    for piece in host.fragments[1].slices:
        other[piece.path][piece.at] += layout.views(flat)[piece.key]
    score, plain = (host.evaluate(7, final=False, change=each) for each in (Change(1, flat.tobytes()), None))
    assert score.loss == plain.loss and dict(score.scores).keys() - dict(plain.scores) == {WITHOUT}
    without = dict(score.scores)[WITHOUT]
    assert (
        without == pytest.approx(evaluator.evaluate(other, 2, 7)["loss"], rel=1e-5)
        and abs(without / score.loss - 1) > 1e-4
    )
    for wrong in (Change(1, b"1234"), Change(99, flat.tobytes()), Change(-1, flat.tobytes())):
        score = host.evaluate(7, final=False, change=wrong)
        assert score.loss == plain.loss and WITHOUT not in dict(score.scores), "the evaluation itself is not lost"


def test_errors_are_reported_and_training_continues(tmp_path: Path) -> None:
    config = load(write_config(tmp_path))
    loop = BuiltInLoop(config, "island-0", jax.devices()[:1])
    run = resolve(config, loop.island.shapes, loop.island.kinds)
    score = Host(run, loop.island, loop.warm_up, loop.evaluate).evaluate(1, final=True)
    assert score.loss == float("inf") and "KeyError" in score.reason and score.took_s >= 0
    loop.close()


def test_scores_have_bounds() -> None:
    score = make_score(2.0, None, 5, {f"name {n}": n for n in range(300)} | {"x" * 200: 1.0}, ["slow"])
    assert len(score.scores) == 256 and score.reason.startswith("slow; 45 scores are left out")
