"""Components for training with one process per device.

Import from the modules, in reading order:

- `omni_train.dist`: the device of a rank, `init_distributed`, gathers of small values, `shutdown`
- `omni_train.shard`: `shard(module, mesh, mode=...)`
- `omni_train.prepare`: all steps that prepare a net for training, as one list
- `omni_train.weights.load`: `load_sharded(net, files, mesh)`, which reads only each rank's rows from safetensors files
- `omni_train.lora`: named adapters, the frozen reference, moving averages
- `omni_train.kernels`: the attention backend and compiled blocks, bitwise equal in sampling and training
- `omni_train.memory`: quantization, offload, and gradient checkpointing that keeps products within a memory budget
- `omni_train.weights.full`: `named_weights` for the sampling engine, `save_weights` in the diffusers layout
- `omni_train.weights.snapshot`: a fixed copy of the weights, and a moving average, for evaluation
- `omni_train.optim`: `reduce_gradients`, AdamW, warm-up, one optimizer step that all ranks take or skip together
- `omni_train.prompts`: prompts and seeds as functions of the step
- `omni_train.log`: `metrics.jsonl`, phase timers, progress; `omni_train.profiling`: a log that also traces a step
- `omni_train.breaker`: disables measurements and reports that fail
- `omni_train.flops`: operations of a net's calls, and peak rates of devices
- `omni_train.checkpoint.store`: saves the trained state, loads it on any number of ranks
- `omni_train.lock`: one writer per run folder
- `omni_train.signals`: SIGTERM and Ctrl-C end a run after a step that all ranks have finished
- `omni_train.weights.card`: the model card of exported weights

This file imports none of them: importing the package does not import torch, so a command line can answer `--help` at
once, and the function `shard` never hides the module `shard`.
"""

__version__ = "0.1.0"
