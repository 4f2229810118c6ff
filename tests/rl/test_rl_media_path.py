"""The way of video and sound from an engine to a scorer, where every copy made of them on the host is counted."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch
from omni_reward import RewardClient, Score
from omni_reward.media import ScoreRequest
from omni_reward.serving import serving_in_thread
from omni_reward.wire import Scorer, decode_request, encode_request
from omni_rl.flow.sampling import _report_samples
from omni_rl.flow.scoring import submit
from omni_rollout import Prompt, Samples
from omni_rollout.sampler import to_wire
from rl.report_runs import RATES, film, tone


def drawn() -> Samples:
    """Two videos with sound, as a model decodes them: pictures in [0, 1]."""
    video = torch.from_numpy(np.stack([film(), film(seed=1)])).float() / 255
    media = to_wire({"video": video, "audio": torch.from_numpy(np.stack([tone(), tone()]))})
    return Samples(tuple(Prompt("a", 0, i, i) for i in range(2)), media, RATES, 0)


class Kept:
    """A scorer that keeps what it is given."""

    takes_references, takes_groups, busy_s = False, False, 0.0

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    def submit(self, media, prompts, meta, references=None, groups=None):
        self.request = ScoreRequest(dict(media), list(prompts), list(meta), "r")
        return Future()

    def close(self) -> None:
        pass


def test_media_go_to_the_socket_from_where_the_model_left_them():
    samples, scorer = drawn(), Kept("video", "audio")
    submit(scorer, samples)
    _, *parts = encode_request(scorer.request)  # what the transport sends, one part after the other
    for kind in ("video", "audio"):
        assert scorer.request.media[kind].ctypes.data == samples.media[kind].data_ptr()
        assert any(np.shares_memory(np.frombuffer(part, np.uint8), samples.media[kind].numpy()) for part in parts)
    assert scorer.request.meta == [RATES, RATES]


def test_the_server_scores_in_the_body_that_it_received():
    samples, scorer = drawn(), Kept("video", "audio")
    submit(scorer, samples)
    body = bytearray().join(encode_request(scorer.request))  # the one copy of the server
    request = decode_request(body, max_batch=2)
    for kind, array in request.media.items():
        assert np.shares_memory(array, np.frombuffer(body, np.uint8))
        assert array.flags.writeable
        np.testing.assert_array_equal(array, samples.media[kind].numpy())


def test_a_scorer_is_sent_the_kinds_that_it_takes():
    samples = drawn()
    for kinds in (("video",), ("audio",)):
        scorer = Kept(*kinds)
        submit(scorer, samples)
        assert tuple(scorer.request.media) == kinds


def test_the_report_gets_views_of_the_media():
    samples = drawn()
    users = tuple(replace(prompt, meta={"thought": "the user's own"}) for prompt in samples.prompts)
    samples = replace(samples, prompts=users)
    media, rows = _report_samples([samples], [Score(0.5), Score(0.25)])
    assert [(row.rates, row.answer) for row in rows] == [(RATES, None)] * 2
    for i, own in enumerate(media):
        assert own.keys() == {"video", "audio"}
        for kind, tensor in own.items():
            assert tensor.data_ptr() == samples.media[kind][i].data_ptr()


def test_frames_sound_and_rates_arrive_over_the_wire_to_the_bit():
    samples = drawn()
    seen = {}

    def look(media, prompts, meta):
        seen.update(media=media, meta=meta)
        return [0.5] * len(prompts)

    with serving_in_thread(Scorer(look, media=("video", "audio"))) as url, RewardClient(url) as client:
        assert set(client.kinds) == {"video", "audio"}
        scores = submit(client, samples).result()
    assert [score.value for score in scores] == [0.5, 0.5]
    assert seen["meta"] == [RATES, RATES]
    for kind, array in seen["media"].items():
        np.testing.assert_array_equal(array, samples.media[kind].numpy())
