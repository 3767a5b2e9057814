"""The place of a learner in the learning-rate schedule: its global step, or what the tokens merged so far say.

With a token budget the syncer says with its global step how far the schedule is ahead of that, or behind
(syncer/progress.py has the rule). Until the next message both go on alike.
"""


class ScheduleClock:
    """The newest lead of the schedule that is known. It never goes back when fewer tokens are merged than expected."""

    def __init__(self) -> None:
        self._lead = 0
        self._told_step = 0  # global step of the message that told it
        self._least = 0

    def hear(self, told_step: int, lead: int, global_step: int) -> None:
        """Take the lead at global step `told_step` that a message tells, unless a newer message came before it.

        `global_step` is the newest that the learner knew before.
        """
        if told_step >= self._told_step:
            self._least, self._lead, self._told_step = self.at(global_step), lead, told_step

    def at(self, global_step: int) -> int:
        """Return the step of the schedule at a global step."""
        return max(self._least, global_step + self._lead)
