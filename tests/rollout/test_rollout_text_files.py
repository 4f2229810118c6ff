"""Encoded texts on disk: the same bits as the encoder's, found by the same encoder alone, whole or not at all."""

import multiprocessing
from dataclasses import replace

import pytest
import torch
from model_rows import ROWS
from omni_rollout import Prompt
from omni_rollout.conditioning import TextCache
from omni_rollout.decoding import sliced_decode
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.model import wrap
from omni_rollout.models import open_model
from omni_rollout.models.qwen_image import QwenImage

MODELS = ("qwen-image", "sd35-medium", "qwen-image-edit", "bagel")


def load(name):
    """The model of a row, and its parts."""
    model = open_model(ROWS[name].checkpoint())
    return model, model.load(device="cpu", dtype=torch.float32)


def prompts_of(name):
    """Two texts of different lengths, with their references."""
    texts = ('a blue sign that says "AB"', 'a large red sign that says "CDE" in the rain')
    return [Prompt(text, group=i, index=i, seed=i, images=ROWS[name].references(i)) for i, text in enumerate(texts)]


def draw(name, model, parts, folder="", **changes):
    """Samples with guidance."""
    prompts = [replace(prompt, **changes) for prompt in prompts_of(name)]
    return DiffusersEngine(model, parts, texts=TextCache(folder=str(folder))).generate(prompts, ROWS[name].guided)


def encodings(model, monkeypatch):
    """What the encoder is asked for from then on."""
    asked, encode = [], model.encode

    def note(parts, prompt, *, negative=False, **options):
        asked.append((prompt.text, negative))
        return encode(parts, prompt, negative=negative, **options)

    monkeypatch.setattr(model, "encode", note)
    return asked


def files_of(folder):
    """The stored texts."""
    return sorted(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("name", MODELS)
def test_with_all_texts_on_disk_nothing_is_encoded_and_samples_are_the_same_bit_for_bit(tmp_path, name, monkeypatch):
    model, parts = load(name)
    without = draw(name, model, parts)
    asked = encodings(model, monkeypatch)
    first = draw(name, model, parts, tmp_path)
    assert len(asked) == len(files_of(tmp_path)) > 0
    asked.clear()
    again, other = draw(name, model, parts, tmp_path), draw(name, *load(name), tmp_path)
    assert asked == []
    for drawn in (first, again, other):
        assert drawn.cond.keys() == without.cond.keys()
        assert all(torch.equal(drawn.cond[entry], tensor) for entry, tensor in without.cond.items())
        assert torch.equal(drawn.x0, without.x0)
    assert len(list(tmp_path.iterdir())) == 1
    assert sorted(file for file in tmp_path.rglob("*") if file.is_file()) == files_of(tmp_path)  # no leftovers


def test_another_encoder_text_negative_or_reference_finds_nothing(tmp_path, monkeypatch):
    """One weight of the encoder is enough; other weights of the net are none of the texts' business."""
    name = "qwen-image-edit"
    model, parts = load(name)
    draw(name, model, parts, tmp_path)
    asked = encodings(model, monkeypatch)
    with torch.no_grad():
        next(parts.net.parameters()).add_(1)
    draw(name, model, parts, tmp_path)
    assert asked == []
    for changes in ({"text": "a cat"}, {"negative": "a dog"}, {"images": ROWS[name].references(7)}):
        draw(name, model, parts, tmp_path, **changes)
        assert asked != []
        asked.clear()
    weight = next(p for p in parts.text_encoder.parameters() if p.dim() > 1)
    weight[0, 0] = weight[0, 0].nextafter(torch.tensor(10.0))
    draw(name, model, parts, tmp_path)
    assert len({file.parent for file in files_of(tmp_path)}) == 2
    assert asked != []


def test_a_wrapped_model_finds_the_texts_of_its_own_class(tmp_path, monkeypatch):
    """With --memory.decode-batch-size the engine has a wrapped model, whose texts are those of the model's own code."""
    name = "qwen-image"
    model, parts = load(name)
    draw(name, model, parts, tmp_path)
    asked = encodings(model, monkeypatch)
    wrapped = wrap(model, decode=sliced_decode(model.decode, 1))
    assert isinstance(wrapped, QwenImage)
    draw(name, wrapped, parts, tmp_path)
    assert asked == []


def test_another_length_of_texts_finds_nothing(tmp_path, monkeypatch):
    model, parts = load("sd35-medium")
    asked = encodings(model, monkeypatch)
    for length, times in ((40, 3), (48, 3), (40, 0), (256, 3), (48.0, 0)):
        params = replace(ROWS["sd35-medium"].guided, guidance={"max_sequence_length": length})
        engine = DiffusersEngine(model, parts, texts=TextCache(folder=str(tmp_path)))
        cond = engine.generate(prompts_of("sd35-medium"), params).cond
        assert cond["embeds"].shape[1] == 77 + length
        assert len(asked) == times
        asked.clear()


@pytest.mark.parametrize("damage", ["torn", "empty", "bit", "other"])
def test_a_damaged_file_is_named_and_made_anew(tmp_path, damage, monkeypatch, capsys):
    name = "sd35-medium"
    model, parts = load(name)
    without = draw(name, model, parts, tmp_path)
    file = files_of(tmp_path)[0]
    whole = file.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    file.write_bytes({"torn": whole[:-100], "empty": b"", "bit": flipped, "other": b"no tensors at all"}[damage])
    asked = encodings(model, monkeypatch)
    capsys.readouterr()
    again = draw(name, model, parts, tmp_path)
    assert len(asked) == 1
    assert capsys.readouterr().err == f"{file} is damaged: its text is encoded again\n"
    assert torch.equal(again.x0, without.x0)
    assert file.read_bytes() == whole


def _draw_often(folder, queue):
    torch.set_num_threads(1)
    model, parts = load("sd35-medium")
    drawn = [draw("sd35-medium", model, parts, folder / str(i)) for i in range(5)]
    queue.put([sample.x0.tolist() for sample in drawn])


def test_processes_share_a_folder(tmp_path):
    """Both begin with empty folders and write the same files at about the same time."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_draw_often, args=(tmp_path, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    first, second = (queue.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    assert first == second
    alone = draw("sd35-medium", *load("sd35-medium"))
    assert first == [alone.x0.tolist()] * 5
    assert len(files_of(tmp_path)) == 5 * 3  # two texts and the negative
    assert [file for file in tmp_path.rglob("*") if file.is_file()] != []
    assert {file.suffix for file in tmp_path.rglob("*") if file.is_file()} == {".safetensors"}
