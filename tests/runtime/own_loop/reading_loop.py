"""The loop of loop.py with its own data; DILOCO_TEST_LOADERS names a kind of loader per island. Reads go to files.

A line of a file is the incarnation, its step, and the samples of the batch. It is written before the step.
"""

import os
import time

import jax
import loop
import numpy as np

import diloco_jax

SAMPLES = 40_000


class Numbers:
    """The numbers of all samples; the text of it is the same in every process."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, at):
        return np.asarray(at)

    def __repr__(self):
        return "Numbers()"


def grain_dataset(index, count):
    import grain

    shard = grain.MapDataset.range(SAMPLES)[index::count].shuffle(seed=index).repeat(None)
    return shard.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)).batch(loop.BATCH)


def grain_loader(index, count):
    import grain

    options = grain.sharding.ShardOptions(index, count, drop_remainder=True)
    sampler = grain.samplers.IndexSampler(SAMPLES, shard_options=options, shuffle=True, seed=index, num_epochs=None)
    steps = [grain.transforms.Batch(loop.BATCH)]
    return grain.DataLoader(data_source=Numbers(), sampler=sampler, operations=steps)


def tensorflow(index, count):
    import tensorflow

    shard = tensorflow.data.Dataset.range(SAMPLES).shard(count, index).shuffle(64, seed=1).repeat()
    return shard.batch(loop.BATCH).prefetch(4)


def hugging_face(index, count):
    import datasets

    shards = [range(start, start + SAMPLES // 8) for start in range(0, SAMPLES, SAMPLES // 8)]
    rows = datasets.IterableDataset.from_generator(numbers_of, gen_kwargs={"shards": shards})
    return rows.shard(count, index).repeat(None).batch(loop.BATCH)


def numbers_of(shards):
    for shard in shards:
        for number in shard:
            yield {"number": number}


def torchdata(index, count):
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    shard = range(index, SAMPLES, count)
    return StatefulDataLoader(shard, loop.BATCH, shuffle=True, generator=torch.Generator().manual_seed(index))


def batches(index, count, incarnation=0):
    kinds = os.environ.get("DILOCO_TEST_LOADERS", "grain_dataset,grain_loader").split(",")
    return globals()[kinds[index]](index, count)


def numbers(batch):
    return np.asarray(batch["number"] if isinstance(batch, dict) else batch).tolist()


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
                read = numbers(next(island.loader))
                print(island.incarnation, island.local_step, *read, file=file, flush=True)
                params, opt_state, loss = train(params, opt_state, loop.samples(read))
                params = island.after_step(params, loss, opt_state=opt_state)
                time.sleep(loop.PACE_S)
    print(f"{island.name} had shard {island.index} of {island.count}")


if __name__ == "__main__":
    main()
