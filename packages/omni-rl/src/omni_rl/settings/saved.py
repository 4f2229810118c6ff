"""What a checkpoint records of the settings and the files of a run, which must be the same when the run resumes."""

from collections.abc import Sequence
from pathlib import Path

from omni_train.checkpoint.index import Config, Saved, check_config
from omni_train.files import files_digest, probe_digest
from omni_train.hub import pin_revision
from omni_train.prompts.splits import data_files

from omni_rl.settings.args import RunArgs
from omni_rl.settings.fields import MAY_CHANGE, SECRET, marked_settings, require

GOLD_DIGEST = "eval.gold_prompts_digest"
LOSS_SCALE = "loss_scale"
EVALS = "evals"
RUN_KEYS = ("gate", LOSS_SCALE, EVALS)  # keys that a run adds to its settings in a checkpoint


def check_same(args: RunArgs, saved: Saved, current: Config) -> None:
    """Raise ValueError if a run resumes with different settings or files, except those that may change."""
    planned_steps = saved.config.get("train_steps", args.run.train_steps)
    has_schedule = args.optim.lr_scheduler_type != "constant"
    kind = f"--optim.lr-scheduler-type {args.optim.lr_scheduler_type}"
    rule = f"--train-steps must be {planned_steps}, as {kind} ends with the last step: to train longer, give the run "
    rule += f"another --name and its weights as --init-weights runs/{args.run.name}/weights, got {args.run.train_steps}"
    require((not has_schedule or planned_steps == args.run.train_steps, rule))
    changeable = {*marked_settings(type(args), MAY_CHANGE, SECRET)}
    if args.sampling.draw_ahead:  # no samples are pending at a save or an evaluation
        changeable -= {"save_every", "eval.every"}
    check_config(saved, current, ignore=(*changeable, "train_steps", "scorer", *RUN_KEYS))


def file_digests(args: RunArgs, model: Path | None) -> dict[str, str]:
    """Return digests of the files of prompts and weights. model: its folder, or None if it is not downloaded yet."""
    files = data_files(args.data.prompts)
    prompts = {"prompts": pin_revision(args.data.prompts, files[0]), "prompts_digest": files_digest(files)}
    if args.eval.gold_prompts:
        prompts[GOLD_DIGEST] = files_digest(data_files(args.eval.gold_prompts))
    start = sorted(Path(args.policy.init_weights).rglob("*.safetensors")) if args.policy.init_weights else []
    weights = {"weights_digest": weights_digest(args.policy.model, model, start)} if model else {}
    return prompts | weights


def weights_digest(place: str, folder: Path, others: Sequence[Path] = ()) -> str:
    """Return a digest of a model's weights and of other files.

    A hub model is identified by its commit, because some of its files may be downloaded later.

    place: the model's folder or hub id. folder: the folder with its files.
    """
    if Path(place).is_dir():
        return probe_digest([*sorted(folder.rglob("*.safetensors")), *others])
    return f"{folder.name} {probe_digest(others)}"
