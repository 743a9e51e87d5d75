"""`python -m msrl` is the console script."""

from msrl.cli.app import main

if __name__ == "__main__":
    main()
