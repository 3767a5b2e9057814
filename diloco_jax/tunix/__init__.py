"""Islands in google-tunix: `diloco_jax.tunix.attach` makes a `PeftTrainer` an island; docs/tunix.md explains it."""

from diloco_jax.adapters.tunix import TunixIsland as TunixIsland
from diloco_jax.adapters.tunix import attach as attach
