"""The loop of loop.py, but its arrays stay in an object; a path that is not due is never read."""

import jax
import loop

from diloco_jax.runtime.own_loop.attached import attach


class Held:
    """Parameters and moments, which each step replaces."""

    def __init__(self):
        tree = jax.jit(loop.initial, out_shardings=loop.LIES)()
        self.params = {"in/w": tree["in"]["w"], "in/b": tree["in"]["b"], "out": tree["out"]}
        self.opt_state = jax.jit(loop.TX.init)(tree)
        self.axes = {}

    def tree(self):
        return {"in": {"w": self.params["in/w"], "b": self.params["in/b"]}, "out": self.params["out"]}

    def moments(self):
        return self.opt_state

    def set_moments(self, tree):
        self.opt_state = tree


def main() -> None:
    held = Held()
    seen, due = set(), 0
    with attach(held, samples_per_step=loop.BATCH, tokens_per_step=loop.BATCH) as island:
        layouts = (loop.LIES, jax.tree.map(lambda leaf: leaf.sharding, held.opt_state), loop.WHOLE)
        train = jax.jit(loop.step, donate_argnums=(0, 1), out_shardings=layouts)
        while island.training:
            x = loop.samples(island.next_samples())
            tree, held.opt_state, loss = train(held.tree(), held.opt_state, x)
            held.params.update({"in/w": tree["in"]["w"], "in/b": tree["in"]["b"], "out": tree["out"]})
            seen |= island.due
            due += len(island.due)
            island.after_step(loss)
    mean = due / max(1, island.local_step)
    print(
        f"{island.name}: {train._cache_size()} compiled step, loss {float(loss):.4f}, {len(seen)} seen, {mean:.2f} due"
    )


if __name__ == "__main__":
    main()
