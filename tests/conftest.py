"""The repository's root on the path, so that `pytest` works from anywhere."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# A shell starts background jobs with SIGINT ignored and children inherit that: Ctrl-C tests of a
# `pytest &` would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
