"""BAGEL (arXiv 2505.14683): images from text and references, by a language model that is trained with the image.

A checkpoint is the released folder: config.json, llm_config.json, vit_config.json, ema.safetensors, ae.safetensors and
a tokenizer. The transformer is in `bagel_net`, the reference encoder in `bagel_vision`; the VAE is FLUX.1's, with the
names of its first release.

Shapes: B samples, C latent channels (16), h x w latent pixels (an eighth of the image; h' x w' of a reference), T text
tokens, n vision tokens of a reference, D width of the language model.
"""

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from omni_sched import linear_sigmas, shift_sigmas
from torch import Tensor, nn

from omni_rollout.files import read_json, safetensors_shapes
from omni_rollout.models.bagel_guidance import CHANNEL, GLOBAL, TEXT_CHANNEL, guide
from omni_rollout.models.bagel_sequence import MAX_TOKENS_PER_SIDE
from omni_rollout.models.diffusers_model import PIXELS_PER_TOKEN, ImageModel, cfg_batch, check_size, pixels
from omni_rollout.models.hub import local_folder
from omni_rollout.models.parts import open_tokenizer
from omni_rollout.types import Cond, Params, Parts, Prompt, to_device

MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")  # around the text, around the image
FILES = {
    "tokenizer": "tokenizer_config.json",
    "transformer": "llm_config.json",
    "vit": "vit_config.json",
    "vae": "ae.safetensors",
}
WEIGHTS = {"transformer": "ema.safetensors", "vit": "ema.safetensors", "vae": "ae.safetensors"}
KNOWN = (  # the only supported values
    ("transformer", "hidden_act", "silu"),
    ("transformer", "rope_scaling", None),
    ("vit", "hidden_act", "gelu_pytorch_tanh"),
)
VAE_MIN_SIDE, VIT_MIN_SIDE = 512, 224  # pixels of a reference's shorter side, if the longer side permits it
RANGES = {
    "cfg_img_scale": (1.0, math.inf),  # 1 is no guidance
    "cfg_renorm_min": (0.0, 1.0),
    "vae_max_size": (PIXELS_PER_TOKEN, MAX_TOKENS_PER_SIDE * PIXELS_PER_TOKEN),
    "vit_max_size": (14, 980),
}
EDITING = {"cfg_img_scale": 2.0, "cfg_interval_low": 0.0, "cfg_renorm_type": TEXT_CHANNEL}  # with references
TEXT = ("ids", "ids_mask", "marks")  # entries that `encode` returns
BLOCKS = 4  # of the VAE's encoder, and of its decoder


class Bagel(ImageModel):
    """BAGEL for one checkpoint. Its guidance is `guidance_scale`, called cfg_text_scale in the released code.

    OPTIONS are those of the released code; with references they default to its editing options. `bagel_guidance`
    computes the guidance, which acts on noise levels above cfg_interval_low up to cfg_interval_high. The sides of
    references have at most vae_max_size pixels for the VAE, and vit_max_size for the vision transformer.
    """

    PIPELINE = "BagelForConditionalGeneration"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "transformer": ("omni_rollout", "BagelTransformer"),
        "vit": ("omni_rollout", "BagelVision"),
        "vae": ("diffusers", "AutoencoderKL"),
    }
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("BagelBlock",)
    LORA_TARGETS: ClassVar[tuple[str, ...]] = (  # as published: only for image tokens
        "self_attn.q_proj_moe_gen",
        "self_attn.k_proj_moe_gen",
        "self_attn.v_proj_moe_gen",
        "self_attn.o_proj_moe_gen",
        "mlp_moe_gen.gate_proj",
        "mlp_moe_gen.up_proj",
        "mlp_moe_gen.down_proj",
    )
    OPTIONS: ClassVar[Mapping[str, float]] = {
        "cfg_img_scale": 1.0,
        "cfg_interval_low": 0.4,
        "cfg_interval_high": 1.0,
        "cfg_renorm_type": GLOBAL,
        "cfg_renorm_min": 0.0,
        "timestep_shift": 3.0,
        "vae_max_size": 1024,
        "vit_max_size": 980,
    }
    IMAGES = range(11)

    def __init__(self, path: str | Path) -> None:
        self.path, self.folder = str(path), local_folder(path)
        self.config: dict[str, Any] = {"_class_name": self.PIPELINE} | read_json(self.folder / "config.json")
        for part in ("tokenizer", "transformer", "vit"):
            self.config[part] = read_json(self.config_file(part))
        # From the released code, not from a file.
        self.config["vae"] = {"latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159}
        self.config["vit"]["width"] = self.config["transformer"].get("hidden_size", 3584)
        for part, name, known in KNOWN:
            if (value := self.config[part].get(name, known)) != known:
                raise ValueError(f"{name} of {self.config_file(part)} must be {known!r}, got {value!r:.80}")

    def config_file(self, part: str) -> Path:
        """Return the file with the configuration of a part."""
        return self.folder / FILES[part]

    def weight_files(self, part: str = "transformer") -> list[Path]:
        """Return the safetensors file of a part; fetch it for a hub id."""
        file = local_folder(self.path, WEIGHTS[part]) / WEIGHTS[part]
        if not file.is_file():
            raise ValueError(f"model is incomplete: {file} is missing")
        return [file]

    def _num_bytes(self, part: str) -> int:
        is_first = part in ("transformer", "vae")  # the first part in a file
        file = self.folder / WEIGHTS.get(part, "")
        return file.stat().st_size if is_first and file.is_file() else 0

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size or option."""
        super().check(params)
        check_size(params, PIXELS_PER_TOKEN, max_units=MAX_TOKENS_PER_SIDE)
        options = self._all_options(params, edits=False)
        low, high = options["cfg_interval_low"], options["cfg_interval_high"]
        if not low < high:
            raise ValueError(f"cfg_interval_low must be < cfg_interval_high, got {low} and {high}")
        if (kind := options["cfg_renorm_type"]) not in (GLOBAL, CHANNEL, TEXT_CHANNEL):
            raise ValueError(f"cfg_renorm_type must be 0 (global), 1 (channel) or 2 (text_channel), got {kind}")
        if not (shift := options["timestep_shift"]) > 0:
            raise ValueError(f"timestep_shift must be > 0, got {shift}")
        for name, (minimum, maximum) in RANGES.items():
            if not minimum <= options[name] <= maximum:
                raise ValueError(f"{name} must be in [{minimum:g}, {maximum:g}], got {options[name]:g}")

    def sigmas(self, params: Params) -> Tensor:
        """Return the noise levels [S + 1] from 1 to 0, evenly spaced and shifted, the same for any size.

        The released code's num_timesteps is S + 1.
        """
        return shift_sigmas(linear_sigmas(params.num_inference_steps), self.option(params, "timestep_shift"))

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return the tokens of one prompt: `ids` [T], `ids_mask` [T], True, and `marks` [2] around the image."""
        text = prompt.negative if negative else prompt.text
        begin, end, *marks = parts.tokenizer.convert_tokens_to_ids(list(MARKS))
        # Without a negative prompt, the negative has no tokens at all.
        ids = [begin, *parts.tokenizer.encode(text, add_special_tokens=False), end] if text or not negative else []
        device = parts.vae.device
        return {
            "ids": torch.tensor(ids, dtype=torch.long, device=device),
            "ids_mask": torch.ones(len(ids), dtype=torch.bool),
            "marks": torch.tensor(marks, device=device),
        }

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return the references' latents, `reference_0` [C, h', w'] ..., and vision tokens, `seen_0` [n, D] ....

        The latents are the mean of the VAE's code; the released code samples from it.
        """
        from omni_rollout.models.bagel_vision import fit_reference

        cond: Cond = {}
        for i, image in enumerate(prompt.images):
            vae_image = fit_reference(
                image, unit=PIXELS_PER_TOKEN, min_side=VAE_MIN_SIDE, max_side=self.option(params, "vae_max_size")
            )
            vit_image = fit_reference(
                vae_image,
                unit=parts.vit.patch_size,
                min_side=VIT_MIN_SIDE,
                max_side=self.option(params, "vit_max_size"),
            )
            cond[f"reference_{i}"] = self.encode_media(parts, {"image": vae_image[None]}, params)[0]
            cond[f"seen_{i}"] = parts.vit(pixels(vit_image).to(parts.vae.device))
        return cond

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, C, h, w], float32, at x [B, C, h, w] and noise levels sigma [B].

        cond: from `encode` and `condition`, with an axis B; with guidance also the negatives of `encode`.
        Guidance runs its forward passes at every level, even outside its interval: ranks at other levels do equal work.
        """
        text = [cond[name] for name in TEXT]
        references = [[t for name, t in cond.items() if name.startswith(kind)] for kind in ("reference_", "seen_")]
        if not self.is_guided(params):
            return _velocity(net, x, sigma, text, references)
        options = self._all_options(params, edits=bool(references[0]))
        texts = [cfg_batch(cond, name) for name in TEXT]
        doubled = [[torch.cat([t, t]) for t in tensors] for tensors in references]
        positive, negative = _velocity(net, torch.cat([x, x]), torch.cat([sigma, sigma]), texts, doubled).chunk(2)
        no_references = positive
        if references[0] and options["cfg_img_scale"] > 1:
            no_references = _velocity(net, x, sigma, text, ((), ()))
        guided = guide(positive, negative, no_references, params.guidance_scale, options)
        inside = (sigma > options["cfg_interval_low"]) & (sigma <= options["cfg_interval_high"])
        return torch.where(inside[:, None, None, None], guided, positive)

    def _all_options(self, params: Params, *, edits: bool) -> dict[str, float]:
        """Return all options. edits: True for prompts with references."""
        return {**self.OPTIONS, **(EDITING if edits else {}), **params.guidance}

    def _class(self, part: str) -> Any:
        from omni_rollout.models.bagel_net import BagelTransformer
        from omni_rollout.models.bagel_vision import BagelVision

        classes = {"transformer": BagelTransformer, "vit": BagelVision}
        return classes[part] if part in classes else super()._class(part)

    def _load(self, part: str, device: torch.device | str, dtype: torch.dtype) -> Any:
        if part != "tokenizer":
            return super()._load(part, device, dtype)
        tokenizer = open_tokenizer(self._class(part), self.folder)
        if missing := [mark for mark in MARKS if mark not in tokenizer.get_vocab()]:
            raise ValueError(f"tokenizer of {self.folder} must have the tokens {MARKS}, lacks {missing}")
        return tokenizer

    def _read(self, part: str, dtype: torch.dtype) -> tuple[nn.Module, Collection[str]]:
        """Return a part with its weights, and the names of missing weights."""
        from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
        from diffusers.models.model_loading_utils import load_state_dict

        module, weights = self._empty(part, buffers=True), load_state_dict(str(self.weight_files(part)[0]))
        if part == "vae":
            weights = convert_ldm_vae_checkpoint(weights, module.config)
        state = {name: weights[name].to(dtype) for name in module.state_dict() if name in weights}
        return module, module.load_state_dict(state, strict=False, assign=True).missing_keys

    def _make(self, part: str) -> nn.Module:
        if part != "vae":
            cls, config = self._class(part), self.config[part]
            known = inspect.signature(cls.__init__).parameters
            return cls(**{name: config[name] for name in known if name in config})  # the files have more entries
        return self._class("vae")(
            **self._vae_sizes(),
            down_block_types=("DownEncoderBlock2D",) * BLOCKS,
            up_block_types=("UpDecoderBlock2D",) * BLOCKS,
            use_quant_conv=False,
            use_post_quant_conv=False,
            **self.config["vae"],
        )

    def _vae_sizes(self) -> dict[str, Any]:
        """Return the VAE's widths and layers from its weights, which have no configuration, or from a file instead."""
        if (file := self.folder / "ae.json").is_file():
            return read_json(file)
        shapes = safetensors_shapes(self.weight_files("vae"))
        widths = [shapes[f"encoder.down.{i}.block.0.conv2.weight"][0] for i in range(BLOCKS)]
        layers = sum(name.startswith("encoder.down.0.block.") and name.endswith(".conv2.weight") for name in shapes)
        return {"block_out_channels": widths, "layers_per_block": layers}


def _velocity(
    net: nn.Module, x: Tensor, sigma: Tensor, text: Sequence[Tensor], references: Sequence[Sequence[Tensor]]
) -> Tensor:
    """Return the velocity [B, C, h, w], float32, from one forward pass.

    text: the entries of TEXT. references: the references' latents and vision tokens.
    """
    ids, mask, marks = text
    latents, vision = references
    velocity: Tensor = net(
        hidden_states=x,
        timestep=sigma.float(),
        input_ids=ids,
        attention_mask=to_device(mask, x.device),
        marks=marks,
        references=latents,
        vision=vision,
    ).float()
    return velocity
