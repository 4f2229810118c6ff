"""Engines: the embedded ones, and vLLM-Omni."""
