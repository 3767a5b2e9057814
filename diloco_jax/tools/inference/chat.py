"""Conversations with the model of a run, in the text of its chat template."""

from collections.abc import Iterator

from diloco_jax.runtime.model.evaluation import run_source
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.inference.language import Language
from diloco_jax.tools.inference.writer import Writing
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

        Args:
          text: the user's turn.
          count: the most tokens of the answer.
          how: options for drawing them.

        Raises:
          ValueError: the template refuses the conversation.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids, _ = self._language.tokenizer.encode_places(self._template.render(asked, prompt=True))
        pieces = list[str]()
        for piece in self._language.write(ids, count, how):
            pieces.append(piece)
            yield piece
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def first_prompt(config: RunConfig) -> list[int]:
    """Return the tokens of the first held-out conversation up to the assistant's first turn."""
    sample = run_source(config).held_out[0]
    stop = int((sample[WEIGHTS] * (sample[SEGMENTS] == 1)).argmax())
    return [int(id) for id in sample[TOKENS][:stop]]
