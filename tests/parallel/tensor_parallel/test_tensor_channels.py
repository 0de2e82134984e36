"""Convolutions cut by channels, and the reasons given for the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.parallel.tensor_parallel.plan import find_plan


def styles(model: nn.Module, degree: int = 2) -> dict[str, str]:
    return {row.layer: row.style for row in find_plan(model, degree).rows.values()}


def conv(before: int, after: int, **settings: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, padding=1, **settings)


class Residual(nn.Module):
    def __init__(self, middle: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(4, middle), nn.BatchNorm2d(middle)
        self.conv2, self.bn2 = conv(middle, 4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return F.relu(out)


def test_the_two_convolutions_of_a_block_are_a_pair_with_the_norm_between_them() -> None:
    assert styles(Residual()) == {
        "conv1": "colwise",
        "bn1": "channels",
        "conv2": "rowwise",
        "bn2": "replicated",
    }
    several = styles(nn.Sequential(conv(3, 4), Residual(), Residual()))
    assert [several[name] for name in ("1.conv1", "1.conv2", "2.conv1", "2.conv2")] == [
        "colwise",
        "rowwise",
    ] * 2


def test_depthwise_and_grouped_convolutions_stay_between_a_pair() -> None:
    model = nn.Sequential(
        conv(3, 8), nn.BatchNorm2d(8), nn.ReLU6(), conv(8, 16, groups=8), nn.GroupNorm(4, 16), conv(16, 4)
    )
    assert styles(model, 4) == {
        "0": "colwise", "1": "channels", "3": "channels", "4": "channels", "5": "rowwise",
    }  # fmt: skip


def test_a_linear_layer_closes_behind_a_flatten_only() -> None:
    class Net(nn.Module):
        def __init__(self, flattens: bool) -> None:
            super().__init__()
            self.conv, self.fc, self.flattens = conv(3, 4), nn.Linear(16 if flattens else 2, 4), flattens
            self.more = nn.Sequential(conv(4, 4), conv(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            if not self.flattens:
                return self.fc(self.more(x))  # the last dim, which is no channel
            return self.fc(x.view(x.size(0), -1))

    assert styles(Net(True))["fc"] == "rowwise"
    assert styles(Net(False)) == {
        "conv": "colwise", "more.0": "rowwise", "more.1": "replicated", "fc": "replicated",
    }  # fmt: skip


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), padding=1)


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, conv(3, 6 if kind != "size" else 5)
        self.second = conv(6 if kind != "size" else 5, 4)
        if kind == "own forward":
            self.second = Standardised(6, 4, 3)
        if kind == "tied":
            self.first, self.second = conv(6, 6), conv(6, 6)
            self.second.weight = self.first.weight
        self.pair = nn.Sequential(conv(4, 8), conv(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind == "shape":
            x = x / x.shape[1]
        if self.kind == "cat":
            x = torch.cat(x.chunk(2, 1)[::-1], 1)
        x = self.second(self.first(x) if self.kind == "twice" else x)
        return self.pair(x[:, :4])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("size", "5 channels cannot be divided by 2"),
        ("own forward", "its weight is computed in its forward"),
        ("tied", "the weight of 'first' is shared with another layer"),
        ("shape", "its channels are all used by getattr"),
        ("cat", "its channels are all used by chunk"),
    ],
)
def test_what_keeps_a_convolution_whole_is_said(kind: str, reason: str) -> None:
    plan = find_plan(Odd(kind), 2)
    assert plan.rows["first"].style == "replicated"
    assert plan.rows["first"].reason == reason
    assert plan.rows["pair.0"].style == "colwise"


def test_layers_with_hooks_see_whole_channels() -> None:
    seen: list[object] = []
    model = Residual()
    model.bn1.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with pytest.raises(ConfigError, match="'conv1': 'bn1' has a hook of the script's own"):
        styles(model)
    # What a hook on a container sees, its inner layers do not: they are cut as before.
    several = nn.Sequential(conv(3, 4), Residual(), conv(4, 4))
    several[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert styles(several) == {
        "0": "replicated", "1.conv1": "colwise", "1.bn1": "channels", "1.conv2": "rowwise", "1.bn2": "replicated",
        "2": "replicated",
    }  # fmt: skip
    assert seen == []


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(4), nn.ZeroPad2d(1)])
def test_a_pooling_of_more_dims_than_the_image_has_takes_channels_for_one(pool: nn.Module) -> None:
    def model(between: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Conv1d(3, 8, 3), between, nn.Conv1d(8, 4, 3))

    assert styles(model(nn.MaxPool1d(2))) == {"0": "colwise", "2": "rowwise"}
    with pytest.raises(ConfigError, match=f"{type(pool).__name__} is not for images of 1 dims"):
        styles(model(pool))
