"""Every mistake in what a run is given ends it with exit code 2 and one line, before any weight is loaded.

The line names the argument, the rule and the value. Each row of the tables is a start of the trainer, in a fork.
"""

import os
import re
import shutil
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import omni_rl.settings.rules
import pytest
from apps import app_lives as lives
from apps.conftest import brightness
from omni_reward import Scorer
from omni_reward.scorers.likeness import load_likeness
from omni_reward.serving import serving_in_thread
from omni_rl.run.failures import launch
from omni_rl.settings.fields import change, values_of
from PIL import Image

SETTINGS = {
    "--num-minibatches 7": r"--num-minibatches must divide a rank's batches times the steps trained of each \(4 x ",
    "--true-cfg-scale 0.5": "--true-cfg-scale must be >= 1, got 0.5",
    "--algo flowgrpo-cps --noise-level 1.2": "--noise-level must be <= 1 for flowgrpo-cps",
    "--reward-parts sharp=1": "--reward-parts must name parts of the scores, got 'sharp'; this scorer has no parts",
    "--window-low 2": r"--window-low must be < --window-high, and that < --num-inference-steps \(3\), got 2 and 2",
    "--algo mixgrpo": "--window-size must be set for mixgrpo",
    "--dtype float16 --lora.rank 4": "--dtype must be bfloat16 or float32 on cpu, which has bfloat16, got float16",
    "--dtype float16 --lora.rank 4 --engine vllm-omni": "--dtype float16 needs --engine diffusers, got vllm-omni",
    "--correction.low 1.1": "--correction.low must be <= 0.999999, got 1.1",
    "--correction.high 1.0000001": "--correction.high must be >= 1.000001, got 1.0000001",
    "--clip-range 5e-7": "--clip-range must be >= 1e-06, got 5e-07",
    "--noise-level 1000": "--noise-level must be lower, as float32 must keep 1000 steps of each trained step's noise, "
    "got 1000: it keeps .* in step 1, where",
    "--noise-level 1e-5": "--noise-level must be higher, as float32 must keep 1000 steps of .*, got 1e-05: it keeps ",
    "--engine other": "--engine must be one of diffusers, vllm-omni, got 'other'",
}


@pytest.mark.parametrize("flags", SETTINGS)
def test_settings_that_do_not_fit(folder, flags, monkeypatch):
    monkeypatch.setattr(omni_rl.settings.rules, "find_spec", lambda name: None)  # as where vLLM-Omni is not installed
    lives.assert_refused(folder, flags.split(), SETTINGS[flags])


REFERENCES = {  # "images" of the last line -> what is said of it
    '"gone.png"': r"--prompts: edits\.jsonl, line 2: must name a file that exists .*, got gone\.png",
    '"torn.png"': r"--prompts: edits\.jsonl, line 2: torn\.png is cut short",
    '"a.png"': r"--prompts: edits\.jsonl, line 1: prompts of a QwenImagePipeline must have no images, got 1",
}


@pytest.mark.parametrize("images", REFERENCES)
def test_a_reference_that_cannot_be_used(folder, images):
    Image.new("RGB", (8, 4)).save(folder / "a.png")
    (folder / "torn.png").write_bytes((folder / "a.png").read_bytes()[:-8])
    (folder / "edits.jsonl").write_text(f'{{"prompt": "x", "images": "a.png"}}\n{{"prompt": "y", "images": {images}}}')
    lives.assert_refused(folder, ["--prompts", "edits.jsonl", "--prompts-per-step", "2"], REFERENCES[images])


LINE = r"--prompts: sizes\.jsonl, line 2: "
SIZES = {  # flags, and the size that the last line says -> what is said of it
    ("", '"height": 40'): f'{LINE}"height" and "width" must both be .*, got 40 and None',
    (
        "",
        '"height": 48, "width": 48',
    ): rf'{LINE}"height" and "width" must be those of the first prompt, '
    r"\(32, 64\), unless --batch-size \(4\) divides --group-size \(2\), got \(48, 48\)",
    ("--batch-size 2", '"height": 48, "width": 40'): f"{LINE}width must be a positive multiple of 16 pixels, .* got 40",
}


@pytest.mark.parametrize("case", SIZES)
def test_a_size_that_cannot_be_drawn(folder, case):
    flags, size = case
    (folder / "sizes.jsonl").write_text(f'{{"prompt": "x"}}\n{{"prompt": "y", {size}}}')
    base = ["--prompts", "sizes.jsonl", "--prompts-per-step", "2", "--group-size", "2", "--batch-size", "4"]
    lives.assert_refused(folder, [*base, *flags.split()], SIZES[case])


def test_a_size_of_the_evaluation_that_the_model_lacks(folder):
    (folder / "sizes.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y", "height": 50, "width": 48}')
    said = r"--eval.prompts: sizes\.jsonl, line 2: height must be a positive multiple of 16 pixels, such as 48, got 50"
    lives.assert_refused(folder, ["--eval.prompts", "sizes.jsonl"], said)


ON_TWO_RANKS = {
    "--batch-size 8": r"--batch-size times ranks \(16\) must divide a step's samples \(8\)",
    "--eval.prompts gone.txt": r"--eval.prompts: path must be a file that can be read, got gone\.txt",
    "--model gone": "error: rank 0: --model must be a folder or a hub id .*, found nothing at gone",
    "--height 100": "error: rank 0: --height must be a positive multiple of 16 pixels, such as 96, got 100",
    "--guidance-scale 2": "rank 0: --guidance-scale must be 1 for a QwenImagePipeline, whose guidance is ",
    "--reward-parts sharp=1": "--reward-parts must name parts of the scores, got 'sharp'; this scorer has no parts",
}


@pytest.mark.parametrize("flags", ON_TWO_RANKS)
def test_two_ranks_say_it_once(folder, flags):
    lives.assert_refused(folder, flags.split(), ON_TWO_RANKS[flags], ranks=2)


DIFFERENT = {"lr": 2e-3, "seed": 1, "prompts": "other.txt"}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_with_different_settings(folder, bright_url, name):
    shutil.copy(lives.TINY.data.prompts, "other.txt")
    args = change(lives.TINY, scorer_url=bright_url)

    def work():
        changed = change(args, **{name: DIFFERENT[name]}) if os.environ["RANK"] == "1" else args
        sys.argv = ["train_flowgrpo.py"]
        launch(lives.app.main, changed)

    life = lives.start(folder, work, ranks=2, before=lives.no_loading)
    assert life.wait() == [2, 2]
    text = life.text().strip()
    assert len(text.splitlines()) == 1, text
    there, here = re.escape(repr(DIFFERENT[name])), re.escape(repr(values_of(args)[name]))
    assert re.search(f"all ranks must have the same settings, but rank 1 has {name} = {there} .rank 0: {here}", text)


@contextmanager
def no_scorer(folder):
    """The URL of a web server that answers every question with 404."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder))
    Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """URLs of servers that do not serve us."""
    video = Scorer(lambda media, prompts, meta: [0.0] * len(prompts), media=("video",))
    with ExitStack() as stack:
        yield {
            "guarded": stack.enter_context(serving_in_thread(brightness, token="the-right-token-for-this")),
            "likeness": stack.enter_context(serving_in_thread(load_likeness())),
            "video": stack.enter_context(serving_in_thread(video)),
            "raising": stack.enter_context(
                serving_in_thread(lambda media, prompts, meta: [own["tone"] for own in meta])
            ),
            "other": stack.enter_context(no_scorer(tmp_path_factory.mktemp("empty"))),
            "dead": "http://127.0.0.1:9",
            "odd": "scorer:8100",
        }


SCORERS = [
    ("dead", "", r"--scorer.url must be a reward server that answers: .*127\.0\.0\.1:9"),
    ("guarded", "", "--scorer.url must be a reward server that answers: .*401"),
    ("guarded", "wrong", "--scorer.url must be a reward server that answers: .*401"),
    ("guarded", "gone", "--scorer.token-file must be a file, got gone"),
    ("odd", "", r"--scorer.url must be http\(s\)://host.*got 'scorer:8100'"),
    ("other", "", "--scorer.url must be a reward server that answers: .*404"),
    ("raising", "", "--scorer.url must score the first prompt: .* scorer_failed the scorer failed"),
    ("video", "", "--scorer.url must be a server of rewards for image, takes video"),
    ("likeness", "", "--scorer.url must be a scorer without references, as the prompts name no images"),
]


@pytest.mark.parametrize(("url", "token", "message"), SCORERS, ids=[f"{url} {token}" for url, token, _ in SCORERS])
def test_a_scorer(folder, urls, url, token, message):
    (folder / "wrong").write_text("a-wrong-token-for-this")
    lives.assert_refused(folder, ["--scorer.url", urls[url], "--scorer.token-file", token], message)
    assert not (folder / "runs").exists()


def test_a_folder_that_cannot_be_written_to(folder):
    (folder / "runs").write_text("a file in the place of the folder")
    lives.assert_refused(
        folder, [], "--name must name a folder that can be written to, got runs/run: .*Not a directory"
    )


def test_a_folder_of_another_run(folder):
    (folder / "runs" / "run").mkdir(parents=True)
    (folder / "runs" / "run" / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    lives.assert_refused(folder, [], "runs/run holds a run already: give another --name, or move it away")
    (folder / "runs" / "run" / "config.toml").write_text('checkpoint_url = "s3://bucket/run"\n')
    message = (
        "runs/run holds a run already: it goes on with --checkpoint-url s3://bucket/run, where its checkpoints are"
    )
    lives.assert_refused(folder, [], message)


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "lock"])
def test_what_has_the_name_of_a_file_of_the_run_but_is_none(folder, kind, name):
    path, elsewhere = folder / "runs" / "run" / name, folder / "elsewhere"
    path.parent.mkdir(parents=True)
    elsewhere.write_text("a user's")
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero" if kind == "device" else elsewhere)
    lives.assert_refused(folder, [], rf"run/{name} must be a regular file and no link")
    assert elsewhere.read_text() == "a user's"
