"""The holder of a loop that keeps its arrays in Flax NNX Variables: modules, optimizers and split states."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from diloco_jax.adapters.nnx.variables import VariableArrays, by_path, logical_axes, restore, stored, variables_of
from diloco_jax.training.models.protocol import path_of

# Batch statistics, and the keys and counts of random streams, such as those of Dropout.
KEPT = (nnx.BatchStat, nnx.RngState)
# A loop may skip a step, for instance one with a non-finite gradient.
UNCHANGED_STEPS_MAX = 8


class VariableHolder:
    """Parameters that an island exchanges, and moments that stay on it, in the loop's own Variables.

    The paths of a module and of its split state are equal, and so are the exchanged models.

    Attributes:
        params: Exchanged arrays by path, such as "layers/0/kernel".
        axes: Logical names of axes by path, from the metadata `out_sharding` of Variables that have it.

    Args:
        model: Module or split state with the parameters. A function that returns it, if the loop replaces it
            (`state = train_step(state, batch)`).
        optimizer: nnx.Optimizer, or the state of one, or a tuple of it and other objects that return with the island,
            such as an nnx.EMA and metrics; or a function that returns it. None: it stays with the loop.
        filter: nnx filter of trained parameters, which are exchanged and merged.
        average: nnx filter of Variables that are exchanged and merged with the parameters, such as nnx.BatchStat.
        keep: nnx filter of the other Variables of the model that are saved with the optimizer.

    Raises:
        ValueError: The filter fits no Variable, two Variables have one path, or an argument is another object.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        filter: Any = nnx.Param,
        average: Any = (),
        keep: Any = KEPT,
    ) -> None:
        self._model = _function(model)
        self._optimizer = None if optimizer is None else _function(optimizer)
        exchanged = nnx.filterlib.to_predicate((filter, average))
        self._kept: Callable[..., bool] = nnx.filterlib.to_predicate(nnx.All(keep, nnx.Not((filter, average))))
        found = {keys: leaf for keys, leaf in variables_of(self._model()).items() if exchanged(keys, leaf)}
        if not found:
            raise ValueError(
                f"no Variable of the model fits filter={filter}; give the filter that the optimizer trains"
            )
        # Whether batch statistics are merged with the parameters.
        self.averages_statistics = any(isinstance(leaf, nnx.BatchStat) for leaf in found.values())
        paths = by_path(found)
        # Steps without a change, until the first change.
        self._unchanged: int | None = 0
        self.params = VariableArrays(self._model, paths)
        self.axes = {path: names for path, keys in paths.items() if (names := logical_axes(found[keys]))}

    @property
    def model(self) -> Any:
        """Return the module or the split state that the loop trains now."""
        return self._model()

    def moments(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state and the model's kept Variables, by path."""
        return {part: {path: stored(leaf) for path, leaf in found.items()} for part, found in self._moments().items()}

    def set_moments(self, tree: dict[str, dict[str, Any]]) -> None:
        """Write what `moments` returned, in this or an earlier process, into the Variables."""
        for part, found in self._moments().items():
            for path, leaf in found.items():
                restore(leaf, tree[part][path])

    def check_trained(self) -> None:
        """Check after a step that the model changes; ValueError if no step has changed an array since the island began.

        The check ends with the first change that it sees.
        """
        if self._unchanged is None:
            return
        if self.params.changed():
            self._unchanged = None
            return
        self._unchanged += 1
        if self._unchanged >= UNCHANGED_STEPS_MAX:
            raise ValueError(
                f"{self._unchanged} steps have changed no parameter of the model that attach() got: the loop trains "
                "another one. Give attach() a function that returns the present model, such as lambda: state.model"
            )

    def _moments(self) -> dict[str, dict[str, nnx.Variable[Any]]]:
        model = variables_of(self._model())
        kept = {path_of(keys): leaf for keys, leaf in model.items() if self._kept(keys, leaf)}
        if self._optimizer is None:
            return {"model": kept}
        # An nnx.ModelAndOptimizer has the model, too.
        known = {id(leaf) for leaf in model.values()}
        optimizer = variables_of(self._optimizer())
        return {
            "model": kept,
            "optimizer": {path_of(keys): leaf for keys, leaf in optimizer.items() if id(leaf) not in known},
        }


def _function(source: Any) -> Callable[[], Any]:
    """Return a function that returns the source; a module may be callable itself."""
    if isinstance(source, nnx.State | nnx.Pytree) or not callable(source):
        return lambda: source
    return source
