"""`python -m pylate_flash`: the command line."""

from .cli import main

main()
