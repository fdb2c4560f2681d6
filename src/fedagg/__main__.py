"""`python -m fedagg` is the command line."""

from fedagg.cli import main

main()
