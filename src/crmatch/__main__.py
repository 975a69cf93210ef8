"""`python -m crmatch` is the command `crmatch`."""

from crmatch.cli import main

if __name__ == "__main__":
    main()
