"""Models small enough for these tests, with head sizes that vLLM's CPU kernels support."""

import json

import build_tiny_models
import torch
import transformers


def build_qwen3(folder):
    tokenizer = build_tiny_models.build_chat_tokenizer()
    sides = {"num_hidden_layers": 2, "eos_token_id": tokenizer.eos_token_id, "head_dim": 32}
    net = build_tiny_models.build_qwen3(transformers.Qwen3ForCausalLM, tokenizer, **sides)
    build_tiny_models.LanguageModel(net, tokenizer).save_pretrained(folder)


def build_qwen3_omni(folder):
    """Write the whole model's folder with only a thinker, and entries of released models that transformers fills in."""
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 1e6}
    net, *others = build_tiny_models.build_qwen3_omni(head_dim=32, rope_parameters=rope).files
    for each in others:
        each.save_pretrained(folder)
    config = transformers.Qwen3OmniMoeConfig(thinker_config=net.config.to_dict(), enable_audio_output=False)
    with torch.device("meta"):
        whole = transformers.Qwen3OmniMoeForConditionalGeneration(config)
    whole.save_pretrained(folder, state_dict={f"thinker.{name}": tensor for name, tensor in net.state_dict().items()})
    said = json.loads((folder / "config.json").read_text())
    said["thinker_config"]["vision_config"] |= {"image_size": 128, "apply_vit_abs_pos_embed": True}
    said["thinker_config"]["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(said))
    named = json.loads((folder / "tokenizer_config.json").read_text())
    named |= {f"{kind}_token": f"<|{kind}_pad|>" for kind in ("image", "audio", "video")}
    for kind in ("vision", "audio"):
        named |= {f"{kind}_{name}_token": f"<|{kind}_{edge}|>" for name, edge in (("bos", "start"), ("eos", "end"))}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
