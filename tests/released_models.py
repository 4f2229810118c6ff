"""The configurations of released models, which are public facts, as folders without weights.

Here is of each part only what its class in diffusers does not have as its default, or what transformers is told.
"""

import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
from omni_rollout.models import MODELS

FILES = {"scheduler": "scheduler_config.json", "processor": "preprocessor_config.json"}
FILES["image_processor"] = FILES["processor"]
FLUX_VAE = {
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4, "latent_channels": 16,
    "layers_per_block": 2, "sample_size": 1024, "scaling_factor": 0.3611, "shift_factor": 0.1159,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "use_post_quant_conv": False, "use_quant_conv": False,
}  # fmt: skip
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "projection_dim": 768}
CLIP_G = {
    "hidden_act": "gelu", "hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 20,
    "num_hidden_layers": 32, "projection_dim": 1280,
}  # fmt: skip
T5 = {"d_ff": 10240, "d_model": 4096, "feed_forward_proj": "gated-gelu", "num_heads": 64, "num_layers": 24}
QWEN3_4B = {
    "head_dim": 128, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 151936,
}  # fmt: skip
QWEN25_VL_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
    "vocab_size": 152064,
}
DYNAMIC = {"base_shift": 0.5, "shift": 1.0, "use_dynamic_shifting": True}
QWEN_SHIFT = DYNAMIC | {"max_image_seq_len": 8192, "max_shift": 0.9, "shift_terminal": 0.02}
SD35_MEDIUM = {
    "caption_projection_dim": 1536, "dual_attention_layers": list(range(13)), "num_attention_heads": 24,
    "num_layers": 24, "pos_embed_max_size": 384, "qk_norm": "rms_norm",
}  # fmt: skip


@dataclass(frozen=True)
class Release:
    """A released model: its pipeline, what is said of its size, the layers of its LoRA, and its parts.

    billions: of weights of the net. channels, stride: of its latents, against pixels. frames: of a video to a latent.
    absent: parts that it lacks. index: what model_index.json says besides.
    """

    pipeline: str
    billions: float
    lora_layers: int
    parts: dict[str, dict[str, Any]]
    channels: int = 16
    stride: int = 8
    frames: int = 4
    absent: tuple[str, ...] = ()
    index: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """The folder of that name, with the configuration of each part."""
        for name, content in self.files().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(content))
        return folder

    def files(self) -> dict[str, dict[str, Any]]:
        """What each file holds."""
        if "config.json" in self.parts:  # no pipeline of diffusers
            return self.parts
        kinds = MODELS[self.pipeline].PARTS
        index = {"_class_name": self.pipeline, **kinds, **dict.fromkeys(self.absent, (None, None)), **self.index}
        files: dict[str, dict[str, Any]] = {"model_index.json": index}
        files["guider/guider_config.json"] = {"guidance_scale": 6.0}  # which HunyuanVideo has
        for part, (library, kind) in kinds.items():
            if part in self.absent:
                continue
            name = "tokenizer_config.json" if "tokenizer" in part else FILES.get(part, "config.json")
            made = inspect.signature(getattr(diffusers, kind)).parameters if library == "diffusers" else {}
            defaults = {key: value.default for key, value in made.items()}
            files[f"{part}/{name}"] = {"_class_name": kind} | defaults | self.parts.get(part, {})
        return files


SD3_PARTS = {
    "text_encoder": CLIP_L,
    "text_encoder_2": CLIP_G,
    "text_encoder_3": T5,
    "vae": FLUX_VAE | {"scaling_factor": 1.5305, "shift_factor": 0.0609},
    "scheduler": {"shift": 3.0},
}
Z_IMAGE_PARTS = {"text_encoder": QWEN3_4B, "vae": FLUX_VAE, "scheduler": {"shift": 6.0}}
QWEN_PARTS = {"text_encoder": QWEN25_VL_7B, "scheduler": QWEN_SHIFT}
FLUX_PARTS = {"text_encoder": CLIP_L, "text_encoder_2": T5, "vae": FLUX_VAE, "scheduler": DYNAMIC | {"shift": 3.0}}
BAGEL_FILES = {
    "config.json": {"architectures": ["BagelForConditionalGeneration"]},
    "llm_config.json": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rope_theta": 1e6, "vocab_size": 152064,
    },
    "vit_config.json": {
        "hidden_size": 1152, "image_size": 980, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
    },
    "tokenizer_config.json": {},
}  # fmt: skip
QWEN3_8B = QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288}
MISTRAL_24B = {
    "text_config": {
        "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "vocab_size": 131072,
    },
    "vision_config": {"image_size": 1540, "patch_size": 14},
}  # fmt: skip
FLUX2_SCHEDULE = DYNAMIC | {"shift": 3.0}
FLUX2 = {"channels": 128, "stride": 16}
# The nets of FLUX.2 are as scripts/convert_flux2_to_diffusers.py of diffusers has them; dev's are its class's defaults.
KLEIN_4B = {
    "text_encoder": QWEN3_4B,
    "transformer": {
        "guidance_embeds": False,
        "joint_attention_dim": 7680,
        "num_attention_heads": 24,
        "num_layers": 5,
        "num_single_layers": 20,
    },
    "scheduler": FLUX2_SCHEDULE,
}
KLEIN_9B = {
    "text_encoder": QWEN3_8B,
    "transformer": {
        "guidance_embeds": False,
        "joint_attention_dim": 12288,
        "num_attention_heads": 32,
        "num_layers": 8,
        "num_single_layers": 24,
    },
    "scheduler": FLUX2_SCHEDULE,
}
UMT5_XXL = {"d_ff": 10240, "d_kv": 64, "d_model": 4096, "num_heads": 64, "num_layers": 24, "vocab_size": 256384}
# Boundaries: wan/configs/wan_t2v_A14B.py (0.875) and wan_i2v_A14B.py (0.900) of github.com/Wan-Video/Wan2.2.
# flow_shift: 3.0 by scripts/convert_wan_to_diffusers.py of diffusers; 5.0 of TI2V-5B by the copy of its file in
# github.com/ostris/ai-toolkit. That TI2V-5B has no boundary and a timestep a token: its model_index.json.
WAN_SCHEDULE = {"flow_shift": 3.0, "prediction_type": "flow_prediction", "use_flow_sigmas": True}
WAN = {"text_encoder": UMT5_XXL, "scheduler": WAN_SCHEDULE}
NO_CLIP = ("image_encoder", "image_processor")
WAN_I2V = {"in_channels": 36}
WAN_CLIP = {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 16, "num_hidden_layers": 32}
WAN_5B = {
    "text_encoder": UMT5_XXL,
    "transformer": {
        "ffn_dim": 14336, "in_channels": 48, "num_attention_heads": 24, "num_layers": 30, "out_channels": 48,
    },
    "vae": {
        "base_dim": 160, "decoder_base_dim": 256, "in_channels": 12, "is_residual": True, "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "z_dim": 48,
    },
    "scheduler": WAN_SCHEDULE | {"flow_shift": 5.0},
}  # fmt: skip
HUNYUAN_IMAGE_FILES = {
    "config.json": {
        "architectures": ["HunyuanImage3ForCausalMM"], "attention_head_dim": 128, "hidden_size": 4096,
        "image_base_size": 1024, "img_proj_type": "unet", "intermediate_size": 3072,
        "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "num_attention_heads": 32, "num_experts": 64,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_shared_expert": [1] * 32,
        "patch_embed_hidden_dim": 1024, "patch_size": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True,
        "vae": {
            "block_out_channels": [128, 256, 512, 1024, 1024], "ffactor_spatial": 16, "ffactor_temporal": 4,
            "latent_channels": 32, "layers_per_block": 2,
        },
        "vocab_size": 133120,
    },
    "generation_config.json": {"flow_shift": 3.0, "sequence_template": "pretrain"}, "tokenizer_config.json": {},
}  # fmt: skip
GEMMA3_12B = {
    "text_config": {
        "head_dim": 256, "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "vocab_size": 262208,
    },
    "vision_config": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
    },
}  # fmt: skip
LTX23 = {
    "text_encoder": GEMMA3_12B,
    "connectors": {
        "audio_connector_attention_head_dim": 64, "audio_connector_num_attention_heads": 32, "audio_gated_attn": True,
        "per_modality_projections": True, "proj_bias": True, "rope_type": "split",
        "video_connector_num_attention_heads": 32, "video_gated_attn": True,
    },
    "transformer": {
        "audio_cross_attn_mod": True, "audio_gated_attn": True, "cross_attn_mod": True, "gated_attn": True,
        "perturbed_attn": True, "rope_type": "split", "use_prompt_embeddings": False,
    },
    "vocoder": {"_class_name": "LTX2VocoderWithBWE", "output_sampling_rate": 48000},
    "scheduler": {
        "base_image_seq_len": 1024, "base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1,
        "use_dynamic_shifting": True,
    },
}  # fmt: skip
HUNYUAN_VIDEO = {
    "text_encoder": {k: QWEN25_VL_7B[k] for k in QWEN25_VL_7B if k != "vision_config"},
    "text_encoder_2": {"d_ff": 3584, "d_model": 1472, "feed_forward_proj": "gated-gelu", "num_heads": 6}
    | {"num_layers": 12, "vocab_size": 1510},
    "transformer": {"task_type": "t2v"},
    "scheduler": {"shift": 5.0},
}
STABLE_AUDIO = {
    "text_encoder": {
        "encoder": {
            "head_dim": 64, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12,
            "num_hidden_layers": 12, "num_key_value_heads": 12,
        },
        "is_encoder_decoder": False,
    },
    "duration_embedder": {"max_val": 384.0},
    "vae": {"decoder_sinusoidal_blocks": [8], "encoder_channels": 256, "encoder_transformer_depths": [12]},
    "scheduler": {"num_train_timesteps": 1},
}  # fmt: skip
RELEASES = {
    "diffusers/LTX-2.3-Diffusers": Release(
        "LTX2Pipeline", 19, 48 * 28, LTX23, channels=128, stride=32, frames=8,
        index={"vocoder": ("ltx2", "LTX2VocoderWithBWE")},
    ),
    "models/stable-audio-3-medium-base": Release(
        "StableAudio3Pipeline", 1.45, 24 * 7, STABLE_AUDIO, channels=256, stride=4096
    ),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": Release(
        "HunyuanVideo15Pipeline", 8.3, 54 * 12 + 2 * 6, HUNYUAN_VIDEO, channels=32, stride=16
    ),
    "tencent/HunyuanImage-3.0": Release(
        "HunyuanImage3ForCausalMM", 80, 32 * 2, HUNYUAN_IMAGE_FILES, channels=32, stride=16
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Release(
        "WanPipeline", 1.42, 30 * 10,
        WAN | {"transformer": {"ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30}},
        absent=("transformer_2", *NO_CLIP),
    ),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Release(
        "WanPipeline", 5, 30 * 10, WAN_5B, channels=48, stride=16, absent=("transformer_2", *NO_CLIP),
        index={"boundary_ratio": None, "expand_timesteps": True},
    ),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Release(
        "WanPipeline", 28.6, 2 * 40 * 10, WAN, absent=NO_CLIP, index={"boundary_ratio": 0.875}
    ),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": Release(
        "WanImageToVideoPipeline", 28.6, 2 * 40 * 10, WAN | {"transformer": WAN_I2V, "transformer_2": WAN_I2V},
        absent=NO_CLIP, index={"boundary_ratio": 0.9},
    ),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": Release(
        "WanImageToVideoPipeline", 16.4, 40 * 10,
        WAN | {"transformer": WAN_I2V | {"added_kv_proj_dim": 5120, "image_dim": 1280}, "image_encoder": WAN_CLIP},
        absent=("transformer_2",),
    ),
    "ByteDance-Seed/BAGEL-7B-MoT": Release("BagelForConditionalGeneration", 14, 28 * 7, BAGEL_FILES),
    "Qwen/Qwen-Image": Release("QwenImagePipeline", 20, 60 * 12, QWEN_PARTS),
    "Qwen/Qwen-Image-Edit": Release("QwenImageEditPipeline", 20, 60 * 12, QWEN_PARTS),
    "Qwen/Qwen-Image-Edit-2509": Release("QwenImageEditPlusPipeline", 20, 60 * 12, QWEN_PARTS),
    "Qwen/Qwen-Image-Edit-2511": Release(
        "QwenImageEditPlusPipeline", 20, 60 * 12, QWEN_PARTS | {"transformer": {"zero_cond_t": True}}
    ),
    "stabilityai/stable-diffusion-3.5-medium": Release(
        "StableDiffusion3Pipeline", 2.5, 24 * 8 - 1, SD3_PARTS | {"transformer": SD35_MEDIUM}
    ),
    "Tongyi-MAI/Z-Image": Release("ZImagePipeline", 6, 34 * 7, Z_IMAGE_PARTS),
    "Tongyi-MAI/Z-Image-Turbo": Release("ZImagePipeline", 6, 34 * 7, Z_IMAGE_PARTS | {"scheduler": {"shift": 3.0}}),
    "black-forest-labs/FLUX.1-dev": Release(
        "FluxPipeline", 12, 19 * 12 + 38 * 3, FLUX_PARTS | {"transformer": {"guidance_embeds": True}}
    ),
    "black-forest-labs/FLUX.1-Kontext-dev": Release(
        "FluxKontextPipeline", 12, 19 * 12 + 38 * 3, FLUX_PARTS | {"transformer": {"guidance_embeds": True}}
    ),
    "black-forest-labs/FLUX.2-dev": Release(
        "Flux2Pipeline", 32, 8 * 12 + 48, {"text_encoder": MISTRAL_24B, "scheduler": FLUX2_SCHEDULE}, **FLUX2
    ),
    "black-forest-labs/FLUX.2-klein-base-4B": Release("Flux2KleinPipeline", 4, 5 * 12 + 20, KLEIN_4B, **FLUX2),
    **{
        f"black-forest-labs/FLUX.2-{name}-9B": Release("Flux2KleinPipeline", 9, 8 * 12 + 24, KLEIN_9B, **FLUX2)
        for name in ("klein", "klein-base")
    },
}  # fmt: skip
