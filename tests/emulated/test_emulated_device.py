"""The emulated accelerator: it computes like the CPU, refuses what an accelerator refuses, and counts what it does."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from emulated import npu
from fork_server import forks
from helpers import REPO


def on_npu(program, code=0):
    """What a program prints in a process with the accelerator."""
    npu.build()
    with TemporaryDirectory() as folder:
        process = forks().Process(target=npu.execute, args=(program, folder))
        process.start()
        process.join()
        printed, errors = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    assert process.exitcode == code, errors
    return printed


def test_forward_and_backward_have_the_cpus_bits():
    text = on_npu("""
def attention(device):
    q, k = (torch.randn(2, 3, 8, 16).to(device).requires_grad_() for _ in range(2))
    mask = (torch.arange(8) < 6).to(device).expand(2, 1, 8, 8)
    torch.use_deterministic_algorithms(device == "npu")
    nn.functional.scaled_dot_product_attention(q, k, q, attn_mask=mask).square().sum().backward()
    torch.use_deterministic_algorithms(False)
    return [q.grad, k.grad]

def rotation(device):  # complex numbers are views of real ones, and their gradients are conjugates
    x, angle = torch.randn(2, 4, 6).to(device).requires_grad_(), torch.randn(4, 3).to(device)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angle), angle)
    torch.view_as_real(turned).flatten(2).pow(3).sum().backward()
    return [x.grad]

def convolution(device):
    net, x = nn.Conv3d(3, 4, 3, padding=1).to(device), torch.randn(1, 3, 4, 5, 5).to(device).requires_grad_()
    net(x).square().sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())]

def layers(device):
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU("tanh"), nn.Linear(16, 8), nn.RMSNorm(8)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.randn(5, 8).to(device)).pow(4).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]

def memory(device):
    x = torch.arange(12.0, device=device).view(3, 4)
    y = torch.zeros(0, device=device)
    torch.cumsum(x, 1, out=y)
    y.t()[1:].mul_(2)
    z = x.clone()
    z.untyped_storage().resize_(0)
    z.untyped_storage().resize_(48)
    z.copy_(x.flip(0)).unfold(1, 2, 2)[:, 0].add_(x[:, :2])
    w = nn.Parameter(torch.zeros(2, device=device))
    w.data = x[1]
    return [y, z, w.data, x[x > 3], x[[2, 0]]]

for function in (attention, rotation, convolution, layers, memory):
    results = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        results.append([tensor.cpu() for tensor in function(device)])
    print(function.__name__, all(map(torch.equal, *results)))
""")
    assert text.splitlines() == [
        f"{name} True" for name in ("attention", "rotation", "convolution", "layers", "memory")
    ]


def test_backward_passes_repeat_their_bits_only_by_deterministic_algorithms():
    text = on_npu("""
from omni_train.dist import deterministic

def gradients(only):
    torch.manual_seed(0)
    q, index = torch.randn(2, 3, 8, 16).to("npu").requires_grad_(), torch.tensor([0, 1, 1]).to("npu")
    attended = nn.functional.scaled_dot_product_attention(q, q, q)[:, index]
    loss = attended.gather(3, torch.zeros(2, 3, 8, 2, dtype=torch.int64, device="npu")).square().sum()
    with deterministic("error" if only else "default"):
        loss.backward()
    return q.grad

for only in (True, False):
    print(only, torch.equal(gradients(only), gradients(only)))
""")
    assert text.splitlines() == ["True True", "False False"]


def test_the_reward_of_clip_has_a_gradient_that_repeats_its_bits():
    text = on_npu("""
from omni_rl.flow.direct_rewards import square
from omni_train.dist import deterministic

x = torch.rand(1, 3, 24, 40).to("npu").requires_grad_()
ours, torchs = square(x, 16), nn.functional.interpolate(x, size=(16, 27), mode="bicubic", antialias=True)
print(torch.allclose(ours, torchs[..., 5:21], rtol=0, atol=1e-6))
for pixels in (ours, torchs):
    try:
        with deterministic():
            pixels.sum().backward()
        print("repeats")
    except RuntimeError as error:
        print(str(error)[:94])
""")
    refused = "aten::_upsample_bicubic2d_aa_backward does not have a deterministic implementation, but you set"
    assert text.splitlines() == ["True", "repeats", refused[:94]]


WRONG = {  # a program -> why it fails
    "torch.ones(3, device='npu') + torch.ones(3)": "argument other of aten::add is not on npu:0",
    "torch.ones(3) + torch.ones(3, device='npu')": "argument self of aten::add is not on npu:0",
    "torch.ones(3, device='npu:1') + torch.ones(3, device='npu:0')": "argument other of aten::add is not on npu:0",
    "nn.Linear(3, 3)(torch.ones(3, device='npu'))": "argument mat2 of aten::addmm is not on npu:0",
    "nn.Conv2d(1, 1, 1)(torch.ones(1, 1, 2, 2, device='npu'))": "Expected x and weight on one device",
    "torch.cat([torch.ones(3, device='npu'), torch.ones(3)])": "argument tensors of aten::cat is not on npu:0",
    "torch.ones(3, device='npu').numpy()": "can't convert npu:0 device type tensor to numpy",
}


def test_a_tensor_on_the_wrong_device_is_an_error():
    text = on_npu(f"""
for program in {list(WRONG)}:
    try:
        exec(program)
        print("no error")
    except (RuntimeError, TypeError) as error:
        print(str(error).splitlines()[0])
""")
    for message, said in zip(WRONG.values(), text.splitlines(), strict=True):
        assert message in said


def test_memory_is_out_of_reach_of_the_host():
    on_npu("import ctypes; ctypes.string_at(torch.ones(3, device='npu').data_ptr(), 4)", code=-11)


def test_copies_and_waits_are_told():
    text = on_npu("""
told = []
with watch(told):
    x = torch.ones(4).to("npu")
    x = torch.ones(4).pin_memory().to("npu", non_blocking=True)
    x.sum().item()
    x.to("cpu", non_blocking=True)
    x.tolist()
    x[torch.tensor([1, 2])]
    (x > 0).nonzero()
    x.fill_(3.0).add_(torch.tensor(1.0))
    torch.accelerator.synchronize()
for each in told:
    print(each.kind, each.name, each.num_bytes, each.waits)
""")
    assert text.splitlines() == [
        "to device copy 16 True",
        "to device copy 16 False",
        "to host item 4 True",
        "to host copy 16 False",
        "to host copy 16 True",
        "to device index 16 True",
        "to host aten::nonzero 4 True",
        "sync device 0 True",
    ]


def test_bytes_are_counted():
    text = on_npu("""
x = torch.zeros(1000, device="npu")
y = x.clone()
del y
memory = torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()
torch.accelerator.reset_peak_memory_stats()
print(*memory, torch.accelerator.max_memory_allocated())
del x
x = torch.zeros(2**20, device="npu")
from omni_train.dist import memory
print(memory(x.device))
""").splitlines()
    told = [f"{name}_mb=4.0" for name in ("current", "peak", "reserved", "used")]
    assert text == ["4000 8000 4000", f"Memory({', '.join(told)})"]


def test_memory_is_told_also_by_an_allocator_that_torch_cannot_ask():
    text = on_npu("""
from omni_train.dist import memory, reset_peak_memory
library.emulated_use_old_allocator()
device = torch.device("npu", 0)
x = torch.zeros(2**20, device=device)
del x
try:
    torch.accelerator.memory_allocated(device)
except RuntimeError as error:
    print("not a DeviceAllocator" in str(error))
print(memory(device))
reset_peak_memory(device)
print(memory(device))
""")
    rest = "reserved_mb=nan, used_mb=nan"
    assert text.splitlines() == ["True", *(f"Memory(current_mb=0.0, peak_mb={mb}, {rest})" for mb in (4.0, 0.0))]


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match="install g"):
        npu.build()
    assert os.listdir(tmp_path) == []


def test_a_models_weights_are_checked_on_the_device_and_each_is_read_there_once():
    text = on_npu(f"""
from torch.overrides import TorchFunctionMode
from omni_rollout.models import open_model

class Reads(TorchFunctionMode):
    seen = []

    def __torch_function__(self, called, types, args=(), kwargs=None):
        if called in (torch.Tensor.sum, torch.Tensor.isfinite) and args[0].numel() > 1:
            self.seen.append(args[0])
        return called(*args, **(kwargs or {{}}))

model = open_model({str(REPO / "checkpoints" / "tiny-signs-qwen-image")!r})
with Reads() as reads:
    net = model.load(device="npu", dtype=torch.bfloat16).net
places = [tensor.data_ptr() for tensor in reads.seen]
print({{tensor.device.type for tensor in reads.seen}}, len(places) - len(set(places)))
print({{p.data_ptr() for p in net.parameters() if p.numel() > 1}} <= set(places))
""")
    assert text.splitlines()[-2:] == ["{'npu'} 0", "True"]


def test_on_request_it_refuses_what_an_ascend_npu_lacks_until_it_is_settled():
    text = on_npu("""
from emulated.npu import load_strict
from omni_train.dist import local_device
from omni_train.kernels import check_float8
load_strict()
def attempt(program):
    try:
        return eval(program).dtype
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
print(attempt("torch.ones(2, device='npu')"))
device = local_device()
print(torch.get_device_module("npu").conv.allow_hf32, torch.get_deterministic_debug_mode())
for program in (
    "torch.ones(2, device='npu')",
    "torch.ones(2, device='npu').double()",
    "torch.view_as_complex(torch.ones(2, 2, device='npu'))",
    "torch.ones(2, device='npu').to(torch.float8_e4m3fn)",
    "check_float8(device)",
):
    print(attempt(program))
""")
    found = text.splitlines()
    assert "internal format" in found[0]
    assert found[1:3] == ["False 1", "torch.float32"]
    assert [line.split(" is not implemented for ")[1] for line in found[3:6]] == [
        f"{kind} on this device" for kind in ("Double", "ComplexFloat", "Float8_e4m3fn")
    ]
    assert found[6] == "memory.base-dtype must be int8 or nf4 on npu, which has no fp8, got fp8"


def test_float16_is_for_devices_without_bfloat16_that_see_overflows():
    text = on_npu("""
from omni_train.kernels import check_float16
from torch.utils._python_dispatch import TorchDispatchMode

class Saturating(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        return found.clamp(-65504, 65504) if operator == torch.ops.aten.mul.Tensor else found

def attempt(device):
    try:
        print(check_float16(torch.device(device)))
    except ValueError as error:
        print(error)

attempt("cpu")
attempt("npu")
for supports in (lambda including_emulation=True: including_emulation, lambda: False, lambda: True):
    torch.npu.is_bf16_supported = supports
    attempt("npu")
with Saturating():
    torch.npu.is_bf16_supported = lambda: False
    attempt("npu")
""")
    has = "dtype must be bfloat16 or float32 on {}, which has bfloat16, got float16"
    assert text.splitlines() == [
        has.format("cpu"),
        has.format("npu"),
        "None",
        "None",
        has.format("npu"),
        "dtype must be float32 on npu, whose float16 saturates, got float16",
    ]


def test_attention_that_fails_on_the_device_or_takes_no_choice_is_refused_and_not_advised():
    """As torch_npu's own may: of the first the backward pass fails, of the second the mask, and the third runs."""
    text = on_npu("""
from omni_rl.run.failures import advise
from train_nft import Args
from omni_train.kernels import BACKENDS, check_attention

def told(name):
    try:
        check_attention(name, torch.device("npu"), torch.bfloat16)
        return f"{name} runs"
    except ValueError as error:
        return str(error)

class OneWay(torch.autograd.Function):
    forward = staticmethod(lambda context, x: x.clone())

    @staticmethod
    def backward(context, grad):
        raise RuntimeError("npu_fusion_attention_grad is not there\\nat line 1")

def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    if attn_mask is not None and stage == "no mask":
        raise RuntimeError("masks of [1, 1, 1, 16] are not supported")
    weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    return OneWay.apply(weights @ v) if stage == "no gradient" else weights @ v

print(*map(told, BACKENDS), advise(RuntimeError("the ratio must be 1"), Args()), sep="\\n")
own = torch.library.Library("aten", "IMPL")
for key in ("PrivateUse1", "AutogradPrivateUse1"):
    own.impl("scaled_dot_product_attention", attend, key)
for stage in ("no gradient", "no mask", "all"):
    print(told("auto"))
print(told("math"))
print(advise(RuntimeError("the ratio must be 1"), Args()))
""")
    missing = "No viable backend for scaled_dot_product_attention was found."
    lines = text.splitlines()
    assert [line.split(": No ")[0] for line in lines[:5]] == [
        "auto runs",
        "attention must have kernels that run in bfloat16 on npu, got cudnn",
        "flash runs",
        "attention must have kernels that run in bfloat16 on npu, got efficient",
        "math runs",
    ]
    assert missing in lines[1]
    assert "try --attention math" in lines.pop(5)
    got = "attention must have kernels that run in bfloat16 on npu, got auto: "
    assert lines[5:] == [
        f"{got}npu_fusion_attention_grad is not there",
        f"{got}masks of [1, 1, 1, 16] are not supported",
        "auto runs",
        "attention must be auto on npu, whose own kernels compute it, got math",
        "Fix a cause that the message names.",
    ]
