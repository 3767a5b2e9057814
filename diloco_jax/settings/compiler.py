"""Options of XLA's compiler for an island: those of its TPU generation, and what the config changes.

Preflight compiles with them; islands are started with them, in a variable that the compiler reads when JAX starts.
"""

from collections.abc import Mapping

from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.run import RunConfig

TPU_VARIABLE, OTHER_VARIABLE = "LIBTPU_INIT_ARGS", "XLA_FLAGS"  # XLA on other devices knows no option of TPUs


def options_of(config: RunConfig, island: IslandConfig) -> dict[str, str]:
    """Return the compiler's options by name: cloud.xla_flags go before those of the island's TPU generation."""
    table = island.slice.generation.compiler_options if island.slice else {}
    return {name: value for name, value in {**table, **config.cloud.xla_flags}.items() if value}


def compiler_variable(config: RunConfig, island: IslandConfig, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable that gives an island's processes these options, and its value; those that are set stay."""
    variable = TPU_VARIABLE if island.slice else OTHER_VARIABLE
    words = environment.get(variable, "").split()
    given = {word.lstrip("-").partition("=")[0] for word in words}
    ours = [f"--{name}={value}" for name, value in options_of(config, island).items() if name not in given]
    return variable, " ".join([*words, *ours])
