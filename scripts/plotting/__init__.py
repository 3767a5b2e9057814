"""Charts for the experiments and for the tables of the paper."""
