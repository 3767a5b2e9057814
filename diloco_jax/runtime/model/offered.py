"""A model that the first island brings: how it is described, what of it is refused, and where a run keeps it.

The description (`layout`) is JSON, {path: [shape, form, stack]} in ascending order of the paths; the values are
float32, little-endian, tensor after tensor in that order. Initial values are kept in the run's folder, so that a syncer
that starts again has them before it reads its tape.
"""

import json
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np

from diloco_jax.core.kinds import Form, Kind
from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.records.files import ADDRESS_FILE, OFFERED
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump_chosen
from diloco_jax.transport.greeting import LAYOUT_BYTES_MAX, Description, ModelDesk
from diloco_jax.transport.link import TransportConfig

TENSORS_MAX = 20_000
PATH_LENGTH_MAX = 500
POLL_S = 0.5

log = logging.getLogger(__name__)


class OfferedModel:
    """The model of a run whose islands' own loops bring it, as a checkpoint keeps it; ValueError if it is damaged."""

    corpus = ""  # the first learner says what islands read

    def __init__(self, kept: Path) -> None:
        self._kept = checkpoint.CheckpointReader(kept)
        self.shapes, self.kinds = read_layout(str(self._kept.meta["layout"]))

    def initial_parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Read the initial values: (path, new float32 array) by ascending path; ValueError if they are damaged."""
        return ((path, self._kept.array(checkpoint.PARAMETERS, path)) for path in self.shapes)


def layout_of(shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, Kind]) -> str:
    rows = {path: [list(shapes[path]), kinds[path].form, kinds[path].stack] for path in sorted(shapes)}
    return json.dumps(rows, separators=(",", ":"))


def read_layout(layout: str) -> tuple[dict[str, tuple[int, ...]], dict[str, Kind]]:
    """Return shapes and kinds that `layout_of` described; ValueError if it describes no model, or too many tensors."""
    if len(layout) > LAYOUT_BYTES_MAX:
        raise ValueError(f"a layout of {len(layout)} characters is too long: at most {LAYOUT_BYTES_MAX}")
    shapes, kinds = {}, {}
    try:
        rows = json.loads(layout)
        if not 0 < len(rows) <= TENSORS_MAX:
            raise ValueError(f"{len(rows)} tensors; use 1 to {TENSORS_MAX}")
        for path, (shape, form, stack) in rows.items():
            path.encode()  # half a character cannot be sent or kept
            sound = all(isinstance(n, int) and n >= 0 for n in (*shape, stack)) and stack <= len(shape)
            if not sound or form not in get_args(Form) or not 0 < len(path) <= PATH_LENGTH_MAX:
                raise ValueError(f"tensor {path[:80]!r} of shape {shape}, form {form!r} and stack {stack}")
            shapes[path], kinds[path] = tuple(shape), Kind(form, stack)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the layout describes no model: {error}") from error
    return shapes, kinds


def describe_run(config: RunConfig, layout: str) -> Description:
    """Return what a loop of the user's own needs to know of a run; files and address are those of its own machine.

    A loop of an earlier release refuses settings that it does not know, hence only those that are not the default.
    """
    here = TransportConfig()
    local = {name: getattr(here, name) for name in ("address", "tls_ca", "tls_certificate", "tls_key", "token_file")}
    return Description(dump_chosen(replace(config, transport=replace(config.transport, **local))), layout)


def offered_model(config: RunConfig, run_dir: Path, stop: threading.Event) -> OfferedModel | None:
    """Return the model of this run: the one that its folder has, or else the first that an island brings.

    The address at which islands bring it is that at which the syncer listens afterwards. None once `stop` is set;
    ValueError if the folder's model is damaged, or this machine cannot listen.
    """
    folder = run_dir / OFFERED
    for found in checkpoint.complete(folder):
        return OfferedModel(found)
    desk = ModelDesk(config.transport, describe_run(config, ""), lambda layout: _bytes_of(layout, config))
    pulse = Pulse(config.watchdog, "the wait for a model", (run_dir, "syncer"))
    pulse.phase("waiting for the first island, which brings the model")
    pulse.rest()  # islands come when there is room for them; probes see that somebody waits
    try:
        (run_dir / ADDRESS_FILE).write_text(desk.address, encoding="utf-8")
        log.info(f"waiting at {desk.address} for the first island, which brings the model")
        while (offer := desk.take(POLL_S)) is None:
            if stop.is_set():
                return None
        shapes, _ = read_layout(offer.layout)
        flat, values, start = np.frombuffer(offer.values, "<f4"), {}, 0
        for path, shape in shapes.items():
            values[path] = flat[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
        about = {"global_step": 0, "layout": offer.layout}
        kept = checkpoint.save(folder, {checkpoint.PARAMETERS: values}, about)
    finally:  # until the model is kept, islands are told that it comes
        desk.close()
        pulse.close()
    return OfferedModel(kept)


def _bytes_of(layout: str, config: RunConfig) -> int:
    """Return the size of a model's values; ValueError for a model that this run cannot take."""
    shapes, kinds = read_layout(layout)
    count, limit = sum(math.prod(shape) for shape in shapes.values()), config.syncer.parameters_max
    if count > limit:
        raise ValueError(f"the model has {count:,} parameters, the limit is {limit:,}: raise syncer.parameters_max")
    resolve(config, shapes, kinds)
    return 4 * count
