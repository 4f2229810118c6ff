"""Layers of each model that vLLM-Omni quantizes; does not need vLLM-Omni."""

from omni_rollout.model import Model

LAYERS: dict[str, tuple[str, tuple[str, ...]] | None] = {
    # By pipeline: the prefix of the names of the layers, and their endings besides those of layers with LoRA.
    "FluxPipeline": ("single_transformer_blocks.", ("proj_mlp", "proj_out")),
    "FluxKontextPipeline": ("single_transformer_blocks.", ("proj_mlp", "proj_out")),
    "Flux2KleinPipeline": ("", ("attn.to_out",)),
    "Flux2Pipeline": ("", ("attn.to_out",)),
    "HunyuanVideo15ImageToVideoPipeline": ("transformer_blocks.", ()),
    "HunyuanVideo15Pipeline": ("transformer_blocks.", ()),
    "LTX2Pipeline": ("", ()),
    "QwenImageEditPipeline": ("", ()),
    "QwenImageEditPlusPipeline": ("", ()),
    "QwenImagePipeline": ("", ()),
    "StableDiffusion3Pipeline": None,
    "WanImageToVideoPipeline": ("", ("attn2.add_k_proj", "attn2.add_v_proj")),
    "WanPipeline": ("", ()),
    "ZImagePipeline": ("", ()),
}


def quantized_names(model: Model) -> list[str]:
    """Return diffusers' names of the net's weights that vLLM-Omni holds in 8 bits when it quantizes.

    Raises:
        ValueError: vLLM-Omni has no pipeline for the model.
    """
    kind = model.config["_class_name"]
    if kind not in LAYERS:
        raise ValueError(f"model must be a {' or '.join(LAYERS)} for the vLLM-Omni engine, got a {kind}")
    if (layers := LAYERS[kind]) is None:
        return []
    start, extra = layers
    endings = tuple(f"{name}.weight" for name in (*model.LORA_TARGETS, *extra))
    names = [name for name, _ in model.empty_net().named_parameters()]
    return [name for name in names if name.startswith(start) and name.endswith(endings)]
