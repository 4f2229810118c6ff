"""Prompt files, and the prompts of each step."""
