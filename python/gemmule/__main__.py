"""Runs the command `gemmule` as `python -m gemmule`."""

from ._command import main

main()
