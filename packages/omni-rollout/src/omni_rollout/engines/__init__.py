"""Engines: the embedded engine, and vLLM-Omni."""
