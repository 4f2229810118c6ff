"""What every model must hold, one row a model: the stock pipeline's pictures, one function for sampling and training.

Where our arithmetic is compared with another's, the weights are float64: rounding cannot hide a difference, and the
bounds hold on any CPU.
"""

import json
import math
import os
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from helpers import absolute_paths, capture_graphs, sampled
from model_rows import NEGATIVE, ROWS, Row
from omni_rollout import Model, Params, Prompt, replay
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import MODELS, open_model
from omni_rollout.testing import check_engine
from omni_sched import INITIAL_NOISE, step_noise
from omni_train.flops import FlopTable
from omni_train.kernels import EXACT, choose_attention
from omni_train.lora import adapter_params, add_lora
from omni_train.memory.recompute import Recompute
from omni_train.prepare import Lora, Preparation, prepare
from torch import nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

torch.set_num_threads(1)


TEXTS = ['a red sign that says "AB"', 'a blue sign that says "K7QXYZ", in the rain, on a beach', "x"]
SEEN = [name for name, row in ROWS.items() if row.has_size]  # models of pictures
PROMPTS = [Prompt(text, 0, i, seed=i, negative=NEGATIVE) for i, text in enumerate(TEXTS)]


@dataclass(frozen=True)
class Case:
    """A row's model, and its parts in a dtype."""

    row: Row
    model: Model
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        """What it draws."""
        return self.model.MEDIA[0]

    @property
    def prompts(self) -> list[Prompt]:
        """PROMPTS, with references where the model needs them."""
        return [replace(prompt, images=self.row.references(prompt.index)) for prompt in PROMPTS]

    def engine(self) -> DiffusersEngine:
        return DiffusersEngine(self.model, self.model.load(device="cpu", dtype=self.dtype))


@pytest.fixture(scope="module", params=sampled(ROWS, 1))
def case(request) -> Case:
    row = ROWS[request.param]
    return Case(row, open_model(row.checkpoint()), torch.float32)


@pytest.fixture(scope="module")
def engine(case):
    return case.engine()


@pytest.fixture(scope="module")
def exact(case):
    return replace(case, dtype=torch.float64).engine()


@pytest.fixture(scope="module")
def pipe(case):
    return case.row.stock_pipeline(case.model.folder, torch.float64)


STOCK = [
    (name, guided, batch) for name, row in ROWS.items() if row.stock for guided in (False, True) for batch in (1, 3)
]
DRAWN = sampled(STOCK, 3)


@pytest.mark.parametrize(
    ("case", "how"),
    [pytest.param(*((each := case.values[0])[0], each[1:]), marks=case.marks, id=case.id) for case in DRAWN],
    indirect=["case"],
)
def test_without_noise_pictures_are_those_of_the_stock_pipeline(case, exact, pipe, how):
    guided, batch = how
    prompts = case.prompts[:batch]
    first = case.row.guided if guided else case.row.unguided
    for params in (first, *(each for each in case.row.more if case.model.is_guided(each) == guided)):
        assert case.model.is_guided(params) == (guided and not case.row.never_guided)
        trajectory = exact.generate(prompts, params)
        ours = case.model.decode(exact.parts, trajectory.x0, trajectory.cond, params)[0][case.kind]
        noise = step_noise([p.seed for p in prompts], INITIAL_NOISE, case.model.latent_shape(params))
        theirs = case.row.draw_stock(pipe, prompts, params, noise.double())
        assert theirs.std() > 0.01  # pictures, not grey
        tolerance = case.row.guided_tolerance if guided else 1e-5
        ours = ours.movedim(-1, -2 if case.kind == "audio" else -3)
        torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=tolerance)
        torch.testing.assert_close(trajectory.sigmas, pipe.scheduler.sigmas, rtol=0, atol=2e-7)


def test_every_option_matters(case, exact):
    """Each is tried at another value than its default, and that changes the sample."""
    drawn: dict[str, torch.Tensor] = {}

    def draw(params):
        if str(params) not in drawn:
            drawn[str(params)] = exact.generate(case.prompts[:1], params).x0
        return drawn[str(params)]

    for name, default in case.model.OPTIONS.items():
        tried = [each for each in (case.row.guided, *case.row.more) if each.guidance.get(name, default) != default]
        assert bool(tried) == (name not in case.row.idle), name
        for params in tried:
            other = replace(params, guidance={**params.guidance, name: case.row.instead.get(name, default)})
            assert (draw(params) - draw(other)).abs().max() > 1e-4, (name, params)


def test_negative_texts_matter_where_there_is_guidance(case, exact):
    params = case.row.guided
    empty = replace(case.prompts[0], negative="")
    x0 = {negative: exact.generate([replace(empty, negative=negative)], params).x0 for negative in ("", "bad")}
    assert ((x0[""] - x0["bad"]).abs().max() > 1e-4) != case.row.never_guided


def test_the_engine_keeps_the_contract_and_the_ratio_is_exactly_one(case, engine):
    for params in (case.row.unguided, case.row.guided):
        params = replace(params, num_inference_steps=4, noise_level=0.7, sde_steps=(1, 2), keep_mean=True)
        check_engine(engine, case.model, params, num_images=len(case.row.images))


def test_a_sample_is_the_same_alone_and_in_a_batch(case, exact):
    for params in (case.row.unguided, case.row.guided):
        params = replace(params, num_inference_steps=3)
        together = exact.generate(case.prompts, params).x0
        for i, prompt in enumerate(case.prompts):
            alone = exact.generate([prompt], params).x0[0]
            torch.testing.assert_close(alone, together[i], rtol=0, atol=1e-5)


def test_regrouped_and_trimmed_samples_are_replayed_alike(case, exact):
    """Padding comes and goes by masks alone: the velocity at the same point does not change."""
    params = replace(case.row.guided, noise_level=0.7, sde_steps=(1,))
    parts = [exact.generate(case.prompts[:2], params), exact.generate(case.prompts[2:], params)]
    again = type(parts[0]).cat(parts).select([2]).trim()
    assert {k: v.shape for k, v in again.cond.items()} == {k: v.shape for k, v in parts[1].cond.items()}
    assert all(torch.equal(again.cond[name], tensor) for name, tensor in parts[1].cond.items())


def test_a_gradient_reaches_every_weight_but_those_that_lead_nowhere(case, engine):
    params = case.row.guided
    cond = engine.generate(case.prompts, params).cond
    x = torch.randn(3, *case.model.latent_shape(params), generator=torch.Generator().manual_seed(0))
    net = case.model.load_net(device="cpu", dtype=torch.float32).requires_grad_(True)
    for levels in ([0.95, 0.92, 0.9], [0.5, 0.3, 0.1]):  # of either expert, where there are two
        case.model.predict_velocity(net, x, torch.tensor(levels), cond, params).square().mean().backward()
    without = {name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}
    assert without == case.row.without_gradient


def test_gradients_are_the_same_bits_whether_blocks_keep_their_products_or_compute_them_again(case, engine):
    params = case.row.guided
    cond = engine.generate(case.prompts[:2], params).cond
    x = torch.randn(2, *case.model.latent_shape(params), generator=torch.Generator().manual_seed(0))
    net = case.model.load_net(device="cpu", dtype=torch.float32)
    add_lora(net, case.model.LORA_TARGETS, rank=2, alpha=3, seed=0)
    factors = adapter_params(net, "default")
    for p in factors:
        nn.init.constant_(p, 0.02)
    found, keeping = [], Recompute(1e9)
    for recompute in (None, Recompute(0), keeping, keeping):  # which measures blocks at first
        if recompute:
            net.enable_gradient_checkpointing(recompute)
        net.zero_grad()
        case.model.predict_velocity(net, x, torch.tensor([0.95, 0.9]), cond, params).square().mean().backward()
        found.append([p.grad for p in factors if p.grad is not None])
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])
    assert any(grad.any() for grad in found[0])


def test_lora_wraps_exactly_the_layers_it_should(case):
    net = case.model.load_net(device="cpu", dtype=torch.float32)
    add_lora(net, case.model.LORA_TARGETS, rank=2, alpha=2, seed=0)
    wrapped = [name for name, module in net.named_modules() if hasattr(module, "lora_A")]
    assert len(wrapped) == case.row.lora_layers
    for target in case.model.LORA_TARGETS:
        assert any(name.endswith(f".{target}") for name in wrapped), target


def test_every_block_is_found_by_its_class(case):
    net = case.model.empty_net()
    blocks = [module for module in net.modules() if type(module).__name__ in case.model.BLOCK_NAMES]
    assert sum(len(list(block.parameters())) for block in blocks) > len(list(net.parameters())) / 2


def test_all_attention_is_in_the_blocks_where_the_chosen_kernels_reach_it(case, engine):
    params = case.row.guided
    cond = engine.generate(case.prompts[:1], params).cond
    net = case.model.load_net(device="cpu", dtype=torch.float32)
    x = torch.zeros(1, *case.model.latent_shape(params))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # which a CPU lacks
        with pytest.raises(RuntimeError, match="No viable backend"):
            case.model.predict_velocity(net, x, torch.tensor([0.9]), cond, params)
        choose_attention(net, "math", case.model.BLOCK_NAMES)
        case.model.predict_velocity(net, x, torch.tensor([0.9]), cond, params)


COMPILED = [(name, *each) for name in ROWS for each in product(("LoRA", "all weights"), ("bfloat16", "float32"))]
# By torch's own compiler the two that recipes use, and of a few models all, also without rounding as without a compiler
USUAL = {("LoRA", "bfloat16"), ("all weights", "float32")}
CROSSED = ("qwen-image", "sd35-medium", "z-image", "wan21")
BY_COMPILER = [
    (*each, rounds)
    for each, rounds in product(COMPILED, ("rounded", "fused"))
    if (each[0] in CROSSED and (rounds == "rounded" or each[2] == "bfloat16"))
    or (each[1:] in USUAL and rounds == "rounded")
]


def compiled_engine(case, weights, dtype):
    """An engine of compiled blocks, of which none has run. All weights may have what fsdp2 gathers them in."""
    torch._dynamo.reset()
    lora = Lora(case.model.LORA_TARGETS, rank=2, alpha=3, init="default", seed=0) if weights == "LoRA" else None
    how = Preparation(torch.device("cpu"), case.model.BLOCK_NAMES, dtype, lora=lora, compile=True)
    net = prepare(case.model.load_net(device="cpu", dtype=dtype), how)
    for name, p in net.named_parameters():
        if "lora_B" in name:  # zero at first, and then the adapter rounds nothing
            nn.init.normal_(p, std=0.02)
    return DiffusersEngine(case.model, case.model.load(device="cpu", dtype=dtype, net=net))


def gaps_of(case, engine, params, batches, between=lambda: None):
    """The largest abs(ratio - 1) of each step, replayed with gradients after the first rollout of all batches."""
    params = replace(params, num_inference_steps=3, noise_level=0.7, sde_steps=(0, 1))
    gaps, rollout = [], []
    for texts in batches:
        prompts = [replace(case.prompts[i], seed=seed) for seed, i in enumerate(texts)]
        rollout.append(engine.generate(prompts, params))
    between()
    for trajectory in rollout:
        for k in range(2):
            log_prob = replay(case.model, engine.net, trajectory, k).log_prob
            gaps.append(((log_prob - trajectory.rollout_log_prob[:, k]).exp() - 1).abs().max().item())
            log_prob.sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in engine.net.parameters())
    return gaps


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are captured and the numbers of those that ran, without code of the compiler."""
    return capture_graphs(monkeypatch)


@pytest.fixture
def forwards(monkeypatch):
    """Has torch's compiler make code of forward passes alone, half of its work: the ratio compares no gradients."""
    monkeypatch.setattr(compile_fx, "compile_fx_backward", lambda graph, *_, **__: make_boxed_func(graph.forward))
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture
def compiled(request, monkeypatch):
    """A row's model, and an engine of its blocks, which are compiled when they first run."""
    name, weights, dtype, *rounds = request.param
    monkeypatch.setitem(EXACT, "emulate_precision_casts", rounds != ["fused"])
    case = Case(ROWS[name], open_model(ROWS[name].checkpoint()), getattr(torch, dtype))
    yield case, compiled_engine(case, weights, case.dtype)
    torch._dynamo.reset()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("compiled", sampled(COMPILED, 1), indirect=True)
def test_compiled_blocks_sample_by_the_graphs_that_are_trained_from_the_first_rollout_on(graphs, compiled):
    """Captured, without code of the compiler: guided, of one text and of two, which are padded where the model pads."""
    (case, engine), (captured, ran), seen = compiled, graphs, []
    gaps = gaps_of(case, engine, case.row.guided, [(0, 0), (0, 1)], lambda: seen.extend([len(captured), list(ran)]))
    assert max(gaps) == 0, gaps
    before, sampled_by = seen
    assert len(captured) == before
    per_batch = len(sampled_by) // 2
    steps = [sampled_by[b * per_batch + k * per_batch // 3 :][: per_batch // 3] for b in range(2) for k in range(2)]
    assert ran[len(sampled_by) :] == [number for step in steps for number in step]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("compiled", sampled(BY_COMPILER, 0), indirect=True)
def test_compiled_blocks_have_a_ratio_of_exactly_one_from_the_first_rollout_on(forwards, compiled):
    """By torch's own compiler, which takes a minute: nothing is compiled before the rollout."""
    case, engine = compiled
    gaps = gaps_of(case, engine, case.row.unguided, [(0, 1)])
    assert max(gaps) == 0, gaps


def test_operations_are_counted_on_the_meta_device_as_they_are_computed(case, engine):
    params = case.row.unguided
    cond = engine.condition(case.prompts[:2], params)
    x, levels = torch.zeros(2, *case.model.latent_shape(params)), torch.full((2,), 0.9)
    net = case.model.load_net(device="cpu", dtype=torch.float32).requires_grad_(True)
    choose_attention(net, "math", case.model.BLOCK_NAMES)  # torch counts no fused kernel of a CPU
    table = FlopTable(lambda: case.model.empty_net().requires_grad_(True), net)
    with torch.no_grad():
        case.model.predict_velocity(net, x, levels, cond, params)
    table.total(Counter())
    with FlopCounterMode(display=False) as counter:
        velocity = case.model.predict_velocity(net, x, levels, cond, params)
        forward = counter.get_total_flops()
        velocity.sum().backward()
    (counted,) = table.known.values()
    assert counted == (forward / 2, counter.get_total_flops() / 2)


def test_the_velocity_needs_nothing_of_the_net_but_its_call(case, engine):
    params = case.row.guided
    cond = engine.generate(case.prompts, params).cond
    x, sigma = torch.zeros(3, *case.model.latent_shape(params)), torch.full((3,), 0.5)

    def call(**inputs):
        return engine.net(**inputs)

    velocity = case.model.predict_velocity(call, x, sigma, cond, params)
    assert velocity.dtype == torch.float32
    assert velocity.shape == x.shape
    assert torch.equal(velocity, case.model.predict_velocity(engine.net, x, sigma, cond, params))


class BlockVAE(nn.Module):
    """A VAE that has an inverse: each block of `side` x `side` pixels is its mean, in the first channels.

    Of a video [B, 3, F, H, W] the first frame is coded alone, and each four that follow as their mean.

    bn: statistics of latents of four times the channels, for the models that take them from there.
    """

    def __init__(self, channels: int, side: int = 8) -> None:
        super().__init__()
        self.side = side
        self.channels, self.dtype, self.device = channels, torch.float32, torch.device("cpu")
        self.bn = nn.BatchNorm2d(4 * channels, affine=False)
        self.bn.running_mean.fill_(0.5)
        self.bn.running_var.fill_(4.0)

    def encode(self, pixels):
        height, width = pixels.shape[-2:]
        side = self.side
        code = pixels.reshape(*pixels.shape[:-2], height // side, side, width // side, side).mean(dim=(-3, -1))
        if code.dim() == 5:
            code = torch.cat([code[:, :, :1], code[:, :, 1:].unflatten(2, (-1, 4)).mean(3)], dim=2)
        self.colors = code.shape[1]  # three, or four with transparency
        code = torch.cat([code, code.new_zeros(len(code), self.channels - self.colors, *code.shape[2:])], dim=1)
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: code))

    def decode(self, latents, return_dict=False):
        frames = latents[:, : self.colors].repeat_interleave(self.side, dim=-1).repeat_interleave(self.side, dim=-2)
        if frames.dim() == 5:
            frames = torch.cat([frames[:, :, :1], frames[:, :, 1:].repeat_interleave(4, dim=2)], dim=2)
        return (frames,)


ENCODED = [name for name in ROWS if name in SEEN and not name.startswith("ltx")]  # whose samples may be given as media


@pytest.mark.parametrize("case", ENCODED, indirect=True)
def test_media_are_encoded_by_the_inverse_of_decoding(case):
    model, params = open_model(case.row.checkpoint()), case.row.unguided
    model.config["vae"] |= case.row.statistics
    shape = model.latent_shape(params)
    unit = params.height // shape[-2]  # pixels; 8, or 16 where the latents are the code's 2 x 2 patches
    strides = [model.config["vae"].get(name) for name in ("ffactor_spatial", "scale_factor_spatial")]
    stride = unit if unit in strides else 8  # of pictures; latents may be patches
    vae = BlockVAE(shape[0] * stride**2 // unit**2, stride) if case.kind == "image" else BlockVAE(shape[0], unit)
    parts = SimpleNamespace(vae=vae)
    blocks = torch.randint(0, 256, (2, *shape[1:], 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    image = blocks.repeat_interleave(unit, dim=-2).repeat_interleave(unit, dim=-3)
    if case.kind == "video":
        image = torch.cat([image[:, :1], image[:, 1:].repeat_interleave(4, dim=1)], dim=1)
    x0 = model.encode_media(parts, {case.kind: image}, params)
    assert x0.shape == (2, *shape)
    media, rates = model.decode(parts, x0, {}, params)
    torch.testing.assert_close(media[case.kind], image / 255, rtol=0, atol=1e-5)
    assert rates == ({} if case.kind == "image" else {"fps": params.frame_rate})
    torch.testing.assert_close(model.encode_media(parts, media, params), x0, rtol=0, atol=1e-5)


def test_a_gradient_flows_through_decoding(case, engine):
    params = case.row.unguided
    x0 = torch.randn(2, *case.model.latent_shape(params), generator=torch.Generator().manual_seed(0)).requires_grad_()
    media, _ = case.model.decode(engine.parts, x0, {}, params)
    media[case.kind].mean().backward()
    assert x0.grad.flatten(1).abs().max(dim=1).values.min() > 0


@pytest.mark.parametrize("case", [name for name in SEEN if ROWS[name].unit], indirect=True)
def test_a_size_that_the_model_lacks_is_refused_with_the_nearest(case):
    unit = case.row.unit
    for change, named in (*case.row.nearest, ({"height": 0}, unit), ({"width": -16}, unit)):
        rule = rf"must be a positive multiple of {unit} pixels( up to \d+)?"
        with pytest.raises(ValueError, match=f"{rule}, such as {named}, got {next(iter(change.values()))}"):
            case.model.check(replace(case.row.unguided, **change))
        case.model.check(replace(case.row.unguided, **dict.fromkeys(change, named)))


def test_knobs_of_other_models_are_refused(case):
    with pytest.raises(ValueError, match=r"guidance of a \w+ must be .*, got no_such_knob"):
        case.model.check(replace(case.row.unguided, guidance={"no_such_knob": 1.0}))
    with pytest.raises(ValueError, match="num_frames must be "):
        case.model.check(replace(case.row.unguided, num_frames=6))


def test_without_guidance_all_but_its_scales_stay(case):
    model, guided = case.model, replace(case.row.guided, keep_mean=True)
    without = model.unguided(guided)
    assert model.is_guided(guided) != case.row.never_guided
    assert not model.is_guided(without)
    assert model.unguided(without) == without
    model.check(without)
    rest = {name: value for name, value in model.OPTIONS.items() if name not in model.GUIDANCE}
    changed = replace(guided, guidance={**guided.guidance, **{name: value + 1 for name, value in rest.items()}})
    assert all(model.option(model.unguided(changed), name) == value + 1 for name, value in rest.items())
    assert replace(without, guidance_scale=guided.guidance_scale, guidance=guided.guidance) == guided


def test_guidance_that_the_pipeline_would_silently_leave_off_is_refused(case):
    for name, off in case.model.GUIDANCE.items():
        scale = {name: off - 0.5} if name == "guidance_scale" else {"guidance": {name: off - 0.5}}
        with pytest.raises(ValueError, match=f"{name} must be >= {off:g}, where {off:g} is no guidance"):
            case.model.check(replace(case.row.unguided, **scale))
    for change, rule in case.row.refused:
        with pytest.raises(ValueError, match=rule):
            case.model.check(replace(case.row.unguided, **change))


def test_the_empty_net_has_the_names_and_shapes_of_the_files_and_its_buffers_are_real(case):
    empty, net = case.model.empty_net(buffers=True), case.model.load_net(device="cpu", dtype=torch.float32)
    for each in (empty, case.model.empty_net()):
        assert {p.device.type for p in each.parameters()} == {"meta"}
        assert {n: p.shape for n, p in each.state_dict().items()} == {n: p.shape for n, p in net.state_dict().items()}
    for (name, buffer), (_, other) in zip(empty.named_buffers(), net.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=name)
    for name, module in empty.named_modules():
        for attribute, value in vars(module).items():
            assert not isinstance(value, torch.Tensor) or value.device.type == "cpu", (name, attribute)


def changed(folder: Path, copy: Path, part: str, **entries: object) -> Path:
    """A copy of a checkpoint, by links, in which the configuration of a part has other values."""
    shutil.copytree(folder, copy, copy_function=os.link)
    file = copy / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
    config = json.loads(file.read_text()) | entries
    file.unlink()
    file.write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize("case", [name for name, row in ROWS.items() if row.stock and not row.modular], indirect=True)
def test_a_field_of_the_scheduler_that_is_not_computed_is_refused_by_name(case, tmp_path):
    others = {
        "num_train_timesteps": 500,
        "time_shift_type": "cubic",
        **dict.fromkeys(
            [
                *("invert_sigmas", "stochastic_sampling", "use_beta_sigmas", "use_exponential_sigmas"),
                *("use_karras_sigmas", "quantization_config"),
            ],
            True,
        ),
    }
    for name, value in others.items():
        folder = changed(case.model.folder, tmp_path / name, "scheduler", **{name: value})
        with pytest.raises(ValueError, match=rf"^{name} of .*scheduler_config.json must be .*, got "):
            open_model(folder)


@pytest.mark.parametrize("steps", [2, 7])
@pytest.mark.parametrize(
    ("name", "entries"),
    [
        *(
            (name, {"shift_terminal": value})
            for name in ("sd35-medium", "flux2-klein", "flux-schnell")
            for value in (0.0, 0.1)
        ),
        *(
            (name, {"use_dynamic_shifting": True, **other})
            for name in ("z-image", "flux-dev", "qwen-image", "flux2-klein")
            for other in ({"time_shift_type": "linear"}, {"shift_terminal": 0.1})
        ),
    ],
)
def test_levels_are_those_of_the_scheduler_of_diffusers(name, entries, steps, tmp_path):
    folder = changed(ROWS[name].checkpoint(), tmp_path / "model", "scheduler", **entries)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
    size, config = (96, 160), scheduler.config
    even = {"sigmas": np.linspace(1, 1 / steps, steps)}
    mu = compute_empirical_mu(6 * 10, steps)
    if name != "flux2-klein":
        mu = calculate_shift(
            *(6 * 10, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
        )
    scheduler.set_timesteps(**({"num_inference_steps": steps} if name == "sd35-medium" else even), mu=mu)
    torch.testing.assert_close(open_model(folder).sigmas(Params(steps, *size)), scheduler.sigmas, rtol=0, atol=3e-7)


def test_values_of_the_scheduler_are_refused_before_weights_are_loaded(tmp_path):
    one, params = ROWS["qwen-image"].checkpoint(), Params(1, 48, 80)
    with pytest.raises(ValueError, match=r"num_inference_steps must be >= 2, as .*scheduler_config.json has a shift_t"):
        open_model(changed(one, tmp_path / "one", "scheduler", shift_terminal=0.1)).check(params)
    values = {"shift": math.nan, "use_dynamic_shifting": False}
    model = open_model(changed(one, tmp_path / "nan", "scheduler", **values))
    with pytest.raises(ValueError, match=r"shift of .*scheduler_config.json must be finite, got nan"):
        model.sigmas(params)


@pytest.mark.parametrize(
    ("name", "part", "entries", "said"),
    [
        (
            "sd35-medium",
            "scheduler",
            {"use_dynamic_shifting": True},
            "use_dynamic_shifting of .* must be false for a S",
        ),
        ("sd35-medium", "vae", {"block_out_channels": [32] * 3}, r"block_out_channels of .* must have 4 entries for a"),
        ("flux-dev", "vae", {"block_out_channels": [32] * 3}, "block_out_channels of .* must have 4 entries"),
        ("z-image", "vae", {"block_out_channels": 32}, "block_out_channels of .* must have 4 entries"),
        ("flux2-klein", "vae", {"block_out_channels": [8] * 3}, "block_out_channels of .* must have 4 entries"),
        ("qwen-image", "vae", {"temperal_downsample": [True]}, "temperal_downsample of .* must have 3 entries"),
        ("qwen-image", "transformer", {"guidance_embeds": True}, "guidance_embeds of .* must be false for a QwenImage"),
        ("qwen-image", "transformer", {"use_additional_t_cond": True}, "use_additional_t_cond of .* must be false"),
        (
            "qwen-image",
            "transformer",
            {"out_channels": 8},
            "out_channels of .* must be 16 for a QwenImagePipeline, got 8",
        ),
        ("flux-dev", "transformer", {"patch_size": 2}, "patch_size of .* must be 1 for a FluxPipeline, got 2"),
        ("flux-dev", "transformer", {"in_channels": 32}, "in_channels of .* must be 64 for a FluxPipeline, got 32"),
        ("flux-dev", "transformer", {"out_channels": 32}, "out_channels of .* must be 64 for a FluxPipeline, got 32"),
        ("flux2-klein", "transformer", {"in_channels": 64}, "in_channels of .* must be 128 for a Flux2KleinPipeline"),
        ("sd35-medium", "transformer", {"in_channels": 4}, "in_channels of .* must be 16 for a StableDiffusion3"),
        ("z-image", "transformer", {"all_patch_size": [4]}, r"all_patch_size of .* must be \[2\] for a ZImagePipeline"),
        ("ltx23", "transformer", {"in_channels": 8}, "in_channels of .* must be 16 for a LTX2Pipeline, got 8"),
        ("hunyuan-video15", "transformer", {"out_channels": 8}, "out_channels of .* must be 32 for a HunyuanVideo15"),
        ("wan21", "transformer", {"out_channels": 8}, "out_channels of .* must be 16 for a WanPipeline, got 8"),
        (
            *("sd35-large", "text_encoder_3", {"quantization_config": {"quant_method": "bitsandbytes"}}),
            r"quantization_config of .*text_encoder_3/config.json must be null for a .*, got .*bitsandbytes",
        ),
    ],
)
def test_a_shape_that_is_built_in_otherwise_is_refused_by_name(name, part, entries, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        open_model(changed(ROWS[name].checkpoint(), tmp_path / "model", part, **entries))


def test_sizes_are_multiples_of_a_patch_of_sd3(tmp_path):
    model = open_model(changed(ROWS["sd35-medium"].checkpoint(), tmp_path / "model", "transformer", patch_size=4))
    model.check(Params(2, 64, 96))
    with pytest.raises(ValueError, match=r"height must be a positive multiple of 32 pixels .*, got 48"):
        model.check(Params(2, 48, 80))


def test_all_files_are_there(case):
    case.model.check_files()
    assert all(file.suffix == ".safetensors" for file in case.model.weight_files())


def test_no_file_names_a_folder_of_the_machine_that_wrote_it(case):
    assert absolute_paths(case.model.path) == []


def test_every_model_has_a_row():
    assert {type(open_model(row.checkpoint())) for row in ROWS.values()} == set(MODELS.values())
