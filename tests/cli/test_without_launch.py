"""Without the folder `tools/launch` all other commands work, and `diloco launch` names what is missing."""

import json
import os
import subprocess
import sys

from diloco_jax.cli.commands import COMMANDS
from tests.limits import HANGS_S
from tests.runtime.helpers import ROOT

# Python asks this finder before all others, so the process sees a package without the folder.
WITHOUT = """
import contextlib, io, json, sys

GONE = "diloco_jax.tools.launch"


class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == GONE or name.startswith(f"{GONE}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing)
import diloco_jax.tools
from diloco_jax.cli.main import main


def call(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code
    return status, out.getvalue(), err.getvalue()


found = [call(words) for words in json.load(sys.stdin)]
print(json.dumps(found))
"""


def test_only_the_command_launch_needs_the_launchers() -> None:
    helps = [["--help"], *([command.name, "--help"] for command in COMMANDS)]
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT], input=json.dumps([*helps, ["launch", "gke", "quickstart"]]), cwd=ROOT,
        env=os.environ | {"COLUMNS": "120"}, capture_output=True, text=True, timeout=HANGS_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    *printed, launch = json.loads(ended.stdout)
    for words, (status, out, err) in zip(helps, printed, strict=True):
        assert (status, err) == (0, "") and out.startswith(f"usage: diloco {words[0]}".removesuffix(" --help")), words
    missing = "this installation lacks the module diloco_jax.tools.launch; install diloco_jax again"
    assert launch == [2, "", f"diloco launch: {missing}\n"]
