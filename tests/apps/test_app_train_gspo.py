"""The trainer of policies over tokens: steps of every algorithm, tools, media, exports, servers, plans."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import build_tiny_models
import numpy as np
import pytest
import torch
from helpers import REPO, sampled, ulps
from omni_losses import group_advantages, token_weights
from omni_reward import Score, Scorer
from omni_reward.serving import serving_in_thread
from omni_rl.flow.tokens import TokenBatch, pack
from omni_rl.run import start, texts
from omni_rl.run.failures import launch
from omni_rl.run.run import Step
from omni_rl.run.world import World
from omni_rl.settings.eval_sets import TokenEvalSet
from omni_rl.settings.fields import change, values_of
from omni_rl.tools import plan, plan_tokens
from omni_rollout import Prompt
from omni_rollout.models.tokens import open_token_model
from omni_rollout.tokens import TokenParams, TokenTrajectory, score_tokens
from omni_train.files import load_metrics
from omni_train.lora import add_lora
from omni_train.prompts.files import PromptRecord, load_prompts
from omni_train.weights.adapters import load_adapter
from PIL import Image
from row_runs import write_chats
from trainer_runs import (
    assert_same_weights,
    exported,
    keep_gradients,
    place,
    recipe,
    scored,
    train,
    train_on_ranks,
    unclocked,
    undocumented,
)

import train_gspo as app

TINY = change(
    app.Args(), prompts="train.jsonl", eval_prompts="eval.jsonl", eval_every=2, prompts_per_step=2, group_size=4,
    batch_size=4, max_new_tokens=5, train_steps=2, save_every=1, lr=1e-3, reward="regex", hang_timeout_s=60.0,
)  # fmt: skip


def checkpoint(name):
    return str(build_tiny_models.tiny_checkpoint(name, REPO / ".pytest_cache" / "tiny-models"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with prompts that a model of random weights answers well at times, some of them with media."""
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path)
    return tmp_path


def tiny(kind="qwen3", /, **changes):
    return change(TINY, **({"model": checkpoint(kind)} | changes))


def alone(args):
    """What the steps of a run look at that has no net."""
    return SimpleNamespace(args=args, dist=place(), phase=lambda name: nullcontext(), score_parts=())


@pytest.mark.parametrize("algo", sampled(app.ALGOS, 2))
def test_every_algorithm_trains_and_its_ratio_is_one_before_the_first_update(algo, here):
    lines = train(app, tiny(algo=algo, num_minibatches=2, kl_coef=0.1, rounds=3))
    assert [line["policy/first_ratio_max_dev"] for line in lines[1:]] == [0.0, 0.0]
    gaps = [line["policy/rollout_gap"] for line in lines[1:]]
    assert 0 < max(gaps) < ulps(16, 16)  # log-probs are less than 16
    assert all(line["policy/grad_norm"] > 0 and line["policy/ratio_max_dev"] > 0 for line in lines[1:])
    assert lines[1]["policy/entropy"] == pytest.approx(np.log(266), rel=0.02)
    assert 1 <= lines[1]["answer/tokens_mean"] <= 5
    assert undocumented(lines) == set()


def test_iterations_are_a_plain_loop_with_the_log_probs_of_before_the_first_update(here, monkeypatch):
    """GSPO by hand (arXiv 2507.18071, eq. 5 to 7): three passes over two minibatches of one rollout."""
    moved, update = [], app.update

    def both(run, step, minibatches):
        params = run.policy.params
        start = [p.detach().clone() for p in params]
        metrics = update(run, step, minibatches)
        ours = [p.detach().clone() for p in params]

        def log_probs(batch):
            return score_tokens(run.model, run.policy.net, batch.trajectory).log_prob

        with torch.no_grad():
            torch._foreach_copy_(params, start)
            old = [[log_probs(batch) for batch in batches] for batches in minibatches]
        optimizer = torch.optim.AdamW(params, lr=1e-4, eps=1e-3, weight_decay=1e-4)  # rounding is no direction
        for m in run.minibatches(step, epochs=3):
            for batch, before in zip(minibatches[m], old[m], strict=True):
                mask = batch.trajectory.mask
                lengths = mask.sum(dim=1)
                ratio = ((log_probs(batch) - before).where(mask, 0.0).sum(dim=1) / lengths).exp()
                worst = torch.minimum(ratio * batch.advantages, ratio.clamp(0.98, 1.02) * batch.advantages)
                (-worst * batch.weights * lengths).sum().backward()
            if torch.nn.utils.clip_grad_norm_(params, run.args.optim.max_grad_norm):  # else all answers are clipped
                optimizer.step()
            optimizer.zero_grad()
        moved.extend((a - w, p.detach() - w) for a, p, w in zip(ours, params, start, strict=True))
        return metrics

    monkeypatch.setattr(app, "update", both)
    moves = {"lr": 1e-4, "optim.adam_epsilon": 1e-3, "clip_low": 0.02, "clip_high": 0.02}
    lines = train(app, tiny(num_iterations=3, num_minibatches=2, train_steps=1, **moves))
    assert lines[-1]["policy/first_ratio_max_dev"] == 0
    assert 0 < lines[-1]["policy/clip_fraction"] < 0.5
    assert max(theirs.abs().max() for _, theirs in moved) > 2e-4
    for ours, theirs in moved:
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


TOOL = "def look(text):\n    return 'ab'\n"


def most_common(here, monkeypatch, args):
    """The letter that answers of the first step have most often before their last token."""
    seen, update = [], app.update
    with monkeypatch.context() as patched:
        patched.setattr(app, "update", lambda run, *given: seen.extend(given[1]) or update(run, *given))
        train(app, change(args, name="before"))
    text = "".join(answer[:-1] for batches in seen for b in batches for answer in b.trajectory.answers)
    return max((c for c in text if c.isascii() and c.isalnum()), key=text.count)


def test_what_a_tool_says_is_in_no_loss(here, monkeypatch):
    """GRPO by hand: a mean over answers of the mean over the tokens that are sampled."""
    Path("tool.py").write_text(TOOL)
    plain = tiny(algo="grpo", train_steps=1, max_new_tokens=12, eval_every=1)
    mark, found, update = most_common(here, monkeypatch, plain), [], app.update

    def both(run, step, minibatches):
        ((batch, *others),) = minibatches
        result, loss, count = run.model.tokenize("[ab]"), 0.0, sum(map(len, (b.trajectory for b in (batch, *others))))
        for own in (batch, *others):
            log_prob = score_tokens(run.model, run.policy.net, own.trajectory).log_prob
            for row, tokens in enumerate(own.trajectory.tokens.tolist()):
                length, at = own.trajectory.lengths[row], list[int]()
                place = 0
                while place < length:
                    at.append(place)
                    calls = run.model.decode(torch.tensor(tokens[: place + 1])).endswith(mark)
                    place += 1 + len(result) * (calls and tokens[place] not in run.model.ends)
                loss = loss - own.advantages[row] * log_prob[row, at].mean() / count
        grads = torch.autograd.grad(loss, run.policy.params, allow_unused=True)
        kept = keep_gradients(run)
        metrics = update(run, step, minibatches)
        found.append((kept[0], grads, sum(b.trajectory.forced.sum().item() for b in (batch, *others))))
        return metrics

    monkeypatch.setattr(app, "update", both)
    lines = train(app, change(plain, tool_function="python:tool.py:look", tool_marks=f"? {mark} [ ]"))
    ((ours, wanted, forced),) = found
    assert forced >= 4
    largest = max(grad.abs().max() for grad in wanted if grad is not None)
    for own, grad in zip(ours, wanted, strict=True):
        if grad is not None:
            torch.testing.assert_close(own, grad, rtol=1e-3, atol=1e-4 * largest.item())
    assert lines[-1]["policy/first_ratio_max_dev"] == 0
    assert lines[-1]["policy/rollout_gap"] < 1e-4


def test_a_tool_that_has_changed_does_not_continue_a_run(here):
    Path("tool.py").write_text(TOOL)
    args = tiny(tool_function="python:tool.py:look", train_steps=1, eval_every=1)
    train(app, args)
    Path("tool.py").write_text(TOOL.replace("ab", "ba"))
    with pytest.raises(ValueError, match="has other contents than at the start"):
        train(app, change(args, train_steps=2))


@pytest.mark.slow
def test_a_net_of_random_weights_learns_to_call_a_tool(here, monkeypatch):
    Path("tool.py").write_text(TOOL)
    for name in ("train", "eval"):
        lines = [{"prompt": f"say {i}", "pattern": r".*\[ab\].*"} for i in range(8)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plain = tiny(
        max_new_tokens=8, train_steps=40, group_size=32, batch_size=64, prompts_per_step=2, eval_every=40, lr=3e-3
    )
    lines = train(app, change(plain, tool_function="python:tool.py:look", tool_marks="? e [ ]"))
    assert lines[0]["eval/reward"] < 0.3
    assert lines[-1]["eval/reward"] > 0.5  # 0.75 to 1, by processor


def test_a_model_of_all_media_trains_with_adapters_and_recomputation_as_without(here):
    """The thinker with pictures, sound and video in its prompts, and a report that shows them with the answers."""
    args = tiny("qwen3-omni", prompts="train-seen.jsonl", eval_prompts="eval-seen.jsonl", lora_rank=2, lora_alpha=4)
    args = change(args, prompts_per_step=4, batch_size=8, lr=1e-2, tokens_per_batch=120)
    plain = train(app, change(args, name="plain"), report=True)
    again = train(app, change(args, name="again", memory_gradient_checkpointing=True))
    assert unclocked(plain) == unclocked(again)
    rows = json.loads(Path("runs/plain/eval/000002/rows.json").read_text())[:4]  # others fill up
    assert [bool(row.get("sound")) for row in rows] == [False, False, True, False]
    assert [bool(row.get("strip")) for row in rows] == [False, False, False, True]
    assert [bool(row["file"]) for row in rows] == [False, True, True, True]
    page = Path("runs/plain/report.html").read_text()
    assert all(json.dumps(row["prompt"])[1:-1] in page for row in rows)
    assert '"answer"' in page


def test_media_are_given_in_the_type_that_the_model_computes_in(here):
    args = tiny("qwen3-omni", prompts="train-seen.jsonl", prompts_per_step=4, train_steps=1, lora_rank=2)
    lines = train(app, change(args, dtype="bfloat16", memory_base_dtype="nf4", memory_gradient_checkpointing=True))
    assert lines[1]["policy/first_ratio_max_dev"] == 0
    assert lines[1]["policy/rollout_gap"] < 0.5  # 0 where a cache rounds as scoring does


def test_full_weights_open_in_transformers_as_the_thinker_and_as_the_whole_model(here):
    from peft import PeftModel
    from transformers import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeThinkerForConditionalGeneration

    args = tiny("qwen3-omni")
    train(app, args)
    assert all(name.startswith("thinker.") for name in exported())
    found = []
    for kind in (Qwen3OmniMoeThinkerForConditionalGeneration, Qwen3OmniMoeForConditionalGeneration):
        net, told = kind.from_pretrained("runs/run/weights", output_loading_info=True)
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
        found.append(getattr(net, "thinker", net).state_dict())
    base = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(args.policy.model).state_dict()
    moved = {name for name in base if not torch.equal(found[0][name], base[name])}
    assert all(torch.equal(found[0][name], found[1][name]) for name in base)
    assert any("experts" in name for name in moved)
    assert not any(name.startswith(("visual", "audio_tower")) for name in moved)
    next_args = change(args, name="next", model="runs/run/weights", lora_rank=2, train_steps=1, eval_every=1)
    lines = train(app, next_args)
    assert all(name.startswith("base_model.model.thinker.model.layers.") for name in exported("next"))
    assert len(PeftModel.from_pretrained(net, "runs/next/weights").peft_config["default"].target_modules) == 8
    before = load_metrics(Path("runs/run/metrics.jsonl"))
    assert lines[0]["eval/reward"] == before[-1]["eval/reward"]


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_an_adapter_opens_in_transformers_and_begins_another_run(here, use_dora):
    from peft import PeftModel
    from transformers import Qwen3ForCausalLM

    args = tiny(lora_rank=2, lora_alpha=8, lora_use_dora=use_dora, lr=1e-2)
    lines = train(app, args)
    other = train(app, change(args, name="next", init_weights="runs/run/weights", train_steps=0))
    assert other[0]["eval/reward"] == lines[-1]["eval/reward"]
    base = Qwen3ForCausalLM.from_pretrained(args.policy.model)
    ids = torch.arange(8)[None]
    plain = base(ids).logits
    tuned = PeftModel.from_pretrained(base, "runs/run/weights")(ids).logits
    assert (tuned - plain).abs().max() > 1e-4
    loaded = Qwen3ForCausalLM.from_pretrained(args.policy.model)
    loaded.load_adapter("runs/run/weights")
    torch.testing.assert_close(loaded(ids).logits, tuned)
    net = open_token_model(args.policy.model).load_net(device="cpu", dtype=torch.float32)
    add_lora(net, open_token_model(args.policy.model).LORA_TARGETS, rank=2, alpha=2, seed=0, use_dora=use_dora)
    load_adapter(net, "runs/run/weights", part="")
    torch.testing.assert_close(net(ids).logits, tuned)
    assert "from transformers import AutoModel" in Path("runs/run/weights/README.md").read_text()


def test_adapters_of_experts_train_on_ranks_open_in_transformers_and_begin_another_run(here):
    from peft import PeftModel
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

    args = tiny("qwen3-omni", lora_rank=2, lora_alpha=8, lr=1e-2, batch_size=2, train_steps=1, eval_every=1)
    args = change(args, lora_targets="self_attn.q_proj", dtype="float32")
    args = change(args, lora_target_parameters="mlp.experts.gate_up_proj,mlp.experts.down_proj")
    plain = train(app, args)
    assert plain[1]["policy/first_ratio_max_dev"] == 0
    again = train(app, change(args, name="again", memory_gradient_checkpointing=True))
    assert unclocked(plain) == unclocked(again)
    for mode in ("ddp", "fsdp2"):
        train_on_ranks(app, change(args, name=mode, sharding_mode=mode, sharding_unshard="none"))
        assert_same_weights("run", mode)
    other = train(app, change(args, name="next", init_weights="runs/run/weights", train_steps=0))
    assert other[0]["eval/reward"] == plain[-1]["eval/reward"]
    base = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(args.policy.model)
    ids = torch.arange(8)[None]
    before = base(ids).logits
    tuned = PeftModel.from_pretrained(base, "runs/run/weights")
    assert len([name for name, _ in tuned.named_parameters() if "experts" in name and ".lora_A" in name]) == 4
    assert (tuned(ids).logits - before).abs().max() > 1e-4
    net = open_token_model(args.policy.model).load_net(device="cpu", dtype=torch.float32)
    names = args.lora.target_parameters.split(",")
    add_lora(net, ["self_attn.q_proj"], parameters=names, rank=2, alpha=2, seed=0)
    load_adapter(net, "runs/run/weights", part="")
    torch.testing.assert_close(net(ids).logits, tuned(ids).logits)


def answers(lengths, first=0):
    """Answers of these lengths to prompts of three tokens."""
    count, most = len(lengths), max(lengths)
    mask = torch.arange(most) < torch.tensor(lengths)[:, None]
    return TokenTrajectory(
        prompts=tuple(Prompt("x", i, i, i) for i in range(first, first + count)), media={}, rates={}, weight_version=0,
        encoded=({"input_ids": torch.arange(3)},) * count, tokens=torch.ones(count, most, dtype=torch.long), mask=mask,
        forced=torch.zeros_like(mask),
        rollout_log_prob=torch.zeros(count, most), ended=torch.ones(count, dtype=torch.bool), answers=("",) * count,
        params=TokenParams(8),
    )  # fmt: skip


def test_batches_hold_the_kept_answers_once_within_their_bounds():
    run = alone(change(TINY, num_minibatches=2, batch_size=3, tokens_per_batch=24))
    keep = torch.tensor([True, True, False, True, True, True])
    minibatches = pack(run, [answers([2, 8, 1]), answers([5, 4, 3], first=3)], torch.arange(6.0), keep, mean="token")
    rows = [[batch.trajectory.indices.tolist() for batch in batches] for batches in minibatches]
    assert rows == [[[1, 3], [0]], [[4, 5]]]
    assert [batch.advantages.tolist() for batch in minibatches[0]] == [[1.0, 3.0], [0.0]]
    assert minibatches[0][0].weights.tolist() == token_weights(torch.tensor([2, 8, 5]), mean="token").tolist()[:2]
    assert minibatches[1][0].trajectory.tokens.shape == (2, 4)


def test_an_answer_that_only_fills_up_is_in_no_metric():
    values = {
        "kl": torch.tensor(torch.inf),
        "correction_ratio_max": torch.tensor(9.0),
        "correction_ratio_min": torch.tensor(0.1),
    }
    batches = [TokenBatch(answers([2]), torch.zeros(1), torch.zeros(1), by, by) for by in (0.0, 2.0)]
    filler, real = (batch.weigh(values) for batch in batches)
    assert filler == {"kl": 0.0, "correction_ratio_max": -torch.inf, "correction_ratio_min": torch.inf}
    assert real == {"kl": torch.inf, "correction_ratio_max": 9.0, "correction_ratio_min": pytest.approx(0.1)}


def test_a_forward_with_its_padding_is_within_its_bound():
    """A long prompt with a short answer and a short one with a long answer pad each other."""
    run = alone(change(TINY, batch_size=4, tokens_per_batch=36))
    drawn = replace(answers([2, 2, 9]), encoded=tuple({"input_ids": torch.arange(n)} for n in (9, 9, 2)))
    [batches] = pack(run, [drawn], torch.zeros(3), torch.ones(3, dtype=torch.bool), mean="token")
    assert [batch.trajectory.indices.tolist() for batch in batches] == [[0, 1], [2]]


def test_groups_that_differ_are_kept_up_to_a_steps_number_and_length_counts():
    """Four groups of two answers of at most 8 tokens, the first of which score alike; the last is one too many."""
    args = change(TINY, algo="dapo", group_size=2, max_new_tokens=8, overlong_tokens=4, mask_truncated=True)
    run, step = alone(args), Step(0)
    drawn = replace(answers([1, 2, 6, 4, 8, 3, 1, 1]), ended=torch.tensor([1, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool))
    rewards = torch.tensor([1.0, 1, 1, 0, 1, 0, 1, 0])
    prompts = [Prompt("x", i // 2, i, i) for i in range(8)]
    scores = [Score(value) for value in rewards.tolist()]
    advantages, keep = app.compute_advantages(run, step, scored(prompts, [drawn], scores))
    assert keep.tolist() == [False, False, True, True, False, True, False, False]
    wanted = group_advantages(torch.tensor([1.0, 1, 0.5, 0, 0, 0, 1, 0]), torch.arange(8) // 2, std="group")
    torch.testing.assert_close(advantages, wanted)
    assert step.metrics["answer/truncated_ratio"] == pytest.approx(1 / 8)


def test_an_abstention_asks_for_no_further_round_and_for_no_piece_of_another_group(monkeypatch):
    """Whole groups are counted and kept: the first two, one of which has a sample without a score."""
    args = change(TINY, algo="dapo", prompts_per_step=2, group_size=4, overlong_tokens=0, rounds=2)
    run, step = alone(args), Step(0)
    rewards = torch.tensor([1.0, 0, torch.nan, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1])
    records, asked = [PromptRecord(i, f"say {i}") for i in range(2)], []

    def answer(run, prompts, params):
        first = prompts[0].index
        asked.append(first)
        own = [Score.of(value) for value in rewards[first : first + len(prompts)].tolist()]
        return scored(prompts, [answers([2] * len(prompts), first=first)], own)

    monkeypatch.setattr("omni_rl.flow.tokens.sample_answers", answer)
    run.prompts, run.base_params = SimpleNamespace(at=lambda number: records), TokenParams(8)
    app.roll_out(run, step)
    assert (asked, step.metrics["reward/rounds"]) == ([0], 1)
    more = [Prompt("x", i // 4, i, i) for i in range(16)]
    scores = [Score.of(value) for value in rewards.tolist()]
    _, keep = app.compute_advantages(run, step, scored(more, [answers([2] * 16)], scores))
    assert keep.tolist() == [True, True, False, *[True] * 5, *[False] * 8]


def test_what_lies_after_the_end_has_no_part_in_the_kl():
    log_prob = torch.tensor([[-1.0, -200.0, -torch.inf]], requires_grad=True)
    kl = app.kl_penalty(log_prob, torch.tensor([[-2.0, -1.0, -torch.inf]]), torch.tensor([[True, False, False]]))
    kl.sum().backward()
    torch.testing.assert_close(kl.detach(), torch.tensor([[torch.e**-1, 0.0, 0.0]]))
    torch.testing.assert_close(log_prob.grad, torch.tensor([[1 - torch.e**-1, 0.0, 0.0]]))


def test_dynamic_sampling_draws_on_and_trains_on_groups_that_differ(here):
    train(app, tiny(algo="dapo", rounds=4, prompts_per_step=2, train_steps=1, eval_every=1))
    line = load_metrics(Path("runs/run/metrics.jsonl"))[-1]
    lines = [json.loads(text) | {"pattern": "never"} for text in Path("train.jsonl").read_text().splitlines()]
    Path("train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    silent = train(app, tiny(algo="dapo", rounds=3, train_steps=1, eval_every=1, name="silent"))[-1]
    assert 1 <= line["reward/rounds"] <= 4
    assert silent["reward/rounds"] == 3
    assert silent["reward/trained_ratio"] == 0
    assert "policy/grad_norm" not in silent


def test_steps_before_a_rule_that_fails_are_saved(here):
    Path("rule.py").write_text(
        "from pathlib import Path\ndef rule(answer, line):\n    log = Path('runs/run/metrics.jsonl')\n"
        "    return 1 / (2 - (len(log.read_text().splitlines()) if log.exists() else 0))\n"
    )
    words = "phase reward_wait: RewardError: scores of rank 0: a rule of --reward fails: ZeroDivisionError"
    with pytest.raises(RuntimeError, match=words):
        train(app, tiny(reward="python:rule.py:rule", save_every=10))
    assert [folder.name for folder in Path("runs/run/checkpoints").glob("*1")]


def has_letter(media, prompts, meta):
    """What the rule `regex` says of the prompts here."""
    return [float(re.search(line["pattern"], text) is not None) for text, line in zip(media["text"], meta, strict=True)]


def test_a_server_grades_as_a_rule_does_alone_and_beside_rules(here):
    """In requests of 3 answers at most, from the canary on; the same numbers to the bit."""
    sizes = []

    def score(media, prompts, meta):
        sizes.append(len(prompts))
        return has_letter(media, prompts, meta)

    args = tiny(train_steps=1, eval_every=1, scorer_batch_size=3)
    with serving_in_thread(Scorer(score, media=("text",)), name="letters") as url:
        local = train(app, change(args, name="local"))
        served = train(app, change(args, name="served", reward="", scorer_url=url))
        both = train(app, change(args, name="both", reward="0.5*scorer + 0.5*regex", scorer_url=url), report=True)
    assert unclocked(served) == unclocked(local) == unclocked(both)
    assert max(sizes) == 3
    assert sizes[0] == 2  # canaries
    details = [row["details"] for row in json.loads(Path("runs/both/eval/000001/rows.json").read_text())]
    assert all(each["scorer"] == each["regex"] for each in details)


def test_a_server_sees_the_images_of_a_prompt(here):
    seen = []

    def score(media, prompts, meta, references):
        seen.extend((line["pattern"], len(own)) for line, own in zip(meta, references, strict=True))
        return [0.0] * len(prompts)

    args = tiny("qwen2.5-vl", prompts="pictures.jsonl", eval_prompts="pictures.jsonl", train_steps=0, reward="")
    line = {"prompt": "x", "pattern": "a"}
    Path("pictures.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(line | {'images': 'picture.png'})}\n")
    with serving_in_thread(Scorer(score, media=("text",), references=True)) as url:
        train(app, change(args, scorer_url=url))
    assert seen == [("a", 1), ("a", 1), ("a", 0), ("a", 1)]  # canaries; a batch of two prompts, though four would fit


@pytest.mark.parametrize("on_failure", ["raise", "mask"])
def test_a_server_that_fails_ends_the_run_or_leaves_samples_out(on_failure, here):
    calls = []

    def score(media, prompts, meta):
        calls.append(1)
        if len(calls) > 3:
            raise KeyError("answer")
        return has_letter(media, prompts, meta)

    with serving_in_thread(Scorer(score, media=("text",))) as url:
        args = tiny(reward="", scorer_url=url, scorer_on_failure=on_failure, save_every=10)
        if on_failure == "mask":
            assert train(app, args)[2]["reward/abstained_ratio"] == 1
            return
        with pytest.raises(
            RuntimeError, match=r"phase reward_wait: RewardError: scores of rank 0: .* 500 scorer_failed"
        ):
            train(app, args)


def test_a_rule_that_has_changed_does_not_continue_a_run(here):
    Path("changed.py").write_text("def rule(answer, line):\n    return len(answer)\n")
    train(app, tiny(reward="python:changed.py:rule", train_steps=1, eval_every=1))
    Path("changed.py").write_text("def rule(answer, line):\n    return -len(answer)\n")
    with pytest.raises(ValueError, match=r"rules .*changed\.py"):
        train(app, tiny(reward="python:changed.py:rule", train_steps=2, eval_every=1))


def test_a_dry_run_finds_weights_that_would_be_gathered_for_every_token(here, monkeypatch):
    monkeypatch.setattr(start, "MAX_GATHERED", 1.0)
    with pytest.raises(ValueError, match=r"--sharding.mode fsdp2 would gather .* for every token"):
        app.main(tiny(sharding_mode="fsdp2", sharding_unshard="none", dry_run=True), World(place()))


PLANNED = {"dry_run": True, "memory_device_gb": 1.0}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-omni"])
def test_a_plan_of_long_answers_follows_from_a_few_of_their_tokens(kind, here, monkeypatch):
    args = tiny(kind, max_new_tokens=40, **PLANNED)
    few = plan.measure(app.main, args, 1)
    monkeypatch.setattr(plan_tokens, "SAMPLED", 40)
    whole = plan.measure(app.main, args, 1)
    assert few.flops == whole.flops
    assert few.tokens == whole.tokens
    for name, peak in whole.peaks.items():
        assert few.peaks[name] == pytest.approx(peak, rel=0.01), name


def test_an_answer_is_planned_with_its_end_on_no_token_and_scores_that_differ(here, capsys):
    """Of DAPO, which samples until groups differ, on prompts with media, with a reference and minibatches."""
    seen = {"prompts": "train-seen.jsonl", "eval_prompts": "eval-seen.jsonl", "lora_rank": 2, "kl_coef": 0.1}
    args = tiny("qwen3-omni", **seen, **PLANNED, algo="dapo", num_minibatches=2, memory_gradient_checkpointing=True)
    with pytest.raises(SystemExit) as ended:
        launch(app.main, args)
    assert ended.value.code == 0
    told = capsys.readouterr().out
    [tokens] = re.findall(r"and their tokens: rollout 8 of (\d+), update 24 of (\d+)\n", told)
    assert int(tokens[1]) == int(tokens[0]) + 1  # the last one is scored, and nothing is sampled after it
    assert re.search(r"^plan: fits --memory.device-gb 1, with ", told, re.MULTILINE)


@pytest.mark.parametrize("sharding", [{}, {"sharding_mode": "fsdp2", "sharding_unshard": "all"}])
def test_a_plan_that_does_not_fit_tries_no_weights_that_are_gathered_for_every_token(sharding):
    args = tiny(**sharding, **PLANNED, lora_rank=2, prompts_per_step=16)
    rungs = [changed for changed, *_ in plan.propose_changes(args, 2, ["optimizer", "activations"], ["update"])]
    assert {rung.sharding.unshard for rung in rungs if sharding or rung.sharding.mode == "fsdp2"} == {"rollout"}
    assert rungs[-1].sharding.mode == "fsdp2"


def test_an_answer_without_an_end_moves_nothing_where_it_is_masked(here):
    """Neither by its advantage nor by the KL: with no other answer there is no optimizer step."""
    Path("length.py").write_text("def rule(answer, line):\n    return len(answer)\n")
    args = tiny(mask_truncated=True, kl_coef=1.0, max_new_tokens=1, reward="python:length.py:rule", train_steps=1)
    masked = train(app, change(args, eval_every=1))
    assert masked[1]["answer/truncated_ratio"] > 0
    assert masked[1]["reward/trained_ratio"] <= 1 - masked[1]["answer/truncated_ratio"]


def test_a_video_that_vllm_would_refuse_is_named_before_the_run(here, monkeypatch):
    monkeypatch.setattr("omni_rl.settings.token_args.find_spec", {"vllm": True}.get)
    with Image.open("film.webp") as film:
        film.save("film.webp", save_all=True, duration=310, lossless=True)
    seen = {"prompts": "train-seen.jsonl", "eval_prompts": "eval-seen.jsonl"}
    with pytest.raises(ValueError, match=r"line 4: .* a video's 2 / fps must be whole for vLLM, got 15\.5"):
        train(app, tiny("qwen3-omni", **seen, engine="vllm"))


def test_settings_of_vllm_are_refused_where_they_do_not_fit(here, monkeypatch):
    found = {"vllm": None}
    monkeypatch.setattr("omni_rl.settings.token_args.find_spec", found.get)
    for changes, words in [
        ({"engine": "vllm"}, "--engine vllm must be installed: pip install"),
        ({"rollout_correction": "token_mask"}, "--rollout-correction needs --engine vllm"),
    ]:
        with pytest.raises(ValueError, match=words):
            app.check_args(tiny(**changes))
    found["vllm"] = True
    for changes, words in [
        ({"algo": "gspo", "rollout_correction": "token_mask"}, "must be of a sequence for gspo, got token_mask"),
        (PLANNED, "--memory.device-gb plans the embedded engine only, got --engine vllm"),
        ({"temperature": 2.5}, r"those of eval must be from 0.01 to 2 for vllm, got \[2.5, 1.0\]"),
        ({"eval_temperature": 0.005}, "must be from 0.01 to 2 for vllm"),  # which it would draw as 0.01
        ({"eval_sets": (TokenEvalSet("a", "train.jsonl", temperature=3.0),)}, "must be from 0.01 to 2 for vllm"),
        (
            {"memory_base_dtype": "nf4", "lora_rank": 2, "memory_gradient_checkpointing": True},
            "needs the embedded engine",
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            app.check_args(tiny(engine="vllm", **changes))
    settled = [app.resolve_auto(tiny(engine="vllm", algo=algo)) for algo in ("gspo", "grpo")]
    assert [args.rollout_correction for args in settled] == ["sequence_truncate", "token_truncate"]
    assert app.resolve_auto(tiny()).rollout_correction == "off"
    assert [app.resolve_auto(tiny(engine=e)).ratio_tolerance for e in ("vllm", "transformers")] == [1e-3, 1e-4]
    assert app.resolve_auto(tiny(engine="vllm", dtype="bfloat16")).ratio_tolerance == torch.inf


def test_vllm_has_room_for_the_longest_answers_of_all_evaluation_sets(monkeypatch):
    monkeypatch.setattr("omni_rollout.engines.vllm.VllmEngine", lambda model, **settings: settings)
    sets = (TokenEvalSet("a", "a.txt", max_new_tokens=30), TokenEvalSet("b", "b.txt"))
    for most, wanted in [(48, 78), (0, 0)]:
        args = tiny(engine="vllm", max_prompt_tokens=most, max_new_tokens=8, eval_sets=sets)
        inputs = SimpleNamespace(model=None)
        assert texts.open_engine(args, World(place()), inputs, torch.nn.Linear(2, 2))[1]["max_tokens"] == wanted


def test_the_page_shows_a_line_of_the_shipped_prompts_and_a_chat(tmp_path):
    line, chat, given = re.findall(r"```json\n(.*?)\n```", (REPO / "docs/tokens.md").read_text(), re.DOTALL)
    assert line == (REPO / "data/tiny-beeps/train.jsonl").read_text().splitlines()[0]
    (tmp_path / "a.jsonl").write_text(chat.replace("\n", ""))
    [record] = load_prompts(tmp_path / "a.jsonl")
    assert (record.images, record.text) == ((tmp_path / "cat.png",), "Is this(A) a cat or (B) a dog?")
    (tmp_path / "given.jsonl").write_text(given)
    said, pair = (record.meta for record in load_prompts(tmp_path / "given.jsonl"))
    assert [said["completion"], pair["chosen"], pair["rejected"]] == ["Eight.", "Eight.", "Six."]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("preset", ["tiny-beeps", "tiny-beeps-lora"])
def test_the_shipped_thinker_learns_to_say_what_it_hears(preset, here):
    args = recipe(app, preset)
    places = {name: str(REPO / values_of(args)[name]) for name in ("model", "prompts", "eval.prompts")}
    lines = train(app, change(args, **places))
    assert lines[-1]["eval/reward"] >= lines[0]["eval/reward"] + 0.2
