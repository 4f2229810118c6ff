"""Build checkpoints with random weights and a few hundred thousand parameters, offline and in seconds.

    python scripts/build_tiny_models.py --out models/ sd35-medium sd35-large

Values that the pipelines hard-code (latent channels, strides, patches, text lengths) are those of the real models;
widths, depths and vocabularies are tiny. `tiny_checkpoint` caches what it builds, for tests.
"""

import argparse
import hashlib
import inspect
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

ALPHABET = [chr(code) for code in range(33, 127)]
SIDES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}  # of a text encoder
QWEN_VL: dict[str, Any] = SIDES | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
}
VAE: dict[str, Any] = {  # 16 channels and a stride of 8 pixels
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def tiny_checkpoint(name: str, cache: Path) -> Path:
    """Return the folder of a checkpoint; build it if the cache has none for this file and these library versions."""
    return kept(name, cache, lambda folder: build(name, folder), Path(__file__))


def kept(name: str, cache: Path, write: Callable[[Path], None], *sources: Path) -> Path:
    """Return a cached folder by name; write it if there is none for these sources and library versions."""
    versions = f"{version('diffusers')} {version('transformers')}"
    digest = hashlib.sha256(b"".join(map(Path.read_bytes, sources)) + versions.encode()).hexdigest()[:12]
    folder = cache / f"{name}-{digest}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as aside:
            write(Path(aside) / name)
            try:
                os.rename(Path(aside) / name, folder)
            except OSError:  # another process was faster
                if not folder.is_dir():
                    raise
    return folder


def build(name: str, folder: Path) -> None:
    """Write a checkpoint from BUILDERS; its weights depend only on the name."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BUILDERS[name]().save_pretrained(folder)


class BagelFolder:
    """BAGEL in the layout of its release: weights in two files and their configurations, written by no library.

    texts, images: configurations of its net and its vision encoder. vae: settings of its AutoencoderKL besides VAE.
    """

    TEXTS: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 1e6,
    }
    IMAGES: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "image_size": 980,
        "patch_size": 14,
    }

    def __init__(
        self,
        texts: Mapping[str, Any] = TEXTS,
        images: Mapping[str, Any] = IMAGES,
        vae: Mapping[str, Any] = MappingProxyType({"block_out_channels": (32,) * 4}),  # its norms have 32 groups
    ) -> None:
        self.texts, self.images, self.vae = texts, images, vae

    def save_pretrained(self, folder: Path) -> None:
        """Write the folder."""
        import torch
        from diffusers import AutoencoderKL
        from omni_rollout.models.bagel_net import BagelTransformer
        from omni_rollout.models.bagel_vision import BagelVision
        from safetensors.torch import save_file

        build_qwen_tokenizer().save_pretrained(folder)
        net = BagelTransformer(**self.texts)
        for name, weight in net.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            else:
                torch.nn.init.normal_(weight, std=0.1)
        vae = AutoencoderKL(**VAE, **self.vae)
        save_file({ldm_name(n): ldm_weight(n, w) for n, w in vae.state_dict().items()}, folder / "ae.safetensors")
        sides = {name: self.images[name] for name in (*SIDES, "num_hidden_layers")}
        vision = BagelVision(**sides, width=self.texts["hidden_size"])
        for name, weight in vision.named_parameters():
            if "norm" in name and "weight" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            else:
                torch.nn.init.normal_(weight, std=0.1)
        head = 0.1 * torch.randn(self.texts["vocab_size"], self.texts["hidden_size"])
        others = {"language_model.lm_head.weight": head}
        save_file(net.state_dict() | vision.state_dict() | others, folder / "ema.safetensors")
        index = {"architectures": ["BagelForConditionalGeneration"], "max_latent_size": 32, "timestep_shift": 1.0}
        for name, content in {
            "config.json": index,
            "llm_config.json": {**self.texts, "hidden_act": "silu"},
            "vit_config.json": dict(self.images),
        }.items():
            (folder / name).write_text(json.dumps(content), encoding="utf-8")


class HunyuanImageFolder:
    """HunyuanImage-3.0 as released: all parts in one folder; those that read images or write text only by name.

    config: that of the net and, under `vae`, of the VAE, as in config.json. generation: generation_config.json.
    """

    CONFIG: ClassVar[Mapping[str, Any]] = {  # image sizes are a sixteenth of the released sizes
        "architectures": ["HunyuanImage3ForCausalMM"],
        "model_type": "hunyuan_image_3_moe",
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_head_dim": 16,
        "intermediate_size": 64,
        "moe_intermediate_size": [64] * 3,
        "patch_embed_hidden_dim": 32,
        "num_experts": 4,
        "moe_topk": [2] * 3,
        "num_shared_expert": [1] * 3,
        "hidden_act": "silu",
        "use_qk_norm": True,
        "use_mixed_mlp_moe": True,
        "image_base_size": 64,
        "rope_theta": 10000.0,
        "img_proj_type": "unet",
        "patch_size": 1,
        "vae": {
            "latent_channels": 16,
            "block_out_channels": [32] * 5,
            "layers_per_block": 0,
            "ffactor_spatial": 16,
            "ffactor_temporal": 1,
            "scaling_factor": 0.5,
            "in_channels": 3,
            "out_channels": 3,
            "sample_size": 64,
            "sample_tsize": 8,
        },
    }
    GENERATION: ClassVar[Mapping[str, Any]] = {
        "flow_shift": 3.0,
        "sequence_template": "pretrain",
        "drop_think": False,
    }

    def __init__(self, config: Mapping[str, Any] = CONFIG, generation: Mapping[str, Any] = GENERATION) -> None:
        self.config, self.generation = config, generation

    def save_pretrained(self, folder: Path) -> None:
        """Write the folder."""
        import torch
        from omni_rollout.models.hunyuan_image_net import HunyuanImageTransformer
        from omni_rollout.models.hunyuan_image_vae import HunyuanImageVAE
        from safetensors.torch import save_file

        build_hunyuan_tokenizer(self.config["image_base_size"]).save_pretrained(folder)
        alike = {name: value[0] if isinstance(value, list) else value for name, value in self.config.items()}
        net = HunyuanImageTransformer(
            **known_to(HunyuanImageTransformer, alike), latent_channels=alike["vae"]["latent_channels"]
        )
        vae = HunyuanImageVAE(**known_to(HunyuanImageVAE, alike["vae"]))
        for part in (net, vae):
            draw_weights(part)
        weights = net.state_dict() | {f"vae.{name}": weight for name, weight in vae.state_dict().items()}
        weights |= {name: torch.zeros(1) for name in ("model.ln_f.weight", "lm_head.weight", "vision_model.x")}
        shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        places = {name: shards["layers.1" in name] for name in weights}
        for shard in shards:
            save_file({name: weights[name].contiguous() for name in weights if places[name] == shard}, folder / shard)
        for name, content in {
            "config.json": self.config,
            "generation_config.json": self.generation,
            "model.safetensors.index.json": {"weight_map": places},
        }.items():
            (folder / name).write_text(json.dumps(content), encoding="utf-8")


def known_to(kind: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that a class accepts."""
    return {name: config[name] for name in inspect.signature(kind.__init__).parameters if name in config}


def draw_weights(module: Any) -> None:
    """Fill a module with random weights that depend only on their names; norm weights are around 1."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for _, weight in sorted(module.named_parameters()):
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1 / weight[0].numel() ** 0.5, generator=generator)
        else:
            torch.nn.init.uniform_(weight, -0.5, 0.5, generator=generator)
    for name, weight in module.named_parameters():
        if "norm" in name and name.endswith("weight"):
            weight.data += 1


def build_hunyuan_tokenizer(base: int = 64) -> Any:
    """Build a tokenizer with one token per byte, and tokens for images, their sizes and aspect ratios."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build_qwen_tokenizer().backend_tokenizer, **special)
    names = ["boi", "eoi", "img", "cfg", "timestep", f"img_size_{base}", *(f"img_ratio_{i}" for i in range(37))]
    names += ["answer", "/answer", "recaption", "/recaption", "think", "/think"]
    tokenizer.add_tokens([AddedToken(f"<{name}>", special=True) for name in names])
    return tokenizer


LDM_NAMES = {  # diffusers' AutoencoderKL -> latent diffusion
    "down_blocks": "down",
    "downsamplers.0": "downsample",
    "upsamplers.0": "upsample",
    "resnets": "block",
    "mid_block.attentions.0": "mid.attn_1",
    "group_norm": "norm",
    "conv_norm_out": "norm_out",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}


def ldm_name(name: str) -> str:
    """Return the latent-diffusion name of a weight of diffusers' AutoencoderKL; decoder blocks count backwards."""
    name = re.sub(r"up_blocks\.(\d)", lambda found: f"up.{3 - int(found[1])}", name)
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda found: f"mid.block_{int(found[1]) + 1}", name)
    for ours, theirs in LDM_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def ldm_weight(name: str, weight: Any) -> Any:
    """Return a weight in the shape of those files: linear layers of attention are 1 x 1 convolutions."""
    return weight[..., None, None].contiguous() if "attentions" in name and weight.dim() == 2 else weight


def build_sd35(**transformer: Any) -> Any:
    """Build a StableDiffusion3Pipeline with the given transformer settings."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            num_layers=3,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=64,
            caption_projection_dim=64,
            pooled_projection_dim=64,
            pos_embed_max_size=24,
            qk_norm="rms_norm",
            **transformer,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=build_vae(1.5305, 0.0609),
        text_encoder=build_clip(CLIPTextModelWithProjection, clip_tokenizer, "quick_gelu"),
        text_encoder_2=build_clip(CLIPTextModelWithProjection, clip_tokenizer, "gelu"),
        text_encoder_3=build_t5(t5_tokenizer, "gated-gelu"),
        tokenizer=clip_tokenizer,
        tokenizer_2=build_clip_tokenizer(),
        tokenizer_3=t5_tokenizer,
    )


def build_z_image() -> Any:
    """Build a ZImagePipeline; its pad tokens, which start as zeros, are random."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
    from torch.nn.init import normal_
    from transformers import Qwen3Model

    tokenizer = build_qwen_tokenizer()
    transformer = ZImageTransformer2DModel(
        dim=96,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[16, 16, 16],
        axes_lens=[600, 24, 32],
    )
    normal_(transformer.x_pad_token)
    normal_(transformer.cap_pad_token)
    return ZImagePipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=build_vae(0.3611, 0.1159),
        text_encoder=build_qwen3(Qwen3Model, tokenizer, num_hidden_layers=3),
        tokenizer=tokenizer,
    )


def build_flux(pipeline: str = "FluxPipeline", *, guidance_embeds: bool = True) -> Any:
    """Build a FLUX.1 pipeline: dev with guidance_embeds, schnell without."""
    import diffusers
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
    from transformers import CLIPTextModel

    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    return getattr(diffusers, pipeline)(
        transformer=FluxTransformer2DModel(
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=24,
            num_attention_heads=2,
            joint_attention_dim=64,
            pooled_projection_dim=32,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(8, 8, 8),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0 if guidance_embeds else 1.0, use_dynamic_shifting=guidance_embeds
        ),
        vae=build_vae(0.3611, 0.1159),
        text_encoder=build_clip(CLIPTextModel, clip_tokenizer, "quick_gelu"),
        text_encoder_2=build_t5(t5_tokenizer, "gated-silu"),  # vLLM supports only this T5 without an accelerator
        tokenizer=clip_tokenizer,
        tokenizer_2=t5_tokenizer,
    )


def build_flux2_vae() -> Any:
    """Build an AutoencoderKLFlux2 with random latent statistics."""
    from diffusers import AutoencoderKLFlux2

    vae = AutoencoderKLFlux2(block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4, sample_size=64)
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2.0)
    return vae


def build_flux2(*, dev: bool, distilled: bool = False) -> Any:
    """Build a Flux2Pipeline, or a Flux2KleinPipeline."""
    import diffusers
    import transformers

    tokenizer = build_qwen_tokenizer()
    sides: dict[str, Any] = SIDES | {"hidden_size": 16, "intermediate_size": 32}
    parts: dict[str, Any] = {
        "transformer": diffusers.Flux2Transformer2DModel(
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=3 * 16,
            timestep_guidance_channels=32,
            axes_dims_rope=(8, 8, 8, 8),
            guidance_embeds=dev,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        "vae": build_flux2_vae(),
        "tokenizer": tokenizer,
    }
    if not dev:
        encoder = build_qwen3(transformers.Qwen3ForCausalLM, tokenizer, num_hidden_layers=28, head_dim=8, **sides)
        return diffusers.Flux2KleinPipeline(text_encoder=encoder, is_distilled=distilled, **parts)
    config = transformers.Mistral3Config(
        text_config=transformers.MistralConfig(
            vocab_size=len(tokenizer),
            num_hidden_layers=31,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=1024,
            **sides,
        ),
        vision_config=transformers.PixtralVisionConfig(num_hidden_layers=1, **sides),
        image_token_index=1,
    )
    pipe = diffusers.Flux2Pipeline(text_encoder=transformers.Mistral3ForConditionalGeneration(config), **parts)
    pipe.register_to_config(tokenizer=("transformers", "PixtralProcessor"))  # only the text half is included
    return pipe


class ModularFolder:
    """A modular pipeline whose index names all parts by hub id."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def save_pretrained(self, folder: Path) -> None:
        """Write the folder."""
        self.pipe.save_pretrained(str(folder), overwrite_modular_index=True)
        index = folder / "modular_model_index.json"
        index.write_text(index.read_text("utf-8").replace(str(folder), f"tiny/{folder.name}"), "utf-8")


def build_flux3() -> Any:
    """Build a Flux3ModularPipeline without its prompt upsampler."""
    import diffusers
    from diffusers.modular_pipelines import Flux3AutoBlocks
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = build_qwen_tokenizer()
    tokenizer.chat_template = CHAT_WITH_MEDIA
    blocks = Flux3AutoBlocks()
    del blocks.sub_blocks["prompt_upsampler"]
    pipe = blocks.init_pipeline()
    pipe.update_components(
        transformer=diffusers.Flux3Transformer2DModel(
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=8 * 32,
            timestep_channels=32,
            axes_dims_rope=(8, 8, 8, 8),
        ),
        vae=build_flux2_vae(),
        text_encoder=Qwen3VLForConditionalGeneration(qwen3_vl_config(tokenizer, num_hidden_layers=33)),
        tokenizer=build_qwen3_vl_processor(tokenizer),
    )
    return ModularFolder(pipe)


def build_wan(pipeline: str = "WanPipeline", *, clip: int = 0, per_token: bool = False, **config: Any) -> Any:
    """Build a Wan pipeline, with two experts if `boundary_ratio` is given.

    per_token: as in TI2V-5B, one timestep per token and a VAE with 48 channels. clip: number of given frames that 2.1
    encodes by CLIP.
    """
    import diffusers
    from torch.nn.init import normal_
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = build_t5_tokenizer()
    channels = 48 if per_token else 16
    encoder: dict[str, Any] = SIDES | {"num_hidden_layers": 2, "image_size": 28, "patch_size": 14}
    seen = {"image_dim": 32, "added_kv_proj_dim": 48, "pos_embed_seq_len": 2 * 5 if clip == 2 else None} if clip else {}
    taken = channels if per_token or pipeline == "WanPipeline" else 2 * channels + 4

    def build_net() -> Any:
        return diffusers.WanTransformer3DModel(
            num_layers=2,
            attention_head_dim=24,
            num_attention_heads=2,
            in_channels=taken,
            out_channels=channels,
            text_dim=32,
            freq_dim=32,
            ffn_dim=64,
            rope_max_seq_len=64,
            **seen,
        )

    if "boundary_ratio" in config:
        config["transformer_2"] = build_net()
    if clip:
        import transformers

        vision = transformers.CLIPVisionConfig(**encoder)
        config["image_encoder"] = transformers.CLIPVisionModel(vision)
        size = {"height": 28, "width": 28}
        config["image_processor"] = transformers.CLIPImageProcessorPil(crop_size=size, size={"shortest_edge": 28})
    sizes: dict[str, Any] = {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1, "z_dim": channels}
    if per_token:
        sizes |= {"is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2}
        sizes |= {"decoder_base_dim": 8, "scale_factor_spatial": 16}
        sizes |= {"latents_mean": [0.1] * channels, "latents_std": [1.5] * channels}
        config["expand_timesteps"] = True
    vae = diffusers.AutoencoderKLWan(**sizes)
    normal_(vae.decoder.conv_out.weight, std=0.3)  # videos, not gray
    t5: dict[str, Any] = {
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "is_encoder_decoder": False,
    }
    pipe = getattr(diffusers, pipeline)(
        transformer=build_net(),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=vae,
        text_encoder=UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **t5)),
        tokenizer=tokenizer,
        **config,
    )
    if clip:
        pipe.register_to_config(image_processor=("transformers", "CLIPImageProcessor"))
    return pipe


def build_ltx2(*, newer: bool) -> Any:
    """Build a pipeline of LTX-2, or of 2.3: gates, prompt modulation, other connectors, a two-stage vocoder."""
    import diffusers
    import torch
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
    from torch.nn.init import normal_, uniform_
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    tokenizer = build_gemma_tokenizer()
    text = SIDES | {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 64}
    text |= {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    vision = SIDES | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    encoder = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=1)
    )
    gates = {"gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True, "audio_cross_attn_mod": True}
    heads: dict[str, Any] = {"num_layers": 1, "num_attention_heads": 2, "num_learnable_registers": 128}
    connectors = {
        f"{medium}_connector_{name}": value
        for medium, width in (("video", 16), ("audio", 8 if newer else 16))
        for name, value in (heads | {"attention_head_dim": width}).items()
    }
    if newer:
        connectors |= {"per_modality_projections": True, "video_hidden_dim": 32, "audio_hidden_dim": 16}
        connectors |= {"video_gated_attn": True, "audio_gated_attn": True, "proj_bias": True}
    shared: dict[str, Any] = {"rope_double_precision": False, "rope_type": "split"}
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=16,
        block_out_channels=(8, 16, 32, 64),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
        decoder_causal=False,
        decoder_spatial_padding_mode="zeros",
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    normal_(vae.decoder.conv_out.conv.weight, std=0.3)  # videos, not gray
    sound_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=8, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=4, mel_bins=8
    )
    normal_(sound_vae.decoder.conv_out.conv.weight, std=0.3)
    for each in (vae, sound_vae):
        uniform_(each.latents_mean, -0.2, 0.2)
        uniform_(each.latents_std, 0.5, 1.5)
    stage: dict[str, Any] = {"in_channels": 2 * 8, "hidden_channels": 16, "resnet_kernel_sizes": [3]}
    stage |= {"resnet_dilations": [[1, 3, 5]], "act_fn": "leaky_relu", "antialias": False}
    stage |= {"upsample_factors": [20, 12], "upsample_kernel_sizes": [40, 24]}
    if newer:
        second = {f"bwe_{name}": value for name, value in stage.items()}
        stage |= {"upsample_factors": [16, 10], "upsample_kernel_sizes": [32, 20]}
        vocoder = LTX2VocoderWithBWE(**stage, **second, filter_length=64, window_length=64, num_mel_channels=8)
        for basis in (vocoder.mel_stft.mel_basis, vocoder.mel_stft.stft_fn.forward_basis):
            uniform_(basis, 0, 0.1)
    else:
        vocoder = LTX2Vocoder(**stage)
    for module in vocoder.modules():
        if isinstance(module, torch.nn.Conv1d | torch.nn.ConvTranspose1d):
            normal_(module.weight, std=0.2)  # sound, not silence
    return diffusers.LTX2Pipeline(
        transformer=diffusers.LTX2VideoTransformer3DModel(
            in_channels=16,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            audio_in_channels=8,
            audio_out_channels=8,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
            num_layers=4,
            caption_channels=32,
            **shared,
            **(gates | {"use_prompt_embeddings": False, "perturbed_attn": True} if newer else {}),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1
        ),
        vae=vae,
        audio_vae=sound_vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        connectors=LTX2TextConnectors(caption_channels=32, text_proj_in_factor=3, **connectors, **shared),
        vocoder=vocoder,
    )


def build_hunyuan_video(pipeline: str = "HunyuanVideo15Pipeline", **config: Any) -> Any:
    """Build a HunyuanVideo 1.5 pipeline; a layer of its net always has four million weights."""
    import diffusers
    from torch.nn.init import normal_
    from transformers import ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    tokenizer, glyphs = build_qwen_tokenizer(), ByT5Tokenizer()
    vae = diffusers.AutoencoderKLHunyuanVideo15(block_out_channels=(8, 8, 8, 16, 64), layers_per_block=1)
    normal_(vae.decoder.conv_out.conv.weight, std=0.3)  # videos, not gray
    return getattr(diffusers, pipeline)(
        transformer=diffusers.HunyuanVideo15Transformer3DModel(
            num_layers=2,
            num_refiner_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=32,
            text_embed_2_dim=64,
            image_embed_dim=16,
            rope_axes_dim=(4, 6, 6),
            target_size=45,  # makes the stock pipeline's videos of images with aspect ratio about 2:1 32 x 64 pixels
            task_type="i2v" if config else "t2v",
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        vae=vae,
        text_encoder=Qwen2_5_VLTextModel(
            Qwen2_5_VLTextConfig(**QWEN_VL, vocab_size=len(tokenizer), num_hidden_layers=4)
        ),
        tokenizer=tokenizer,
        text_encoder_2=build_t5(glyphs, "gated-gelu"),
        tokenizer_2=glyphs,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
        **config,
    )


def build_hunyuan_video_of_images() -> Any:
    """Build a HunyuanVideo15ImageToVideoPipeline."""
    import transformers

    vision: dict[str, Any] = SIDES | {"hidden_size": 16, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    pipe = build_hunyuan_video(
        "HunyuanVideo15ImageToVideoPipeline",
        image_encoder=transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**vision)),
        feature_extractor=transformers.SiglipImageProcessorPil(size={"height": 28, "width": 28}),
    )
    pipe.register_to_config(feature_extractor=("transformers", "SiglipImageProcessor"))
    return pipe


def build_stable_audio() -> Any:
    """Build a StableAudio3Pipeline for audio at 800 Hz; zero-initialized weights are random."""
    import diffusers
    from torch.nn.init import normal_
    from transformers import T5GemmaConfig, T5GemmaEncoderModel

    tokenizer = build_gemma_tokenizer()
    sizes = SIDES | {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    transformer = diffusers.StableAudio3DiTModel(
        io_channels=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        cond_token_dim=32,
        global_cond_dim=32,
        local_add_cond_dim=9,
        timestep_features_dim=16,
        num_memory_tokens=4,
    )
    vae = diffusers.AutoencoderSAME(
        patch_size=16,
        encoder_channels=8,
        encoder_c_mults=(4,),
        encoder_strides=(4,),
        encoder_transformer_depths=(1,),
        latent_dim=8,
        dim_heads=16,
        sampling_rate=800,
    )
    for weight in (*transformer.parameters(), *vae.parameters()):
        if weight.abs().max() < 1e-3:  # near zero, which would give silence
            normal_(weight, std=0.2)
    return diffusers.StableAudio3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1),
        vae=vae,
        text_encoder=T5GemmaEncoderModel(T5GemmaConfig(encoder=sizes, decoder=sizes, is_encoder_decoder=False)),
        tokenizer=tokenizer,
        duration_embedder=diffusers.StableAudio3DurationEmbedder(output_dim=32, fourier_dim=16),
    )


def build_gemma_tokenizer() -> Any:
    """Build a tokenizer with one token per printable character."""
    from transformers import GemmaTokenizer

    names = ("<pad>", "<eos>", "<bos>", "<unk>", "\u2581", *ALPHABET)
    return GemmaTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[], model_max_length=1024)


def build_vae(scaling_factor: float, shift_factor: float) -> Any:
    """Build an AutoencoderKL.

    Each decoder layer starts as the identity plus the random weights, so that the image's colors are those of the
    latents' first channels, slightly mixed: otherwise all decoded images are nearly gray.
    """
    from diffusers import AutoencoderKL
    from torch.nn import Conv2d
    from torch.nn.init import constant_, dirac_

    vae = AutoencoderKL(
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=1,  # more groups would remove the mean, and so the color, from each channel
        sample_size=64,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        **VAE,
    )
    for layer in vae.decoder.modules():
        if isinstance(layer, Conv2d) and layer.bias is not None:
            layer.weight.data += dirac_(layer.weight.clone().detach())
            constant_(layer.bias, 0)
    vae.decoder.conv_out.weight.data *= 2  # from SiLU's range to the pixel range [-1, 1]
    constant_(vae.decoder.conv_out.bias, -0.7)
    return vae


def build_clip(encoder: Any, tokenizer: Any, activation: str) -> Any:
    """Build a three-layer CLIP text encoder of a class."""
    from transformers import CLIPTextConfig

    return encoder(
        CLIPTextConfig(
            **SIDES,
            vocab_size=len(tokenizer),
            num_hidden_layers=3,
            projection_dim=32,
            hidden_act=activation,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_qwen3(encoder: Any, tokenizer: Any, **config: Any) -> Any:
    """Build a Qwen3 text encoder of a class, with the given settings."""
    from transformers import Qwen3Config

    common = SIDES | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024}
    return encoder(Qwen3Config(vocab_size=len(tokenizer), **common | config))


def build_t5(tokenizer: Any, activation: str) -> Any:
    """Build a two-layer T5 text encoder."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=64,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            feed_forward_proj=activation,
            is_encoder_decoder=False,
        )
    )


def build_clip_tokenizer() -> Any:
    """Build a tokenizer with one token per letter, and another per word-final letter."""
    from transformers import CLIPTokenizer

    tokens = [*ALPHABET, *(f"{letter}</w>" for letter in ALPHABET), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=77)


def build_t5_tokenizer() -> Any:
    """Build a tokenizer with one token per letter."""
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *((letter, -3.0) for letter in ALPHABET)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def build_qwen_image_edit(plus: bool) -> Any:
    """Build a QwenImageEditPipeline, or the QwenImageEditPlusPipeline of 2511."""
    import diffusers
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = build_qwen_tokenizer()
    token = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config=QWEN_VL | {"vocab_size": len(tokenizer), "num_hidden_layers": 2},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "depth": 2,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
            "patch_size": 14,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    pipeline = diffusers.QwenImageEditPlusPipeline if plus else diffusers.QwenImageEditPipeline
    return pipeline(
        transformer=diffusers.QwenImageTransformer2DModel(
            num_layers=3,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(8, 12, 12),
            zero_cond_t=plus,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer,
        processor=build_qwen_processor(tokenizer),
    )


def build_qwen_processor(tokenizer: Any, *, max_tokens: int = 16) -> Any:
    """Build a Qwen2VLProcessor for small images, without the video processor, which needs torchvision."""
    from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor

    processor = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
    processor.tokenizer = tokenizer
    processor.image_processor = Qwen2VLImageProcessorPil(min_pixels=28**2, max_pixels=max_tokens * 28**2)
    for kind in ("image", "video"):
        setattr(processor, f"{kind}_token", f"<|{kind}_pad|>")
        setattr(processor, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>"))
    vars(processor)["save_pretrained"] = processor.image_processor.save_pretrained  # writes one file without the other
    return processor


def build_qwen_image21() -> Any:
    """Build a QwenImage21Pipeline; the images of its decoder are partly opaque."""
    import diffusers
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = build_qwen_tokenizer()
    tokenizer.chat_template = CHAT_WITH_MEDIA
    config = qwen3_vl_config(tokenizer, num_hidden_layers=2)
    return diffusers.QwenImage21Pipeline(
        transformer=diffusers.QwenImage21Transformer2DModel(
            num_layers=3,
            in_channels=16,
            out_channels=16,
            attention_head_dim=32,
            num_attention_heads=2,
            context_in_dim=32,
            axes_dims_rope=(8, 12, 12),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=diffusers.AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=16,
            dim_mult=[1, 2, 2, 2, 2],
            num_res_blocks=1,
            latents_mean=[0.5] * 16,
            latents_std=[2.0] * 16,
        ),
        text_encoder=Qwen3VLForConditionalGeneration(config),
        processor=build_qwen3_vl_processor(tokenizer),
    )


def qwen3_vl_config(tokenizer: Any, *, num_hidden_layers: int) -> Any:
    """Return the configuration of a Qwen3-VL with a two-layer vision tower."""
    from transformers import Qwen3VLConfig

    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    text: dict[str, Any] = SIDES | {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "head_dim": 16}
    text |= {"num_hidden_layers": num_hidden_layers, "max_position_embeddings": 2048, "rope_parameters": rope}
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 16}
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision | {"out_hidden_size": 32, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        **places_of_media(tokenizer, "image", "video"),
    )


def build_krea2(**config: Any) -> Any:
    """Build a Krea2Pipeline; zero-initialized weights of norms and shifts are random."""
    import diffusers
    from torch.nn.init import normal_
    from transformers import Qwen3VLModel

    tokenizer = build_qwen_tokenizer()
    transformer = diffusers.Krea2Transformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        timestep_embed_dim=32,
        text_hidden_dim=32,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=64,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    for name, weight in transformer.named_parameters():
        if "norm" in name or "scale_shift_table" in name:
            normal_(weight, std=0.3)
    return diffusers.Krea2Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400),
        vae=diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1),
        text_encoder=Qwen3VLModel(qwen3_vl_config(tokenizer, num_hidden_layers=4)),
        tokenizer=tokenizer,
        text_encoder_select_layers=(0, 2, 3),
        **config,
    )


def build_qwen3_vl_processor(tokenizer: Any) -> Any:
    """Build a Qwen3VLProcessor without the video part, which needs torchvision."""
    from transformers import Qwen3VLProcessor

    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    processor.tokenizer, processor.image_processor = tokenizer, build_patches(16)
    processor.chat_template = tokenizer.chat_template
    for kind in ("image", "video"):
        setattr(processor, f"{kind}_token", f"<|{kind}_pad|>")
        setattr(processor, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>"))

    def save_pretrained(folder: Path, **how: Any) -> None:
        tokenizer.save_pretrained(folder)
        processor.image_processor.save_pretrained(folder)

    vars(processor)["save_pretrained"] = save_pretrained
    return processor


def build_qwen_tokenizer() -> Any:
    """Build a tokenizer with one token per byte, and tokens for chats and images."""
    from tokenizers import AddedToken
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(vocab={byte: i for i, byte in enumerate(sorted(ByteLevel.alphabet()))}, merges=[])
    names = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


CHAT_WITH_MEDIA = (  # as in the released models' templates: media at their place in the message
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class LanguageModel:
    """The folder of a language model: its net, a tokenizer with one token per byte, and its media processors."""

    def __init__(self, net: Any, tokenizer: Any, *processors: Any) -> None:
        self.files = (net, tokenizer, *processors)

    def save_pretrained(self, folder: Path) -> None:
        """Write the folder."""
        for each in self.files:
            each.save_pretrained(folder)


def build_chat_tokenizer() -> Any:
    """Build a tokenizer with one token per byte, chat tokens (the end token ends an answer) and media tokens."""
    from tokenizers import AddedToken

    tokenizer = build_qwen_tokenizer()
    tokenizer.add_tokens([AddedToken(f"<|audio_{name}|>", special=True) for name in ("start", "end", "pad")])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT_WITH_MEDIA
    return tokenizer


def places_of_media(tokenizer: Any, *kinds: str) -> dict[str, Any]:
    """Return the ids of media tokens in a prompt, by their names in a configuration."""
    named = {f"{kind}_token_id": f"<|{kind}_pad|>" for kind in kinds}
    named |= {
        f"{kind}_{edge}_token_id": f"<|{kind}_{edge}|>" for kind in ("vision", "audio") for edge in ("start", "end")
    }
    if "audio" not in kinds:
        named = {name: token for name, token in named.items() if "audio" not in name}
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}


def build_patches(patch_size: int) -> Any:
    """Build the processor for small images."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    side = 2 * patch_size
    return Qwen2VLImageProcessorPil(
        patch_size=patch_size,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": side**2, "longest_edge": 4 * side**2},
    )


def build_qwen3_chat() -> Any:
    """Build a two-layer Qwen3 that answers."""
    from transformers import Qwen3ForCausalLM

    tokenizer = build_chat_tokenizer()
    end = tokenizer.eos_token_id
    return LanguageModel(build_qwen3(Qwen3ForCausalLM, tokenizer, num_hidden_layers=2, eos_token_id=end), tokenizer)


def build_qwen25_vl() -> Any:
    """Build a two-layer Qwen2.5-VL with a two-layer vision tower."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = build_chat_tokenizer()
    text: dict[str, Any] = SIDES | {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
    }
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    config = Qwen2_5_VLConfig(
        text_config=text | {"max_position_embeddings": 1024, "rope_parameters": rope},
        vision_config=vision | {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56},
        **places_of_media(tokenizer, "image", "video"),
    )
    return LanguageModel(Qwen2_5_VLForConditionalGeneration(config), tokenizer, build_patches(14))


def build_qwen3_omni(**text: Any) -> Any:
    """Build a Qwen3-Omni thinker with two layers of four experts, with towers for images and audio."""
    from transformers import (
        Qwen3OmniMoeThinkerConfig,
        Qwen3OmniMoeThinkerForConditionalGeneration,
        WhisperFeatureExtractor,
    )

    tokenizer = build_chat_tokenizer()
    sides: dict[str, Any] = SIDES | {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    width = text.get("hidden_size", 32)
    hearing: dict[str, Any] = {
        "num_mel_bins": 16,
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
    }
    seeing: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 16}
    config = Qwen3OmniMoeThinkerConfig(
        audio_config=hearing
        | {"n_window": 50, "n_window_infer": 100, "output_dim": width, "downsample_hidden_size": 16},
        vision_config=seeing
        | {"out_hidden_size": width, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        text_config=sides | experts | {"max_position_embeddings": 1024, "rope_parameters": rope} | text,
        **places_of_media(tokenizer, "image", "video", "audio"),
    )
    listen = WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    net = Qwen3OmniMoeThinkerForConditionalGeneration(config)
    return LanguageModel(net, tokenizer, LanguageModelProcessor(build_patches(16), listen))


class LanguageModelProcessor:
    """Two processors whose configurations share a file, as in releases."""

    def __init__(self, *processors: Any) -> None:
        self.processors = processors

    def save_pretrained(self, folder: Path) -> None:
        """Write preprocessor_config.json."""
        together: dict[str, Any] = {}
        for each in self.processors:
            together |= json.loads(each.to_json_string())
        (folder / "preprocessor_config.json").write_text(json.dumps(together), encoding="utf-8")


BUILDERS: dict[str, Callable[[], Any]] = {
    "bagel": BagelFolder,
    "hunyuan-image": HunyuanImageFolder,
    "flux2-dev": lambda: build_flux2(dev=True),
    "flux2-klein": lambda: build_flux2(dev=False, distilled=True),
    "flux2-klein-base": lambda: build_flux2(dev=False),
    "flux3": build_flux3,
    "hunyuan-video15": build_hunyuan_video,
    "hunyuan-video15-i2v": build_hunyuan_video_of_images,
    "krea2": build_krea2,
    "krea2-turbo": lambda: build_krea2(is_distilled=True),
    "qwen-image-edit": lambda: build_qwen_image_edit(plus=False),
    "qwen-image-edit-plus": lambda: build_qwen_image_edit(plus=True),
    "qwen-image21": build_qwen_image21,
    "sd35-medium": lambda: build_sd35(dual_attention_layers=(0, 1)),
    "sd35-large": build_sd35,
    "wan21": build_wan,
    "wan22": lambda: build_wan(boundary_ratio=0.875),
    "wan22-ti2v": lambda: build_wan(per_token=True),
    "wan21-i2v": lambda: build_wan("WanImageToVideoPipeline", clip=1),
    "wan21-flf2v": lambda: build_wan("WanImageToVideoPipeline", clip=2),
    "wan22-i2v": lambda: build_wan("WanImageToVideoPipeline", boundary_ratio=0.9),
    "stable-audio3": build_stable_audio,
    "z-image": build_z_image,
    "ltx2": lambda: build_ltx2(newer=False),
    "ltx23": lambda: build_ltx2(newer=True),
    "flux-dev": build_flux,
    "flux-schnell": lambda: build_flux(guidance_embeds=False),
    "flux-kontext": lambda: build_flux("FluxKontextPipeline"),
    "qwen2.5-vl": build_qwen25_vl,
    "qwen3": build_qwen3_chat,
    "qwen3-omni": build_qwen3_omni,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=BUILDERS, help="checkpoints to build")
    parser.add_argument("--out", type=Path, required=True, help="output folder, with one subfolder per checkpoint")
    settings = parser.parse_args()
    for wanted in settings.names:
        build(wanted, settings.out / wanted)
        print(settings.out / wanted)
