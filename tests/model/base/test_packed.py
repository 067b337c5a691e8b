"""Packed linear layers give what plain ones give, and stop where their weight is no longer what was packed."""

from copy import deepcopy

import psutil
import pytest
import torch
from torch import nn

from ctcdraft.model.base.packed import LEAST, PackedLinear, pack, packed_product

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}  # of sums of 256 products of normal numbers


def linear(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return nn.Linear(256, LEAST // 256, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 256), (9, 256), (2, 7, 256), (256,)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_plain_layers(dtype, shape, bias):
    layer, x = linear(dtype, bias), torch.randn(shape, dtype=dtype)
    want = layer(x)
    pack(layer)
    takes_it = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert type(layer) is (PackedLinear if takes_it else nn.Linear)
    assert layer(x).shape == want.shape
    torch.testing.assert_close(layer(x), want, atol=TOLERANCE[dtype], rtol=1e-2)


def test_a_cpu_that_packs_no_bfloat16_keeps_plain_layers(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    layers = nn.ModuleList([linear(torch.bfloat16), linear()])
    pack(layers)
    assert [type(layer) for layer in layers] == [nn.Linear, PackedLinear]


def _rewritten(layer):
    layer.weight.mul_(2)


def _loaded(layer):
    layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})


def _converted(layer):
    layer.to(torch.float64)


@pytest.mark.parametrize("changed", [_rewritten, _loaded, _converted])
def test_a_changed_weight_counts(changed):
    layer = linear()
    pack(layer)
    changed(layer)
    x = torch.randn(3, 256, dtype=layer.weight.dtype)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("changed", [_rewritten, _loaded])
def test_a_changed_weight_is_packed_anew_and_once(changed, monkeypatch):
    layer, x, again = linear(), torch.randn(3, 256), []
    pack(layer)
    changed(layer)
    lay_out = PackedLinear.lay_out
    monkeypatch.setattr(PackedLinear, "lay_out", lambda self: again.append(lay_out(self)))
    for _ in range(3):
        layer(x)
    assert len(again) == 1


def test_gradients_of_a_weight_are_the_plain_layers():
    layer, x = linear(), torch.randn(3, 256)
    pack(layer)
    layer.weight.requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(len(layer.weight), -1))


def test_a_packed_weight_that_is_not_the_own_one_would_be_seen():
    layer = linear()
    pack(layer)
    layer.packed = torch.ops.mkldnn._reorder_linear_weight(2 * layer.weight)
    x = torch.randn(3, 256)
    assert not torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias), atol=1e-2)


def test_gradients_of_inputs_are_the_plain_layers():
    layer = linear()
    pack(layer)
    x = torch.randn(3, 256, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, -1))


def test_a_copy_is_a_plain_layer_of_its_own():
    stack = nn.Sequential(linear())
    pack(stack)
    copied = deepcopy(stack)
    assert type(copied[0]) is nn.Linear
    copied[0].weight.zero_()
    assert stack[0].weight.any()
    assert list(copied.state_dict()) == list(stack.state_dict())


def test_small_layers_and_other_precisions_stay_as_they_are():
    layers = nn.Sequential(nn.Linear(8, 8), linear(torch.float64), linear())
    pack(layers)
    assert [type(one) for one in layers] == [nn.Linear, nn.Linear, PackedLinear]


def test_nothing_is_packed_where_memory_is_short(monkeypatch):
    memory = psutil.virtual_memory()._replace(available=LEAST * 4)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    layer = linear()
    pack(layer)
    assert type(layer) is nn.Linear


def test_packed_product_is_states_times_rows():
    torch.manual_seed(0)
    weight, states = torch.randn(LEAST // 256, 256), torch.randn(2, 3, 256)
    torch.testing.assert_close(packed_product(weight)(states), states @ weight.T, atol=1e-4, rtol=1e-4)
