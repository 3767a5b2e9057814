"""Hostile learners, mistaken commands and damage against a real syncer: ./scripts/attack/run [--only NAME ...]."""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from attack import floods, folders, hostile, owing, processes, surfaces, wires
from attack.table import CATALOGUE, as_text, carry_all_out

# Each of these modules adds its attacks to the catalogue.
MODULES = (folders, hostile, owing, floods, wires, processes, surfaces)


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, print a table of verdicts, and return the exit status: 1 if one attack did harm."""
    parser = argparse.ArgumentParser(prog="scripts/attack/run", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="attacks whose names start with these")
    parser.add_argument("--long", action="store_true", help="include attacks that take minutes")
    parser.add_argument("--list", action="store_true", help="print the name and the description of each attack")
    parser.add_argument("--seed", type=int, default=0, help="seed of random moments and fields; default: 0")
    parser.add_argument("--at-once", type=int, default=2, help="attacks at a time; default: 2")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep all run folders and logs in this new folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and all other lines on stderr")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{each.name:28}{each.about}" for each in CATALOGUE.attacks.values()))
        return 0
    say = partial(print, file=sys.stderr, flush=True)
    folder = (options.keep or Path(tempfile.mkdtemp(prefix="diloco-attack-"))).absolute()
    os.environ.setdefault("DILOCO_TEST_PROGRAMS", str(folder / "programs"))
    try:
        attacks = CATALOGUE.chosen(options.only, long=options.long)
        verdicts = carry_all_out(attacks, folder, options.seed, options.at_once, say)
    except ValueError as error:
        parser.error(str(error))
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    failed = sum(not each.held for each in verdicts)
    if options.json:
        rows = [each.as_dict() for each in verdicts]
        print(json.dumps({"attacks": len(rows), "failed": failed, "seed": options.seed, "rows": rows}))
    else:
        print(f"{as_text(verdicts)}\n\n{len(verdicts)} attacks, {failed} failed, seed {options.seed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
