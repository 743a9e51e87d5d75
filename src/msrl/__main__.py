"""Entry point of `python -m msrl`."""

from msrl.cli.app import main

if __name__ == "__main__":
    main()
