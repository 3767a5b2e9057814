"""One island of the synchronous baseline for `wan vs_data_parallel`; it averages gradients in every step.

Model, optimizer, schedule and global data order are those of diloco_jax; the islands are processes of one job
(jax.distributed, gloo). The gradient travels as one bfloat16 buffer, once per step, as reduce-scatter and all-gather of
its bits: XLA sums bfloat16 all-reduces on CPUs in float32 and would send twice as much. Sums are made in float32.

It makes all steps and saves the parameters. When the file "slow" appears, it makes `timed_steps` more. Each step is a
JSON line with its seconds.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco_jax.core.kinds import kind_of
from diloco_jax.settings.text import load
from diloco_jax.training.data.corpus import load_source
from diloco_jax.training.data.order import SampleOrder
from diloco_jax.training.models.protocol import load_model, logical_axes, split_model
from diloco_jax.training.optimizers import learning_rate, make_inner
from diloco_jax.training.train_step import model_loss

AXIS = "islands"
POLL_S = 0.05


def make_exchange(count: int) -> Any:
    """Return the mean of all islands' bfloat16 buffers; each island sends and receives 2 (M - 1) / M times its size."""
    mesh = Mesh(np.array(jax.devices()), (AXIS,))

    def mean(own: jax.Array) -> jax.Array:
        parts = jax.lax.bitcast_convert_type(own, jnp.uint16).reshape(count, -1)
        same = jax.lax.all_to_all(parts, AXIS, 0, 0, tiled=True)
        total = jax.lax.bitcast_convert_type(same, jnp.bfloat16).astype(jnp.float32).sum(0) / count
        bits = jax.lax.bitcast_convert_type(total.astype(jnp.bfloat16), jnp.uint16)
        return jax.lax.bitcast_convert_type(jax.lax.all_gather(bits, AXIS, tiled=True), jnp.bfloat16)

    spec = PartitionSpec(AXIS)
    program = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False))

    def exchange(own: jax.Array) -> jax.Array:
        shape = (count * own.size,)
        shared = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), [own])
        return jax.block_until_ready(program(shared)).addressable_data(0)

    return exchange


class Replica:
    """This island's copy of the model; all islands have equal copies."""

    def __init__(self, settings: dict[str, Any]) -> None:
        config = load(settings["config"])
        self._config, self._index, self._count = config, settings["index"], settings["count"]
        model = load_model(config.model.module, config.model.args, config.seed)
        graphdef, self.params = split_model(model)
        kinds = {path: kind_of(self.params[path].shape, names) for path, names in logical_axes(model).items()}
        tx = make_inner(config.optimizer, self.params, kinds=kinds)
        self._opt_state = tx.init(self.params)
        self._order = SampleOrder(
            load_source(config.data, config.train.seq_len), config.data.shuffle_seed + config.seed
        )
        self._rate = learning_rate(config.optimizer, settings["steps"])
        self._exchange = make_exchange(self._count)
        flat, unravel = ravel_pytree(self.params)
        size = flat.size
        padding = -size % self._count

        def gradient(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
            loss, grads = jax.value_and_grad(lambda p: model_loss(graphdef, p, batch)[0])(params)
            return loss, jnp.pad(ravel_pytree(grads)[0], (0, padding)).astype(jnp.bfloat16)

        def update(params: Any, opt_state: Any, buffer: jax.Array, rate: jax.Array) -> tuple[Any, Any]:
            updates, opt_state = tx.update(unravel(buffer[:size].astype(jnp.float32)), opt_state, params)
            return {path: value + rate * updates[path] for path, value in params.items()}, opt_state

        self._gradient, self._update = jax.jit(gradient), jax.jit(update, donate_argnums=(0, 1))

    def step(self, number: int) -> dict[str, float]:
        """Make one step, and return its loss on this island's share of the batch and its times."""
        share = self._config.train.batch_size // self._count
        start = number * self._config.train.batch_size + self._index * share
        began_s = time.monotonic()
        batch = {"tokens": jnp.asarray(self._order.batch([(start, start + share)])["tokens"])}
        loss, buffer = jax.block_until_ready(self._gradient(self.params, batch))
        computed_s = time.monotonic()
        mean = self._exchange(buffer)
        exchanged_s = time.monotonic()
        rate = np.float32(self._rate(number))
        self.params, self._opt_state = jax.block_until_ready(self._update(self.params, self._opt_state, mean, rate))
        ended_s = time.monotonic()
        times = {"step_s": ended_s - began_s, "exchange_s": exchanged_s - computed_s}
        return {"step": number, "loss": float(loss), **times}


def main() -> None:
    settings = json.loads(sys.argv[1])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(settings["coordinator"], settings["count"], settings["index"])
    replica, folder, steps = Replica(settings), Path(settings["folder"]), settings["steps"]
    with (folder / f"island-{settings['index']}.jsonl").open("w", encoding="utf-8", buffering=1) as file:
        for number in range(steps):
            file.write(json.dumps(replica.step(number)) + "\n")
        if settings["index"] == 0:
            np.savez(folder / "parameters.npz", **{path: np.asarray(value) for path, value in replica.params.items()})
        file.write(json.dumps({"trained": True}) + "\n")
        while not (folder / "slow").exists():
            time.sleep(POLL_S)
        for number in range(steps, steps + settings["timed_steps"]):
            file.write(json.dumps(replica.step(number)) + "\n")
        file.write(json.dumps({"ended": True}) + "\n")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
