"""Models as a user would bring them: nothing here knows of the project. Also broken ones, each in its own way."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor, nn
from torch.nn import functional


class Mixer(nn.Module):
    """Causal depthwise convolution over time and a mixing of channel groups: weights that are no Linears."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, kernel_size=3, groups=width)
        self.mix = GroupMix(groups, width // groups)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.pad(self.norm(x).transpose(1, 2), (2, 0))
        return x + self.mix(functional.silu(self.conv(y).transpose(1, 2)))


class GroupMix(nn.Module):
    def __init__(self, groups: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, width, width))
        self.scale = nn.Parameter(torch.empty(groups))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight.shape[-1]))
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(-1, self.weight.shape[:2])
        return torch.einsum("bsgi,gij,g->bsgj", y, self.weight, self.scale).flatten(2)


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Own(nn.Module):
    """embed and head are methods, and the model itself holds a parameter of each and a buffer."""

    decay: Tensor

    def __init__(self, width: int = 24, depth: int = 5, length: int = 16, vocab: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.ModuleList(Mlp(width) if i % 3 == 1 else Mixer(width, 4) for i in range(depth))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocab)
        self.temperature = nn.Parameter(torch.empty(()))
        self.register_buffer("decay", torch.empty(length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.positions, std=0.02)
        nn.init.ones_(self.temperature)
        with torch.no_grad():
            self.decay.copy_(0.99 ** torch.arange(len(self.decay)))

    def embed(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids) + self.positions[: ids.shape[1]]
        return h * self.decay[: ids.shape[1], None]

    def head(self, h: Tensor) -> Tensor:
        return self.out(self.norm(h)) * self.temperature


class Slow(Own):
    """A second for each micro-batch."""

    def head(self, h: Tensor) -> Tensor:
        time.sleep(1.0)
        return super().head(h)


def own_model(**args: int) -> nn.Module:
    return Own(**args)


class Concrete(Own):
    """Cannot be built on the meta device: its constructor looks at the numbers that it drew."""

    def __init__(self, **args: int) -> None:
        super().__init__(**args)
        self.norms = self.tokens.weight.norm(dim=1).tolist()


class NoReset(Own):
    """Holds a buffer that the constructor alone can fill."""

    def __init__(self, **args: int) -> None:
        super().__init__(**args)
        self.mask = nn.Module()
        self.mask.register_buffer("causal", torch.ones(4, 4).tril())


class PlainTensor(Own):
    """Keeps a table that is neither a parameter nor a buffer, as many models keep rotary angles."""

    def __init__(self, **args: int) -> None:
        super().__init__(**args)
        self.tables = {"shift": torch.full((1,), 0.5)}

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) + self.tables["shift"]


class Recursive(Own):
    """Its reset also resets modules that it holds, which would make weights depend on what else is there."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.out.reset_parameters()


class Forgetful(Own):
    """Its reset leaves a buffer to the constructor."""

    def __init__(self, **args: int) -> None:
        super().__init__(**args)
        self.register_buffer("shift", torch.ones(()))


class RandomBuffer(Own):
    """Mixes in random features that are drawn once and not trained."""

    def __init__(self, **args: int) -> None:
        super().__init__(**args)
        self.features = RandomFeatures(self.tokens.embedding_dim)

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) @ self.features.table


class RandomFeatures(nn.Module):
    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table)


# Broken, or not supported yet.


def none(**args: int) -> None:
    """Returns nothing."""


not_callable = 3


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)


class EmptyBlocks(NoBlocks):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


class ListedBlocks(NoBlocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [nn.Linear(8, 8)]  # torch does not see modules in a plain list


class NoHead(EmptyBlocks):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8))
        del self.head


def narrowing() -> nn.Module:
    return EmptyBlocks(nn.Linear(8, 8), nn.Linear(8, 4))


def tuples() -> nn.Module:
    return EmptyBlocks(nn.LSTM(8, 8))


def dropout() -> nn.Module:
    return EmptyBlocks(nn.Linear(8, 8), nn.Dropout(0.1))


def running_statistics() -> nn.Module:
    return EmptyBlocks(nn.BatchNorm1d(16))


def unused() -> nn.Module:
    model = EmptyBlocks(nn.Linear(8, 8))
    model.spare = nn.Linear(8, 8)
    return model


def raising() -> nn.Module:
    raise RuntimeError("two\nlines")


class HalfInitialised(EmptyBlocks):
    """Its `init_module` forgets norms."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(8))

    def init_module(self, module: nn.Module) -> None:
        if not isinstance(module, nn.LayerNorm):
            module.reset_parameters()


class Greedy(EmptyBlocks):
    """Its `init_module` writes to other modules than the one that it is given."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8))

    def init_module(self, module: nn.Module) -> None:
        for m in (self.embed, self.head, self.blocks[0]):
            m.reset_parameters()


class Tired(nn.Module):
    """A block that fails once it is trained for real."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta" and torch.is_grad_enabled():
            raise RuntimeError("the block is tired")
        return self.scale(x)


def fails_when_trained(depth: int) -> nn.Module:
    model = Own(depth=depth, vocab=256)
    model.blocks[-1] = Tired()
    return model
