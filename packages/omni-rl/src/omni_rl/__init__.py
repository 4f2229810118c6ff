"""Shared parts of training runs: settings, start, loop, engines, scoring, report.

This file imports nothing, so that `--help` is fast.
"""

__version__ = "0.1.0"
