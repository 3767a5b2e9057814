"""Real trainers of tunix in one process with a real syncer; test_tunix.py runs this file in tunix' environment."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import qwix
import yaml
from flax import nnx
from orbax import checkpoint as ocp
from tunix.distillation import strategies
from tunix.distillation.distillation_trainer import DistillationTrainer
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.sft import hooks
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

import diloco_jax.tunix
from diloco_jax.runtime.records.telemetry import read_metrics
from docs.examples.tunix_sft import inputs
from tests.limits import SLOW_HANGS_S
from tests.runtime.helpers import start, wait_for

# The models of tunix promote ranks; tests of ours do not.
jax.config.update("jax_numpy_rank_promotion", "allow")
BATCH, LENGTH = 8, 8
TINY = ModelConfig(
    num_layers=2,
    vocab_size=32,
    embed_dim=16,
    hidden_dim=32,
    num_heads=2,
    head_dim=8,
    num_kv_heads=1,
    rope_theta=10_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
)
SIZES = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH}


@contextlib.contextmanager
def syncer(folder: Path, steps: int, eval_every: int = 0) -> Iterator[dict[str, Any]]:
    """Start a syncer; what `attach` needs to join it. At the end it has made all its global steps."""
    folder.mkdir()
    config = {
        "name": "inside",
        "islands": {"count": 1, "devices": 1},
        "model": {"module": "own"},
        "train": {"steps": steps, "eval_every": eval_every},
        # With this protocol every value is merged and adopted before the next step.
        "protocol": {"sync_every": 3, "num_fragments": 3, "overlap_steps": 0},
        "trackers": [],
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    process, address = start("syncer", folder / "own.yaml", "--run-dir", folder / "run"), folder / "run/syncer.address"
    try:
        wait_for(lambda: process.poll() is not None or (address.exists() and address.read_text()), "an address")
        yield {"syncer": address.read_text(), "name": "a", "run_dir": folder / "run", **SIZES}
        output, _ = process.communicate(timeout=SLOW_HANGS_S)
        assert process.returncode == 0, output
        assert json.loads((folder / "run" / "summary.json").read_text())["complete"]
    finally:
        process.kill()
        process.communicate()


def load(positions: np.ndarray) -> TrainingInput:
    """Return samples that count upwards from their position."""
    tokens = ((positions[:, None] + np.arange(LENGTH)) % TINY.vocab_size).astype(np.int32)
    return TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))


EVAL = [load(np.arange(8) * 5), load(np.arange(8) * 3)]


def make_model(seed: int = 0, mesh: jax.sharding.Mesh | None = None) -> Qwen3:
    model = Qwen3(TINY, rngs=nnx.Rngs(seed))
    if mesh is not None:
        state = nnx.state(model)
        nnx.update(model, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
    return model


def make_trainer(model: Any, **config: Any) -> PeftTrainer:
    made = PeftTrainer(model, optax.adamw(1e-2), TrainingConfig(eval_every_n_steps=1000, **config))
    return made.with_gen_model_input_fn(inputs)


def loss_of(trainer: PeftTrainer, batch: TrainingInput) -> float:
    return float(trainer.loss_fn(trainer.model, **inputs(batch)))


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "run" / "metrics.jsonl") if row["kind"] == kind]


def trained(trainer: PeftTrainer) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(trainer.model, trainer.optimizer.wrt))
    return {"/".join(map(str, keys)): np.asarray(leaf.get_value()) for keys, leaf in state}


class Counts(hooks.TrainingHooks):
    """A user's hooks, counted."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.of[name] = self.of.get(name, 0) + 1

    def on_train_start(self, train_ctx: Any) -> None:
        self._count("start")

    def on_train_end(self, train_ctx: Any) -> None:
        self._count("end")

    def on_train_step_start(self, train_ctx: Any) -> None:
        self._count("step_start")

    def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float) -> None:
        self._count("step_end")

    def on_eval_step_start(self, train_ctx: Any) -> None:
        self._count("eval_start")

    def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
        self._count("eval_end")


@pytest.mark.parametrize("interval", [1, 1000], ids=["saved by its interval", "saved at the end"])
def test_updates_are_steps_the_users_hooks_are_called_and_tunix_saves_the_global_model(
    tmp_path: Path, interval: int
) -> None:
    saves = {
        "checkpoint_root_directory": str(tmp_path / "saves"),
        "checkpointing_options": ocp.CheckpointManagerOptions(
            save_interval_steps=interval, enable_async_checkpointing=False
        ),
    }
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("fsdp", "tp"))
    options = {"gradient_accumulation_steps": 2, "max_steps": 3, **saves}
    first, mine, loaded = tmp_path / "first", Counts(), list[TrainingInput]()
    with mesh:
        trainer = make_trainer(make_model(mesh=mesh), **options)
        trainer.with_training_hooks(mine)

        def recorded(positions: np.ndarray) -> TrainingInput:
            loaded.append(load(positions))
            return loaded[-1]

        with (
            syncer(first, 12, eval_every=6) as where,
            diloco_jax.tunix.attach(trainer, eval_ds=EVAL, **where) as island,
        ):
            trainer.train(island.batches(recorded))
            assert island.local_step == trainer.train_steps >= 12, "max_steps=3 is the run's matter"
            assert len(loaded) == 2 * trainer.train_steps
            found = {path: np.asarray(value) for path, value in island.global_params().items()}
    assert [len(batch.input_tokens) for batch in loaded] == [4] * len(loaded)
    assert trainer.jit_train_and_eval_step.__self__ is trainer
    reported = rows(first, "step")
    fresh = make_trainer(make_model())
    np.testing.assert_allclose(reported[0]["loss"], np.mean([loss_of(fresh, each) for each in loaded[:2]]), rtol=1e-4)
    assert reported[-1]["loss"] < reported[0]["loss"]
    for path, value in trained(trainer).items():
        np.testing.assert_array_equal(value, found[path], err_msg=path)
    evaluated = rows(first, "eval")
    np.testing.assert_allclose(evaluated[-1]["loss"], np.mean([loss_of(trainer, each) for each in EVAL]), rtol=1e-4)
    steps = len(loaded)
    counted = {"start": 1, "end": 1, "step_start": steps, "step_end": trainer.train_steps}
    assert mine.of == counted | {"eval_start": 2 * len(evaluated), "eval_end": len(evaluated)}

    # tunix' last checkpoint has the global model. A trainer that restores it skips as many batches as it has seen.
    restored = make_trainer(make_model(), **options)
    assert restored.train_steps == trainer.train_steps
    for path, value in trained(restored).items():
        np.testing.assert_array_equal(value, found[path], err_msg=path)
    loaded.clear()
    with syncer(tmp_path / "second", 3) as where, diloco_jax.tunix.attach(restored, **where) as island:
        restored.train(island.batches(recorded))
        assert len(loaded) == 2 * island.local_step > 0, "a skipped batch is not loaded"
    assert rows(tmp_path / "second", "step")[0]["loss"] < 0.9 * reported[0]["loss"]


class Data(hooks.DataHooks):
    """A user's own data, without end; evaluations have one batch."""

    def __init__(self) -> None:
        self.train_batch: Any = None
        self._evaluated = False

    def load_next_train_batch(self, train_ctx: Any) -> Any:
        self.train_batch = load(np.random.default_rng(0).integers(0, 32, BATCH))
        return self.train_batch

    def load_next_eval_batch(self, train_ctx: Any) -> Any:
        self._evaluated = not self._evaluated
        return EVAL[0] if self._evaluated else None


def test_data_hooks_end_with_the_run(tmp_path: Path) -> None:
    model = make_model()
    provider = qwix.LoraProvider(module_path=".*(q_proj|down_proj)", rank=2, alpha=4.0)
    model = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **model.get_model_input())
    trainer, data = make_trainer(model), Data()
    base = {
        str(keys): np.asarray(leaf.get_value())
        for keys, leaf in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.LoRAParam)))
    }
    trainer.with_data_hooks(data)
    folder = tmp_path / "run"
    with (
        syncer(folder, 6, eval_every=3) as where,
        diloco_jax.tunix.attach(trainer, data="own", eval_ds=EVAL, **where) as island,
    ):
        assert trainer.data_hooks.train_batch is None, "attributes are the user's"
        with pytest.raises(ValueError, match="is an island already"):
            diloco_jax.tunix.attach(trainer, **where)
        trainer.train(())
        assert trainer.train_steps == island.local_step >= 6 and trainer.data_hooks.train_batch is data.train_batch
        assert all("_lora_" in path for path in island.global_params())
    assert trainer.data_hooks is data
    assert len(rows(folder, "eval")) >= 1
    after = {
        str(keys): np.asarray(leaf.get_value())
        for keys, leaf in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.LoRAParam)))
    }
    for path, value in base.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)


def logits(model: Any, input_tokens: jax.Array, input_mask: jax.Array) -> jax.Array:
    return model(
        cache=None,
        **{key: value for key, value in inputs(load_like(input_tokens, input_mask)).items() if key != "input_mask"},
    )[0]


def load_like(tokens: Any, mask: Any) -> TrainingInput:
    return TrainingInput(input_tokens=tokens, input_mask=mask)


def test_a_distillation_trains_the_student_alone(tmp_path: Path) -> None:
    student, teacher = make_model(0), make_model(1)
    labels = lambda input_tokens, **_: jax.nn.one_hot(input_tokens, TINY.vocab_size)  # noqa: E731
    strategy = strategies.LogitStrategy(student_forward_fn=logits, teacher_forward_fn=logits, labels_fn=labels)
    config = TrainingConfig(eval_every_n_steps=1000)
    trainer = DistillationTrainer(student, teacher, strategy, optax.adamw(1e-2), config)
    trainer = trainer.with_gen_model_input_fn(
        lambda batch: {"input_tokens": batch.input_tokens, "input_mask": batch.input_mask}
    )
    folder = tmp_path / "run"
    with syncer(folder, 6, eval_every=3) as where, diloco_jax.tunix.attach(trainer, eval_ds=EVAL, **where) as island:
        trainer.train(island.batches(load))
        assert island.global_params().keys() == trained(make_trainer(make_model())).keys()
    reported = rows(folder, "step")
    assert reported[-1]["loss"] < reported[0]["loss"] and rows(folder, "eval")


def test_data_that_does_not_end_with_the_run_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trainer = make_trainer(make_model())
    with syncer(folder, 3) as where, diloco_jax.tunix.attach(trainer, **where) as island:
        with pytest.raises(ValueError, match=r"call train\(island\.batches"):
            trainer.train([EVAL[0]])
        trainer.train(island.batches(load))
