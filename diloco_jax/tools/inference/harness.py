"""Public tasks for language models, run with the model of a run; this needs lm-eval, the extra `eval`."""

import contextlib
import io
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from diloco_jax.tools.inference.language import Language, Row
from diloco_jax.tools.inference.writer import Writing

# Resamples for the standard errors of metrics without a formula.
RESAMPLES = 1000
# The most tokens of an answer if the task sets no limit.
TOKENS = 256
# Values by task and metric.
Scores = dict[str, dict[str, float]]


class Harness(TemplateLM):
    """A run's model with the interface of lm-eval."""

    def __init__(self, language: Language) -> None:
        super().__init__()
        self._language = language

    @property
    def eot_token_id(self) -> int:
        """Return the token that ends a text."""
        return self._language.tokenizer.end or 0

    @property
    def prefix_token_id(self) -> int:
        """Return the token before a text that has no context."""
        begin = self._language.tokenizer.begin
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text as lm-eval's backend for transformers does, without tokens behind the text.

        With such tokens, an answer would follow the end of its context, and its first tokens would not be judged.

        Args:
          string: the text.
          add_special_tokens: whether the tokens that the tokenizer puts before a text are included; by default they
            are, unless the text itself starts with the begin token.
        """
        tokenizer = self._language.tokenizer
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(tokenizer.decode([self.prefix_token_id]))
        return tokenizer.encode(string, begin=add_special_tokens)

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        for (context, answer), _, asked in requests:
            if not asked:
                raise ValueError(
                    f"the answer {answer!r} has no separate token after {context!r}, because the tokenizer joins it "
                    "with the context; start it with a space, or set target_delimiter in the task"
                )
        # A context of spaces alone has no tokens, because lm-eval moves its spaces to the answer.
        return self._language.likelihoods([(given or [self.prefix_token_id], asked) for _, given, asked in requests])

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        rows: list[Row] = []
        ends = [0]
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self._language.context, 1)
            rows += map(make_disjoint_window, windows)
            ends.append(len(rows))
        said = [likelihood for likelihood, _ in self._language.likelihoods(rows)]
        return [sum(said[start:end]) for start, end in pairwise(ends)]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        # Requests with equal options are written together.
        groups = dict[tuple[Any, ...], list[int]]()
        for row, request in enumerate(requests):
            how = normalize_gen_kwargs(request.args[1], TOKENS)
            stops = tuple(stop for stop in how["until"] if stop)
            groups.setdefault((stops, how["max_gen_toks"], _writing(how)), []).append(row)
        answers = [""] * len(requests)
        for (stops, count, writing), rows in groups.items():
            prompts = [self.tok_encode(requests[row].args[0]) for row in rows]
            texts = self._language.write_all(prompts, count, writing, stops)
            for row, text in zip(rows, texts, strict=True):
                answers[row] = postprocess_generated_text(text, list(stops), None)
        return answers


def _writing(how: dict[str, Any]) -> Writing:
    """Return the options of a task for drawing tokens; without `do_sample` the likeliest tokens are taken."""
    top_k, min_p = int(how.get("top_k") or 0), float(how.get("min_p") or 0.0)
    return Writing(how.get("temperature", 0.0), float(how.get("top_p") or 1.0), top_k=top_k, min_p=min_p)


def ask_tasks(language: Language, tasks: Sequence[str], folder: Path | None, limit: int | None) -> Scores:
    """Compute the scores of tasks, with at most `limit` questions of each.

    Args:
      tasks: names of tasks of lm-eval or of `folder`.
      folder: the user's own tasks, whose paths are relative to it; if it has all tasks, nothing is downloaded.

    Raises:
      ValueError: a task is unknown, or fails.
    """
    here = str(folder.absolute()) if folder else None
    manager = TaskManager(include_path=here, include_defaults=False)
    if not all(map(manager.match_tasks, ([task] for task in tasks))):
        # lm-eval's own tasks are thousands of files, which take 10 s to read.
        manager = TaskManager(include_path=here)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ValueError(f"there is no task {unknown[0]!r}; name one of lm-eval's, or a folder in --tasks-folder")
    harness = Harness(language)
    # lm-eval prints many progress bars, some to standard output.
    said = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with contextlib.chdir(folder or "."), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            loaded = manager.load(list(tasks))
            for task in loaded["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=0)
            results: Any = evaluate(harness, loaded, limit=limit, log_samples=False, bootstrap_iters=RESAMPLES)
        # Data sets, templates and metrics may raise any error.
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ValueError(f"tasks {','.join(tasks)} failed ({why}); correct or replace them") from error
    found = {**results["results"], **results.get("groups", {})}
    # "none" is the name of lm-eval's filter that changes nothing.
    return {
        task: {name.removesuffix(",none"): value for name, value in row.items() if isinstance(value, float)}
        for task, row in found.items()
    }
