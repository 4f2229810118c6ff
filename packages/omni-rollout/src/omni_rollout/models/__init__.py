"""One file per model. A module is the interface; nothing here knows of an algorithm.

Each file offers `load`, `sigmas`, `latent_shape`, `encode`, `predict_velocity`, `decode`, `LORA_TARGETS` and
`BLOCK_NAMES`.
"""
