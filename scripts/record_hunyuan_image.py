"""Record the samples of vLLM-Omni's HunyuanImage-3.0 port with the tiny checkpoint, for tests without vLLM-Omni.

    .venv-vllm-omni/bin/python scripts/record_hunyuan_image.py [FILE]

The port computes in bfloat16 for any weights, and some of its kernels need an accelerator. Here its casts keep float32,
and torch replaces the kernels, including the product of experts; everything else (templates, cache, positions, masks,
guidance, schedule and VAE) is the port's. It samples one text after the other.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from build_tiny_models import draw_weights, tiny_checkpoint
from omni_sched import INITIAL_NOISE, step_noise
from record_bagel import ROOT, TEXTS, take_torch, vllm_of, write_record
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerFast

RECORD = ROOT / "tests" / "rollout" / "hunyuan_image_of_vllm_omni.safetensors"
STEPS = 4
CASES: dict[str, dict[str, Any]] = {  # height, width, guidance scale, template
    "unguided": {"size": (48, 80)},
    "guided": {"size": (48, 80), "scale": 5.0},
    "wide": {"size": (32, 112), "scale": 2.5},
    "square": {"size": (64, 64)},
    "tall": {"size": (128, 32)},
    "instructed": {"size": (80, 48), "scale": 5.0, "template": "instruct"},
}
VAE = {"layers_per_block": 1, "ffactor_temporal": 4}  # a second VAE, with the temporal depth of the release


class PlainExperts(nn.Module):
    """A stand-in for the port's FusedMoE: the same weights and arithmetic, expert by expert."""

    def __init__(self, *, shared_experts: Any, num_experts: int, top_k: int, **others: Any) -> None:
        super().__init__()
        self.shared, self.top_k, self.renormalize = shared_experts, top_k, others["renormalize"]
        width, inner = others["hidden_size"], others["intermediate_size"]
        self.w13_weight = nn.Parameter(torch.zeros(num_experts, 2 * inner, width))
        self.w2_weight = nn.Parameter(torch.zeros(num_experts, width, inner))
        for weight in self.parameters(recurse=False):
            weight.weight_loader = self._load  # type: ignore[attr-defined]

    @staticmethod
    def make_expert_params_mapping(model: Any, **names: Any) -> list[tuple[str, str, int, str]]:
        """Return vLLM's names for the weights of each expert."""
        kinds = {"w1": "gate", "w2": "down", "w3": "up"}
        return [
            (
                "experts.w2_" if shard == "w2" else "experts.w13_",
                f"experts.{e}.{names[f'ckpt_{kind}_proj_name']}.",
                e,
                shard,
            )
            for e in range(names["num_experts"])
            for shard, kind in kinds.items()
        ]

    def _load(
        self, weight: Any, loaded: torch.Tensor, name: str, *, shard_id: str, expert_id: int, return_success: bool
    ) -> bool:
        inner = self.w2_weight.shape[2]
        rows = {"w1": slice(0, inner), "w2": slice(None), "w3": slice(inner, None)}[shard_id]
        weight.data[expert_id, rows].copy_(loaded)
        return return_success

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the experts, plus the shared expert."""
        shares, experts = router_logits.float().softmax(dim=-1).topk(self.top_k, dim=-1)
        shares = shares / shares.sum(dim=-1, keepdim=True) if self.renormalize else shares
        out = self.shared(hidden_states)
        for token, states in enumerate(hidden_states):
            for share, expert in zip(shares[token], experts[token], strict=True):
                gate, up = (self.w13_weight[expert] @ states).chunk(2)
                out[token] = out[token] + share * (self.w2_weight[expert] @ (nn.functional.silu(gate) * up))
        return out


def load_port(folder: Path) -> Any:
    """Return the port's pipeline with a released folder's weights, without the modules for images in and text out."""
    from transformers import GenerationConfig
    from vllm.config import get_current_vllm_config
    from vllm_omni.diffusion.models.hunyuan_image3 import autoencoder
    from vllm_omni.diffusion.models.hunyuan_image3 import hunyuan_image3_transformer as parts
    from vllm_omni.diffusion.models.hunyuan_image3 import pipeline_hunyuan_image3 as pipeline
    from vllm_omni.diffusion.models.hunyuan_image3.hunyuan_image3_tokenizer import TokenizerWrapper

    casts = {"bfloat16": torch.float32, "autocast": lambda **options: nullcontext()}
    parts.torch = pipeline.torch = SimpleNamespace(**{**vars(torch), **casts})
    parts.FusedMoE = PlainExperts
    config = parts.HunyuanImage3Config(**json.loads((folder / "config.json").read_text("utf-8")))

    class Port(pipeline.HunyuanImage3Pipeline):
        def __init__(self) -> None:
            pipeline.HunyuanImage3PreTrainedModel.__init__(self, config)
            D, inner, channels = config.hidden_size, config.patch_embed_hidden_dim, config.vae["latent_channels"]
            self.hf_config, self._pipeline, self.od_config = config, None, SimpleNamespace()
            self.generation_config = GenerationConfig.from_pretrained(folder)
            self.model = self.transformer = parts.HunyuanImage3Model(config)
            self.vae = autoencoder.AutoencoderKLConv3D(**config.vae)
            self._tkwrapper = TokenizerWrapper(PreTrainedTokenizerFast.from_pretrained(folder))
            self.image_processor = parts.HunyuanImage3ImageProcessor.__new__(parts.HunyuanImage3ImageProcessor)
            self.image_processor.config = config
            self.image_processor.reso_group = parts.get_cached_resolution_group(config.image_base_size)
            self.timestep_emb, self.time_embed, self.time_embed_2 = (parts.TimestepEmbedder(D) for _ in range(3))
            self.patch_embed = parts.UNetDown(1, channels, D, inner, D)
            self.final_layer = parts.UNetUp(1, D, D, inner, channels, out_norm=True)
            self.vllm_config = get_current_vllm_config()

    port = Port().eval()
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    inner = {n.removeprefix("model."): w for n, w in weights.items() if n.startswith("model.layers") or "wte" in n}
    port.model.load_weights(inner.items())
    others = {name: w for name, w in weights.items() if not name.startswith(("model.", "lm_head", "vision"))}
    wanted = {name for name in port.state_dict() if not name.startswith(("model.", "transformer."))}
    if wanted != others.keys():
        sys.exit(f"weights of the port and of the folder differ: {sorted(wanted ^ others.keys())}")
    port.load_state_dict(others, strict=False)
    take_torch(port)
    return port


def draw(
    port: Any, text: str, seed: int, *, size: tuple[int, int], scale: float = 1.0, template: str = "pretrain"
) -> Any:
    """Sample clean latents [C, h, w] for one text, and its image [3, H, W] in [0, 1]."""
    latents, decode = [], port.vae.decode
    noise = step_noise([seed], INITIAL_NOISE, (16, size[0] // 16, size[1] // 16))
    port.generation_config.sequence_template = template
    port.pipeline.prepare_latents = lambda **others: noise
    port.pipeline.set_progress_bar_config(disable=True)

    def keep(z: torch.Tensor, **options: Any) -> Any:
        latents.append(z[0, :, 0] * port.vae.config.scaling_factor)
        return decode(z, **options)

    port.vae.decode = keep
    given = port.prepare_model_inputs(
        prompt=[text], image_size=size, num_inference_steps=STEPS, guidance_scale=scale, generator=[torch.Generator()]
    )
    picture = port._generate(**given)[0]
    port.vae.decode = decode
    return latents[0], (picture / 2 + 0.5).clamp(0, 1)


@torch.no_grad()
def main() -> None:
    """Write the record, by default to the file that the tests read."""
    folder, tensors = tiny_checkpoint("hunyuan-image", ROOT / ".pytest_cache" / "tiny-models"), {}
    with vllm_of(folder):
        port = load_port(folder)
        for case, options in CASES.items():
            drawn = [draw(port, text, i, **options) for i, text in enumerate(TEXTS)]
            tensors[case] = torch.stack([latents for latents, _ in drawn])
            if case == "guided":
                tensors["images"] = torch.stack([picture for _, picture in drawn[:1]])
        vae = type(port.vae)(**{**port.vae.config, **VAE}).eval()  # in the tiny checkpoint, one frame is one latent
        draw_weights(vae)
        tensors["latents"] = step_noise([0], INITIAL_NOISE, (16, 2, 3))
        tensors["decoded"] = vae.decode(tensors["latents"][:, :, None]).sample[:, :, 0].contiguous()
        tensors["encoded"] = vae.encode(tensors["decoded"]).latent_dist.mean[:, :, 0].contiguous()
        tensors["code"] = port.vae.encode(tensors["images"] * 2 - 1).latent_dist.mean[:, :, 0].contiguous()
    facts = {"steps": STEPS, "texts": TEXTS, "cases": CASES, "vae": VAE}
    write_record(tensors, facts, RECORD)


if __name__ == "__main__":
    main()
