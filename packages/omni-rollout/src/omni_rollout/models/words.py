"""Tokenizer without a vocabulary, for plans: its tokens show only the length of a text."""

import re
from typing import Any

from transformers import PreTrainedTokenizer

PIECES = re.compile(r"[^\W\d_]{1,8}|\d|_|[^\w\s]|\n| {2,}")
CHAT = (  # a template with a place for each medium, as in Qwen's models
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class WordTokenizer(PreTrainedTokenizer):
    """Tokenizer of words: up to 8 letters are a token, and so is each digit, mark and line end, all with one id.

    It has the special tokens of its tokenizer_config.json. It counts slightly more tokens than a released vocabulary.
    """

    def __init__(self, **config: Any) -> None:
        super().__init__(**{"pad_token": "?", "chat_template": CHAT} | config)

    @property
    def vocab_size(self) -> int:
        """Number of ids besides those of special tokens."""
        return 1

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens."""
        return {"?": 0, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return PIECES.findall(text)

    def _convert_token_to_id(self, token: str) -> int:
        return 0

    def _convert_id_to_token(self, index: int) -> str:
        return "?"
