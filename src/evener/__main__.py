"""`python -m evener` is `evener`."""

from evener.cli.main import main

main()
