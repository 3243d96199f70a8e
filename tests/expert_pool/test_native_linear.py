"""The backbone's linear layers in the native kernels: the same values, whoever computes."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from expert_pool.kernels.linear import linear_layers, use_native_linears, use_torch_linears
from expert_pool.kernels.measure import linear_table
from expert_pool.kernels.row_table import ALWAYS, RowTable
from tests.expert_pool.native_layers import kernels_or_skip

every_set = pytest.mark.parametrize("instructions", ["native", "avx2", "generic"])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@every_set
@settings(max_examples=60)
@given(
    rows=st.integers(1, 20),
    depth=st.integers(1, 300),
    width=st.integers(1, 300),
    biased=st.booleans(),
    threads=st.sampled_from((1, 2)),
)
def test_every_shape_is_within_rounding_of_the_exact_result(
    instructions, rows, depth, width, biased, threads
):
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(rows)
    values = torch.randn((rows, depth), generator=generator).bfloat16()
    weight = torch.randn((width, depth), generator=generator).bfloat16()
    bias = torch.randn(width, generator=generator).bfloat16() if biased else None
    found = kernels_or_skip(instructions).linear(values, weight, bias)
    exact = values.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = values.double().abs() @ weight.double().abs().T + 10
    error = depth * 2.0**-23 * size + 1.01 * 2.0**-8 * exact.abs()
    assert ((found.double() - exact).abs() <= error).all()


@every_set
def test_a_row_has_the_same_bits_alone_and_among_others(instructions):
    kernels = kernels_or_skip(instructions)
    values, weight = torch.randn(30, 333).bfloat16(), torch.randn(517, 333).bfloat16()
    alone = torch.cat([kernels.linear(values[at : at + 1], weight, None) for at in range(30)])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in range(1, 31):
            assert torch.equal(kernels.linear(values[:count], weight, None), alone[:count])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(48, 80, bias=True)
        self.second = torch.nn.Linear(80, 32, bias=False)
        self.odd = torch.nn.Linear(32, 32, bias=False)
        self.odd.weight.data = self.odd.weight.data.t()

    def forward(self, rows):
        return self.odd(self.second(self.first(rows)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().bfloat16().requires_grad_(False)


def test_a_model_answers_within_rounding_and_can_be_given_back(net):
    kernels = kernels_or_skip()
    rows = torch.randn(2, 3, 48).bfloat16()
    stock = net(rows)
    use_native_linears(net, kernels, ALWAYS)
    assert [type(m.forward) for m in (net.first, net.second)] == [functools.partial] * 2
    found = net(rows)
    assert found.shape == stock.shape
    assert (found - stock).abs().max() <= 0.02 * stock.abs().max()
    net.first.weight.data = net.first.weight.data * 2  # a module keeps its parameters
    assert not torch.equal(net(rows), found)
    net.first.weight.data = net.first.weight.data / 2
    use_torch_linears(net)
    assert torch.equal(net(rows), stock)


def test_more_rows_than_the_table_says_are_torchs(net):
    use_native_linears(net, kernels_or_skip(), RowTable(4.0))
    rows = torch.randn(5, 48).bfloat16()
    layer = net.first
    assert torch.equal(layer(rows), functional.linear(rows, layer.weight, layer.bias))
    assert torch.equal(layer(rows[:0]), functional.linear(rows[:0], layer.weight, layer.bias))


def test_what_native_cannot_compute_is_left_alone(net):
    assert linear_layers(net) == [net.first, net.second]
    assert linear_layers(Net()) == []  # float32

    class Other(torch.nn.Linear):
        pass

    assert linear_layers(Other(8, 8).bfloat16()) == []


def test_rows_of_another_width_are_the_error_that_torch_says(net):
    use_native_linears(net, kernels_or_skip(), ALWAYS)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net.first(torch.zeros(4, 24).bfloat16())
    with pytest.raises(ValueError, match=r"expected rows \[..., 48\]"):
        kernels_or_skip().linear(torch.zeros(4, 24).bfloat16(), net.first.weight, None)
    with pytest.raises(ValueError, match=r"a bias \[79\]"):
        kernels_or_skip().linear(
            torch.zeros(4, 48).bfloat16(), net.first.weight, net.first.bias[:79]
        )


def test_parameters_that_were_exchanged_are_computed_as_they_are_now(net):
    use_native_linears(net, kernels_or_skip(), ALWAYS)
    rows = torch.randn(3, 48).bfloat16()
    net.first.weight.data = torch.randn(48, 80).bfloat16().t()
    found = net.first(rows)
    assert torch.equal(found, functional.linear(rows, net.first.weight, net.first.bias))
    net.float()
    assert net.first(rows.float()).dtype == torch.float32


def test_who_wants_gradients_gets_them(net):
    use_native_linears(net, kernels_or_skip(), ALWAYS)
    rows = torch.randn(3, 48).bfloat16()
    assert not net.first(rows).requires_grad
    net.first(rows.requires_grad_()).sum().backward()
    assert rows.grad is not None
    net.requires_grad_()
    assert net.first(rows.detach()).requires_grad
    with torch.no_grad():
        assert not net.first(rows).requires_grad


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_layers_without_values_are_left_alone():
    assert linear_layers(torch.nn.Linear(0, 4).bfloat16()) == []
    assert linear_layers(torch.nn.Linear(4, 0).bfloat16()) == []


def test_rows_that_are_not_contiguous_are_no_matter(net):
    use_native_linears(net, kernels_or_skip(), ALWAYS)
    rows = torch.randn(48, 3).bfloat16().t()
    assert torch.equal(net.first(rows), net.first(rows.contiguous()))


def test_this_machine_can_be_measured(net):
    assert linear_table(kernels_or_skip(), linear_layers(net)).most_rows >= 0
