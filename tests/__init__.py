"""Tests. `python -m pytest tests` runs all, `python -m tests.test_kda` one file."""

import signal

# What a script starts in the background ignores Ctrl-C, and so would what the tests start only to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
