"""`python -m gemmule` is the command `gemmule`."""

from ._command import main

main()
