"""The command `crmatch`, also as `python -m crmatch`: signals are caught before anything else is imported."""

from crmatch.stopping import catch_signals


def main() -> None:
    """Run a command."""
    catch_signals()
    from crmatch.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()
