"""HunyuanImage-3.0 (arXiv 2509.23951): text to image by a language model of 64 experts, 80 billion weights.

Its weights and released code are under the Tencent Hunyuan Community License, which excludes the European Union, the
United Kingdom and South Korea. This file and its helpers were written without that code (see `hunyuan_image_net`).

A checkpoint is the released folder: config.json, generation_config.json, safetensors files of all parts with their
index, and a tokenizer. The transformer is in `hunyuan_image_net`, the VAE in `hunyuan_image_vae`.

Shapes: B samples, C latent channels (32), h x w latent pixels (a sixteenth of the image), T text tokens.
"""

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from omni_sched import shift_sigmas
from torch import Tensor, nn

from omni_rollout.files import read_json, safetensors_bytes, safetensors_files
from omni_rollout.models.diffusers_model import PIXELS_PER_TOKEN, ImageModel, cfg_batch, needed_mask
from omni_rollout.models.hub import local_folder
from omni_rollout.models.parts import open_tokenizer
from omni_rollout.types import Cond, Params, Parts, Prompt, to_device

TRAIN_STEPS = 1000
TEMPLATES = {  # the texts before and after a prompt
    "pretrain": ((), ()),
    "instruct": (("User: ",), ("\n\n", "Assistant: ", "<answer>")),
}
EXTRA_RATIOS = ((1024, 768), (1280, 720), (768, 1024), (720, 1280))  # height and width
EXTRA_SIZES = ((512, 512), (640, 640), (768, 768), (896, 896))
KNOWN = {  # the only supported values
    "attention_bias": False,
    "cfg_distilled": False,
    "hidden_act": "silu",
    "img_proj_type": "unet",
    "mlp_bias": False,
    "moe_drop_tokens": False,
    "moe_layer_num_skipped": 0,
    "norm_topk_prob": True,
    "patch_size": 1,
    "use_cla": False,
    "use_meanflow": False,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
}
KNOWN_OF_VAE = {"downsample_match_channel": True, "ffactor_spatial": PIXELS_PER_TOKEN, "upsample_match_channel": True}


class HunyuanImage(ImageModel):
    """HunyuanImage-3.0 for one checkpoint. Its guidance is `guidance_scale`, without variants."""

    PIPELINE = "HunyuanImage3ForCausalMM"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "tokenizer": ("transformers", "PreTrainedTokenizerFast"),
        "transformer": ("omni_rollout", "HunyuanImageTransformer"),
        "vae": ("omni_rollout", "HunyuanImageVAE"),
    }
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("HunyuanImageBlock",)
    EXPERT_NAMES: ClassVar[tuple[str, ...]] = ("HunyuanImageExperts",)
    LORA_TARGETS: ClassVar[tuple[str, ...]] = ("self_attn.qkv_proj", "self_attn.o_proj")  # as published
    NEGATES_TEXT = True

    def __init__(self, path: str | Path) -> None:
        self.path, self.folder = str(path), local_folder(path)
        config, drawing = (read_json(self.folder / f"{name}.json") for name in ("config", "generation_config"))
        vae = config.get("vae")
        if not isinstance(vae, dict):
            raise ValueError(f"vae of {self.folder / 'config.json'} must be an object, got {vae!r:.80}")
        for values, known in ((config, KNOWN), (vae, KNOWN_OF_VAE)):
            for name, value in known.items():
                if (actual := values.get(name, value)) != value:
                    raise ValueError(f"{name} of {self.folder / 'config.json'} must be {value!r}, got {actual!r:.80}")
        transformer = {name: _uniform_value(value) for name, value in config.items() if value is not None}
        transformer["latent_channels"] = vae.get("latent_channels", 32)
        tokenizer = read_json(self.folder / "tokenizer_config.json")
        self.config: dict[str, Any] = {"_class_name": self.PIPELINE, "transformer": transformer, "vae": vae}
        self.config |= {"tokenizer": tokenizer, "drawing": drawing}
        if (template := drawing.get("sequence_template", "pretrain")) not in TEMPLATES:
            names = " or ".join(TEMPLATES)
            raise ValueError(
                f"sequence_template of {self.config_file('drawing')} must be {names}, got {template!r:.80}"
            )
        self.template = TEMPLATES[template]
        if self.value("transformer", "moe_topk", int, 8) < 2:  # with a single expert, its released weight is not 1
            raise ValueError(f"moe_topk of {self.folder / 'config.json'} must be > 1")
        self.base = self.value("transformer", "image_base_size", int, 1024)
        self.sizes = buckets(self.base)

    def config_file(self, part: str) -> Path:
        """Return the file with the configuration of a part."""
        return self.folder / {"tokenizer": "tokenizer_config.json", "drawing": "generation_config.json"}.get(
            part, "config.json"
        )

    def weight_files(self, part: str = "transformer") -> list[Path]:
        """Return the safetensors files, which may hold weights of any part; fetch them for a hub id."""
        local_folder(self.path, "*.safetensors")
        return safetensors_files(self.folder, "model")

    def _num_bytes(self, part: str) -> int:
        # The files of the net hold the other parts too.
        return safetensors_bytes(self.folder, "model") if part in self.nets.values() else 0

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size or option; sizes are those of the released tokenizer."""
        super().check(params)
        height, width = params.height, params.width
        if (height, width) not in self.sizes:
            nearest = min(self.sizes, key=lambda size: abs(size[0] - height) + abs(size[1] - width))
            rule = f"height x width must be a size of the tokenizer, such as {nearest[0]} x {nearest[1]}"
            raise ValueError(f"{rule}, got {height} x {width}")

    def latent_shape(self, params: Params) -> tuple[int, int, int]:
        """Return (C, h, w)."""
        channels = self.value("vae", "latent_channels", int)
        return channels, params.height // PIXELS_PER_TOKEN, params.width // PIXELS_PER_TOKEN

    def sigmas(self, params: Params) -> Tensor:
        """Return the noise levels [S + 1] from 1 to 0, as in vLLM-Omni's port, the same for any size.

        The port's scheduler spaces steps evenly between the shifted ends of the training schedule, and shifts them
        again.
        """
        shift = self.value("drawing", "flow_shift", float, 3.0)
        lowest = shift_sigmas(torch.tensor(1 / TRAIN_STEPS), shift)
        levels = torch.linspace(1, float(lowest), params.num_inference_steps)
        return torch.cat([shift_sigmas(levels, shift), torch.zeros(1)])

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return the tokens of one prompt: `ids` [T], and `ids_mask` [T], which is all True.

        Without a negative prompt, the negative has a <cfg> token for each token of the prompt.
        """
        tokenizer = parts.tokenizer

        def read(*texts: str) -> list[int]:
            return [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]

        words = read(prompt.negative if negative and prompt.negative else prompt.text)
        if negative and not prompt.negative:
            words = [tokenizer.convert_tokens_to_ids("<cfg>")] * len(words)
        before, after = self.template
        ids = [tokenizer.bos_token_id, *read(*before), *words, *read(*after)]
        return {
            "ids": torch.tensor(ids, dtype=torch.long, device=parts.vae.device),
            "ids_mask": torch.ones(len(ids), dtype=torch.bool),
        }

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return `marks` [3], the tokens of the image's size and ratio."""
        names = ["<boi>", f"<img_size_{self.base}>", f"<img_ratio_{self.sizes[params.height, params.width]}>"]
        marks = parts.tokenizer.convert_tokens_to_ids(names)
        return {"marks": torch.tensor(marks, device=parts.vae.device)}

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, C, h, w], float32, at x [B, C, h, w] and noise levels sigma [B].

        cond: from `encode` and `condition`, with an axis B; with guidance also the negatives of `encode`, which run in
        the same batch. Entries of `omni_rollout.models.routing` replay the experts of sampling.
        """
        text = {name: cond[name] for name in ("ids", "ids_mask", "text_routes", "routes") if name in cond}
        marks, guided = cond["marks"], self.is_guided(params)
        if guided:
            text = {name: cfg_batch(cond, name) for name in text}
            x, sigma, marks = (torch.cat([t, t]) for t in (x, sigma, marks))
        velocity: Tensor = net(
            hidden_states=x,
            timestep=sigma.float(),
            input_ids=text["ids"],
            lengths=to_device(text["ids_mask"].sum(dim=1), x.device),
            marks=marks,
            attention_mask=needed_mask(text["ids_mask"], x.device),
            text_routes=text.get("text_routes"),
            routes=text.get("routes"),
        ).float()
        if guided:
            positive, negative = velocity.chunk(2)
            velocity = negative + params.guidance_scale * (positive - negative)
        return velocity

    def _statistics(self) -> tuple[float, float]:
        """Return the VAE's scale and shift; 1 and 0 if they are missing."""
        scale, shift = (self.config["vae"].get(f"{name}_factor") for name in ("scaling", "shift"))
        return scale or 1.0, shift or 0.0

    def _class(self, part: str) -> Any:
        from omni_rollout.models.hunyuan_image_net import HunyuanImageTransformer
        from omni_rollout.models.hunyuan_image_vae import HunyuanImageVAE

        classes = {"transformer": HunyuanImageTransformer, "vae": HunyuanImageVAE}
        return classes[part] if part in classes else super()._class(part)

    def _load(self, part: str, device: torch.device | str, dtype: torch.dtype) -> Any:
        if part != "tokenizer":
            return super()._load(part, device, dtype)
        tokenizer = open_tokenizer(self._class(part), self.folder)
        marks = ["<boi>", "<cfg>", f"<img_size_{self.base}>", *(f"<img_ratio_{i}>" for i in set(self.sizes.values()))]
        if missing := [mark for mark in marks if mark not in tokenizer.get_vocab()]:
            raise ValueError(f"tokenizer of {self.folder} must have the tokens of sizes and ratios, lacks {missing}")
        return tokenizer

    def _read(self, part: str, dtype: torch.dtype) -> tuple[nn.Module, Collection[str]]:
        """Return a part with its weights, and the names of missing weights."""
        from diffusers.models.model_loading_utils import load_state_dict

        module, prefix = self._empty(part, buffers=True), "vae." if part == "vae" else ""
        names = {f"{prefix}{name}": name for name in module.state_dict()}
        state: dict[str, Tensor] = {}
        for file in self.weight_files(part):
            weights = load_state_dict(str(file))
            state |= {names[name]: weight.to(dtype) for name, weight in weights.items() if name in names}
        return module, module.load_state_dict(state, strict=False, assign=True).missing_keys

    def _make(self, part: str) -> nn.Module:
        cls, config = self._class(part), self.config[part]
        known = inspect.signature(cls.__init__).parameters
        return cls(**{name: config[name] for name in known if name in config})  # the file has more entries


def _uniform_value(value: object) -> object:
    """Return a configuration value, or the common value of a list with one entry per layer."""
    is_uniform = isinstance(value, list) and value and all(item == value[0] for item in value)
    return value[0] if is_uniform and isinstance(value, list) else value


def buckets(base: int) -> dict[tuple[int, int], int]:
    """Return the sizes (height, width) of a model for about base x base pixels, each with the index of its ratio.

    Starting from the square, one side grows to twice the base and the other shrinks to half of it, in steps of a
    sixteenth. Ratios are numbered from the widest on. Four further ratios follow, and four further sizes have ratio 1.
    Sizes without whole tokens, which occur for small bases, are omitted.
    """
    step, low, high = base // 16, base // 2, base * 2
    tall, long, short = [], base, base
    while long < high or short > low:
        long, short = min(long + step, high), max(short - step, low)
        tall.append((long, short))
    wide = [(short, long) for long, short in reversed(tall)]
    ratios = [*wide, (base, base), *tall]
    indices = {size: i for i, size in enumerate([*ratios, *EXTRA_RATIOS])}
    indices |= {size: indices.get(size, len(wide)) for size in EXTRA_SIZES}
    return {size: i for size, i in indices.items() if not size[0] % PIXELS_PER_TOKEN and not size[1] % PIXELS_PER_TOKEN}
