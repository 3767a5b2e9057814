"""`python -m diloco_jax.sim`, see cli.py."""

import sys

from diloco_jax.sim.cli import main

if __name__ == "__main__":
    sys.exit(main())
