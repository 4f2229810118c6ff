"""The table of mistakes: what a user types, and the one line that tells it.

A row is a command line of `omni-rl`; one that begins with a flag is of `omni-rl train flowgrpo --preset tiny-signs`.
EARLY ones are told before torch is imported. OPENED and LATE ones need the model, the scorer or the checkpoint, and are
told before any weight is loaded. What others might take for a mistake is TAKEN.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from apps import app_lives as lives
from helpers import CHECKPOINT, sampled
from model_rows import ROWS
from omni_reward.scorers import load_scorer
from omni_reward.serving import serving_in_thread
from omni_rl.settings.fields import change, flatten
from omni_rl.settings.saved import file_digests
from omni_train.checkpoint.index import index_digest
from omni_train.dist import init_distributed
from omni_train.lora import add_lora
from omni_train.weights.full import save_weights
from torch import nn
from trainer_runs import recipe

TYPED = "train flowgrpo --preset tiny-signs"
HUB = "--model must be a folder or a hub id that can be fetched, got them/"
SERVER = "--scorer.url must be a reward server that answers: "
AGAIN = "use the same command again, which continues the run$"
RANKS = "use omni-rl train NAME --nproc-per-node N$"
PUSH = "use omni-rl push runs/NAME OWNER/NAME after the run$"
TOML = "--config must be a readable TOML file, got "
OCR = r"must be one of \['aesthetic', .*, got 'orc'; did you mean 'ocr'\?$"
LONG = "m" * 5000
EARLY = {
    f"--init-weights {LONG}": "--init-weights must be a path that can be opened: File name too long$",
    # names of flags, also those of other projects
    "--lrr 1": r"unknown flag --lrr; did you mean '--lr'\?$",
    "--learning-rate 1": "unknown flag --learning-rate; use --lr$",
    "--learning_rate 1": "unknown flag --learning_rate; use --lr$",
    "--gradient-accumulation-steps 2": "unknown flag --gradient-accumulation-steps; use --num-minibatches$",
    "--per-device-train-batch-size 2": "unknown flag --per-device-train-batch-size; use --batch-size$",
    "--gpus 2": f"unknown flag --gpus; {RANKS}",
    "--num-processes 2": f"unknown flag --num-processes; {RANKS}",
    "--fp16": "unknown flag --fp16; use --dtype float16$",
    "--bf16 true": "unknown flag --bf16; use --dtype bfloat16$",
    "--mixed-precision bf16": "unknown flag --mixed-precision; use --dtype$",
    "--report-to wandb": "unknown flag --report-to; use --tracking.to$",
    "--resume": f"unknown flag --resume; {AGAIN}",
    "--resume-from-checkpoint x": f"unknown flag --resume-from-checkpoint; {AGAIN}",
    "--output-dir x": "unknown flag --output-dir; use --name, as the run writes to runs/NAME$",
    "--prompt x": r"unknown flag --prompt; did you mean '--prompts'\?$",
    "--device cuda": "unknown flag --device; it is the machine's accelerator, or else its CPU; CUDA_VISIBLE_DEVICES ",
    "--push-to-hub": f"unknown flag --push-to-hub; {PUSH}",
    "--hub-model-id o/n": f"unknown flag --hub-model-id; {PUSH}",
    "--lora_rank 4": r"unknown flag --lora_rank; did you mean '--lora\.rank'\?$",
    "--no-lora.rank": r"unknown flag --no-lora.rank; did you mean '--lora\.rank'\?$",
    "--no-eval.first": r"unknown flag --no-eval.first; did you mean '--eval\.no-first'\?$",
    "--no-memory.offload": r"unknown flag --no-memory.offload; did you mean '--memory\.offload'\?$",
    # values
    "--dtype bf16": "--dtype must be one of 'float32', 'bfloat16', 'float16', got 'bf16'$",
    "--algo grpo": r"--algo must be one of 'flowgrpo', .*, got 'grpo'; did you mean 'flowgrpo'\?$",
    "--algo nft": "--algo must be one of 'flowgrpo', .*, got 'nft'; use omni-rl train nft$",
    "--lr=-1": "--lr must be >= 0, got -1.0$",
    "--lr nan": "--lr must be a number, got nan$",
    "--group-size 1": "--group-size must be >= 2, got 1$",
    "--batch-size 7": r"--batch-size times ranks \(7\) must divide a step's samples \(64\), got 7; nearest: 8$",
    "--window-size 20": "--window-size must be from 1 to the window's 3 steps, got 20$",
    "--window-high 99": "--window-low must be < --window-high, and that < --num-inference-steps .*, got 1 and 99$",
    "--lora.rank abc": "--lora.rank must be a whole number, got 'abc'$",
    "--seed abc": "--seed must be a whole number, got 'abc'$",
    "--height 100000": "--height must be <= 16384, got 100000$",
    "--eval.every -1": "--eval.every must be >= 1, got -1$",
    "--name ../..": r"--name must name a folder below runs/, got '\.\./\.\.'$",
    "--guidance 3": "--guidance must be NAME=NUMBER with commas between, each name once, got '3'$",
    "--memory.offload encodr": "--memory.offload must be of encoder, .* with commas between, got encodr$",
    "--compile true": "--compile takes no value, got 'true': give --compile or --no-compile$",
    "--eval.first false": "--eval.first takes no value, got 'false': give --eval.first or --eval.no-first$",
    # what goes together
    "--memory.base-dtype nf4": "--memory.base-dtype nf4 needs --lora.rank > 0, --memory.gradient-checkpointing, and ",
    "--memory.device-gb 24": "--memory.device-gb needs --dry-run$",
    "--dtype bfloat16": "--dtype bfloat16 needs --lora.rank > 0 or --sharding.mode fsdp2, which trains float32 weights",
    "--sharding.mode fsdp2": "--sharding.mode fsdp2 needs ranks: omni-rl train NAME --nproc-per-node N, or torchrun$",
    "train nft --preset tiny-signs --algo dgpo --batch-size 7": "--batch-size times .* hold whole groups of .* 8$",
    # what is not installed
    "--tracking.to wandb": r"--tracking.to must be an installed package, got 'wandb': pip install 'omni-rl\[wandb\]'$",
    "--engine vllm": "--engine must be one of diffusers, vllm-omni, got 'vllm'$",
    "--engine vllm-omni": "--engine vllm-omni must be installed: in a clone run make install-vllm-omni, then ",
    "train gspo --preset tiny-beeps --engine vllm": r"--engine vllm must be installed: pip install 'omni-rollout\[vllm",
    # scorers
    "--scorer orc": f"--scorer {OCR}",
    "--scorer 0.5*orc+0.5*color": f"--scorer {OCR}",
    "--scorer python:gone.py:f": "--scorer must be python:FILE.py:FUNCTION with a file that exists, got 'python:gone",
    "--scorer ocr+python:gone.py:f": "--scorer must be python:FILE.py:FUNCTION with a file that exists, got ",
    "--scorer python:mine.py:other": "--scorer: mine.py must have a function 'other'$",
    "--scorer python:mine.py:two": r"--scorer: mine.py, line 3: two must be a function of "
    r"\(media, prompts, meta\), got \(media, prompts\)$",
    "--scorer python:torn.py:f": r"--scorer: torn.py must be a file of Python: .*line 1\)$",
    "--scorer.url localhost:8100": r"--scorer.url must be http\(s\)://host\[:port\]\[/path\], got 'localhost:8100'$",
    # recipes and files of settings
    "--preset tiny-sign": r"--preset must name a recipe, which --list-presets lists, got .* mean 'tiny-signs'\?$",
    "--list-presets nothing": "unexpected 'nothing': a flag begins with --$",
    "--config gone.toml": rf"{TOML}gone.toml: .*No such file",
    "--config settings.yaml": rf"{TOML}settings.yaml: .* \(at line 1, column 3\)$",
    "--config settings.json": rf"{TOML}settings.json: .* \(at line 1, column 1\)$",
    "--config plain.toml": r"plain.toml: unknown key 'lrr'; did you mean 'lr'\?$",
    "--config nested.toml": r"nested.toml: unknown key 'lora.rnk'; did you mean 'lora.rank'\?$",
    "--preset sd35-medium-1x16gb-ocr": "--prompts: .* got data/ocr/train.txt: .*; to get it: omni-rl prompts ocr$",
    # prompts
    "--prompts gone.txt": "--prompts: path must be a file that can be read, got gone.txt: No such file or directory$",
    "--prompts empty.txt": "--prompts: path must hold at least one prompt, empty.txt is empty$",
    "--prompts keys.jsonl": "--prompts: keys.jsonl, line 1: must have the key .* --prompt-key names another one$",
    "--prompts texts.csv": "--prompts: texts.csv, row 2: must have the key .* --prompt-key names another one$",
    "--prompts torn.jsonl": "--prompts: torn.jsonl, line 2: not valid JSON: Unterminated string",
    "--prompts latin.txt": "--prompts: latin.txt, line 2: must be UTF-8, got the byte 0xe9$",
    "--prompts few.txt": r"--prompts-per-step must be between 1 and the number of prompts in few.txt \(1\), got 8$",
    "--prompts pointer.jsonl": "--prompts: pointer.jsonl must be the file itself, got its pointer of Git LFS: `git lfs",
    "--prompts rows.parquet": "--prompts: rows.parquet needs pyarrow, which is not installed: pip install 'pyarrow",
    "--prompts hf://datasets/o/n": "--prompts: path must be a file that can be fetched from the hub, .* give a file$",
    # models and weights
    "--init-weights nowhere": "--init-weights must be a folder, got nowhere$",
    # ranks
    "train nft --nproc-per-node 2 --preset tiny-signs --lrr 1": r"unknown flag --lrr; did you mean '--lr'\?$",
    "train nft --nproc-per-node 2 --preset tiny-signs --batch-size 7": r"--batch-size times ranks \(14\) must .* 8$",
    "train nft --nproc-per-node 3 --preset tiny-signs": r"the ranks \(3\) must divide a step's samples \(64\), prompts",
    "train nft --nproc-per-node two": "--nproc-per-node must be a whole number >= 1, got 'two'$",
    # other commands
    "tran": r"the command must be one of train, .*, got 'tran'; did you mean 'train'\?$",
    "train flow-grpo": r"the trainer must be one of .*, got 'flow-grpo'; did you mean 'flowgrpo'\?$",
    "sample --model CHECKPOINT --weights nowhere": "--weights must be a folder that a trainer wrote, got nowhere$",
    "sample --model CHECKPOINT --out a.xyz": "--out must end in .png, .jpg or .webp, got a.xyz$",
    "push nowhere o/n": "run must be a folder with weights, which an evaluation writes, found none in nowhere/weights$",
    "report nowhere": "nowhere holds no metrics.jsonl$",
    "serve --scorer orc": f"scorer {OCR}",
    "prompts ocrr": r"NAME must be one of ocr, .*, got 'ocrr'; did you mean 'ocr'\?$",
    "prompts ocr --to ocr": "ocr/train.txt must be a file that can be fetched, .* without a network, bring the file y",
    "lora nowhere out --model CHECKPOINT": r"source must be a \.safetensors file or an adapter's folder, got nowhere$",
    "lora CHECKPOINT out --model CHECKPOINT": "source must .* holds full weights, which --init-weights takes as they a",
}  # fmt: skip
OPENED = {  # told by what the run opens, before any weight is loaded
    f"--model {LONG}": "--model: .*File name too long: 'm+'$",
    "--height 33": "--height must be a positive multiple of 16 pixels, such as 32, got 33$",
    "--scorer.url WEB": f"{SERVER}WEB is no reward server: GET WEB/info: 404 {{}}$",
    "--scorer.url WEB/page": f"{SERVER}WEB/page is no reward server: GET WEB/page/info: 404 Not here Sorry$",
    "--scorer.url http://127.0.0.1:9": rf"{SERVER}GET http://127\.0\.0\.1:9/info: .*Connection refused$",
    "train flowgrpo --preset qwen-image-ocr-lora --model CHECKPOINT --prompts lines.txt --eval.prompts lines.txt "
    "--prompts-per-step 8 --scorer.url http://127.0.0.1:9": rf"{SERVER}GET http://127\.0\.0\.1:9/info: .*Connection "
    "refused; start one: omni-rl serve --scorer ocr --option formula=contained --port 8100$",
    "--model checkpoints/tiny-signs-qwen-image": "--model .*checkpoints/tiny-signs-qwen-image.*; the clone of omni-rl "
    "has it: start in its folder$",
    "--model nowhere": "--model must be a folder or a hub id such as Qwen/Qwen-Image, found nothing at nowhere$",
    "--model none": "--model is incomplete: none/model_index.json is missing$",
    "--model mute": "--model is incomplete: the tokenizer of mute/tokenizer must have a vocabulary, looked for ",
    "--model mute/transformer": "--model must be a whole pipeline, got mute/transformer, .*: give the folder above",
    "--model model.safetensors": "--model must be a folder in diffusers' layout or a hub id, got the file model.safe",
    "--model them/none": f"{HUB}none: .*Fetch it where there is a network, with `hf download them/none`, or give a f",
    "--model them/offline": f"{HUB}offline: .*Connection refused. Fetch it where there is a network, with `hf download",
    "--model them/gated": f"{HUB}gated: .*Accept its license at .*/them/gated, then `hf auth login`",
    "--name old --prompts lines.txt --train-steps 9": "--train-steps must be 320, as --optim.lr-scheduler-type linear "
    "ends with the last step: to train longer, give the run another --name and its weights as "
    "--init-weights runs/old/weights, got 9$",
    "--name old --prompts lines.txt --lr 0.5": "the checkpoint of step 3 was made with other settings: "
    "lr was 0.00012, is 0.5, .*lines.txt has other contents than at the start. Continue with those, or ",
}  # fmt: skip
OF_ALL = [words for words in EARLY if re.match("--(prompts|model|scorer|lora|memory|height|seed|fp16)", words)]
OTHERS = {
    f"train {trainer} --preset tiny-signs {words}": EARLY[words] for trainer in ("nft", "dpo") for words in OF_ALL
}
TAKEN = {  # what is printed on standard output
    "help": "usage: omni-rl COMMAND",
    "--help": r"^usage: train_flowgrpo.py \[",
    "push --help": "^usage: omni-rl push ",
    "train flowgrpo --nproc_per_node 2 --preset tiny-signs --check": 'name = "tiny-signs"',
    "--eval.no-first --check": r"\nfirst = false\n",
    "--memory.no-gradient-checkpointing --check": r"\ngradient_checkpointing = false\n",
    "--memory.offload none --check": r'\noffload = ""\n',
    "--prompts rows.csv --check": 'prompts = "rows.csv"',
    "--prompts table --check": 'prompts = "table"',
    "--prompts chats.jsonl --check": 'prompts = "chats.jsonl"',
    "--eval.num-prompts 100000 --check": "num_prompts = 100000",
    "sample --model CHECKPOINT --prompt 'a sign' --check": 'prompt = "a sign"',
}


ANSWERS = {  # of a server that is the hub and no reward server: status, body, and the hub's word for the fault
    "/": (200, b"", ""),
    "/api/models/them/gated/revision/main": (403, b"{}", "GatedRepo"),
    "/api/models/them/none/revision/main": (404, b"{}", "RepoNotFound"),
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
        self.wfile.write(b"" if self.command == "HEAD" else body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *about):
        pass


@pytest.fixture(scope="module")
def web():
    """The URL of a `Web`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def write_checkpoint():
    """The index of a checkpoint of runs/old, whose prompts were others."""
    args = change(recipe(lives.app, "tiny-signs"), name="old", model=str(CHECKPOINT), prompts="lines.txt")
    config = (
        flatten(change(args, eval_prompts="lines.txt")) | file_digests(args, CHECKPOINT) | {"prompts_digest": "0" * 64}
    )
    content = {"step": 3, "config": config, "versions": {}, "world_size": 1, "files": {}, "tensors": {}}
    home = Path("runs/old/checkpoints/step-00000003")
    home.mkdir(parents=True)
    (home / "checkpoint.json").write_text(json.dumps({"sha256": index_digest(content)} | content))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
CHAT = {"prompt": [{"role": "user", "content": "a sign"}]}
FILES = {
    "mine.py": "raise SystemExit('it was executed')\n\ndef two(media, prompts): ...\n", "torn.py": "def f(:\n",
    "empty.txt": "", "few.txt": "a sign\n", "lines.txt": 'a blue sign that says "AB"\n' * 8,
    "keys.jsonl": '{"text": "a"}\n',
    "torn.jsonl": '{"prompt": "a"}\n{"prompt": "b\n', "pointer.jsonl": POINTER, "rows.parquet": "PAR1",
    "rows.csv": "prompt,size\n" + "a sign,3\n" * 9, "texts.csv": "text,size\n" + "a sign,3\n" * 9,
    "table/train-00000-of-00001.csv": "prompt\n" + "a sign\n" * 9, "chats.jsonl": f"{json.dumps(CHAT)}\n" * 9,
    "settings.yaml": "lr: 0.1\n", "settings.json": '{"lr": 0.1}\n', "plain.toml": "lrr = 0.1\n",
    "nested.toml": "[lora]\nrnk = 4\n", "none/README.md": "", "model.safetensors": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with FILES."""
    folder = tmp_path_factory.mktemp("typed")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "latin.txt").write_bytes(b"a sign\n\xe9t\xe9\n")
    shutil.copytree(CHECKPOINT, folder / "mute", copy_function=os.symlink)
    for path in (folder / "mute/tokenizer").iterdir():
        if path.name != "tokenizer_config.json":
            path.unlink()
    with chdir(folder):
        write_checkpoint()
    return folder


@pytest.fixture(scope="module")
def typing(place, web):
    """A function that types a command line in that folder, and returns what came of it."""
    with typed(place, web) as type_in:
        yield type_in


@pytest.fixture(scope="module")
def opening(place, web):
    """The same in a process that has imported torch."""
    with typed(place, web, "opening") as type_in:
        yield type_in


@contextmanager
def typed(folder, web, *options):
    """A function that types a command line in a process of tests/apps/typed.py."""
    places = {"CHECKPOINT": str(CHECKPOINT), "WEB": web}
    proxy = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    own = {"HF_ENDPOINT": web, "HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "0", **proxy}
    command = [sys.executable, str(Path(__file__).with_name("typed.py")), *options]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=os.environ | own, text=True) as server:

        def type_in(words, **env):
            line = f"{TYPED} {words}" if words.startswith("-") else words
            line = re.sub("CHECKPOINT|WEB", lambda name: places[name[0]], line)
            if "--name old" in line:
                line += f" --model {CHECKPOINT} --eval.prompts lines.txt"
            away = {"HF_ENDPOINT": "http://127.0.0.1:9"} if "offline" in line else {}
            case = {"folder": str(folder), "words": shlex.split(line), "env": own | away | env}
            case["without"] = ["wandb", "vllm", "vllm_omni", "pyarrow"]
            server.stdin.write(json.dumps(case) + "\n")
            server.stdin.flush()
            return SimpleNamespace(**json.loads(server.stdout.readline()))

        yield type_in
        server.stdin.close()


@pytest.mark.parametrize("words", [*sampled(EARLY, 40), *sampled(OTHERS, 4)])
def test_a_mistake_is_one_line_before_torch_is_imported(typing, web, words):
    said = typing(words)
    assert (said.code, said.out, said.heavy) == (2, "", []), said
    assert said.err.count("\n") == 1, said.err
    assert re.search(f"^[\\w. -]+: error: {(EARLY | OTHERS)[words]}".replace("WEB", web), said.err), said.err


@pytest.mark.parametrize("words", OPENED)
def test_a_mistake_in_what_a_run_opens_is_one_line_before_weights_are_loaded(opening, web, words):
    """Loading them would end the program with exit code 99."""
    said = opening(words)
    assert said.code == 2, said
    assert said.err.count("\n") == 1, said.err
    assert re.search(f"^train_flowgrpo.py: error: {OPENED[words]}".replace("WEB", web), said.err), said.err


@pytest.mark.parametrize("words", TAKEN)
def test_what_looks_like_a_mistake_is_taken(typing, words):
    said = typing(words)
    assert (said.code, said.err, said.heavy) == (0, "", []), said
    assert re.search(TAKEN[words], said.out), said.out


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch"])
def test_of_the_ranks_that_another_launcher_starts_the_first_tells_the_mistake(typing, launcher):
    """Both set these variables; what a launcher prints of ranks that have ended is its own."""
    said = [typing("--lrr 1", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2") for rank in "01"]
    assert [(each.code, each.out, each.heavy) for each in said] == [(2, "", [])] * 2
    assert [each.err for each in said] == ["train_flowgrpo.py: error: unknown flag --lrr; did you mean '--lr'?\n", ""]


# What needs the model or the scorer


LATE = {
    "--lora.rank 4 --lora.targets nothing": r"--lora.targets must all name layers of QwenImageTransformer2DModel, "
    r"found none named \['nothing'\]; it has the linear layers add_k_proj, ",
    "--lora.rank 4 --lora.exclude nothing": "--lora.exclude must name some of the layers that targets name, got ",
    "--guidance scale=2": "--guidance of a QwenImagePipeline must be one of --true-cfg-scale, got scale; it is guided ",
    "--guidance-scale 2": "--guidance-scale must be 1 for a QwenImagePipeline, whose guidance is --true-cfg-scale, got",
    "--num-frames 5": "--num-frames must be 1 for a QwenImagePipeline, got 5",
    "--model SD3 --true-cfg-scale 4": "--guidance of a StableDiffusion3Pipeline must be one of max_sequence_length, "
    "got --true-cfg-scale; it is guided by --guidance-scale$",
    "--model SD3 --guidance max_sequence_length=0": "--guidance max_sequence_length must be a whole number from 1",
    "--init-weights OTHER --lora.rank 4": r"--init-weights: .*safetensors does not fit QwenImageTransformer2DModel: 1",
}


@pytest.mark.parametrize("flags", LATE)
def test_a_mistake_that_needs_the_model_is_one_line(folder, flags):
    if "OTHER" in flags:
        net = nn.ModuleDict({"attn": nn.ModuleDict({"to_q": nn.Linear(4, 4)})})
        add_lora(net, ["to_q"], rank=4, alpha=8, seed=0)
        save_weights(net, folder / "OTHER", init_distributed())
    words = [str(ROWS["sd35-medium"].checkpoint()) if word == "SD3" else word for word in flags.split()]
    lives.assert_refused(folder, words, f"train_flowgrpo.py: error: {LATE[flags]}")


TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
MODELS = {  # change of the folder -> what is said of it
    "another pipeline": (
        lambda m: lives.rewrite(m / "model_index.json", '{"_class_name": "PixArtSigmaPipeline"}'),
        "--model must not be a 'PixArtSigmaPipeline', which .*model holds: known are .*QwenImagePipeline",
    ),
    "a cut file": (
        lambda m: lives.cut(m / TRANSFORMER),
        r"model\.safetensors is no whole safetensors file: .*; if a download was interrupted, the same command ",
    ),
    "a pointer of Git LFS": (
        lambda m: lives.rewrite(m / TRANSFORMER, POINTER),
        r"--model is incomplete: .*model\.safetensors is only a Git LFS pointer: `git lfs pull` fetches the file$",
    ),
    "a variant": (
        lambda m: (m / TRANSFORMER).rename((m / TRANSFORMER).with_suffix(".fp16.safetensors")),
        r"only .*\.fp16\.safetensors, a variant: load with variant='fp16' of diffusers, and save_pretrained without$",
    ),
    "a pickle": (
        lambda m: (m / TRANSFORMER).rename((m / TRANSFORMER).with_suffix(".bin")),
        r"model\.safetensors is missing; diffusion_pytorch_model\.bin is a pickle, never opened: load it in diffusers ",
    ),
    "too few blocks": (
        lambda m: lives.deepen(m / "transformer/config.json", 1),
        r"incomplete: .*/transformer lacks \d+ weights, such as transformer_blocks\.\d",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", MODELS)
def test_a_model_folder_with_a_fault_is_one_line(folder, fault):
    break_it, message = MODELS[fault]
    break_it(shutil.copytree(CHECKPOINT, folder / "model", copy_function=os.symlink))
    lives.assert_refused(folder, ["--model", "model"], message)


GRADES = {  # what a reward function does -> what is said of it
    "return None": "own must return 2 numbers in a list, got NoneType: None",
    "return {'score': prompts}": r"own must return 2 numbers in a list, got dict: \{'score': ",
    "return ['good'] * len(prompts)": "own must return 2 numbers, got 'good' for sample 1",
    "return [0.5]": r"own must return 2 numbers, got 1: \[0.5\]",
    "return [float('nan')] * len(prompts)": "the scorer returned nan$",
    "return [row['target'] for row in meta]": r"KeyError: 'target' \(.*own\.py, line 3\)",
    "return [image.size[0] for image in media]": "media is a dict",
}


@pytest.mark.parametrize("body", GRADES)
def test_a_reward_function_that_gives_no_scores_is_one_line(folder, body):
    (folder / "own.py").write_text(f"import torch\ndef own(media, prompts, meta):\n    {body}\n")
    message = f"--scorer.url must score the first prompt: .*{GRADES[body]}"
    with serving_in_thread(load_scorer("python:own.py:own"), show_errors=True) as url:
        lives.assert_refused(folder, ["--scorer.url", url], message)


def test_a_reward_function_may_return_a_tensor(folder):
    (folder / "own.py").write_text(
        "import torch\ndef own(media, prompts, meta):\n    return torch.ones(len(prompts))\n"
    )
    with serving_in_thread(load_scorer("python:own.py:own")) as url:
        life = lives.command(folder, ["--config", "tiny.toml", "--scorer.url", url], before=lives.no_loading)
        assert life.wait() == [99], life.text()  # which comes to the weights
