"""The vLLM-Omni engine: its modules, kernels and loading inside the training process.

`engine` has `VllmOmniEngine`, `pipelines` one class per model, `worker` the code that makes vLLM-Omni a guest of the
trainer's process, `formats` and `quantized` the layers that vLLM-Omni quantizes.
"""
