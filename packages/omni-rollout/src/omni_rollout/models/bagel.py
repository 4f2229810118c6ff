"""BAGEL (arXiv 2505.14683): text to image by a language model that is trained with the image, not before it.

A checkpoint is the released folder: config.json, llm_config.json, ema.safetensors, ae.safetensors and a tokenizer. The
transformer is `bagel_net`'s; the VAE is FLUX.1's, under the names of its first release.

Shapes: B samples, C latent channels (16), h x w latent pixels (an eighth of the image), T text tokens.
"""

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from omni_sched import linear_sigmas, shift_sigmas
from torch import Tensor, nn

from omni_rollout.files import read_json, safetensors_shapes
from omni_rollout.models.diffusers_model import PIXELS_PER_TOKEN, ImageModel, both, check_size, local_folder
from omni_rollout.types import Cond, Params, Parts, Prompt

MAX_TOKENS_PER_SIDE = 64  # along a side, as the weights have it; the released config.json says 32
MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")  # around the text, around the image
FILES = {"tokenizer": "tokenizer_config.json", "transformer": "llm_config.json", "vae": "ae.safetensors"}
WEIGHTS = {"transformer": "ema.safetensors", "vae": "ae.safetensors"}
BLOCKS = 4  # of the VAE's encoder, and of its decoder


class Bagel(ImageModel):
    """BAGEL for one checkpoint. Its guidance is `guidance_scale`, which released code calls cfg_text_scale.

    OPTIONS are those of released code: guidance acts on noise levels above cfg_interval_low up to cfg_interval_high;
    the guided velocity is shortened to the length of the unguided one, to no less than its cfg_renorm_min-th part.
    """

    PIPELINE = "BagelForConditionalGeneration"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "transformer": ("omni_rollout", "BagelTransformer"),
        "vae": ("diffusers", "AutoencoderKL"),
    }
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("BagelBlock",)
    LORA_TARGETS: ClassVar[tuple[str, ...]] = (  # as published: of the image's tokens alone
        "self_attn.q_proj_moe_gen",
        "self_attn.k_proj_moe_gen",
        "self_attn.v_proj_moe_gen",
        "self_attn.o_proj_moe_gen",
        "mlp_moe_gen.gate_proj",
        "mlp_moe_gen.up_proj",
        "mlp_moe_gen.down_proj",
    )
    OPTIONS: ClassVar[Mapping[str, float]] = {
        "cfg_interval_low": 0.4,
        "cfg_interval_high": 1.0,
        "cfg_renorm_min": 0.0,
        "timestep_shift": 3.0,
    }

    def __init__(self, path: str | Path) -> None:
        self.path, self.folder = str(path), local_folder(path)
        self.config: dict[str, Any] = {"_class_name": self.PIPELINE} | read_json(self.folder / "config.json")
        for part in ("tokenizer", "transformer"):
            self.config[part] = read_json(self.config_file(part))
        # No file says so: this is what released code does.
        self.config["vae"] = {"latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159}
        for name, known in (("hidden_act", "silu"), ("rope_scaling", None)):
            if (value := self.config["transformer"].get(name, known)) != known:
                raise ValueError(f"{name} of {self.config_file('transformer')} must be {known!r}, got {value!r:.80}")

    def config_file(self, part: str) -> Path:
        """Where the configuration of a part lies."""
        return self.folder / FILES[part]

    def weight_files(self, part: str = "transformer") -> list[Path]:
        """The safetensors file of a part; that of a hub id is fetched."""
        file = local_folder(self.path, WEIGHTS[part]) / WEIGHTS[part]
        if not file.is_file():
            raise ValueError(f"model is incomplete: {file} is missing")
        return [file]

    def check(self, params: Params) -> None:
        """Raises ValueError for a size or option that the model lacks."""
        super().check(params)
        check_size(params, PIXELS_PER_TOKEN, most=MAX_TOKENS_PER_SIDE)
        low, high, least, shift = (self.option(params, name) for name in self.OPTIONS)
        if not low < high:
            raise ValueError(f"cfg_interval_low must be < cfg_interval_high, got {low} and {high}")
        if not 0 <= least <= 1:
            raise ValueError(f"cfg_renorm_min must be in [0, 1], got {least}")
        if not shift > 0:
            raise ValueError(f"timestep_shift must be > 0, got {shift}")

    def sigmas(self, params: Params) -> Tensor:
        """The noise levels [S + 1] from 1 to 0, evenly spaced and shifted, whatever the size.

        Released code counts these S + 1 levels as its num_timesteps.
        """
        return shift_sigmas(linear_sigmas(params.num_inference_steps), self.option(params, "timestep_shift"))

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """The tokens of one prompt: `ids` [T] with `ids_mask` [T], True; `marks` [2], which enclose the image."""
        text = prompt.negative if negative else prompt.text
        begin, end, *marks = parts.tokenizer.convert_tokens_to_ids(list(MARKS))
        # Where there is no negative prompt, guidance leads away from no token at all.
        ids = [begin, *parts.tokenizer.encode(text, add_special_tokens=False), end] if text or not negative else []
        device = parts.vae.device
        return {
            "ids": torch.tensor(ids, dtype=torch.long, device=device),
            "ids_mask": torch.ones(len(ids), dtype=torch.bool, device=device),
            "marks": torch.tensor(marks, device=device),
        }

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """The velocity [B, C, h, w], float32, at x [B, C, h, w] and noise levels sigma [B].

        cond: as `encode` has it, with an axis B; with guidance also the negatives. Both halves of classifier-free
        guidance run as one batch at every level, those where it is off included: ranks that differ in their levels
        have equally much to do.
        """
        inputs = {name: cond[name] for name in ("ids", "ids_mask", "marks")}
        latents, levels = x, sigma
        guided = self.is_guided(params)
        if guided:
            inputs = {name: both(cond, name) for name in inputs}
            latents, levels = torch.cat([x, x]), torch.cat([sigma, sigma])
        velocity = net(
            hidden_states=latents,
            timestep=levels.float(),
            input_ids=inputs["ids"],
            attention_mask=inputs["ids_mask"],
            marks=inputs["marks"],
        ).float()
        if not guided:
            return velocity
        positive, negative = velocity.chunk(2)
        return self._guide(positive, negative, sigma, params)

    def _guide(self, positive: Tensor, negative: Tensor, sigma: Tensor, params: Params) -> Tensor:
        """Classifier-free guidance within its interval, no longer than the unguided velocity, sample by sample."""
        low, high, least, _ = (self.option(params, name) for name in self.OPTIONS)
        guided = negative + params.guidance_scale * (positive - negative)
        lengths = [velocity.flatten(1).norm(dim=1) for velocity in (positive, guided)]
        scale = (lengths[0] / (lengths[1] + 1e-8)).clamp(least, 1)
        inside = (sigma > low) & (sigma <= high)
        return torch.where(inside[:, None, None, None], guided * scale[:, None, None, None], positive)

    def _class(self, part: str) -> Any:
        from omni_rollout.models.bagel_net import BagelTransformer

        return BagelTransformer if part == "transformer" else super()._class(part)

    def _load(self, part: str, device: torch.device | str, dtype: torch.dtype) -> Any:
        if part != "tokenizer":
            return super()._load(part, device, dtype)
        tokenizer = self._class(part).from_pretrained(self.folder)
        if lacking := [mark for mark in MARKS if mark not in tokenizer.get_vocab()]:
            raise ValueError(f"tokenizer of {self.folder} must have the tokens {MARKS}, lacks {lacking}")
        return tokenizer

    def _read(self, part: str, dtype: torch.dtype) -> tuple[nn.Module, Collection[str]]:
        """A part with its weights, and the names of those that its file lacks."""
        from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
        from diffusers.models.model_loading_utils import load_state_dict

        module, weights = self._empty(part, buffers=True), load_state_dict(str(self.weight_files(part)[0]))
        if part == "vae":
            weights = convert_ldm_vae_checkpoint(weights, module.config)
        own = {name: weights[name].to(dtype) for name in module.state_dict() if name in weights}
        return module, module.load_state_dict(own, strict=False, assign=True).missing_keys

    def _make(self, part: str) -> nn.Module:
        if part == "transformer":
            cls, config = self._class(part), self.config[part]
            known = inspect.signature(cls.__init__).parameters
            return cls(**{name: config[name] for name in known if name in config})  # a language model's file has more
        shapes = safetensors_shapes(self.weight_files("vae"))  # no file says its widths but that of its weights
        widths = [shapes[f"encoder.down.{i}.block.0.conv2.weight"][0] for i in range(BLOCKS)]
        layers = sum(name.startswith("encoder.down.0.block.") and name.endswith(".conv2.weight") for name in shapes)
        return self._class("vae")(
            block_out_channels=widths,
            layers_per_block=layers,
            down_block_types=("DownEncoderBlock2D",) * BLOCKS,
            up_block_types=("UpDecoderBlock2D",) * BLOCKS,
            use_quant_conv=False,
            use_post_quant_conv=False,
            **self.config["vae"],
        )
