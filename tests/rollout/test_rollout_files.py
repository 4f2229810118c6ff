"""Damaged and forged checkpoints: one line that names the file, before any weight is read and with no code run."""

import io
import json
import os
import re
import shutil

import build_tiny_models
import pytest
import requests
import torch
from diffusers import DiffusionPipeline
from helpers import CHECKPOINT, REPO, sampled
from huggingface_hub.errors import GatedRepoError
from omni_rollout import Params, Prompt
from omni_rollout.files import check_fetched
from omni_rollout.models import open_model
from omni_rollout.models.tokens import open_token_model
from omni_rollout.models.tokens.transformers_model import check_template
from safetensors.torch import load_file, save_file

PARAMS = Params(4, 32, 96)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint whose files may be replaced, but not written into."""
    return shutil.copytree(CHECKPOINT, tmp_path / "model", copy_function=os.link)


def replace(file, content):
    file.unlink(missing_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def change(file, **entries):
    replace(file, json.loads(file.read_text()) | entries)


def refusal(folder):
    """What a dry run says of the folder: one line."""
    with pytest.raises(ValueError) as refused:
        look_at(folder)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 800
    return message


def look_at(folder):
    model = open_model(folder)
    model.check(PARAMS)
    model.latent_shape(PARAMS)
    model.sigmas(PARAMS)
    model.check_files()


def test_a_sound_folder_passes(folder):
    look_at(folder)


@pytest.mark.parametrize(
    "kind", ["StableDiffusionXLPipeline", "../../evil", "evil.py:Pipeline", None, 5, ["QwenImagePipeline"], {}]
)
def test_a_pipeline_that_is_no_model_of_ours_is_refused_with_the_choices(folder, kind):
    change(folder / "model_index.json", _class_name=kind)
    assert refusal(folder).startswith(
        f"model must not be a {kind!r}, which {folder} holds: known are QwenImagePipeline"
    )


@pytest.mark.parametrize("kind", [["LlamaForCausalLM"], ["QwenImage"], [], None, "QwenImagePipeline.evil", 5, {}, [[]]])
def test_an_architecture_that_is_no_model_of_ours_is_refused_with_the_choices(tmp_path, kind):
    replace(tmp_path / "config.json", {"architectures": kind})
    assert ": known are QwenImagePipeline, " in refusal(tmp_path)


KINDS = [["diffusers", "../evil/Net"], ["evil", "Net"], ["diffusers", "UNet2DModel"], [None, None], None, "x", [[]]]
PARTS = ["transformer", "vae", "text_encoder", "tokenizer", "scheduler"]


@pytest.mark.parametrize("case", sampled([f"{part} {i}" for part in PARTS for i in range(len(KINDS))], 9))
def test_a_part_of_another_class_is_refused(folder, case):
    part, i = case.split()
    change(folder / "model_index.json", **{part: KINDS[int(i)]})
    message = refusal(folder)
    assert message.startswith(f"{part} must be a ")
    assert "model_index.json says" in message


@pytest.mark.parametrize(
    ("file", "entries", "named"),
    [
        ("transformer/config.json", {"_class_name": "../evil/Net"}, "says '../evil/Net'"),
        ("text_encoder/config.json", {"architectures": ["Evil"]}, "says ['Evil']"),
        ("transformer/config.json", {"num_layers": "4"}, "num_layers"),
        ("transformer/config.json", {"num_layers": True}, "num_layers"),
        ("transformer/config.json", {"num_layers": 3}, "has 32 weights that its configuration lacks"),
        ("transformer/config.json", {"num_layers": 5}, "lacks 32 weights"),
        ("transformer/config.json", {"in_channels": -64}, "transformer/config.json"),
        ("transformer/config.json", {"axes_dims_rope": ["8", "12", "12"]}, "transformer/config.json"),
        ("vae/config.json", {"z_dim": "16"}, "z_dim"),
        ("vae/config.json", {"dim_mult": []}, "vae/config.json"),
        ("vae/config.json", {"latents_std": ["1"] * 16}, "latents_std"),
        ("text_encoder/config.json", {"text_config": {"hidden_size": "64"}}, "text_encoder/config.json"),
        ("scheduler/scheduler_config.json", {"use_dynamic_shifting": "yes"}, "use_dynamic_shifting"),
    ],
)
def test_a_value_of_another_type_or_range_is_named(folder, file, entries, named):
    change(folder / file, **entries)
    assert named in refusal(folder)


NO_OBJECTS = [b"", b"\0" * 64, b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'"x"']
FILES = ["model_index.json", "transformer/config.json", "tokenizer/tokenizer_config.json"]


@pytest.mark.parametrize("case", sampled([f"{file} {i}" for file in FILES for i in range(len(NO_OBJECTS))], 7))
def test_a_file_that_holds_no_object_is_named(folder, case):
    file, i = case.split()
    replace(folder / file, NO_OBJECTS[int(i)])
    message = refusal(folder)
    assert message.startswith("model is damaged: ")
    assert file in message


def test_a_missing_file_is_named(folder):
    for file in ("vae/diffusion_pytorch_model.safetensors", "scheduler/scheduler_config.json", "model_index.json"):
        (folder / file).unlink()
        assert (file if file.endswith("json") else "must have its weights as safetensors") in refusal(folder)


def test_neither_a_folder_nor_a_hub_id_is_refused(tmp_path):
    for path in (tmp_path / "nothing", "./nothing", "a/b/c", "nothing"):
        assert "must be a folder or a hub id such as Qwen/Qwen-Image, found nothing at" in refusal(path)


@pytest.mark.parametrize("part", sampled(["transformer", "vae", "text_encoder"], 1))
def test_weights_that_are_only_there_as_a_variant_are_named_with_what_to_do(folder, part):
    (weights,) = (folder / part).glob("*.safetensors")
    variant = weights.rename(weights.with_suffix(".fp16.safetensors"))
    said = (
        f"{part} holds only {variant.name}, a variant: load with variant='fp16' of diffusers, and save_pretrained wit"
    )
    assert said in refusal(folder)
    DiffusionPipeline.from_pretrained(folder, variant="fp16").save_pretrained(folder / "saved")
    look_at(folder / "saved")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
FILES = [  # of which Git LFS may leave a pointer
    "transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors", "tokenizer/tokenizer.json",
    "transformer/config.json",
]  # fmt: skip


@pytest.mark.parametrize("file", FILES)
def test_a_pointer_of_git_lfs_is_told_as_one(folder, file):
    replace(folder / file, POINTER)
    assert f"{folder / file} is only a Git LFS pointer: `git lfs pull` fetches the file" in refusal(folder)


def test_a_pipe_is_no_pointer_of_git_lfs_and_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_fetched(tmp_path / "pipe")


def test_a_file_and_a_part_of_a_pipeline_are_told_what_they_are(folder):
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    assert f"must be a folder in diffusers' layout or a hub id, got the file {file}: " in refusal(file)
    assert "holds a 'QwenImageTransformer2DModel': give the folder above it" in refusal(file.parent)


def test_weights_that_are_missing_are_told_what_may_be_there_instead(folder):
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.rename(file.with_suffix(".bin"))
    assert f"{file.name} is missing; {file.stem}.bin is a pickle, never opened: load it in " in refusal(folder)
    file.with_suffix(".bin").unlink()
    assert f"{file.name} is missing; if a download was interrupted, the same command resumes" in refusal(folder)
    replace(file, b"\x10" + bytes(7))
    assert "if a download was interrupted" in refusal(folder)


@pytest.mark.parametrize("part", sampled(["transformer", "vae", "text_encoder"], 1))
def test_a_pickle_is_never_opened_whatever_lies_beside_it(folder, part):
    ran = folder / "ran"
    (weights,) = (folder / part).glob("*.safetensors")
    replace(weights.with_suffix(".bin"), f"cos\nsystem\n(S'touch {ran}'\ntR.".encode())
    replace(folder / part / "decoy.safetensors", weights.read_bytes())
    weights.unlink()
    assert f"{part} holds none" in refusal(folder)
    with pytest.raises(ValueError, match="must have its weights as safetensors"):
        open_model(folder).load(device="cpu", dtype=torch.float32)
    assert not ran.exists()


@pytest.mark.parametrize("part", sampled(["transformer", "vae", "text_encoder"], 1))
def test_weights_that_are_cut_short_are_named(folder, part):
    (weights,) = (folder / part).glob("*.safetensors")
    whole = weights.read_bytes()
    for content in (whole[:-1], whole[:100], b"", b"\x10" + bytes(7) + b"{" * 16):
        replace(weights, content)
        assert f"{weights} is no whole safetensors file" in refusal(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [-2]},
        {"shape": [2**70]},
        {"shape": [2**62, 2**62]},
        {"shape": [1] * 200_000},
        {"shape": "2"},
        {"data_offsets": [8, 0]},
        {"dtype": "F\n" * 9000},
    ],
)
def test_a_header_that_no_file_can_have_is_named(folder, entry):
    header = json.dumps({"proj_out.bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry}).encode()
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    replace(file, len(header).to_bytes(8, "little") + header + bytes(8))
    assert f"{file} is no whole safetensors file" in refusal(folder)


def test_a_number_of_layers_that_no_net_has_is_named(folder):
    for file, entries in (
        ("transformer/config.json", {"num_layers": 10**7}),
        ("vae/config.json", {"num_res_blocks": 10**7}),
        ("text_encoder/config.json", {"text_config": {"num_hidden_layers": 10**12}}),
    ):
        before = json.loads((folder / file).read_text())
        change(folder / file, **entries)
        assert f"{file} must be at most 1000, got 1000" in refusal(folder)
        change(folder / file, **before)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"weight_map": {"proj_out.bias": "../../elsewhere.safetensors"}}, "must have a weight_map of file names"),
        ({"weight_map": {"proj_out.bias": 3}}, "must have a weight_map of file names"),
        ({"weight_map": []}, "must have a weight_map of file names"),
        ({"weight_map": {"proj_out.bias": "part-2.safetensors"}}, "part-2.safetensors is missing"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(folder, content, says):
    replace(folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json", content)
    assert says in refusal(folder)


@pytest.mark.parametrize("part", sampled(["transformer", "vae", "text_encoder"], 1))
def test_weights_that_are_missing_or_not_finite_are_found_while_loading(folder, part):
    (file,) = (folder / part).glob("*.safetensors")
    weights = load_file(file)
    name = sorted(name for name in weights if name.endswith("norm.weight") or part != "text_encoder")[
        0
    ]  # which is used
    for changed, says in (
        ({n: t for n, t in weights.items() if n != name}, "lacks 1 weights, such as"),
        (weights | {name: torch.full_like(weights[name], float("nan"))}, "is not finite"),
    ):
        file.unlink()
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(ValueError, match=says) as refused:
            open_model(folder).load(device="cpu", dtype=torch.float32)
        assert str(folder / part) in str(refused.value)


def test_weights_under_a_name_that_their_library_does_not_open_are_none(folder):
    """Or what is checked, and named in the run's settings, would not be what is read."""
    for part, names in (("text_encoder", ("model", "diffusion_pytorch_model")), ("vae", None)):
        here, there = names or ("diffusion_pytorch_model", "model")
        (folder / part / f"{here}.safetensors").rename(folder / part / f"{there}.safetensors")
        assert f"{part} holds none: {here}.safetensors is missing" in refusal(folder)
        (folder / part / f"{there}.safetensors").rename(folder / part / f"{here}.safetensors")


def copied(name, folder):
    """A tiny checkpoint of that name whose files may be replaced, but not written into."""
    cached = build_tiny_models.tiny_checkpoint(name, REPO / ".pytest_cache" / "tiny-models")
    return shutil.copytree(cached, folder / name, copy_function=os.link)


@pytest.mark.parametrize(
    ("name", "part", "files"),
    [
        ("flux-dev", "tokenizer", "vocab.json or merges.txt or tokenizer.json"),
        ("flux-dev", "tokenizer_2", "spiece.model or tokenizer.json"),
        ("flux2-klein", "tokenizer", "vocab.json or merges.txt or tokenizer.json"),
        ("ltx2", "tokenizer", "tokenizer.json"),
    ],
)
def test_a_tokenizer_without_its_vocabulary_is_refused(name, part, files, tmp_path):
    """transformers makes an empty one, to which every text is unknown."""
    folder = copied(name, tmp_path)
    open_model(folder).check_files()
    for file in (folder / part).iterdir():
        if file.name != "tokenizer_config.json":
            file.unlink()
    with pytest.raises(ValueError, match=f"{folder / part} must have a vocabulary, looked for {files}$"):
        open_model(folder).check_files()


def test_code_in_the_folder_of_a_tokenizer_never_runs_and_nobody_is_asked(tmp_path, monkeypatch):
    folder = copied("flux2-dev", tmp_path)
    change(
        folder / "tokenizer/tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]}
    )
    replace(folder / "tokenizer/own.py", f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n".encode())
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    for use in (lambda model: model.check_files(), lambda model: model.load(device="cpu", dtype=torch.float32)):
        with pytest.raises(ValueError, match=r"no AutoTokenizer can be made of .* contains custom code") as refused:
            use(open_model(folder))
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def language(tmp_path):
    """A language model's folder whose files may be replaced, but not written into."""
    return copied("qwen3", tmp_path)


def token_refusal(folder):
    """What a dry run says of a language model's folder: one line."""
    with pytest.raises(ValueError) as refused:
        open_token_model(folder).check_files()
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 800
    return str(refused.value)


def rewrite(folder, made):
    """Replaces the weights of a language model's folder by what `made` makes of them."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(made(weights), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", sampled(["qwen3", "qwen2.5-vl", "qwen3-omni"], 1))
def test_a_language_model_s_weights_are_those_of_its_configuration(name, tmp_path, capfd):
    folder = copied(name, tmp_path)
    open_token_model(folder).check_files()
    prefix = open_token_model(folder).prefix
    for made, says in (
        (lambda w: {n: t for n, t in w.items() if not n.endswith("0.input_layernorm.weight")}, "lacks 1 weights"),
        (lambda w: w | {f"{prefix}model.layers.7.x": torch.ones(2)}, "has 1 weights that its configuration lacks"),
        (lambda w: {n: t[:1].clone() if "q_proj.weight" in n else t for n, t in w.items()}, "has the shape (1, "),
    ):
        whole = (folder / "model.safetensors").read_bytes()
        rewrite(folder, made)
        assert says in token_refusal(folder)
        with pytest.raises(ValueError):
            open_token_model(folder).load_net(device="cpu", dtype=torch.float32)
        replace(folder / "model.safetensors", whole)
    capfd.readouterr()
    open_token_model(folder).check_files()
    assert capfd.readouterr() == ("", "")


def test_a_weight_of_a_language_model_that_is_not_finite_is_named(language):
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(language, lambda w: w | {name: torch.full_like(w[name], torch.nan)})
    with pytest.raises(ValueError, match=f"{name} of {language} is not finite"):
        open_token_model(language).load_net(device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("decoy", ["diffusion_pytorch_model", "other"])
def test_a_language_model_s_pickle_is_never_opened_whatever_lies_beside_it(decoy, language):
    torch.save(load_file(language / "model.safetensors"), language / "pytorch_model.bin")
    (language / "model.safetensors").rename(language / f"{decoy}.safetensors")
    assert "model.safetensors is missing" in token_refusal(language)
    with pytest.raises(ValueError, match="must have its weights as safetensors"):
        open_token_model(language).load_net(device="cpu", dtype=torch.float32)


def test_a_language_model_s_configuration_leads_to_no_other_files(language):
    """Neither to another configuration, nor to other weights, nor to the model that an adapter names."""
    before = open_token_model(language).load_net(device="cpu", dtype=torch.float32).state_dict()
    fewer = {"num_hidden_layers": 1, "layer_types": None}
    replace(language / "config.0.json", json.loads((language / "config.json").read_text()) | fewer)
    save_file({name: torch.zeros_like(weight) for name, weight in before.items()}, language / "others.safetensors")
    entries = {"transformers_weights": "others.safetensors", "configuration_files": ["config.0.json"]}
    change(language / "config.json", **entries)
    replace(
        language / "adapter_config.json", {"base_model_name_or_path": str(language / "nothing"), "peft_type": "LORA"}
    )
    after = open_token_model(language).load_net(device="cpu", dtype=torch.float32).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("file", "entries", "named"),
    [
        ("config.json", {"num_hidden_layers": 1, "layer_types": None}, "weights that its configuration lacks"),
        ("config.json", {"num_hidden_layers": 3, "layer_types": None}, "lacks "),
        ("config.json", {"num_hidden_layers": 10**7}, "num_hidden_layers of"),
        ("config.json", {"hidden_size": "64"}, "config.json"),
        ("config.json", {"num_attention_heads": 0}, "config.json"),
        ("config.json", {"architectures": "Qwen3ForCausalLM"}, "holds a 'Qwen3ForCausalLM'"),
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "must not be quantized"),
        ("generation_config.json", {"eos_token_id": [258, "5"]}, "eos_token_id of"),
        ("generation_config.json", {"eos_token_id": 10**6}, "has tokens up to 1000000, its vocab_size is"),
        ("tokenizer_config.json", {"pad_token": 3}, "no AutoTokenizer can be made of"),
    ],
)
def test_a_value_of_a_language_model_that_fits_nothing_is_named(language, file, entries, named):
    if not (language / file).exists():
        replace(language / file, {})
    change(language / file, **entries)
    assert named in token_refusal(language)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff", b'{"model": 3, "added_tokens": []}'])
def test_a_language_model_s_tokenizer_that_is_none_is_named(language, content):
    replace(language / "tokenizer.json", content)
    assert str(language) in token_refusal(language)


def test_a_language_model_s_tokenizer_has_its_vocabulary_and_no_more_of_it_than_the_net(language):
    change(language / "config.json", vocab_size=64)
    rewrite(language, lambda w: {n: t[:64].clone() if t.shape[0] == 266 else t for n, t in w.items()})
    assert "has tokens up to 265, its vocab_size is 64" in token_refusal(language)
    (language / "tokenizer.json").unlink()
    assert f"{language} must have a vocabulary, looked for vocab.json or" in token_refusal(language)


def test_code_in_the_folder_of_a_language_model_never_runs_and_nobody_is_asked(tmp_path, monkeypatch):
    language = copied("qwen3-omni", tmp_path)
    own = {"AutoTokenizer": ["own.Own", None], "AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    change(language / "config.json", auto_map=own)
    change(language / "tokenizer_config.json", tokenizer_class="Own", auto_map=own)
    replace(language / "own.py", f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n".encode())
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    assert "contains custom code" in token_refusal(language)
    assert not (tmp_path / "ran").exists()


TEMPLATES = {
    "endless": ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "it took longer"),
    "huge": ("{{ 'a' * 10**10 }}", "MemoryError"),
    "an unknown filter": ("{{ messages | nothing }}", "No filter named 'nothing'"),
    "a way out": ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    "no template": ("{% for %}", "TemplateSyntaxError"),
}


@pytest.mark.parametrize("name", sampled(TEMPLATES, 1, always=["a way out"]))
def test_a_chat_template_that_fails_or_never_ends_is_refused(language, name):
    template, says = TEMPLATES[name]
    replace(language / "chat_template.jinja", template.encode())
    message = token_refusal(language)
    assert f"the chat template of {language} must render a chat of one word within 10 s and 2 GB" in message
    assert says in message


def test_a_chat_template_is_rendered_by_the_packages_of_the_run(language, tmp_path, monkeypatch):
    """They may lie in folders of PYTHONPATH, or in the user's own."""
    stand_in = tmp_path / "packages" / "transformers" / "utils" / "chat_template_utils.py"
    stand_in.parent.mkdir(parents=True)
    for folder in (stand_in.parent, stand_in.parents[1]):
        (folder / "__init__.py").touch()
    stand_in.write_text("def render_jinja_template(**given): raise ValueError('the packages of the run')")
    model = open_token_model(language)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    check_template.cache_clear()
    with pytest.raises(ValueError, match=r"within 10 s and 2 GB, got ValueError: the packages of the run"):
        model.check_files()


def test_a_chat_template_is_bounded_for_every_chat(language):
    """It may be short for the chat that is tried, and refuses or swells others."""
    template = "{% if 'big' in messages[0].content %}{{ 'a' * 2**21 }}{% endif %}"
    template += "{% if 'no' in messages[0].content %}{{ raise_exception('a line\\nand another') }}{% endif %}x"
    replace(language / "chat_template.jinja", template.encode())
    model = open_token_model(language)
    model.check_files()
    for text, says in (
        ("big", r"must write at most \d+ letters, got 2097153"),
        ("no", "got TemplateError: a line and another"),
    ):
        with pytest.raises(ValueError, match=says):
            model.encode(Prompt(text, group=0, index=0, seed=0))


def test_a_gated_model_is_refused_with_the_page_of_its_license(monkeypatch):
    def refuse(path, **how):
        raise GatedRepoError("403 Client Error. Access is restricted.", response=requests.Response())

    monkeypatch.setattr("omni_rollout.models.hub.hub_fault", lambda: "")
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    rule = "Accept its license at https://huggingface.co/owner/gated, then `hf auth login`, or set HF_TOKEN"
    with pytest.raises(ValueError, match=re.escape(rule)):
        open_model("owner/gated")
