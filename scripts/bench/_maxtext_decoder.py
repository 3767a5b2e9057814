"""The training step of MaxText for the bench `decoders`, which starts this program in MaxText's environment.

The arguments are MaxText's. The program prints the number of parameters. Then it reads numbers of steps, one on each
line, makes these steps, and prints the processor time of one of them in seconds. Its lines begin with `result`.
"""

import sys
import time
from pathlib import Path
from typing import Any

import jax
import maxtext
from flax import nnx
from flax.linen import logical_axis_rules
from maxtext.trainers.pre_train import train
from maxtext.utils import sharding, train_utils


def main() -> None:
    # MaxText prints to the standard output too.
    results, sys.stdout = sys.stdout, sys.stderr
    step, parameters = prepare(sys.argv[1:])
    jax.block_until_ready(step())
    results.write(f"result {parameters}\n")
    results.flush()
    for line in sys.stdin:
        began_s = time.process_time()
        for _ in range(int(line)):
            jax.block_until_ready(step())
        results.write(f"result {(time.process_time() - began_s) / int(line)}\n")
        results.flush()


def prepare(words: list[str]) -> tuple[Any, int]:
    """Return MaxText's own compiled step on its own model and optimizer, and the number of parameters."""
    settings = Path(maxtext.__file__).parent / "configs" / "base.yml"
    config, recorder = train.initialize([train.__file__, str(settings), *words])
    _, _, layouts, _, mesh, _, _, loader, rampup, _, trained = train_utils.setup_train_loop(config, recorder)
    graph, state = nnx.split(trained)
    of_params, layouts = sharding.maybe_update_params_sharding_with_opt(config, layouts)
    program, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, state, layouts, train.train_step, train.eval_step, None, of_params
    )
    batch, held = loader.load_next_batch(rampup_manager=rampup), [state]

    def step() -> Any:
        # The program donates the state.
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            held[0], metrics = program(held[0], batch)
        return metrics

    return step, sum(leaf.size for leaf in jax.tree.leaves(nnx.state(trained.model, nnx.Param)))


if __name__ == "__main__":
    main()
