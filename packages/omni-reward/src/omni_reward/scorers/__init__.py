"""Scorers: each module has one `load_...` function, which returns a score function for `create_app`."""
