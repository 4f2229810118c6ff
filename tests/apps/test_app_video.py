"""Videos from the sampler to the scorer, the report and the sheets."""

import numpy as np
from model_rows import ROWS
from omni_reward import Scorer
from omni_reward.serving import serving_in_thread
from omni_rl.media.videos import video_facts
from PIL import Image
from trainer_runs import recipe, tiny, train

import sample
import train_flowgrpo

SIZES = {"prompts_per_step": 2, "group_size": 4, "batch_size": 4, "train_steps": 1, "eval_every": 1, "num_frames": 9}


def settings(url, **changes):
    """Small settings of FlowGRPO for videos of nine frames."""
    model = str(ROWS["wan21"].checkpoint())
    window = {"window_low": 0, "window_high": None, "frame_rate": 12.0, "model": model, "scorer_url": url}
    return tiny(recipe(train_flowgrpo, "tiny-signs"), **(SIZES | window | changes))


def test_a_scorer_gets_the_frames_and_their_rate_and_the_report_shows_them(here):
    seen = []

    def score(media, prompts, meta):
        seen.append((media["video"].shape, media["video"].dtype, {sample["fps"] for sample in meta}))
        return [float(video.mean()) for video in media["video"]]

    with serving_in_thread(Scorer(score, media=("video",))) as url:
        args = settings(url)
        train(train_flowgrpo, args, report=True)
    assert {(shape[1:], str(dtype), *rates) for shape, dtype, rates in seen} == {((9, 32, 96, 3), "uint8", 12.0)}
    assert any((here / "runs" / args.run.name / "eval" / "000001").glob("*.webp"))


def test_a_sheet_of_videos_has_their_frames_and_they_play_beside_it(here):
    model = settings("").policy.model
    args = sample.Args(model=model, num_images=2, num_frames=9, height=32, width=96, num_inference_steps=2)
    sample.check_args(args)
    sample.main(args)
    assert np.asarray(Image.open("sheet.png")).shape[1] > 5 * 96
    assert [video_facts(here / "sheet" / f"{i}.mp4") for i in range(2)] == [(9, 32, 96, 24.0)] * 2
