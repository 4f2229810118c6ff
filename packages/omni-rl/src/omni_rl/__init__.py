"""What every training run has around its algorithm: settings, start, loop, engines, scoring, report.

This file imports nothing, so that a command line can answer `--help` at once.
"""

__version__ = "0.1.0"
