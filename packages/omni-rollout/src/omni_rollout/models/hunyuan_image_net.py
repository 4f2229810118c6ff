"""HunyuanImage-3.0's transformer (arXiv 2509.23951), a mixture of experts that reads text and generates an image.

Written from two sources under Apache-2.0: the layers are those of transformers' HunYuanMoEV1DecoderLayer, and the rest
computes what vLLM-Omni's port does; the released code was not read. Text and image are one sequence and one forward
pass. Nothing is kept between calls, so that every weight that affects the image can be trained:

    tokens     T of text   <boi>, size, ratio   the noise level   N of the image
    attention  causal                                             all before it, all of the image

The image's positions are two-dimensional: rotary frequencies alternate between rows and columns. Names are those of the
released files.

Shapes: B samples, T text tokens, P = T + 4, N = h w image tokens, L = P + N, D width, C latent channels.
"""

from collections.abc import Callable

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.embeddings import get_timestep_embedding
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import (
    HunYuanMoEV1RMSNorm,
    apply_rotary_pos_emb,
    repeat_kv,
)

from omni_rollout.models.hunyuan_image_moe import Mixture
from omni_rollout.models.routing import Routing

TIME_FREQUENCIES = 256
GROUPS = 32  # groups of channels in norms
Rope = tuple[Tensor, Tensor]
Visible = Tensor | None


class HunyuanImageAttention(nn.Module):
    """Attention with a single layer for queries, keys and values, grouped by key head."""

    def __init__(self, width: int, num_heads: int, num_key_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.num_key_heads, self.num_groups, self.head_dim = num_key_heads, num_heads // num_key_heads, head_dim
        self.qkv_proj = nn.Linear(width, (num_heads + 2 * num_key_heads) * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, width, bias=False)
        self.query_layernorm = HunYuanMoEV1RMSNorm(head_dim, eps)
        self.key_layernorm = HunYuanMoEV1RMSNorm(head_dim, eps)

    def forward(self, states: Tensor, rope: Rope, length: int, before: Visible, around: Visible) -> Tensor:
        """Return the output [B, L, D] for states [B, L, D].

        rope: cos and sin [B, L, head_dim], float32. length: P. before, around: masks of scaled_dot_product_attention
        for the first P tokens (None for causal attention) and for the image (None for full attention).
        """
        qkv = self.qkv_proj(states).unflatten(-1, (self.num_key_heads, self.num_groups + 2, self.head_dim))
        query, key, value = qkv.split([self.num_groups, 1, 1], dim=3)
        query, key, value = (heads.flatten(2, 3).transpose(1, 2) for heads in (query, key, value))
        query, key = (heads.to(states.dtype) for heads in apply_rotary_pos_emb(query, key, *rope))
        query, key = self.query_layernorm(query), repeat_kv(self.key_layernorm(key), self.num_groups)
        value = repeat_kv(value, self.num_groups)
        first = query[:, :, :length], key[:, :, :length], value[:, :, :length]
        text = scaled_dot_product_attention(*first, attn_mask=before, is_causal=before is None)
        image = scaled_dot_product_attention(query[:, :, length:], key, value, attn_mask=around)
        out: Tensor = self.o_proj(torch.cat([text, image], dim=2).transpose(1, 2).flatten(2))
        return out


class HunyuanImageBlock(nn.Module):
    """One layer."""

    def __init__(self, attention: HunyuanImageAttention, mixture: Mixture, width: int, eps: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mixture
        self.input_layernorm = HunYuanMoEV1RMSNorm(width, eps)
        self.post_attention_layernorm = HunYuanMoEV1RMSNorm(width, eps)

    def forward(
        self, states: Tensor, rope: Rope, length: int, before: Visible, around: Visible, routes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the states [B, L, D] after the layer, and the experts [B, L, k]; see attention and mixture."""
        states = states + self.self_attn(self.input_layernorm(states), rope, length, before, around)
        mixed, experts = self.mlp(self.post_attention_layernorm(states), routes)
        return states + mixed, experts


class HunyuanImageLayers(nn.Module):
    """Language model: token embedding and layers; the final norm is needed only to write text."""

    _gradient_checkpointing_func: Callable[..., tuple[Tensor, Tensor]]

    def __init__(self, blocks: list[HunyuanImageBlock], vocab_size: int, width: int) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.wte = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(blocks)

    def forward(
        self, states: Tensor, rope: Rope, length: int, before: Visible, around: Visible, routes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the states [B, L, D] after all layers, and the experts [B, L, layers, k], uint8. routes: to replay."""
        chosen = []
        for i, layer in enumerate(self.layers):
            args = states, rope, length, before, around, None if routes is None else routes[:, :, i]
            if self.gradient_checkpointing and torch.is_grad_enabled():
                states, experts = self._gradient_checkpointing_func(layer, *args)
            else:
                states, experts = layer(*args)
            chosen.append(experts.to(torch.uint8))
        return states, torch.stack(chosen, dim=2)


class TimeEmbedding(nn.Module):
    """Embedding of a noise level."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIME_FREQUENCIES, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, timestep: Tensor) -> Tensor:
        """Return the embedding [B, D] of timesteps [B], in thousandths of a noise level."""
        level = get_timestep_embedding(timestep, TIME_FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=0)
        out: Tensor = self.mlp(level.to(self.mlp[0].weight.dtype))
        return out


class LevelBlock(nn.Module):
    """Two convolutions, the second modulated by the noise level."""

    def __init__(self, channels: int, width: int, out: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(GROUPS, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * out))
        # The third is a dropout with probability 0, which keeps the names.
        self.out_layers = nn.Sequential(
            nn.GroupNorm(GROUPS, out), nn.SiLU(), nn.Identity(), nn.Conv2d(out, out, 3, padding=1)
        )
        self.skip_connection = nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """Return the output [B, out, h, w] for x [B, channels, h, w] and level [B, D]."""
        scale, shift = self.emb_layers(level)[..., None, None].chunk(2, dim=1)
        norm, *others = self.out_layers
        states = norm(self.in_layers(x)) * (1 + scale) + shift
        for layer in others:
            states = layer(states)
        out: Tensor = self.skip_connection(x) + states
        return out


class HunyuanImageTransformer(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """HunyuanImage-3.0's image generator. Arguments are as in config.json, with one number for all layers.

    latent_channels: channels of the VAE.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ("HunyuanImageBlock",)
    # The image encoder, the latent decoder, and the text head.
    _keys_to_ignore_on_load_unexpected = (r"^vae\.", r"^vision_", r"^lm_head\.", r"^model\.ln_f\.")

    @register_to_config
    def __init__(  # noqa: PLR0913 - as in the file
        self,
        vocab_size: int = 133120,
        hidden_size: int = 4096,
        intermediate_size: int = 3072,
        moe_intermediate_size: int = 3072,
        num_hidden_layers: int = 32,
        num_attention_heads: int = 32,
        num_key_value_heads: int = 8,
        attention_head_dim: int = 128,
        num_experts: int = 64,
        moe_topk: int = 8,
        num_shared_expert: int = 1,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        patch_embed_hidden_dim: int = 1024,
        latent_channels: int = 32,
    ) -> None:
        super().__init__()
        D, inner, eps = hidden_size, patch_embed_hidden_dim, rms_norm_eps
        blocks = [
            HunyuanImageBlock(
                HunyuanImageAttention(D, num_attention_heads, num_key_value_heads, attention_head_dim, eps),
                Mixture(
                    D,
                    moe_intermediate_size,
                    shared=intermediate_size * num_shared_expert,
                    num_experts=num_experts,
                    top_k=moe_topk,
                ),
                D,
                eps,
            )
            for _ in range(num_hidden_layers)
        ]
        self.model = HunyuanImageLayers(blocks, vocab_size, D)
        self.routing = Routing(num_experts)
        self.timestep_emb, self.time_embed, self.time_embed_2 = (TimeEmbedding(D) for _ in range(3))
        enter, leave = nn.Conv2d(latent_channels, inner, 3, padding=1), nn.Conv2d(inner, latent_channels, 3, padding=1)
        self.patch_embed = nn.ModuleDict({"model": nn.ModuleList([enter, LevelBlock(inner, D, D)])})
        last = nn.Sequential(nn.GroupNorm(GROUPS, inner), nn.SiLU(), leave)
        self.final_layer = nn.ModuleDict({"model": nn.ModuleList([LevelBlock(D, D, inner), last])})

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        input_ids: Tensor,
        lengths: Tensor,
        marks: Tensor,
        attention_mask: Tensor | None = None,
        text_routes: Tensor | None = None,
        routes: Tensor | None = None,
    ) -> Tensor:
        """Return the velocity [B, C, h, w] at latents hidden_states [B, C, h, w] and noise levels timestep [B].

        input_ids: the text [B, T], padded at the end. lengths: number of its tokens without padding [B]. marks: ids
        [B, 3] of the tokens before the noise level. attention_mask: False for padding [B, T]; None without padding.
        text_routes, routes: experts to replay; see `Routing`.
        """
        (B, T), device, dtype = input_ids.shape, hidden_states.device, self.model.wte.weight.dtype
        thousandths = timestep * 1000
        enter, block = self.patch_embed["model"].children()
        image = block(enter(hidden_states.to(dtype)), self.time_embed(thousandths)).flatten(2).transpose(1, 2)
        tokens = self.model.wte(torch.cat([input_ids, marks], dim=1))
        states = torch.cat([tokens, self.timestep_emb(thousandths)[:, None], image], dim=1)
        before = around = None
        if attention_mask is not None:
            words = torch.cat([attention_mask, attention_mask.new_ones(B, 4 + image.shape[1])], dim=1)
            causal = torch.ones(T + 4, T + 4, dtype=torch.bool, device=device).tril()
            before, around = words[:, None, None, : T + 4] & causal, words[:, None, None]
        rope = self._rope(lengths, T, *hidden_states.shape[-2:])
        all_routes = None if text_routes is None or routes is None else torch.cat([text_routes, routes], dim=1)
        states, chosen = self.model(states, rope, T + 4, before, around, all_routes)
        self.routing(chosen[:, :T], chosen[:, T:])
        block, last = self.final_layer["model"].children()
        image = states[:, T + 4 :].transpose(1, 2).unflatten(2, hidden_states.shape[-2:])
        velocity: Tensor = last(block(image, self.time_embed_2(thousandths)))
        return velocity

    def _rope(self, lengths: Tensor, longest: int, h: int, w: int) -> Rope:
        """Return cos and sin [B, L, head_dim], float32, for texts of these lengths [B].

        The position of a text token is its index in the sequence. The image begins at `first`, and its center is at the
        position that the middle of its N tokens would have in a sequence.
        """
        head_dim, theta, device = self.config["attention_head_dim"], self.config["rope_theta"], lengths.device
        words = torch.arange(longest, device=device).expand(len(lengths), longest)
        marks = lengths[:, None] + torch.arange(4, device=device)
        first = lengths[:, None] + 4
        down = (first + (w * h - h) // 2 + torch.arange(h, device=device)).repeat_interleave(w, dim=1)
        right = (first + (w * h - w) // 2 + torch.arange(w, device=device)).repeat(1, h)
        rows, columns = (torch.cat([words, marks, places], dim=1).float() for places in (down, right))
        frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim))
        angles = torch.stack([rows, columns], dim=-1)[:, :, None] * frequencies.view(-1, 2)
        angles = angles.flatten(2).repeat(1, 1, 2)
        return angles.cos(), angles.sin()
