"""BAGEL's transformer (arXiv 2505.14683) on the blocks of transformers' Qwen2: two sets of weights, one sequence.

Every layer has its weights twice: NAME_moe_gen for latents, NAME for everything else. References, text and image are
one sequence (see `bagel_sequence`) and one forward pass. The released code has a KV cache of everything except the
image; here nothing is kept between calls, so that every weight that affects the image can be trained. Names are those
of ema.safetensors. A subclass writes text in a separate call, with a KV cache while it samples.

Shapes: B samples, T text tokens, U tokens with NAME, G with NAME_moe_gen, L = U + G, D width, C latent channels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.embeddings import get_timestep_embedding
from torch import Tensor, nn
from transformers import Qwen2Config
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2MLP,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from omni_rollout.models.bagel_sequence import (
    MAX_TOKENS_PER_SIDE,
    Segment,
    attend,
    join_streams,
    lay_out,
    split_streams,
)

PATCH = 2  # latent pixels per token along each side
LATENT_CHANNELS = 16
TIME_FREQUENCIES = 256


class PairedModule(nn.Module):
    """Module whose children come in pairs: NAME for text and marks, NAME_moe_gen for latents."""

    def add_pair(self, name: str, make: Callable[[], nn.Module]) -> None:
        """Add NAME and NAME_moe_gen."""
        self.add_module(name, make())
        self.add_module(f"{name}_moe_gen", make())

    def pair(self, name: str, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return NAME's output for one stream, and NAME_moe_gen's for the other."""
        return self.get_submodule(name)(text), self.get_submodule(f"{name}_moe_gen")(image)


class KeyValues:
    """KV cache: keys and values [B, heads, L, width] of earlier tokens, by attention layer."""

    def __init__(self) -> None:
        self.by_layer: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; return the layer's keys and values of all tokens."""
        if layer in self.by_layer:
            key, value = (torch.cat(pair, dim=2) for pair in zip(self.by_layer[layer], (key, value), strict=True))
        self.by_layer[layer] = key, value
        return key, value


class BagelAttention(PairedModule):
    """Attention of both streams, with normalized queries and keys."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
        num_key_heads = config.num_key_value_heads or config.num_attention_heads
        self.num_groups = config.num_attention_heads // num_key_heads
        self.add_pair("q_proj", lambda: nn.Linear(width, width))
        for name in ("k_proj", "v_proj"):
            self.add_pair(name, lambda: nn.Linear(width, num_key_heads * self.head_dim))
        self.add_pair("o_proj", lambda: nn.Linear(width, width, bias=False))
        for name in ("q_norm", "k_norm"):
            self.add_pair(name, lambda: Qwen2RMSNorm(self.head_dim, config.rms_norm_eps))

    def forward(
        self,
        text: Tensor,
        image: Tensor,
        rope: tuple[Tensor, Tensor],
        segments: Sequence[Segment],
        kept: KeyValues | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention's output for both streams, [B, U, D] and [B, G, D]. rope: cos and sin [B, L, head_dim].

        kept: the KV cache of the preceding tokens, which is extended.
        """
        query, key, value = (self._heads(name, text, image) for name in ("q_proj", "k_proj", "v_proj"))
        exact = torch.promote_types(text.dtype, torch.float32)  # for norms and rotations, as released
        q = join_streams(*self.pair("q_norm", *(heads.to(exact) for heads in query)), segments)
        k = join_streams(*self.pair("k_norm", *(heads.to(exact) for heads in key)), segments)
        q, k = (heads.to(text.dtype) for heads in apply_rotary_pos_emb(q, k, *rope))
        v = join_streams(value[0], value[1], segments)
        if kept is not None:
            k, v = kept.extend(self, k, v)
        k, v = repeat_kv(k, self.num_groups), repeat_kv(v, self.num_groups)
        out = attend(q, k, v, segments).transpose(1, 2).flatten(2)
        return self.pair("o_proj", *split_streams(out, segments))

    def _heads(self, name: str, text: Tensor, image: Tensor) -> list[Tensor]:
        """Return a projection of both streams, [B, heads, tokens, head_dim]."""
        return [t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.pair(name, text, image)]


class BagelBlock(PairedModule):
    """One layer."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.self_attn = BagelAttention(config)
        self.add_pair("mlp", lambda: Qwen2MLP(config))
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.add_pair(name, lambda: Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(
        self,
        text: Tensor,
        image: Tensor,
        rope: tuple[Tensor, Tensor],
        segments: Sequence[Segment],
        kept: KeyValues | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return both streams after the layer; arguments as in BagelAttention."""
        words, patches = self.self_attn(*self.pair("input_layernorm", text, image), rope, segments, kept)
        text, image = text + words, image + patches
        words, patches = self.pair("mlp", *self.pair("post_attention_layernorm", text, image))
        return text + words, image + patches


class BagelLayers(PairedModule):
    """The language model: text embedding, layers, last norm."""

    _gradient_checkpointing_func: Callable[..., tuple[Tensor, Tensor]]

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([BagelBlock(config) for _ in range(config.num_hidden_layers)])
        self.add_pair("norm", lambda: Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.rotary_emb = Qwen2RotaryEmbedding(config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        marks: Tensor,
        image: Tensor,
        references: Sequence[Tensor],
        vision: Sequence[Tensor],
    ) -> Tensor:
        """Return the image's tokens [B, N, D] after all layers.

        references: tokens [B, N_i, D] of the references' latents. The other arguments are as in BagelTransformer.
        """
        N, around = image.shape[1], self.embed_tokens(marks)
        before = [tokens for image_tokens in vision for tokens in (around, around, image_tokens)]
        text = torch.cat([*before, self.embed_tokens(input_ids), around], dim=1)
        image = torch.cat([*references, image], dim=1)
        counts = [
            (latents.shape[1], image_tokens.shape[1]) for latents, image_tokens in zip(references, vision, strict=True)
        ]
        segments, positions = lay_out(attention_mask, counts, N)
        _, image = self._run(text, image, positions, segments)
        normalised: Tensor = self.get_submodule("norm_moe_gen")(image[:, -N:])
        return normalised

    def read(self, input_ids: Tensor, attention_mask: Tensor, kept: KeyValues | None) -> Tensor:
        """Return the tokens [B, L, D] of a text after all layers; arguments as in BagelThinker."""
        text, words = self.embed_tokens(input_ids), attention_mask.bool()
        columns = torch.arange(words.shape[1], device=words.device)
        rows = columns[-input_ids.shape[1] :, None]
        # Padding attends to itself: a row without any key would be NaN.
        visible = (words[:, None, None, :] & (columns <= rows)) | (columns == rows)
        positions = (words.cumsum(dim=1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        text, _ = self._run(text, text[:, :0], positions, [Segment(text.shape[1], 0, visible)], kept)
        normalised: Tensor = self.get_submodule("norm")(text)
        return normalised

    def _run(
        self, text: Tensor, image: Tensor, positions: Tensor, segments: Sequence[Segment], kept: KeyValues | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return both streams after all layers."""
        rope = self.rotary_emb(text, positions)
        for layer in self.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                text, image = self._gradient_checkpointing_func(layer, text, image, rope, segments)
            else:
                text, image = layer(text, image, rope, segments, kept)
        return text, image


class BagelTransformer(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """BAGEL's image generator. Arguments are as in llm_config.json; defaults are the released model's."""

    _supports_gradient_checkpointing = True
    _no_split_modules = ("BagelBlock",)
    _keep_in_fp32_modules = ("rotary_emb",)  # 8-bit frequencies would change the angle at each position
    WRITES = False
    # The reference encoder, which is a separate part, and the text head.
    _keys_to_ignore_on_load_unexpected = (r"^vit_", r"^connector\.", r"^language_model\.lm_head\.")

    @register_to_config
    def __init__(
        self,
        vocab_size: int = 152064,
        hidden_size: int = 3584,
        intermediate_size: int = 18944,
        num_hidden_layers: int = 28,
        num_attention_heads: int = 28,
        num_key_value_heads: int = 4,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 1e6,
    ) -> None:
        super().__init__()
        config = Qwen2Config(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            rms_norm_eps=rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        )
        self.language_model = nn.ModuleDict({"model": BagelLayers(config)})
        if self.WRITES:
            self.language_model["lm_head"] = nn.Linear(hidden_size, vocab_size, bias=False)
        layers = [nn.Linear(TIME_FREQUENCIES, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)]
        self.time_embedder = nn.ModuleDict({"mlp": nn.Sequential(*layers)})
        self.vae2llm = nn.Linear(PATCH**2 * LATENT_CHANNELS, hidden_size)
        self.llm2vae = nn.Linear(hidden_size, PATCH**2 * LATENT_CHANNELS)
        places = nn.Parameter(torch.zeros(MAX_TOKENS_PER_SIDE**2, hidden_size))
        self.latent_pos_embed = nn.ParameterDict({"pos_embed": places})

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        marks: Tensor,
        references: Sequence[Tensor] = (),
        vision: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the velocity [B, C, h, w] at latents hidden_states [B, C, h, w] and noise levels timestep [B].

        input_ids, attention_mask: the text [B, T], padded at the end, and its mask. marks: ids [B, 2] of the tokens
        around an image. references: clean latents [B, C, h', w'] and vision: tokens of
        BagelVision [B, n, D], of each.
        """
        image = self._embed(hidden_states, timestep)
        reference_tokens = [self._embed(latents, torch.zeros_like(timestep)) for latents in references]
        dtype = image.dtype
        image = self.language_model["model"](
            input_ids, attention_mask, marks, image, reference_tokens, [tokens.to(dtype) for tokens in vision]
        )
        grid = [side // PATCH for side in hidden_states.shape[-2:]]
        patches = self.llm2vae(image).unflatten(1, grid).unflatten(-1, (PATCH, PATCH, -1))
        velocity: Tensor = patches.permute(0, 5, 1, 3, 2, 4).reshape(hidden_states.shape)
        return velocity

    def _embed(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """Return the tokens [B, N, D] of latents [B, C, h, w]: the sum of the patches, noise level and position."""
        dtype = self.vae2llm.weight.dtype
        patches = latents.unflatten(-1, (-1, PATCH)).unflatten(2, (-1, PATCH)).permute(0, 2, 4, 3, 5, 1)
        rows, columns = (torch.arange(count, device=latents.device) for count in patches.shape[1:3])
        places = (rows[:, None] * MAX_TOKENS_PER_SIDE + columns).flatten()
        level = get_timestep_embedding(timestep, TIME_FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=0)
        tokens: Tensor = self.vae2llm(patches.flatten(3).flatten(1, 2).to(dtype))
        # The position table is fixed: sines and cosines, as released.
        places = self.latent_pos_embed["pos_embed"].detach()[places].to(dtype)
        return tokens + self.time_embedder["mlp"](level.to(dtype))[:, None] + places


class BagelThinker(BagelTransformer):
    """BAGEL with its text head: a call without latents writes text."""

    WRITES = True

    def get_output_embeddings(self) -> nn.Module:
        """Return the head that computes logits, as transformers models do."""
        head: nn.Module = self.language_model["lm_head"]
        return head

    def set_output_embeddings(self, head: nn.Module) -> None:
        """Replace the head."""
        self.language_model["lm_head"] = head

    def forward(self, hidden_states: Tensor | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run BagelTransformer's forward, or `write` without latents."""
        return self.write(**kwargs) if hidden_states is None else super().forward(hidden_states, **kwargs)

    def write(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        *,
        kept: KeyValues | None = None,
        only_last: bool = False,
        use_cache: bool = False,
    ) -> CausalLMOutput:
        """Return the logits [B, L, V] after each token of input_ids [B, L], or [B, 1, V] after only the last one.

        attention_mask: False for padding, [B, L]; longer by the tokens in `kept`, a KV cache that is extended.
        use_cache: must be False; for compatibility with transformers models.
        """
        layers: BagelLayers = self.language_model["model"]  # type: ignore[assignment]
        states = layers.read(input_ids, attention_mask, kept)
        return CausalLMOutput(logits=self.get_output_embeddings()(states[:, -1:] if only_last else states))
