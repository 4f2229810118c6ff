"""Z-Image, base and turbo (arXiv 2511.22699): text to image, a flow in the latents of an 8x VAE.

Shapes: B samples, C latent channels (16), h x w latent pixels (an eighth of the image), T text tokens, D text width.
The net takes and returns lists with one tensor per sample. Its time runs from 0 (noise) to 1 (data), and its velocity
from noise to data.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omni_rollout.models.diffusers_model import PIXELS_PER_TOKEN, ImageModel, check_size
from omni_rollout.types import Cond, Params, Parts, Prompt

TEXT_UNIT = 32  # tokens; the net pads a text to a multiple of it


class ZImage(ImageModel):
    """Z-Image for one checkpoint. Its guidance is `guidance_scale`, on above 0; the turbo checkpoint requires 0.

    Options: `cfg_truncation`, the time in [0, 1] after which guidance is off; `cfg_normalization`, the largest ratio of
    the guided velocity's norm to the conditional one's, or 0 for no bound; `max_sequence_length`, the number of tokens
    to which a text is truncated, including the chat template's.
    """

    PIPELINE = "ZImagePipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "text_encoder": ("transformers", "Qwen3Model"),
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "transformer": ("diffusers", "ZImageTransformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    }
    OPTIONS: ClassVar[Mapping[str, float]] = {
        "cfg_truncation": 1.0,
        "cfg_normalization": 0.0,
        "max_sequence_length": 512,
    }
    TEXT_OPTIONS: ClassVar[tuple[str, ...]] = ("max_sequence_length",)
    GUIDANCE: ClassVar[Mapping[str, float]] = {"guidance_scale": 0.0}
    CONTEXT_PARALLEL = True
    HEADS: ClassVar[tuple[str, ...]] = ("n_heads", "n_kv_heads")
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("ZImageTransformerBlock",)
    LORA_TARGETS: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3")

    def _check_config(self) -> None:
        super()._check_config()
        channels = self.value("vae", "latent_channels", int)
        self._expect("transformer", all_patch_size=[2], all_f_patch_size=[1], in_channels=channels)

    def _class(self, part: str) -> Any:
        if part != "transformer":
            return super()._class(part)
        from omni_rollout.models.z_image_net import ZImageTransformer2DModel

        return ZImageTransformer2DModel

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size or option."""
        super().check(params)
        places, rows, columns = self.value("transformer", "axes_lens", list, [1024, 512, 512])
        check_size(params, PIXELS_PER_TOKEN, max_units=min(rows, columns))
        self.check_text_length(params, (places - 2) // TEXT_UNIT * TEXT_UNIT)  # one for padding, one for the image
        for name, maximum in (("cfg_truncation", 1), ("cfg_normalization", float("inf"))):
            if not 0 <= (value := self.option(params, name)) <= maximum:
                raise ValueError(f"{name} must be in [0, {maximum}], got {value}")

    def check_context(self) -> None:
        """Raise ValueError unless `context` ranks can compute a forward pass together: tokens come in units of 32."""
        if TEXT_UNIT % self.context:
            raise ValueError(f"context must divide {TEXT_UNIT} for a {self.PIPELINE}, got {self.context}")
        super().check_context()

    def share(self, net: nn.Module, mesh: "torch.distributed.DeviceMesh") -> None:
        """Split the tokens of each forward pass of the net over a row of `mesh`; every rank refines all tokens."""
        super().share(net, mesh)
        for block in (*net.get_submodule("noise_refiner").children(), *net.get_submodule("context_refiner").children()):
            block.get_submodule("attention").processor._parallel_config = None  # type: ignore[union-attr]

    def _context_plan(self, net: nn.Module) -> dict[str, Any]:
        """Return a plan, as diffusers has none: image and text are split once they are one sequence."""
        from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

        part = ContextParallelInput(split_dim=1)
        return {
            "layers.0": {"x": part},
            "layers.*": {"attn_mask": part, "freqs_cis": part},
            "all_final_layer.2-1": ContextParallelOutput(gather_dim=1),
        }

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False, max_sequence_length: float = 512) -> Cond:
        """Return the embeddings of one prompt: `embeds` [T, D] in the encoder's dtype, and `embeds_mask` [T], True."""
        chat = [{"role": "user", "content": prompt.negative if negative else prompt.text}]
        text = parts.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        tokens = parts.tokenizer([text], max_length=int(max_sequence_length), truncation=True, return_tensors="pt")
        ids = tokens.input_ids.to(parts.text_encoder.device)
        embeds = parts.text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-2][0]
        return {"embeds": embeds, "embeds_mask": torch.ones(len(embeds), dtype=torch.bool)}

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, C, h, w], float32, at x [B, C, h, w] and noise levels sigma [B].

        cond: `embeds` [B, T, D] and `embeds_mask` [B, T], with guidance also their negatives, which do not run if
        truncation turns guidance off for all samples.
        """
        time = (1000 - sigma.float() * 1000) / 1000  # rounded as in diffusers
        scale = torch.full_like(time, params.guidance_scale)
        guided, truncation = self.is_guided(params), self.option(params, "cfg_truncation")
        if guided and truncation < 1:
            scale = scale.where(time <= truncation, 0)
            guided = bool(scale.any())

        def predict(embeds: Tensor, mask: Tensor) -> Tensor:
            data_minus_noise = net(
                x=list(x.to(embeds.dtype)[:, :, None]),
                t=time,
                cap_feats=[text[:length] for text, length in zip(embeds, mask.sum(dim=1).tolist(), strict=True)],
                return_dict=False,
            )[0]
            return -torch.stack([sample[:, 0].float() for sample in data_minus_noise])

        positive = predict(cond["embeds"], cond["embeds_mask"])
        if not guided:
            return positive
        negative = predict(cond["negative_embeds"], cond["negative_embeds_mask"])
        scale = scale.view(-1, 1, 1, 1)
        combined = positive + scale * (positive - negative)
        if limit := self.option(params, "cfg_normalization"):
            bounded = combined * (limit * _length(positive) / _length(combined)).clamp(max=1)
            combined = bounded.where(scale > 0, combined)
        return combined


def _length(x: Tensor) -> Tensor:
    """Return the norm of each sample's velocity [B, C, h, w], as [B, 1, 1, 1]."""
    return torch.linalg.vector_norm(x, dim=(1, 2, 3), keepdim=True)
