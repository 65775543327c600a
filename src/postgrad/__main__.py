"""`python -m postgrad` is the `postgrad` command."""

from postgrad.cli.main import main

main()
