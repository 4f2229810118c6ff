"""A planned device: what it counts, what the host reads from it, and the ranks that are not there."""

import gc

import pytest
import torch
from omni_train.dist import gather_json
from omni_train.planned import PLANNED, READ, Meter, PlannedDevice, planned_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

HOST = torch.device("cpu")
WIDTH, ROWS = 32, 8
WEIGHTS = (WIDTH * WIDTH + WIDTH) * 4  # bytes of a layer in float32


@pytest.fixture
def device():
    with PlannedDevice() as device:
        yield device


def layers(count, device):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(count)))


def test_bytes_are_those_of_weights_outputs_and_gradients(device):
    net = layers(1, PLANNED)
    assert device.live == WEIGHTS
    x = torch.zeros(ROWS, WIDTH).to(PLANNED)
    assert device.live == WEIGHTS + x.nbytes
    with device.phase("forward"):
        y = net(x)
    assert device.peaks["forward"] == WEIGHTS + x.nbytes + y.nbytes
    y.sum().backward()
    del x, y
    gc.collect()
    assert device.live == 2 * WEIGHTS  # with the gradients


def test_operations_are_those_of_the_products(device):
    net, x = layers(2, PLANNED), torch.zeros(ROWS, WIDTH, device=PLANNED)
    with device.phase("forward"):
        y = net(x)
    with device.phase("backward"):
        y.sum().backward()
    product = 2 * ROWS * WIDTH * WIDTH
    assert device.flops["forward"] == 2 * product
    assert device.flops["backward"] == 3 * product  # the first layer's input needs no gradient


def test_attention_holds_no_square_matrix_and_its_operations_count(device):
    q = torch.zeros(1, 2, 256, 16, device=PLANNED, requires_grad=True)
    nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    assert max(device.peaks.values()) < 2 * 256 * 256 * 4
    assert device.flops.total() == 7 * 2 * 2 * 256 * 256 * 16  # two products forward, five backward


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_plan_counts_what_a_real_pass_does(recomputes):
    def run(meter, place):
        with meter:
            net, x = layers(6, place), torch.zeros(ROWS, WIDTH).to(place)
            optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
            for _ in range(2):
                with meter.phase("step"):
                    y = x
                    for layer in net:
                        y = checkpoint(layer, y, use_reentrant=False) if recomputes else layer(y).tanh()
                    y.sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return meter

    planned, real = run(PlannedDevice(), PLANNED), run(Meter(HOST), HOST)
    assert planned.peaks["step"] == pytest.approx(real.peaks["step"], rel=0.01)
    assert planned.flops == real.flops


def test_the_host_reads_what_it_has_sent(device):
    mask = nn.functional.pad(torch.ones(3, dtype=torch.bool, device=PLANNED), [0, 2])
    assert not bool(mask.all())
    assert mask.cpu().tolist() == [True] * 3 + [False] * 2
    sigmas = torch.tensor([1.0, 0.5, 0.0]).to(PLANNED)
    assert sigmas[1].item() == 0.5
    assert bool((sigmas[:2] > 0).all())
    for numbers in ([], [0.5]):
        assert torch.tensor(numbers).to(PLANNED).device == PLANNED
    assert torch.tensor([0.5]).to(PLANNED).item() == 0.5
    sigmas += torch.randn(3, device=PLANNED)
    assert sigmas[1].item() == READ  # no longer known


def test_shapes_that_follow_from_known_numbers_are_known(device):
    counts = torch.tensor([2, 0, 3]).to(PLANNED)
    places = counts.repeat_interleave(counts)
    assert (places.device, places.tolist()) == (PLANNED, [2, 2, 3, 3, 3])
    values, inverse = torch.unique_consecutive(places, return_inverse=True)
    assert (values.tolist(), inverse.tolist()) == ([2, 3], [0, 0, 1, 1, 1])
    assert torch.tensor([counts.max() - 1, counts.sum()], device=PLANNED).tolist() == [2, 5]


def test_the_end_of_a_text_is_on_no_token_that_is_made_up(device):
    ends = torch.tensor([1, 2]).to(PLANNED)  # made-up tokens are 1
    assert torch.isin(torch.tensor([[1, 3]]).to(PLANNED), ends).tolist() == [[True, False]]
    drawn = torch.rand(2, 3, device=PLANNED).argmax(dim=1)
    assert torch.isin(drawn, ends).tolist() == [False, False]
    assert bool((torch.isin(drawn, ends).cumsum(dim=0) == 0).all())


def test_a_mask_that_is_known_tells_how_many_rows_it_takes(device):
    mask = torch.tensor([[True, False, True], [False, False, True]]).to(PLANNED)
    rows = torch.rand(2, 3, 5, device=PLANNED, requires_grad=True)
    assert rows[mask].shape == (3, 5)
    rows[mask].sum().backward()
    assert rows.grad.shape == (2, 3, 5)


def test_operations_of_experts_are_those_of_each_experts_rows(device):
    rows, num_experts = torch.zeros(ROWS, WIDTH, device=PLANNED, requires_grad=True), 4
    weights = torch.zeros(num_experts, WIDTH, 2 * WIDTH, device=PLANNED, requires_grad=True)
    ends = torch.tensor([2, 5, 5, ROWS], dtype=torch.int32).to(PLANNED)
    with device.phase("forward"):
        out = nn.functional.grouped_mm(rows, weights, offs=ends)
    assert out.shape == (ROWS, 2 * WIDTH)
    out.sum().backward()
    assert (rows.grad.shape, weights.grad.shape) == (rows.shape, weights.shape)
    each = [2 * count * WIDTH * 2 * WIDTH for count in (2, 3, 0, 3)]
    assert device.flops["forward"] == sum(each)
    assert device.flops.total() == 3 * sum(each)


def test_what_is_read_otherwise_is_made_up(device):
    image = torch.rand(4, 4, device=PLANNED)
    assert image.sum().item() == READ
    assert image.to(torch.uint8).cpu().numpy().shape == (4, 4)
    assert bool(image.isfinite().all())


def test_a_module_moves_to_the_device_and_back(device):
    net = layers(1, "cpu")
    assert device.live == 0
    net.to(PLANNED)
    assert device.live == WEIGHTS
    net.to("cpu")
    gc.collect()
    assert device.live == 0


def test_ranks_that_are_not_there_send_what_this_one_does():
    with planned_ranks(4) as dist:
        assert gather_json(dist, {"a": 1}) == [{"a": 1}] * 4
        assert not dist.is_main
        with pytest.raises(RuntimeError, match="without torchrun"), planned_ranks(2):
            pass
