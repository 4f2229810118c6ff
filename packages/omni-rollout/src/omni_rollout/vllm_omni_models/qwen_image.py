"""Qwen-Image in vLLM-Omni. Its parts have diffusers' names, so `models.qwen_image` samples with them as they are."""

from types import ModuleType
from typing import Any, ClassVar

from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline

from omni_rollout.models import qwen_image
from omni_rollout.vllm_omni_worker import RolloutPipeline


class QwenImageRollout(RolloutPipeline, QwenImagePipeline):
    """vLLM-Omni's modules and loading; the sampling is ours."""

    family: ClassVar[ModuleType] = qwen_image
    diffusers_names: ClassVar[dict[str, str]] = {".to_out.": ".to_out.0."}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for part in (self.text_encoder, self.vae):
            part.to(self.od_config.dtype)  # vLLM-Omni leaves them in the type that the checkpoint's files have
        self.transformer.register_forward_pre_hook(_add_text_lengths, with_kwargs=True)


def _add_text_lengths(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """vLLM-Omni's transformer wants the padded length of every text, which diffusers' reads off the text itself."""
    num_samples, length = kwargs["encoder_hidden_states"].shape[:2]
    return args, kwargs | {"txt_seq_lens": [length] * num_samples}
