"""Evaluations on several sets, each with its settings and scorer, and evaluations alone, which train nothing."""

import json
import tomllib
from pathlib import Path

import build_tiny_models
import pytest
from helpers import REPO
from omni_reward import Score, Scorer
from omni_reward.serving import serving_in_thread
from omni_rl.report.data import charts, run_data
from omni_rl.run.metrics import NUM_EVALS
from omni_rl.run.world import World
from omni_rl.settings.eval_sets import MediaEvalSet, TokenEvalSet
from omni_rl.settings.fields import change
from omni_train.files import load_metrics, read_jsonl
from trainer_runs import WORDS, evaluate, recipe, tiny, train

import train_flowgrpo as app
import train_gspo

TINY = tiny(
    recipe(app, "tiny-signs"), algo="flowgrpo", noise_level=0.7, window_low=0, window_high=None, prompts_per_step=2,
    group_size=4, batch_size=4, lr=1e-3, optim_lr_scheduler_type="constant", save_every=1, lora_rank=4, lora_alpha=8,
)  # fmt: skip


def scores_of(line):
    return {name: value for name, value in line.items() if name.startswith("eval/")}


def test_an_evaluation_may_take_fewer_prompts_and_leave_out_the_first(here, bright_url, capfd):
    args = change(TINY, name="run", scorer_url=bright_url, eval_first=False, eval_num_prompts=2, eval_every=1)
    lines = train(app, args, report=True)
    assert ["eval/reward" in line for line in lines] == [False, True, True]
    assert "held-out, base" not in Path("runs/run/weights/README.md").read_text()
    assert len(run_data(Path("runs/run"))["prompts"]) == 2
    capfd.readouterr()
    for most, used in ((2, 2), (4, 3)):  # of the file's 3: the setting is a limit
        planned = change(args, eval_num_prompts=most, dry_run=True, name="plan")
        app.main(planned, World.join(planned))
        told = capfd.readouterr().out
        assert f"evaluations: 2, each of {used} samples, which takes" in told


TOLD = f"ALARM after step {NUM_EVALS}: The held-out score has not risen after {NUM_EVALS} evaluations ("


@pytest.mark.parametrize("rise", [0.0, 0.1])
def test_a_held_out_score_that_does_not_rise_is_told_in_the_terminal_and_in_the_report(here, capfd, rise):
    """Of a scorer whose evaluation scores rise so much from one to the next, whatever is drawn."""
    count = iter(range(100))

    def score(media, prompts, meta):
        if any(word in prompt for prompt in prompts for word in WORDS):  # of the evaluation
            level = 0.2 + rise * next(count)
            return [level + 0.05 * i for i in range(len(prompts))]
        return [float(image.mean()) for image in media["image"]]

    with serving_in_thread(score) as url:
        lines = train(app, change(TINY, scorer_url=url, name="run", train_steps=NUM_EVALS, eval_every=1), report=True)
    assert [round(line["eval/reward_stderr"], 4) for line in lines] == [0.0289] * (NUM_EVALS + 1)  # 0.05 / 3 ** 0.5
    told = [alarm["title"] for alarm in run_data(Path("runs/run"))["alarms"] if "held-out" in alarm["title"]]
    assert len(told) == capfd.readouterr().err.count(TOLD) == (rise == 0)


@pytest.mark.parametrize("unit", [1.0, 1e-9])
def test_a_reward_in_a_small_unit_is_told_and_its_scores_keep_their_digits(here, capfd, unit):
    """It teaches next to nothing: an epsilon drowns its deviation, and Adam's the gradient."""

    def score(media, prompts, meta):
        return [unit * float(image.mean()) / 255 for image in media["image"]]

    with serving_in_thread(score) as url:
        lines = train(app, change(TINY, scorer_url=url, name="run", train_steps=2), report=True)
    titles = [
        "The rewards differ by less than the epsilon of advantages",
        "Gradients are smaller than Adam's epsilon",
    ]
    shares = [[line[name] for line in lines[1:]] for name in ("advantage/eps_share", "policy/eps_share")]
    printed = capfd.readouterr()
    for title, found in zip(titles, shares, strict=True):
        assert [share > 0.5 for share in found] == [unit < 1] * 2
        assert printed.err.count(f"ALARM after step 1: {title} (") == (unit < 1)
    told = {alarm["title"] for alarm in run_data(Path("runs/run"))["alarms"]}
    assert (set(titles) <= told) == (unit < 1)
    ends, form = [lines[end]["eval/reward"] for end in (0, -1)], ".3f" if unit == 1 else ".5g"
    assert f"held-out score {ends[0]:{form}} -> {ends[1]:{form}};" in printed.out


def test_each_set_has_its_settings_its_scorer_and_its_score(here, bright_url, capfd):
    with serving_in_thread(lambda media, prompts, meta: [-1.0 for _ in prompts], name="minus") as minus:
        sets = (
            MediaEvalSet("same", "eval.txt"),
            MediaEvalSet("few", "eval.txt", num_prompts=2, samples_per_prompt=3, pass_threshold=0.5, seed=7),
            MediaEvalSet("minus", "eval.txt", num_inference_steps=3, height=64, width=64, scorer_url=minus),
        )
        args = change(TINY, scorer_url=bright_url, eval_sets=sets, name="first")
        lines = train(app, args, report=True)
        for line in (lines[0], lines[-1]):
            assert line["eval/same/reward"] == line["eval/reward"]
            assert line["eval/few/best@3"] > line["eval/few/reward"]
            assert {"eval/few/pass@1", "eval/few/pass@2", "eval/few/pass@3"} < line.keys()
            assert line["eval/minus/reward"] == -1.0
        printed = capfd.readouterr().out
        assert "eval/minus/reward=-1" in printed
        assert "minus -1.000 -> -1.000; report, weights and metrics in runs/first" in printed
        data = run_data(Path("runs/first"))
        assert list(charts([data])[0]["lines"])[2:] == ["eval/few/reward", "eval/minus/reward", "eval/same/reward"]
        prompts = [prompt["text"] for prompt in data["prompts"]]
        assert {text.partition(":")[0] for text in prompts} >= {"same", "few", "minus"}
        card = Path("runs/first/weights/README.md").read_text()
        (start,) = read_jsonl(Path("runs/first/versions.jsonl"))
        assert f"```\n{start['command']}\n```" in card  # with what started it, and its number of ranks
        assert "held-out, minus" in card
        assert "| lora.rank | 4 |" in card
        assert "| profile |" not in card  # as by default
        assert tomllib.loads(Path("runs/first/config.toml").read_text())["eval"]["sets"][2]["scorer_url"] == "..."

        train(app, change(args, eval_only=True), report=True)
        (line,) = load_metrics(Path("runs/first/eval-000002/metrics.jsonl"))
        assert scores_of(line) == scores_of(lines[-1])
        assert Path("runs/first/eval-000002/report.html").is_file()
        assert "held-out score" in capfd.readouterr().out
    assert load_metrics(Path("runs/first/metrics.jsonl")) == lines
    goes_on = train(app, change(args, eval_sets=(), train_steps=3))
    assert len(goes_on) == 4


def test_prompts_with_tags_get_the_mean_of_each_part_by_tag_and_over_tags(here, capfd):
    """As GenEval's: four samples of a prompt, of which a tag has one prompt and the other two."""
    tags = ["counting", "colors", "colors"]
    lines = [{"prompt": f'a sign "{i}"', "tag": tag, "include": []} for i, tag in enumerate(tags)]
    Path("tagged.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def score(media, prompts, meta):
        right = [
            float(own["tag"] == "counting" or prompt == 'a sign "1"') for own, prompt in zip(meta, prompts, strict=True)
        ]
        return [Score(0.5 * value, parts={"correct": value}) for value in right]

    with serving_in_thread(score, name="tagged") as url:
        settings = {"eval_prompts": "tagged.jsonl", "eval_samples_per_prompt": 4, "eval_pass_threshold": 0.5}
        line = evaluate(app, change(TINY, scorer_url=url, name="run", **settings))
    wanted = {"counting": 1.0, "colors": 0.5, "tags": 0.75}
    assert {name: line[f"eval/correct/{name}"] for name in wanted} == wanted
    assert [line[f"eval/{name}"] for name in ("correct", "pass@1", "pass@4")] == pytest.approx([2 / 3] * 3)


def test_token_policies_are_evaluated_on_sets_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(f'{{"prompt": "say {i}", "pattern": "[a-zA-Z]"}}\n' for i in range(4)))
    Path("own.jsonl").write_text('{"prompt": "say 0", "unit": 2.0}\n')  # what this set's scorer alone asks for

    def score(media, prompts, meta):
        return [own["unit"] * len(text) for own, text in zip(meta, media["text"], strict=True)]

    length = Scorer(score, media=("text",))
    with serving_in_thread(length, name="length") as url:
        sets = (
            TokenEvalSet("more", "a.jsonl", samples_per_prompt=4, temperature=1.5, top_p=1.0),
            TokenEvalSet("length", "own.jsonl", scorer_url=url),
        )
        args = change(
            train_gspo.Args(),
            model=str(build_tiny_models.tiny_checkpoint("qwen3", REPO / ".pytest_cache" / "tiny-models")),
            prompts="a.jsonl", prompts_per_step=2, group_size=4, batch_size=4, max_new_tokens=5, reward="regex",
            eval_prompts="a.jsonl", eval_pass_threshold=1.0, eval_sets=sets,
        )  # fmt: skip
        line = evaluate(train_gspo, args)
        assert line["eval/pass@1"] == line["eval/reward"]
        assert line["eval/more/best@4"] >= line["eval/more/pass@1"]
        assert line["eval/length/reward"] >= 0.0
        Path("b.jsonl").write_text('{"prompt": "no pattern"}\n')
        bad = change(args, eval_sets=(TokenEvalSet("bad", "b.jsonl"),), eval_only=True)
        with pytest.raises(ValueError, match=r"^eval\.sets\[1\].prompts: b.jsonl, line 1: .*pattern"):
            train_gspo.main(bad, World.join(bad))
