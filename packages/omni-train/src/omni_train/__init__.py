"""Training parts for one process per device.

Import from the modules, in reading order:

- `omni_train.dist`: the device of a rank, `init_distributed`, small gathers, `shutdown`
- `omni_train.shard`: `shard(module, mesh, mode=...)`
- `omni_train.weights.load`: `load_sharded(net, files, mesh)`, each rank's rows alone read from safetensors files
- `omni_train.lora`: named adapters, the frozen reference, moving averages
- `omni_train.attention`: the kernels of attention, chosen once for sampling and training
- `omni_train.compiled`: compiled blocks, with the same bits in sampling and training
- `omni_train.memory.recompute`: gradient checkpointing that keeps products as far as a budget of memory reaches
- `omni_train.weights.full`: `named_weights` for the sampling engine, `save_weights` in the diffusers layout
- `omni_train.weights.snapshot`: copies of the weights: one that stays as it is, and a moving average, for evaluation
- `omni_train.optim`: `reduce_gradients`, AdamW, warm-up, one guarded optimizer step
- `omni_train.prompts`: prompts and seeds as functions of the step
- `omni_train.log`: `metrics.jsonl`, phase timers, progress; `omni_train.profiling`: a log that traces a step
- `omni_train.flops`: operations of a net's calls, and what a device could do
- `omni_train.checkpoint.store`: saves what training changes, loads it on any number of ranks
- `omni_train.lock`: one writer per run folder
- `omni_train.signals`: SIGTERM and Ctrl-C as a step that all ranks finish
- `omni_train.weights.card`: the model card beside exported weights

This file imports none of them: importing the package costs no torch, so a command line can answer `--help` at once, and
the function `shard` never hides the module `shard`.
"""

__version__ = "0.1.0"
