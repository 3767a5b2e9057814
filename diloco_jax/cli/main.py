"""The `diloco` command. Each subcommand imports what it needs, so that the light ones start fast.

`runtime/records/signals.py` has the exit statuses; wrong input gets one message and no traceback.
"""

import argparse
import errno
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.cli.words import CHAOS_LEARNER, COMPILE, check_command, function_of, make_parser, read_words
from diloco_jax.protocol.releases import OtherRelease
from diloco_jax.runtime.local.machine import limit_jax, look
from diloco_jax.runtime.records.os_errors import number_of
from diloco_jax.runtime.records.os_errors import remedy as remedy_of
from diloco_jax.runtime.records.signals import FAILED, INTERRUPTED, WRONG_INPUT

TRAINING = {"train", "chaos", "learner", CHAOS_LEARNER, COMPILE, "islands", "baseline", "replay"}  # or start who does
# May be over at the next attempt.
DISK_TROUBLE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    if (here := os.getcwd()) not in sys.path:  # as for `python -m`: people's own models lie there
        sys.path.append(here)
    words = read_words()
    parser = make_parser(words)
    check_command(parser, sys.argv[1:] if arguments is None else arguments, words)
    known, rest = parser.parse_known_args(arguments)
    if rest and not known.takes_overrides:
        known.sub.error(known.sub.near_option(rest[0]) or f"unrecognized arguments: {' '.join(rest)}")
    known.overrides = rest
    known.leave = None
    if known.name in TRAINING:
        limit_jax(os.environ, look(os.environ))
    else:  # to look at an accelerator would take it, or most of its memory, from a run
        os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        status = _status_of(known)
    except Exception:
        if known.leave is None:
            raise
        traceback.print_exc()
        status = FAILED
    if known.leave is not None:  # of several processes of an island: the interpreter's end would wait for the others
        known.leave(status)
    if arguments is None and any(thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a thread in compiled code (XLA, gRPC) cannot be interrupted: the end would abort below it
    return status


def _status_of(known: argparse.Namespace) -> int:
    """Run the command; errors for people become one line and a status."""
    try:
        status = function_of(known.calls)(known)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `diloco status RUN | head`: whoever read us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ConnectionError as error:  # may work at the next attempt, so a supervisor may start us again
        print(f"diloco {known.name}: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, OSError, OtherRelease) as error:
        of_file = isinstance(error, OSError) and error.filename is not None
        words = f"{error.filename}: {error.strerror}" if of_file else str(error)  # type: ignore[union-attr]
        full = isinstance(error, OSError) and error.errno in DISK_TROUBLE
        remedy = ""
        if of_file:
            known_trouble = number_of(error) not in (None, errno.ENOENT)
            what = remedy_of(error, Path(words)) if known_trouble else "choose another path"
            remedy = f"; {what}"
        print(f"diloco {known.name}: {words}{remedy}", file=sys.stderr)
        return FAILED if full else WRONG_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
