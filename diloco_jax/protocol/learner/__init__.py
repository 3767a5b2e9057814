"""The learner's machine, and the mailbox that decides when it may be given what."""
