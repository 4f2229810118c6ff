"""Device memory: gradient checkpointing, offloaded tensors, quantized base weights."""
