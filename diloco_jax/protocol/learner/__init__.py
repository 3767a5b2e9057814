"""The learner's machine, and the mailbox that decides when the machine gets each message."""
