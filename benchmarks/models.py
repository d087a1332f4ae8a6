"""Eight small models of eight kinds, for the benchmarks of memory and batch size.

Each entry builds the model, makes a batch of n samples (made up: memory does not depend on the
numbers), and gives the mean loss. In two of them (mlp, shared) parameters and gradients outweigh
the activations of small batches, which misleads a search that looks only at the total.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    make_batch: Callable[..., Any]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def rebuild(model: nn.Module, batch: Any) -> torch.Tensor:
    (x,) = batch
    return F.mse_loss(model(x), x)


def labelled(*shape: int) -> Callable[..., Any]:
    def make(n: int, device: str = "cpu") -> Any:
        return torch.rand(n, *shape, device=device), torch.zeros(n, dtype=torch.long, device=device)

    return make


def images(*shape: int) -> Callable[..., Any]:
    return lambda n, device="cpu": (torch.rand(n, *shape, device=device),)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def cnn(norm: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1)]
        layers += [nn.BatchNorm2d(outside)] if norm else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10)
    )


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = F.relu(self.down(x))
        low = F.relu(self.middle(F.max_pool2d(high, 2)))
        return self.out(torch.cat([high, F.relu(self.up(low))], dim=1))


def autoencoder() -> nn.Module:
    """The convolutional auto-encoder of lesson 07: 3 x 80 x 80 images."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(5),
        nn.ConvTranspose2d(16, 8, 5, stride=5), nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 5, stride=4, padding=1, output_padding=1), nn.ReLU(),
    )  # fmt: skip


class Shared(nn.Module):
    """One layer used six times: its parameters count once, its activations six times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512)
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.relu(self.layer(x))
        return self.head(x)


MODELS = {
    "MLP": Case(mlp, labelled(512), classify),
    "CNN": Case(cnn, labelled(3, 32, 32), classify),
    "CNN, BatchNorm": Case(lambda: cnn(norm=True), labelled(3, 32, 32), classify),
    "LSTM": Case(Lstm, labelled(24, 16), classify),
    "transformer": Case(Transformer, labelled(24, 64), classify),
    "U-Net": Case(UNet, images(1, 32, 32), rebuild),
    "auto-encoder": Case(autoencoder, images(3, 80, 80), rebuild),
    "shared weights": Case(Shared, labelled(512), classify),
}
OPTIMIZERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
}
