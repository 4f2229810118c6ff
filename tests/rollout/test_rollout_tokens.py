"""Language models behind their door: generation and scoring agree, and media are as transformers prepares them."""

import shutil
from dataclasses import replace

import build_tiny_models
import pytest
import torch
from helpers import REPO, ulps
from omni_rollout import Prompt
from omni_rollout.engines.transformers import TokenSampler, TransformersEngine
from omni_rollout.models.tokens import open_token_model
from omni_rollout.tokens import TokenParams, TokenTrajectory, score_tokens, token_log_probs
from omni_train.lora import add_lora

torch.set_num_threads(1)
GENERATOR = torch.Generator().manual_seed(0)
IMAGE = torch.randint(0, 255, (40, 64, 3), generator=GENERATOR, dtype=torch.uint8)
VIDEO = torch.randint(0, 255, (5, 32, 32, 3), generator=GENERATOR, dtype=torch.uint8)
SOUND = torch.randn(9000, 1, generator=GENERATOR) / 10
MEDIA = {
    "text": {},
    "image": {"images": (IMAGE,)},
    "images": {"images": (IMAGE, IMAGE[:32])},
    "video": {"video": VIDEO, "rates": {"fps": 2.0}},
    "sound": {"audio": SOUND, "rates": {"sample_rate": 16000.0}},
    "all": {"images": (IMAGE,), "video": VIDEO, "audio": SOUND, "rates": {"fps": 2.0, "sample_rate": 16000.0}},
}
CASES = [
    ("qwen3", "text"),
    *(("qwen2.5-vl", kind) for kind in ("text", "image", "images", "video")),
    *(("qwen3-omni", kind) for kind in MEDIA),
]
LORA_LAYERS, BLOCKS = {"qwen3": 8, "qwen2.5-vl": 8, "qwen3-omni": 8}, {"qwen3": 2, "qwen2.5-vl": 4, "qwen3-omni": 5}


@pytest.fixture(scope="module")
def engines():
    """An engine by the name of its checkpoint, with weights so large that answers differ in their likelihood."""
    opened = {}

    def of(name):
        if name not in opened:
            model = open_token_model(build_tiny_models.tiny_checkpoint(name, REPO / ".pytest_cache" / "tiny-models"))
            net = model.load_net(device="cpu", dtype=torch.float32)
            opened[name] = TransformersEngine(model, net)
        return opened[name]

    return of


def prompts(kind, count=3):
    texts = ("hi there", "count to ten, please", "x")
    return [Prompt(text=texts[i % 3], group=i, index=i, seed=10 + i, **MEDIA[kind]) for i in range(count)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_generation_with_a_cache_and_scoring_agree(engines, name, kind):
    engine = engines(name)
    drawn = engine.generate(prompts(kind), TokenParams(12, temperature=0.9))
    with torch.no_grad():
        scored = score_tokens(engine.model, engine.net, drawn)
    bound = ulps(8, (drawn.rollout_log_prob * drawn.mask).abs().max())  # of a logit, as large as a log-prob
    assert ((scored.log_prob - drawn.rollout_log_prob) * drawn.mask).abs().max() <= bound < 1e-5
    assert 0 < scored.entropy.min() <= scored.entropy.max() < torch.log(torch.tensor(266.0))
    alone = drawn.select([1]).trim()  # without the padding of longer prompts
    with torch.no_grad():
        own = score_tokens(engine.model, engine.net, alone).log_prob
    length = own.shape[1]
    torch.testing.assert_close(own * alone.mask, scored.log_prob[1:2, :length] * alone.mask, atol=bound, rtol=0)


@pytest.mark.parametrize("name", LORA_LAYERS)
def test_scores_with_and_without_gradients_are_the_same_bits(engines, name):
    engine = engines(name)
    drawn = engine.generate(prompts("text"), TokenParams(8))
    with torch.no_grad():
        before = score_tokens(engine.model, engine.net, drawn).log_prob
    engine.net.requires_grad_(True)
    now = score_tokens(engine.model, engine.net, drawn).log_prob
    engine.net.requires_grad_(False)
    assert now.requires_grad
    assert torch.equal(now, before)


def test_scores_in_pieces_are_those_in_one_with_their_gradients(engines, monkeypatch):
    """The pieces are three tokens long; the last one is shorter."""
    engine = engines("qwen3")
    drawn = engine.generate(prompts("text"), TokenParams(8, temperature=0.7))
    weights, found = [engine.net.lm_head.weight, engine.net.model.layers[0].mlp.up_proj.weight], []
    for most in (2**26, 266 * 3):
        monkeypatch.setattr("omni_rollout.tokens.MAX_LOGITS", most)
        with torch.no_grad():
            before = score_tokens(engine.model, engine.net, drawn)
        engine.net.requires_grad_(True)
        now = score_tokens(engine.model, engine.net, drawn).log_prob
        grads = torch.autograd.grad((now * drawn.mask).sum(), weights)
        engine.net.requires_grad_(False)
        assert torch.equal(now, before.log_prob)
        found.append((now.detach(), before.entropy, *grads))
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(pieces, whole, atol=ulps(8, whole.abs().max()), rtol=1e-5)
    assert "forward" not in vars(engine.net.lm_head)


@pytest.mark.parametrize("name", LORA_LAYERS)
def test_adapters_are_on_the_language_model_alone(engines, name):
    model = engines(name).model
    net = model.empty_net()
    assert sum(type(m).__name__ in model.BLOCK_NAMES for m in net.modules()) == BLOCKS[name]
    assert add_lora(net, model.LORA_TARGETS, rank=2, alpha=2, seed=0) == LORA_LAYERS[name]
    assert all(net.get_submodule(part) for part in model.FROZEN)


def test_places_of_media_are_in_no_answer(engines):
    engine = engines("qwen3-omni")
    logits = torch.zeros(1, 266)
    logits[0, list(engine.model.suppressed)] = 50.0
    assert token_log_probs(logits, engine.model.suppressed, TokenParams(1)).exp().sum().item() == pytest.approx(1)
    draw = TokenSampler([0], engine.model.suppressed, TokenParams(1))
    assert draw(torch.empty(1, 0), logits)[0, list(engine.model.suppressed)].isinf().all()


def test_a_sample_depends_on_its_seed_alone(engines):
    engine, params = engines("qwen3-omni"), TokenParams(10)
    whole = engine.generate(prompts("image"), params)
    again = TokenTrajectory.cat([engine.generate(prompts("image")[i : i + 1], params) for i in (2, 0)])
    assert again.answers == (whole.answers[2], whole.answers[0])
    other = engine.generate([replace(prompts("image")[0], seed=99)], params)
    assert other.answers != whole.answers[:1]


def test_tokens_are_drawn_in_proportion_to_their_probability():
    """The frequencies of 3,000 draws, and with top_p those of the likeliest tokens alone."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(3_000, 4)
    for top_p, allowed in ((1.0, [0, 1, 2, 3]), (0.7, [0, 1])):
        draw = TokenSampler(range(3_000), (), TokenParams(1, top_p=top_p))
        found = torch.bincount(draw(torch.empty(3_000, 0), logits).argmax(dim=1), minlength=4) / 3_000
        wanted = torch.zeros(4)
        wanted[allowed] = logits[0, allowed].softmax(dim=0)
        torch.testing.assert_close(found, wanted, atol=0.03, rtol=0)


def test_an_answer_ends_with_its_end_token(engines):
    engine = engines("qwen3")
    drawn = engine.generate(prompts("text", 40), TokenParams(60))
    ends = torch.isin(drawn.tokens, torch.tensor(engine.model.ends))
    assert 0 < drawn.ended.sum() < 40
    assert torch.equal((ends & drawn.mask).sum(dim=1), drawn.ended.long())
    assert drawn.lengths[~drawn.ended].unique().tolist() == [60]
    assert torch.equal(ends.long().argmax(dim=1)[drawn.ended] + 1, drawn.lengths[drawn.ended])


def test_frames_of_a_still_video_are_the_patches_of_a_picture(engines):
    patches = engines("qwen2.5-vl").model.patches
    picture, grid = patches.of_images([IMAGE])
    still, span = patches.of_video(IMAGE.expand(4, -1, -1, -1))
    assert torch.equal(still, picture.repeat(2, 1))
    assert span.tolist() == [[2, *grid[0, 1:].tolist()]]
    moving, _ = patches.of_video(VIDEO)
    first, second = (patches.of_images([VIDEO[i]])[0].view(-1, 3, 2, 14 * 14) for i in range(2))
    pair = moving[: len(first)].view(-1, 3, 2, 14 * 14)
    assert torch.equal(pair[:, :, 0], first[:, :, 0])
    assert torch.equal(pair[:, :, 1], second[:, :, 1])


def test_a_chat_is_what_the_template_makes_of_it(engines, monkeypatch):
    """The chat that a plain prompt stands for gives the same tokens; in another order media stand elsewhere."""
    model = engines("qwen3-omni").model
    plain = prompts("all")[0]
    said = [{"type": kind} for kind in ("image", "video", "audio")] + [{"type": "text", "text": plain.text}]
    system = {"role": "system", "content": "Be brief."}
    alike = replace(plain, text="?", meta={"messages": [system, {"role": "user", "content": said}]})
    first, second = model.encode(replace(plain, meta={"system": "Be brief."})), model.encode(alike)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    turns = [("user", said[::-1]), ("assistant", "no"), ("user", "x")]
    turns = [{"role": role, "content": content} for role, content in turns]
    ids = model.encode(replace(plain, meta={"messages": turns}))["input_ids"].tolist()
    places = [ids.index(model.config[f"{kind}_token_id"]) for kind in ("audio", "video", "image")]
    assert places == sorted(places)
    assert model.tokenizer.decode(ids).endswith(
        "assistant\nno<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match=r"messages need a chat template, and .* has none"):
        model.encode(alike)


def test_chats_that_end_alike_are_told_apart(engines):
    """A prompt is the text of its last message; a batch may hold chats in which that is the same."""
    engine = engines("qwen3")
    turns = [[("user", word), ("assistant", "yes"), ("user", "go on")] for word in ("one", "another")]
    chats = [[{"role": role, "content": content} for role, content in own] for own in turns]
    metas = [{}, {"system": "Be brief."}, *({"messages": chat} for chat in chats)]
    given = [Prompt(text="go on", group=i, index=i, seed=i, meta=meta) for i, meta in enumerate(metas)]
    drawn = engine.generate(given, TokenParams(1))
    for prompt, encoded in zip(given, drawn.encoded, strict=True):
        assert torch.equal(encoded["input_ids"], engine.model.encode(prompt)["input_ids"])


def test_saved_weights_end_answers_as_the_checkpoint_they_came_from(engines, tmp_path):
    source, saved = tmp_path / "source", tmp_path / "saved"
    shutil.copytree(engines("qwen3").model.folder, source)
    (source / "generation_config.json").write_text('{"eos_token_id": [258, 5], "top_p": 0.8}')
    model = open_token_model(source)
    model.save(engines("qwen3").net, engines("qwen3").net.state_dict(), saved)
    assert (saved / "generation_config.json").read_text() == (source / "generation_config.json").read_text()
    assert open_token_model(saved).ends == model.ends == (258, 5)


def test_what_a_model_does_not_take_is_refused(engines, tmp_path):
    for name, kind, words in (("qwen3", "image", "only text, got image"), ("qwen2.5-vl", "sound", "video, got audio")):
        with pytest.raises(ValueError, match=f"must hold .*{words}"):
            engines(name).generate(prompts(kind), TokenParams(2))
    with pytest.raises(ValueError, match="a place for each of its media, got 2"):
        engines("qwen2.5-vl").generate([replace(prompts("image")[0], text="<|image_pad|>")], TokenParams(2))
    with pytest.raises(ValueError, match=r"temperature > 0 .* got 4, 0 and 1"):
        TokenParams(4, temperature=0)
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(ValueError, match="holds a 'BertModel'"):
        open_token_model(tmp_path)
