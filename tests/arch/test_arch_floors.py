"""Who may import whom, where a device, a model or an engine may be named, and what no file may hold.

Each rule is a function from a file's place and source to its faults. It is run over the tree, where it must find none,
and over small bad sources, where it must find one: a rule that cannot fail holds nothing.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch

import pytest
from helpers import REPO
from omni_rl.run.engines import ENGINES
from omni_rollout.models import MODELS

# A place is a path below packages/*/src, as omni_sched/steps.py, or below the repository, as apps/sample.py.
SIBLINGS = {"omni_sched", "omni_losses", "omni_reward", "omni_rollout", "omni_train", "omni_rl"}
MAY_IMPORT = {  # places -> libraries and siblings, whichever way a line names them
    "omni_sched/*": {"torch"},
    "omni_losses/*": {"torch"},
    "omni_reward/*": {"requests", "urllib3", "numpy", "PIL", "safetensors"},
    "omni_reward/connections.py": {"uvicorn", "h11"},
    "omni_reward/server.py": {"starlette", "uvicorn"},
    "omni_reward/scorers/ocr.py": {"rapidocr"},
    "omni_reward/scorers/text.py": {"rapidfuzz"},
    "omni_reward/scorers/neural.py": {"torch", "transformers", "huggingface_hub"},
    "omni_reward/scorers/heads.py": {"torch"},
    "omni_reward/scorers/clip.py": {"torch", "transformers"},
    "omni_reward/scorers/geneval.py": {"torch", "transformers"},
    "omni_reward/scorers/aesthetic.py": {"torch"},
    "omni_reward/scorers/hpsv2.py": {"ftfy", "torch", "transformers"},
    "omni_reward/scorers/imagereward.py": {"torch", "transformers"},
    "omni_reward/scorers/hpsv3.py": {"torch"},
    "omni_reward/scorers/editreward.py": {"torch"},
    "omni_reward/scorers/videoalign.py": {"torch"},
    "omni_reward/scorers/qwen2_vl.py": {"torch", "transformers"},
    "omni_reward/scorers/clap.py": {"torch", "transformers"},
    "omni_reward/scorers/imagebind.py": {"torch", "transformers", "imagebind"},
    "omni_rollout/*": {"torch", "omni_sched"},
    "omni_rollout/models/*": {"diffusers", "transformers"},
    "omni_rollout/files.py": {"safetensors"},  # which diffusers brings
    "omni_rollout/conditioning.py": {"safetensors"},
    "omni_rollout/engines/diffusers.py": {"diffusers", "transformers"},
    "omni_rollout/engines/transformers.py": {"transformers"},
    "omni_rollout/engines/vllm_omni/*": {"vllm", "vllm_omni"},  # the engine, its worker, its pipelines, its platform
    "omni_rollout/engines/vllm_omni/pipelines.py": {"transformers"},
    "omni_rollout/engines/guest.py": {"setproctitle", "numpy"},  # only to put title and generator back
    "omni_train/*": {"torch", "peft", "safetensors", "numpy"},
    "omni_train/lock.py": {"filelock"},
    "omni_rl/*": {
        *("torch", "safetensors", "numpy", "PIL"),
        *("omni_sched", "omni_losses", "omni_reward", "omni_rollout", "omni_train"),
    },
    "omni_rl/settings/cli.py": {"tyro"},
    "omni_rl/settings/fields.py": {"tyro"},
    "omni_rl/media/prompts.py": {"av"},
    "omni_rl/media/videos.py": {"av"},
    "omni_rl/media/write.py": {"av"},
    "omni_rl/report/serve.py": {"prometheus_client", "starlette", "uvicorn"},
    "omni_rl/tools/lora_files.py": {"diffusers", "peft"},
    "omni_rl/tools/prompts.py": {"requests", "urllib3"},
    "apps/train_*": {"torch", "numpy", *SIBLINGS},
    "apps/sample.py": {"torch", "numpy", *SIBLINGS},
    "apps/flowgrpo_by_hand.py": {"torch", "tyro", *SIBLINGS} - {"omni_rl"},
    "apps/variants/*": {"torch", "tyro", *SIBLINGS} - {"omni_rl"},
}
MAY_IMPORT_LAZILY = {  # inside a function
    "omni_reward/rules.py": {"math_verify"},
    "omni_reward/serving.py": {"uvicorn"},
    "omni_rollout/models/diffusers_model.py": {"accelerate"},  # which diffusers brings
    "omni_rollout/models/hub.py": {"huggingface_hub"},
    "omni_rollout/models/ltx2.py": {"av"},
    "omni_rollout/models/parts.py": {"huggingface_hub"},
    "omni_rollout/models/tokens/transformers_model.py": {"accelerate", "jinja2"},  # jinja2 renders chat templates
    "omni_rollout/models/wan.py": {"ftfy"},
    "omni_rollout/engines/vllm.py": {"vllm"},
    "omni_train/prompts/table.py": {"pyarrow"},
    "omni_train/hub.py": {"huggingface_hub"},
    "omni_train/display.py": {"rich"},
    "omni_train/remote.py": {"fsspec"},  # which torch brings
    "omni_rl/flow/direct_rewards.py": {"transformers"},
    "omni_rl/run/sinks.py": {"wandb", "trackio", "swanlab", "mlflow"},
    "omni_rl/tools/doctor.py": {"huggingface_hub"},
    "omni_rl/tools/hub.py": {"huggingface_hub"},
}
MUST_NOT_IMPORT = {  # places -> modules, where naming the library is too coarse
    "omni_reward/*": ("safetensors.torch",),
    "omni_sched/*": ("torch.distributed",),
    "omni_losses/*": ("torch.distributed",),
    "omni_rollout/[!e]*": ("torch.distributed",),
    "omni_rollout/engines/[!gv]*": ("torch.distributed",),
    "omni_rollout/engines/vllm.py": ("torch.distributed",),
    "omni_rollout/engines/vllm_omni/[!w]*": ("torch.distributed",),  # its worker meets the process group, as guest.py
}
MAY_NAME_DEVICES = (
    "omni_rollout/engines/vllm_omni/engine.py",
    "omni_train/memory/recompute.py",  # an operator of torch_npu
)
MAY_NAME_MODELS = (
    "omni_rollout/models/*",
    "omni_rollout/engines/vllm_omni/pipelines.py",  # what that engine samples a model with
    "omni_rollout/engines/vllm_omni/formats.py",  # and what it quantizes
    "scripts/pretraining/*.py",  # builders of the checkpoints that are shipped
    "scripts/build_tiny_*.py",
    "scripts/released_folder.py",
    "scripts/real_size.py",
    "scripts/record_*.py",  # what other implementations of a model draw
)
MAY_NAME_ENGINES = ("omni_rl/run/engines.py", "omni_rollout/engines/*")
MODEL_WORDS = {
    word
    for kind, door in MODELS.items()
    for word in (kind, door.__name__, door.__module__.split(".")[-1], door.PARTS["transformer"][1])
}
MODEL = re.compile(rf"(?<![a-zA-Z0-9])({'|'.join(MODEL_WORDS)})(?![0-9a-z])")
DEVICE = re.compile(r"(?<![a-z])(cuda|npu)(?![a-z])")
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_NAMES = {  # object collectives unpickle what arrives; the others import what a string names
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "import_module",
    "entry_points",
}
SAFE_KEYWORDS = {"weights_only": "True", "allow_pickle": "False"}  # where one is given at all
HOSTS = [  # in pieces, as no file may hold them, this one included
    ".".join(pieces)
    for pieces in (
        ("pypi", "org"),
        ("pypi", "python", "org"),
        ("files", "pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("pypi", "nvidia", "com"),
        ("conda", "anaconda", "org"),
        ("pypi", "tuna", "tsinghua", "edu", "cn"),
        ("mirrors", "aliyun", "com"),
    )
]
INDEX = re.compile(r"index[-_]url\W{1,4}\w+://|\[\[(tool\.uv\.)?index\]\]")


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether the line stands inside a function) of all imports; relative ones stay in their package."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((f"{node.module}.{alias.name}", id(node) in inner) for alias in node.names)


def allowed(place: str, table: dict[str, set[str]]) -> set[str]:
    """What all lines of the table that fit the place allow together."""
    return set().union(*(names for pattern, names in table.items() if fnmatch(place, pattern)))


def attributes(source: str) -> Iterator[str]:
    """All attributes, each with what it is taken from: torch.distributed.barrier and torch.distributed."""
    return (ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))


def floor_faults(place: str, source: str) -> list[str]:
    """Libraries and siblings that the floors do not allow at this place."""
    package = place.partition("/")[0]
    free = allowed(place, MAY_IMPORT) | {package} | sys.stdlib_module_names
    lazy = free | allowed(place, MAY_IMPORT_LAZILY)
    barred = [name for pattern, names in MUST_NOT_IMPORT.items() if fnmatch(place, pattern) for name in names]
    found = list(imports(source))
    faults = [name for name, inside in found if name.partition(".")[0] not in (lazy if inside else free)]
    for name in {*(name for name, _ in found), *attributes(source)}:
        faults += [name for module in barred if f"{name}.".startswith(f"{module}.")]
    return [f"{place} must not use {name}" for name in faults]


def device_faults(place: str, source: str) -> list[str]:
    """Names of devices in imports, attributes and strings; docstrings may speak of them."""
    if place in MAY_NAME_DEVICES:
        return []
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    names = [name for name, _ in imports(source)]
    names += [name.rpartition(".")[2] for name in attributes(source)]
    names += [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements
    ]
    return [f"{place} must not name a device: {name}" for name in names if DEVICE.search(name)]


def model_faults(place: str, source: str) -> list[str]:
    """Names of a model's class, module, net or pipeline outside its file; docstrings and comments may speak of them."""
    if any(fnmatch(place, pattern) for pattern in MAY_NAME_MODELS):
        return []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant("")
    return [f"{place} must not name a model: {found[1]}" for found in MODEL.finditer(ast.unparse(tree))]


def engine_faults(place: str, source: str) -> list[str]:
    """Comparisons with an engine's name, and questions for its class, where it can be asked itself."""
    if any(fnmatch(place, pattern) for pattern in MAY_NAME_ENGINES):
        return []
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and "engine" in ast.unparse(node):
            faults += [ast.unparse(node) for part in ast.walk(node) if getattr(part, "value", "") in ENGINES]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            faults += [ast.unparse(node) for part in ast.walk(node.args[1]) if ast.unparse(part).endswith("Engine")]
    return [f"{place} must ask the engine instead: {fault}" for fault in faults]


def open_faults(place: str, source: str) -> list[str]:
    """Settings without a type, and parameters that take anything under any name."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arguments):
            named = {arg.arg: arg.annotation for arg in (*node.args, *node.kwonlyargs)}
            faults += ["args: Any"] if ast.unparse(named.get("args") or ast.Constant(0)) == "Any" else []
            others = node.kwarg if node.kwarg and node.kwarg.arg == "others" else None
            faults += ["**others: Any"] if others and ast.unparse(others).partition(": ")[2] in ("", "Any") else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            faults += [ast.unparse(node)] if ast.unparse(node.args[0]).split(".")[-1] == "args" else []
    return [f"{place} must not have {fault}" for fault in faults]


def alone_faults(place: str, source: str) -> list[str]:
    """Whatever ties an app to the folder that it stands in."""
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return [f"{place} must not use {name}" for name in sorted(names & {"__file__", "__path__"})]


def safety_faults(place: str, source: str) -> list[str]:
    """Whatever runs code that came in as data, or imports by string."""
    faults = [name for name, _ in imports(source) if UNSAFE_MODULES & set(name.split("."))]
    faults += [name for name, _ in imports(source) if name.rpartition(".")[2] in UNSAFE_NAMES]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in UNSAFE_NAMES:
            faults.append(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            faults.append(f"{node.func.id}()")
        elif isinstance(node, ast.keyword) and SAFE_KEYWORDS.get(node.arg or "") not in (None, ast.unparse(node.value)):
            faults.append(f"{node.arg}={ast.unparse(node.value)}")
    return [f"{place} must not use {fault}" for fault in faults]


def remote_faults(place: str, source: str) -> list[str]:
    """Classes of transformers that may run the Python of a model's folder: Auto ones, and those that no name fixes."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        kind, said = ast.unparse(node.func.value), {each.arg: ast.unparse(each.value) for each in node.keywords}
        is_fixed = re.fullmatch(r"(\w+\.)*(?!Auto[A-Z])[A-Z]\w+", kind)
        opens = node.func.attr == "from_pretrained" or (node.func.attr == "from_config" and "Auto" in kind)
        if opens and not is_fixed and said.get("trust_remote_code") != "False":
            faults.append(f"{place} must give {kind}.{node.func.attr} trust_remote_code=False")
    return faults


def tracked_faults(place: str, source: str) -> list[str]:
    """Lock files, which record where packages came from, and addresses of package registries."""
    faults = [f"{place} names {host}" for host in HOSTS if host in source]
    if INDEX.search(source):
        faults.append(f"{place} sets the address of a package index")
    if place.rpartition("/")[2] == "uv.lock":
        faults.append(f"{place} must not be tracked")
    return faults


def package_sources() -> Iterator[tuple[str, str]]:
    for path in sorted(path for path in REPO.glob("packages/*/src/**/*.py") if not path.is_symlink()):
        yield path.relative_to(REPO).as_posix().split("/src/")[1], path.read_text(encoding="utf-8")


def app_sources() -> Iterator[tuple[str, str]]:
    for path in sorted((REPO / "apps").glob("*.py")):
        yield path.relative_to(REPO).as_posix(), path.read_text(encoding="utf-8")


def tracked_files() -> Iterator[tuple[str, str]]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        path = REPO / name
        if path.is_file():
            yield name, path.read_bytes().decode("latin-1")


def all_sources() -> Iterator[tuple[str, str]]:
    yield from package_sources()
    yield from app_sources()


def script_sources() -> Iterator[tuple[str, str]]:
    for path in sorted(REPO.glob("scripts/**/*.py")):
        yield path.relative_to(REPO).as_posix(), path.read_text(encoding="utf-8")


def everything() -> Iterator[tuple[str, str]]:
    yield from all_sources()
    yield from script_sources()


Sources = Callable[[], Iterator[tuple[str, str]]]
Rule = Callable[[str, str], list[str]]


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (floor_faults, all_sources),
        (model_faults, everything),
        (engine_faults, everything),
        (open_faults, all_sources),
        (alone_faults, app_sources),
        (device_faults, package_sources),
        (safety_faults, all_sources),
        (remote_faults, everything),
        (tracked_faults, tracked_files),
    ],
    ids=["floors", "models", "engines", "open", "alone", "devices", "safety", "remote", "tracked"],
)
def test_the_tree_keeps_the_rule(rule: Rule, sources: Sources):
    places = dict(sources())
    assert places
    assert [fault for place, source in places.items() for fault in rule(place, source)] == []


def test_every_package_has_its_line_and_its_sources_are_found():
    assert {place.partition("/")[0] for place, _ in package_sources()} == SIBLINGS
    assert {pattern.partition("/")[0] for pattern in MAY_IMPORT} == {*SIBLINGS, "apps"}
    assert "apps/train_flowgrpo.py" in dict(app_sources())


BAD = [
    (floor_faults, "omni_sched/steps.py", "import numpy as np"),
    (floor_faults, "omni_sched/steps.py", "from omni_losses import grpo_loss"),
    (floor_faults, "omni_losses/policy.py", "from omni_rollout import Trajectory"),
    (floor_faults, "omni_losses/policy.py", "import torch.distributed as dist"),
    (floor_faults, "omni_losses/policy.py", "from torch import distributed"),
    (floor_faults, "omni_losses/policy.py", "torch.distributed.all_reduce(x)"),
    (floor_faults, "omni_reward/client.py", "def f():\n    import torch"),
    (floor_faults, "omni_reward/client.py", "import starlette"),
    (floor_faults, "omni_reward/client.py", "from rapidfuzz.distance import Levenshtein"),
    (floor_faults, "omni_reward/wire.py", "from safetensors.torch import load"),
    (floor_faults, "omni_reward/wire.py", "from safetensors import torch"),
    (floor_faults, "omni_reward/wire.py", "import safetensors.torch"),
    (floor_faults, "omni_reward/scorers/clip.py", "import rapidocr"),
    (floor_faults, "omni_rollout/types.py", "if TYPE_CHECKING:\n    import diffusers"),
    (floor_faults, "omni_rollout/models/qwen_image.py", "import vllm_omni"),
    (floor_faults, "omni_rollout/engines/diffusers.py", "from omni_train.dist import memory"),
    (floor_faults, "omni_rollout/engines/diffusers.py", "from omni_reward import Score"),
    (floor_faults, "omni_train/weights/full.py", "from omni_rollout import Engine"),
    (floor_faults, "omni_train/lora.py", "import diffusers"),
    (floor_faults, "omni_rl/settings/args.py", "import tyro"),
    (floor_faults, "omni_train/log.py", "from rich.progress import Progress"),
    (floor_faults, "apps/sample.py", "import train_flowgrpo"),
    (floor_faults, "apps/flowgrpo_by_hand.py", "from omni_rl.run.loop import Loop"),
    (floor_faults, "apps/sample.py", "from settings import Args"),
    (floor_faults, "apps/sample.py", "def f():\n    import diffusers"),
    (model_faults, "apps/train_nft.py", "from omni_rollout.models import qwen_image"),
    (model_faults, "omni_rl/run/run.py", "from omni_rollout.models.qwen_image import QwenImage"),
    (model_faults, "omni_rl/run/run.py", 'if kind == "QwenImagePipeline": f()'),
    (model_faults, "scripts/score.py", "QwenImageTransformer2DModel.from_pretrained(path)"),
    (model_faults, "scripts/score.py", "SD3Transformer2DModel.from_pretrained(path)"),
    (engine_faults, "omni_rl/run/run.py", 'if args.engine == "diffusers": f()'),
    (engine_faults, "omni_rl/run/run.py", 'if args.engine in ("vllm-omni", "other"): f()'),
    (engine_faults, "apps/train_srpo.py", "isinstance(run.engine, DiffusersEngine)"),
    (engine_faults, "apps/train_srpo.py", "isinstance(run.engine, (int, engines.VllmOmniEngine))"),
    (open_faults, "omni_rl/run/run.py", "def f(args: Any, x: int): ..."),
    (open_faults, "apps/train_nft.py", "def f(now, **others: Any): ..."),
    (open_faults, "apps/train_nft.py", "def f(now, **others): ..."),
    (open_faults, "omni_rl/run/run.py", 'getattr(run.args, "algo", "")'),
    (open_faults, "omni_rl/run/run.py", 'hasattr(args, "height")'),
    (alone_faults, "apps/sample.py", "ROOT = Path(__file__).parents[1]"),
    (device_faults, "omni_sched/steps.py", "torch.cuda.synchronize()"),
    (device_faults, "omni_sched/steps.py", "x.to('cuda:1')"),
    (device_faults, "omni_sched/steps.py", "x.is_cuda"),
    (device_faults, "omni_sched/steps.py", "f'cuda:{rank}'"),
    (device_faults, "omni_rollout/types.py", "x.npu()"),
    (device_faults, "omni_rollout/types.py", "kind = 'npu'"),
    (device_faults, "omni_train/dist.py", "import torch_npu"),
    (device_faults, "omni_train/dist.py", "from torch import cuda"),
    (safety_faults, "omni_train/dist.py", "import pickle"),
    (safety_faults, "omni_train/dist.py", "from cloudpickle import dumps"),
    (safety_faults, "omni_train/dist.py", "import dill.source"),
    (safety_faults, "omni_train/dist.py", "dist.all_gather_object(out, x)"),
    (safety_faults, "omni_train/dist.py", "from torch.distributed import broadcast_object_list"),
    (safety_faults, "omni_train/weights/full.py", "torch.load(path, weights_only=False)"),
    (safety_faults, "omni_train/weights/full.py", "torch.load(path, weights_only=trusted)"),
    (safety_faults, "omni_reward/wire.py", "np.load(file, allow_pickle=True)"),
    (safety_faults, "apps/sample.py", "eval(sys.argv[1])"),
    (safety_faults, "apps/sample.py", "exec(code, {})"),
    (safety_faults, "apps/sample.py", "importlib.import_module(args.algo)"),
    (remote_faults, "omni_rl/run/run.py", "AutoTokenizer.from_pretrained(path)"),
    (remote_faults, "omni_rl/run/run.py", "transformers.AutoModel.from_config(config, dtype=dtype)"),
    (remote_faults, "omni_rollout/models/flux2.py", "self._class(part).from_pretrained(path, trust_remote_code=True)"),
    (remote_faults, "scripts/score.py", "kind.from_pretrained(name)"),
    (tracked_faults, "packages/omni-sched/uv.lock", "version = 1"),
    (tracked_faults, ".ci/run", f"pip install --index-url {'file:'}///wheels torch"),
    (tracked_faults, "pyproject.toml", "[[tool.uv." + 'index]]\nurl = "file:///wheels"'),
    *((tracked_faults, "docs/install.md", f"{'https:'}//{host}/simple") for host in HOSTS),
]


@pytest.mark.parametrize(("rule", "place", "source"), BAD)
def test_the_rule_can_fail(rule: Rule, place: str, source: str):
    assert rule(place, source)


@pytest.mark.parametrize(
    ("rule", "place", "source"),
    [
        (floor_faults, "omni_rollout/types.py", "from omni_sched import Transition\nfrom . import testing"),
        (floor_faults, "omni_reward/wire.py", "import json\nimport safetensors.numpy\nfrom safetensors import x"),
        (floor_faults, "omni_rl/settings/cli.py", "import argparse, tyro"),
        (floor_faults, "apps/sample.py", "import sys\nfrom omni_rl.settings.args import RunArgs\nimport torch"),
        (model_faults, "omni_rollout/models/qwen_image.py", "class QwenImage: ..."),
        (
            model_faults,
            "omni_rl/settings/args.py",
            'def f():\n    """As qwen_image does."""\n    path = "tiny-signs-qwen-image"',
        ),
        (engine_faults, "omni_rollout/models/diffusers_model.py", 'if library == "diffusers": f()'),
        (engine_faults, "omni_rl/run/engines.py", 'if engine == "diffusers": f()'),
        (engine_faults, "omni_rl/settings/args.py", 'engine: str = "diffusers"'),
        (open_faults, "omni_sched/steps.py", "def f(x: Tensor, **others: Tensor): ..."),
        (open_faults, "omni_rl/run/run.py", "def f(args: RunArgs): return getattr(type(args)(), name)"),
        (device_faults, "omni_rollout/engines/vllm_omni/engine.py", "torch.cuda.is_available()"),
        (device_faults, "omni_train/dist.py", 'def f():\n    """On cuda and npu."""\n    input_ids = num_inputs = 1'),
        (remote_faults, "omni_rl/run/run.py", "AutoTokenizer.from_pretrained(path, trust_remote_code=False)"),
        (remote_faults, "scripts/score.py", "AutoencoderKL.from_pretrained(path)\ndiffusers.VAE.from_config(config)"),
        (safety_faults, "omni_rollout/types.py", "net.eval()\nre.compile(x)\nnet.compile()"),
        (safety_faults, "omni_train/weights/full.py", "torch.load(path, weights_only=True)"),
    ],
)
def test_the_rule_lets_pass_what_is_allowed(rule: Rule, place: str, source: str):
    assert rule(place, source) == []
