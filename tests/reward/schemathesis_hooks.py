"""Valid request bodies that schemathesis sends to /score."""

import numpy as np
import schemathesis
from hypothesis import strategies as st
from omni_reward.media import ScoreRequest
from omni_reward.wire import encode_request

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Return bodies that follow every rule of docs/reward-protocol.md."""
    prompts = draw(st.lists(TEXTS, min_size=1, max_size=4))
    sizes = st.integers(1, 6)
    image = np.full((len(prompts), draw(sizes), draw(sizes), 3), draw(st.integers(0, 255)), np.uint8)
    meta: list[dict[str, object]] = [{name: draw(TEXTS | st.integers() | st.none())} for name in prompts]
    request = ScoreRequest({"image": image}, prompts, meta, draw(st.uuids().map(str)))
    return b"".join(encode_request(request))


schemathesis.openapi.media_type("application/octet-stream", bodies())
