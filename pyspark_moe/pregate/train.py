"""Trains a guess of a layer's experts from the router input of the layer before. Needs PyTorch (the extra "pregate")."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from .recall import RECALL_AT, recall_at
from .routers import Router

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
except ImportError as error:  # the tool says so before it reads anything
    raise ConfigError(f"Training needs PyTorch, which cannot be imported ({error}): pip install 'pyspark-moe[pregate]'.") from error


@dataclass(frozen=True)
class Training:
    """width: of the hidden layer; learning_rate decays to zero along a cosine. The defaults train a layer in seconds."""

    width: int = 128
    epochs: int = 8
    batch: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    seed: int = 0


def bce(scores: Tensor, selected: Tensor) -> Tensor:
    """Every expert on its own: selected or not. scores [n, n_expert], selected int64 [n, n_used]."""
    return functional.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores).scatter_(1, selected, 1.0))


def listnet(scores: Tensor, selected: Tensor) -> Tensor:
    """The distribution over experts: the selected ones have all of it, in equal parts."""
    return -functional.log_softmax(scores, dim=1).gather(1, selected).mean()


def ranknet(scores: Tensor, selected: Tensor) -> Tensor:
    """Every pair of a selected expert and another one: the selected one has the higher score."""
    is_selected = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, selected, True)
    differences = scores.gather(1, selected)[:, :, None] - scores[:, None, :]  # [n, n_used, n_expert]
    losses = functional.softplus(-differences).masked_fill(is_selected[:, None, :], 0.0)
    return losses.sum() / (~is_selected).sum().mul(selected.shape[1]).clamp(min=1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"bce": bce, "listnet": listnet, "ranknet": ranknet}


class Pregate(nn.Module):
    """scores [n, n_expert] of inputs [n, n_embd]: the target layer's own router, which is the guess to beat, scaled
    for each expert, and a small network that corrects it, which begins at zero."""

    def __init__(self, router: Router, mean: np.ndarray, scale: np.ndarray, width: int) -> None:
        super().__init__()
        n_expert, n_embd = router.weight.shape
        self.register_buffer("router", torch.from_numpy(router.weight.astype(np.float32)))
        self.register_buffer("mean", torch.from_numpy(mean.astype(np.float32)))
        self.register_buffer("scale", torch.from_numpy(scale.astype(np.float32)))
        self.into, self.out, self.direct = nn.Linear(n_embd, width), nn.Linear(width, n_expert), nn.Linear(n_embd, n_expert)
        self.trust = nn.Parameter(torch.ones(n_expert))
        for layer in (self.out, self.direct):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            self.direct.bias += torch.from_numpy(router.logit_bias.astype(np.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        even = (hidden - self.mean) / self.scale
        return self.trust * (hidden @ self.router.T) + self.direct(even) + self.out(functional.silu(self.into(even)))


def train(hidden: np.ndarray, selected: np.ndarray, router: Router, loss: str, options: Training) -> Callable[[np.ndarray], np.ndarray]:
    """Trains on router inputs [n_tokens, n_embd] and the next layer's experts int [n_tokens, n_used]; router: of the
    next layer. Returns what scores other inputs. The same seed gives the same result on one machine.

    The last tenth of the tokens is not learned from: it chooses the best state, before the first epoch or after one.
    """
    generator = torch.Generator().manual_seed(options.seed)
    n_fit = len(hidden) - max(1, len(hidden) // 10)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        inputs = hidden.astype(np.float32)
        model = Pregate(router, inputs.mean(axis=0), inputs.std(axis=0) + 1e-6, options.width)
    x, y = torch.from_numpy(inputs), torch.from_numpy(selected.astype(np.int64))

    def score(other: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(other.astype(np.float32))).numpy()

    def quality() -> float:
        scores = score(inputs[n_fit:])
        return recall_at(scores, selected[n_fit:], selected.shape[1]) + recall_at(scores, selected[n_fit:], RECALL_AT[0])

    n_steps = options.epochs * -(-n_fit // options.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, n_steps))
    best, best_quality = copy.deepcopy(model.state_dict()), quality()
    for _ in range(options.epochs):
        for rows in torch.randperm(n_fit, generator=generator).split(options.batch):
            optimizer.zero_grad()
            LOSSES[loss](model(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
        if (now := quality()) > best_quality:
            best, best_quality = copy.deepcopy(model.state_dict()), now
    model.load_state_dict(best)
    return score
