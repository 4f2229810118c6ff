"""Base of models whose checkpoint is a diffusers pipeline folder: files, configuration, loading."""

import inspect
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from omni_sched import exponential_shift_sigmas, linear_sigmas, resolution_mu, shift_sigmas, stretch_sigmas
from torch import Tensor, nn

from omni_rollout.files import check_counts, read_json, safetensors_bytes, safetensors_files, safetensors_shapes
from omni_rollout.models.hub import local_folder
from omni_rollout.models.parts import RELEASED, checked_build, open_processor, open_tokenizer
from omni_rollout.offload import run_offloaded
from omni_rollout.types import Cond, Media, Params, Parts, Prompt, Rates, to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Value = TypeVar("Value", int, float, bool, str, list)
MAX_TEXT_TOKENS = 512  # largest max_sequence_length of the stock pipelines
PIXELS_PER_TOKEN = 16  # for images: 8 from the VAE, 2 from the patches
JOINT_ATTENTION = (  # diffusers' names of the layers of joint attention to images and texts
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
# Fields of a flow scheduler that change its levels or steps, besides those that `sigmas` reads, with the only supported
# values; a tuple lists alternatives.
FLOW_SCHEDULER: Mapping[str, object] = {
    "num_train_timesteps": 1000,
    "invert_sigmas": False,
    "stochastic_sampling": False,
    "time_shift_type": ("exponential", "linear"),
    "use_beta_sigmas": False,
    "use_exponential_sigmas": False,
    "use_flow_sigmas": False,
    "use_karras_sigmas": False,
}


class DiffusersModel:
    """The part of a Model that depends on the checkpoint's files; a subclass adds the arithmetic.

    PIPELINE: the `_class_name` in its INDEX. PARTS: the parts to load, each with its library and class. OPTIONAL: parts
    that may be missing in a checkpoint.
    GUIDANCE: scales of classifier-free guidance, `guidance_scale` or some of OPTIONS, each with its lowest value, which
    turns it off; negatives are required if a scale is above it. UNUSED: modules of parts that never run and are not
    loaded.

    Raises:
        ValueError: a configuration file is missing, damaged, or for another class; the message names the file.
    """

    PIPELINE: ClassVar[str]
    INDEX: ClassVar[str] = "model_index.json"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]]
    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    SCHEDULER: ClassVar[Mapping[str, object]] = FLOW_SCHEDULER
    BLOCK_NAMES: ClassVar[tuple[str, ...]]
    EXPERT_NAMES: ClassVar[tuple[str, ...]] = ()
    LORA_TARGETS: ClassVar[tuple[str, ...]]
    OPTIONS: ClassVar[Mapping[str, float]] = {}
    TEXT_OPTIONS: ClassVar[tuple[str, ...]] = ()
    GUIDANCE: ClassVar[Mapping[str, float]] = {"guidance_scale": 1.0}
    MEDIA: ClassVar[tuple[str, ...]] = ("image",)
    BRANCHES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    NEGATES_TEXT: ClassVar[bool] = False
    IMAGES = range(1)
    CONTEXT_PARALLEL: ClassVar[bool] = False  # True if several ranks can compute a forward pass together
    HEADS: ClassVar[tuple[str, ...]] = ("num_attention_heads",)  # numbers of heads in the configuration
    boundary = 0.0
    reads_weights = True  # False: parts are built only from their configuration, with uninitialized weights
    reading: Callable[[str, int], AbstractContextManager[None]] = staticmethod(lambda part, size: nullcontext())
    context = 1  # ranks that compute each forward pass together
    host_encoders = False  # True: text encoders are offloaded and copied to the device while they encode

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.folder = local_folder(path)
        self.config: dict[str, Any] = read_json(self.folder / self.INDEX)
        for part, kind in self.PARTS.items():
            if part not in self.OPTIONAL or self.config.get(part) not in (None, [None, None]):
                self.config[part] = self._part_config(part, *kind)
        self._check_config()

    def _check_config(self) -> None:
        """Raise ValueError for an unsupported configuration; a subclass adds its built-in values."""
        for part in self.parts:
            self._expect(part, quantization_config=None)
        self._expect("scheduler", **self.SCHEDULER)

    def _expect(self, part: str, **built_in: object) -> None:
        """Raise ValueError unless a part's configuration has these values; values missing in older files pass."""
        for name, value in built_in.items():
            allowed = value if isinstance(value, tuple) else (value,)
            if (actual := self.config[part].get(name)) not in (None, *allowed):
                rule = f"must be {' or '.join(map(json.dumps, allowed))} for a {self.PIPELINE}"
                raise ValueError(f"{name} of {self.config_file(part)} {rule}, got {json.dumps(actual):.80}")

    def _expect_length(self, part: str, name: str, length: int) -> None:
        """Raise ValueError unless a list in a part's configuration, if present, has `length` entries."""
        value = self.config[part].get(name)
        if value is not None and not (isinstance(value, list) and len(value) == length):
            rule = f"must have {length} entries for a {self.PIPELINE}"
            raise ValueError(f"{name} of {self.config_file(part)} {rule}, got {json.dumps(value):.80}")

    @property
    def nets(self) -> Mapping[str, str]:
        """Subfolder of each of the net's experts, by name; the name is empty for a single net."""
        return {"": "transformer"}

    @property
    def parts(self) -> list[str]:
        """Parts of PARTS that this checkpoint has."""
        return [part for part in self.PARTS if isinstance(self.config.get(part), dict)]

    def _part_config(self, part: str, library: str, name: str) -> dict[str, Any]:
        """Return the configuration of one part; raise ValueError if the files name another class for it."""
        index, spec = self.folder / self.INDEX, self.config.get(part)
        if isinstance(spec, list) and len(spec) == 3 and isinstance(spec[2], dict):  # of a modular pipeline
            where, spec = spec[2].get("pretrained_model_name_or_path"), spec[2].get("type_hint")
            if not (self.folder / part).is_dir():
                hint = "save_pretrained of diffusers with overwrite_modular_index=True writes all parts"
                raise ValueError(f"{part} must be in {self.folder / part}, {index} names {where!r:.80}: {hint}")
        if not isinstance(spec, list) or [str(entry).removesuffix("Fast") for entry in spec] != [library, name]:
            raise ValueError(f"{part} must be a {name} of {library}, {index} says {spec!r:.80}")
        file = self.config_file(part)
        config = read_json(file)
        spec = name if "tokenizer" in part else config.get("_class_name") or config.get("architectures", [name])
        if spec not in (name, [name], [name.replace("Model", "ForCausalLM")]):  # the base model of a language model
            raise ValueError(f"{part} must be a {name}, {file} says {spec!r:.80}")
        return config

    def config_file(self, part: str) -> Path:
        """Return the file with the configuration of a part."""
        kinds = {
            "scheduler": "scheduler_config",
            "processor": "preprocessor_config",
            "feature_extractor": "preprocessor_config",
            "tokenizer": "tokenizer_config",
        }
        kind = next((file for word, file in kinds.items() if word in part), "config")
        return self.folder / part / f"{kind}.json"

    def value(self, part: str, name: str, kind: type[Value], default: Value | None = None) -> Value:
        """Return a value of a part's configuration, or the default of the part's class if an older file has none.

        A list must contain numbers.

        Raises:
            ValueError: it is missing or has another type.
        """
        value = self.config[part].get(name, default)
        if kind is float and type(value) is int:
            value = float(value)
        of_numbers = not isinstance(value, list) or all(type(entry) in (int, float) for entry in value)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} of {self.config_file(part)} must be finite, got {value}")
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool) or not of_numbers:
            raise ValueError(f"{name} of {self.config_file(part)} must be of type {kind.__name__}, got {value!r:.80}")
        return value

    def option(self, params: Params, name: str) -> float:
        """Return the value of `guidance_scale`, or of one of OPTIONS."""
        return params.guidance_scale if name == "guidance_scale" else params.guidance.get(name, self.OPTIONS[name])

    def is_guided(self, params: Params) -> bool:
        """True if predict_velocity requires a `negative_X` for every entry X of `encode`."""
        return any(self.option(params, name) > off for name, off in self.GUIDANCE.items())

    def unguided(self, params: Params) -> Params:
        """Return the same parameters without classifier-free guidance; other options stay."""
        off = dict(self.GUIDANCE)
        scale = off.pop("guidance_scale", params.guidance_scale)
        return replace(params, guidance_scale=scale, guidance={**params.guidance, **off})

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported option, or guidance below its minimum; a subclass adds sizes."""
        for name in params.guidance:
            if name not in self.OPTIONS:
                expected = f"one of {', '.join(self.OPTIONS)}" if self.OPTIONS else "empty"
                scales = f"; it is guided by {' and '.join(self.GUIDANCE)}" if self.GUIDANCE else ""
                raise ValueError(f"guidance of a {self.PIPELINE} must be {expected}, got {name}{scales}")
        if "video" not in self.MEDIA and params.num_frames != 1:
            raise ValueError(f"num_frames must be 1 for a {self.PIPELINE}, got {params.num_frames}")
        if self.terminal and params.num_inference_steps < 2:
            rule = f"num_inference_steps must be >= 2, as {self.config_file('scheduler')} has a shift_terminal"
            raise ValueError(f"{rule}, got {params.num_inference_steps}")
        for name, off in self.GUIDANCE.items():
            if (scale := self.option(params, name)) < off:  # the pipelines silently turn it off
                raise ValueError(f"{name} must be >= {off:g}, where {off:g} is no guidance, got {scale}")

    def check_context(self) -> None:
        """Raise ValueError unless `context` ranks can compute a forward pass together; `check` checks sizes."""
        if self.context > 1 and not self.CONTEXT_PARALLEL:
            raise ValueError(f"context must be 1 for a {self.PIPELINE}, got {self.context}")
        backend = os.environ.get("DIFFUSERS_ATTN_BACKEND", "native")  # some other backends exchange no tokens
        if self.context > 1 and backend != "native":
            raise ValueError(f"DIFFUSERS_ATTN_BACKEND must be native for a context of {self.context}, got {backend}")
        for part, name in product(self.nets.values(), self.HEADS if self.context > 1 else ()):
            default = inspect.signature(self._class(part).__init__).parameters[name].default
            if (heads := self.value(part, name, int, default)) % self.context:
                rule = f"context must divide {name} of {self.config_file(part)}, {heads}"
                raise ValueError(f"{rule}, got {self.context}")

    def _check_tokens(self, params: Params, unit: int, frames: int = 1) -> None:
        """Raise ValueError unless `context` divides the tokens of a sample, each `unit` pixels wide and high."""
        rows, columns = params.height // unit, params.width // unit
        candidates = product(*(range(max(1, side - self.context), side + self.context + 1) for side in (rows, columns)))
        sides = [(h, w) for h, w in candidates if h * w * frames % self.context == 0]
        height, width = min(sides, key=lambda side: (abs(side[0] - rows) + abs(side[1] - columns), side))
        if (height, width) != (rows, columns):
            rule = f"height and width must make tokens that {self.context} ranks can share"
            actual = f"{params.height} x {params.width}, which makes {frames * rows * columns}"
            raise ValueError(f"{rule}, such as {height * unit} x {width * unit}, got {actual}")

    def share(self, net: nn.Module, mesh: "torch.distributed.DeviceMesh") -> None:
        """Split the tokens of each forward pass of the net over the ranks in a row of `mesh`.

        The ranks call the net with equal inputs and get equal outputs. Each rank has only its own tokens' gradients;
        their sum is the full gradient. mesh: mesh with the axes "ring" and "ulysses".
        """
        from diffusers import ContextParallelConfig, ParallelConfig
        from diffusers.hooks import apply_context_parallel

        # diffusers' enable_parallelism divides by the number of accelerators, which is 0 on a CPU.
        config = ParallelConfig(ContextParallelConfig(ulysses_degree=self.context, mesh=mesh))
        config.setup(mesh.get_rank(), mesh.size(), torch.device(mesh.device_type), mesh=mesh)
        for name in self.nets:
            part = net.get_submodule(name)
            processors = [getattr(module, "processor", None) for module in part.modules()]
            for component in (part, *processors):
                if component is not None and hasattr(component, "_parallel_config"):
                    component._parallel_config = config
            apply_context_parallel(part, config.context_parallel_config, self._context_plan(part))

    def _context_plan(self, net: nn.Module) -> dict[str, Any]:
        """Return diffusers' plan of the module inputs and outputs that ranks split and gather."""
        return dict(net._cp_plan)  # type: ignore[arg-type]

    def check_text_length(self, params: Params, maximum: int = MAX_TEXT_TOKENS) -> None:
        """Raise ValueError unless the option max_sequence_length is a supported number of text tokens."""
        if (length := self.option(params, "max_sequence_length")) not in range(1, maximum + 1):
            raise ValueError(f"max_sequence_length must be a whole number from 1 to {maximum}, got {length:g}")

    def check_image(self, height: int, width: int) -> None:
        """Accept references of any size; a subclass may raise ValueError."""

    def sigmas(self, params: Params) -> Tensor:
        """Return the noise levels [S + 1] from 1 to 0: even steps, shifted by the scheduler's configuration."""
        return self._shift_levels(linear_sigmas(params.num_inference_steps), params)

    def _shift_levels(self, levels: Tensor, params: Params) -> Tensor:
        """Return levels [S + 1], shifted by the scheduler's configuration."""
        if not self.value("scheduler", "use_dynamic_shifting", bool, False):
            levels = shift_sigmas(levels, self.value("scheduler", "shift", float, 1.0))
        elif self.value("scheduler", "time_shift_type", str, "exponential") == "linear":
            levels = shift_sigmas(levels, self._mu(params))
        else:
            levels = exponential_shift_sigmas(levels, self._mu(params))
        return stretch_sigmas(levels, self.terminal) if self.terminal else levels

    @property
    def terminal(self) -> float:
        """Lowest level above 0 after the scheduler's stretching; 0 if it does not stretch."""
        part = "scheduler"
        return self.value(part, "shift_terminal", float) if self.config.get(part, {}).get("shift_terminal") else 0.0

    def _mu(self, params: Params) -> float:
        """Return the shift mu for the number of tokens."""
        return resolution_mu(
            self._num_tokens(params),
            base_tokens=self.value("scheduler", "base_image_seq_len", int, 256),
            max_tokens=self.value("scheduler", "max_image_seq_len", int, 4096),
            base_mu=self.value("scheduler", "base_shift", float, 0.5),
            max_mu=self.value("scheduler", "max_shift", float, 1.15),
        )

    def _num_tokens(self, params: Params) -> int:
        """Return the number of tokens in a sample, on which a schedule's shift may depend."""
        return (params.height // PIXELS_PER_TOKEN) * (params.width // PIXELS_PER_TOKEN)

    def streams(self, params: Params) -> dict[str, int]:
        """Return {}: the latent holds one medium."""
        return {}

    def check_files(self) -> None:
        """Raise ValueError unless all files exist, are complete and match the configuration; no weights are read.

        A hub id needs only configurations, as `load` checks its other files; so does a model that reads no weights.
        """
        is_whole = Path(self.path).is_dir() and self.reads_weights and RELEASED not in self.folder.parents
        for part in self.parts:
            if part == "scheduler":
                continue
            if issubclass(self._class(part), nn.Module):
                expected = self._empty(part).state_dict()
                if is_whole:
                    self._check_weights(part, expected)
            elif is_whole:
                self._load(part, "cpu", torch.float32)  # a tokenizer or a processor

    def _check_weights(self, part: str, expected: Mapping[str, Tensor]) -> None:
        files = self.weight_files(part)
        folder, shapes = files[0].parent, safetensors_shapes(files)
        if part not in self.nets.values():  # older names are translated during loading
            return
        if missing := expected.keys() - shapes.keys():
            raise ValueError(f"model is incomplete: {folder} lacks {len(missing)} weights, such as {min(missing)}")
        ignored = self._class(part)._keys_to_ignore_on_load_unexpected or ()
        if surplus := {
            n for n in shapes.keys() - expected.keys() if not any(re.search(pattern, n) for pattern in ignored)
        }:
            summary = f"{len(surplus)} weights that its configuration lacks, such as {min(surplus)}"
            raise ValueError(f"model is damaged: {folder} has {summary}")
        for name, tensor in expected.items():
            if tuple(tensor.shape) != shapes[name]:
                detail = f"{shapes[name]}, its configuration says {tuple(tensor.shape)}"
                raise ValueError(f"model is damaged: {name} of {folder} has the shape {detail}")

    @property
    def encoders(self) -> list[str]:
        """Names of the parts that encode texts."""
        return [part for part in self.parts if part.startswith("text_encoder")]

    def load(self, *, device: torch.device | str, dtype: torch.dtype, net: nn.Module | None = None) -> Parts:
        """Return all parts, frozen, in eval mode. net: net to use instead of reading the checkpoint's.

        Raises:
            ValueError: a part cannot be built from its files, or its weights are incomplete or not finite.
        """
        others = [part for part in self.parts if part not in (*self.nets.values(), "scheduler")]
        hosted = self.encoders if self.host_encoders else []
        dtypes = (
            {"vae": torch.float32} if dtype == torch.float16 else {}
        )  # its overflows would not be visible in pixels
        places = {part: "cpu" if part in hosted else device for part in others}
        parts = Parts(**{part: self._load_part(part, place, dtypes.get(part, dtype)) for part, place in places.items()})
        for part in hosted:
            run_offloaded(getattr(parts, part), torch.device(device))
        parts.net = self.load_net(device=device, dtype=dtype) if net is None else net
        return parts

    def load_net(self, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Return only the net, as `load` does."""
        return join_nets({name: self._load_part(part, device, dtype) for name, part in self.nets.items()})

    def _load_part(self, part: str, device: torch.device | str, dtype: torch.dtype) -> Any:
        with self.reading(part, self._num_bytes(part)):
            return self._load(part, device, dtype)

    def weight_bytes(self) -> int:
        """Return the size of the weight files, except those of a hub id that are not yet fetched."""
        return sum(map(self._num_bytes, self.parts)) if self.reads_weights else 0

    def _num_bytes(self, part: str) -> int:
        """Return the size of a part's files."""
        name = "model" if self.PARTS[part][0] == "transformers" else "diffusion_pytorch_model"
        return safetensors_bytes(self.folder / part, name)

    def empty_net(self, *, buffers: bool = False) -> nn.Module:
        """Return the net on the meta device, for names and shapes. buffers: True to materialize the buffers."""
        return join_nets({name: self._empty(part, buffers=buffers) for name, part in self.nets.items()})

    def weight_files(self, part: str = "transformer") -> list[Path]:
        """Return the safetensors files of a part, after fetching them for a hub id."""
        local_folder(self.path, f"{part}/*.safetensors")
        name = "model" if self.PARTS[part][0] == "transformers" else "diffusion_pytorch_model"
        return safetensors_files(self.folder / part, name)

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return {}: the model is conditioned only on text."""
        return {}

    def _class(self, part: str) -> Any:
        import diffusers
        import transformers

        library, name = self.PARTS[part]
        module = {"diffusers": diffusers, "transformers": transformers}[library]
        cls = getattr(module, name, None)
        if cls is None:
            raise ValueError(f"{library} must have a {name} for a {self.PIPELINE}, {module.__version__} has none")
        return _remove_modules(cls, self.UNUSED[part]) if part in self.UNUSED else cls

    def _load(self, part: str, device: torch.device | str, dtype: torch.dtype) -> Any:
        cls = self._class(part)
        if not issubclass(cls, nn.Module):
            return (open_tokenizer if "tokenizer" in part else open_processor)(cls, self.folder / part)
        if not self.reads_weights:
            from transformers.initialization import no_init_weights

            with checked_build(self.config_file(part), cls.__name__), _default_dtype(dtype), torch.device(device):
                with no_init_weights():
                    module = self._make(part)
                kept = getattr(cls, "_keep_in_fp32_modules", None) or () if dtype == torch.float16 else ()
                module = nn.Module.to(module, device, dtype).requires_grad_(False).eval()
                for name, param in module.named_parameters():
                    if not {*name.split(".")}.isdisjoint(kept):  # as the library does when it loads them
                        param.data = param.float()
                return module
        folder = self.weight_files(part)[0].parent  # raises if there are none: the library would look for other formats
        module, missing = self._read(part, dtype)
        if missing:  # the library has initialized them randomly
            summary = f"{len(missing)} weights, such as {min(missing)}"
            raise ValueError(f"model is incomplete: {folder} lacks {summary}")
        module.to(device).eval().requires_grad_(False)
        for name, weight in module.named_parameters():
            if not (weight.sum().isfinite() or weight.isfinite().all()):  # a fast check first
                raise ValueError(f"model is damaged: {name} of {folder} is not finite")
        return module

    def _read(self, part: str, dtype: torch.dtype) -> tuple[nn.Module, Collection[str]]:
        """Return a part with its weights, and the names of the weights that are missing in its files."""
        module, report = self._class(part).from_pretrained(
            self.folder,
            subfolder=part,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
        return module, report["missing_keys"]

    def _empty(self, part: str, *, buffers: bool = False) -> nn.Module:
        from accelerate import init_empty_weights

        cls, file = self._class(part), self.config_file(part)
        _check_types(inspect.signature(cls.__init__), self.config[part], file)
        check_counts(self.config[part], file)
        with checked_build(file, cls.__name__), init_empty_weights(False) if buffers else torch.device("meta"):
            module = self._make(part)
        return module.requires_grad_(False)

    def _make(self, part: str) -> nn.Module:
        """Return a part built from its configuration."""
        cls, config = self._class(part), self.config[part]
        of_transformers = self.PARTS[part][0] == "transformers"
        module: nn.Module = cls(cls.config_class.from_dict(config)) if of_transformers else cls.from_config(config)
        return module


class ImageModel(DiffusersModel):
    """DiffusersModel of images, whose latents are the scaled code of an AutoencoderKL."""

    def _check_config(self) -> None:
        super()._check_config()
        self._expect_length("vae", "block_out_channels", 4)  # each except the first halves the sides

    def latent_shape(self, params: Params) -> tuple[int, int, int]:
        """Return (C, h, w)."""
        return self.value("vae", "latent_channels", int), params.height // 8, params.width // 8

    def decode(self, parts: Parts, x0: Tensor, cond: Cond, params: Params) -> tuple[Media, Rates]:
        """Return images [B, 8h, 8w, 3] in [0, 1], float32, from clean latents x0 [B, C, h, w]."""
        scale, shift = self._statistics()
        images = parts.vae.decode((x0 / scale + shift).to(parts.vae.dtype), return_dict=False)[0]
        return {"image": (images.float() / 2 + 0.5).clamp(0, 1).movedim(1, -1)}, {}

    def encode_media(self, parts: Parts, media: Media, params: Params) -> Tensor:
        """Return the clean latents [B, C, H/8, W/8] of images [B, H, W, 3]: the mean of the VAE's code."""
        scale, shift = self._statistics()
        images = pixels(media["image"]).to(parts.vae.device, parts.vae.dtype)
        return (parts.vae.encode(images).latent_dist.mode().float() - shift) * scale

    def _statistics(self) -> tuple[float, float]:
        """Return the VAE's scale and shift."""
        return self.value("vae", "scaling_factor", float), self.value("vae", "shift_factor", float)


class Experts(nn.Module):
    """Several nets as one module; the keyword `expert` of a call selects the net to run."""

    def __init__(self, nets: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, net in nets.items():
            self.add_module(name, net)

    def forward(self, *, expert: str, **inputs: Any) -> Any:
        """Return the output of the selected net."""
        return self.get_submodule(expert)(**inputs)

    def enable_gradient_checkpointing(self, run_block: Callable[..., Any]) -> None:
        """Run the blocks of all nets through `run_block`, as diffusers' models do."""
        for net in self.children():
            net.enable_gradient_checkpointing(run_block)  # type: ignore[operator]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create new float tensors in the `with` block in this dtype, like `from_pretrained`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def join_nets(nets: Mapping[str, nn.Module]) -> nn.Module:
    """Return the nets as one module, or a single net unchanged."""
    return Experts(nets) if len(nets) > 1 else next(iter(nets.values()))


def _remove_modules(cls: type[nn.Module], unused: Collection[str]) -> type[nn.Module]:
    """Return a transformers class without modules that never run: names, or name.N: for a list's entries from N.

    The weights of these modules in files are not read: 3 to 27 % of a text encoder, 1 to 11 GB in bfloat16.
    """

    class Part(cls):  # type: ignore[misc,valid-type]
        _tied_weights_keys = None  # none of the remaining weights are tied
        _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [
            re.escape(name.rstrip(":0123456789")) for name in unused
        ]

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for name in unused:
                if name.endswith(":"):
                    layers, _, first = name.rstrip(":").rpartition(".")
                    del self.get_submodule(layers)[int(first) :]
                else:
                    self.set_submodule(name, nn.Identity())

    for name in ("__name__", "__qualname__", "__module__"):  # transformers uses them to find older weight names
        setattr(Part, name, getattr(cls, name))
    return Part


def check_size(params: Params, unit: int, *, max_units: int | None = None) -> None:
    """Raise ValueError unless height and width are 1 to `max_units` times `unit` pixels; name the nearest size."""
    bound = "" if max_units is None else f" up to {max_units * unit}"
    for name, value in (("height", params.height), ("width", params.width)):
        if value < unit or value % unit or (max_units is not None and value > max_units * unit):
            nearest = min(max(1, round(value / unit)), max_units or math.inf) * unit
            rule = f"{name} must be a positive multiple of {unit} pixels{bound}, such as {nearest}"
            raise ValueError(f"{rule}, got {value}")


def cfg_batch(cond: Cond, name: str) -> Tensor:
    """Return an entry and its negative as one batch [2B, ...], padded to the longer text if it has a mask."""
    pair = [cond[name], cond[f"negative_{name}"]]
    if pair[0].dim() > 1:
        length = max(len(pair[0][0]), len(pair[1][0]))
        pair = [nn.functional.pad(t, [0, 0] * (t.dim() - 2) + [0, length - t.shape[1]]) for t in pair]
    return torch.cat(pair)


def needed_mask(mask: Tensor, device: torch.device) -> Tensor | None:
    """Return a mask on the device, or None if it hides nothing: attention without a mask is faster.

    It hides nothing in a batch of samples of a single prompt: their texts run in one call, and their negatives, which
    have another length, in a second one. There are two calls for any lengths, because sharded ranks must make
    equally many.
    """
    return None if bool(mask.all()) else to_device(mask, device)


def pixels(media: Tensor) -> Tensor:
    """Return images [..., H, W, 3], uint8 or in [0, 1], as float32 in [-1, 1], with channels before height."""
    values = media.float() / 127.5 if media.dtype == torch.uint8 else media.float() * 2
    return (values - 1).movedim(-1, -3)


def resize_image(image: Tensor, height: int, width: int, *, resample: str = "LANCZOS") -> Tensor:
    """Return an image, uint8 [H, W, 3], resized with the named PIL filter."""
    from transformers.image_transforms import PILImageResampling, resize

    return torch.tensor(resize(image.cpu().numpy(), (height, width), resample=getattr(PILImageResampling, resample)))


def pack(x: Tensor) -> Tensor:
    """Return latents [B, C, h, w] as tokens [B, (h/2)(w/2), 4C], each a 2 x 2 patch."""
    B, C, h, w = x.shape
    return x.view(B, C, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, (h // 2) * (w // 2), C * 4)


def unpack(tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """Invert `pack` for a latent of the given shape [B, C, h, w]."""
    B, C, h, w = shape
    return tokens.view(B, h // 2, w // 2, C, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(B, C, h, w)


def text_ids(tokenizer: "PreTrainedTokenizerBase", encoder: "PreTrainedModel", text: str, length: float) -> Tensor:
    """Return the ids [1, length] of a text, truncated or padded to `length`."""
    tokens = tokenizer([text], padding="max_length", max_length=int(length), truncation=True, return_tensors="pt")
    return tokens.input_ids.to(encoder.device)


def _check_types(signature: inspect.Signature, config: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError for a value whose type is not that of its parameter's default."""
    for name, parameter in signature.parameters.items():
        value, default = config.get(name), parameter.default
        if value is None or default in (None, inspect.Parameter.empty) or _has_type(value, default):
            continue
        raise ValueError(f"{name} of {file} must be like {default!r:.40}, got {value!r:.80}")


def _has_type(value: object, default: object) -> bool:
    """True if a JSON value and its entries have the types of a default and its entries."""
    if isinstance(default, list | tuple):
        return isinstance(value, list | tuple) and (not default or all(_has_type(entry, default[0]) for entry in value))
    if isinstance(default, float):
        return type(value) in (int, float)
    return type(value) is type(default)
