"""Stable Diffusion 3 and 3.5, medium and large (arXiv 2403.03206): text to image, a flow in the latents of an 8x VAE.

Shapes: B samples, C latent channels (16), h x w latent pixels (an eighth of the image), T text positions (77 of two
CLIP encoders, max_sequence_length of T5), D text width. Every text fills all positions, so there is no mask.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from omni_sched import shift_sigmas
from torch import Tensor, nn

from omni_rollout.models.diffusers_model import (
    FLOW_SCHEDULER,
    JOINT_ATTENTION,
    ImageModel,
    cfg_batch,
    check_size,
    text_ids,
)
from omni_rollout.types import Cond, Params, Parts, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class StableDiffusion3(ImageModel):
    """Stable Diffusion 3 or 3.5 for one checkpoint. Its guidance is `guidance_scale`, which is on above 1.

    The option max_sequence_length is the length to which T5's text is padded or truncated.
    """

    PIPELINE = "StableDiffusion3Pipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
        "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
        "text_encoder_3": ("transformers", "T5EncoderModel"),
        "tokenizer": ("transformers", "CLIPTokenizer"),
        "tokenizer_2": ("transformers", "CLIPTokenizer"),
        "tokenizer_3": ("transformers", "T5Tokenizer"),
        "transformer": ("diffusers", "SD3Transformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    }
    OPTIONS: ClassVar[Mapping[str, float]] = {"max_sequence_length": 256}
    TEXT_OPTIONS = tuple(OPTIONS)
    CONTEXT_PARALLEL = True
    SCHEDULER: ClassVar[Mapping[str, object]] = {**FLOW_SCHEDULER, "use_dynamic_shifting": False}
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("JointTransformerBlock",)
    LORA_TARGETS: ClassVar[tuple[str, ...]] = JOINT_ATTENTION  # as published: not 3.5 medium's second attention

    def _check_config(self) -> None:
        super()._check_config()
        channels = self.value("vae", "latent_channels", int)
        self._expect("transformer", in_channels=channels, out_channels=channels)

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size or option."""
        super().check(params)
        self.check_text_length(params)
        unit = 8 * self.value("transformer", "patch_size", int, 2)
        check_size(params, unit, max_units=self.value("transformer", "pos_embed_max_size", int))
        self._check_tokens(params, unit)
        length, clip = (
            int(self.option(params, "max_sequence_length")),
            self.value("tokenizer", "model_max_length", int, 77),
        )
        if remainder := (length + clip) % self.context:
            nearest = length - remainder if length > remainder else length - remainder + self.context
            rule = f"max_sequence_length and CLIP's {clip} tokens must make a multiple of {self.context} ranks"
            raise ValueError(f"{rule}, such as {nearest}, got {length}")

    def share(self, net: nn.Module, mesh: "torch.distributed.DeviceMesh") -> None:
        """Split the tokens of each forward pass of the net over the ranks in a row of `mesh`.

        The attention of diffusers' net exchanges no tokens. HunyuanVideo's attention computes the same and does; so
        does Z-Image's for blocks without texts.
        """
        from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
        from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor

        kinds = {"attn": HunyuanVideoAttnProcessor2_0, "attn2": ZSingleStreamAttnProcessor}
        for name, module in net.named_modules():
            if kind := kinds.get(name.rpartition(".")[2]):
                module.set_processor(kind())
        super().share(net, mesh)

    def _context_plan(self, net: nn.Module) -> dict[str, Any]:
        """Return a plan, as diffusers has none: images and texts are split after their embedders."""
        from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

        return {
            "transformer_blocks.0": dict.fromkeys(("hidden_states", "encoder_hidden_states"), ContextParallelInput(1)),
            "proj_out": ContextParallelOutput(gather_dim=1),
        }

    def sigmas(self, params: Params) -> Tensor:
        """Return the noise levels [S + 1] from 1 to 0, the same for any size.

        diffusers spaces the steps evenly between the shifted ends of the training schedule, and shifts them again.
        """
        shift = self.value("scheduler", "shift", float, 1.0)
        lowest = shift_sigmas(torch.tensor(1 / 1000), shift)
        levels = torch.linspace(1, float(lowest), params.num_inference_steps)
        return self._shift_levels(torch.cat([levels, torch.zeros(1)]), params)

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False, max_sequence_length: float = 256) -> Cond:
        """Return the embeddings of one prompt: `embeds` [T, D] and `pooled` [D'], in the encoders' dtype."""
        text = prompt.negative if negative else prompt.text
        length = parts.tokenizer.model_max_length  # for both, as in the pipeline
        clip, pooled = _encode_clip(parts.tokenizer, parts.text_encoder, text, length)
        clip_2, pooled_2 = _encode_clip(parts.tokenizer_2, parts.text_encoder_2, text, length)
        t5 = parts.text_encoder_3(text_ids(parts.tokenizer_3, parts.text_encoder_3, text, max_sequence_length))[0]
        clips = torch.cat([clip, clip_2], dim=-1)
        clips = nn.functional.pad(clips, (0, t5.shape[-1] - clips.shape[-1]))
        return {"embeds": torch.cat([clips, t5], dim=1)[0], "pooled": torch.cat([pooled, pooled_2], dim=-1)[0]}

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, C, h, w], float32, at x [B, C, h, w] and noise levels sigma [B].

        cond: `embeds` [B, T, D] and `pooled` [B, D'], with guidance also their negatives. Both halves of
        classifier-free guidance run as one batch.
        """
        embeds, pooled = cond["embeds"], cond["pooled"]
        guided = self.is_guided(params)
        if guided:
            embeds, pooled = cfg_batch(cond, "embeds"), cfg_batch(cond, "pooled")
            x, sigma = torch.cat([x, x]), torch.cat([sigma, sigma])
        velocity = net(
            hidden_states=x.to(embeds.dtype),
            timestep=sigma.float() * 1000,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0].float()
        if not guided:
            return velocity
        positive, negative = velocity.chunk(2)
        return negative + params.guidance_scale * (positive - negative)


def _encode_clip(
    tokenizer: "PreTrainedTokenizerBase", encoder: "PreTrainedModel", text: str, length: int
) -> tuple[Tensor, Tensor]:
    """Return the embeddings [1, length, D] before the last layer and the pooled embedding [1, D']."""
    out = encoder(text_ids(tokenizer, encoder, text, length), output_hidden_states=True)
    return out.hidden_states[-2], out[0]
