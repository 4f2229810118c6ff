"""Parts that wait on the host: the same bits, and less memory of the accelerator."""

import json
from dataclasses import replace

import pytest
from emulated import emulated_runs as runs
from emulated.npu import build, load
from emulated.test_emulated_device import on_npu
from helpers import in_turn, sampled
from records import record

WHEN = ("peak_memory", "memory_asleep")


@pytest.fixture(scope="module")
def ran(tmp_path_factory, fresh):
    """`ran(case, lives, setting=...)` is what a run with these settings leaves, and its most MB in each metric."""
    build()
    with record.scoring() as url:

        def run(name="flowgrpo LoRA", lives=(2,), before=load, **settings):
            case = runs.CASES[name]
            case = replace(case, settings=case.settings | {"memory_gradient_checkpointing": True} | settings)
            folder = tmp_path_factory.mktemp("run") / "npu"
            outcome = fresh(runs.run, case, folder, url, lives=lives, before=before)
            lines = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
            return outcome, {when: max(line.get(f"perf/{when}_mb", 0) for line in lines) for when in WHEN}

        yield run


@pytest.fixture(scope="module")
def without(ran):
    return ran()


ALL = "encoder,engine,optimizer,activations,blocks"
LEAST = {  # parts -> the metric in which less memory is in use, and by how many MB at least
    "encoder": ("peak_memory", 0.3), "engine": ("memory_asleep", 0.3), "optimizer": ("peak_memory", 0.1),
    "blocks": ("peak_memory", 5), ALL: ("peak_memory", 5.6),
}  # fmt: skip


@in_turn(0, 4)
@pytest.mark.parametrize("parts", sampled(LEAST, 0, always=[ALL]))
def test_parts_on_the_host_free_memory_and_change_no_bit(ran, without, parts):
    when, least_mb = LEAST[parts]
    outcome, most_mb = ran(memory_offload=parts)
    assert outcome.lines == without[0].lines
    assert outcome.weights == without[0].weights
    assert most_mb[when] < without[1][when] - least_mb


@in_turn(1, 4)
@pytest.mark.parametrize("case", sampled(["nft LoRA, ddp", "nf4"], 1))
def test_blocks_come_on_every_rank_and_in_fewer_bits(ran, case):
    name, bits = ("flowgrpo LoRA", {"memory_base_dtype": case}) if case == "nf4" else (case, {})
    (there, most_mb), (streamed, least_mb) = (ran(name, memory_offload=parts, **bits) for parts in ("", "blocks"))
    assert streamed.lines == there.lines
    assert streamed.weights == there.weights
    assert least_mb["peak_memory"] < most_mb["peak_memory"] - (0.7 if bits else 5)


def test_a_net_whose_blocks_come_holds_two_of_them_at_most_and_its_adapters():
    """Beside activations, in forward and recomputation; with the bits of a net that is there."""
    text = on_npu("""
from omni_rollout.offload import offload_blocks
from omni_train.lora import add_lora
from omni_train.memory.recompute import Recompute

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x):
        return x + self.outer(self.inner(x).tanh())

def trained(streams, num_blocks):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256), *[Block() for _ in range(num_blocks)])
    add_lora(net, ["inner", "outer"], rank=4, alpha=8, seed=1)
    for name, p in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    offload_blocks(net, ["Block"], torch.device("npu")) if streams else net.to("npu")
    held = torch.accelerator.memory_allocated()
    library.emulated_reset_peak()
    run, y = Recompute(0.0), torch.randn(2, 256).to("npu")
    with torch.no_grad():
        sampled = net(y).cpu()
    y = net[0](y)
    for block in net[1:]:
        y = run(block, y)
    y.square().sum().backward()
    peak = library.emulated_peak() - held
    places = {p.device.type for name, p in net[1:].named_parameters() if not p.requires_grad}
    grads = [p.grad.cpu() for p in net.parameters() if p.requires_grad]
    trained_bytes = sum(p.nbytes for p in (*net[0].parameters(), *(p for p in net.parameters() if p.requires_grad)))
    return held - trained_bytes, peak, places, [sampled, y.detach().cpu(), *grads]

frozen = 2 * (256 * 256 + 256) * 4
for num_blocks in (4, 8):
    _, _, there, expected = trained(False, num_blocks)
    held, peak, places, found = trained(True, num_blocks)
    print(there, places, held, peak < 2 * frozen, all(map(torch.equal, found, expected)), len(found) - 4 * num_blocks)
""")
    assert text.splitlines() == ["{'npu'} {'cpu'} 0 True True 2"] * 2


def test_the_accelerator_quantizes_weights_that_are_kept_on_the_host():
    text = on_npu("""
from omni_train.memory import quantized

quantize, places = quantized.quantize, []
quantized.quantize = lambda weight, bits: places.append(weight.device.type) or quantize(weight, bits)
found = []
for device in ("cpu", "npu"):
    torch.manual_seed(0)
    net, devices = nn.Linear(128, 64), (torch.device(device), torch.device("cpu"))
    quantized.quantize_blocks(net, "nf4", ["Linear"], devices[0], home=devices[1])
    found.append([net.codes, net.scales, net.table, net.weight])
print(places, {each.device.type for each in found[1]}, all(map(torch.equal, *found)))
""")
    assert text.splitlines() == ["['cpu', 'npu'] {'cpu'} True"]


@in_turn(2, 4)
def test_sharded_moments_wait_on_the_host(ran):
    # Not by the most bytes in use: a thread of gloo may still hold weights that were gathered.
    places, outcomes = [], []
    for offload, ends in (("", (2,)), ("optimizer,activations", (1, 2))):
        outcomes.append(ran("flowgrpo LoRA, fsdp2", ends, before=runs.tell_moments, memory_offload=offload)[0])
        places.append({line for line in outcomes[-1].text.splitlines() if line.startswith("moments ")})
    assert outcomes[0].lines == outcomes[1].lines
    assert outcomes[0].weights == outcomes[1].weights
    assert places == [{"moments on npu"}, {"moments on cpu"}]


def test_inputs_of_recomputed_blocks_wait_on_the_host():
    text = on_npu("""
from omni_train.memory.recompute import Recompute

def kept(on_host):
    torch.manual_seed(0)
    blocks, x = [nn.Linear(64, 64).to("npu") for _ in range(8)], torch.randn(256, 64).to("npu").requires_grad_()
    run, before, y = Recompute(0.0, on_host=on_host), torch.accelerator.memory_allocated(), x
    for block in blocks:
        y = run(block, y)
    held = torch.accelerator.memory_allocated() - before
    y.square().sum().backward()
    return held // x.nbytes, [x.grad.cpu(), *(p.grad.cpu() for block in blocks for p in block.parameters())]

(most, expected), (least, found) = kept(False), kept(True)
print(most, least, all(map(torch.equal, found, expected)))
""")
    assert text.split() == ["8", "1", "True"]


@in_turn(3, 4)
@pytest.mark.parametrize("bits", sampled(["int8", "fp8", "nf4"], 1))
def test_fewer_bits_of_the_base_train_and_continue(ran, without, bits):
    whole, most_mb = ran(memory_base_dtype=bits)
    again, _ = ran(lives=(1, 2), memory_base_dtype=bits)
    assert again.lines == whole.lines
    assert again.weights == whole.weights
    assert whole.lines != without[0].lines
    assert most_mb["peak_memory"] < without[1]["peak_memory"] - 1
