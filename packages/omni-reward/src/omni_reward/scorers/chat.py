"""Client that asks an OpenAI-compatible chat endpoint, such as vLLM's or SGLang's, about images.

It samples at temperature 0 and with a fixed seed, requests JSON if there is a schema, and returns the model's text. The
caller must check the text: servers differ in how well they follow a schema, and some silently ignore it.
"""

import base64
import io
import json
import time
from collections.abc import Sequence

import numpy as np
from PIL import Image

from omni_reward.endpoints import Endpoints
from omni_reward.errors import RewardFormatError
from omni_reward.transport import Transport, check_url
from omni_reward.wire import parse_json

MAX_IMAGE_BYTES = 20 * 2**20  # of PNG
MAX_TOKENS = 1024  # of an answer


class UnansweredError(Exception):
    """A working endpoint gave no complete answer to a question; the message is the reason, without the server."""


class Endpoint:
    """An endpoint with a kept-alive connection per thread.

    Args:
        url: base URL, such as http://127.0.0.1:8000/v1.
        timeout_s: time limit of a question, including retries.
        seed: seed of the endpoint's sampler.
        token: bearer token, if any.

    Raises:
        ValueError: the URL is not an HTTP URL, or the token is not valid in a header.
    """

    def __init__(self, url: str, timeout_s: float, seed: int = 0, token: str | None = None) -> None:
        self._url, self._timeout_s, self._seed = url.rstrip("/"), timeout_s, seed
        check_url(self._url)
        self._transport = Transport(token, content_type="application/json")

    def ask(
        self, model: str, images: Sequence[np.ndarray], question: str, *, system: str, schema: dict[str, object] | None
    ) -> str:
        """Return the text of a model's answer to a question about images [H, W, 3], uint8, RGB, that precede it.

        system: the first message, if any.
        schema: JSON schema of the answer; None for plain text.

        Raises:
            UnansweredError: an image is too large, or the model refused or did not finish.
            RewardError: the endpoint could not be reached, failed, or has another protocol.
        """
        parts: list[object] = [{"type": "image_url", "image_url": {"url": _data_uri(image)}} for image in images]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
        first = [{"role": "system", "content": system}] if system else []
        chat: dict[str, object] = {"model": model, "messages": [*first, message]}
        chat |= {"temperature": 0, "seed": self._seed, "max_tokens": MAX_TOKENS}
        if schema:
            form = {"name": "answer", "strict": True, "schema": schema}
            chat["response_format"] = {"type": "json_schema", "json_schema": form}
        body = [json.dumps(chat).encode()]
        deadline = time.monotonic() + self._timeout_s
        exchange, endpoints = self._transport.exchange, Endpoints([f"{self._url}/chat/completions"])
        return _answer_in(endpoints.call(lambda url: exchange("POST", url, deadline, body), deadline))

    def models(self) -> list[str]:
        """Return the names of the served models.

        Raises:
            RewardError: as above.
        """
        body = self._transport.exchange("GET", f"{self._url}/models", time.monotonic() + self._timeout_s)
        try:
            return [str(model["id"]) for model in parse_json(body, "the reply")["data"]]
        except (ValueError, KeyError, TypeError) as exc:
            raise RewardFormatError(f"GET {self._url}/models: not a list of models: {exc!r:.200}") from exc


def _data_uri(image: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", compress_level=1)  # lossless and fast
    if file.tell() > MAX_IMAGE_BYTES:
        raise UnansweredError(f"the image takes more than {MAX_IMAGE_BYTES} bytes as PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _answer_in(reply: bytes) -> str:
    """Return the text of the first choice in a chat completion."""
    try:
        choice = parse_json(reply, "the reply")["choices"][0]
        reason, text = choice["finish_reason"], choice["message"].get("content")
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise RewardFormatError(f"the reply is not a chat completion: {exc!r:.200}") from exc
    if reason != "stop":
        raise UnansweredError(f"the answer ended early: {reason!r:.40}")
    if not isinstance(text, str):
        raise UnansweredError("the model refused to answer")
    return text
