"""`python -m fedveil` is `fedveil`."""

from fedveil.cli import main

main()
