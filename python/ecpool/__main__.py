"""``python -m ecpool`` is the command line."""

from ecpool.cli import main

main()
