"""Adam with a slow momentum beside the gradient (MT-DAO, arXiv 2510.05361), and its average over islands.

An experiment's `optimizer.module` names `slow_adam`; the schedule's `instead: {momentum: true}` averages the slow
momenta of the islands in each round, in float32 and without a count of their bytes: an upper bound of what it can gain.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.tools.replay import learner_tapes
from diloco_jax.tools.replay.replay import Replay
from diloco_jax.tools.replay.replica import Replica
from diloco_jax.tools.replay.script import LearnerIncarnation, MergedRound

EPS = 1e-8
Arrays = dict[str, np.ndarray]


class SlowState(NamedTuple):
    """The state of `slow_adam`: the steps so far, and both moments by path."""

    count: Any
    slow: Any
    squares: Any


def slow_adam(
    beta: float = 0.99, share: float = 0.5, b2: float = 0.95, weight_decay: float = 0.1
) -> optax.GradientTransformation:
    """Return the quasi-hyperbolic Adam of MT-DAO for learning rate 1.

    With the clipped gradient g, u = beta u + (1 - beta) g, v = b2 v + (1 - b2) g^2 and bias corrections ^, the update
    is -(((1 - share) g + share u^) / (sqrt(v^) + eps) + decay * theta); only matrices but the embedding decay.
    """

    def init(params: Any) -> SlowState:
        return SlowState(jnp.zeros((), jnp.int32), *(jax.tree.map(jnp.zeros_like, params) for _ in range(2)))

    def update(grads: Any, state: SlowState, params: Any = None) -> tuple[Any, SlowState]:
        count = state.count + 1
        slow = jax.tree.map(lambda u, g: beta * u + (1 - beta) * g, state.slow, grads)
        squares = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, state.squares, grads)
        first, second = 1 - beta**count, 1 - b2**count
        updates = jax.tree.map(
            lambda g, u, v: -((1 - share) * g + share * u / first) / (jnp.sqrt(v / second) + EPS), grads, slow, squares
        )
        return updates, SlowState(count, slow, squares)

    def matrices(params: Any) -> Any:
        return {path: value.ndim > 1 and "embed" not in path for path, value in params.items()}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.GradientTransformation(init, update),
        optax.add_decayed_weights(-weight_decay, matrices),
    )


def average_momenta() -> None:
    """Average the slow momenta of a round's islands in this process; each island adopts them with the values.

    An island whose momentum is part of the average keeps what it has added since; another takes the average.
    """
    staged: dict[tuple[LearnerIncarnation, int, int], Arrays] = {}
    rounds: dict[tuple[int, int], tuple[Arrays, Mapping[LearnerIncarnation, Arrays]]] = {}

    def stage(self: Replica, fragment_id: int, local_step: int) -> None:
        stages(self, fragment_id, local_step)
        slow = _slow(self._trainer.island.state.opt_state).slow
        slices = self._trainer.fragments[fragment_id].slices
        staged[self.incarnation, fragment_id, local_step] = {
            piece.key: np.array(slow[piece.path][piece.at]) for piece in slices
        }

    def merge(self: Replay, this: MergedRound) -> None:
        merges(self, this)
        order = this.order
        own = {
            incarnation: staged.pop((incarnation, order.fragment_id, part.local_step))
            for part, incarnation in zip(order.contributions, this.incarnations, strict=True)
        }
        mean = {key: np.mean([each[key] for each in own.values()], axis=0) for key in next(iter(own.values()))}
        rounds[order.fragment_id, order.global_step] = mean, own

    def repeat(self: Replica, entry: learner_tapes.Entry) -> None:
        repeats(self, entry)
        match entry:
            case learner_tapes.TookValue((fragment_id, version, _)) if (fragment_id, version) in rounds:
                mean, own = rounds[fragment_id, version]
                island, sent = self._trainer.island, own.get(self.incarnation)
                state = _slow(island.state.opt_state)
                slow = dict(state.slow)
                for piece in self._trainer.fragments[fragment_id].slices:
                    new = np.array(slow[piece.path])
                    new[piece.at] = mean[piece.key] + (new[piece.at] - sent[piece.key] if sent is not None else 0)
                    slow[piece.path] = jax.device_put(new, slow[piece.path].sharding)
                changed = _with_slow(island.state.opt_state, slow)
                island.state = island.state._replace(opt_state=changed)

    stages, Replica._stage = Replica._stage, stage  # type: ignore[method-assign]
    merges, Replay._round = Replay._round, merge  # type: ignore[method-assign]
    repeats, Replica._repeat = Replica._repeat, repeat  # type: ignore[method-assign]


def _is_slow(node: Any) -> bool:
    return isinstance(node, SlowState)


def _slow(opt_state: Any) -> SlowState:
    found: SlowState = next(filter(_is_slow, jax.tree.leaves(opt_state, is_leaf=_is_slow)))
    return found


def _with_slow(opt_state: Any, slow: Any) -> Any:
    """Return an optimizer's state with other slow momenta."""

    def replaced(node: Any) -> Any:
        return node._replace(slow=slow) if _is_slow(node) else node

    return jax.tree.map(replaced, opt_state, is_leaf=_is_slow)
