"""Every command block in docs/ and the README is run here, or matched to what runs it; so is every block of code.

A block without a language holds commands; what a program prints is `text`. A command that no rule below knows fails.
"""

import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trainer_runs
from apps.conftest import bright_url as bright_url
from helpers import CHECKPOINT, REPO, sampled
from omni_reward import cli
from omni_reward.rules import open_rules
from omni_reward.scorers import SCORERS
from omni_reward.terms import parse
from omni_rl.report.__main__ import main as write_report
from omni_rl.report.serve import LiveServer
from omni_rl.run.world import World
from omni_rl.settings import rules
from omni_rl.settings.args import MediaArgs
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.fields import change
from omni_rl.settings.toml import from_toml, load_recipes
from omni_rl.tools import lora, prompts, score
from omni_rl.tools.command import python_args
from omni_rl.tools.prompts import prompt_sets
from omni_rollout.models import open_model
from omni_train.lora import add_lora
from omni_train.weights.adapters import LORA_FILE
from omni_train.weights.full import save_weights
from PIL import Image, ImageDraw, ImageFont
from rl.report_runs import write_run

import sample

PAGES = {path.relative_to(REPO).as_posix(): path.read_text("utf-8") for path in [*REPO.glob("docs/**/*.md")]}
PAGES["README.md"] = (REPO / "README.md").read_text("utf-8")
SHELL = ("", "sh", "bash")  # languages of blocks of commands
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CODE = {  # page -> the test that runs its Python and JSON; or this file does
    "README.md": "tests/scripts/test_docs_commands.py",
    "docs/api.md": "tests/apps/test_app_own_loop.py",
    "docs/contributing.md": "tests/apps/test_app_guides.py",
    "docs/engines.md": "tests/vllm_engine/test_vllm_omni_docs.py",
    "docs/preferences.md": "tests/apps/test_app_train_dpo.py",
    "docs/quickstart.md": "tests/scripts/test_docs_commands.py",
    "docs/report.md": "tests/rl/test_rl_report_docs.py",
    "docs/reward-protocol.md": "tests/reward/test_reward_docs.py",
    "docs/scorers.md": "tests/reward/test_reward_scorer_docs.py",
    "docs/tokens.md": "tests/apps/test_app_train_gspo.py",
}
TESTS = "".join(path.read_text("utf-8") for path in REPO.glob("tests/**/test_*.py"))


def blocks(page):
    """(language, text) of each block of a page."""
    return BLOCK.findall(PAGES[page])


def commands():
    """The words of every line of every command block; a line that goes on below counts as one."""
    for page in PAGES:
        for language, text in blocks(page):
            if language in SHELL:
                yield from (shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines())


COMMANDS = {" ".join(words): words for words in commands() if words}


@pytest.fixture
def place(tmp_path, monkeypatch, bright_url, capfd):
    """A working folder with the files that commands name, and a scorer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for path in (*REPO.glob("data/tiny-*"), REPO / "data" / "red", REPO / "checkpoints", REPO / "scripts"):
        (tmp_path / path.relative_to(REPO)).symlink_to(path)
    [own] = [text for language, text in blocks("README.md") if language == "python" and "def score(" in text]
    (tmp_path / "bright.py").write_text(own)
    for name in ("my_prompts.txt", "my_eval.txt"):
        (tmp_path / name).write_text("".join(f'a sign that says "{i}"\n' for i in range(64)))
    (tmp_path / "data" / "mine").mkdir()
    for name in ("train", "test"):
        (tmp_path / "data" / "mine" / f"{name}.csv").write_text("caption\n" + "a sign\n" * 64)
    for name, row in prompt_sets().items():
        (tmp_path / "data" / name).mkdir()
        for file in row["files"]:
            (tmp_path / "data" / name / file).write_text('{"prompt": "a sign"}\n' * 1024)
    for name, line in {
        "pairs/pairs": '{"prompt": "a sign", "win": "sign.png", "lose": "sign.png"}\n',
        "signs/samples": '{"prompt": "a sign", "sample": "sign.png"}\n',
    }.items():
        file = tmp_path / "data" / f"{name}.jsonl"
        file.parent.mkdir()
        Image.new("RGB", (96, 32)).save(file.parent / "sign.png")
        file.write_text(line * 64)
    return SimpleNamespace(folder=tmp_path, url=bright_url, monkeypatch=monkeypatch, capfd=capfd)


def check_make(words, place):
    """The target exists."""
    subprocess.run(["make", "-n", *words[words.index("make") + 1 :]], cwd=REPO, check=True, capture_output=True)


def check_server(words, place):
    """The server takes all flags and knows the scorers; what it then does is what tests/reward does with it."""
    args = cli.build_parser().parse_args(words[3:])
    cli.read_options(args.option)
    if args.scorer.startswith("rules:"):
        assert open_rules(args.scorer.removeprefix("rules:"))
        return
    named = [spec for spec in parse(args.scorer).specs.values() if not spec.startswith("python:")]
    assert {spec.removeprefix("frames:") for spec in named} <= set(SCORERS)


def check_verify(words, place):
    """It has the scorer; tests/reward/test_reward_verify.py runs it."""
    assert words[words.index("--scorer") + 1] in SCORERS
    source = (REPO / "packages/omni-reward/src/omni_reward/scorers/published.py").read_text("utf-8")
    assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == []


def check_trainer(words, place):
    """A dry run on as many ranks; of a model on the hub, and of an engine, only the settings are checked."""
    script = next(word for word in words if word.startswith("apps/"))
    app = importlib.import_module(Path(script).stem)
    ranks = int(words[words.index("--nproc-per-node") + 1]) if "torchrun" in words else 1
    flags = [place.url if word.startswith("http:") else word for word in words[words.index(script) + 1 :]]
    place.monkeypatch.setattr(rules, "find_spec", lambda name: True)
    if "--init-weights" in words:
        write_weights(Path(words[words.index("--init-weights") + 1]))
    if "--teachers" in words:
        write_weights(Path(words[words.index("--teachers") + 1].partition("=")[2]))
    with place.monkeypatch.context() as patch:
        for name, number in (("WORLD_SIZE", ranks), ("RANK", 0)) if ranks > 1 else ():
            patch.setenv(name, str(number))
        args = parse_cli(app.Args, app.check_args, [*flags, "--dry-run"], app=app.__name__)
    if not args.policy.model.startswith("checkpoints/") or args.sampling.engine != "diffusers":
        return
    if ranks > 1:
        with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):  # a dry run leaves nothing
            trainer_runs.train_on_ranks(app, args, ranks=ranks)
    else:
        app.main(args, World.join(args))
    assert f"plan: ranks: {ranks}, " in place.capfd.readouterr().out


def write_weights(folder, model=CHECKPOINT):
    """Weights as a trainer writes them, beside the settings of the recipe that the run is named after."""
    folder.parent.mkdir(parents=True)
    for recipe in REPO.glob(f"recipes/*/{folder.parent.name}.toml"):
        (folder.parent / "config.toml").write_text(recipe.read_text("utf-8"))
    net = open_model(model).load(device="cpu", dtype=torch.float32).net
    save_weights(net, folder, trainer_runs.place())


def check_sample(words, place):
    """A picture from weights as a trainer writes them; of a model on the hub, only the settings are checked."""
    if "--weights" in words:
        model = words[words.index("--model") + 1]
        write_weights(
            Path(words[words.index("--weights") + 1]), model if model.startswith("checkpoints/") else CHECKPOINT
        )
    args = parse_cli(sample.Args, sample.check_args, words[2:], app="sample")
    if args.model.startswith("checkpoints/"):
        sample.main(change(args, num_images=1, num_inference_steps=2))
        assert Path(args.out or "sheet.png").is_file() or args.out_dir
        assert not args.out_dir or (Path(args.out_dir) / "samples.jsonl").is_file()


def check_command(words, place):
    """The program that it stands for can start so."""
    if "mine.toml" in words:
        (place.folder / "mine.toml").write_text(load_recipes("train_flowgrpo")["tiny-signs"])
    started = [word.removeprefix(f"{REPO}/") for word in python_args(words[1:])]
    start = ["torchrun", "--standalone", *started[2:]] if "omni_rl.run.ranks" in started else ["python", *started]
    next(rule for form, rule in RULES.items() if re.match(form, f"{' '.join(start)} "))(start, place)


def check_loop(words, place):
    """A loop of the shell, whose body can start."""
    variable, value, body = words[1], words[3], words[words.index("do") + 1 : -1]
    check_command([word.rstrip(";").replace(f"${variable}", value) for word in body], place)


def check_prompts(words, place):
    """The sets are there; tests/rl/test_rl_prompt_sets.py fetches some, from a server of its own. Edits are written."""
    if "edit" not in words:
        assert {*words[2:]} <= {*prompt_sets()}
        return
    folder = Path(words[words.index("--images") + 1])
    folder.mkdir()
    for name in ("street", "house"):
        Image.new("RGB", (96, 64), "red" if name == "house" else "blue").save(folder / f"{name}.jpg")
        (folder / f"{name}.txt").write_text("make it night\n")
    prompts.main(words[2:])
    assert Path("data/edit/test.jsonl").is_file()


def check_lora(words, place):
    """It runs, on a file of the shipped model that is in diffusers' names."""
    source, target = words[2:4]
    net = open_model(CHECKPOINT).load(device="cpu", dtype=torch.float32).net
    add_lora(net, ["attn.to_q"], rank=2, alpha=2, seed=0)
    save_weights(net, place.folder / "weights", trainer_runs.place())
    (place.folder / "weights" / LORA_FILE).rename(place.folder / source)
    lora.main([str(place.folder / source), str(place.folder / target), "--model", str(CHECKPOINT)])
    assert (place.folder / target / LORA_FILE).is_file()


def check_tool(words, place):
    """The tool says what is here; nothing is fetched or uploaded."""
    with pytest.raises(SystemExit, match=r"^0$"):
        importlib.import_module(python_args(words[1:])[1]).main(words[2:])


def check_report(words, place):
    """The page is written, of runs that a test makes; or the server is bound, and asked by its own tests."""
    place.monkeypatch.setattr(LiveServer, "run", lambda self, sockets: None)
    for name in ("a", "b", "first", "tiny-signs", "demo"):
        write_run(place.folder / "runs" / name)
    write_report(words[3:])


def check_score(words, place):
    """A drawn sign is scored, and has all that the prompt asks for."""
    image = Image.new("RGB", (320, 120), (0, 0, 255))
    ImageDraw.Draw(image).text((40, 20), "K7QX", fill="white", font=ImageFont.load_default(72))
    image.save("sign.png")
    score.main(words[2:])
    assert json.loads(place.capfd.readouterr().out)["score"] == 1.0


def check_script(words, place):
    """The script is there, it or a module beside it has the flags, and a test knows it."""
    script = next(number for number, word in enumerate(words) if word.endswith(".py"))
    path = REPO / words[script]
    source = "".join(file.read_text("utf-8") for file in path.parent.glob("*.py"))
    assert path.is_file()
    for flag in (word for word in words[script:] if word.startswith("--")):
        assert flag in source or f"{flag[2:].replace('-', '_')}:" in source, flag
    assert re.search(rf"\b{path.stem}\b", TESTS), f"no test knows {path.name}"


def check_pytest(words, place):
    """The tests are there."""
    path = next(word for word in words if word.startswith("tests/"))
    assert (REPO / path).exists()
    if "-k" in words:
        assert words[words.index("-k") + 1] in (REPO / path).read_text("utf-8")


def check_docker(words, place):
    """The file exists; nothing here has a daemon to build it."""
    (image,) = (word for word in words if word.startswith("omni-rl:"))
    assert (REPO / f"docker/{image.partition(':')[2]}.Dockerfile").is_file()
    if "make" in words:
        check_make(words[words.index("make") :], place)


def check_cluster(words, place):
    """The script is there; tests/train/test_train_restarts.py runs its command."""
    (path,) = (word for word in words if word.startswith("scripts/cluster/"))
    assert (REPO / path).is_file()


def check_elsewhere(words, place):
    """Nothing of ours: programs of others, or of the shell."""


RULES = {  # how a command begins -> what runs it
    r"(UV_FIND_LINKS=\S+ )?make \S+": check_make,
    r"python -m omni_reward\.server ": check_server,
    r"python -m omni_reward\.verify ": check_verify,
    r"omni-rl (train|sample|serve|report) ": check_command,
    r"omni-rl doctor": check_tool,
    r"omni-rl prompts": check_prompts,
    r"omni-rl lora ": check_lora,
    r"omni-rl score ": check_score,
    r"for \w+ in ": check_loop,
    r"(python|\S+/bin/python|torchrun .*) apps/train_\w+\.py": check_trainer,
    r"python apps/sample\.py": check_sample,
    r"python -m omni_rl\.report ": check_report,
    r"(python|\S+/bin/python|uv run( --with \S+)?) (scripts|benchmarks|tests/emulated)/\S+\.py": check_script,
    r"python apps/variants/\w+\.py": check_script,
    r"scripts/env pytest ": check_pytest,
    r"docker (build|run) ": check_docker,
    r"(sbatch|kubectl apply -f|HEAD_NODE=\S+ .*) scripts/cluster/": check_cluster,
    r"(git clone|vllm serve|source) ": check_elsewhere,
}


@pytest.mark.parametrize("command", sampled(COMMANDS, 10))
def test_a_command(place, command):
    rule = next((rule for start, rule in RULES.items() if re.match(start, command)), None)
    assert rule, f"nobody runs {command!r}"
    rule(COMMANDS[command], place)


@pytest.mark.parametrize("page", sorted(page for page, text in PAGES.items() if re.search("```(python|json)", text)))
def test_code_is_run_by_a_test(page):
    assert page in CODE, f"nobody runs the code of {page}"
    assert Path(page).name in (REPO / CODE[page]).read_text("utf-8")


def test_settings_of_the_docs_are_settings():
    for text in [text for page in PAGES for language, text in blocks(page) if language == "toml"]:
        from_toml(text, MediaArgs, "docs")


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_reward_of_a_page_is_a_score_function(page):
    ((_, code),) = [block for block in blocks(page) if block[0] == "python"]
    names = {}
    exec(code, names)
    image = torch.full((2, 4, 4, 3), 51, dtype=torch.uint8).numpy()
    assert names["score"]({"image": image}, ["a", "b"], [{}, {}]) == pytest.approx([0.2, 0.2])
