"""The paper's tables beside ours: its goodput simulated, its bandwidth by formula."""
