"""Conversations with the model of a run, in the text of its chat template."""

from collections.abc import Iterator

import numpy as np

from diloco_jax.runtime.model.evaluation import run_source
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.inference.language import Language
from diloco_jax.tools.inference.writer import Writing
from diloco_jax.training.chat.rows import whole_characters
from diloco_jax.training.chat.template import Message, open_template
from diloco_jax.training.data.sample import SEGMENTS, TOKENS, WEIGHTS


class Chat:
    """A conversation, which each answer continues.

    Args:
      language: the model, whose tokenizer's folder has a chat template.
      system: text of the first turn; "" for none.

    Raises:
      ValueError: there is no chat template, or it is damaged.
    """

    def __init__(self, language: Language, system: str = "") -> None:
        self._language = language
        self._template = open_template(language.tokenizer.folder, day=None)
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str, count: int, how: Writing) -> Iterator[str]:
        """Let the model answer a user's turn; yield the answer piece by piece.

        If the conversation does not fit into the model's context, its oldest pairs of turns are left out.

        Args:
          text: the user's turn.
          count: the most tokens of the answer.
          how: options for drawing them.

        Raises:
          ValueError: the template refuses the conversation.
        """
        asked = [*self.messages, {"role": "user", "content": whole_characters(text)}]
        first = int(asked[0]["role"] == "system")
        # A text that is cut anywhere would begin within a turn, which the model was never trained on.
        while len(ids := self._ids(asked)) + count > self._language.context and len(asked) > first + 1:
            del asked[first : first + 2]
        pieces = list[str]()
        for piece in self._language.write(ids, count, how):
            pieces.append(piece)
            yield piece
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def _ids(self, messages: list[Message]) -> list[int]:
        return self._language.tokenizer.encode(self._template.render(messages, prompt=True), begin=False)


def first_prompt(config: RunConfig) -> list[int]:
    """Return the tokens before the first trained turn of the first held-out conversation; empty if there are none."""
    sample = run_source(config).held_out[0]
    trained = np.flatnonzero(sample[WEIGHTS] * (sample[SEGMENTS] == 1))
    return [int(id) for id in sample[TOKENS][: trained[0] if len(trained) else 0]]
