"""vLLM-Omni's pipelines as rollout pipelines, one row per model.

A class subclasses one of vLLM-Omni's pipelines, and has the differences of its transformer's parameter names from
diffusers'. If vLLM-Omni's transformer has other arguments, a hook converts diffusers' call.
"""

from typing import Any, ClassVar
from unittest.mock import patch

from torch import nn
from transformers import CLIPImageProcessorPil

from omni_rollout.engines.vllm_omni.worker import RolloutPipeline
from omni_rollout.models.diffusers_model import joined
from omni_rollout.models.qwen_image_edit import image_processor_class
from omni_rollout.models.wan import EXPERTS

from vllm_omni.diffusion.models.flux.pipeline_flux import FluxPipeline  # isort: skip - after the worker
from vllm_omni.diffusion.models.flux.pipeline_flux_kontext import FluxKontextPipeline  # isort: skip
from vllm_omni.diffusion.models.flux2_klein.pipeline_flux2_klein import Flux2KleinPipeline  # isort: skip
from vllm_omni.diffusion.models.ltx2.pipeline_ltx2 import LTX2Pipeline  # isort: skip
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline  # isort: skip
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image_edit import QwenImageEditPipeline  # isort: skip
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image_edit_plus import QwenImageEditPlusPipeline  # isort: skip
from vllm_omni.diffusion.models.sd3.pipeline_sd3 import StableDiffusion3Pipeline  # isort: skip
from vllm_omni.diffusion.models.wan2_2 import pipeline_wan2_2_i2v as wan_i2v  # isort: skip
from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import Wan22Pipeline  # isort: skip


class Flux1Rollout(RolloutPipeline, FluxPipeline):
    """FLUX.1."""


class Flux1KontextRollout(RolloutPipeline, FluxKontextPipeline):
    """FLUX.1 Kontext."""


class QwenPipeline(RolloutPipeline):
    """A rollout pipeline with Qwen-Image's transformer."""

    diffusers_names: ClassVar = {".to_out.": ".to_out.0."}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.transformer.register_forward_pre_hook(_add_text_lengths, with_kwargs=True)


class QwenEditPipeline(QwenPipeline):
    """A rollout pipeline of Qwen-Image's editing models."""

    def __init__(self, **kwargs: Any) -> None:
        stock = type(self).__bases__[1]
        # `encode` needs only the processor's half for images.
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


class LTX2Rollout(RolloutPipeline, LTX2Pipeline):
    """LTX-2 and 2.3, frames and sound, without a given first frame."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.transformer.register_forward_pre_hook(_refuse_first_frame, with_kwargs=True)


class StableDiffusion3Rollout(RolloutPipeline, StableDiffusion3Pipeline):
    """Stable Diffusion 3 and 3.5."""

    packed: ClassVar = {"to_qkv": ["to_q", "to_k", "to_v"], "add_kv_proj": ["add_q_proj", "add_k_proj", "add_v_proj"]}


class WanPipeline(RolloutPipeline):
    """A rollout pipeline of Wan: parameter names, and the experts as one net."""

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
        return joined({name: net for name, net in nets.items() if net is not None})


class WanRollout(WanPipeline, Wan22Pipeline):
    """Wan 2.1 and 2.2."""


class WanImageToVideoRollout(WanPipeline, wan_i2v.Wan22I2VPipeline):
    """Wan 2.1 and 2.2 with a given frame."""

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


def _add_text_lengths(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add the padded length of every text, which vLLM-Omni's transformer requires as an argument."""
    num_samples, length = kwargs["encoder_hidden_states"].shape[:2]
    return args, kwargs | {"txt_seq_lens": [length] * num_samples}


def _refuse_first_frame(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError for levels of noise by token, which vLLM-Omni also takes for attention between the media."""
    if kwargs["timestep"].dim() > 1:
        rule = "a first frame of an LTX2Pipeline must be sampled with --engine diffusers"
        raise ValueError(f"{rule}: vLLM-Omni modulates attention between frames and sound by other noise levels")


# The pipeline of model_index.json -> its rollout class.
PIPELINES: dict[str, type[RolloutPipeline]] = {
    "FluxPipeline": Flux1Rollout,
    "FluxKontextPipeline": Flux1KontextRollout,
    "Flux2KleinPipeline": Flux2KleinRollout,
    "LTX2Pipeline": LTX2Rollout,
    "QwenImageEditPipeline": QwenImageEditRollout,
    "QwenImageEditPlusPipeline": QwenImageEditPlusRollout,
    "QwenImagePipeline": QwenImageRollout,
    "StableDiffusion3Pipeline": StableDiffusion3Rollout,
    "WanImageToVideoPipeline": WanImageToVideoRollout,
    "WanPipeline": WanRollout,
}
