"""Analyses of finished runs: they take a run's directory and return plain values that tables, figures and pages show."""
