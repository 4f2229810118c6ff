"""Checkpoints from which a run continues bit for bit."""
