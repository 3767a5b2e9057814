"""One small model of bytes, trained by JAX on some islands and by PyTorch on the others, from the same values and data.

DILOCO_TEST_KINDS has the library of each island in order, such as `jax,torch`. DILOCO_TEST_SEED draws the first values.
Each island writes ISLAND.json beside its run: losses, the held-out loss of the global model, and its values' digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

BATCH, LENGTH, CONTEXT, WIDTH, HIDDEN = 16, 32, 4, 16, 64
RATE = 5e-3
TEXT = np.frombuffer(b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))), np.uint8)
TRAINED = len(TEXT) - 200_000
HELD_OUT = TRAINED + 1_000 * np.arange(64)
SIZES = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH}


def windows(starts: np.ndarray) -> np.ndarray:
    return TEXT[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int64)


def load(positions: np.ndarray) -> np.ndarray:
    return windows(positions * 1_000_003 % (TRAINED - LENGTH))


def initial() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(int(os.environ.get("DILOCO_TEST_SEED", "0")))
    shapes = {
        "embed/embedding": (256, WIDTH),
        "hidden/kernel": (CONTEXT * WIDTH, HIDDEN),
        "hidden/bias": (HIDDEN,),
        "out/kernel": (HIDDEN, 256),
        "out/bias": (256,),
    }
    scale = {path: 0.0 if path.endswith("bias") else shape[0] ** -0.5 for path, shape in shapes.items()}
    scale["embed/embedding"] = 1.0
    return {path: (scale[path] * rng.standard_normal(shape)).astype(np.float32) for path, shape in shapes.items()}


def in_jax() -> tuple[str, list[float], float, dict[str, np.ndarray]]:
    import jax
    import jax.numpy as jnp
    import optax

    import diloco_jax

    tx = optax.adam(RATE)

    def loss_of(p: Any, tokens: Any) -> Any:
        x = p["embed/embedding"][tokens[:, :-1]]
        x = jnp.concatenate([jnp.pad(x, ((0, 0), (k, 0), (0, 0)))[:, : x.shape[1]] for k in range(CONTEXT)], axis=-1)
        x = jax.nn.gelu(x @ p["hidden/kernel"] + p["hidden/bias"], approximate=True)
        logits = x @ p["out/kernel"] + p["out/bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def step(p: Any, moments: Any, tokens: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(p, tokens)
        updates, moments = tx.update(gradient, moments, p)
        return optax.apply_updates(p, updates), moments, loss

    params: Any = {path: jnp.asarray(value) for path, value in initial().items()}
    losses = []
    axes = {"embed/embedding": ("vocab", None)}
    with diloco_jax.join(params=params, opt_state=tx.init(params), axes=axes, **SIZES) as island:
        params, moments = island.state().values()
        while island.training:
            params, moments, loss = step(params, moments, load(island.next_samples()))
            params = island.after_step(params, loss, opt_state=moments)
            losses.append(float(loss))
        found = island.global_params()
        return (
            island.name,
            losses,
            float(loss_of(found, windows(HELD_OUT))),
            {p: np.asarray(v) for p, v in found.items()},
        )


def in_torch() -> tuple[str, list[float], float, dict[str, np.ndarray]]:
    import torch
    from torch import nn
    from torch.nn import functional

    import diloco_jax.torch

    torch.set_num_threads(1)

    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(256, WIDTH)
            self.hidden = nn.Linear(CONTEXT * WIDTH, HIDDEN)
            self.out = nn.Linear(HIDDEN, 256)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            x = torch.cat([functional.pad(x, (0, 0, k, 0))[:, : x.shape[1]] for k in range(CONTEXT)], dim=-1)
            return self.out(functional.gelu(self.hidden(x), approximate="tanh"))

    def loss_of(model: nn.Module, tokens: np.ndarray) -> torch.Tensor:
        pairs = torch.from_numpy(tokens)
        return functional.cross_entropy(model(pairs[:, :-1]).flatten(0, 1), pairs[:, 1:].flatten())

    model = Bytes()
    names = diloco_jax.torch.like_flax(model)
    path_of = {name: target if isinstance(target, str) else target[0] for name, target in names.items()}

    def in_order(name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a kernel transposed, as its target says."""
        target = names[name]
        return value if isinstance(target, str) else value.permute(target[1])

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            in_order(name, parameter).copy_(torch.from_numpy(initial()[path_of[name]]))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    losses = []
    with diloco_jax.torch.attach(model, optimizer, names=names, **SIZES) as island:
        while island.training:
            loss = loss_of(model, load(island.next_samples()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            island.after_step(loss)
            losses.append(float(loss))
        found = island.global_params()
        model.load_state_dict(found)
        values = {path_of[name]: in_order(name, value).numpy() for name, value in found.items()}
        return island.name, losses, float(loss_of(model, windows(HELD_OUT))), values


def main() -> None:
    number = int(os.environ["DILOCO_ISLAND"].rpartition("-")[2])
    kind = os.environ["DILOCO_TEST_KINDS"].split(",")[number]
    name, losses, held_out, values = in_torch() if kind == "torch" else in_jax()
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(values[path]).tobytes() for path in sorted(values)))
    about = {"kind": kind, "losses": losses, "held_out": held_out, "digest": digest.hexdigest()}
    (Path(os.environ["DILOCO_RUN_DIR"]) / f"{name}.json").write_text(json.dumps(about))


if __name__ == "__main__":
    main()
