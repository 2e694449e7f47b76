"""Entry point of `python -m evener`, equivalent to `evener`."""

from evener.cli.main import main

main()
