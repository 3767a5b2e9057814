"""Names and limits that readers of a status share with the syncer that writes it.

`diloco status` is often called in a loop, so this module imports nothing.
"""

CONDITIONS: tuple[str, ...] = (
    "joining",
    "recovering",
    "training",
    "evaluating",
    "slow",
    "unmerged",
    "unanswered",
    "striking",
)
CONDITIONS += ("silent", "gone", "expelled", "banned", "left")
# By condition: the word that people read, where it differs. Files of runs keep the names above.
SHOWN = {"gone": "disconnected"}
# Name of a learner's metric: the share of the time in its steps that it waited for samples.
WAITING = "waiting_for_data"
# An island that waits for data for at least this share of its time has an alarm.
STARVED = 0.05
# An island that disconnects at most so long before the end is noticed has left because of the end.
FINISHING_S = 5.0


def shown(condition: str) -> str:
    """Return the word that people read for one of CONDITIONS."""
    return SHOWN.get(condition, condition)
