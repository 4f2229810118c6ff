"""Output of a dry run: a rank's part of a training step, and the memory of its weights."""

import math
from typing import Any

from omni_rollout import Params
from omni_rollout.models.hub import hub_fault, released_models
from omni_rollout.thoughts import ThinkingParams
from omni_rollout.tokens import TokenParams
from omni_train.dist import Dist
from omni_train.memory.quantized import BYTES
from torch import nn

from omni_rl.run.inputs import Inputs
from omni_rl.run.session import Session
from omni_rl.settings.args import MediaArgs, RunArgs, num_trainers, sharding_mode
from omni_rl.settings.fields import prefix_errors
from omni_rl.settings.token_args import ThinkingArgs

SHIPPED = "that of omni-rollout, with one token per word of a prompt, as {} cannot be fetched: {}"
STEP = "--memory.device-gb GB plans its memory, and the host's, for an accelerator of that size"


def describe_plan(args: RunArgs, dist: Dist, inputs: Inputs[Any, Any], session: Session, net: nn.Module) -> list[str]:
    """Return lines on a rank's part of a step and the memory of its weights. net: with adapters, without values."""
    mode, num_ranks, samplers = sharding_mode(args, dist.world_size), dist.world_size, args.sharding.rollout_ranks
    lora_rank = args.lora.rank
    num_weights = sum(p.numel() for p in net.parameters())
    num_trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    num_nets = 0 if lora_rank else ("reference" in inputs.policies) + len(inputs.teachers)
    num_frozen = num_weights - num_trained + num_weights * num_nets + inputs.num_extra_params
    # In float32: the weight, its gradient, two moments and averages.
    copies = 4 + bool(args.policy.ema_decay) + ("old" in inputs.policies)
    share = args.sharding.size or num_ranks if mode == "fsdp2" else 1
    num_initial = num_trained if args.lora.init == "pissa" else 0  # float32
    frozen_mb, trained_mb = (
        number / share / 2**20
        for number in (
            4 * num_initial
            + (num_frozen - num_initial) * BYTES.get(args.memory.base_dtype, inputs.preparation.dtype.itemsize),
            num_trained * 4 * copies,
        )
    )
    samples = args.data.prompts_per_step * args.data.group_size
    is_shipped = inputs.model.folder == released_models().get(args.policy.model)
    can_plan = not (args.eval.only or isinstance(args, ThinkingArgs) or args.sampling.engine == "vllm")
    has_step = bool(args.memory.device_gb)
    url = "that of --scorer.url, which is not written to files" if args.scorer.url else ""
    sharer = "rank" if dist.context == 1 else f"{dist.context} ranks, each with a part of every sample's tokens"
    lines = {
        "model": describe_model(inputs),
        **(
            {"configuration": SHIPPED.format(args.policy.model, hub_fault() or "the hub refuses it")}
            if is_shipped
            else {}
        ),
        "ranks": f"{num_ranks}, weights {mode}"
        + ", each expert on one rank" * args.sharding.experts
        + (f"; {samplers} more only sample" if samplers else ""),
        "samples per step": f"{samples}, {samples // dist.dp_size} per {sharer}, {args.data.batch_size} per forward",
        "optimizer steps per training step": str(args.data.num_minibatches),
        "evaluations": _evaluations(args, inputs),
        "scorer": url or args.scorer.name or "none",
        "learning rate": f"{args.lr:g}"
        + (f", LoRA of rank {lora_rank} with alpha {args.lora.alpha}" * bool(lora_rank)),
        "weights of the net": f"{num_weights / 1e6:.1f} M, trained {num_trained / 1e6:.1f} M",
        "memory per rank": f"{frozen_mb:.0f} MB frozen weights, {trained_mb:.0f} MB for trained weights, gradients, "
        "optimizer and averages; the model's other parts and activations come on top",
        **({"a step": STEP} if can_plan and not has_step else {}),
        **(_forward(args, inputs, net) if isinstance(args, MediaArgs) and not has_step else {}),
        "start": f"{session.start_message}, in {session.folder}",
    }
    return [f"plan: {name}: {value}" for name, value in lines.items()]


def describe_model(inputs: Inputs[Any, Any]) -> str:
    """Return the name of the model's class, the shapes of its latents and the length of its texts."""
    model, params = inputs.model, inputs.params
    name = model.__class__.__name__
    if isinstance(params, TokenParams):
        return f"{name}, answers of at most {params.max_new_tokens} tokens"
    latents = [str(model.latent_shape(params.of_size(size))) for size in sorted(inputs.sizes)]
    thoughts = params.thought.max_new_tokens if isinstance(params, ThinkingParams) else 0
    return f"{name}, latents {' and '.join(latents)}" + f", thoughts of at most {thoughts} tokens" * bool(thoughts)


def _forward(args: MediaArgs, inputs: Inputs[Any, Any], net: nn.Module) -> dict[str, str]:
    """Return the cost of a forward, counted on meta tensors, or nothing for thoughts, whose lengths are unknown.

    Raises:
        ValueError: the forward fails, for example because data types do not match.
    """
    from omni_rl.tools.plan_forward import count_forward

    if isinstance(args, ThinkingArgs):
        return {}
    dtype = inputs.preparation.dtype
    for param in net.parameters() if sharding_mode(args, num_trainers(args)) == "fsdp2" else ():
        param.data = param.data.to(dtype)  # the dtype of gathered weights
    with prefix_errors(f"--dtype {args.policy.dtype}: "):
        flops = count_forward(inputs.model, net, dtype, inputs.params, inputs.prompts.at(0)[0])
    return {"a forward of one sample": f"{flops / 1e12:.4g} TFLOP in {args.policy.dtype}"}


def _evaluations(args: RunArgs, inputs: Inputs[Any, Any]) -> str:
    """Return the number of evaluations of a run, and the cost of one relative to the rollout of a training step."""

    def forwards(samples: int, params: Params | TokenParams) -> int:
        return samples * (params.num_inference_steps if isinstance(params, Params) else 1)

    count = args.eval.first + math.ceil(args.run.train_steps / args.eval.every)
    samples = [len(eval_set.records) * eval_set.samples for eval_set in inputs.held_out]
    num_forwards = sum(
        forwards(number, eval_set.params) for number, eval_set in zip(samples, inputs.held_out, strict=True)
    )
    share = num_forwards / forwards(args.data.prompts_per_step * args.data.group_size, inputs.params)
    return f"{count}, each of {sum(samples)} samples, which takes as long as {share:.2g} rollouts"
