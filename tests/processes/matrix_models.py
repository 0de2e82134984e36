"""The models of the matrix: ten kinds of network, as small as they can be and still be what they are called.

Sizes divide by 2, 3 and 4 wherever a strategy might cut them. Everything is a
function of a seed and in float64, so that a test can ask for equality.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_SAMPLES = 11
"""In batches of 8: a last one of 3, in which a fourth worker has nothing."""

CLASSES, TOKENS, LENGTH, WIDTH, HEADS = 12, 24, 6, 24, 12


def numbers(*shape: int, seed: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(*shape: int, below: int, seed: int) -> Tensor:
    """Whole numbers from 0 on."""
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


class Lstm(nn.Module):
    """Two layers over tokens; the last step's state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 12)
        self.lstm = nn.LSTM(12, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        out, _ = self.lstm(self.embed(ids))
        return self.head(out[:, -1])


class BasicBlock(nn.Module):
    """Two convolutions and a way past them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet18(nn.Module):
    """The layout of the paper, with few channels: 7x7 stem, pooling, four layers of two blocks."""

    def __init__(self, channels: tuple[int, ...] = (2, 3, 4, 6)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        layers, before = [], channels[0]
        for number, width in enumerate(channels):
            stride = 1 if number == 0 else 2
            layers.append(nn.Sequential(BasicBlock(before, width, stride), BasicBlock(width, width, 1)))
            before = width
        self.layer1, self.layer2, self.layer3, self.layer4 = layers
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(before, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def vgg(dropout: float) -> nn.Module:
    """VGG's features, pooling and three-layer classifier, in a row."""
    layers: list[nn.Module] = []
    before = 3
    for width in (2, 4, 6):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        before = width
    classifier = nn.Sequential(
        nn.Linear(before * 4, 24), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(24, 24), nn.ReLU(), nn.Dropout(dropout), nn.Linear(24, CLASSES),
    )  # fmt: skip
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(2), nn.Flatten(), classifier)


class NamedAttention(nn.Module):
    """Attention that only a plan by names can cut: its heads are whatever a view finds, and a norm works on each."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm = nn.RMSNorm(WIDTH // HEADS)

    def forward(self, x: Tensor, **ignored: Any) -> Tensor:
        project = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}
        heads = {key: each(x).unflatten(-1, (-1, WIDTH // HEADS)) for key, each in project.items()}
        heads["q"] = self.q_norm(heads["q"])
        mixed = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in heads.values()))
        return self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:-1], -1))


class Blocks(nn.Module):
    """Depthwise convolutions with squeeze and excitation, then an attention with a plan of its own, as transformers has it."""

    tp_plan: ClassVar[dict[str, str]] = {
        "attention.[qkv]_proj": "colwise",
        "attention.q_norm": "replicated_with_grad_allreduce",
        "attention.o_proj": "rowwise",
    }

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(12, 24, 3, groups=12, stride=2), nn.GroupNorm(12, 24))
        self.squeeze, self.excite = nn.Conv2d(24, 12, 1), nn.Conv2d(12, 24, 1)
        self.project = nn.Conv2d(24, WIDTH, 1)
        self.attention, self.head = NamedAttention(), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.depthwise(self.expand(images))
        x = x * torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        tokens = self.project(x).flatten(2).transpose(1, 2)
        return self.head(self.attention(tokens).mean(1))


class Vae(nn.Module):
    """Draws its code while it trains; what it gives back is all that its loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(18, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.mean, self.log_variance = nn.Linear(24, 12), nn.Linear(24, 12)
        self.decode = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 18))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encode(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        latent = mean
        if self.training:
            latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decode(latent), mean, log_variance


def negative_elbo(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    """How far the picture is from what was decoded, plus how far its code is from a standard normal."""
    decoded, mean, log_variance = output
    error = 0.5 * (decoded - target).square().sum(1)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
    return (error + divergence).mean()


class Attention(nn.Module):
    """Heads over separate projections; `mask` says which positions may be looked at, else those before."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch = x.shape[0]
        q, k, v = (
            project(x).view(batch, LENGTH, self.heads, WIDTH // self.heads).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(out.transpose(1, 2).reshape(batch, LENGTH, WIDTH))


class BertLayer(nn.Module):
    """Normalised after each half."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(4), nn.LayerNorm(WIDTH)
        self.up, self.down, self.norm2 = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """Tokens, positions and segments in, words that were masked out: its loss counts those alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.types = nn.Embedding(TOKENS, WIDTH), nn.Embedding(2, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(BertLayer() for _ in range(2))
        self.transform, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor, mask: Tensor, token_types: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids) + self.types(token_types) + self.positions)
        visible = mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, visible)
        return self.decoder(F.gelu(self.transform(x))).transpose(1, 2)


class GptBlock(nn.Module):
    """Normalised before each half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(HEADS), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.register_buffer("at", torch.arange(LENGTH))
        self.blocks = nn.Sequential(GptBlock(), GptBlock())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(self.at)
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


class Scored(dict[str, Tensor]):
    """What a model that computes its own loss returns."""


class OwnLossGpt(Gpt):
    """Computes its own loss where it is given labels: the mean over those that are not ignored."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Scored:  # type: ignore[override]
        logits = super().forward(ids)
        if labels is None:
            return Scored(logits=logits)
        return Scored(loss=F.cross_entropy(logits, labels), logits=logits)


class PairGpt(Gpt):
    """Gives logits and loss as a pair; without targets, logits of the last position and no loss."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        x = self.norm(self.blocks(self.embed(ids) + self.positions(self.at)))
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss


class TreeLstm(nn.Module):
    """A binary Tree-LSTM: each node is computed from its two children, each with a forget gate of its own.

    Nodes come children first; node 0 of the states is "no child", so a tree
    is its words and, for every node, the numbers of its children plus one.
    """

    NUM_NODES = 7

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(TOKENS, width)
        self.own = nn.Linear(width, 5 * width)
        self.left, self.right = (
            nn.Linear(width, 5 * width, bias=False),
            nn.Linear(width, 5 * width, bias=False),
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor, children: Tensor) -> Tensor:
        own = self.own(self.embed(words))
        nothing = own[:, 0, : self.width] * 0.0
        hidden, cells = [nothing], [nothing]
        for node in range(self.NUM_NODES):
            chosen = children[:, node, :, None].expand(-1, -1, self.width)
            h_left, h_right = torch.stack(hidden, 1).gather(1, chosen).unbind(1)
            c_left, c_right = torch.stack(cells, 1).gather(1, chosen).unbind(1)
            gates = own[:, node] + self.left(h_left) + self.right(h_right)
            into, out, forget_left, forget_right, new = gates.split(self.width, dim=1)
            cell = (
                into.sigmoid() * new.tanh()
                + forget_left.sigmoid() * c_left
                + forget_right.sigmoid() * c_right
            )
            cells.append(cell)
            hidden.append(out.sigmoid() * cell.tanh())
        return self.head(hidden[-1])


def random_trees() -> tuple[Tensor, Tensor]:
    """Trees of four words in different shapes: nodes are joined two by two, at random, until one is left."""
    words = whole(NUM_SAMPLES, TreeLstm.NUM_NODES, below=TOKENS, seed=11)
    words[:, 4:] = 0  # inner nodes have no word of their own
    children = torch.zeros(NUM_SAMPLES, TreeLstm.NUM_NODES, 2, dtype=torch.long)
    generator = torch.Generator().manual_seed(12)
    for tree in range(NUM_SAMPLES):
        roots = [1, 2, 3, 4]
        for node in range(4, TreeLstm.NUM_NODES):
            at = int(torch.randint(0, len(roots) - 1, (), generator=generator))
            children[tree, node] = torch.tensor(roots[at : at + 2])
            roots[at : at + 2] = [node + 1]
    return words, children


class ClickModel(nn.Module):
    """26 columns of ids, two to a bag, beside 13 numbers; a deep part over all of it and a wide one over the numbers."""

    def __init__(self) -> None:
        super().__init__()
        num_rows, dim = np.array([9, 2])  # sizes that are read from data are numpy's
        self.bags = nn.ModuleList(nn.EmbeddingBag(num_rows, dim, mode="mean") for _ in range(26))
        self.deep = nn.Sequential(
            nn.Linear(13 + 26 * 2, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 1)
        )
        self.wide = nn.Linear(13, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        looked_up = [bag(ids[:, column]) for column, bag in enumerate(self.bags)]
        out = self.deep(torch.cat([dense, *looked_up], dim=1)) + self.wide(dense)
        return out.squeeze(1)


class Interactions(nn.Module):
    """Products of all pairs of bags and dense features; sizes are numpy's, and weights are written through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        generator = np.random.default_rng(0)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(num_rows, 4, mode="sum") for num_rows in np.array([9, 7, 5])
        )
        self.bottom = self._layers(np.array([6, 12, 4]), nn.ReLU())
        self.top = self._layers(np.array([4 + 6, 12, 1]), nn.Sigmoid())
        for layer in self.modules():
            if isinstance(layer, (nn.Linear, nn.EmbeddingBag)):
                layer.weight.data = torch.tensor(0.5 * generator.standard_normal(layer.weight.shape))

    def _layers(self, sizes: Any, last: nn.Module) -> nn.Sequential:
        layers = nn.ModuleList()
        for before, after in itertools.pairwise(sizes):
            layers.append(nn.Linear(int(before), int(after)))
            layers.append(last if after == sizes[-1] else nn.ReLU())
        return nn.Sequential(*layers)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = [bag(ids[:, column]) for column, bag in enumerate(self.bags)]
        num_rows, width = x.shape
        stacked = torch.cat([x, *rows], dim=1).view((num_rows, -1, width))
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        _, count, _ = products.shape
        first = torch.tensor([i for i in range(count) for _ in range(i)])
        second = torch.tensor([j for i in range(count) for j in range(i)])
        return self.top(torch.cat([x, products[:, first, second]], dim=1))


@dataclass(frozen=True)
class Case:
    """A model with what it is trained on."""

    build: Callable[[], nn.Module]
    arrays: Any
    loss: Any
    optimizer: Callable[[Any], torch.optim.Optimizer]
    mixes: bool = False
    """Its layers mix the batch: one process has to run the workers' slices in turn."""

    draws: bool = False
    """It draws random numbers: one process has to run the workers' slices, and a pipeline's micro-batches, in turn."""


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    # Some gradients are zero but for rounding (the bias of an attention's keys), which a small eps would enlarge.
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, weight_decay=0.1)


def _adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05)


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(18, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, CLASSES)
    )


def _masked_words() -> tuple[dict[str, Tensor], Tensor]:
    ids, lengths = whole(NUM_SAMPLES, LENGTH, below=TOKENS, seed=5), 3 + torch.arange(NUM_SAMPLES) % 4
    mask = torch.arange(LENGTH) < lengths[:, None]
    asked = mask & (whole(NUM_SAMPLES, LENGTH, below=3, seed=6) == 0)
    types = (torch.arange(LENGTH) * 2 >= lengths[:, None]).long()
    inputs = {"ids": torch.where(asked, 0, ids), "mask": mask, "token_types": types}
    return inputs, torch.where(asked, ids, -100)


_X, _LABELS = numbers(NUM_SAMPLES, 18, seed=1), torch.arange(NUM_SAMPLES) * 5 % CLASSES
_IMAGES = numbers(NUM_SAMPLES, 3, 36, 36, seed=2)
_TEXT = whole(NUM_SAMPLES, LENGTH + 1, below=TOKENS, seed=3)
_DENSE, _IDS = numbers(NUM_SAMPLES, 13, seed=7), whole(NUM_SAMPLES, 26, 2, below=9, seed=8)
_LABELLED = {
    "ids": _TEXT[:, :-1],
    "labels": torch.where(
        torch.arange(LENGTH) < torch.arange(NUM_SAMPLES)[:, None] % 5 + 1, _TEXT[:, 1:], -100
    ),
}
_CLICKED = (_DENSE[:, 0] > 0).double()

CASES: dict[str, Case] = {
    "mlp": Case(_mlp, (_X, _LABELS), nn.CrossEntropyLoss(), _adam),
    "lstm": Case(Lstm, (_TEXT, _LABELS), nn.CrossEntropyLoss(), _sgd),
    "resnet": Case(ResNet18, (_IMAGES, _LABELS), nn.CrossEntropyLoss(), _sgd, mixes=True),
    "vgg": Case(lambda: vgg(0.0), (_IMAGES[..., :16, :16], _LABELS), nn.CrossEntropyLoss(), _sgd),
    "vgg with dropout": Case(
        lambda: vgg(0.3), (_IMAGES[..., :16, :16], _LABELS), nn.CrossEntropyLoss(), _sgd, draws=True
    ),
    "vae": Case(Vae, (_X, _X), negative_elbo, _adam, draws=True),
    "bert": Case(Bert, _masked_words(), nn.CrossEntropyLoss(), _adam),
    "gpt": Case(Gpt, (_TEXT[:, :-1], _TEXT[:, 1:]), nn.CrossEntropyLoss(), _adam),
    "own loss": Case(OwnLossGpt, _LABELLED, "model", _adam),
    "pair": Case(
        PairGpt,
        {"ids": _LABELLED["ids"], "targets": _LABELLED["labels"].clamp(min=-1)},
        "model",
        _adam,
    ),
    "interactions": Case(
        Interactions,
        ({"dense": _DENSE[:, :6], "ids": _IDS[:, :3] % 5}, _CLICKED[:, None]),
        nn.BCELoss(),
        _sgd,
    ),
    "blocks": Case(Blocks, (_IMAGES[..., :8, :8], _LABELS), nn.CrossEntropyLoss(), _sgd, mixes=True),
    "tree": Case(TreeLstm, (*random_trees(), _LABELS), nn.CrossEntropyLoss(), _sgd),
    "clicks": Case(ClickModel, ({"dense": _DENSE, "ids": _IDS}, _CLICKED), nn.BCEWithLogitsLoss(), _adagrad),
}
