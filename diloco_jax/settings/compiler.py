"""Options of XLA's compiler for an island: defaults of its TPU generation, changed by the config.

Preflight compiles with these options. Islands start with them in an environment variable, which the compiler reads when
JAX starts.
"""

from collections.abc import Mapping

from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.run import RunConfig

# XLA rejects options of TPUs on other devices.
TPU_VARIABLE, OTHER_VARIABLE = "LIBTPU_INIT_ARGS", "XLA_FLAGS"


def options_of(config: RunConfig, island: IslandConfig) -> dict[str, str]:
    """Return the compiler's options by name; cloud.xla_flags take precedence over the island's TPU generation."""
    table = island.slice.generation.compiler_options if island.slice else {}
    return {name: value for name, value in {**table, **config.cloud.xla_flags}.items() if value}


def compiler_variable(config: RunConfig, island: IslandConfig, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the environment variable with these options, and its value; options that are set already stay."""
    variable = TPU_VARIABLE if island.slice else OTHER_VARIABLE
    words = environment.get(variable, "").split()
    given = {word.lstrip("-").partition("=")[0] for word in words}
    ours = [f"--{name}={value}" for name, value in options_of(config, island).items() if name not in given]
    return variable, " ".join([*words, *ours])
