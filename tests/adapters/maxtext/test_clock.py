"""The learning rate by the run's clock: the counters that optax's schedules read, set without a read from a device."""

from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from diloco_jax.adapters.maxtext.clock import OptimizerClock, schedule_counters
from diloco_jax.training.sharding import put_array


class Scale(nnx.Module):
    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.zeros(2))


def rate(step: Any) -> Any:
    return 1.0 + step


def state_of(transform: optax.GradientTransformation) -> tuple[Scale, nnx.Optimizer[Any]]:
    model = Scale()
    return model, nnx.Optimizer(model, transform, wrt=nnx.Param)


def found(transform: optax.GradientTransformation) -> list[str]:
    counters = schedule_counters(nnx.state(state_of(transform)[1]))
    return ["/".join(map(str, keys)) for keys in counters]


def test_counters_of_schedules() -> None:
    assert found(optax.adamw(rate)) == ["opt_state/2/count"]
    assert found(optax.sgd(rate)) == ["opt_state/1/count"]
    # Adam without a schedule: its counter belongs to the moments, and there is no other one.
    assert found(optax.adam(1e-3)) == ["opt_state/0/count"]
    assert found(optax.chain(optax.clip(1.0), optax.adamw(rate))) == ["opt_state/1/2/count"]


def test_a_step_uses_the_rate_of_the_clock() -> None:
    model, optimizer = state_of(optax.sgd(rate))
    clock = OptimizerClock(nnx.state(optimizer))
    gradient, weight = nnx.State({"weight": nnx.Param(jnp.ones(2))}), 0.0
    # The island is away between 2 and 40, and a merge moves the clock from 41 to 41.
    for step in (0, 1, 2, 40, 41, 41, 7):
        clock.set(nnx.state(optimizer), step)
        optimizer.update(model, gradient)
        weight -= 1.0 + step
        assert float(model.weight[0]) == weight


def test_nothing_is_written_while_the_clock_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []

    def put(value: Any, layout: Any) -> Any:
        writes.append(int(value))
        return put_array(value, layout)

    monkeypatch.setattr("diloco_jax.adapters.maxtext.clock.put_array", put)
    optimizer = nnx.state(state_of(optax.adamw(rate))[1])
    clock = OptimizerClock(optimizer)
    for step in (5, 6, 7, 9, 10):
        clock.set(optimizer, step)
    assert writes == [5, 9]
    clock.forget()
    clock.set(optimizer, 11)
    assert writes == [5, 9, 11]


def test_an_optimizer_without_a_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="no counter that a schedule reads"):
        OptimizerClock(nnx.state(state_of(optax.sgd(0.1))[1]))
