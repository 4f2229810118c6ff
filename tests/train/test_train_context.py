"""Ranks that compute each forward together: the velocity and the gradients of one rank, with every kind of weights."""

import copy
from dataclasses import replace
from functools import partial

import diffusers
import pytest
import torch
from helpers import CHECKPOINT, REPO, sampled
from model_rows import ROWS
from omni_rollout import Params, Prompt
from omni_rollout.decoding import tiled_decode
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_train.dist import context_mesh, divide_work, shard_mesh
from omni_train.memory.recompute import Recompute
from omni_train.optim import SummedBackward
from omni_train.prepare import Lora, Preparation, prepare
from torch.distributed.tensor import DTensor, distribute_tensor

TEXTS = ('a red sign that says "AB"', "x")  # of two lengths
NAMES = [name for name, row in ROWS.items() if open_model(row.checkpoint()).CONTEXT_PARALLEL]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fill(net):
    """Give the second factors of adapters, which begin with zeros, other values, the same on any ranks."""
    for name, p in net.named_parameters():
        if "lora_B" in name:
            values = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.05
            p.data.copy_(distribute_tensor(values, p.device_mesh, p.placements) if isinstance(p, DTensor) else values)


def prepared(model, net, dist, case):
    """A copy of the net: as one rank has it, or where `dist` is given as its ranks do."""
    ranks = {} if dist is None else {"context_mesh": context_mesh(dist), "share": model.share}
    if dist is not None and "fsdp2" in case:
        ranks["mesh"] = shard_mesh(dist, 2 if "size" in case else 0)
    how = Preparation(
        torch.device("cpu"),
        model.BLOCK_NAMES,
        next(net.parameters()).dtype,
        lora=None if "all" in case else Lora(model.LORA_TARGETS, 4, 8, "default", 0),
        base_dtype=next((bits for bits in ("int8", "fp8", "nf4") if bits in case), "auto"),
        recompute=Recompute(0.0, compiled=False, on_host=False) if "recomputed" in case else None,
        **ranks,
    )
    return prepare(copy.deepcopy(net), how, begin=fill)


def compared(model, net, cond, params, dist, context, case):
    """How far velocity and gradients of ranks are from those of one, which has the same samples as each share."""
    dist, model.context = replace(dist, context=context), context
    x = torch.randn(
        len(next(iter(cond.values()))), *model.latent_shape(params), generator=torch.Generator().manual_seed(1)
    )
    target, sigma = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)), torch.full((len(x),), 0.7)

    def run(net, backward, scale):
        velocity = model.predict_velocity(net, x, sigma, cond, params)
        backward((velocity * target).sum() * scale, of=1)
        gradients = {name: whole(p.grad) for name, p in net.named_parameters() if p.grad is not None}
        return velocity.detach(), gradients

    found = prepared(model, net, dist, case)
    with torch.no_grad():
        drawn = model.predict_velocity(found, x, sigma, cond, params)
    mode = "fsdp2" if "fsdp2" in case else "ddp"
    mesh = shard_mesh(dist, 2) if "size" in case else dist.mesh
    velocity, gradients = run(found, SummedBackward(found, mesh, mode=mode), 1 / dist.dp_size)
    model.context = 1
    alone, wanted = run(prepared(model, net, None, case), lambda loss, of: loss.backward(), 1.0)
    every = [torch.empty_like(velocity) for _ in range(dist.world_size)]
    torch.distributed.all_gather(every, velocity)
    assert gradients.keys() == wanted.keys(), gradients.keys() ^ wanted.keys()
    largest = max(gradient.norm() for gradient in wanted.values())  # of those that are rounding alone there is none
    worst = max(
        ((gradients[name] - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-3 * largest)).item()
        for name in wanted
    )
    return {
        "alike": all(torch.equal(each, velocity) for each in every),
        "repeats": torch.equal(drawn, velocity),
        "equal": torch.equal(velocity, alone),
        "apart": ((velocity - alone).abs().max() / alone.abs().max()).item(),
        "gradients": worst,
    }


def check(found):
    """Equal velocities on all ranks of a share, with gradients or without; one rank's, but for rounding."""
    assert (found["alike"], found["repeats"]) == (True, True)
    assert found["apart"] < 1e-5
    assert found["gradients"] < 1e-5


def qwen(lengths=(16, 9)):
    """tiny-signs' net of four heads, and texts of two lengths."""
    model, params = open_model(CHECKPOINT), Params(4, 32, 96)
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    cond = {"embeds": torch.randn(2, max(lengths), 64, generator=generator), "embeds_mask": mask}
    return model, model.load_net(device="cpu", dtype=torch.float32), cond, params


def wan():
    """A net of four heads, for latents of tiny-moving-wan."""
    torch.manual_seed(7)
    sizes = {"num_attention_heads": 4, "attention_head_dim": 32, "ffn_dim": 128, "num_layers": 2, "text_dim": 64}
    net = diffusers.WanTransformer3DModel(freq_dim=64, rope_max_seq_len=64, **sizes)
    cond = {"embeds": torch.randn(2, 16, 64)}
    return open_model(REPO / "checkpoints" / "tiny-moving-wan"), net, cond, Params(4, 64, 64, num_frames=5)


def of_row(name):
    """A row's tiny checkpoint in float64, and the conditioning of two texts, guided."""
    row = ROWS[name]
    model, params = open_model(row.checkpoint()), row.guided
    model.context = 2
    if name not in ("qwen-image", "ltx23") and "wan" not in name:
        params = replace(params, height=64, width=96)
    model.check(params)
    parts = model.load(device="cpu", dtype=torch.float64)
    prompts = [Prompt(text, 0, i, seed=i, negative="bad", images=row.references(i)) for i, text in enumerate(TEXTS)]
    return model, parts.net, DiffusersEngine(model, parts).condition(prompts, params), params


MADE = {"wan": wan, "qwen": qwen, "qwen-odd": partial(qwen, (17, 5))}
CASES = [
    f"{name} {context} {weights}"
    for name in MADE
    for context in (4, 2)
    for weights in (
        *("lora ddp", "lora ddp recomputed", "lora fsdp2", "lora fsdp2 size", "all ddp", "all fsdp2"),
        *(
            "all fsdp2 size",
            "all fsdp2 recomputed",
            "lora ddp nf4 recomputed",
            "lora ddp int8 recomputed",
            "lora ddp fp8 recomputed",
        ),
    )
]


@pytest.mark.parametrize("case", sampled(CASES, 0, always=["wan 2 all fsdp2 size", "qwen-odd 4 lora ddp recomputed"]))
def test_four_ranks_compute_what_one_does(run_ranks, case):
    name, context, *weights = case.split()
    found = run_ranks(lambda dist: compared(*MADE[name](), dist, int(context), weights), 4)
    for each in found:
        check(each)
        assert each["equal"] or name != "wan"


@pytest.mark.parametrize("name", sampled(NAMES, 1))
def test_two_ranks_compute_what_one_does_for_every_model(run_ranks, name):
    for each in run_ranks(lambda dist: compared(*of_row(name), dist, 2, ["all", "ddp", "recomputed"]), 2):
        check(each)


REFUSED = {
    "num_attention_heads of .*config.json, 4": ("qwen-image", 3, {}),
    "context must divide the 512 tokens of each text of a Flux2KleinPipeline, got 3": ("flux2-klein", 3, {}),
    "context must be 1 for a StableAudio3Pipeline, got 2": ("stable-audio3", 2, {}),
    "context must be 1 for a FluxKontextPipeline, got 2": ("flux-kontext", 2, {}),
    "tokens that 4 ranks can share, such as 48 x 64, got 48 x 80, which makes 15": ("qwen-image", 4, {"width": 80}),
    "tokens that 2 ranks can share, such as 32 x 48, got 48 x 48": ("wan21", 2, {"width": 48, "num_frames": 1}),
    "max_sequence_length and CLIP's 77 tokens must make a multiple of 2 ranks, such as 255, got 256": (
        "sd35-medium",
        2,
        {"width": 64},
    ),
    "max_sequence_length must be a multiple of 2 ranks, got 17": (
        "flux-dev",
        2,
        {"guidance": {"max_sequence_length": 17}},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_model_names_what_ranks_cannot_share(message):
    name, context, changes = REFUSED[message]
    model, model.context = open_model(ROWS[name].checkpoint()), context
    with pytest.raises(ValueError, match=message):
        model.check_context() or model.check(replace(ROWS[name].unguided, height=48, **changes))


def test_kernels_of_attention_that_may_exchange_no_tokens_are_refused(monkeypatch):
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", "_native_math")
    model, model.context = open_model(CHECKPOINT), 2
    with pytest.raises(ValueError, match="DIFFUSERS_ATTN_BACKEND must be native for a context of 2, got _native_math"):
        model.check_context()


@pytest.mark.parametrize("gradients", [False, True])
def test_ranks_decode_some_tiles_each_and_all_have_the_bits_of_one(run_ranks, gradients):
    """Five tiles on three ranks, of which one decodes a tile again; with gradients each decodes all."""
    x0, params = torch.rand(2, 3, 8, 47), Params(10, height=64, width=376)

    def work(dist):
        sizes = list[int]()

        def decode(parts, x0, cond, params):
            sizes.append(x0.shape[-1])
            pixels = x0.repeat_interleave(8, dim=-1).repeat_interleave(8, dim=-2)
            return {"image": pixels.sin().movedim(1, -1)}, {}

        with torch.set_grad_enabled(gradients):
            found = tiled_decode(decode, 96, partial(divide_work, dist.mesh))(None, x0, {}, params)[0]["image"]
        num_own = len(sizes)
        alone = tiled_decode(decode, 96)(None, x0, {}, params)[0]["image"]
        return num_own, len(sizes) - num_own, torch.equal(found, alone), list(found.shape)

    assert run_ranks(work, 3) == [[5 if gradients else 2, 5, True, [2, 64, 376, 3]]] * 3
