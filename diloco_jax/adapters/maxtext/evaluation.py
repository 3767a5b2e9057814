"""Evaluation of the global model with MaxText's eval step, on the batches of its eval iterator."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.input_pipeline.input_pipeline_utils import HFDataSource
from maxtext.utils.sharding import get_input_data_sharding

LOSS, TOKENS = "evaluation/total_loss", "evaluation/total_weights"


class MaxTextEvaluation:
    """Evaluates a model as MaxText does, with the state and the programs of its loop.

    Args:
        device: MaxText's `jax_device_state`.
        host: MaxText's `python_vars`.
        fixed: MaxText's `immutable_data`.
    """

    def __init__(self, device: Mapping[str, Any], host: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
        self._device = device
        self._host = host
        self._fixed = fixed

    def __call__(self, model: nnx.State) -> dict[str, float]:
        """Return the loss in nats per token and the number of tokens of `eval_steps` batches.

        Raises:
            ValueError: The eval iterator has no batch.
        """
        config, mesh = self._fixed["config"], self._device["mesh"]
        rules, limit = self._fixed["logical_axis_rules_for_eval"], self._fixed["eval_steps"]
        layout = get_input_data_sharding(config, mesh, rules=rules)
        state = with_model(self._device["state"], model)
        batches, scores = self._host["eval_data_iterator"], []
        start_over(batches)
        for batch in batches:
            with jax.set_mesh(mesh), logical_axis_rules(rules):
                scores.append(self._device["p_eval_step"](state, jax.device_put(batch, layout))["scalar"])
            if 0 < limit <= len(scores):
                break
        loss, tokens = (sum(float(score[name]) for score in scores) for name in (LOSS, TOKENS))
        if not tokens:
            raise ValueError("MaxText's eval iterator has no batch; check its files, or set eval_interval=-1")
        return {"loss": loss / tokens, "tokens": tokens}


def start_over(batches: Any) -> None:
    """Let an iterator of MaxText begin with its first batch."""
    source = getattr(getattr(batches, "dataloader", None), "_data_source", None)
    if isinstance(source, HFDataSource):
        # It takes the next record of a stream, also for a new iterator, unless a worker process has a copy of it.
        source.__init__(
            source.dataset,
            source.dataloading_host_index,
            source.dataloading_host_count,
            source.num_threads,
            source.max_target_lenth,
            source.data_column_names,
        )
    batches.reset()


def with_model(state: nnx.State, model: nnx.State) -> nnx.State:
    """Return MaxText's state with another model, and the same optimizer."""
    rest = [(keys, leaf) for keys, leaf in nnx.to_flat_state(state) if keys[0] != "model"]
    return nnx.from_flat_state([*((("model", *keys), leaf) for keys, leaf in nnx.to_flat_state(model)), *rest])
