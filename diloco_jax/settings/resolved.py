"""A run after its model is known: the config and the cut of the model into fragments, fitted to each other.

A config alone does not determine how many fragments each class of tensors has; that follows from the model's shapes.
Every process of a run therefore calls `resolve` once, as soon as it knows the shapes, and passes the result on. Both
machines, the fingerprint, the merge and the wire take their settings from it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from diloco_jax.core.codec import Format, encoded_size
from diloco_jax.core.fragments import Fragment, FragmentPlan, Shape
from diloco_jax.core.kinds import Kind, members
from diloco_jax.protocol.turns import deal
from diloco_jax.settings.fingerprint import fingerprint
from diloco_jax.settings.run import RunConfig

SETTING = "protocol.sync_every"


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run's config and the cut of its model, fitted to each other. `resolve` and `of_plan` make it."""

    # `protocol` names the number of fragments of each class, which the config as written may leave open.
    config: RunConfig
    plan: FragmentPlan

    @classmethod
    def of_plan(cls, config: RunConfig, plan: FragmentPlan) -> "ResolvedRun":
        """Fit a config to a model that is cut already."""
        protocol = config.protocol.with_fragments(plan.counts)
        # A request that is repeated before its answer can be there brings every value twice.
        if protocol.resend_s < config.transport.answer_s:
            protocol = replace(protocol, resend_s=config.transport.answer_s)
        return cls(config if protocol is config.protocol else replace(config, protocol=protocol), plan)

    def fewer_fragments(self, asked: int) -> str:
        """Return why the model has fewer fragments than `protocol.num_fragments` as written; "" if it has not."""
        made = len(self.fragments)
        if made >= asked:
            return ""
        return (
            f"{made} fragments, fewer than protocol.num_fragments = {asked}: with periods by class, a class is cut "
            "only until its fragments are as large as the mean of all steps, and each fragment has a separate step"
        )

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        return self.plan.fragments

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.plan.shapes.values())

    def payload_bytes(self, format: Format) -> tuple[int, ...]:
        """Return the size of each fragment on the wire in this format, by fragment_id."""
        return tuple(encoded_size(fragment.shapes, format) for fragment in self.fragments)

    @property
    def contribution_bytes(self) -> int:
        """Return the most bytes of contributions in flight: the largest fragment of each island in tau rounds."""
        largest = max(self.payload_bytes(self.config.wire.up))
        return self._rounds_in_flight * largest * self.config.islands.count

    @property
    def version_bytes(self) -> int:
        """Return the most bytes of deltas in flight to one island: the largest fragment in tau rounds."""
        return self._rounds_in_flight * max(self.payload_bytes(self.config.wire.down))

    @property
    def _rounds_in_flight(self) -> int:
        return max(1, self.config.protocol.overlap_steps)

    def fingerprint(self, corpus: str, base: str = "") -> tuple[tuple[str, str], ...]:
        """List what a learner and the syncer must agree on.

        Args:
            corpus: name of what this process reads, "" if nothing.
            base: digest of the weights below its adapters, "" if it has none.
        """
        return fingerprint(self.config, self.plan.fingerprint, corpus, base)


def resolve(config: RunConfig, shapes: Mapping[str, Shape], kinds: Mapping[str, Kind]) -> ResolvedRun:
    """Cut the model of a run into fragments and fit the config to them. Every process of the run gets the same result.

    Args:
        shapes: shape of every tensor, by path.
        kinds: kind of every tensor, by path.

    Raises:
        ValueError: the model has too few elements for this many fragments, or a class of `protocol.sync_every` has no
            tensor.
    """
    return ResolvedRun.of_plan(config, _cut(config, shapes, kinds))


def _cut(config: RunConfig, shapes: Mapping[str, Shape], kinds: Mapping[str, Kind]) -> FragmentPlan:
    protocol = config.protocol
    groups = protocol.groups
    filled = [path for path, shape in sorted(shapes.items()) if math.prod(shape)]
    paths = members(filled, groups.classes, SETTING)
    if not protocol.by_class:
        return config.fragments.plan(shapes, kinds, protocol.num_fragments)
    sizes = [sum(math.prod(shapes[path]) for path in members_of_class) for members_of_class in paths]
    counts = protocol.class_fragments or deal(sizes, groups, protocol.num_fragments)
    for names, size, count in zip(groups.classes, sizes, counts, strict=True):
        if bool(size) != bool(count):
            raise ValueError(
                f"protocol.class_fragments gives {count} fragments to {'+'.join(names)}, which has {size} elements; "
                "leave it out to have the numbers chosen"
            )
    return config.fragments.plan(shapes, kinds, sum(counts), tuple(zip(paths, counts, strict=True)))
