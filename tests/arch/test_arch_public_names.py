"""The public names stand where a user finds them, with the parameters they promise, and the packages move together."""

import ast
import importlib
import inspect
import tomllib
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import pytest
from helpers import REPO, public_names
from packaging.requirements import Requirement

PACKAGES = ("omni-rl", "omni-losses", "omni-reward", "omni-rollout", "omni-sched", "omni-train")

# Parameters as in a `def`. `= ...` is a default that is not promised; `**others` stands for further parameters.
STEP = "velocity, x, sigma, sigma_next, *, noise_level, noise=None, x_next=None"
SIGNATURES = {
    "omni_sched.linear_sigmas": "num_steps",
    "omni_sched.shift_sigmas": "sigmas, shift",
    "omni_sched.exponential_shift_sigmas": "sigmas, mu",
    "omni_sched.resolution_mu": "num_tokens, *, base_tokens=256, max_tokens=4096, base_mu=0.5, max_mu=1.15",
    "omni_sched.Transition": "x_next, mean, std, log_prob",
    "omni_sched.euler_step": "velocity, x, sigma, sigma_next",
    "omni_sched.ode_step": "velocity, x, sigma, sigma_next, *, noise_level=0.0, noise=None, x_next=None",
    "omni_sched.sde_step": f"{STEP}, sigma_max=None",
    "omni_sched.cps_step": STEP,
    "omni_sched.dance_step": STEP,
    "omni_sched.gaussian_log_prob": "x_next, mean, std",
    "omni_sched.add_noise": "x0, noise, sigma",
    "omni_sched.renoise": "x, noise, sigma, sigma_to",
    "omni_sched.sde_window": "num_steps, size=None, *, low=0, high=None, strategy='random', iteration=0, seed=0, "
    "iters_per_window=1, stride=1",
    "omni_sched.step_noise": "seeds, step, shape",
    "omni_sched.compress_sigmas": "sigmas, start, compress_ratio",
    "omni_sched.dpmpp_2m_step": "velocity, x, sigma, sigma_next, *, last_data=None, last_sigma=None",
    "omni_losses.LossOutput": "loss, metrics",
    "omni_losses.group_advantages": "rewards, groups, *, std='batch', eps=1e-4, correction=1",
    "omni_losses.grpo_loss": "log_prob, old_log_prob, advantages, *, clip_range, adv_clip_max=5.0, weights=None",
    "omni_losses.gaussian_kl": "mean, ref_mean, std",
    "omni_losses.multi_reward_advantages": "rewards, groups, reward_weights, *, std='group', eps=1e-4, correction=1, "
    "rescale=False",
    "omni_losses.filter_groups": "rewards, groups",
    "omni_losses.best_worst_n": "rewards, groups, n",
    "omni_losses.reward_probability": "advantages, *, adv_clip_max=5.0",
    "omni_losses.old_policy_decay": "step, *, schedule",
    "omni_losses.best_worst_pairs": "rewards, groups",
    "omni_losses.grpo_guard_loss": "log_prob, old_log_prob, advantages, *, mean, old_mean, std, sqrt_dt=None, "
    "clip_range, adv_clip_max=5.0, weights=None",
    "omni_losses.flow_dppo_loss": "log_prob, old_log_prob, advantages, *, mean, old_mean, std, kl_threshold=1e-5, "
    "weights=None",
    "omni_losses.tempflow_weights": "std, *, scale=2.25",
    "omni_losses.gspo_loss": "log_prob, old_log_prob, advantages, mask, *, clip_low=3e-4, clip_high=4e-4, weights=None",
    "omni_losses.velocity_error": "velocity, x0, noise",
    "omni_losses.diffusion_nft_loss": "velocity, old_velocity, x0, x_t, sigma, reward_prob, *, nft_beta, "
    "adv_clip_max=5.0, ref_velocity=None, kl_coef=0.0, min_weight=1e-5, weights=None",
    "omni_losses.awm_log_prob": "velocity, x0, noise, sigma, *, weighting='ghuber'",
    "omni_losses.awm_loss": "log_prob, old_log_prob, advantages, *, clip_range=1.0, adv_clip_max=5.0, weights=None",
    "omni_losses.dgpo_loss": "error, ref_error, old_error, advantages, groups, *, dgpo_beta, clip_range=1e-2, "
    "adv_clip_max=5.0",
    "omni_losses.diffusion_dpo_loss": "win_error, lose_error, ref_win_error, ref_lose_error, *, dpo_beta",
    "omni_losses.direct_align": "velocity, x, noise, sigma, sigma_next",
    "omni_losses.srpo_loss": "positive_reward, negative_reward, *, discount, inversion=False, threshold=0.7",
    "omni_losses.velocity_kl": "velocity, ref_velocity",
    "omni_losses.k3_kl": "log_prob, ref_log_prob",
    "omni_losses.distill_kl_loss": "mean, teacher_mean, std, *, weights=None",
    "omni_losses.distill_velocity_loss": "velocity, teacher_velocity, *, weights=None",
    "omni_losses.distribution_matching_loss": "x0, fake_x0, teacher_x0, *, min_scale=1e-5, weights=None",
    "omni_losses.added_noise_error": "velocity, x, noise, sigma, std",
    "omni_losses.rollout_weights": "old_log_prob, rollout_log_prob, *, level='trajectory', mode='truncate', low, high",
    "omni_rollout.Prompt": "text, group, index, seed, negative='', images=(), audio=None, meta=..., "
    "initial_seed=None, size=None, video=None, rates=...",
    "omni_rollout.Params": "num_inference_steps, height, width, num_frames=1, frame_rate=24.0, guidance_scale=1.0, "
    "guidance=..., rule=..., noise_level=0.0, sde_steps=(), keep_mean=False, solver=..., compress_ratio=1.0, "
    "decode=True",
    "omni_rollout.Samples": "prompts, media, rates, weight_version",
    "omni_rollout.Trajectory": "prompts, media, rates, weight_version, x, x_next, sde_steps, sigmas, rollout_log_prob, "
    "rollout_mean, cond, x0, params",
    "omni_rollout.Trajectory.to": "self, device",
    "omni_rollout.Trajectory.select": "self, indices",
    "omni_rollout.Trajectory.split": "self, size",
    "omni_rollout.Trajectory.cat": "parts",
    "omni_rollout.Trajectory.trim": "self",
    "omni_rollout.replay": "model, net, trajectory, k",
    "omni_rollout.models.open_model": "path",
    "omni_rollout.Model.check": "self, params",
    "omni_rollout.Model.check_files": "self",
    "omni_rollout.Model.check_image": "self, height, width",
    "omni_rollout.Model.latent_shape": "self, params",
    "omni_rollout.Model.sigmas": "self, params",
    "omni_rollout.Model.load": "self, *, device, dtype, net=None",
    "omni_rollout.Model.load_net": "self, *, device, dtype",
    "omni_rollout.Model.empty_net": "self, *, buffers=False",
    "omni_rollout.Model.weight_files": "self, part='transformer'",
    "omni_rollout.Model.encode": "self, parts, prompt, *, negative=False, **options",
    "omni_rollout.Model.condition": "self, parts, prompt, params",
    "omni_rollout.Model.is_guided": "self, params",
    "omni_rollout.Model.unguided": "self, params",
    "omni_rollout.Model.predict_velocity": "self, net, x, sigma, cond, params",
    "omni_rollout.Model.decode": "self, parts, x0, cond, params",
    "omni_rollout.Model.encode_media": "self, parts, media, params",
    "omni_rollout.Engine.generate": "self, prompts, params",
    "omni_rollout.Engine.prepare": "self, prompts, params",
    "omni_rollout.Engine.condition": "self, prompts, params",
    "omni_rollout.Engine.load_weights": "self, tensors, *, version",
    "omni_rollout.Engine.close": "self",
    "omni_rollout.Engine.sleep": "self",
    "omni_rollout.Engine.wake": "self",
    "omni_reward.RewardClient": "url, *, token=None, timeout_s=..., max_in_flight=..., on_failure='raise', "
    "mask_limit=..., proxy='none'",
    "omni_reward.RewardClient.check": "self, media=None, prompts=..., meta=None, references=None",
    "omni_reward.RewardClient.submit": "self, media, prompts, meta=None, references=None, groups=None",
    "omni_reward.Score": "value, abstained=None, **others",
    "omni_reward.Scorer": "score_fn, media=('image',), batch_size=None, version='', references=False, timed=False, "
    "groups=False, move=None",
    "omni_reward.server.create_app": "score_fn, **others",
    "omni_reward.scorers.load_scorer": "name, *, threads=1, options=None",
    "omni_reward.terms.parse": "text, names=()",
    "omni_reward.combine.combine": "reward, scorers",
    "omni_reward.combine.stack_parts": "scores, names",
    "omni_train.dist.local_device": "local_rank=0",
    "omni_train.dist.memory": "device",
    "omni_train.dist.init_distributed": "**others",
    "omni_train.dist.tell_failure": "message, *, wait_s=...",
    "omni_train.dist.shard_mesh": "dist, size=0",
    "omni_train.shard.shard": "module, mesh, *, mode, **others",
    "omni_train.shard.gathered": "module",
    "omni_train.weights.load.load_sharded": "net, files, mesh, *, block_names=(), compute_dtype=None, param_dtype=..., "
    "device='cpu', expert_names=(), whole=...",
    "omni_train.lora.add_lora": (
        "module, targets, *, exclude=(), parameters=(), rank, alpha, use_rslora=False, use_dora=False, "
        "in_float32=False, adapter='default', seed, init='default'"
    ),
    "omni_train.lora.init_adapter": "module, adapter='default', *, seed, init='default'",
    "omni_train.weights.snapshot.Snapshot": "params, *, name='snapshot'",
    "omni_train.weights.snapshot.Snapshot.applied": "self",
    "omni_train.weights.snapshot.Snapshot.pairs": "self",
    "omni_train.lora.adapter": "module, name",
    "omni_train.lora.reference": "module",
    "omni_train.lora.ema_update": "module, src, dst, decay",
    "omni_train.weights.full.named_weights": "module",
    "omni_train.weights.full.save_weights": "module, folder, dist, *, part='transformer', adapter='default', into=None"
    ", card=None",
    "omni_train.weights.full.check_weights": "module, folder, *, part='transformer'",
    "omni_train.weights.full.load_weights": "module, folder, *, part='transformer'",
    "omni_train.weights.adapters.load_adapter": "module, place, *, adapter='default', part='transformer'",
    "omni_train.checkpoint.store.Checkpoint": "folder, dist, *, keep=2, wait_for=..., url='', run_files=()",
    "omni_train.checkpoint.store.Checkpoint.save": "self, step, module, optimizer=None, ema=None, *, config",
    "omni_train.checkpoint.store.Checkpoint.async_save": "self, step, module, optimizer=None, ema=None, *, config",
    "omni_train.checkpoint.store.Checkpoint.poll": "self",
    "omni_train.checkpoint.store.Checkpoint.wait": "self",
    "omni_train.checkpoint.store.Checkpoint.load": "self, saved, module, optimizer=None, ema=None",
    "omni_train.checkpoint.store.Checkpoint.latest": "self",
    "omni_train.checkpoint.store.Checkpoint.verify": "self, saved, module=None",
    "omni_train.checkpoint.store.check_config": "saved, config, *, ignore=()",
    "omni_train.lock.RunLock": "folder, dist, **others",
    "omni_train.dist.gather_by_index": "dist, indices, values, total",
    "omni_train.signals.catch_stop": "numbers=...",
    "omni_train.weights.card.model_card": "facts, *, is_lora, part='transformer', into='transformer', "
    "library='diffusers'",
    "omni_train.prompts.sampler.PromptSampler": "path, **others",
    "omni_train.prompts.sampler.PromptSampler.at": "self, step",
    "omni_train.log.RunLog": "folder, **others",
    "omni_train.log.RunLog.log": "self, step, metrics, **others",
    "omni_rl.report.Sample": "prompt, reward, **others",
    "omni_rl.report.write_eval": "folder, step, media, samples, **others",
    "omni_rl.report.write_samples": "folder, step, media, samples, **others",
    "omni_rl.report.write_versions": "folder, **others",
    "omni_rl.report.write_report": "folder",
    "omni_rl.report.write_comparison": "folders, path",
    "omni_rl.report.process.ReportProcess": "folder, track='none', project='omni-rl'",
    "omni_rl.run.sinks.tensorboard": "folder",
    "omni_rl.run.sinks.wandb": "project, folder",
    "omni_rl.run.sinks.trackio": "project, folder",
    "omni_rl.run.sinks.tracker": "kind, folder, project",
    "omni_rl.run.sinks.check_tracker": "kind, project",
}
CHOICES = {  # of a parameter that takes one of several words
    "omni_sched.sde_window.strategy": {"all", "fixed", "random", "sliding"},
    "omni_losses.group_advantages.std": {"batch", "group", "none"},
    "omni_losses.old_policy_decay.schedule": {"copy", "linear", "delayed_linear"},
    "omni_losses.awm_log_prob.weighting": {"uniform", "t", "t2", "huber", "ghuber"},
    "omni_losses.rollout_weights.level": {"trajectory", "step"},
    "omni_losses.rollout_weights.mode": {"truncate", "mask"},
    "omni_train.shard.shard.mode": {"none", "ddp", "fsdp2"},
    "omni_reward.RewardClient.__init__.on_failure": {"raise", "mask", "mask_group"},
}


def find(name: str) -> object:
    """What a dotted name stands for: as many parts as possible are a module, the others attributes."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def promised(parameters: str) -> tuple[list[tuple[str, bool, str]], bool]:
    """(name, whether by keyword alone, default) of each parameter, and whether others may follow."""
    (function,) = ast.parse(f"def f({parameters}): ...").body
    assert isinstance(function, ast.FunctionDef)
    args = function.args
    defaults = [None] * (len(args.args) - len(args.defaults)) + args.defaults + args.kw_defaults
    return [
        (arg.arg, arg in args.kwonlyargs, "" if default is None else repr(ast.literal_eval(default)))
        for arg, default in zip(args.args + args.kwonlyargs, defaults, strict=True)
    ], args.kwarg is not None


def signature_fault(thing: object, parameters: str) -> str:
    """How the parameters of a function or class differ from the promised ones; empty where they do not."""
    wanted, others = promised(parameters)
    given = inspect.signature(thing).parameters.values()  # type: ignore[arg-type]
    have = [(p.name, p.kind is p.KEYWORD_ONLY, "" if p.default is p.empty else repr(p.default)) for p in given]
    open_names = {name for name, _, default in wanted if default == repr(...)}
    have = [
        (name, by_keyword, repr(...) if default and name in open_names else default)
        for name, by_keyword, default in have
    ]
    if others:
        have = have[: len(wanted)]
    return "" if have == wanted else f"has {have}, promises {wanted}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_name_takes_what_it_promises(name: str):
    assert signature_fault(find(name), SIGNATURES[name]) == ""


@pytest.mark.parametrize("parameters", ["x, *, y=2", "x, y=1", "x, *, z=1", "x, *, y", "x", "x=0, *, y=1", "*, x, y=1"])
def test_another_signature_is_a_fault(parameters: str):
    def thing(x, *, y=1): ...

    assert signature_fault(thing, "x, *, y=1") == signature_fault(thing, "x, *, y=...") == ""
    assert signature_fault(thing, "x, **others") == ""
    assert signature_fault(thing, parameters)


@pytest.mark.parametrize("name", CHOICES)
def test_the_parameter_takes_the_words_it_promises(name: str):
    function, _, parameter = name.rpartition(".")
    assert set(get_args(get_type_hints(find(function))[parameter])) >= CHOICES[name]


@pytest.mark.parametrize(
    "name",
    [
        "omni_sched.Transition",
        "omni_losses.LossOutput",
        "omni_rollout.Prompt",
        "omni_rollout.Params",
        "omni_rollout.Samples",
        "omni_rollout.Trajectory",
        "omni_reward.Score",
    ],
)
def test_records_are_frozen(name: str):
    record = find(name)
    assert is_dataclass(record)
    assert fields(record)
    assert record.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_promised_names_are_exported():
    for package in ("omni_sched", "omni_losses", "omni_reward", "omni_rollout"):
        module = importlib.import_module(package)
        promised_names = {parts[1] for name in SIGNATURES if (parts := name.split("."))[0] == package}
        assert promised_names - {"server", "scorers", "combine", "terms", "models"} <= public_names(module)


def test_reward_errors_are_one_family():
    import omni_reward

    assert issubclass(omni_reward.RewardError, Exception)
    for kind in ("Timeout", "Connect", "HTTP", "Format"):
        assert issubclass(getattr(omni_reward, f"Reward{kind}Error"), omni_reward.RewardError)


def test_every_model_takes_what_the_door_promises():
    from omni_rollout.models import MODELS

    door = [name.rpartition(".")[2] for name in SIGNATURES if name.startswith("omni_rollout.Model.")]
    for model in MODELS.values():
        assert {
            name: signature_fault(getattr(model, name), SIGNATURES[f"omni_rollout.Model.{name}"]) for name in door
        } == dict.fromkeys(door, "")
        for constant in (
            "nets",
            "boundary",
            "BLOCK_NAMES",
            "LORA_TARGETS",
            "OPTIONS",
            "TEXT_OPTIONS",
            "MEDIA",
            "IMAGES",
            "NEGATES_TEXT",
        ):
            assert hasattr(model, constant), constant


def project(folder: str) -> dict:
    return tomllib.loads((REPO / folder / "pyproject.toml").read_text("utf-8"))["project"]


def test_all_packages_and_the_root_have_one_version():
    assert sorted(path.name for path in (REPO / "packages").iterdir() if path.is_dir()) == sorted(PACKAGES)
    version = project(".")["version"]
    major, minor, _ = version.split(".")
    bound = Requirement(f"x>={version},<{major}.{int(minor) + 1}").specifier
    named = []
    for folder in (".", *(f"packages/{name}" for name in PACKAGES)):
        assert project(folder)["version"] == version
        if folder != ".":
            module = importlib.import_module(project(folder)["name"].replace("-", "_"))
            assert module.__version__ == version
        extras = project(folder).get("optional-dependencies", {})
        for text in [*project(folder)["dependencies"], *(text for extra in extras.values() for text in extra)]:
            requirement = Requirement(text)
            if requirement.name in PACKAGES:
                assert requirement.specifier == bound, f"{folder}: {text}"
                named.append((folder, requirement.name))
    umbrella = {name for folder, name in named if folder == "packages/omni-rl"}
    assert umbrella == set(PACKAGES) - {"omni-rl"}
