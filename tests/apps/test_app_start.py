"""A run before its first step: one writer, the first line, threads, the canary, early mistakes, warm starts."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from apps import app_lives as lives
from helpers import CHECKPOINT, REPO, sampled
from omni_reward import RewardClient, RewardConnectError
from omni_reward.serving import serving_here
from omni_rl.settings.early import files_of
from omni_rl.settings.fields import change, flat
from omni_rl.settings.toml import to_toml
from omni_train.checkpoint.index import index_digest
from omni_train.files import load_metrics
from trainer_runs import recipe, train, train_on_ranks


def settings(url, **changes):
    return change(lives.TINY, group_size=2, width=32, **({"train_steps": 1, "scorer_url": url} | changes))


@pytest.mark.parametrize("ranks", sampled([1, 2], 1))
def test_a_second_trainer_in_a_run_folder_is_refused_with_the_pids_of_the_first(here, bright_url, ranks):
    args, update = settings(bright_url, train_steps=2), lives.app.update

    def wait_in_update(rank):
        def wait(run, step, *others):
            Path("waits").touch()
            while not Path("go").exists():
                time.sleep(0.01)
            return update(run, step, *others)

        lives.app.update = wait

    first = lives.train(here, args, ranks=ranks, before=wait_in_update)
    while not Path("waits").exists():
        assert not first.has_ended(0), first.text()
        time.sleep(0.002)
    (here / "tiny.toml").write_text(to_toml(args))
    (here / "second").mkdir()
    holders = ", ".join(f"pid {pid} on {re.escape(socket.gethostname())}" for pid in first.pids)
    try:
        message = rf"runs/run is in use by {holders}: end that run, or give this one another --name$"
        lives.assert_refused(here / "second", [], message)
    finally:
        Path("go").touch()
    assert first.wait() == [0] * ranks, first.text()
    assert [line["step"] for line in load_metrics("runs/run/metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("ranks", sampled([1, 2], 1))
def test_a_run_starts_the_scorer_that_it_names_and_ends_it(here, ranks):
    (here / "mine.py").write_text("def level(media, prompts, meta):\n    return [1.0] * len(prompts)\n")
    args = settings("", scorer_name="python:mine.py:level")
    life = lives.train(here, args, ranks=ranks)
    assert life.wait() == [0] * ranks, life.text()
    assert load_metrics("runs/run/metrics.jsonl")[-1]["reward/mean"] == 1.0
    assert life.text().count("scorer ready at http://127.0.0.1:") == 1
    url = re.search(r"scorer ready at (\S+)", life.text())[1]
    with RewardClient(url) as client, pytest.raises(RewardConnectError):
        client.info()


FAILS = {  # what a function returns after the canary -> what the run ends with
    "math.nan": "RuntimeError: the scorer gave no score for any of 4 samples: the scorer returned nan",
    "os._exit(3)": "RewardError: scores of rank 0: POST http.* attempts\\)",
}


@pytest.mark.parametrize("value", FAILS)
def test_a_failing_scorer_of_the_run_s_own_is_told_in_lines_that_name_the_scorer_and_no_log(here, value):
    source = "import math, os\ncalls = []\n\ndef late(media, prompts, meta):\n    calls.append(1)\n"
    (here / "mine.py").write_text(f"{source}    return [{value} if len(calls) > 1 else 1.0] * len(prompts)\n")
    args = settings("", scorer_name="python:mine.py:late", scorer_timeout_s=2.0, eval_first=False)
    life = lives.train(here, args)
    assert life.wait() == [1], life.text()
    said = f"rank 0, phase reward.*: {FAILS[value]}\nThe run started this scorer: mend python:mine.py:late, as "
    assert re.search(said, life.text()), life.text()
    assert "Traceback" not in life.text()


def test_a_scorer_that_does_not_start_is_refused_before_weights_are_loaded(here):
    (here / "mine.py").write_text("raise OSError('no file of words')\ndef level(media, prompts, meta): ...\n")
    life = lives.train(here, settings("", scorer_name="python:mine.py:level"))
    assert life.wait() == [2], life.text()
    assert "no file of words" in life.text()
    assert "--scorer: 'python:mine.py:level' ended with exit code" in life.text()
    assert "loading" not in life.text()


@pytest.mark.parametrize("ranks", sampled([1, 2], 1))
def test_the_first_line_says_where_the_run_is_and_where_it_begins(here, bright_url, ranks):
    spread = "1 rank on cpu, weights none" if ranks == 1 else "2 ranks on cpu, weights fsdp2"
    for steps, start in ((1, "begins"), (2, "continues after step 1")):
        life = lives.train(here, settings(bright_url, train_steps=steps), ranks=ranks)
        assert life.wait() == [0] * ranks, life.text()
        first = life.text().splitlines()[0]
        assert first.startswith(f"runs/run {start}: {spread}; report in runs/run/report.html; loading ")
        assert Path("runs/run/report.html").is_file()


@pytest.mark.parametrize(("asked", "threads"), [(None, 1), ("2", 2)])
def test_a_rank_on_a_cpu_computes_with_one_thread_unless_told_otherwise(here, bright_url, asked, threads):
    def before(rank):
        torch.set_num_threads(2)  # torch's own choice is the number of cores
        os.environ.pop("OMP_NUM_THREADS", None)
        if asked:
            os.environ["OMP_NUM_THREADS"] = asked

        def tell(run):
            Path("threads").write_text(str(torch.get_num_threads()))
            sys.exit(0)

        lives.app.Loop = tell

    life = lives.train(here, settings(bright_url), before=before)
    assert life.wait() == [0], life.text()
    assert Path("threads").read_text() == str(threads)
    assert json.loads(Path("runs/run/versions.jsonl").read_text())["threads"] == threads


def test_a_scorer_may_read_the_meta_of_its_prompts(here):
    """Also at the start: what it is tried with is the first evaluation prompt and an image of the run's size."""
    seen = []

    def score(media, prompts, meta):
        seen.append((media["image"].shape, prompts, [m["target"] for m in meta]))
        return [float(image.mean()) for image in media["image"]]

    for name in ("train", "eval"):
        lines = [json.dumps({"prompt": f"{name} {word}", "target": word}) for word in ("AB", "CD", "EF")]
        (here / f"{name}.jsonl").write_text("\n".join(lines))
    with serving_here(score) as url:
        train(lives.app, settings(url, prompts="train.jsonl", eval_prompts="eval.jsonl"))
    assert seen[0] == ((1, 32, 32, 3), ["eval AB"], ["AB"])
    assert all(prompt.split()[1] == target for _, *rows in seen for prompt, target in zip(*rows, strict=True))
    assert len(seen) > 2


ANSWERS = {  # of a server that is the hub and no reward server: status, body, and the hub's word for the fault
    "/api/models/them/gated": (200, b'{"id": "them/gated", "gated": "manual"}', ""),
    "/api/models/them/gated/auth-check": (403, b"{}", "GatedRepo"),
    "/api/models/them/none": (404, b"{}", "RepoNotFound"),
    "/page/info": (404, b"<html><head><title>No</title></head><body class='a'><h1>Not here</h1>\n<p>Sorry", ""),
}


class Web(BaseHTTPRequestHandler):
    """A server of ANSWERS."""

    def do_GET(self):
        status, body, code = ANSWERS.get(self.path, (404, b"{}", ""))
        self.send_response(status)
        for name, value in {"X-Error-Code": code, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def web():
    """The URL of a `Web`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def write_checkpoint(folder):
    """The index of a checkpoint of runs/old, whose prompts were others, from before Adam had settings."""
    args = change(recipe(lives.app, "tiny-signs"), name="old", model=str(CHECKPOINT), prompts="lines.txt")
    config = flat(change(args, eval_prompts="eval.txt")) | files_of(args, CHECKPOINT) | {"prompts_digest": "0" * 64}
    for name in ("optim_adam_beta1", "optim_adam_beta2", "optim_adam_epsilon"):
        del config[name]
    content = {"step": 3, "config": config, "versions": {}, "world_size": 1, "files": {}, "tensors": {}}
    home = folder / "runs/old/checkpoints/step-00000003"
    home.mkdir(parents=True)
    (home / "checkpoint.json").write_text(json.dumps({"sha256": index_digest(content)} | content))


HUB = "--model must be a folder or a hub id that can be fetched, got them/"
SERVER = "--scorer.url must be a reward server that answers"
EARLY = {  # flags -> what is said of them
    "--prompts gone.txt": "--prompts: path must be a file that can be read, got gone.txt",
    "--prompts torn.jsonl": "--prompts: torn.jsonl, line 2: not valid JSON",
    "--name ../run": "--name must name a folder below runs/, got '../run'",
    "--model gone": "--model must be a folder or a hub id such as Qwen/Qwen-Image, found nothing at gone$",
    "--model runs": "--model is incomplete: runs/model_index.json is missing$",
    "--model mute": "--model is incomplete: mute/tokenizer must have the files of its vocabulary, such as ",
    "--model them/gated": f"{HUB}gated: .*Accept its license at .*/them/gated, then `hf auth login`",
    "--model them/none": f"{HUB}none: .*Fetch it where there is a network, with `hf download them/none`",
    "--scorer.url WEB": f"{SERVER}: WEB is no reward server: GET WEB/info: 404 {{}}$",
    "--scorer.url WEB/page": f"{SERVER}: WEB/page is no reward server: GET WEB/page/info: 404 Not here Sorry$",
    "--height 33": "--height must be a positive multiple of 16 pixels, such as 32, got 33$",
    "--scorer ocr+python:gone.py:f": "--scorer must be python:FILE.py:FUNCTION with a file that exists, got ",
    "--scorer python:mine.py:other": "--scorer: mine.py must have a function 'other'$",
    "--scorer python:mine.py:two": r"--scorer: mine.py, line 3: two must be a function of "
    r"\(media, prompts, meta\), got \(media, prompts\)$",
    "--scorer python:torn.py:f": r"--scorer: torn.py must be a file of Python: .*line 1\)$",
    "--scorer 0.5*orc+0.5*color": r"--scorer must be one of \['aesthetic', .*, got 'orc'; did you mean 'ocr'\?$",
    "--name old --prompts lines.txt --train-steps 9": "--train-steps must be 320, as --optim.lr-scheduler-type linear "
    "ends with the last step: to train longer, give the run another --name and its weights as "
    "--init-weights runs/old/weights, got 9$",
    "--name old --prompts lines.txt --lr 0.5": "the checkpoint of step 3 was made with other settings: "
    "lr was 0.00012, is 0.5, lines.txt has other contents than at the start. Continue with those, or ",
}
OF_MANY = [f"{app} {flags}" for app in ("train_nft", "train_dpo") for flags in EARLY if "old" not in flags]


@pytest.mark.parametrize("case", [*(f"train_flowgrpo {flags}" for flags in EARLY), *sampled(OF_MANY, 2)])
def test_a_cheap_mistake_is_found_before_torch_is_imported(here, case, web, bright_url, monkeypatch):
    trainer, _, flags = case.partition(" ")
    (here / "torn.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b\n')
    (here / "lines.txt").write_text("a sign\n" * 8)
    (here / "mine.py").write_text("raise SystemExit('it was executed')\n\ndef two(media, prompts): ...\n")
    (here / "torn.py").write_text("def f(:\n")
    write_checkpoint(here)
    shutil.copytree(CHECKPOINT, here / "mute", copy_function=os.symlink)
    for path in (here / "mute/tokenizer").iterdir():
        if path.name != "tokenizer_config.json":
            path.unlink()
    for name, value in {"HF_ENDPOINT": web, "HF_HUB_CACHE": str(here), "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    code = (
        "import runpy, sys\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    print(sorted({'torch', 'diffusers', 'transformers', 'peft'} & sys.modules.keys()))\n"
    )
    given = {"preset": "tiny-signs", "scorer.url": bright_url, "eval.prompts": "eval.txt", "model": str(CHECKPOINT)}
    given |= {"prompts": str(lives.TINY.prompts)}
    program = str(REPO / "apps" / f"{trainer}.py")
    words = f"import sys; sys.argv = [{program!r}, *sys.argv[1:]]\n{code}"
    typed = [f"--{name}={value}" for name, value in given.items()] + flags.replace("WEB", web).split()
    result = subprocess.run([sys.executable, "-c", words, *typed], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "[]\n"), result.stderr
    assert re.match(f"{trainer}.py: error: {EARLY[flags]}".replace("WEB", web), result.stderr), result.stderr
    assert result.stderr.count("\n") == 1


def test_the_first_line_is_printed_before_torch_is_imported_and_by_the_first_rank(here, bright_url):
    """A `torch` that ends the program stands in for the real one."""
    (here / "torch.py").write_text("raise SystemExit(7)")
    (here / "tiny.toml").write_text(to_toml(settings(bright_url, sharding_mode="ddp")))
    command = [sys.executable, str(REPO / "apps" / "train_flowgrpo.py"), "--config", "tiny.toml"]
    said = []
    for rank in "01":
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "PYTHONPATH": str(here)}
        result = subprocess.run(command, env=os.environ | ranks, capture_output=True, text=True)
        assert result.returncode == 7, result.stderr
        said.append(result.stdout)
    assert said == [f"train_flowgrpo.py: the settings are checked; loading torch, then {CHECKPOINT}\n", ""]


LORA = {"lora_rank": 2, "lora_alpha": 4, "lr": 1e-2}
WARM = {  # the first run, the run that starts from its weights, its ranks
    "an adapter": (LORA, LORA, 1),
    "full weights": ({}, {}, 1),
    "an adapter upon full weights": ({}, LORA, 1),
    "an average": ({"ema_decay": 0.5}, {"ema_decay": 0.5}, 1),
    "an adapter, on two ranks": (LORA, LORA, 2),
    "full weights, on two ranks": ({}, {}, 2),
}


@pytest.mark.parametrize("kind", sampled(WARM, 2, always=("an adapter upon full weights",)))
def test_a_warm_start_draws_first_what_the_other_run_drew_last(here, bright_url, kind):
    first, second, ranks = WARM[kind]
    before = train(lives.app, settings(bright_url, name="first", **first))
    args = settings(bright_url, name="second", init_weights="runs/first/weights", train_steps=1, **second)
    after = train(lives.app, args) if ranks == 1 else train_on_ranks(lives.app, args, ranks=ranks)
    assert before[0]["eval/reward"] != before[-1]["eval/reward"]
    assert after[0]["eval/reward"] == before[-1]["eval/reward"]
    assert after[-1]["eval/reward"] != after[0]["eval/reward"]


def test_an_adapter_is_no_start_for_full_weights_nor_for_another_rank(here, bright_url):
    train(lives.app, settings(bright_url, name="first", **LORA))
    (here / "tiny.toml").write_text(to_toml(settings(bright_url, init_weights="runs/first/weights")))
    (here / "second").mkdir()
    lives.assert_refused(here / "second", [], "--init-weights: .* holds a LoRA adapter, which needs --lora.rank > 0")
    message = r"--init-weights: .*safetensors must be an adapter of the same rank, .* is \(2, \d+\), not \(4, \d+\)$"
    lives.assert_refused(here / "second", ["--lora.rank", "4"], message)
    lives.assert_refused(
        here / "second",
        ["--lora.rank", "2", "--lora.targets", "to_q"],
        "--init-weights: .*safetensors must be an adapter on the same layers, differs in .*",
    )
