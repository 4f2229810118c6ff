"""What samples: the embedded engine, and vLLM-Omni's."""
