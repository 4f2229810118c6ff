"""Checking, reading and writing of media files."""
