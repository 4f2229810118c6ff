"""A model small enough for these tests, with heads as wide as vLLM's CPU kernels take them."""

import build_tiny_models
import transformers


def build_qwen3(folder):
    tokenizer = build_tiny_models.build_chat_tokenizer()
    sides = {"num_hidden_layers": 2, "eos_token_id": tokenizer.eos_token_id, "head_dim": 32}
    net = build_tiny_models.build_qwen3(transformers.Qwen3ForCausalLM, tokenizer, **sides)
    build_tiny_models.LanguageModel(net, tokenizer).save_pretrained(folder)
