"""`python -m diloco_jax` is the `diloco` command."""

import sys

from diloco_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
