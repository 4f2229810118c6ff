"""Media files: check, read, write."""
