"""`python -m msrl`: the command of the Python that runs it."""

from msrl.cli.app import main

if __name__ == "__main__":
    main()
