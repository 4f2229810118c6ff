"""A row for every model: a small checkpoint, and the properties that must hold for it."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from build_tiny_models import (
    CHAT_WITH_MEDIA,
    build_qwen3_vl_processor,
    build_qwen_processor,
    build_qwen_tokenizer,
    tiny_checkpoint,
)
from helpers import CHECKPOINT, REPO
from omni_rollout import Params, Prompt
from omni_rollout.models.qwen_image21 import QwenImage21
from omni_rollout.models.qwen_image_edit import QwenImageEdit
from PIL import Image
from transformers import CLIPImageProcessorPil, Qwen3VLForConditionalGeneration, SiglipImageProcessorPil


def built(name: str) -> Callable[[], Path]:
    """Return a function that builds a checkpoint with random weights if it is not cached."""
    return lambda: tiny_checkpoint(name, REPO / ".pytest_cache" / "tiny-models")


def packed(noise: torch.Tensor) -> torch.Tensor:
    """Return latents [B, C, h, w] as QwenImagePipeline takes them: [B, (h/2)(w/2), 4C]."""
    B, C, h, w = noise.shape
    return noise.view(B, C, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, h * w // 4, C * 4)


@dataclass(frozen=True)
class Row:
    """One model on a small checkpoint.

    guided, unguided: parameters. more: further parameters, so that each option somewhere differs from its default.
    stock: returns further arguments of its pipeline for the parameters and the negative prompts; None if diffusers has
    no such pipeline, so that a separate file compares it. latents: initial noise as the pipeline takes it.
    without_gradient: the exact set of weights without a gradient. lora_layers: layers that LORA_TARGETS wraps.
    nearest: unsupported sizes, and those named in the error; none for sound. refused: invalid changes of `unguided`,
    and the error's rule. statistics: of the VAE's latents, where the checkpoint's are trivial. guided_tolerance: for
    guided images, in [0, 1]. images: height and width of a prompt's references. instead: option values for comparisons
    whose defaults take long. idle: options that only references or two experts use, which the row does not have, or
    that another row tests. pipe: adapts the stock pipeline for comparison, or returns another. never_guided: True if
    the model has no classifier-free guidance; `guided` then has other parameters, or the same. unit: sides are
    multiples of this many pixels; 0 if the model has a list of sizes, and `refused` has others. unseen: prefixes of
    names of weights that only the sound needs. given: references as arguments of the stock pipeline. stock_parts: parts
    that the stock pipeline cannot load here. alone: True if it samples prompts one by one, because its images depend on
    their batch. modular: opens the stock pipeline of a folder if it is a modular one.
    """

    checkpoint: Callable[[], Path]
    unguided: Params
    guided: Params
    stock: Callable[[Params, list[str]], dict[str, Any]] | None
    without_gradient: frozenset[str]
    lora_layers: int
    nearest: tuple[tuple[dict[str, int], int], ...]
    more: tuple[Params, ...] = ()
    refused: tuple[tuple[dict[str, Any], str], ...] = ()
    latents: Callable[[torch.Tensor], torch.Tensor | dict[str, torch.Tensor]] = lambda noise: noise
    statistics: dict[str, Any] = field(default_factory=dict)
    guided_tolerance: float = 1e-5
    images: tuple[tuple[int, int], ...] = ()
    instead: Mapping[str, float] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()
    pipe: Callable[[Any], Any] = lambda pipe: None
    never_guided: bool = False
    unit: int = 16
    unseen: tuple[str, ...] = ()
    given: Callable[[list[Any]], dict[str, Any]] = lambda images: {"image": images if len(images) > 1 else images[0]}
    stock_parts: Callable[[], dict[str, Any]] = dict
    alone: bool = False
    modular: Callable[[Path, torch.dtype], Any] | None = None

    @property
    def has_size(self) -> bool:
        """True if it generates something visible."""
        return bool(self.nearest) or not self.unit

    def references(self, seed: int) -> tuple[torch.Tensor, ...]:
        """Return a prompt's references, uint8 [H, W, 3]: noise in large squares."""
        generator = torch.Generator().manual_seed(seed)
        squares = [torch.randint(0, 256, (-(-h // 8), -(-w // 8), 3), generator=generator) for h, w in self.images]
        whole = [image.repeat_interleave(8, dim=0).repeat_interleave(8, dim=1).to(torch.uint8) for image in squares]
        return tuple(image[:h, :w] for image, (h, w) in zip(whole, self.images, strict=True))

    def stock_pipeline(self, folder: Path, dtype: torch.dtype) -> Any:
        """Return the stock pipeline of a checkpoint, without progress bars."""
        from diffusers import DiffusionPipeline

        if self.modular:
            return self.modular(folder, dtype)
        index = json.loads((folder / "model_index.json").read_text("utf-8"))
        missing = {part: None for part, kind in index.items() if str(kind).endswith("Processor']")}
        pipe = DiffusionPipeline.from_pretrained(folder, dtype=dtype, **missing | self.stock_parts())
        pipe.set_progress_bar_config(disable=True)
        return self.pipe(pipe) or pipe

    def draw_stock(self, pipe: Any, prompts: Sequence[Prompt], params: Params, noise: torch.Tensor) -> torch.Tensor:
        """Return its media from noise [B, ...], channels before height or points; one by one with references."""
        batches = [[i] for i in range(len(prompts))] if self.images or self.alone else [range(len(prompts))]
        drawn = []
        for batch in batches:
            own = [prompts[i] for i in batch]
            images = [Image.fromarray(image.numpy()) for image in own[0].images]
            latents = self.latents(noise[list(batch)])
            size = {"height": params.height, "width": params.width} if self.has_size else {}
            output = pipe(
                prompt=[prompt.text for prompt in own],
                **size,
                num_inference_steps=params.num_inference_steps,
                **(latents if isinstance(latents, dict) else {"latents": latents}),
                output_type="pt",
                **self.stock(params, [prompt.negative for prompt in own]),
                **(self.given(images) if images else {}),
            )
            drawn += next(output[kind] for kind in ("images", "frames", "audios") if kind in output)
        return torch.stack(drawn)


def stock_qwen_edit(params: Params, negative: list[str]) -> dict[str, Any]:
    """Return the arguments of the stock editing pipelines."""
    scale = params.guidance.get("true_cfg_scale", 1.0)
    return {"true_cfg_scale": scale, "negative_prompt": negative if scale > 1 else None}


def mend_qwen_edit(pipe: Any) -> None:
    """Give a stock pipeline its processor, small areas, and token types for its encoder.

    Without torchvision, no processor can be loaded. The areas are constants. diffusers drops the processor's
    mm_token_type_ids, without which transformers 5 numbers image tokens like words (diffusers issue 14194).
    """

    def tell(encoder: Any, args: Any, inputs: dict[str, Any]) -> Any:
        return args, {**inputs, "mm_token_type_ids": (inputs["input_ids"] == encoder.config.image_token_id).int()}

    pipe.processor = build_qwen_processor(pipe.tokenizer)
    pipe.text_encoder.register_forward_pre_hook(tell, with_kwargs=True)
    module = sys.modules[type(pipe).__module__]
    if hasattr(module, "VAE_IMAGE_SIZE"):
        module.VAE_IMAGE_SIZE = EDIT_AREA
    else:
        fit = module.calculate_dimensions
        module.calculate_dimensions = lambda area, ratio: fit(EDIT_AREA, ratio)
        QwenImageEdit.SEEN_AREA = EDIT_AREA  # the area is the same there


def processor_of_qwen_image21() -> dict[str, Any]:
    """Return the stock pipeline's processor, which cannot be loaded without torchvision."""
    tokenizer = build_qwen_tokenizer()
    tokenizer.chat_template = CHAT_WITH_MEDIA
    return {"processor": build_qwen3_vl_processor(tokenizer)}


def mend_qwen_image21(pipe: Any) -> None:
    """Put the stock pipeline's images on white, and make the model's encoder see equally small areas."""
    finish = pipe.image_processor.postprocess

    def put_on_white(decoded: torch.Tensor, output_type: str) -> torch.Tensor:
        color, alpha = finish(decoded, output_type=output_type).split([3, 1], dim=1)
        assert alpha.std() > 0.01
        return color * alpha + 1 - alpha

    pipe.image_processor.postprocess = put_on_white
    QwenImage21.SEEN_AREA = EDIT_AREA


def mend_flux2(pipe: Any) -> None:
    """Make klein's stock pipeline, which guides away from the empty text, guide away from NEGATIVE instead."""
    encode = pipe.encode_prompt
    pipe.encode_prompt = lambda prompt, **others: encode([text or NEGATIVE for text in prompt], **others)


def reduced_for_flux2(images: Sequence[Image.Image]) -> dict[str, Any]:
    """Return the references of FLUX.2's stock pipeline, downscaled by its own processor to the rows' area."""
    from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor

    area = int(FLUX2_REFERENCES["image_area"])
    return {"image": [Flux2ImageProcessor._resize_if_exceeds_area(image, area) for image in images]}


def mend_flux2_dev(pipe: Any) -> None:
    """Give dev's stock pipeline the text half of its processor; the rest needs torchvision."""
    pipe.tokenizer = build_qwen_tokenizer()


class StockFlux3:
    """The stock pipeline of FLUX.3, called like ordinary pipelines: one prompt, with the scale as an argument."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        tokenizer = build_qwen_tokenizer()
        tokenizer.chat_template = CHAT_WITH_MEDIA
        blocks = diffusers.modular_pipelines.Flux3AutoBlocks()
        del blocks.sub_blocks["prompt_upsampler"]
        self.modular = blocks.init_pipeline()
        load = {
            "transformer": diffusers.Flux3Transformer2DModel,
            "vae": diffusers.AutoencoderKLFlux2,
            "text_encoder": Qwen3VLForConditionalGeneration,
        }
        parts = {name: kind.from_pretrained(folder, subfolder=name, dtype=dtype) for name, kind in load.items()}
        self.modular.update_components(**parts, tokenizer=build_qwen3_vl_processor(tokenizer))
        self.modular.set_progress_bar_config(disable=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.modular, name)

    @property
    def transformer(self) -> Any:
        """Net that samples."""
        return self.modular.transformer

    @transformer.setter
    def transformer(self, net: Any) -> None:
        self.modular.update_components(transformer=net)

    def __call__(self, prompt: list[str], guidance_scale: float, negative_prompt: list[str], **others: Any) -> Any:
        """Return the pipeline's images."""
        guider = diffusers.ClassifierFreeGuidance(guidance_scale=guidance_scale)
        self.modular.update_components(guider=guider)
        negative = {"negative_prompt": negative_prompt[0]} if guidance_scale > 1 else {}
        return {"images": self.modular(prompt=prompt[0], **negative, **others, output="images")}


def mend_wan(pipe: Any, *, shift: float = 5.0) -> Any:
    """Give a stock pipeline the noise levels of Wan's released code, Euler steps, and the parts that are missing here.

    Its scheduler is another solver, and begins a thousandth below pure noise.
    """
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    set_timesteps = pipe.scheduler.set_timesteps
    pipe.scheduler.set_timesteps = lambda n, device: set_timesteps(sigmas=[1 - i / n for i in range(n)], device=device)
    if getattr(pipe, "image_encoder", None):
        pipe.image_processor = CLIPImageProcessorPil.from_pretrained(
            pipe.config._name_or_path, subfolder="image_processor"
        )
    return pipe


def mend_wan_ti2v(pipe: Any) -> Any:
    """Do the same with the parts of TI2V-5B in the pipeline that takes frames."""
    taken = {name: part for name, part in pipe.components.items() if name != "scheduler"}
    frames = diffusers.WanImageToVideoPipeline(scheduler=pipe.scheduler, expand_timesteps=True, **taken)
    frames.set_progress_bar_config(disable=True)
    return mend_wan(frames)


def stock_wan(params: Params, negative: list[str]) -> dict[str, Any]:
    """Return the arguments of the stock video pipelines."""
    second = params.guidance.get("guidance_scale_2")
    return {
        "num_frames": params.num_frames,
        "guidance_scale": params.guidance_scale,
        "negative_prompt": negative if params.guidance_scale > 1 else None,
        **({"guidance_scale_2": second} if second else {}),
    }


def mend_ltx2(pipe: Any) -> None:
    """Make a stock pipeline accept initial noise of the sound unchanged, as it does for the frames."""
    pipe._normalize_audio_latents = lambda latents, mean, std: latents


def mend_ltx2_first(pipe: Any) -> Any:
    """Return the stock pipeline that takes a first frame, with initial noise as another argument."""
    first = diffusers.LTX2ImageToVideoPipeline(**pipe.components)
    first.set_progress_bar_config(disable=True)
    mend_ltx2(first)
    first.__class__ = type("First", (type(first),), {"__call__": ltx2_from_first_frame})
    return first


def ltx2_from_first_frame(pipe: Any, *, latents: torch.Tensor, **others: Any) -> Any:
    """Run the pipeline from noise [B, tokens, channels] around the first frame."""
    noise = latents.transpose(1, 2).unflatten(2, (2, 1, 2))
    module = sys.modules[diffusers.LTX2ImageToVideoPipeline.__module__]
    drawn = module.randn_tensor
    module.randn_tensor = lambda shape, **how: noise if len(shape) == 5 else drawn(shape, **how)
    try:
        return diffusers.LTX2ImageToVideoPipeline.__call__(pipe, **others)
    finally:
        module.randn_tensor = drawn


def stock_ltx2(params: Params, negative: list[str]) -> dict[str, Any]:
    """Return the arguments of the stock pipeline of frames and sound, with its further guidance turned off."""
    off = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
    return {
        **off,
        **{f"audio_{name}": value for name, value in off.items()},
        "num_frames": params.num_frames,
        "frame_rate": params.frame_rate,
        "guidance_scale": params.guidance_scale,
        "audio_guidance_scale": params.guidance.get("audio_guidance_scale"),
        "negative_prompt": negative,
    }


def tokens_of_ltx2(noise: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return latents [B, n] of LTX2's sizes as its pipeline takes them, separately: each [B, tokens, channels]."""
    frames, sound = noise.split([16 * 2 * 1 * 2, 9 * 8], dim=1)
    return {"latents": frames.unflatten(1, (16, -1)).transpose(1, 2), "audio_latents": sound.unflatten(1, (-1, 8))}


def mend_stable_audio(pipe: Any) -> None:
    """Make a stock pipeline load adapters, for which diffusers' other nets have a mixin."""
    net = pipe.transformer
    net.__class__ = type(type(net).__name__, (type(net), diffusers.loaders.PeftAdapterMixin), {})
    open_adapters(pipe)


def open_adapters(pipe: Any) -> None:
    """Give a stock pipeline without `load_lora_weights` that of its net."""
    load = partial(pipe.transformer.load_lora_adapter, weight_name=ADAPTER)
    vars(pipe)["load_lora_weights"] = partial(load, prefix="transformer")


def mend_hunyuan_video(pipe: Any) -> None:
    """Make a stock pipeline take the scale, which its guider holds, as an argument, and decode several videos.

    It gets fewer masked tokens, for texts and for an image that is not given.
    """
    pipe.vae.enable_slicing()
    open_adapters(pipe)
    pipe.tokenizer_max_length, pipe.vision_num_semantic_tokens = 500, 2
    if hasattr(pipe, "image_encoder"):
        folder = pipe.config._name_or_path
        pipe.feature_extractor = SiglipImageProcessorPil.from_pretrained(folder, subfolder="feature_extractor")
    pipe.__class__ = type("Guided", (type(pipe),), {"__call__": guided_hunyuan_video})


def guided_hunyuan_video(pipe: Any, *, guidance_scale: float, height: int, width: int, **others: Any) -> Any:
    """Run the pipeline with this scale; the one for given frames finds their size itself."""
    pipe.guider.guidance_scale = guidance_scale
    size = {} if "image" in others else {"height": height, "width": width}
    return super(type(pipe), pipe).__call__(**size, **others)


TWO_SCALES = {"guidance": {"flow_shift": 5.0, "guidance_scale_2": 3.0}}
WAN = Params(6, 32, 64, num_frames=5, frame_rate=16.0, guidance={"flow_shift": 5.0})
LTX2 = Params(4, 32, 64, num_frames=9, frame_rate=24.0)
FLUX2 = Params(6, 48, 80)
FLUX2_REFERENCES = {"image_area": 64.0 * 96}  # smaller than the rows' references, whose sides stay at least 64
NEGATIVE = "bad and blurry"
SHORT_TEXTS = tuple(
    ({"guidance": {"max_sequence_length": length}}, f"max_sequence_length must be .* from 1 to 512, got {length:g}$")
    for length in (0, 77.5, 513)
)
KONTEXT = {"image_area": 48 * 64}
EDIT_AREA = 64 * 64
EDIT = {"image_area": EDIT_AREA}
ADAPTER = "pytorch_lora_weights.safetensors"
SECOND = {"duration": 1.0}
BAGEL_SIZES = {"vae_max_size": 64.0, "vit_max_size": 56.0}
ROWS = {
    "qwen-image": Row(
        checkpoint=lambda: CHECKPOINT,
        unguided=Params(6, 32, 96),
        guided=Params(6, 32, 96, guidance={"true_cfg_scale": 4.0}),
        stock=lambda params, negative: {
            "true_cfg_scale": params.guidance.get("true_cfg_scale", 1.0),
            "negative_prompt": negative if params.guidance else None,
        },
        without_gradient=frozenset(
            f"transformer_blocks.3.{name}"
            for name in (
                *("attn.add_q_proj.weight", "attn.add_q_proj.bias", "attn.norm_added_q.weight"),
                *("attn.to_add_out.weight", "attn.to_add_out.bias", "txt_mlp.net.0.proj.weight"),
                *("txt_mlp.net.0.proj.bias", "txt_mlp.net.2.weight", "txt_mlp.net.2.bias"),
            )
        ),  # the last block's text stream, which ends there
        lora_layers=4 * 12,
        nearest=(({"height": 56}, 64),),
        latents=packed,
        statistics={"latents_mean": [0.5] * 16, "latents_std": [2.0] * 16},
        guided_tolerance=3e-5,  # its rescaling divides by the norm of a difference, ours in float32
    ),
    **{
        name: Row(
            checkpoint=built("bagel"),
            unguided=Params(6, 48, 80, guidance=sizes),
            guided=Params(6, 48, 80, guidance_scale=4.0, guidance=sizes),
            more=tuple(
                Params(6, 48, 80, guidance_scale=4.0, guidance=sizes | knobs)
                for knobs in (
                    {"cfg_interval_low": 0.0, "timestep_shift": 1.0, "cfg_renorm_type": 1},
                    {"cfg_interval_high": 0.9, "cfg_renorm_min": 0.95, "cfg_renorm_type": 2, "cfg_img_scale": 3.0},
                )
            ),
            stock=None,
            without_gradient=frozenset(  # the last layer's text part, which ends there, and a fixed table
                [
                    "latent_pos_embed.pos_embed",
                    "language_model.model.norm.weight",
                    *(
                        f"language_model.model.layers.2.{name}"
                        for name in (
                            *("self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.q_norm.weight"),
                            *("self_attn.o_proj.weight", "post_attention_layernorm.weight"),
                            *("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),
                        )
                    ),
                ]
            ),
            lora_layers=3 * 7,
            nearest=(({"height": 56}, 64), ({"width": 1040}, 1024)),
            refused=(
                ({"guidance": {"cfg_img_scale": 0.5}}, r"cfg_img_scale must be in \[1, inf\], got 0.5"),
                ({"guidance": {"cfg_interval_low": 1.0}}, "cfg_interval_low must be < cfg_interval_high"),
                ({"guidance": {"cfg_renorm_type": 3.0}}, "cfg_renorm_type must be 0 .*, 1 .* or 2 .*, got 3"),
                ({"guidance": {"cfg_renorm_min": 1.5}}, r"cfg_renorm_min must be in \[0, 1\]"),
                ({"guidance": {"timestep_shift": 0.0}}, "timestep_shift must be > 0"),
                ({"guidance": {"vae_max_size": 1040.0}}, r"vae_max_size must be in \[16, 1024\], got 1040"),
                ({"guidance": {"vit_max_size": 13.0}}, r"vit_max_size must be in \[14, 980\], got 13"),
            ),
            images=images,
            instead={"vae_max_size": 96.0, "vit_max_size": 84.0},
            idle=frozenset() if images else frozenset(BAGEL_SIZES),
        )
        for name, sizes, images in (
            ("bagel", {}, ()),
            ("bagel-edit", BAGEL_SIZES, ((40, 90),)),
            ("bagel-edit-two", BAGEL_SIZES, ((40, 90), (70, 50))),
        )
    },
    "hunyuan-image": Row(
        checkpoint=built("hunyuan-image"),
        unguided=Params(6, 48, 80),
        guided=Params(6, 48, 80, guidance_scale=5.0),
        stock=None,
        without_gradient=frozenset(),
        lora_layers=3 * 2,
        nearest=(),
        refused=(
            ({"height": 56}, "height x width must be a size of the tokenizer, such as 48 x 80, got 56 x 80"),
            ({"height": 64, "width": 96}, "such as 32 x 96, got 64 x 96"),
            ({"height": 0, "width": 0}, "such as 32 x 96, got 0 x 0"),
        ),
        unit=0,
    ),
    **{
        name: Row(
            checkpoint=built(name),
            unguided=Params(6, 48, 80, guidance=EDIT),
            guided=Params(6, 48, 80, guidance={"true_cfg_scale": 4.0, **EDIT}),
            stock=stock_qwen_edit,
            without_gradient=frozenset(
                f"transformer_blocks.2.{name}"
                for name in (
                    *("attn.add_q_proj.weight", "attn.add_q_proj.bias", "attn.norm_added_q.weight"),
                    *("attn.to_add_out.weight", "attn.to_add_out.bias", "txt_mlp.net.0.proj.weight"),
                    *("txt_mlp.net.0.proj.bias", "txt_mlp.net.2.weight", "txt_mlp.net.2.bias"),
                )
            ),
            lora_layers=3 * 12,
            nearest=(({"height": 56}, 64),),
            refused=(({"guidance": {"image_area": 100.0}}, "image_area must be >= 1024 pixels, got 100"),),
            latents=packed,
            statistics={"latents_mean": [0.5] * 16, "latents_std": [2.0] * 16},
            images=images,
            instead={"image_area": 96 * 96},
            pipe=mend_qwen_edit,
        )
        for name, images in (
            ("qwen-image-edit", ((40, 72),)),
            ("qwen-image-edit-plus", ((40, 72), (60, 50))),
        )
    },
    **{
        name: Row(
            checkpoint=built("qwen-image21"),
            unguided=Params(6, 64, 96, guidance=EDIT if images else {}),
            guided=Params(6, 64, 96, guidance={"true_cfg_scale": 4.0} | (EDIT if images else {})),
            stock=lambda params, negative: stock_qwen_edit(params, negative) | {"output_resolution": 64},
            without_gradient=frozenset(),
            lora_layers=3 * 7,
            nearest=(({"height": 80}, 64), ({"width": 100}, 96)),
            refused=(
                ({"guidance_scale": 4.0}, "guidance_scale must be 1 for a QwenImage21Pipeline, .*, got 4"),
                ({"guidance": {"image_area": 100.0}}, "image_area must be >= 1024 pixels, got 100"),
            ),
            latents=lambda noise: noise.flatten(2).mT,
            images=images,
            instead={"image_area": 96 * 96},
            idle=frozenset() if images else frozenset(["image_area"]),
            pipe=mend_qwen_image21,
            unit=32,
            stock_parts=processor_of_qwen_image21,
            alone=True,
        )
        for name, images in (("qwen-image21", ()), ("qwen-image21-edit", ((40, 72), (60, 50))))
    },
    **{
        f"flux2-{name}": Row(
            checkpoint=built(f"flux2-{name}"),
            unguided=replace(FLUX2, guidance=FLUX2_REFERENCES if images else {}),
            guided=replace(FLUX2, guidance_scale=scale, guidance=FLUX2_REFERENCES if images else {}),
            stock=lambda params, negative: {"guidance_scale": params.guidance_scale},
            without_gradient=frozenset(),
            lora_layers=2 * 12 + 2,
            nearest=(({"height": 56}, 64),),
            refused=(*refused, ({"guidance": {"image_area": 100.0}}, "image_area must be >= 256 pixels, got 100")),
            images=images,
            idle=frozenset() if images else frozenset(["image_area"]),
            given=reduced_for_flux2,
            pipe=mend_flux2_dev if name == "dev" else mend_flux2,
            never_guided=name != "klein-base",
        )
        for name, scale, images, refused in (
            ("klein", 1.0, (), (({"guidance_scale": 4.0}, "guidance_scale must be 1 for a distilled .*, got 4"),)),
            ("klein-base", 4.0, ((80, 100), (70, 64)), ()),
            ("dev", 2.5, ((80, 120),), ()),
        )
    },
    **{
        name: Row(
            checkpoint=built("flux3"),
            unguided=FLUX2,
            guided=replace(FLUX2, guidance_scale=4.0),
            stock=lambda params, negative: {"guidance_scale": params.guidance_scale, "negative_prompt": negative},
            without_gradient=frozenset()
            if images
            else frozenset(
                [
                    "early_stream_modulations.image_cond.linear.weight",
                    "single_stream_modulations.image_cond.linear.weight",
                    "x_embedders.image_cond.weight",
                    *(
                        f"mode_blocks.image_cond.0.{layer}.weight"
                        for layer in (
                            *("attn.norm_q", "attn.norm_k", "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
                            *("ff.linear_in", "ff.linear_out"),
                        )
                    ),
                ]
            ),
            lora_layers=(3 + 2) * 6,
            nearest=(({"height": 56}, 64),),
            images=images,
            alone=True,
            modular=StockFlux3,
        )
        for name, images in (("flux3", ()), ("flux3-edit", ((70, 100),)), ("flux3-edit-two", ((80, 100), (70, 64))))
    },
    **{
        f"sd35-{size}": Row(
            checkpoint=built(f"sd35-{size}"),
            unguided=Params(6, 48, 80),
            guided=Params(6, 48, 80, guidance_scale=4.5, guidance={"max_sequence_length": 41}),
            stock=lambda params, negative: {
                **params.guidance,
                "guidance_scale": params.guidance_scale,
                "negative_prompt": negative if params.guidance_scale > 1 else None,
            },
            without_gradient=frozenset(  # the last block has no text queries
                f"transformer_blocks.2.attn.{name}"
                for name in ("add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight")
            ),
            lora_layers=3 * 8 - 1,
            nearest=(({"height": 56}, 64), ({"width": 400}, 384)),
            refused=SHORT_TEXTS,
        )
        for size in ("medium", "large")
    },
    **{
        name: Row(
            checkpoint=built(name),
            unguided=Params(6, 48, 80, guidance_scale=0.0),
            guided=Params(6, 48, 80, guidance_scale=3.5),
            stock=lambda params, negative: {"guidance_scale": params.guidance_scale, "negative_prompt": negative},
            without_gradient=frozenset(),
            lora_layers=(2 + 2) * 4,
            nearest=(({"height": 56}, 64),),
            latents=packed,
            statistics={"latents_mean": [0.5] * 16, "latents_std": [2.0] * 16},
        )
        for name in ("krea2", "krea2-turbo")
    },
    "z-image": Row(
        checkpoint=built("z-image"),
        unguided=Params(6, 48, 80, guidance_scale=0.0),
        guided=Params(6, 48, 80, guidance_scale=3.0),
        more=(
            Params(6, 48, 80, guidance_scale=3.0, guidance={"cfg_truncation": 0.4}),
            Params(6, 48, 80, guidance_scale=3.0, guidance={"cfg_normalization": 0.5, "max_sequence_length": 12}),
            Params(6, 48, 80, guidance_scale=0.5, guidance={"cfg_truncation": 0.2, "cfg_normalization": 1.0}),
        ),
        stock=lambda params, negative: {
            "guidance_scale": params.guidance_scale,
            "negative_prompt": negative,
            "cfg_truncation": params.guidance.get("cfg_truncation", 1.0),
            "cfg_normalization": params.guidance.get("cfg_normalization", 0.0),
            "max_sequence_length": params.guidance.get("max_sequence_length", 512),
        },
        without_gradient=frozenset(),
        lora_layers=4 * 7,
        nearest=(({"height": 56}, 64), ({"width": 400}, 384)),
        refused=(
            ({"guidance": {"cfg_truncation": 1.5}}, r"cfg_truncation must be in \[0, 1\], got 1.5"),
            ({"guidance": {"cfg_normalization": -1.0}}, r"cfg_normalization must be in \[0, inf\], got -1.0"),
            ({"guidance": {"max_sequence_length": 577.0}}, "max_sequence_length must be .* from 1 to 576, got 577"),
        ),
    ),
    **{
        f"flux-{name}": Row(
            checkpoint=built(f"flux-{name}"),
            unguided=Params(6, 48, 80, guidance_scale=scale),
            guided=Params(6, 48, 80, guidance_scale=scale, guidance={"true_cfg_scale": 3.0}),
            more=(Params(6, 48, 80, guidance_scale=1.0, guidance={"max_sequence_length": 256}),),
            stock=lambda params, negative: {
                **params.guidance,
                "guidance_scale": params.guidance_scale,
                "negative_prompt": negative,
            },
            without_gradient=frozenset(),
            lora_layers=2 * 12 + 2 * 3,
            nearest=(({"height": 56}, 64),),
            refused=(refused, *SHORT_TEXTS),
            latents=packed,
        )
        for name, scale, refused in (
            ("dev", 3.5, ({"guidance_scale": -0.5}, "guidance_scale must be >= 0, got -0.5")),
            ("schnell", 1.0, ({"guidance_scale": 3.5}, "guidance_scale must be 1 .*, got 3.5")),
        )
    },
    "flux-kontext": Row(
        checkpoint=built("flux-kontext"),
        unguided=Params(6, 48, 80, guidance_scale=2.5, guidance=KONTEXT),
        guided=Params(
            6, 48, 80, guidance_scale=2.5, guidance={"true_cfg_scale": 3.0, "max_sequence_length": 40, **KONTEXT}
        ),
        stock=lambda params, negative: {
            "guidance_scale": params.guidance_scale,
            "true_cfg_scale": params.guidance.get("true_cfg_scale", 1.0),
            "negative_prompt": negative,
            "max_sequence_length": params.guidance.get("max_sequence_length", 512),
            "max_area": params.height * params.width,  # its images have about this many pixels, whatever is requested
            "_auto_resize": False,
        },
        without_gradient=frozenset(),
        lora_layers=2 * 12 + 2 * 3,
        nearest=(({"height": 56}, 64),),
        refused=(({"guidance": {"image_area": 100.0}}, "image_area must be >= 256 pixels, got 100"), *SHORT_TEXTS),
        latents=packed,
        images=((48, 64),),
        instead={"image_area": 96 * 96},
    ),
    **{
        name: Row(
            checkpoint=built(name.removesuffix("-first")),
            unguided=replace(WAN, **changes),
            guided=replace(WAN, guidance_scale=4.0, **changes, **(TWO_SCALES if experts else {})),
            stock=stock_wan,
            without_gradient=frozenset(),
            lora_layers=20 * (1 + experts),
            nearest=(({"height": 40}, 32), ({"width": 1100}, 1024 if unit == 16 else 1088)),
            refused=(
                ({"num_frames": 7}, r"num_frames must be 4k \+ 1, up to 253, such as 9, got 7"),
                ({"num_frames": 300}, r"num_frames must be 4k \+ 1, up to 253, such as 253, got 300"),
                ({"guidance": {"flow_shift": -1.0}}, "flow_shift must be > 0, or 0 for the checkpoint's, got -1"),
                (
                    {"guidance": {"guidance_scale_2": 0.5}},
                    "guidance_scale_2 must be >= 1, or 0 for guidance_scale, got 0.5"
                    if experts
                    else "guidance_scale_2 must be 0 for a checkpoint without a transformer_2, got 0.5",
                ),
            ),
            images=images,
            idle=frozenset(["guidance_scale_2"] * (not experts) + ["flow_shift"] * bool(changes)),
            pipe=pipe,
            unit=unit,
            given=lambda images: dict(zip(("image", "last_image"), images, strict=False)),
        )
        for name, unit, images, experts, pipe, changes in (
            ("wan21", 16, (), False, partial(mend_wan, shift=3.0), {"guidance": {}}),
            ("wan22", 16, (), True, mend_wan, {}),
            ("wan22-ti2v", 32, (), False, mend_wan, {}),
            ("wan22-ti2v-first", 32, ((40, 90),), False, mend_wan_ti2v, {}),
            ("wan21-i2v", 16, ((40, 90),), False, mend_wan, {}),
            ("wan22-i2v", 16, ((40, 90), (32, 64)), True, mend_wan, {}),
        )
    },
    **{
        name: Row(
            checkpoint=built("ltx23"),
            unguided=LTX2,
            guided=replace(LTX2, guidance_scale=4.0),
            more=(
                replace(LTX2, guidance_scale=3.0, guidance={"audio_guidance_scale": 7.0}),
                replace(LTX2, guidance={"audio_guidance_scale": 2.0}),
            ),
            stock=stock_ltx2,
            without_gradient=frozenset(),
            lora_layers=4 * (6 * 4 + 2 * 2),
            nearest=(({"height": 40}, 32), ({"width": 1100}, 1088)),
            refused=(
                ({"num_frames": 7}, r"num_frames must be 8k \+ 1, such as 9, got 7"),
                ({"frame_rate": 1e3}, r"frame_rate must leave 9 frames at least 0.02 s of sound, got 1000"),
            ),
            latents=tokens_of_ltx2,
            pipe=pipe,
            images=images,
            unit=32,
            unseen=(
                "audio_scale_shift_table",
                "audio_proj_out.",
                "transformer_blocks.3.audio_ff.",
                "transformer_blocks.3.video_to_audio_attn.",
            ),
        )
        for name, images, pipe in (("ltx23", (), mend_ltx2), ("ltx23-first", ((40, 90),), mend_ltx2_first))
    },
    **{
        name: Row(
            checkpoint=built(name),
            unguided=Params(4, 32, 64, num_frames=5),
            guided=Params(4, 32, 64, num_frames=5, guidance_scale=6.0),
            stock=lambda params, negative: {
                "num_frames": params.num_frames,
                "guidance_scale": params.guidance_scale,
                "negative_prompt": negative,
            },
            without_gradient=frozenset(  # the last block's part for words, and the part for an absent frame
                [
                    *(
                        f"transformer_blocks.1.{layer}"
                        for layer in (
                            *("attn.add_q_proj.weight", "attn.add_q_proj.bias", "attn.norm_added_q.weight"),
                            *("attn.to_add_out.weight", "attn.to_add_out.bias", "ff_context.net.0.proj.weight"),
                            *("ff_context.net.0.proj.bias", "ff_context.net.2.weight", "ff_context.net.2.bias"),
                        )
                    ),
                    *(
                        f"image_embedder.{layer}.{kind}"
                        for layer in ("norm_in", "linear_1", "linear_2", "norm_out")
                        for kind in ("weight", "bias")
                        if not images
                    ),
                ]
            ),
            lora_layers=2 * 12 + 6,
            nearest=(({"height": 40}, 32),),
            refused=(({"num_frames": 7}, r"num_frames must be 4k \+ 1, such as 9, got 7"),),
            images=images,
            pipe=mend_hunyuan_video,
        )
        for name, images in (("hunyuan-video15", ()), ("hunyuan-video15-i2v", ((40, 90),)))
    },
    "stable-audio3": Row(
        checkpoint=built("stable-audio3"),
        unguided=Params(6, 512, 512, guidance=SECOND),
        guided=Params(6, 512, 512, guidance_scale=4.0, guidance=SECOND),
        more=(Params(6, 512, 512, guidance_scale=4.0, guidance={**SECOND, "logsnr_min": -5.0, "logsnr_max": 3.0}),),
        stock=lambda params, negative: {
            **params.guidance,
            "guidance_scale": params.guidance_scale,
            "negative_prompt": negative,
        },
        without_gradient=frozenset(  # the part for inpainting
            f"transformer_blocks.{i}.to_local_embed.{layer}.{kind}"
            for i in (0, 1)
            for layer in (0, 2)
            for kind in ("weight", "bias")
        ),
        lora_layers=2 * 7,
        nearest=(),
        refused=(
            ({"guidance": {"duration": 500.0}}, "duration must be > 0 and <= 384 seconds, such as 384, got 500"),
            ({"guidance": {"duration": 0.0}}, "duration must be > 0 and <= 384 seconds, such as 1, got 0"),
            (
                {"guidance": {"logsnr_min": 2.0}},
                "logsnr_min must be >= -16 and < logsnr_max <= 16, got 2.0, 2.0",
            ),
        ),
        instead={"duration": 1.01},
        pipe=mend_stable_audio,
    ),
}
