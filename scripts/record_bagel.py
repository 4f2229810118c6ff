"""Records what vLLM-Omni's port of BAGEL draws with the tiny checkpoint, for tests that run without it.

    .venv-vllm-omni/bin/python scripts/record_bagel.py [FILE]

The port computes in bfloat16 whatever its weights are, and some of its kernels are an accelerator's alone. Here its
casts keep float32, and torch stands in for the kernels; all else, cache, packing, guidance and schedule, is the port's.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from build_tiny_models import tiny_checkpoint
from omni_rollout.engines.vllm_omni import worker  # sets vLLM up for a machine without an accelerator
from omni_sched import INITIAL_NOISE, step_noise
from safetensors.torch import load_file, save_file
from transformers import Qwen2Tokenizer

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "rollout" / "bagel_of_vllm_omni.safetensors"
SIZE, STEPS = (48, 32), 6  # height and width; Euler steps
TEXTS = ['a red sign that says "AB"', 'a blue sign that says "K7QXYZ", in the rain, on a beach', "x"]
CASES: dict[str, dict[str, Any]] = {  # arguments of the port's generate_image, and the negative prompt
    "unguided": {},
    "guided": {"cfg_text_scale": 4.0, "cfg_interval": (0.4, 1.0)},
    "negative": {"cfg_text_scale": 4.0, "cfg_interval": (0.4, 1.0), "negative": "bad and blurry"},
    "at all levels": {"cfg_text_scale": 4.0, "cfg_interval": (0.0, 1.0)},
    "at middle levels": {"cfg_text_scale": 4.0, "cfg_interval": (0.4, 0.9)},
    "hardly shortened": {"cfg_text_scale": 4.0, "cfg_interval": (0.4, 1.0), "cfg_renorm_min": 0.95},
    "not shifted": {"timestep_shift": 1.0},
}


def start_vllm() -> None:
    """Puts this process into a group of one rank, as vLLM-Omni wants it, and torch in the place of missing kernels."""
    from vllm_omni.diffusion.distributed import parallel_state

    library = torch.library.Library("_C", "FRAGMENT")
    library.define("silu_and_mul(Tensor! out, Tensor input) -> ()")
    library.impl("silu_and_mul", _silu_and_mul, "CPU")
    start_vllm.keep = library  # type: ignore[attr-defined]  # it is undone when it is collected
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    parallel_state.initialize_model_parallel()


def _silu_and_mul(out: torch.Tensor, gate_and_up: torch.Tensor) -> None:
    gate, up = gate_and_up.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def load_port(folder: Path) -> Any:
    """The port's net with the weights of a released folder."""
    from vllm.transformers_utils.configs.bagel import BagelConfig
    from vllm_omni.diffusion.models.bagel import bagel_transformer

    bagel_transformer.torch = SimpleNamespace(**{**vars(torch), "bfloat16": torch.float32})
    config = bagel_transformer.Qwen2MoTConfig(**json.loads((folder / "llm_config.json").read_text("utf-8")))
    language_model = bagel_transformer.Qwen2MoTForCausalLM(config)
    vae, vit = SimpleNamespace(z_channels=16, downsample=8), SimpleNamespace(patch_size=14, hidden_size=32)
    port = bagel_transformer.Bagel(
        language_model,
        None,
        BagelConfig(visual_und=False, llm_config=config, vae_config=vae, vit_config=vit, max_latent_size=64),
    )
    weights = load_file(folder / "ema.safetensors")
    inner = {name.removeprefix("language_model."): w for name, w in weights.items() if name.startswith("language_")}
    inner["lm_head.weight"] = torch.zeros(config.vocab_size, config.hidden_size)
    wanted = {name for name, _ in language_model.named_parameters()}
    if unread := wanted - language_model.load_weights(inner.items()):
        sys.exit(f"weights of the port that the folder lacks: {sorted(unread)}")
    for name, parameter in port.named_parameters():
        if not name.startswith("language_model."):
            parameter.data.copy_(weights[name])
    for module in port.modules():
        if getattr(module, "quant_method", None) is not None:
            module.cpu_linear = torch.nn.functional.linear
    return port


def draw(port: Any, tokenizer: Any, text: str, seed: int, *, negative: str = "", **options: Any) -> torch.Tensor:
    """Clean latents [16, h, w] of one text, with the cache of its keys and values, as the port's pipeline has it."""
    from vllm_omni.diffusion.models.bagel.bagel_transformer import NaiveCache

    names = {"bos_token_id": "im_start", "eos_token_id": "im_end"}
    names |= {"start_of_image": "vision_start", "end_of_image": "vision_end"}
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}

    def read(words: str) -> tuple[Any, dict[str, Any]]:
        """The cache after a text, which may be none, and where the image goes after it."""
        cache, length, place = NaiveCache(port.config.llm_config.num_hidden_layers), [0], [0]
        if words:
            given, length, place = port.prepare_prompts([0], [0], [words], tokenizer, ids)
            cache = port.forward_cache_update_text(cache, **given)
        return cache, port.prepare_vae_latent(length, place, [SIZE], ids)

    cache, given = read(text)
    empty, without = read(negative)
    h, w = SIZE[0] // 16, SIZE[1] // 16
    noise = step_noise([seed], INITIAL_NOISE, (16, 2 * h, 2 * w))[0]
    given["packed_init_noises"] = noise.view(16, h, 2, w, 2).permute(1, 3, 2, 4, 0).reshape(h * w, 64)
    latents = port.generate_image(
        **given,
        past_key_values=cache,
        cfg_text_packed_position_ids=without["packed_position_ids"],
        cfg_text_past_key_values=empty,
        num_timesteps=STEPS + 1,  # it counts levels
        **{"timestep_shift": 3.0, **options},
    )[0][0]
    return latents.view(h, w, 2, 2, 16).permute(4, 0, 2, 1, 3).reshape(16, 2 * h, 2 * w)


def decode(folder: Path, latents: torch.Tensor) -> torch.Tensor:
    """Images [B, 3, H, W] in [0, 1] by the port's own VAE."""
    from vllm_omni.diffusion.models.bagel.autoencoder import AutoEncoder, AutoEncoderParams

    sizes = {"resolution": 256, "in_channels": 3, "downsample": 8, "ch": 32, "out_ch": 3, "ch_mult": [1] * 4}
    vae = AutoEncoder(
        AutoEncoderParams(**sizes, num_res_blocks=1, z_channels=16, scale_factor=0.3611, shift_factor=0.1159)
    )
    vae.load_state_dict(load_file(folder / "ae.safetensors"))
    return (vae.eval().decode(latents) * 0.5 + 0.5).clamp(0, 1)


@torch.no_grad()
def main() -> None:
    """Writes the record, to the file that the tests read if no other is given."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.forward_context import set_forward_context

    folder = tiny_checkpoint("bagel", ROOT / ".pytest_cache" / "tiny-models")
    start_vllm()
    config = VllmConfig()
    diffusion = OmniDiffusionConfig.from_kwargs(model=str(folder), dtype=torch.float32, num_gpus=1, extras={})
    tensors = {}
    with (
        set_current_vllm_config(config),
        set_forward_context(vllm_config=config, omni_diffusion_config=diffusion),
    ):
        port, tokenizer = load_port(folder), Qwen2Tokenizer.from_pretrained(folder)
        for case, options in CASES.items():
            tensors[case] = torch.stack([draw(port, tokenizer, text, i, **options) for i, text in enumerate(TEXTS)])
    tensors["images"] = decode(folder, tensors["guided"][:1])
    facts = {"height": SIZE[0], "width": SIZE[1], "steps": STEPS, "texts": TEXTS, "cases": CASES}
    made = f"vLLM-Omni {worker.VERSION}, in float32"
    file = sys.argv[1] if len(sys.argv) > 1 else RECORD
    save_file(tensors, file, metadata={"made_by": made, "facts": json.dumps(facts)})
    torch.distributed.destroy_process_group()
    print(file)


if __name__ == "__main__":
    main()
