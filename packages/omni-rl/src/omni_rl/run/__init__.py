"""A run: its start or resumption, its loop, and its end."""
