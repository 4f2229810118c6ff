"""Scores asked for in parts of a batch."""

import threading

from omni_reward.serving import serving_in_thread
from omni_rl.settings.fields import change
from trainer_runs import recipe, tiny, train, unclocked

import train_flowgrpo as app

TINY = tiny(
    recipe(app, "tiny-signs-flowgrpo"), prompts_per_step=2, group_size=4, batch_size=4, window_low=0, window_high=2,
    train_steps=2,
)  # fmt: skip


class Server:
    """A scorer of brightness that notes the sizes of its requests."""

    def __init__(self):
        self.sizes, self.lock = [], threading.Lock()

    def __call__(self, media, prompts, meta):
        with self.lock:
            self.sizes.append(len(prompts))
        return [float(image.mean()) / 255 for image in media["image"]]


def test_requests_of_parts_of_a_batch_go_to_all_servers_and_change_no_number(here):
    """Two batches of 4, a request each, or two of 3 and 1 samples; before and after them an evaluation of 3."""
    servers = [Server() for _ in range(3)]
    with (
        serving_in_thread(servers[0]) as alone,
        serving_in_thread(servers[1]) as first,
        serving_in_thread(servers[2]) as second,
    ):
        whole = train(app, change(TINY, name="whole", scorer_url=alone, train_steps=1, eval_every=1))
        args = change(TINY, name="parts", scorer_url=f"{first},{second}", scorer_batch_size=3)
        parts = train(app, change(args, train_steps=1, eval_every=1))
    assert unclocked(parts) == unclocked(whole)
    assert servers[0].sizes == [2, 3, 4, 4, 3]  # the canaries first
    assert sorted(servers[1].sizes + servers[2].sizes) == [1] * 2 + [2] * 2 + [3] * 4
    assert len(servers[1].sizes) > 1 < len(servers[2].sizes)
