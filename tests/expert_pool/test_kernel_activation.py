"""Which experts modules the native kernels take: what they do decides, not what they are called."""

import pytest
import torch

from expert_pool.kernels.activation import activation_of
from expert_pool.kernels.layer_kernel import unsupported
from tests.expert_pool.native_layers import ACTIVATIONS, CLAMPED, LAYOUTS, make_layer


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_an_activation_without_gate_is_known_by_what_it_does(activation, layout):
    layer = make_layer(8, 8, activation, gated=False, layout=layout)
    assert activation_of(layer.module()) == layer.found


@pytest.mark.parametrize("activation", [*ACTIVATIONS, CLAMPED])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gating_is_known_by_what_it_does(activation, layout):
    layer = make_layer(8, 8, activation, layout=layout)
    assert activation_of(layer.module()) == layer.found
    assert unsupported(layer.module(), layer.params, layer.found) is None


def halves(x):
    return x.chunk(2, -1)


@pytest.mark.parametrize(
    "gating",
    [
        lambda x: torch.tanh(halves(x)[0]) * halves(x)[1],
        # Gates that alternate, in weights that are not transposed.
        lambda x: torch.nn.functional.silu(x[..., ::2]) * x[..., 1::2],
        # Clamps that small numbers do not show.
        lambda x: torch.nn.functional.silu(halves(x)[0]).clamp(max=100) * halves(x)[1],
        lambda x: torch.nn.functional.silu(halves(x)[0]) * halves(x)[1].clamp(-10, 10),
        # Something that wants more than rows of numbers.
        lambda x: x.view(7, 11, 13),
        lambda x: x.no_such_thing,
    ],
)
def test_other_gatings_are_left_to_torch(gating):
    layer = make_layer(8, 8)
    module = layer.module()
    module._apply_gate = gating
    found = activation_of(module)
    assert found is None
    assert "activation" in unsupported(module, layer.params, found)


def test_another_limit_than_the_module_says_is_left_to_torch():
    module = make_layer(8, 8, CLAMPED, layout="interleaved").module()
    module.limit = 3.0
    assert activation_of(module) is None


def test_an_activation_that_writes_in_place_is_known_all_the_same():
    layer = make_layer(8, 8, "relu", gated=False)
    module = layer.module()
    module.act_fn = torch.nn.ReLU(inplace=True)
    assert activation_of(module) == layer.found


def test_other_parameters_are_left_to_torch():
    layer = make_layer(12, 8)
    module, params = layer.module(), layer.params
    assert unsupported(module, params, layer.found) is None
    module.is_transposed = True  # they are not
    assert "projections" in unsupported(module, params, layer.found)
    module.is_transposed, module.has_gate = False, False
    assert "parameters" in unsupported(module, params, layer.found)
    module.has_gate, module.has_post_expert_norm = True, True
    assert "normalises" in unsupported(module, params, layer.found)
