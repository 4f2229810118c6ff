"""Trainers of texts beside the policy gradients: SFT, DPO and distillation, each against transformers or by hand."""

import json
import math
from itertools import product
from pathlib import Path

import build_tiny_models
import pytest
import torch
from helpers import REPO, sampled
from omni_rl.settings.fields import change, values_of
from omni_rl.tools import plan
from omni_rollout import Prompt
from omni_rollout.engines.transformers import trajectory_from_texts
from omni_rollout.models.tokens import open_token_model
from omni_rollout.tokens import TokenParams, score_tokens
from torch.distributions import Categorical, kl_divergence
from trainer_runs import recipe, train, undocumented, write_teacher

import train_distill_tokens
import train_dpo_tokens
import train_sft_tokens

SMALL = {
    "prompts_per_step": 4, "batch_size": 4, "max_new_tokens": 6, "train_steps": 2, "eval_every": 2, "lr": 1e-3,
    "reward": "regex", "eval_prompts": "train.jsonl", "eval_num_prompts": 2, "eval_first": False,
}  # fmt: skip
TRAINERS = {"sft": train_sft_tokens, "dpo": train_dpo_tokens, "distill": train_distill_tokens}
SAID = ["a", "bcd", "ef", "gh"]


@pytest.fixture
def model():
    return open_token_model(build_tiny_models.tiny_checkpoint("qwen3", REPO / ".pytest_cache" / "tiny-models"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with chats that end with answers, and pairs of answers."""
    monkeypatch.chdir(tmp_path)
    lines = [{**chat(f"say {i}", said), "pattern": "[a-z]"} for i, said in enumerate(SAID)]
    pairs = [{"prompt": f"say {i}", "chosen": said, "rejected": "zz", "pattern": "a"} for i, said in enumerate(SAID)]
    for name, rows in {"train": lines, "pairs": pairs}.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def chat(asked, said):
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


def labelled(model, asked, said):
    """The tokens of a chat as transformers renders it, up to the answer's end, and labels of the answer."""
    tokenizer, messages = model.tokenizer, chat(asked, said)["messages"]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    start = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(start)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ids = torch.tensor(ids[: len(ids) - ids[::-1].index(model.ends[0])])  # without what follows the end
    labels = ids.clone()
    labels[: len(tokenizer(start, add_special_tokens=False).input_ids)] = -100
    return ids, labels


def test_given_answers_are_what_transformers_trains_on(model):
    """Tokens of its chat template, and the loss of its model by labels."""
    net = model.load_net(device="cpu", dtype=torch.float32)
    prompts = [Prompt(f"say {i}", i, i, i) for i in range(len(SAID))]
    batch = trajectory_from_texts(model, prompts, SAID, TokenParams(6))
    scores = score_tokens(model, net, batch).log_prob
    assert batch.ended.all()
    assert not batch.forced.any()
    for i, said in enumerate(SAID):
        ids, labels = labelled(model, f"say {i}", said)
        own = torch.cat([batch.encoded[i]["input_ids"], batch.tokens[i][batch.mask[i]]])
        assert own.tolist() == ids.tolist()
        loss = net(input_ids=ids[None], labels=labels[None]).loss
        torch.testing.assert_close(-scores[i][batch.mask[i]].mean(), loss, rtol=1e-5, atol=1e-6)


def test_an_answer_that_is_too_long_is_named(model):
    with pytest.raises(ValueError, match="an answer must have at most 3 tokens with its end, got 4"):
        trajectory_from_texts(model, [Prompt("a", 0, 0, 0)], ["abc"], TokenParams(3))


def test_sft_takes_the_step_of_transformers(here, model, monkeypatch):
    """The mean over all tokens of a step, in two batches of unlike lengths, moves weights as a loop by hand does."""
    moved, update = [], train_sft_tokens.update

    def both(run, step, minibatches):
        net, start = run.policy.net, [p.detach().clone() for p in run.policy.params]
        metrics = update(run, step, minibatches)
        ours = [p.detach().clone() for p in run.policy.params]
        with torch.no_grad():
            torch._foreach_copy_(run.policy.params, start)
        total = 0
        for i, said in enumerate(SAID):
            ids, labels = labelled(model, f"say {i}", said)
            count = int((labels != -100).sum())
            (net(input_ids=ids[None], labels=labels[None]).loss * count).backward()
            total += count
        optimizer = torch.optim.AdamW(run.policy.params, lr=1e-3, eps=1e-3, weight_decay=0.0)
        for p in run.policy.params:
            p.grad /= total
        torch.nn.utils.clip_grad_norm_(run.policy.params, run.args.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        moved.extend(zip(ours, run.policy.params, start, strict=True))
        return metrics

    monkeypatch.setattr(train_sft_tokens, "update", both)
    own = {"train_steps": 1, "eval_every": 1, "batch_size": 2, "optim_weight_decay": 0.0, "optim_adam_epsilon": 1e-3}
    args = change(train_sft_tokens.Args(), **(SMALL | own), prompts="train.jsonl", model=str(model.folder))
    lines = train(train_sft_tokens, args)
    assert undocumented(lines) == set()
    assert lines[-1]["policy/loss"] == pytest.approx(math.log(266), rel=0.05)  # of random weights
    for ours, theirs, start in moved:
        torch.testing.assert_close(ours - start, theirs - start, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("case", sampled([*product(["", "pairs.jsonl"], [0, 4])], 1, always=[("pairs.jsonl", 0)]))
def test_dpo_begins_at_log_two_and_prefers_what_is_chosen(here, model, case):
    preferences, rank = case
    own = {"group_size": 2 if preferences else 4, "preferences": preferences, "lora_rank": rank, "lora_alpha": 2 * rank}
    args = change(train_dpo_tokens.Args(), **(SMALL | own), prompts="train.jsonl", model=str(model.folder))
    lines = train(train_dpo_tokens, change(args, train_steps=4, eval_every=4))
    assert undocumented(lines) == set()
    first, last = lines[1], lines[-1]
    if first["policy/pairs"]:
        assert first["policy/loss"] == pytest.approx(math.log(2), abs=1e-7)
        assert first["policy/margin"] == first["policy/chosen_reward"] == 0.0
    if preferences:
        assert [line["policy/pairs"] for line in lines[1:]] == [4.0] * 4
        assert last["policy/loss"] < first["policy/loss"]
        assert last["policy/margin"] > 0


@pytest.mark.parametrize("case", sampled([*product(["reverse", "forward", "jsd"], ["", "completion"])], 2))
def test_distillation_is_a_divergence_of_torch_distributions_and_falls(here, model, monkeypatch, case):
    (divergence, key), seen, compare = case, [], train_distill_tokens.compare

    def both(run, batch, teacher):
        found = compare(run, batch, teacher)
        device_inputs = run.model.inputs(batch.encoded, batch.tokens, batch.mask)
        with torch.no_grad():
            logits = [
                net(**device_inputs).logits[:, -batch.tokens.shape[1] - 1 : -1] for net in (run.policy.net, teacher.net)
            ]
        p, q = (Categorical(logits=each) for each in logits)
        mean = Categorical(probs=(p.probs + q.probs) / 2)
        wanted = {
            "reverse": kl_divergence(p, q),
            "forward": kl_divergence(q, p),
            "jsd": (kl_divergence(p, mean) + kl_divergence(q, mean)) / 2,
        }[divergence]
        seen.append((found.detach()[batch.mask], wanted[batch.mask]))
        return found

    monkeypatch.setattr(train_distill_tokens, "compare", both)
    own = {"teacher": write_teacher(str(model.folder)), "divergence": divergence, "completion_key": key}
    args = change(train_distill_tokens.Args(), **(SMALL | own), prompts="train.jsonl", model=str(model.folder))
    lines = train(train_distill_tokens, change(args, train_steps=4, eval_every=4))
    assert undocumented(lines) == set()
    assert len(seen) == 4
    for found, wanted in seen:
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)
    assert 0 < lines[-1]["policy/loss"] < lines[1]["policy/loss"]


def test_a_teacher_of_another_size_distills(here, model):
    """It has the student's vocabulary, and other widths."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(model.folder, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    Qwen3ForCausalLM(config).save_pretrained("bigger")
    model.finish(Path("bigger"))
    own = {"teacher": "bigger", "group_size": 2}
    args = change(train_distill_tokens.Args(), **(SMALL | own), prompts="train.jsonl", model=str(model.folder))
    assert train(train_distill_tokens, args)[-1]["policy/loss"] > 0


@pytest.mark.parametrize("name", sampled(TRAINERS, 1))
def test_a_plan_of_given_answers_takes_the_longest(here, model, name):
    rows = [{"prompt": "a", "completion": said, "chosen": said, "rejected": "b"} for said in ["c", "d" * 200] * 8]
    for file, lines in {"long": rows, "short": rows[::2] * 2}.items():
        Path(f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    sizes = {"max_new_tokens": 256, "dry_run": True, "memory_device_gb": 16.0, "model": str(model.folder)}
    own = {
        "sft": {},
        "dpo": {"group_size": 2},
        "distill": {"teacher": write_teacher(str(model.folder)), "completion_key": "completion"},
    }[name]
    app, key = TRAINERS[name], "preferences" if name == "dpo" else "prompts"

    def peak(file, count):
        args = change(app.Args(), **(SMALL | own | sizes | {key: file, "prompts_per_step": count}))
        return plan.measure(app.main, args, 1).peaks["update"]

    assert peak("short.jsonl", 8) < peak("long.jsonl", 8) / 2


def test_a_teacher_with_another_vocabulary_is_named_before_weights_are_read(here, model):
    file = Path(write_teacher(model.folder), "tokenizer.json")
    tokens = json.loads(file.read_text())
    names = sorted(tokens["model"]["vocab"], key=tokens["model"]["vocab"].get)
    tokens["model"]["vocab"] |= {names[5]: 6, names[6]: 5}
    file.write_text(json.dumps(tokens))
    args = change(train_distill_tokens.Args(), **SMALL, prompts="train.jsonl", model=str(model.folder))
    with pytest.raises(ValueError, match="--teacher: must have the vocabulary of --model, got another one in teacher"):
        train(train_distill_tokens, change(args, teacher="teacher"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "preset", "least"), [
    ("sft", "tiny-beeps", 0.2), ("dpo", "tiny-beeps", 0.15), ("dpo", "tiny-beeps-offline", 0.05),
])  # fmt: skip
def test_the_shipped_thinker_learns(tmp_path, monkeypatch, name, preset, least):
    monkeypatch.chdir(tmp_path)
    args = recipe(TRAINERS[name], preset)
    known = values_of(args)
    places = {
        key: str(REPO / known[key]) for key in ("model", "prompts", "eval.prompts", "preferences") if known.get(key)
    }
    lines = train(TRAINERS[name], change(args, **places))
    assert lines[-1]["eval/reward"] >= lines[0]["eval/reward"] + least
