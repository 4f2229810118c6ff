"""vLLM-Omni's pipelines as rollout pipelines, one class per model.

A class subclasses one of vLLM-Omni's pipelines and lists where its transformer's parameter names differ from
diffusers'. If vLLM-Omni's transformer takes other arguments, a hook converts diffusers' call.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, CLIPImageProcessorPil, SiglipImageProcessorPil

from omni_rollout.engines.vllm_omni.worker import RolloutPipeline
from omni_rollout.models.diffusers_model import join_nets
from omni_rollout.models.qwen_image_edit import image_processor_class
from omni_rollout.models.wan import EXPERTS

from vllm_omni.diffusion.models.flux.pipeline_flux import FluxPipeline  # isort: skip - after the worker
from vllm_omni.diffusion.models.flux.pipeline_flux_kontext import FluxKontextPipeline  # isort: skip
from vllm_omni.diffusion.models.flux2 import pipeline_flux2 as flux2  # isort: skip
from vllm_omni.diffusion.models.flux2_klein.pipeline_flux2_klein import Flux2KleinPipeline  # isort: skip
from vllm_omni.diffusion.models.hunyuan_video.pipeline_hunyuan_video_1_5 import HunyuanVideo15Pipeline  # isort: skip
from vllm_omni.diffusion.models.hunyuan_video import pipeline_hunyuan_video_1_5_i2v as hunyuan_i2v  # isort: skip
from vllm_omni.diffusion.models.ltx2.pipeline_ltx2 import LTX2Pipeline  # isort: skip
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline  # isort: skip
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image_edit import QwenImageEditPipeline  # isort: skip
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image_edit_plus import QwenImageEditPlusPipeline  # isort: skip
from vllm_omni.diffusion.models.sd3.pipeline_sd3 import StableDiffusion3Pipeline  # isort: skip
from vllm_omni.diffusion.models.wan2_2 import pipeline_wan2_2_i2v as wan_i2v  # isort: skip
from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import Wan22Pipeline  # isort: skip
from vllm_omni.diffusion.models.z_image import pipeline_z_image as z_image  # isort: skip
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs  # isort: skip


class Flux1Rollout(RolloutPipeline, FluxPipeline):
    """FLUX.1."""


class Flux1KontextRollout(RolloutPipeline, FluxKontextPipeline):
    """FLUX.1 Kontext."""


class QwenPipeline(RolloutPipeline):
    """Rollout pipeline with Qwen-Image's transformer."""

    diffusers_names: ClassVar = {".to_out.": ".to_out.0."}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.transformer.register_forward_pre_hook(_add_text_lengths, with_kwargs=True)


class QwenEditPipeline(QwenPipeline):
    """Rollout pipeline of Qwen-Image's editing models."""

    def __init__(self, **kwargs: Any) -> None:
        stock = type(self).__bases__[1]
        # `encode` needs only the image half of the processor.
        with patch(f"{stock.__module__}.Qwen2VLProcessor", image_processor_class()):
            super().__init__(**kwargs)


class QwenImageRollout(QwenPipeline, QwenImagePipeline):
    """Qwen-Image."""


class QwenImageEditRollout(QwenEditPipeline, QwenImageEditPipeline):
    """Qwen-Image-Edit."""


class QwenImageEditPlusRollout(QwenEditPipeline, QwenImageEditPlusPipeline):
    """Qwen-Image-Edit-Plus."""


class Flux2KleinRollout(RolloutPipeline, Flux2KleinPipeline):
    """FLUX.2 klein and klein-base."""

    packed: ClassVar = {"to_qkv": ["to_q", "to_k", "to_v"], "add_kv_proj": ["add_q_proj", "add_k_proj", "add_v_proj"]}


class Flux2Rollout(RolloutPipeline, flux2.Flux2Pipeline):
    """FLUX.2 dev."""

    packed: ClassVar = Flux2KleinRollout.packed

    def __init__(self, **kwargs: Any) -> None:
        with patch.object(flux2, "PixtralProcessor", AutoTokenizer):  # its text half, which needs no torchvision
            super().__init__(**kwargs)
        encoder, net = self.text_encoder, self.text_encoder.language_model.model
        theta = encoder.config.rope_parameters["rope_theta"]  # from the file; vLLM-Omni uses 1e6
        net.rotary_emb = type(net.rotary_emb)(encoder.head_dim, encoder.max_position_embeddings, theta)
        net.rotary_emb.register_forward_pre_hook(_count_padding)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load all weights; the text encoder's unused head may be missing."""
        loaded: set[str] = super().load_weights(weights)
        return loaded | {"text_encoder.language_model.lm_head.weight"}


def _count_padding(module: object, args: tuple[Tensor, torch.dtype]) -> tuple[Tensor, torch.dtype]:
    """Give padding its own positions, as in diffusers' pipeline, whose net attends to padding."""
    positions, dtype = args
    return torch.arange(positions.shape[1], device=positions.device)[None], dtype


class HunyuanVideoPipeline(RolloutPipeline):
    """Rollout pipeline with HunyuanVideo 1.5's transformer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.transformer.register_forward_pre_hook(_add_masks, with_kwargs=True)
        self.transformer.register_forward_hook(lambda module, args, out: out[0])


class HunyuanVideoRollout(HunyuanVideoPipeline, HunyuanVideo15Pipeline):
    """HunyuanVideo 1.5."""


class HunyuanVideoImageRollout(HunyuanVideoPipeline, hunyuan_i2v.HunyuanVideo15I2VPipeline):
    """HunyuanVideo 1.5 with a first frame."""

    def __init__(self, **kwargs: Any) -> None:
        with patch.object(hunyuan_i2v, "SiglipImageProcessor", SiglipImageProcessorPil):
            super().__init__(**kwargs)  # the default processor uses torchvision


class LTX2Rollout(RolloutPipeline, LTX2Pipeline):
    """LTX-2 and 2.3, frames and sound, without a first frame."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.transformer.register_forward_pre_hook(_refuse_first_frame, with_kwargs=True)


class StableDiffusion3Rollout(RolloutPipeline, StableDiffusion3Pipeline):
    """Stable Diffusion 3 and 3.5."""

    packed: ClassVar = {"to_qkv": ["to_q", "to_k", "to_v"], "add_kv_proj": ["add_q_proj", "add_k_proj", "add_v_proj"]}


class WanPipeline(RolloutPipeline):
    """Rollout pipeline of Wan, with its parameter names and the experts as one net."""

    diffusers_names: ClassVar = {
        ".to_out.": ".to_out.0.",
        ".net_0.": ".net.0.",
        ".net_2.": ".net.2.",
        "output_scale_shift_prepare.": "",
    }
    packed: ClassVar = {"to_qkv": ["to_q", "to_k", "to_v"]}

    @property
    def net(self) -> nn.Module:
        """Both experts, or the single transformer."""
        nets = {name: getattr(self, part) for name, part in EXPERTS.items()}
        return join_nets({name: net for name, net in nets.items() if net is not None})


class WanRollout(WanPipeline, Wan22Pipeline):
    """Wan 2.1 and 2.2."""


class WanImageToVideoRollout(WanPipeline, wan_i2v.Wan22I2VPipeline):
    """Wan 2.1 and 2.2 with a first frame."""

    def __init__(self, **kwargs: Any) -> None:
        read = wan_i2v._load_json

        def parts_there(*args: Any) -> dict[str, Any]:
            """Return the file without null parts: the pipeline only checks for the name of a second transformer."""
            return {name: part for name, part in read(*args).items() if part != [None, None]}

        with patch.multiple(wan_i2v, _load_json=parts_there, CLIPImageProcessor=CLIPImageProcessorPil):
            super().__init__(**kwargs)  # the default processor uses torchvision
        if embedder := self.transformer.condition_embedder.image_embedder:
            for norm in (embedder.norm1, embedder.norm2):
                norm.eps = 1e-5  # diffusers' value, ten times vLLM-Omni's


class ZImageRollout(RolloutPipeline, z_image.ZImagePipeline):
    """Z-Image with the sizes of its configuration; vLLM-Omni's pipeline builds the released sizes."""

    text_encoder: Any

    def __init__(self, *, od_config: Any, **kwargs: Any) -> None:
        stock = z_image.ZImageTransformer2DModel
        sizes = get_transformer_config_kwargs(od_config.tf_model_config, stock)
        with patch.object(z_image, "ZImageTransformer2DModel", partial(stock, **sizes)):
            super().__init__(od_config=od_config, **kwargs)
        self.text_encoder = self.text_encoder.model  # without the head, which is missing in some checkpoints
        self.transformer.register_forward_pre_hook(_omit_form, with_kwargs=True)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load all weights except the text encoder's head."""
        loaded: set[str] = super().load_weights(
            (name.replace("text_encoder.model.", "text_encoder."), tensor)
            for name, tensor in weights
            if not name.startswith("text_encoder.lm_head.")
        )
        return loaded


def _omit_form(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Drop diffusers' `return_dict`, which vLLM-Omni's transformer does not accept."""
    return args, {name: value for name, value in kwargs.items() if name != "return_dict"}


def _add_text_lengths(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add the padded length of every text, an argument that vLLM-Omni's transformer requires."""
    num_samples, length = kwargs["encoder_hidden_states"].shape[:2]
    return args, kwargs | {"txt_seq_lens": [length] * num_samples}


def _add_masks(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add the masks that vLLM-Omni's transformer requires and, without an image, one masked image token."""
    words, glyphs, image = kwargs["encoder_hidden_states"], kwargs["encoder_hidden_states_2"], kwargs["image_embeds"]
    has_image = image is not None
    if not has_image:
        image = words.new_zeros(len(words), 1, module.image_embedder.linear_1.in_features)

    def mask(tokens: Tensor, value: bool) -> Tensor:
        return tokens.new_full(tokens.shape[:2], value, dtype=torch.bool)

    added = {
        "encoder_attention_mask": mask(words, True),
        "encoder_attention_mask_2": mask(glyphs, True),
        "image_embeds": image,
        "image_embeds_mask": mask(image, has_image),
        "return_dict": False,
    }
    return args, added | {name: value for name, value in kwargs.items() if value is not None}


def _refuse_first_frame(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError for per-token noise levels, which vLLM-Omni also uses for attention between the media."""
    if kwargs["timestep"].dim() > 1:
        rule = "a first frame of an LTX2Pipeline must be sampled with --engine diffusers"
        raise ValueError(f"{rule}: vLLM-Omni modulates attention between frames and sound by other noise levels")


# The pipeline of model_index.json -> its rollout class.
PIPELINES: dict[str, type[RolloutPipeline]] = {
    "FluxPipeline": Flux1Rollout,
    "FluxKontextPipeline": Flux1KontextRollout,
    "Flux2KleinPipeline": Flux2KleinRollout,
    "Flux2Pipeline": Flux2Rollout,
    "HunyuanVideo15ImageToVideoPipeline": HunyuanVideoImageRollout,
    "HunyuanVideo15Pipeline": HunyuanVideoRollout,
    "LTX2Pipeline": LTX2Rollout,
    "QwenImageEditPipeline": QwenImageEditRollout,
    "QwenImageEditPlusPipeline": QwenImageEditPlusRollout,
    "QwenImagePipeline": QwenImageRollout,
    "StableDiffusion3Pipeline": StableDiffusion3Rollout,
    "WanImageToVideoPipeline": WanImageToVideoRollout,
    "WanPipeline": WanRollout,
    "ZImagePipeline": ZImageRollout,
}
