"""A run: its start or continuation, its loop, and how it ends."""
