"""Whole rounds of several islands and a global model, with everything but processes, messages and training.

What training would do is said by the test: how far each island's parameters move between two adoptions.
"""

from collections.abc import Mapping
from functools import cache

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco_jax.core import codec
from diloco_jax.core.fragments import Fragment, FragmentPlan, plan_fragments
from diloco_jax.core.merge import MergeConfig, Method
from diloco_jax.core.outer import OuterConfig
from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.protocol.messages import NO_VERSION
from diloco_jax.runtime.island.adoptions import Adoptions, Values
from diloco_jax.runtime.model.global_model import Merged
from diloco_jax.settings.run import AdoptConfig
from diloco_jax.training.exchange.exchange import AdoptMode, Exchange
from diloco_jax.training.exchange.outgoing import HeldFragment, StagedFragment
from diloco_jax.training.sharding import put_array
from tests.runtime.models import model_of

Arrays = Mapping[str, np.ndarray]


@cache
def sharding() -> NamedSharding:
    """Everything on one device."""
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())


@cache
def exchange(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], dtype: np.dtype, up: codec.Format, rebase: bool
) -> Exchange:
    """Make an exchange whose programs are compiled once; each test sets what its island holds."""
    tensors = {path: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding()) for path, shape in shapes}
    return Exchange(tensors, up, rebase)


class IslandOf:
    """Island with parameters of one dtype on one device, and its exchange.

    Args:
        initial: values by path, float32.
    """

    def __init__(
        self, initial: Arrays, dtype: np.dtype, plan: FragmentPlan, up: codec.Format, how: AdoptConfig
    ) -> None:
        self._dtype = dtype
        shapes = tuple((path, value.shape) for path, value in initial.items())
        self._shared = exchange(shapes, dtype, up, how.mode == "rebase")
        self._held: dict[int, HeldFragment] = {}
        self._fragments = plan.fragments
        self.adoptions = Adoptions(self, plan.fragments, how)
        self.params = {path: put_array(value.astype(dtype), sharding()) for path, value in initial.items()}

    @property
    def _exchange(self) -> Exchange:
        self._shared.held = self._held
        return self._shared

    def values(self) -> dict[str, np.ndarray]:
        """Copies of the parameters, in their dtype."""
        return {path: np.array(value) for path, value in self.params.items()}

    def put(self, values: Arrays) -> None:
        """Training has led here."""
        self.params = {path: put_array(np.asarray(value, self._dtype), sharding()) for path, value in values.items()}

    def adopt(
        self, fragment: Fragment, values: Values, *, mode: AdoptMode, alpha: float, sent: StagedFragment | None
    ) -> None:
        """Adopt as ExchangedState does."""
        self.params |= self._exchange.adopt(self.params, fragment, values, mode, alpha, sent)

    def send(self, fragment_id: int, global_step: int) -> StagedFragment:
        """Give the fragment as it is now to a round."""
        self.adoptions.unstage_all(fragment_id)
        staged = self._exchange.stage(self.params, self._fragments[fragment_id])
        self.adoptions.staged[fragment_id, global_step] = staged
        return self.adoptions.take_for_round(fragment_id, global_step, global_step)


class Rounds:
    """Islands and their global model.

    Args:
        initial: values by path, float32.
        fragments: number of them.
    """

    def __init__(
        self,
        initial: Arrays,
        learners: int = 4,
        *,
        dtype: str = "float32",
        up: codec.Format = "float32",
        down: codec.Format = "float32",
        how: AdoptConfig | None = None,
        merge: Method = "rda",
        fragments: int = 1,
    ) -> None:
        plan = plan_fragments({path: value.shape for path, value in initial.items()}, fragments)
        plain = OuterConfig(learning_rate=1.0, momentum=0.0)
        self.model = model_of(plan, initial, plain, MergeConfig(method=merge), up=up, down=down)
        self.plan = plan
        adopt = how or AdoptConfig()
        self.islands = [IslandOf(initial, np.dtype(dtype), plan, up, adopt) for _ in range(learners)]
        self.round = 0
        self.merged_rounds = [[NO_VERSION] * fragments for _ in range(learners)]
        self._staged: list[StagedFragment] = []
        for number in range(fragments):
            self._broadcast(number)

    def _broadcast(self, fragment_id: int) -> None:
        values = self.model.slices(self.model.capture(), fragment_id)
        for island, merged in zip(self.islands, self.merged_rounds, strict=True):
            island.adoptions.adopt(fragment_id, self.model.versions[fragment_id], merged[fragment_id], values)

    def parameters(self) -> dict[str, np.ndarray]:
        """Return those of the global model, float32."""
        return self.model.parameters()

    def send(self, fragment_id: int = 0) -> None:
        """Open a round; every island contributes its current value."""
        self.round += 1
        self._staged = [island.send(fragment_id, self.round) for island in self.islands]

    def merge(self, fragment_id: int = 0) -> Merged:
        """The round ends: merge, publish, and let everybody adopt, unless nothing could be used."""
        base = self.model.versions[fragment_id]
        names = [str(number) for number in range(len(self.islands))]
        parts = tuple(Contribution(name, self.round, 1, 64, base, 4) for name in names)
        payloads = {name: encoded(staged) for name, staged in zip(names, self._staged, strict=True)}
        merged = self.model.merge(Merge(self.round, fragment_id, parts), payloads)
        if merged.state is not None:
            self.model.publish(merged)
            for name in names:
                if name not in merged.excluded:
                    self.merged_rounds[int(name)][fragment_id] = self.round
            self._broadcast(fragment_id)
        return merged

    def step_norm(self, before: Arrays) -> float:
        """Return the norm of the change of the global model."""
        after = self.parameters()
        return float(np.sqrt(sum(((after[path] - value).astype(float) ** 2).sum() for path, value in before.items())))


def encoded(staged: StagedFragment) -> bytes:
    """Return its payload; empty if a value is not finite and the format cannot express that."""
    try:
        payload = staged.encode()
    except ValueError:
        return b""
    assert isinstance(payload, bytes), "one process has all devices"
    return payload
