"""The command `gemmule`."""

import signal
import sys

from ._gemmule import _run_command


def main() -> None:
    """Run the command line with the arguments of this process, and exit."""
    # Let Ctrl-C end the command at once, rather than when it returns to Python.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_run_command(["gemmule", *sys.argv[1:]]))
