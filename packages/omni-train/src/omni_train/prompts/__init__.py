"""Prompt files, and which prompts a step takes."""
