"""Evaluation of the run's model on the held-out split, by an island that trains the built-in loop's model."""

from typing import Any

import jax

from diloco_jax.protocol.messages import Score
from diloco_jax.runtime.island.evaluation import make_score
from diloco_jax.runtime.model.evaluation import Scorer, examiner_of
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.data.corpus import Source
from diloco_jax.training.state import Params, Variables


class ModelEvaluation:
    """Evaluation of the run's model, on the mesh of a blueprint with all of this island's devices."""

    def __init__(self, config: RunConfig, blueprint: Blueprint, source: Source, frozen: Variables) -> None:
        self._config = config
        self._blueprint = blueprint
        self._examiner = examiner_of(config, blueprint, lambda: source, lambda: frozen)
        # The user's scorer, created at its first use.
        self._scorer: Scorer | None = None

    def warm_up(self) -> None:
        self._examiner.warm_up()

    def __call__(self, params: Params, global_step: int, final: bool) -> Score:
        """Evaluate parameters in the layout of the trained ones; every process of the island calls it."""
        train, other = self._config.train, self._examiner.settled(params)
        batches = train.final_eval_batches if final else train.eval_batches
        found: dict[str, Any] = self._examiner.examine(params, other, batches)
        scores, reasons = dict(found["scores"]), list[str]()
        if self._config.evaluation.module and jax.process_count() > 1:
            reasons = [
                f"evaluation.module needs the model in one process, and this island has {jax.process_count()} hosts: "
                "the run continues without its numbers; `diloco eval` has them"
            ]
        elif self._config.evaluation.module:
            self._scorer = self._scorer or Scorer(self._config.evaluation)
            scores |= self._scorer.scores(lambda: self._blueprint.model(params, other), global_step)
            reasons = self._scorer.alarms
        return make_score(found["loss"], found["bits_per_byte"], found["tokens"], scores, reasons)

    def loss(self, params: Params) -> float:
        """Evaluate without the user's scorer, which may keep what it sees."""
        return float(
            self._examiner.examine(params, self._examiner.settled(params), self._config.train.eval_batches)["loss"]
        )
