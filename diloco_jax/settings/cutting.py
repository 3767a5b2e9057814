"""The cut of a run's model into fragments: where the table of turns (protocol) and the tensors (core) meet."""

import math
from collections.abc import Mapping
from dataclasses import replace

from diloco_jax.core.fragments import FragmentPlan, Shape
from diloco_jax.core.kinds import Kind, members
from diloco_jax.protocol.turns import deal
from diloco_jax.settings.run import RunConfig

SETTING = "protocol.sync_every"


def cut(config: RunConfig, shapes: Mapping[str, Shape], kinds: Mapping[str, Kind]) -> FragmentPlan:
    """Cut a model into the fragments of a run. Every process of the run computes the same.

    ValueError if it cannot be cut into so many, or a class of `protocol.sync_every` has no tensor.
    """
    protocol = config.protocol
    groups = protocol.groups
    filled = [path for path, shape in sorted(shapes.items()) if math.prod(shape)]
    paths = members(filled, groups.classes, SETTING)
    if not protocol.by_class:
        return config.fragments.plan(shapes, kinds, protocol.num_fragments)
    sizes = [sum(math.prod(shapes[path]) for path in part) for part in paths]
    counts = protocol.class_fragments or deal(sizes, groups, protocol.num_fragments)
    for names, size, count in zip(groups.classes, sizes, counts, strict=True):
        if bool(size) != bool(count):
            raise ValueError(
                f"protocol.class_fragments gives {count} fragments to {'+'.join(names)}, which has {size} elements; "
                "leave it out to have the numbers chosen"
            )
    return config.fragments.plan(shapes, kinds, sum(counts), tuple(zip(paths, counts, strict=True)))


def settle(config: RunConfig, plan: FragmentPlan) -> RunConfig:
    """Return the config with what its machines must know of the plan: the fragments of each class of tensors."""
    return replace(config, protocol=config.protocol.settled(plan.counts)) if len(plan.counts) > 1 else config
