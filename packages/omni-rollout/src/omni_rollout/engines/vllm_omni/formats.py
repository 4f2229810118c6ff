"""What of a model vLLM-Omni quantizes, for plans, which do without vLLM-Omni."""

from omni_rollout.model import Model

LAYERS = {  # by vLLM-Omni's pipelines: endings of the layers that it quantizes beside those that have LoRA
    "QwenImagePipeline": (),
    "QwenImageEditPipeline": (),
    "QwenImageEditPlusPipeline": (),
    "StableDiffusion3Pipeline": None,
    "FluxPipeline": ("proj_mlp", "proj_out"),
    "FluxKontextPipeline": ("proj_mlp", "proj_out"),
    "Flux2KleinPipeline": ("attn.to_out",),
    "WanPipeline": (),
    "WanImageToVideoPipeline": ("attn2.add_k_proj", "attn2.add_v_proj"),
    "LTX2Pipeline": (),
}


def quantized_names(model: Model) -> list[str]:
    """Return the net's weights, under diffusers' names, that vLLM-Omni holds in 8 bits where it quantizes.

    Raises:
        ValueError: vLLM-Omni has no pipeline for the model.
    """
    kind = model.config["_class_name"]
    if kind not in LAYERS:
        raise ValueError(f"model must be a {' or '.join(LAYERS)} for the vLLM-Omni engine, got a {kind}")
    if (more := LAYERS[kind]) is None:
        return []
    endings = tuple(f"{name}.weight" for name in (*model.LORA_TARGETS, *more))
    names = [name for name, _ in model.empty_net().named_parameters() if name.endswith(endings)]
    is_flux1 = "proj_mlp" in more  # of which vLLM-Omni quantizes the second half
    return [name for name in names if name.startswith("single_") or not is_flux1]
