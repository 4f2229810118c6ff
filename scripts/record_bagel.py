"""Record the samples of vLLM-Omni's BAGEL port with the tiny checkpoint, for tests that run without vLLM-Omni.

    .venv-vllm-omni/bin/python scripts/record_bagel.py [FILE]

The port computes in bfloat16 for any weights, and some of its kernels need an accelerator. Here its casts keep float32,
and torch replaces the kernels; everything else (cache, packing, guidance and schedule) is the port's. Its pipeline
takes one reference, in sizes different from the release, and samples the VAE's code: here, references are read one
after the other in the release's sizes, as in its evaluation, and the code is the mean. The port's vision transformer
omits the release's last norm and reads patches in another order: both are corrected.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from build_tiny_models import tiny_checkpoint
from omni_rollout.engines.versions import find_version
from omni_rollout.engines.vllm_omni import worker as worker  # configures vLLM for a machine without an accelerator
from omni_sched import INITIAL_NOISE, step_noise
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen2Tokenizer

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "rollout" / "bagel_of_vllm_omni.safetensors"
SIZE, STEPS = (48, 32), 6  # height and width; Euler steps
TEXTS = ['a red sign that says "AB"', 'a blue sign that says "K7QXYZ", in the rain, on a beach', "x"]
REFERENCES = ((40, 90), (70, 50))  # height and width
# The release's sizes for them with at most 64 pixels for the VAE and 56 for the vision transformer.
READ = (((32, 64), (28, 56)), ((64, 48), (56, 42)))
EDIT = {"cfg_text_scale": 4.0, "cfg_img_scale": 2.0, "cfg_interval": (0.0, 1.0), "cfg_renorm_type": "text_channel"}
CASES: dict[str, dict[str, Any]] = {  # arguments of the port's generate_image, the negative prompt, how many references
    "unguided": {},
    "guided": {"cfg_text_scale": 4.0, "cfg_interval": (0.4, 1.0)},
    "negative": {"cfg_text_scale": 4.0, "cfg_interval": (0.4, 1.0), "negative": "bad and blurry"},
    "at all levels": {"cfg_text_scale": 4.0, "cfg_interval": (0.0, 1.0)},
    "at middle levels": {"cfg_text_scale": 4.0, "cfg_interval": (0.4, 0.9)},
    "hardly shortened": {"cfg_text_scale": 4.0, "cfg_interval": (0.4, 1.0), "cfg_renorm_min": 0.95},
    "not shifted": {"timestep_shift": 1.0},
    "a scale of no images": {"cfg_text_scale": 4.0, "cfg_img_scale": 1.5, "cfg_interval": (0.4, 1.0)},
    "one reference": {"references": 1},
    "two references": {"references": 2},
    "edited": {"references": 1, **EDIT},
    "edited from two": {"references": 2, **EDIT},
    "edited, negative": {"references": 2, **EDIT, "negative": "bad and blurry"},
    "edited, by text alone": {"references": 1, **EDIT, "cfg_img_scale": 1.0},
    "edited, channel": {"references": 1, **EDIT, "cfg_renorm_type": "channel"},
    "edited, global": {"references": 1, **EDIT, "cfg_renorm_type": "global"},
    "edited, less shortened": {"references": 1, **EDIT, "cfg_renorm_min": 0.5},
    "edited, at high levels": {"references": 1, **EDIT, "cfg_interval": (0.4, 1.0)},
}


@contextmanager
def vllm_of(folder: Path) -> Iterator[None]:
    """Put this process into the one-rank group that vLLM-Omni needs, for a model's folder.

    torch replaces missing kernels.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.distributed import parallel_state
    from vllm_omni.diffusion.forward_context import set_forward_context

    library = torch.library.Library("_C", "FRAGMENT")
    library.define("silu_and_mul(Tensor! out, Tensor input) -> ()")
    library.impl("silu_and_mul", _silu_and_mul, "CPU")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    parallel_state.initialize_model_parallel()
    config = VllmConfig()
    diffusion = OmniDiffusionConfig.from_kwargs(model=str(folder), dtype=torch.float32, num_gpus=1, extras={})
    with set_current_vllm_config(config), set_forward_context(vllm_config=config, omni_diffusion_config=diffusion):
        yield
    torch.distributed.destroy_process_group()
    del library  # its operators go with it


def take_torch(port: Any) -> None:
    """Make torch compute linear layers, whose kernels need an accelerator."""
    for module in port.modules():
        if getattr(module, "quant_method", None) is not None:
            module.cpu_linear = torch.nn.functional.linear


def write_record(tensors: dict[str, torch.Tensor], facts: dict[str, Any], file: Path) -> None:
    """Write the tensors with their metadata, to the file named on the command line, if any."""
    made = f"vLLM-Omni {find_version('vllm-omni')}, in float32"
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else file
    save_file(tensors, file, metadata={"made_by": made, "facts": json.dumps(facts)})
    print(file)


def _silu_and_mul(out: torch.Tensor, gate_and_up: torch.Tensor) -> None:
    gate, up = gate_and_up.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def load_port(folder: Path) -> Any:
    """Return the port's net with the weights of a released folder."""
    from transformers import SiglipVisionConfig, SiglipVisionModel
    from vllm.transformers_utils.configs.bagel import BagelConfig
    from vllm_omni.diffusion.models.bagel import bagel_transformer
    from vllm_omni.diffusion.models.bagel.pipeline_bagel import SiglipNaViTWrapper

    bagel_transformer.torch = SimpleNamespace(**{**vars(torch), "bfloat16": torch.float32})
    config = bagel_transformer.Qwen2MoTConfig(**json.loads((folder / "llm_config.json").read_text("utf-8")))
    language_model = bagel_transformer.Qwen2MoTForCausalLM(config)
    vae = SimpleNamespace(z_channels=16, downsample=8)
    vit = SiglipVisionConfig.from_json_file(folder / "vit_config.json")
    vit.num_hidden_layers, vit.vision_use_head = vit.num_hidden_layers - 1, False
    vision = SiglipNaViTWrapper(SiglipVisionModel(vit)).eval()
    last = vision.vision_model.post_layernorm
    vision.register_forward_hook(lambda module, args, states: last(states))
    port = bagel_transformer.Bagel(
        language_model,
        vision,
        BagelConfig(llm_config=config, vae_config=vae, vit_config=vit, max_latent_size=64),
    )
    weights = load_file(folder / "ema.safetensors")
    inner = {name.removeprefix("language_model."): w for name, w in weights.items() if name.startswith("language_")}
    inner["lm_head.weight"] = torch.zeros(config.vocab_size, config.hidden_size)
    wanted = {name for name, _ in language_model.named_parameters()}
    if unread := wanted - language_model.load_weights(inner.items()):
        sys.exit(f"weights of the port that the folder lacks: {sorted(unread)}")
    patch = "vit_model.vision_model.embeddings.patch_embedding.weight"
    weights[patch] = weights[patch].unflatten(1, (vit.patch_size, vit.patch_size, 3)).permute(0, 3, 1, 2)
    for name, parameter in port.named_parameters():
        if not name.startswith("language_model."):
            parameter.data.copy_(weights[name])
    take_torch(port)
    return port


def load_vae(folder: Path) -> Any:
    """Return the port's VAE with the weights of a released folder; it encodes images as the mean of their code."""
    from vllm_omni.diffusion.models.bagel.autoencoder import AutoEncoder, AutoEncoderParams

    sizes = {"resolution": 256, "in_channels": 3, "downsample": 8, "ch": 32, "out_ch": 3, "ch_mult": [1] * 4}
    vae = AutoEncoder(
        AutoEncoderParams(**sizes, num_res_blocks=1, z_channels=16, scale_factor=0.3611, shift_factor=0.1159)
    )
    vae.load_state_dict(load_file(folder / "ae.safetensors"))
    vae.reg.sample = False
    return vae.eval()


def make_references() -> list[torch.Tensor]:
    """Return images of noise in large squares, uint8 [H, W, 3]."""
    generator = torch.Generator().manual_seed(0)
    squares = [torch.randint(0, 256, (-(-h // 8), -(-w // 8), 3), generator=generator) for h, w in REFERENCES]
    whole = [image.repeat_interleave(8, dim=0).repeat_interleave(8, dim=1).to(torch.uint8) for image in squares]
    return [image[:h, :w].contiguous() for image, (h, w) in zip(whole, REFERENCES, strict=True)]


def draw(
    port: Any,
    vae: Any,
    tokenizer: Any,
    text: str,
    seed: int,
    *,
    negative: str = "",
    references: int = 0,
    **options: Any,
) -> torch.Tensor:
    """Sample clean latents [16, h, w] for one text, with its KV cache, as the port's pipeline does."""
    from torchvision.transforms import InterpolationMode, functional
    from vllm_omni.diffusion.models.bagel.bagel_transformer import NaiveCache

    names = {"bos_token_id": "im_start", "eos_token_id": "im_end"}
    names |= {"start_of_image": "vision_start", "end_of_image": "vision_end"}
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}

    def resized(image: Any, size: Sequence[int]) -> Any:
        return functional.resize(image, size, InterpolationMode.BICUBIC, antialias=True)

    def normalised(image: Any) -> torch.Tensor:
        return functional.normalize(functional.to_tensor(image), [0.5] * 3, [0.5] * 3)

    def read(words: str, count: int) -> tuple[Any, dict[str, Any]]:
        """Return the cache after references and an optional text, and the inputs for the image after it."""
        cache, length, place = NaiveCache(port.config.llm_config.num_hidden_layers), [0], [0]
        for picture, (size, seen) in list(zip(make_references(), READ, strict=True))[:count]:
            image = resized(Image.fromarray(picture.numpy()), size)
            given, length, place = port.prepare_vae_images(length, place, [image], normalised, ids)
            cache = port.forward_cache_update_vae(vae, cache, **given)
            image = resized(image, seen)
            given, length, place = port.prepare_vit_images(length, place, [image], normalised, ids)
            cache = port.forward_cache_update_vit(cache, **given)
        if words:
            given, length, place = port.prepare_prompts(length, place, [words], tokenizer, ids)
            cache = port.forward_cache_update_text(cache, **given)
        return cache, port.prepare_vae_latent(length, place, [SIZE], ids)

    cache, given = read(text, references)
    empty, without = read(negative, references)
    blind, unseen = read(text, 0)
    h, w = SIZE[0] // 16, SIZE[1] // 16
    noise = step_noise([seed], INITIAL_NOISE, (16, 2 * h, 2 * w))[0]
    given["packed_init_noises"] = noise.view(16, h, 2, w, 2).permute(1, 3, 2, 4, 0).reshape(h * w, 64)
    latents = port.generate_image(
        **given,
        past_key_values=cache,
        cfg_text_packed_position_ids=without["packed_position_ids"],
        cfg_text_past_key_values=empty,
        cfg_img_packed_position_ids=unseen["packed_position_ids"],
        cfg_img_past_key_values=blind,
        num_timesteps=STEPS + 1,  # it counts levels
        **{"timestep_shift": 3.0, **options},
    )[0][0]
    return latents.view(h, w, 2, 2, 16).permute(4, 0, 2, 1, 3).reshape(16, 2 * h, 2 * w)


def decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Return images [B, 3, H, W] in [0, 1] decoded by the port's own VAE."""
    return (vae.decode(latents) * 0.5 + 0.5).clamp(0, 1)


@torch.no_grad()
def main() -> None:
    """Write the record, by default to the file that the tests read."""
    folder, tensors = tiny_checkpoint("bagel", ROOT / ".pytest_cache" / "tiny-models"), {}
    with vllm_of(folder):
        port, vae, tokenizer = load_port(folder), load_vae(folder), Qwen2Tokenizer.from_pretrained(folder)
        for case, options in CASES.items():
            drawn = [draw(port, vae, tokenizer, text, i, **options) for i, text in enumerate(TEXTS)]
            tensors[case] = torch.stack(drawn)
    tensors["images"] = decode(vae, tensors["guided"][:1])
    tensors |= {f"reference_{i}": picture for i, picture in enumerate(make_references())}
    facts = {"height": SIZE[0], "width": SIZE[1], "steps": STEPS, "texts": TEXTS, "cases": CASES}
    write_record(tensors, facts, RECORD)


if __name__ == "__main__":
    main()
