"""The loop of loop.py with its own data: Grain's IterDataset on island-0, its DataLoader on island-1; reads go to files.

A line of a file is the incarnation, the step of the life, and the samples of the batch. It is written before the step.
"""

import os
import time

import grain
import jax
import loop
import numpy as np

import diloco_jax

SAMPLES = 4000


class Numbers:
    """The numbers of all samples; the text of it is the same in every process."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, at):
        return np.asarray(at)

    def __repr__(self):
        return "Numbers()"


def batches(index, count, incarnation=0):
    if index % 2 == 0:
        shard = grain.MapDataset.range(SAMPLES)[index::count].shuffle(seed=index).repeat(None)
        return shard.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)).batch(loop.BATCH)
    options = grain.sharding.ShardOptions(index, count, drop_remainder=True)
    sampler = grain.samplers.IndexSampler(SAMPLES, shard_options=options, shuffle=True, seed=index, num_epochs=None)
    steps = [grain.transforms.Batch(loop.BATCH)]
    return grain.DataLoader(data_source=Numbers(), sampler=sampler, operations=steps)


def main() -> None:
    params = jax.jit(loop.initial, out_shardings=loop.LIES)()
    opt_state = jax.jit(loop.TX.init)(params)
    sizes = {"samples_per_step": loop.BATCH, "tokens_per_step": loop.BATCH}
    own = {"data": "own", "loader": batches}
    with diloco_jax.join(params=params, opt_state=opt_state, **sizes, **own) as island:
        params, opt_state = island.state().values()
        layouts = (loop.LIES, jax.tree.map(lambda leaf: leaf.sharding, opt_state), loop.WHOLE)
        train = jax.jit(loop.step, donate_argnums=(0, 1), out_shardings=layouts)
        with open(f"{island.name}.{jax.process_index()}.reads", "a") as file:
            while island.training:
                numbers = next(island.loader)
                print(island.incarnation, island.local_step, *numbers, file=file, flush=True)
                params, opt_state, loss = train(params, opt_state, loop.samples(numbers))
                params = island.after_step(params, loss, opt_state=opt_state)
                time.sleep(loop.PACE_S)
    print(f"{island.name} had shard {island.index} of {island.count}")


if __name__ == "__main__":
    main()
