"""The `omni-rl` command: `__main__` starts programs, and each file beside it is a program of its own."""
