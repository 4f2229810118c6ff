"""Pretrain the repository's editing checkpoint: a QwenImageEditPipeline that changes the word on a sign.

    python scripts/pretrain.py edit      # 5 minutes on one core

It starts from checkpoints/tiny-signs-qwen-image and keeps its VAE. Pretraining stops early on purpose: the base keeps
the board and spells about half of the letters right, so that reinforcement learning has work to do.

1. tokenizer: byte-level BPE trained on the template of the editing model
2. text encoder: given an image and the instruction to change a word, it learns the features that the signs' encoder
   has for a sign with that word; its vision tower stays random
3. transformer: the flow-matching loss of the signs, on pairs of signs that differ in the word
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import build_tiny_models
import tiny_edit
import tiny_signs
import torch
from diffusers import QwenImageEditPipeline, QwenImagePipeline
from omni_rollout import Model, Params, Prompt
from omni_rollout.models import open_model, qwen_image, qwen_image_edit
from omni_rollout.types import Cond, Parts, join
from pretraining import signs
from pretraining.fit import fit
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

SIGNS = Path(__file__).parents[2] / "checkpoints" / "tiny-signs-qwen-image"
GRID = [1, 2, 6]  # patches of a reference seen by the text encoder; 2 x 2 patches are one token
PLACES = f"<|vision_start|>{3 * qwen_image_edit.PLACE}<|vision_end|>"
AREA = tiny_signs.HEIGHT * tiny_signs.WIDTH  # pixels of a reference
SAMPLING = Params(10, tiny_signs.HEIGHT, tiny_signs.WIDTH, guidance={"image_area": AREA})


def build_edit(base: QwenImagePipeline) -> QwenImageEditPipeline:
    """Build an editing pipeline from the signs', with a tokenizer for its template; common tokens keep their rows."""
    tokenizer = signs.build_tokenizer(
        qwen_image_edit.TEMPLATE, qwen_image_edit.TEMPLATE_TOKENS, tiny_edit.instruction("")
    )
    text_encoder = signs.build_text_encoder(tokenizer)
    old, new = base.text_encoder.state_dict(), text_encoder.state_dict()
    rows, known = tokenizer.get_vocab(), base.tokenizer.get_vocab()
    both = [token for token in rows if token in known]
    for name, weight in new.items():
        if weight.shape == old[name].shape:
            weight.copy_(old[name])
        else:
            weight[[rows[token] for token in both]] = old[name][[known[token] for token in both]]
    processor = build_tiny_models.build_qwen_processor(tokenizer, max_tokens=4)
    for part in (base.vae, base.transformer):
        part.register_to_config(_name_or_path=SIGNS.name)  # not its folder
    return QwenImageEditPipeline(base.scheduler, base.vae, text_encoder, tokenizer, processor, base.transformer)


def train_text_encoder(
    pipe: QwenImageEditPipeline, base: QwenImagePipeline, pictures: list[Tensor], *, steps: int, lr: float = 1e-3
) -> None:
    """Train the encoder to have the features of the signs' encoder for the same word and all tokens after it."""
    rng, batch = random.Random("tiny-edit text"), 64
    seen = [see(pipe, picture) for picture in pictures]

    def loss_of(step: int) -> Tensor:
        words = draw_words(rng, batch)
        known = base.tokenizer([qwen_image.TEMPLATE.format(f'a white sign that says "{word}"') for word in words])
        asked = pipe.tokenizer(
            [qwen_image_edit.TEMPLATE.format(PLACES + tiny_edit.instruction(word)) for word in words]
        )
        tail = len(base.tokenizer(qwen_image.TEMPLATE.split("{}")[1]).input_ids)
        tail += 1 + len(words[0])  # the word and its closing quote
        with torch.no_grad():
            wanted = hidden_states(base.text_encoder, known.input_ids)[:, -tail:]
        found = hidden_states(pipe.text_encoder, asked.input_ids, rng.choices(seen, k=batch))[:, -tail:]
        return (found - wanted).square().mean()

    fit("text", pipe.text_encoder.get_submodule("model.language_model").parameters(), loss_of, steps=steps, lr=lr)
    pipe.text_encoder.eval().requires_grad_(False)


def draw_words(rng: random.Random, count: int) -> list[str]:
    """Sample words of equal length, so that their tokens need no padding."""
    length, words = rng.randint(2, signs.MAX_LETTERS), list[str]()
    while len(words) < count:
        words += [word for word in [tiny_signs.draw_word(rng)] if len(word) == length]
    return words


def see(pipe: QwenImageEditPipeline, picture: Tensor) -> Tensor:
    """Return the patches of a reference, uint8 [H, W, 3], that the text encoder sees."""
    fitted = qwen_image_edit.fit_reference(picture, qwen_image_edit.QwenImageEdit.SEEN_AREA)
    seen = pipe.processor.image_processor(images=[fitted], return_tensors="pt")
    assert seen.image_grid_thw.tolist() == [GRID], seen.image_grid_thw
    return seen.pixel_values


def hidden_states(
    text_encoder: Qwen2_5_VLForConditionalGeneration, ids: list[list[int]], seen: list[Tensor] | None = None
) -> Tensor:
    """Return the last hidden states [B, T, D] of tokens [B, T], including image tokens if there are images."""
    inputs = {"input_ids": torch.tensor(ids)}
    if seen:
        inputs |= {"pixel_values": torch.cat(seen), "image_grid_thw": torch.tensor([GRID] * len(ids))}
        inputs["mm_token_type_ids"] = inputs["input_ids"].eq(text_encoder.config.image_token_id).int()
    hidden: Tensor = text_encoder(**inputs, output_hidden_states=True).hidden_states[-1]
    return hidden


def draw_edits(rng: random.Random, count: int) -> tuple[list[Prompt], Tensor]:
    """Sample `count` instructions with their references, and the resulting signs, uint8 [count, H, W, 3]."""
    prompts, images = [], []
    for i in range(count):
        text, before, after = tiny_edit.draw_edit(rng)
        prompts.append(Prompt(text, group=i, index=i, seed=i, images=(torch.from_numpy(before.copy()),)))
        images.append(torch.from_numpy(after.copy()))
    return prompts, torch.stack(images)


@torch.no_grad()
def encode_edits(model: Model, parts: Parts, prompts: list[Prompt], images: Tensor) -> tuple[Tensor, Cond]:
    """Return the clean latents [N, C, h, w] of the signs and all conditioning, as in training with rewards."""
    latents = torch.cat([model.encode_media(parts, {"image": some}, SAMPLING) for some in images.split(100)])
    texts = join([model.encode(parts, prompt) for prompt in prompts], dim=0, what="encode")
    return latents, texts | join([model.condition(parts, prompt, SAMPLING) for prompt in prompts], dim=0, what="cond")


def main(argv: Sequence[str]) -> None:
    """Pretrain the model, and write its folder."""
    parser = argparse.ArgumentParser(prog="pretrain.py edit", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny-signs-qwen-image-edit"))
    parser.add_argument("--text-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--edits", type=int, default=2000, help="number of pairs of images")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a fixed number, as sums depend on it: the same weights from every run on one kind of CPU
    torch.manual_seed(args.seed)
    prompts, images = draw_edits(random.Random(args.seed), args.edits)
    base = QwenImagePipeline.from_pretrained(SIGNS)
    pipe = build_edit(base)
    train_text_encoder(pipe, base, [prompt.images[0] for prompt in prompts[:256]], steps=args.text_steps)
    pipe.save_pretrained(args.out)  # the model used in training reads its configuration
    model = open_model(args.out)
    latents, cond = encode_edits(model, model.load(device="cpu", dtype=torch.float32), prompts, images)

    def draw(step: int) -> tuple[Tensor, Cond]:
        rows = torch.randint(len(latents), (signs.BATCH,))
        return latents[rows], {name: tensor[rows] for name, tensor in cond.items()}

    signs.train_flow(model, pipe.transformer, draw, steps=args.steps, lr=5e-4)
    pipe.save_pretrained(args.out)
    print(f"saved {args.out}")
