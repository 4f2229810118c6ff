"""Weights of real size: each rank reads its own rows, and the net is the one that loading it whole would give."""

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import QwenImageTransformer2DModel, WanTransformer3DModel
from helpers import in_turn, sampled
from omni_train.lora import add_lora, base_name, init_adapter
from omni_train.optim import build_adamw, optimizer_step
from omni_train.shard import shard
from omni_train.weights.load import check_files, load_sharded
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ADAPTERS = ("default", "old")


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def empty(config):
    with init_empty_weights(include_buffers=False):
        return QwenImageTransformer2DModel.from_config(config)


@pytest.fixture
def checkpoint(tiny_qwen, tmp_path):
    """A tiny transformer in bfloat16 in several files, and its configuration."""
    net = tiny_qwen.build().to(torch.bfloat16)
    net.save_pretrained(tmp_path / "transformer", max_shard_size="100KB")
    files = sorted((tmp_path / "transformer").glob("*.safetensors"))
    assert len(files) > 2
    return net.config, files


class Net(nn.Module):
    """Uneven rows, a persistent buffer, one that is not in the file, a number, and a plain tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("count", torch.tensor(7))
        self.angles = torch.arange(3.0)

    def forward(self, x):
        return self.linear(x + self.angles) * self.mask[0] + self.table[1]


def meta_net():
    with init_empty_weights(include_buffers=False):
        return Net()


WEIGHTS = {
    "linear.weight": torch.arange(15.0).view(5, 3),
    "linear.bias": torch.arange(5.0),
    "table": torch.tensor([9.0, 8.0, 7.0, 6.0]),
    "count": torch.tensor(3),
}


def trained(net, tiny_qwen, dist, dtype=torch.float32):
    """The weights, an output, and the weights after one step."""
    before = [full(p).clone() for p in net.parameters()]
    out = tiny_qwen.run(net, dtype=dtype).float()
    out.square().sum().backward()
    params = list(net.parameters())
    optimizer_step(build_adamw(params, lr=0.01), params, lr=0.01, max_grad_norm=1.0, dist=dist)
    return [*before, out.detach(), *(full(p) for p in params)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_read_their_rows_hold_and_train_the_weights_of_a_whole_load(run_ranks, tiny_qwen, checkpoint, dtype):
    config, files = checkpoint

    def work(dist):
        options = {"block_names": tiny_qwen.block_names, "compute_dtype": dtype}
        old = QwenImageTransformer2DModel.from_pretrained(files[0].parent, torch_dtype=torch.bfloat16).float()
        shard(old.requires_grad_(True), dist.mesh, mode="fsdp2", **options)
        new = load_sharded(empty(config), files, dist.mesh, **options)
        assert {type(p) for p in new.parameters()} == {type(p) for p in old.parameters()}
        assert [name for name, _ in new.named_parameters()] == [name for name, _ in old.named_parameters()]
        expected, got = trained(old, tiny_qwen, dist, dtype), trained(new, tiny_qwen, dist, dtype)
        return [len(got), sum(map(torch.equal, expected, got))]

    for num_tensors, num_equal in run_ranks(work):
        assert num_tensors == num_equal > 100


def test_submodules_are_read_from_files_of_their_own_and_keep_the_buffers_that_diffusers_keeps(tmp_path):
    """Names in the files are those within the submodule."""
    wan = {"num_layers": 1, "attention_head_dim": 12, "num_attention_heads": 1, "text_dim": 8, "freq_dim": 8}
    pair = [WanTransformer3DModel(**wan, ffn_dim=8, rope_max_seq_len=8) for _ in range(2)]
    files = {}
    for name, net in zip("ab", pair, strict=True):
        net.save_pretrained(tmp_path / name)
        files[name] = sorted((tmp_path / name).glob("*.safetensors"))
    with init_empty_weights(include_buffers=False):
        empty_pair = nn.ModuleDict(
            {name: type(net).from_config(net.config) for name, net in zip("ab", pair, strict=True)}
        )
    add_lora(empty_pair, ["to_q"], rank=2, alpha=2, seed=0)
    loaded = load_sharded(empty_pair, files, None, param_dtype=torch.bfloat16)
    for name, net in zip("ab", pair, strict=True):
        found = {base_name(weight): value for weight, value in loaded[name].state_dict().items()}
        for weight, value in net.state_dict().items():
            assert torch.equal(found[weight], value.bfloat16()), weight
        assert {buffer.dtype for buffer in loaded[name].buffers()} == {torch.float32}


def test_a_frozen_net_under_adapters_is_that_of_a_whole_load(run_ranks, checkpoint, tiny_qwen):
    """To the last bit, in float32 and in bfloat16: weights, adapters, an output, and what is trained."""
    config, files = checkpoint

    def state(net, dtype):
        frozen = {name: p.requires_grad for name, p in net.named_parameters()}
        out = tiny_qwen.run(net, dtype=dtype)
        return frozen, [*(full(p).float() for p in net.parameters()), out.detach().float()]

    def work(dist):
        equal = []
        for dtype in (torch.float32, torch.bfloat16):
            options = {"block_names": tiny_qwen.block_names, "compute_dtype": dtype}
            old = QwenImageTransformer2DModel.from_pretrained(files[0].parent, torch_dtype=dtype)
            shard(adapted(old), dist.mesh, mode="fsdp2", **options)
            new = load_sharded(adapted(empty(config)), files, dist.mesh, param_dtype=dtype, **options)
            for name in ADAPTERS:
                init_adapter(new, name, seed=3)
            (trained, expected), (ours, got) = state(old, dtype), state(new, dtype)
            equal.append([trained == ours, sum(ours.values()), len(got), sum(map(torch.equal, expected, got))])
        return equal

    for found in run_ranks(work):
        for same, num_trained, num_tensors, num_equal in found:
            assert same
            assert num_trained == 12  # A and B of the first adapter, of three layers in two blocks
            assert num_tensors == num_equal > 100


def test_weights_that_the_net_s_class_ignores_may_be_there_and_no_others(tmp_path):
    net = meta_net()
    net._keys_to_ignore_on_load_unexpected = [r"^reader\."]
    save_file(WEIGHTS | {"reader.weight": torch.ones(2)}, tmp_path / "whole.safetensors")
    load_sharded(net, [tmp_path / "whole.safetensors"], None)
    assert torch.equal(net.linear.weight, WEIGHTS["linear.weight"])
    for name in ("linear.reader.weight", "readers"):
        save_file(WEIGHTS | {name: torch.ones(2)}, tmp_path / "other.safetensors")
        with pytest.raises(ValueError, match=f"must hold only weights of Net, got {name}"):
            check_files(net, [tmp_path / "other.safetensors"])


@pytest.mark.parametrize("world_size", sampled([1, 2], 1))
def test_a_frozen_copy_gives_the_output_of_a_whole_one_and_wants_no_gradient(
    run_ranks, tiny_qwen, checkpoint, world_size
):
    config, files = checkpoint

    def work(dist):
        mesh = dist.mesh if world_size > 1 else None
        options = {"block_names": tiny_qwen.block_names, "compute_dtype": torch.bfloat16} if mesh else {}
        reference = empty(config).requires_grad_(False)
        load_sharded(reference, files, mesh, param_dtype=torch.bfloat16, **options)
        with torch.no_grad():
            out = tiny_qwen.run(reference, dtype=torch.bfloat16)
        assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
        assert not any(p.requires_grad or p.grad is not None for p in reference.parameters())
        net = load_sharded(empty(config), files, mesh, **options)
        params = list(net.parameters())
        optimizer = build_adamw(params, lr=0.01)
        first = tiny_qwen.run(net, dtype=torch.bfloat16 if mesh else torch.float32).float()
        assert torch.equal(first, out.float()) or not mesh  # gathered in bfloat16, the net starts from its reference
        first.sum().backward()
        optimizer_step(optimizer, params, lr=0.01, max_grad_norm=1.0, dist=dist)
        assert set(optimizer.state) <= set(params)
        with torch.no_grad():  # training has left the reference alone
            assert torch.equal(tiny_qwen.run(reference, dtype=torch.bfloat16), out)
        return out.float().tolist()

    whole = QwenImageTransformer2DModel.from_pretrained(files[0].parent, torch_dtype=torch.bfloat16)
    with torch.no_grad():
        expected = tiny_qwen.run(whole, dtype=torch.bfloat16).float()
    for got in run_ranks(work, world_size):
        assert torch.equal(torch.tensor(got), expected)


@pytest.mark.parametrize("world_size", sampled([1, 2, 4], 1))
def test_uneven_rows_buffers_and_plain_tensors_are_all_there(run_ranks, tmp_path, world_size):
    save_file(WEIGHTS, tmp_path / "net.safetensors")
    expected = Net()
    expected.load_state_dict(WEIGHTS)
    x = torch.tensor([[1.0, -2.0, 0.5]])

    def work(dist):
        net = load_sharded(meta_net(), [tmp_path / "net.safetensors"], dist.mesh)
        state = {name: full(value) for name, value in net.state_dict().items()}
        assert all(torch.equal(state[name], value) for name, value in WEIGHTS.items())
        assert isinstance(net.linear.weight, DTensor)
        return net(x).tolist()

    for got in run_ranks(work, world_size):
        torch.testing.assert_close(torch.tensor(got), expected(x).detach())


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors held at once while it was on; mapped files and the meta device are not memory."""

    def __init__(self):
        super().__init__()
        self.peak, self._bound, self._alive = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage):
        known = self._alive.get(storage._cdata)
        if known and not known[0].expired():
            return
        size = storage.nbytes()
        if size >= 2**17 and is_mapped(storage.data_ptr()):  # asking the system takes longer than less is worth
            size = 0
        self._alive[storage._cdata] = StorageWeakRef(storage), size
        self._bound += size
        if self._bound > self.peak:  # what has gone since then is looked for only where it can matter
            self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
            self._bound = sum(size for _, size in self._alive.values())
            self.peak = max(self.peak, self._bound)


def is_mapped(address):
    """Whether a file of weights is mapped there, by the system's own account."""
    with open("/proc/self/maps") as maps:
        regions = [line.split()[0].split("-") for line in maps.read().splitlines() if line.endswith(".safetensors")]
    return any(int(low, 16) <= address < int(high, 16) for low, high in regions)


def load_rows(config, files, dist, options):
    return load_sharded(empty(config), files, dist.mesh, **options)


def adapted(net):
    """The net with two adapters over layers of all blocks, of a rank that makes them 7 % of its weights."""
    for name in ADAPTERS:
        add_lora(net, ["to_q", "to_k", "img_mlp.net.2"], rank=32, alpha=32, adapter=name, seed=3)
    return net


def load_adapted(config, files, dist, options):
    """A frozen net in bfloat16 under adapters, each rank's rows alone."""
    net = load_sharded(adapted(empty(config)), files, dist.mesh, param_dtype=torch.bfloat16, **options)
    for name in ADAPTERS:
        init_adapter(net, name, seed=3)
    return net


@pytest.fixture(scope="module")
def mid_size(tmp_path_factory):
    """A transformer of 77 MB in float32: its configuration, its files in bfloat16, and the bytes of one of 8 blocks."""
    torch.manual_seed(0)
    heads = {"attention_head_dim": 64, "num_attention_heads": 4, "axes_dims_rope": (8, 28, 28)}
    net = QwenImageTransformer2DModel(num_layers=8, joint_attention_dim=256, **heads).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("mid-size")
    net.save_pretrained(folder, max_shard_size="10MB")
    block = 4 * sum(p.numel() for p in net.transformer_blocks[0].parameters())
    return net.config, sorted(folder.glob("*.safetensors")), block


def peaks(run_ranks, world_size, load, config, files):
    """The most bytes alive while loading, and the bytes of the shard, by rank."""

    def work(dist):
        with PeakBytes() as memory:
            net = load(config, files, dist, {"block_names": ("QwenImageTransformerBlock",)})
        return [memory.peak, sum(p.to_local().nbytes for p in net.parameters())]

    return run_ranks(work, world_size)


@in_turn(0, 2)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_rank_never_holds_much_more_than_its_shard(run_ranks, mid_size, world_size):
    config, files, block = mid_size
    for most, own in peaks(run_ranks, world_size, load_rows, config, files):
        assert 77e6 < own * world_size < 85e6
        assert own <= most <= 1.3 * own + block


@in_turn(1, 2)
def test_a_rank_never_holds_much_more_than_its_shard_of_a_net_under_adapters(run_ranks, mid_size):
    """Frozen weights in bfloat16; of the adapters each rank holds its rows, and one factor whole while it is drawn."""
    config, files, block = mid_size
    for most, own in peaks(run_ranks, 4, load_adapted, config, files):
        assert 38e6 < own * 4 < 60e6
        assert own <= most <= 1.3 * own + block / 2


NAN, INF = {"linear.bias": torch.full((5,), torch.nan)}, {"linear.weight": torch.full((5, 3), -torch.inf)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (NAN, r"net\.safetensors must be finite, got NaN or infinity in linear\.bias"),
        (INF, r"net\.safetensors must be finite, got NaN or infinity in linear\.weight"),
        ({"linear.bias": torch.full((5,), 1e39, dtype=torch.float64)}, "must be finite.*in linear.bias"),
        ({"table": torch.tensor([1.0, 2.0, 3.0, torch.nan])}, "must be finite.*in table"),
        (
            {"linear.bias": torch.full((5,), -3e38)},
            r"net\.safetensors must hold numbers of at most 1e\+18 in size, got 3e\+38 in linear\.bias",
        ),
        ({"linear.bias": None}, "must hold all weights of Net, lacks 1 such as linear.bias"),
        ({"extra": torch.zeros(1)}, r"net\.safetensors must hold only weights of Net, got extra"),
        ({"linear.bias": torch.zeros(6)}, r"net\.safetensors does not fit Net: linear\.bias is \[6\], must be \[5\]"),
    ],
)
def test_what_does_not_fit_or_is_not_finite_is_named_with_its_file(tmp_path, change, message):
    tensors = {name: value for name, value in (WEIGHTS | change).items() if value is not None}
    save_file(tensors, tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match=message):
        load_sharded(meta_net(), [tmp_path / "net.safetensors"], None)


def test_a_buffer_may_hold_the_largest_number_and_a_weight_one_whose_square_is_finite(tmp_path):
    """Masks do; the square of a weight is finite in float32."""
    tensors = WEIGHTS | {"table": torch.full_like(WEIGHTS["table"], torch.finfo(torch.float32).min)}
    tensors["linear.bias"] = torch.full((5,), 1e18)
    save_file(tensors, tmp_path / "net.safetensors")
    net = load_sharded(meta_net(), [tmp_path / "net.safetensors"], None)
    assert torch.equal(net.linear.bias.detach(), tensors["linear.bias"])
    assert net.linear.bias.square().isfinite().all()


def test_files_that_are_cut_short_missing_or_overlap_are_errors(tmp_path):
    file = tmp_path / "net.safetensors"
    save_file(WEIGHTS, file)
    copied = tmp_path / "copy.safetensors"
    copied.write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"must hold each tensor once, but .* is in .*net\.safetensors and .*copy"):
        load_sharded(meta_net(), [file, copied], None)
    copied.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"copy\.safetensors is no whole safetensors file"):
        load_sharded(meta_net(), [copied], None)
    with pytest.raises(FileNotFoundError):
        load_sharded(meta_net(), [tmp_path / "nowhere.safetensors"], None)
    with pytest.raises(ValueError, match="files must hold all weights of Net, lacks 4"):
        load_sharded(meta_net(), [], None)


def test_a_net_must_be_built_without_weights_but_with_its_other_tensors(tmp_path):
    save_file(WEIGHTS, tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match=r"parameters on the meta device, got a real linear\.weight"):
        load_sharded(Net(), [tmp_path / "net.safetensors"], None)
    for name in ("mask", "angles"):
        net = meta_net()
        setattr(net, name, getattr(net, name).to("meta"))
        with pytest.raises(ValueError, match=f"real tensors besides its parameters, got .*{name} on the meta device"):
            load_sharded(net, [tmp_path / "net.safetensors"], None)
