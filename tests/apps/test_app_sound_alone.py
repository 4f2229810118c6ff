"""Sound without pictures from the sampler to the scorer, the report and the sheets."""

from pathlib import Path

import numpy as np
import pytest
from model_rows import ROWS
from omni_reward import Scorer
from omni_reward.serving import serving_in_thread
from omni_rl.media.preferences import read_latent
from omni_rollout.models import open_model
from omni_rollout.types import Parts
from PIL import Image
from trainer_runs import recipe, tiny, train

import sample
import train_flowgrpo

SIZES = {"prompts_per_step": 2, "group_size": 2, "batch_size": 4, "train_steps": 1, "eval_every": 1}


def settings(url, **changes):
    """Small settings of FlowGRPO for sounds of a second."""
    model = {"model": str(ROWS["stable-audio3"].checkpoint()), "guidance": "duration=1", "scorer_url": url}
    return tiny(recipe(train_flowgrpo, "tiny-signs"), **(SIZES | model | changes))


def test_a_scorer_gets_the_sound_and_its_rate_and_the_report_plays_it(here):
    seen = []

    def score(media, prompts, meta):
        seen.append((*media["audio"].shape[1:], str(media["audio"].dtype), *{each.get("sample_rate") for each in meta}))
        return [float(sound.std()) for sound in media["audio"]]

    with serving_in_thread(Scorer(score, media=("audio",))) as url:
        args = settings(url, window_low=0, window_high=None)
        lines = train(train_flowgrpo, args, report=True)
    assert set(seen[1:]) == {(800, 2, "float32", 800.0)}  # the first is the server's own, silence
    assert lines[1]["policy/first_ratio_max_dev"] == 0
    folder = here / "runs" / args.run.name
    assert any((folder / "eval" / "000001").glob("*.flac"))
    assert (folder / "eval" / "000001.png").is_file()
    assert "data:audio/flac" in (folder / "report.html").read_text("utf-8")


def test_pictures_are_no_preferences_of_sounds():
    row = ROWS["stable-audio3"]
    with pytest.raises(ValueError, match=r"win\.png must be the \.safetensors file of a latent"):
        read_latent(open_model(row.checkpoint()), Parts(), Path("win.png"), row.unguided)


def test_a_sheet_of_sounds_has_their_waveforms_and_files_beside_it(here):
    model = str(ROWS["stable-audio3"].checkpoint())
    args = sample.Args(model=model, num_images=2, num_inference_steps=2, guidance="duration=0.5")
    sample.check_args(args)
    sample.main(args)
    assert np.asarray(Image.open("sheet.png")).shape[1] > 2 * 192
    assert len([file for file in (here / "sheet").iterdir() if file.suffix in (".wav", ".flac")]) == 2
