"""User code that a config names as `package.module:Name`: this module imports, calls and checks it.

Each error is one sentence with the setting, its value, the mistake and the remedy. There is no registry: Python's
import finds a name, in the working directory too.
"""

import importlib
import json
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import optax

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = {PACKAGE, Path(sysconfig.get_paths()["stdlib"])}
# The most characters that are shown of an error from user code.
MESSAGE_MAX = 300


def check_setting(section: str, module: str, args: Mapping[str, Any]) -> None:
    """Check a config section's `module` ("" for none) and `args`, without importing anything.

    Raises:
      ValueError: the name is not of the form package.module:Name, or the arguments are not plain values.
    """
    package, _, name = module.partition(":")
    if (module or args) and not (package and name):
        raise ValueError(f"{section}.module is '{module}'; write it as package.module:Name")
    try:
        json.dumps(args)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{section}.args is {args}: {error}; use numbers, text, lists and mappings") from error


def check_choices(section: str, config: object) -> None:
    """Check the fields of a config that have a Literal type; ValueError names the choices."""
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal and getattr(config, name) not in (choices := get_args(hint)):
            raise ValueError(
                f"{section}.{name} is '{getattr(config, name)}'; choose from {', '.join(map(str, choices))}"
            )


def load_named(setting: str, name: str) -> Any:
    """Import the object that a setting, such as `data.module`, names as `package.module:Name`.

    Raises:
      ValueError: the import fails, or the user's code raises an error.
    """
    package, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(package), attribute)
    except ImportError as error:
        raise ValueError(f"{setting} '{name}' cannot be imported: {error}; install or correct it") from error
    # User code may raise any error, and a script may call sys.exit.
    except (Exception, SystemExit) as error:
        raise failure(setting, name, error) from error


def make_named(section: str, module: str, args: Mapping[str, Any]) -> Any:
    """Import the function or class that `<section>.module` names, and call it with `<section>.args`."""
    function = load_named(f"{section}.module", module)
    try:
        return function(**args)
    except (Exception, SystemExit) as error:
        raise failure(f"{section}.module", module, error) from error


def failure(setting: str, name: str, error: BaseException) -> ValueError:
    """Return a one-sentence error for a failure in user code, with the last file and line of that code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())[:MESSAGE_MAX]
    section, dot, _ = setting.rpartition(".")
    remedy = f"correct it, or {section}.args" if dot else "correct it"
    return ValueError(f"{setting} '{name}' fails: {type(error).__name__}: {message}{place}; {remedy}")


def is_ours(error: Exception) -> bool:
    """Return whether an error is a ValueError of this package, whose message needs no further explanation."""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, ValueError) and PACKAGE in Path(raised.filename).parents


def _is_library(filename: str) -> bool:
    path = Path(filename)
    return filename.startswith("<") or "site-packages" in path.parts or not LIBRARIES.isdisjoint(path.parents)


def make_transformation(
    section: str, module: str, args: Mapping[str, Any], params: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Make the optax transformation that user code returns, and check it on the shapes of the parameters.

    Args:
      params: anything with shape and dtype for each parameter, by path.

    Raises:
      ValueError: user code fails, or its result is not a transformation that can update these parameters.
    """
    tx = make_named(section, module, args)
    where = f"{section}.module '{module}'"
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        kind = type(tx).__name__
        raise ValueError(f"{where} returns a {kind} without init and update; return an optax.GradientTransformation")
    given = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in params.items()}
    try:
        before = jax.eval_shape(tx.init, given)
        moves, after = jax.eval_shape(tx.update, given, before, given)
    except Exception as error:
        raise failure(f"{section}.module", module, error) from error
    for what, found, wanted in (("updates", moves, given), ("state", after, before)):
        if different := sorted(_shapes(found).items() ^ _shapes(wanted).items()):
            leaf = f"{different[0][0]} of shape {different[0][1]} is in one of them only"
            raise ValueError(
                f"{where} returns another {what} structure than it was given: {leaf}; keep names and shapes"
            )
    for path, leaf in jax.tree_util.tree_leaves_with_path(before):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            key = f"a typed random key in its state ({jax.tree_util.keystr(path)})"
            raise ValueError(f"{where} has {key}, which cannot be saved or sent; keep jax.random.key_data of it")
    return tx


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in leaves}
