"""Training: the plan, the one loop, checkpoints and everything about the machine; knows no method and no data set."""
