"""Adam with a slow momentum, against optax and a loop of a few lines, and its average over islands."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import yaml

from experiments.momenta import slow_adam
from experiments.plan import COMMON, TINY
from experiments.spec import merged
from experiments.tests.test_instead import around
from tests.limits import HANGS_S

GRADIENTS = [np.array([[0.1, -0.2], [0.3, 0.05]], np.float32) * step for step in (1, -2, 0.5)]


def updates_of(optimizer: optax.GradientTransformation) -> list[np.ndarray]:
    params = {"matrix": jnp.ones((2, 2))}
    state, found = optimizer.init(params), []
    for gradient in GRADIENTS:
        updates, state = optimizer.update({"matrix": jnp.asarray(gradient)}, state, params)
        found.append(np.asarray(updates["matrix"]))
    return found


def test_without_a_share_it_is_adam_without_a_first_moment() -> None:
    theirs = optax.adamw(1.0, b1=0.0, b2=0.95, weight_decay=0.1)
    for ours, wanted in zip(updates_of(slow_adam(share=0.0)), updates_of(theirs), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-6)


def test_the_share_belongs_to_a_momentum_without_bias() -> None:
    slow = squares = np.zeros((2, 2))
    for step, (ours, gradient) in enumerate(zip(updates_of(slow_adam(0.99, 0.9)), GRADIENTS, strict=True), 1):
        slow, squares = 0.99 * slow + 0.01 * gradient, 0.95 * squares + 0.05 * gradient**2
        direction = 0.1 * gradient + 0.9 * slow / (1 - 0.99**step)
        wanted = -(direction / (np.sqrt(squares / (1 - 0.95**step)) + 1e-8) + 0.1)
        np.testing.assert_allclose(ours, wanted, rtol=1e-4)


# Equal islands without delay send a fragment for version N after their step N. What both had sent is written down, and
# by how much an adoption changes the momentum.
CHECK = """
import numpy as np
from experiments import momenta
from experiments.taped import main
from diloco_jax.tools.replay.learner_tapes import TookValue
from diloco_jax.tools.replay.replica import Replica

momenta.average_momenta()
stages, repeats, sent, right = Replica._stage, Replica._repeat, {}, []

def cut(self, fragment_id):
    slow = momenta._slow(self._trainer.island.state.opt_state).slow
    return np.concatenate([np.ravel(slow[p.path][p.at]) for p in self._trainer.fragments[fragment_id].slices])

def stage(self, fragment_id, local_step):
    stages(self, fragment_id, local_step)
    sent.setdefault((fragment_id, local_step), {})[self.incarnation] = cut(self, fragment_id)

def repeat(self, entry):
    if not isinstance(entry, TookValue) or entry.name[:2] not in sent:
        return repeats(self, entry)
    before = cut(self, entry.name[0])
    repeats(self, entry)
    both = sent[entry.name[:2]]
    wanted = before + sum(both.values()) / 2 - both[self.incarnation]
    right.append(len(both) == 2 and np.allclose(cut(self, entry.name[0]), wanted, rtol=1e-5, atol=1e-8))

Replica._stage, Replica._repeat = stage, repeat
main()
print(len(right), sum(right))
"""


def test_islands_adopt_the_mean_of_their_momenta(tmp_path: Path) -> None:
    settings = {
        "islands": {"count": 2},
        "optimizer": {"module": "experiments.momenta:slow_adam"},
        "model": {"args": {"seq_len_max": 32}},
        "train": {"tokens": 8000},
        "protocol": {"sync_every": 2, "num_fragments": 2},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(merged(merged(COMMON, TINY), settings)))
    (tmp_path / "schedule.json").write_text('{"delay": 0.0, "step_noise": 0.0, "speed_spread": 0.0}')
    words = [str(tmp_path / "config.yaml"), str(tmp_path / "schedule.json"), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *words], env=around(), capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.returncode == 0, done.stderr
    number, equal = map(int, done.stdout.split())
    assert number > 10 and equal == number
