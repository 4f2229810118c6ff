"""BAGEL's transformer (arXiv 2505.14683) on the blocks of transformers' Qwen2: two sets of weights, one sequence.

Every layer has its weights twice. NAME are for the text and the two marks around the image, NAME_moe_gen for the image.
The text is causal, and image and marks see everything; they share one position, the next after the text:

    token      text 0 .. T-1     <|vision_start|>  <|vision_end|>     image 0 .. N-1
    position   0 .. T-1          T                 T                  T .. T
    weights    NAME              NAME              NAME               NAME_moe_gen

Released code keeps the keys and values of the text. Here text and image are one forward, so that nothing is kept
between calls and every weight that leads to the image can be trained. Names are those of ema.safetensors.

Shapes: B samples, T text tokens, U = T + 2 with the marks, N image tokens, L = U + N, D width, C latent channels.
"""

from collections.abc import Callable

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.embeddings import get_timestep_embedding
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2MLP,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from omni_rollout.models.bagel import MAX_TOKENS_PER_SIDE

PATCH = 2  # latent pixels of a token, along each side
LATENT_CHANNELS = 16
TIME_FREQUENCIES = 256


class Twofold(nn.Module):
    """A module whose children come in pairs: NAME for text and marks, NAME_moe_gen for the image."""

    def add_pair(self, name: str, make: Callable[[], nn.Module]) -> None:
        """Adds NAME and NAME_moe_gen."""
        self.add_module(name, make())
        self.add_module(f"{name}_moe_gen", make())

    def pair(self, name: str, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """NAME of the text, and NAME_moe_gen of the image."""
        return self.get_submodule(name)(text), self.get_submodule(f"{name}_moe_gen")(image)


class BagelAttention(Twofold):
    """Attention of both streams, with normalised queries and keys."""

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
        self, text: Tensor, image: Tensor, rope: tuple[Tensor, Tensor], visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Both streams [B, U, D] and [B, N, D], attended; rope: cos and sin [B, L, head_dim]; visible: [B, 1, 1, L]."""
        query, key, value = (self._heads(name, text, image) for name in ("q_proj", "k_proj", "v_proj"))
        exact = torch.promote_types(text.dtype, torch.float32)  # of norms and rotations, as released
        q = torch.cat(self.pair("q_norm", *(heads.to(exact) for heads in query)), dim=2)
        k = torch.cat(self.pair("k_norm", *(heads.to(exact) for heads in key)), dim=2)
        q, k = (heads.to(text.dtype) for heads in apply_rotary_pos_emb(q, k, *rope))
        k, v = repeat_kv(k, self.num_groups), repeat_kv(torch.cat(value, dim=2), self.num_groups)
        T = text.shape[1] - 2
        words = scaled_dot_product_attention(q[:, :, :T], k[:, :, :T], v[:, :, :T], is_causal=True)
        others = scaled_dot_product_attention(q[:, :, T:], k, v, attn_mask=visible)
        out = torch.cat([words, others], dim=2).transpose(1, 2).flatten(2)
        return self.pair("o_proj", *out.split([text.shape[1], image.shape[1]], dim=1))

    def _heads(self, name: str, text: Tensor, image: Tensor) -> list[Tensor]:
        """A projection of both streams, [B, heads, tokens, head_dim]."""
        return [t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.pair(name, text, image)]


class BagelBlock(Twofold):
    """One layer."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.self_attn = BagelAttention(config)
        self.add_pair("mlp", lambda: Qwen2MLP(config))
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.add_pair(name, lambda: Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(
        self, text: Tensor, image: Tensor, rope: tuple[Tensor, Tensor], visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Both streams after the layer; arguments as for BagelAttention."""
        words, patches = self.self_attn(*self.pair("input_layernorm", text, image), rope, visible)
        text, image = text + words, image + patches
        words, patches = self.pair("mlp", *self.pair("post_attention_layernorm", text, image))
        return text + words, image + patches


class BagelLayers(Twofold):
    """The language model: embedding of the text, layers, last norm."""

    _gradient_checkpointing_func: Callable[..., tuple[Tensor, Tensor]]

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([BagelBlock(config) for _ in range(config.num_hidden_layers)])
        self.add_pair("norm", lambda: Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.rotary_emb = Qwen2RotaryEmbedding(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, marks: Tensor, image: Tensor) -> Tensor:
        """The image's tokens [B, N, D] after all layers; the other arguments are BagelTransformer's."""
        text = self.embed_tokens(torch.cat([input_ids, marks], dim=1))
        (B, T), around, device = input_ids.shape, image.shape[1] + 2, image.device
        after = attention_mask.sum(dim=1, keepdim=True).expand(B, around)
        positions = torch.cat([torch.arange(T, device=device).expand(B, T), after], dim=1)
        visible = torch.cat([attention_mask, attention_mask.new_ones(B, around)], dim=1)[:, None, None]
        rope = self.rotary_emb(text, positions)
        for layer in self.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                text, image = self._gradient_checkpointing_func(layer, text, image, rope, visible)
            else:
                text, image = layer(text, image, rope, visible)
        normalised: Tensor = self.get_submodule("norm_moe_gen")(image)
        return normalised


class BagelTransformer(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """All of BAGEL that draws from text. Arguments are those of llm_config.json, and defaults the released model's."""

    _supports_gradient_checkpointing = True
    _no_split_modules = ("BagelBlock",)
    # What reads images and what writes text.
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
        layers = [nn.Linear(TIME_FREQUENCIES, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)]
        self.time_embedder = nn.ModuleDict({"mlp": nn.Sequential(*layers)})
        self.vae2llm = nn.Linear(PATCH**2 * LATENT_CHANNELS, hidden_size)
        self.llm2vae = nn.Linear(hidden_size, PATCH**2 * LATENT_CHANNELS)
        places = nn.Parameter(torch.zeros(MAX_TOKENS_PER_SIDE**2, hidden_size))
        self.latent_pos_embed = nn.ParameterDict({"pos_embed": places})

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, input_ids: Tensor, attention_mask: Tensor, marks: Tensor
    ) -> Tensor:
        """The velocity [B, C, h, w] at latents hidden_states [B, C, h, w] and noise levels timestep [B].

        input_ids, attention_mask: the text [B, T], padded at its end, and what of it is none. marks: the ids [B, 2] of
        the tokens around the image.
        """
        image = self._embed(hidden_states, timestep)
        image = self.language_model["model"](input_ids, attention_mask, marks, image)
        grid = [side // PATCH for side in hidden_states.shape[-2:]]
        patches = self.llm2vae(image).unflatten(1, grid).unflatten(-1, (PATCH, PATCH, -1))
        velocity: Tensor = patches.permute(0, 5, 1, 3, 2, 4).reshape(hidden_states.shape)
        return velocity

    def _embed(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """The image's tokens [B, N, D]: patches of latents [B, C, h, w], their noise level and their places."""
        dtype = self.vae2llm.weight.dtype
        patches = latents.unflatten(-1, (-1, PATCH)).unflatten(2, (-1, PATCH)).permute(0, 2, 4, 3, 5, 1)
        rows, columns = (torch.arange(count, device=latents.device) for count in patches.shape[1:3])
        places = (rows[:, None] * MAX_TOKENS_PER_SIDE + columns).flatten()
        level = get_timestep_embedding(timestep, TIME_FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=0)
        tokens: Tensor = self.vae2llm(patches.flatten(3).flatten(1, 2).to(dtype))
        # The table of places is fixed: sines and cosines, as released.
        places = self.latent_pos_embed["pos_embed"].detach()[places].to(dtype)
        return tokens + self.time_embedder["mlp"](level.to(dtype))[:, None] + places
