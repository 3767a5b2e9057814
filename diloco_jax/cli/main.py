"""The `diloco` command. Each subcommand imports what it needs, so that light subcommands start fast.

Exit statuses are in `runtime/records/signals.py`. Wrong input gets one message and no traceback.
"""

import argparse
import errno
import gc
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.cli.commands import COMMANDS, make_parser
from diloco_jax.cli.first import completion
from diloco_jax.cli.parser import check_command, command_of
from diloco_jax.protocol.releases import OtherRelease
from diloco_jax.runtime.local.machine import limit_jax, look
from diloco_jax.runtime.records.os_errors import number_of
from diloco_jax.runtime.records.os_errors import remedy as remedy_of
from diloco_jax.runtime.records.signals import FAILED, INTERRUPTED, WRONG_INPUT

# These failures may be gone at the next attempt.
DISK_TROUBLE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    # As with `python -m`, modules of the user are found in the current folder.
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    words = sys.argv[1:] if arguments is None else arguments
    name = command_of(words)
    # Scripts for a shell have the options of all commands.
    parser = make_parser(None if name == completion.name else name)
    check_command(parser, words, COMMANDS)
    known, rest = parser.parse_known_args(arguments)
    if rest and not known.takes_overrides:
        known.sub.error(known.sub.near_option(rest[0]) or f"unrecognized arguments: {' '.join(rest)}")
    known.overrides = rest
    known.leave = None
    if known.command.trains:
        limit_jax(os.environ, look(os.environ))
    else:
        # JAX would reserve an accelerator, or most of its memory, that a run may need.
        os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        status = _status_of(known)
    except Exception:
        if known.leave is None:
            raise
        traceback.print_exc()
        status = FAILED
    # In an island of several processes the normal end of the interpreter would wait for the other processes.
    if known.leave is not None:
        known.leave(status)
    if arguments is None and any(thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        # A thread in compiled code (XLA, gRPC) cannot be interrupted. A normal end would abort in it.
        os._exit(status)
    if arguments is None:
        # The interpreter's last collections would look at all modules, which takes a third of a second with JAX.
        gc.freeze()
    return status


def _status_of(known: argparse.Namespace) -> int:
    """Run the command and return its exit status; an expected error becomes one line on stderr."""
    try:
        status: int = known.command(known)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has ended, as in `diloco status RUN | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ModuleNotFoundError as error:
        # Folders of tools/ can be deleted: only the commands that use one need it.
        if not (error.name or "").startswith("diloco_jax.tools."):
            raise
        print(
            f"diloco {known.name}: this installation lacks the module {error.name}; install diloco_jax again",
            file=sys.stderr,
        )
        return WRONG_INPUT
    except ConnectionError as error:
        # The next attempt may succeed, so a supervisor may restart this process.
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
