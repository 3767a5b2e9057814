"""The command `python -m diloco_jax.maxtext.export`."""

import sys

from diloco_jax.adapters.maxtext.export import main

if __name__ == "__main__":
    sys.exit(main())
