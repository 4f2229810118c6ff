"""The vLLM-Omni engine: its modules, kernels and loading, inside the training process.

`engine` has `VllmOmniEngine`, `pipelines` one row per model, `worker` what makes vLLM-Omni a guest, `cpu` its platform
for machines without an accelerator. Nothing is imported here, as vLLM-Omni itself imports `cpu`.
"""
