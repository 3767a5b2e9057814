"""The command `python -m diloco_jax.maxtext`."""

import sys

from diloco_jax.adapters.maxtext.main import main

if __name__ == "__main__":
    sys.exit(main())
