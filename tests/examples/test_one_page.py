"""docs/examples/one_page.py trains, and computes the same as the system with the same turns, up to rounding.

The system's side: the two machines decide (TapedPair), and a replay of their tapes trains islands and merges.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from diloco_jax.core.merge import token_weights
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import parse
from diloco_jax.tools.replay.learner_tapes import TapedStep, read_entries
from diloco_jax.tools.replay.replay import Replay
from diloco_jax.training.data.corpus import load_source
from diloco_jax.training.data.order import SampleOrder
from docs.examples import one_page
from docs.examples.one_page import Params, Settings
from tests.runtime.taped_pair import TapedPair

VOCAB, WIDTH, LENGTH, SEQUENCES, RATE = 16, 8, 8, 2, 0.02
TICKS = 12
NAMES = ("a", "b", "c")
# Runs with one optimizer, and with batches of one shape, share their compiled programs.
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, b1=0.9, b2=0.95, weight_decay=0.0))


def next_token_loss(params: Params, tokens: jax.Array) -> jax.Array:
    """A bigram model: logits = embed[x] @ kernel + bias."""
    logits = params["embed"][tokens[:, :-1]] @ params["kernel"] + params["bias"][None, None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def initial(key: jax.Array) -> Params:
    first, second = jax.random.split(key)
    embed, kernel = jax.random.normal(first, (VOCAB, WIDTH)), jax.random.normal(second, (WIDTH, VOCAB))
    return {"embed": embed, "kernel": 0.3 * kernel, "bias": jnp.zeros(VOCAB)}


class Bigram(nnx.Module):
    """The same model for the system."""

    def __init__(self, key: jax.Array) -> None:
        for name, value in initial(key).items():
            setattr(self, name, nnx.Param(value))

    @classmethod
    def from_config(cls, args: Any, *, rngs: nnx.Rngs) -> Bigram:
        return cls(rngs.params())

    def loss(self, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        params = {name: getattr(self, name)[...] for name in ("embed", "kernel", "bias")}
        return next_token_loss(params, batch["tokens"]), {}


def run_config(pair: TapedPair, corpus: Path, outer: dict[str, Any]) -> RunConfig:
    settings = {
        "islands": {"count": len(NAMES), "devices": 1, "batch_size": SEQUENCES},
        "train": {"steps": 1000, "seq_len": LENGTH, "eval_every": 0},
        "data": {"format": "tokens", "path": str(corpus), "vocab_size": VOCAB},
        "model": {"module": f"{__name__}:Bigram"},
        "optimizer": {"schedule": "constant", "warmup_steps": 0, "learning_rate": RATE, "weight_decay": 0.0},
        "wire": {"up": "float32", "down": "float32"},
        "outer": outer,
        "protocol": asdict(pair.config),
    }
    return parse(settings, "the test")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ids that mostly count upwards: quickly learnt."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("corpus") / "ids"
    ids = np.cumsum(1 + (rng.random(20_000) < 0.1)) % VOCAB
    path.write_bytes(ids.astype("<u2").tobytes())
    return path


def play(pair: TapedPair, overlap_ticks: int) -> None:
    """Let the machines decide: in a tick each learner makes a step, and a broadcast takes some ticks on its way."""
    pair.join(*NAMES)
    pair.held = {f"{name}:GlobalFragment" for name in NAMES}
    under_way: deque[int] = deque()  # ticks of broadcasts
    for tick in range(TICKS):
        pair.step(*NAMES)
        new = sum(receiver == NAMES[0] for _, receiver, _ in pair.wire) - len(under_way)
        under_way += [tick] * new
        while under_way and under_way[0] + overlap_ticks <= tick:
            under_way.popleft()
            for name in NAMES:
                pair.let_pass(f"{name}:GlobalFragment")
    pair.finish()


def batches_of(pair: TapedPair, config: RunConfig) -> jax.Array:
    """Read what each learner read in each tick: [ticks, M, SEQUENCES, LENGTH + 1]."""
    order = SampleOrder(load_source(config.data, LENGTH), config.data.shuffle_seed + config.seed)
    entries = [[entry for _, entry in read_entries(pair.path_of(name))] for name in NAMES]
    ranges = [[step.ranges for step in steps if isinstance(step, TapedStep)] for steps in entries]
    read = [
        [order.batch([(SEQUENCES * a, SEQUENCES * b) for a, b in step])["tokens"] for step in steps] for steps in ranges
    ]
    return jnp.asarray(np.stack(read, axis=1))


@pytest.mark.parametrize(
    ("settings", "outer"),
    [
        (Settings(4, 1, 0, 3, optax.sgd(0.7, momentum=0.9, nesterov=True)), {"learning_rate": 0.7, "momentum": 0.9}),
        # With P = 2 no tensor is larger than a fair share, so none is cut.
        (Settings(4, 2, 2, 3), {}),
    ],
    ids=["synchronous", "streaming"],
)
def test_equals_the_system(tmp_path: Path, corpus: Path, settings: Settings, outer: dict[str, Any]) -> None:
    numbers = {name: getattr(settings, name) for name in ("sync_every", "num_fragments", "overlap_steps", "quorum")}
    pair = TapedPair(tmp_path, step_samples=1, total_steps=1000, **numbers)
    play(pair, settings.overlap_steps)
    config = run_config(pair, corpus, outer)
    system = Replay(config, tmp_path, compare=False)
    system.run()
    assert system.merged_rounds == TICKS * settings.num_fragments // settings.sync_every

    theta = {path: jnp.asarray(value) for path, value in system.evaluator.initial_parameters()}
    present = np.ones((TICKS, len(NAMES)), bool)
    final = one_page.train(next_token_loss, theta, INNER, batches_of(pair, config), present, settings)
    for path, value in system.model.parameters().items():
        assert np.abs(value - theta[path]).max() > 2 * RATE, "it was trained"
        np.testing.assert_allclose(final[path], value, rtol=2e-5, atol=2e-6, err_msg=path)


def test_weights_are_the_systems() -> None:
    tokens, steps, present = np.array([640, 320, 512, 9]), np.array([5, 5, 4, 1]), np.array([True, True, True, False])
    got = one_page.token_weights(jnp.asarray(tokens), jnp.asarray(steps), jnp.asarray(present))
    np.testing.assert_allclose(got[:3], token_weights(tokens[:3].tolist(), steps[:3].tolist()), rtol=1e-6)
    assert got[3] == 0


def test_counters_grow_with_steps_and_restart_with_a_version() -> None:
    params = {"x": jnp.ones((2, 3)), "y": jnp.ones((2, 3))}
    inner = optax.sgd(0.1)
    zeros = jnp.zeros((2, 2), jnp.int32)
    learners = one_page.Learners(params, jax.vmap(inner.init)(params), zeros, zeros)
    batches = jnp.ones((2, 4, 5), jnp.int32)
    present = jnp.array([True, False])
    learners = one_page.inner_step(learners, batches, present, lambda p, _: p["x"].sum(), inner)
    assert learners.steps.tolist() == [[1, 1], [0, 0]] and learners.tokens.tolist() == [[20, 20], [0, 0]]
    np.testing.assert_allclose(learners.params["x"], [[0.9] * 3, [1.0] * 3], rtol=1e-6)
    learners = one_page.adopt(learners, 1, {"x": jnp.full(3, 5.0)})
    assert learners.steps.tolist() == [[1, 0], [0, 0]] and learners.tokens.tolist() == [[20, 0], [0, 0]]
    assert (learners.params["x"] == 5.0).all() and (learners.params["y"] == 1.0).all()


def test_decoupled_trains_while_learners_are_slow_or_away() -> None:
    rng = np.random.default_rng(1)
    ticks, learners = 90, len(NAMES)
    starts = rng.integers(0, VOCAB, (ticks, learners, SEQUENCES, 1))
    batches = jnp.asarray((starts + np.arange(LENGTH + 1)) % VOCAB, jnp.int32)
    present = rng.random((ticks, learners)) < np.array([1.0, 0.6, 0.9])
    present[30:60, 2] = False
    # Nobody is present: nothing is merged, and nothing breaks.
    present[40:45] = False
    theta = initial(jax.random.key(0))
    final = one_page.train(next_token_loss, theta, INNER, batches, present, Settings(4, 2, 2, 1))
    before, after = (float(next_token_loss(params, batches[0, 0])) for params in (theta, final))
    assert after < 0.2 * before, (before, after)
