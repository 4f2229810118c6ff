"""HunyuanVideo 1.5: its own forward, quoted words, and checkpoints that are refused."""

import json
import shutil

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import HunyuanVideo15Pipeline as Stock
from model_rows import ROWS
from omni_rollout import Prompt
from omni_rollout.models import open_model
from omni_rollout.models.hunyuan_video import resize_to_cover
from PIL import Image

torch.set_num_threads(1)
ROW = ROWS["hunyuan-video15"]


def test_the_net_gives_the_velocity_of_diffusers_class_with_padding_and_a_given_image():
    """Of which diffusers' class is given as many words, glyphs and masks."""
    model = open_model(ROW.checkpoint())
    net = model.load_net(device="cpu", dtype=torch.float64)
    stock = diffusers.HunyuanVideo15Transformer3DModel.from_pretrained(model.folder / "transformer").double()
    g = torch.Generator().manual_seed(0)
    words, glyphs, image = (torch.randn(2, *s, generator=g).double() for s in ((7, 32), (5, 64), (3, 16)))
    masks = [torch.arange(n)[None] < torch.tensor(used)[:, None] for n, used in ((7, (7, 4)), (5, (0, 5)))]
    inputs = {
        "hidden_states": torch.randn(2, 65, 2, 2, 4, generator=g).double(),
        "timestep": torch.tensor([900.0, 300.0]).double(),
        "encoder_hidden_states": words,
        "encoder_hidden_states_2": glyphs,
        "encoder_attention_mask": masks[0],
        "encoder_attention_mask_2": masks[1],
        "image_embeds": image,
    }
    with torch.no_grad():
        theirs = stock(**inputs, return_dict=False)[0]
        torch.testing.assert_close(net(**inputs), theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("text", ['a "AB" and “é c”, "AB"', "no quotes", '""', '"one', ""])
def test_words_in_quotes_are_encoded_as_the_stock_pipeline_does(text):
    model = open_model(ROW.checkpoint())
    parts = model.load(device="cpu", dtype=torch.float32)
    ours = model.encode(parts, Prompt(text, 0, 0, seed=0))
    theirs, mask = Stock._get_byt5_prompt_embeds(parts.tokenizer_2, parts.text_encoder_2, text, torch.device("cpu"))
    assert int(mask.sum()) == len(ours["glyphs"]) == len(ours["glyphs_mask"])
    torch.testing.assert_close(ours["glyphs"], theirs[0, : len(ours["glyphs"])], rtol=0, atol=1e-5)


def test_a_given_frame_is_cut_to_the_shape_of_the_video_as_the_stock_pipeline_does():
    processor = HunyuanVideo15ImageProcessor(do_resize=False)
    for height, width in ((40, 90), (90, 41), (33, 64), (32, 64), (31, 77), (7, 5)):
        image = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(0)).byte()
        theirs = processor.resize(Image.fromarray(image.numpy()), height=32, width=64, resize_mode="crop")
        assert torch.equal(resize_to_cover(image, 32, 64), torch.from_numpy(np.array(theirs)))


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (
            "transformer/config.json",
            {"use_meanflow": True},
            "use_meanflow of .* must be false: .*, got true",
        ),
        ("guider/guider_config.json", {"guidance_rescale": 0.7}, "guidance_rescale of .* must be 0.0, got 0.7"),
        ("model_index.json", {"_class_name": "HunyuanVideoPipeline"}, "HunyuanVideo 1.0 has other text encoders"),
        ("model_index.json", {"_class_name": "StableAudioPipeline"}, "Stable Audio Open 1.0 denoises by another"),
    ],
)
def test_checkpoints_that_cannot_be_trained_are_refused_by_name(tmp_path, file, change, said):
    folder = tmp_path / "model"
    shutil.copytree(ROW.checkpoint(), folder)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with pytest.raises(ValueError, match=said):
        open_model(folder)
