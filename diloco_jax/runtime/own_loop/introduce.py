"""The introduction of a user's loop to a run: it gets the run's config, and sends the model if the run has none."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from diloco_jax.core.kinds import Canonical
from diloco_jax.runtime.model.layout_text import layout_of, read_layout
from diloco_jax.runtime.records.liveness import repeats
from diloco_jax.runtime.records.signals import RefusedForGood
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import parse_text
from diloco_jax.transport.endpoints.greeting import BUSY, TOO_LATE, ask_description, offer_model
from diloco_jax.transport.link import TransportConfig, TransportError
from diloco_jax.transport.session.description import Description

log = logging.getLogger(__name__)

LOCAL = ("address", "tls_ca", "tls_certificate", "tls_key", "token_file", "allow_plaintext", "connect_timeout_s")
POLL_S = 0.2
# A syncer that has its model must start the run within this time, even with a large model or on a busy machine.
BEGINS_S = 300.0


def introduce(
    transport: TransportConfig, learner_id: str, params: Mapping[str, Any], forms: Mapping[str, Canonical]
) -> RunConfig:
    """Return the config of the run at `transport.address`, after comparing its model, or sending one if it has none.

    Args:
        params: Parameters as the loop stores them, by path.
        forms: Their canonical forms, which are compared and sent.

    Raises:
        TransportError: The syncer cannot be reached, or does not take the model.
        RefusedForGood: The run has another model; the text names the first tensor that differs.
    """
    shapes = {path: form.shape for path, form in forms.items()}
    ours = layout_of(shapes, {path: form.kind for path, form in forms.items()})
    # A model that no syncer can store is refused before anything is sent.
    read_layout(ours)
    described = ask_description(transport, learner_id)
    source = f"the config from the syncer at {transport.address}"
    # Another run's syncer may be at this address.
    log.info(f"{learner_id}: found the run {parse_text(described.config, source).name}")
    if _any_host(not described.layout):
        whole = _whole(params, forms)
        if bad := next((path for path, values in whole.items() if not np.isfinite(values).all()), None):
            raise ValueError(f"params[{bad!r}] has values that are not finite as float32 (NaN or infinite); correct it")

        size = sum(values.size for values in whole.values())

        def bring() -> str:
            log.info(f"{learner_id}: the run has no model yet; sending this model's initial values ({size:,})")
            return offer_model(transport, learner_id, ours, list(_bytes(whole)))

        described = _await_model(transport, learner_id, bring if jax.process_index() == 0 else None)
    _compare(ours, described.layout)
    config = parse_text(described.config, source)
    of_this_machine = {name: getattr(transport, name) for name in LOCAL}
    return replace(config, transport=replace(config.transport, **of_this_machine))


def _await_model(transport: TransportConfig, learner_id: str, bring: Callable[[], str] | None) -> Description:
    """Wait until the run has a model: ours, or that of another island that was faster.

    Args:
        bring: Sends our model, and returns why the syncer did not take it. Called whenever no island sends a model,
            because a faster island may fail meanwhile. None if another host of this island sends it.

    Raises:
        TransportError: The run has no model for `transport.connect_timeout_s`, or the syncer does not start within
            BEGINS_S.
        RefusedForGood: The run cannot take our model.
    """
    began_s, repeated = time.monotonic(), -1
    ends_s, reason = began_s + transport.connect_timeout_s, ""
    while True:
        try:
            described = ask_description(transport, learner_id)
            if described.layout:
                return described
            refused = bring() if bring is not None and not described.coming else ""
            if refused not in ("", BUSY, TOO_LATE):
                raise RefusedForGood(f"the run at {transport.address} cannot take this loop's model: {refused}")
            # The model may be large and its way slow, and then the syncer starts the run.
            if described.coming or bring is not None:
                ends_s = time.monotonic() + max(BEGINS_S, transport.connect_timeout_s)
        # The syncer closes one listener and opens the next.
        except TransportError as error:
            reason = reason or str(error)
        if time.monotonic() > ends_s:
            raise TransportError(
                f"the run at {transport.address} has no model yet: {reason or 'no island has sent one'}"
            )
        lasted_s = time.monotonic() - began_s
        if repeats(lasted_s) > repeated:
            repeated = repeats(lasted_s)
            since = f", for {lasted_s:.0f} s" if repeated else ""
            log.info(f"{learner_id}: waiting at {transport.address} until the syncer has the run's model{since}")
        time.sleep(POLL_S)


def _compare(ours: str, theirs: str) -> None:
    (shapes, kinds), (their_shapes, their_kinds) = read_layout(ours), read_layout(theirs)
    for path in sorted(shapes.keys() | their_shapes.keys()):
        here, there = (shapes.get(path), kinds.get(path)), (their_shapes.get(path), their_kinds.get(path))
        if here != there:
            words = [f"shape {shape}, {kind.form}" if kind else "nothing" for shape, kind in (here, there)]
            raise RefusedForGood(
                f"this loop's model is not the run's: parameter {path!r} has {words[0]} here and {words[1]} there; "
                "join with the same tree on every island (and the same axes)"
            )


def _any_host(here: bool) -> bool:
    """Return the leader's value on all processes of this island, because a collective follows."""
    if jax.process_count() == 1:
        return here
    return bool(np.asarray(multihost_utils.broadcast_one_to_all(np.array(here))))


def _whole(params: Mapping[str, Any], forms: Mapping[str, Canonical]) -> dict[str, np.ndarray]:
    """Return all canonical values in this process's memory, as float32."""
    found = {}
    for path in sorted(params):
        value = params[path]
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            value = multihost_utils.process_allgather(value, tiled=True)
        found[path] = forms[path].view(np.asarray(jax.device_get(value)).astype("<f4", copy=False))
    return found


def _bytes(values: Mapping[str, np.ndarray]) -> Iterator[memoryview]:
    for path in sorted(values):
        if math.prod(values[path].shape):
            yield np.ascontiguousarray(values[path]).reshape(-1).view(np.uint8).data
