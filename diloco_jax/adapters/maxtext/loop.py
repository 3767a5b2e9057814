"""MaxText's training loop as an island: what happens before and after each of its iterations.

MaxText's `train_loop` calls the global `training_loop_iteration` of its module with three dicts. An `IslandLoop` takes
the place of that function.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
from flax import nnx
from maxtext.utils.exceptions import StopTraining

from diloco_jax.adapters.maxtext.batches import Leases, position_of
from diloco_jax.adapters.maxtext.clock import OptimizerClock
from diloco_jax.adapters.maxtext.evaluation import MaxTextEvaluation
from diloco_jax.adapters.nnx import attach

Vars = dict[str, Any]
Iteration = Callable[[Vars, Vars, Vars], Any]

log = logging.getLogger(__name__)


class IslandLoop:
    """An iteration of MaxText's loop, with what makes the loop an island.

    Args:
        iteration: MaxText's `training_loop_iteration`.
        stack: Leaves the run when it is closed.
        leases: Positions for MaxText's pipeline, if the island reads leased data.
        own_steps: Whether the user's `steps` ends the loop before the run's end.
        options: Options of `diloco_jax.join` that MaxText does not know, such as `syncer` and `name`.

    Attributes:
        trouble: Why MaxText ended before the run; "" if it did not.
    """

    def __init__(
        self, iteration: Iteration, stack: ExitStack, leases: Leases | None, own_steps: bool, options: dict[str, Any]
    ) -> None:
        self._iteration = iteration
        self._stack = stack
        self._leases = leases
        self._own_steps = own_steps
        self._options = options
        self._island: Any = None
        self._clock: Any = None
        self.trouble = ""

    def __call__(self, device: Vars, host: Vars, fixed: Vars) -> Any:
        """Make one step of MaxText's loop, and one of the island; arguments as for MaxText's function."""
        if self._island is None:
            self._join(device, host, fixed)
        island = self._island
        if not island.training:
            raise StopTraining("the run is complete, or this island was drained")
        if self._leases is not None:
            self._leases.start_step(jax.process_index(), jax.process_count())
        if fixed["config"].skip_step_on_spikes:
            self._clock.forget()
        self._clock.set(device["state"].optimizer, island.global_step)
        try:
            metrics = self._iteration(device, host, fixed)
        except StopTraining as error:
            self.trouble = str(error)
            raise
        if self._leases is not None:
            self._leases.check_finished()
        scalars = metrics["scalar"]
        island.after_step({"loss": scalars["learning/loss"], "total_weights": scalars["learning/total_weights"]})
        if not island.training:
            # Then MaxText's loop ends in good order: it saves and closes what it has opened.
            fixed["steps"] = host["step"] + 1
        return metrics

    def _join(self, device: Vars, host: Vars, fixed: Vars) -> None:
        config = fixed["config"]
        size = int(config.global_batch_size_to_train_on)
        evaluates = device["p_eval_step"] is not None and host["eval_data_iterator"] is not None
        options: dict[str, Any] = {
            "samples_per_step": size,
            "tokens_per_step": size * int(config.max_target_length),
            "flops_per_step": _flops(host),
            "data": "own" if self._leases is None else "leased",
            "corpus": "" if self._leases is None else self._leases.corpus,
            "evaluate": MaxTextEvaluation(device, host, fixed) if evaluates else None,
            "loader": None if self._leases is not None else _loader(host["data_iterator"], config.dataset_type.value),
            "filter": nnx.LoRAParam if config.lora.enable_lora else nnx.Param,
        }
        self._island = self._stack.enter_context(
            attach(lambda: device["state"].model, lambda: device["state"].optimizer, **options, **self._options)
        )
        if self._leases is not None:
            self._leases.next_samples = self._island.next_samples
        # This waits for the run's model, and restores the island's own state.
        if not self._island.training:
            return
        self._clock = OptimizerClock(device["state"].optimizer)
        self._continue(device, host, fixed)

    def _continue(self, device: Vars, host: Vars, fixed: Vars) -> None:
        """Let MaxText's loop continue with the island's own number of steps, until the run ends."""
        own = int(device["state"].optimizer.step.get_raw_value())
        log.info(f"{self._island.name}: own step {own}, global step {self._island.global_step}")
        host["step"] = fixed["start_step"] = own
        if not self._own_steps:
            fixed["steps"] = sys.maxsize
        # The syncer requests evaluations, and they are of the global model.
        fixed["eval_interval"] = -1
        logger = host["metric_logger_instance"]
        schedule = logger.learning_rate_schedule
        logger.learning_rate_schedule = lambda _: schedule(self._island.global_step)


def _loader(iterator: Any, dataset_type: str) -> Any:
    # MaxText's source for `hf` takes the next record of a stream, whatever the position is.
    found = position_of(iterator) if dataset_type != "hf" else None
    if found is None:
        log.warning(
            f"dataset_type={dataset_type} of MaxText has no position: after a failure this island reads its data from "
            "the start; use dataset_type=grain"
        )
    return found


def _flops(host: Vars) -> float:
    """Return MaxText's own count of operations of one step on all devices; 0 if it has none."""
    per_device = host["metric_logger_instance"].metadata.get("per_device_tflops", 0.0)
    return float(per_device) * 1e12 * jax.device_count()
