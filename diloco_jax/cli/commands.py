"""All commands of `diloco`, in the groups and the order of `diloco --help`."""

from __future__ import annotations

from collections.abc import Mapping

from diloco_jax.cli import clean, first, follow, inference, prepare, records, rewind, runs
from diloco_jax.cli.parser import Command, Parser, build_parser

GROUPS: Mapping[str, tuple[Command, ...]] = {
    "run, and watch it": (
        runs.train, records.status, records.view, records.drain, records.ban, records.admit, records.profile,
        rewind.rewind, records.report, records.compare, follow.follow, runs.chaos,
    ),
    "prepare": (
        first.init, first.data, first.tokenize, inference.begin, prepare.doctor, prepare.plan, prepare.stage,
        prepare.preflight,
        prepare.simulate, prepare.launch, prepare.certs,
    ),
    "machines and their roles": (runs.syncer, runs.learner),
    "after training": (
        inference.evaluate, inference.sample, inference.export, records.replay, records.audit, clean.clean,
    ),
    "started by other programs": (runs.islands, runs.baseline, first.schema, first.completion),
}  # fmt: skip
# Processes of a run start each other with these commands.
HIDDEN = (runs.chaos_learner, runs.compile_ahead)
COMMANDS = (*(each for group in GROUPS.values() for each in group), *HIDDEN)
EXAMPLES = (
    "diloco train quickstart                     train a small model on this machine",
    "diloco status runs/quickstart --watch       watch it from another terminal",
    "diloco sample runs/quickstart --tokens 100  print text from the trained model",
)


def make_parser(only: str | None = None) -> Parser:
    """Build the parser of the command line; if `only` names a command, no other command gets its options."""
    return build_parser(GROUPS, HIDDEN, EXAMPLES, only)
