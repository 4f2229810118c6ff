"""The trainer's FlowGRPO step compared with a plain loop like that of flow_grpo that takes the same step.

python benchmarks/versus_plain.py --random 4 --random-heads 4 --height 256 --width 256
python benchmarks/versus_plain.py --random 60 --height 512 --width 512 --batch-size 16 --group-size 16 \
    --prompts-per-step 1 --lora-rank 64 --variant recomputed

The plain loop uses peft's LoRA layers over the same frozen weights, under autocast if these are bfloat16; guidance as
one batch of prompts and negatives, padded to one length and masked; texts encoded again for each batch; gradient
checkpointing of blocks if the trainer uses any; torch's AdamW and clipping; eager, on one stream. It keeps the
log-probs from sampling, as flow_grpo does, or recomputes them before the update, as others do.

All take turns in one process with the same prompts, noise, scores and window. They must agree in gradient norm and
loss, within BOUNDS.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import runner
import torch
import trainer
from omni_losses import group_advantages
from omni_rl.flow.sampling import step_prompts
from omni_rl.run.run import MediaRun, Step
from omni_rl.settings.fields import at_least
from omni_rollout import Params, Prompt
from omni_rollout.models.diffusers_model import cfg_batch, pack, unpack
from omni_rollout.sampler import to_wire
from omni_rollout.types import Cond, join
from omni_sched import INITIAL_NOISE, euler_step, sde_step, step_noise
from omni_train.dist import default_compute_dtype, local_device
from omni_train.lora import base_name
from peft import LoraConfig
from torch import Tensor, nn
from trainer import app

BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}  # on the relative difference of gradient norms, and on that of losses
OURS, PLAIN = "trainer", "plain loop"
ARMS: dict[str, dict[str, bool]] = {
    PLAIN: {},
    "plain loop that computes old log-probs again": {"again": True},
    "plain loop without autocast, LoRA in float32": {"autocast": False},
}


@dataclass(frozen=True)
class Args(trainer.Args):
    """Settings of the steps."""

    rounds: Annotated[int, at_least(1)] = 2  # Steps of each
    variant: str = "as it is"  # Memory and speed settings of the trainer, a row of trainer.VARIANTS


@dataclass(frozen=True)
class Result:
    """A step. seconds: as counted by `runner.now`. x0: all clean latents."""

    seconds: float
    grad_norm: float
    loss: float
    x0: Tensor


class Plain:
    """The plain loop. Its net shares the memory of the trainer's weights and has a copy of its adapter."""

    def __init__(self, run: MediaRun[app.Args]) -> None:
        self.run, self.model, self.args, self.device = run, run.model, run.args, run.dist.device
        own: dict[str, nn.Parameter] = dict(run.policy.net.named_parameters())
        self.net: Any = run.model.empty_net(buffers=True)
        self.net.load_state_dict({base_name(name): p for name, p in own.items() if ".lora_" not in name}, assign=True)
        rank, alpha, targets = self.args.lora.rank, self.args.lora.alpha, list(run.model.LORA_TARGETS)
        self.net.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, init_lora_weights=False))
        for name, param in self.net.named_parameters():
            if ".lora_" in name:
                param.data = own[name].detach().clone()
        if self.args.memory.gradient_checkpointing:
            self.net.enable_gradient_checkpointing()
        self.params = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.params, lr=self.args.lr)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond, scale: float) -> Tensor:
        """Return both halves of guidance as one padded batch."""
        embeds, mask, tokens = (
            cfg_batch(cond, "embeds"),
            cfg_batch(cond, "embeds_mask").to(x.device),
            pack(torch.cat([x, x])),
        )
        out = self.net(
            hidden_states=tokens.to(embeds.dtype),
            timestep=torch.cat([sigma, sigma]),
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, x.shape[-2] // 2, x.shape[-1] // 2)]] * len(tokens),
            return_dict=False,
        )[0].float()
        positive, negative = out.chunk(2)
        combined = negative + scale * (positive - negative)
        return unpack(combined * (positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)), x.shape)

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt]) -> Cond:
        """Return the encoded texts and negatives of a batch."""
        parts, texts = self.run.engine.parts, {p.text: p for p in prompts}
        known = {text: self.model.encode(parts, prompt) for text, prompt in texts.items()}
        cond = join([known[p.text] for p in prompts], dim=0, what="texts")
        negative = join([self.model.encode(parts, prompts[0], negative=True)] * len(prompts), dim=0, what="texts")
        return cond | {f"negative_{name}": tensor for name, tensor in negative.items()}

    def step(self, prompts: Sequence[Prompt], params: Params, *, again: bool = False, autocast: bool = True) -> Result:
        """Sample, score, and train once on all stochastic steps of all samples."""
        is_low = autocast and self.args.policy.dtype != "float32"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_low):
            return self._step(prompts, params, again)

    def _step(self, prompts: Sequence[Prompt], params: Params, again: bool) -> Result:
        args, scale, start = self.args, params.guidance["true_cfg_scale"], runner.now(self.device)
        sigmas, shape, size = self.model.sigmas(params), self.model.latent_shape(params), args.data.batch_size
        levels = sigmas.tolist()

        def predict(x: Tensor, k: int, cond: Cond) -> Tensor:
            return self.velocity(x, torch.full((len(x),), levels[k], device=self.device), cond, scale)

        def log_prob(x: Tensor, x_next: Tensor, k: int, cond: Cond) -> Tensor:
            velocity = predict(x, k, cond)
            return sde_step(
                velocity, x, sigmas[k], sigmas[k + 1], noise_level=params.noise_level, x_next=x_next
            ).log_prob

        batches, latents, scores = [], [], []
        with torch.no_grad():
            for batch in (prompts[i : i + size] for i in range(0, len(prompts), size)):
                seeds, cond, kept = [p.seed for p in batch], self.encode(batch), []
                x = step_noise(seeds, INITIAL_NOISE, shape).to(self.device)
                for k in range(args.sampling.num_inference_steps):
                    velocity = predict(x, k, cond)
                    if k not in params.sde_steps:
                        x = euler_step(velocity, x, sigmas[k], sigmas[k + 1])
                        continue
                    noise, level = step_noise(seeds, k, shape).to(self.device), params.noise_level
                    out = sde_step(velocity, x, sigmas[k], sigmas[k + 1], noise_level=level, noise=noise)
                    kept.append((k, x, out.x_next, out.log_prob))
                    x = out.x_next
                media, _ = self.model.decode(self.run.engine.parts, x, cond, params)
                images = {name: tensor.cpu().numpy() for name, tensor in to_wire(media).items()}
                scores += [score.value for score in trainer.in_order(images, [p.text for p in batch])]
                batches.append((cond, kept))
                latents.append(x)
            if again:
                batches = [
                    (cond, [(k, x, after, log_prob(x, after, k, cond)) for k, x, after, _ in kept])
                    for cond, kept in batches
                ]
        groups = torch.tensor([p.group for p in prompts])
        advantages = group_advantages(torch.tensor(scores), groups).to(self.device).split(size)
        losses = []
        for (cond, kept), advantage in zip(batches, advantages, strict=True):
            for k, x, after, old in kept:
                ratio = (log_prob(x, after, k, cond) - old).exp()
                clipped = ratio.clamp(1 - args.clip_range, 1 + args.clip_range)
                loss = torch.maximum(-advantage * ratio, -advantage * clipped).mean()
                (loss / (len(batches) * len(kept))).backward()
                losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.params, args.optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        found = norm.item(), torch.stack(losses).mean().item(), torch.cat(latents)
        return Result(runner.now(self.device) - start, *found)


def measure(args: Args) -> dict[str, list[Result]]:
    """Return each round of the trainer and of each variant of the plain loop, which take turns."""
    found: dict[str, list[Result]] = {OURS: []}

    def steps(run: MediaRun[app.Args]) -> Iterator[Step]:
        plain, drawn, generate = Plain(run), list[Tensor](), run.engine.generate

        def kept(*args: Any) -> Any:
            batch = generate(*args)
            drawn.append(batch.x0)
            return batch

        run.engine.generate = kept  # type: ignore[method-assign]
        for _ in range(args.rounds):
            step, start = Step(0), runner.now(run.dist.device)
            drawn.clear()
            yield step
            seconds, metrics = runner.now(run.dist.device) - start, step.metrics
            norm, loss = metrics["policy/grad_norm"], metrics["policy/loss"]
            found[OURS].append(Result(seconds, norm, loss, torch.cat(drawn)))
            for name, options in ARMS.items():
                if options.get("autocast", True) or run.args.policy.dtype != "float32":
                    prompts, params = step_prompts(run, step), app.step_params(run, step)
                    found.setdefault(name, []).append(plain.step(prompts, params, **options))

    with trainer.model(args) as path:
        changes = trainer.VARIANTS[args.variant].settings
        rank = {"lora_rank": args.lora_rank, "lora_alpha": 2 * args.lora_rank, "lr": 0.0}
        trainer.train(trainer.settings(args, path, **rank | changes), steps)
    return found


def fastest(rounds: Sequence[Result]) -> Result:
    """Return the fastest round."""
    return min(rounds, key=lambda result: result.seconds)


def agree(ours: Result, other: Result, dtype: str) -> bool:
    """True if two steps are equal within BOUNDS."""
    bound = BOUNDS[dtype]
    return abs(ours.grad_norm / other.grad_norm - 1) <= bound and abs(ours.loss - other.loss) <= bound


def table(found: Mapping[str, Sequence[Result]]) -> str:
    """Return a Markdown table of the seconds of each step and its differences from the trainer's."""
    ours, rows = fastest(found[OURS]), []
    for name, rounds in found.items():
        each, seconds = fastest(rounds), [one.seconds for one in rounds]
        over = runner.ratio(seconds, [one.seconds for one in found[OURS]])
        loss, latents = f"{each.loss - ours.loss:.1e}", f"{(each.x0 - ours.x0).abs().max().item():.1e}"
        rows.append((name, runner.spread(seconds, 2), over, f"{each.grad_norm:.6g}", loss, latents))
    head = ("step of", "seconds", "over the trainer's", "gradient norm", "loss, difference", "latents, difference")
    return runner.table(head, rows)


def versus_plain(args: Args) -> None:
    """Measure and print a table; the exit code is 1 if the steps differ."""
    dtype = str(default_compute_dtype(local_device())).removeprefix("torch.")
    found = measure(args)
    print(runner.stamp(dtype, args))
    print(table(found))
    ours = fastest(found[OURS])
    if off := [name for name, rounds in found.items() if not agree(ours, fastest(rounds), dtype)]:
        sys.exit(f"not the trainer's step within {BOUNDS[dtype]:g}: {', '.join(off)}")


if __name__ == "__main__":
    runner.run(__doc__, versus_plain)
