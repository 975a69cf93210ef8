"""Run a list of specs: in this process, in several processes, or on a Ray cluster."""
