"""The command `crmatch`, also as `python -m crmatch`: signals are caught before anything else is imported."""

from __future__ import annotations

from crmatch.runs.signals import catch_signals


def main() -> None:
    """Run a command."""
    catch_signals()
    from crmatch.cli.app import main as run_command

    run_command()


if __name__ == "__main__":
    main()
