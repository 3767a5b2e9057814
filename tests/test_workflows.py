"""Workflows, forms and container for GitHub have known fields, and only call scripts of the repository."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")

# The fields that these files use, out of those that GitHub knows.
OF_WORKFLOW = {"name", "on", "permissions", "concurrency", "jobs"}
OF_JOB = {"name", "needs", "runs-on", "timeout-minutes", "permissions", "environment", "steps"}
OF_STEP = {"id", "name", "uses", "with", "run", "env"}
OF_ELEMENT = {"type", "id", "attributes", "validations"}
OF_CONTAINER = {"name", "image", "hostRequirements", "containerEnv", "postCreateCommand", "customizations"}
TIMEOUT_MINUTES_MAX = 360
# GitHub's own actions, by their major version.
ACTION = re.compile(r"actions/[a-z-]+@v\d+")
# A script of the repository, and arguments that a shell reads as one word each.
CALL = re.compile(r'\./(?P<script>[\w./]+)(?P<words>( [\w./=-]+| "\$[A-Z]+")*)')
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
CONTEXTS = re.compile(r"(github\.ref|inputs\.\w+|steps\.\w+\.outputs\.\w+)")


def read(path: Path) -> dict[str, Any]:
    """Read a YAML file; YAML 1.1 takes the key `on` for true."""
    text = path.read_text(encoding="utf-8")
    return {"on" if key is True else key: value for key, value in yaml.safe_load(text).items()}


def call_problems(command: str) -> Iterator[str]:
    match = CALL.fullmatch(command.strip())
    if match is None:
        yield f"{command!r} is not one call of a script of the repository"
    elif not (script := ROOT / match["script"]).is_file() or not os.access(script, os.X_OK):
        yield f"{match['script']} is not an executable file of the repository"


def step_problems(step: dict[str, Any]) -> Iterator[str]:
    if unknown := set(step) - OF_STEP:
        yield f"unknown fields {sorted(unknown)}"
    if ("uses" in step) == ("run" in step):
        yield "a step has either `uses` or `run`"
    if "uses" in step and not ACTION.fullmatch(step["uses"]):
        yield f"{step['uses']} is not an action of GitHub with its major version"
    if "run" in step:
        yield from call_problems(step["run"])
        used = set(re.findall(r"\$([A-Z]+)", step["run"]))
        if used != set(step.get("env", {})):
            yield f"{step['run']!r} uses {sorted(used)}, and `env` has {sorted(step.get('env', {}))}"
    elif "env" in step:
        yield "`env` without `run`"


def workflow_problems(found: dict[str, Any]) -> Iterator[str]:
    """Problems of one workflow; what a stranger writes in a request reaches no shell and no secret."""
    if set(found) - {"concurrency"} != OF_WORKFLOW - {"concurrency"}:
        yield f"fields {sorted(found)}"
    if found.get("permissions") != {"contents": "read"}:
        yield "the workflow may do more than read; give a job the permission that it needs"
    if "pull_request_target" in found["on"]:
        yield "pull_request_target runs a stranger's code with the rights of the repository"
    jobs = found["jobs"]
    for name, job in jobs.items():
        if unknown := set(job) - OF_JOB:
            yield f"{name}: unknown fields {sorted(unknown)}"
        if not 0 < job.get("timeout-minutes", 0) <= TIMEOUT_MINUTES_MAX:
            yield f"{name}: give timeout-minutes, at most {TIMEOUT_MINUTES_MAX}"
        if not re.fullmatch(r"ubuntu-\d\d\.04", job.get("runs-on", "")):
            yield f"{name}: runs-on {job.get('runs-on')}; name the version of the system"
        if job.get("needs", next(iter(jobs))) not in jobs:
            yield f"{name}: needs {job['needs']}, which is not a job"
        yield from (f"{name}: {each}" for step in job["steps"] for each in step_problems(step))
    for expression in EXPRESSION.findall(yaml.safe_dump(found)):
        if not CONTEXTS.fullmatch(expression):
            yield f"{expression} may hold text of a stranger, or a secret"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_only_call_scripts(path: Path) -> None:
    assert not list(workflow_problems(read(path)))


def test_every_workflow_is_there() -> None:
    calls = {
        path.stem: [step["run"] for job in read(path)["jobs"].values() for step in job["steps"] if "run" in step]
        for path in WORKFLOWS
    }
    assert calls == {
        "ci": ["./scripts/check", "./.ci/run"],
        "docs": ["./scripts/docs"],
        "release": ['./scripts/release "$VERSION"'],
    }


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        ({"run": "pip install ."}, "'pip install .' is not one call of a script of the repository"),
        ({"run": "./scripts/check && ls"}, "'./scripts/check && ls' is not one call of a script of the repository"),
        ({"run": "./scripts/absent"}, "scripts/absent is not an executable file of the repository"),
        ({"run": "./scripts/_env.sh"}, "scripts/_env.sh is not an executable file of the repository"),
        ({"run": "./scripts/release ${{ inputs.version }}"}, "is not one call of a script of the repository"),
        ({"run": './scripts/release "$VERSION"'}, "uses ['VERSION'], and `env` has []"),
        ({"uses": "someone/else@v1"}, "someone/else@v1 is not an action of GitHub with its major version"),
        ({"uses": "actions/checkout@v6", "run": "./scripts/check"}, "a step has either `uses` or `run`"),
        ({"run": "./scripts/check", "shell": "sh"}, "unknown fields ['shell']"),
    ],
)
def test_other_commands_are_found(step: dict[str, Any], problem: str) -> None:
    assert any(problem in each for each in step_problems(step))


def test_rights_triggers_and_expressions_are_found() -> None:
    job = {
        "runs-on": "ubuntu-latest",
        "needs": "b",
        "steps": [{"uses": "actions/checkout@v6", "with": {"ref": "${{ github.head_ref }}"}}],
    }
    found = {"name": "x", "on": {"pull_request_target": None}, "permissions": "write-all", "jobs": {"a": job}}
    problems = "\n".join(workflow_problems(found))
    for part in (
        "may do more than read",
        "pull_request_target",
        "timeout-minutes",
        "runs-on",
        "needs b",
        "github.head_ref",
    ):
        assert part in problems, part


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_have_the_fields_that_github_reads(path: Path) -> None:
    form = read(path)
    assert set(form) == {"name", "description", "labels", "body"} and all(map(form.get, form))
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    assert {each["type"] for each in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    ids = [each["id"] for each in fields]
    assert len(ids) == len(set(ids)) and all(re.fullmatch(r"[\w-]+", each) for each in ids)
    assert all(set(each) <= OF_ELEMENT for each in form["body"])
    assert all(each["attributes"].get("label") for each in fields)
    assert any(each.get("validations", {}).get("required") for each in fields)
    assert len(FORMS) == 3


def test_the_container_installs_by_a_script() -> None:
    found = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert set(found) == OF_CONTAINER
    assert not list(call_problems(found["postCreateCommand"]))
    assert found["image"].endswith(":3.11"), "the Python whose versions are pinned"
