"""The interface of a model: the methods that it must have, how it is loaded, and how its parameters are named.

A model is any `flax.nnx.Module` with two methods (`TrainableModel`). There is no registry; a configuration names the
class as `package.module:Class`. Parameters are a flat dict from path to array, for example `blocks/0/down/kernel`, in
the order of `flax.nnx`. Other variables of a module are described in variables.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, get_args, get_type_hints, runtime_checkable

from flax import nnx
from jaxtyping import Array, Float

from diloco_jax.training.models.config import OWN, LoraConfig
from diloco_jax.training.models.lora import adapt
from diloco_jax.training.named import load_named
from diloco_jax.training.sharding import LogicalAxes
from diloco_jax.training.state import Batch, Metrics, Params
from diloco_jax.training.variables import path_of, prepare

# The static structure of a module.
GraphDef = nnx.GraphDef[Any]
T = TypeVar("T")


@runtime_checkable
class TrainableModel(Protocol):
    """The interface of a model. Derive from `flax.nnx.Module` and implement these two methods.

    Only variables of type `nnx.Param` are trained and exchanged. Random streams are created again for every step; other
    variables, such as batch statistics, stay on the island, and `Frozen` ones never change (variables.py). In training,
    `loss` runs in the mode that `from_config` set, for Flax's layers training mode; in an evaluation it runs after
    `Module.eval`. Variables may have logical axis names (`nnx.with_partitioning(init, ("embed", "mlp"))`); variables
    without names are replicated.
    """

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> nnx.Module:
        """Build the module; `args` is `model.args` of the configuration."""
        ...

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        """Return the mean loss per predicted token in nats, and further scalars to log.

        A scalar named `weight` is the number of predictions; means over several batches are weighted by it.
        """
        ...


def config_from_args(config_class: type[T], args: Mapping[str, Any], where: str = "model.args") -> T:
    """Make a dataclass from untyped arguments; ValueError as `typed_args`."""
    return config_class(**typed_args(config_class, args, where))


def typed_args(config_class: type, args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return untyped arguments of a dataclass with the types of its fields.

    Raises:
      ValueError: a key is unknown, or a value's type is not that of the field's default.
    """
    defaults = {
        f.name: f.default_factory() if f.default is MISSING and f.default_factory is not MISSING else f.default
        for f in fields(config_class)
    }
    typed = dict[str, Any]()
    for key, value in args.items():
        if key not in defaults:
            near = get_close_matches(str(key), defaults, 1)
            advice = f"did you mean {where}.{near[0]}?" if near else f"known keys: {', '.join(sorted(defaults))}"
            raise ValueError(f"{where}.{key} is unknown (value {value!r}); {advice}")
        wanted: Any = type(defaults[key])
        accepted: tuple[type, ...] = {float: (float, int), tuple: (tuple, list)}.get(wanted, (wanted,))
        if isinstance(defaults[key], Mapping):
            wanted, accepted = dict, (Mapping,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"{where}.{key} is {value!r}, a {type(value).__name__}; it must be a {wanted.__name__}")
        if wanted is tuple and (element := get_args(get_type_hints(config_class)[key])[:1]) in ((str,), (float,)):
            _check_elements(args[key], element[0], f"{where}.{key}")
        try:
            typed[key] = wanted(value) if wanted in (float, tuple) else value
        except OverflowError as error:
            raise ValueError(f"{where}.{key} is a whole number too large for a float; use at most 1e308") from error
    return typed


def _check_elements(values: Sequence[Any], wanted: type, where: str) -> None:
    """Raise ValueError if an element of a list has another type than `wanted`; whole numbers are floats too."""
    accepted = (float, int) if wanted is float else (wanted,)
    for number, value in enumerate(values):
        if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(
                f"{where}[{number}] is {value!r:.80}, a {type(value).__name__}; it must be a {wanted.__name__} (text "
                "needs quotes in YAML if it reads as a number or as true or false)"
            )


def find_model(module: str) -> type[nnx.Module]:
    """Import `package.module:Class` and check that it can be trained.

    Raises:
      ValueError: it cannot be imported, is not an `nnx.Module`, or lacks a method of `TrainableModel`.
    """
    if module == OWN:
        raise ValueError(
            "model.module is own, so only the islands' own loops know the model (docs/join.md); to build it here, "
            "name it as package.module:Class"
        )
    found = load_named("model.module", module)
    if not (isinstance(found, type) and issubclass(found, nnx.Module)):
        raise ValueError(f"model.module '{module}' is not a flax.nnx.Module class; derive it from nnx.Module")
    missing = [method for method in ("from_config", "loss") if not callable(getattr(found, method, None))]
    if missing:
        raise ValueError(
            f"model.module '{module}' lacks {' and '.join(missing)}; "
            "see diloco_jax.training.models.protocol.TrainableModel"
        )
    return found


def load_model(
    module: str,
    args: Mapping[str, Any],
    seed: int,
    lora: LoraConfig = LoraConfig(),  # noqa: B008  a constant
) -> nnx.Module:
    """Build the model `package.module:Class` from its arguments with parameters drawn from `seed`.

    With adapters (`lora.rank`), only they are parameters, and the model's own ones are frozen variables.

    Raises:
      ValueError: as `find_model` and `adapt`; or the module has no parameter.
    """
    # Eager sharding would require a mesh while the module is built, but the island places the parameters later.
    with nnx.use_eager_sharding(False):
        model: nnx.Module = find_model(module).from_config(args, rngs=nnx.Rngs(seed))  # type: ignore[attr-defined]
        if lora.rank:
            adapt(model, lora, seed)
    if not nnx.to_flat_state(nnx.state(model, nnx.Param)):
        raise ValueError(f"model '{module}' has no nnx.Param; there is nothing to train")
    prepare(model)
    return model


def _keys(path: str) -> tuple[int | str, ...]:
    return tuple(int(key) if key.isdigit() else key for key in path.split("/"))


def split_model(model: nnx.Module) -> tuple[GraphDef, Params]:
    """Split a module into its structure and parameters {path: array}; ValueError if a name cannot be part of a path."""
    graphdef, state = nnx.split(model)
    params: Params = {}
    for keys, variable in nnx.to_flat_state(state):
        if _keys(path_of(keys)) != keys:
            raise ValueError(f"variable {keys} has a key that is a number as text, or contains '/'; rename it")
        if isinstance(variable, nnx.Param):
            params[path_of(keys)] = variable[...]
    return graphdef, params


def join_model(graphdef: GraphDef, params: Params, other: Mapping[str, Array] = MappingProxyType({})) -> nnx.Module:
    """Join a module from its structure, its parameters and all other variables (variables.py), by path."""
    flat: dict[Any, Any] = {_keys(path): value for path, value in {**params, **other}.items()}
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def logical_axes(model: nnx.Module) -> dict[str, LogicalAxes]:
    """Return the logical axis names of every variable, with None for axes without a name."""
    axes: dict[str, LogicalAxes] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        names = variable.get_metadata().get("out_sharding")
        axes[path_of(path)] = tuple(names) if names else (None,) * getattr(variable.get_value(), "ndim", 0)
    return axes
