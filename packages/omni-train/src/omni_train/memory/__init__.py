"""Device memory: recomputed blocks, offloaded tensors, quantized base weights."""
