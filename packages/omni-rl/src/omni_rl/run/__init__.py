"""A run: how it starts or resumes, its loop, and how it ends."""
