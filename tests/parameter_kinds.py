"""Models with parameters of every kind, as a user would bring them: nothing here knows of the project.

Each is a factory of one name. `width` 24, `vocab` 32, any `depth` of at least 2.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH, VOCAB, LENGTH = 24, 32, 16


class Mlp(nn.Module):
    """The block that most of them are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head; each block made by a call."""

    def __init__(self, depth: int, block: Callable[[], nn.Module] = Mlp) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCAB)


# Shared by parts.


def tied(depth: int) -> nn.Module:
    model = Net(depth)
    model.head.weight = model.embed.weight  # the head's bias stays its own
    return model


def tied_to_the_head(depth: int) -> nn.Module:
    model = Net(depth)
    model.embed.weight = model.head.weight
    return model


class tied_by_hand(Net):
    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.norm = nn.LayerNorm(WIDTH)
        del self.head

    def head(self, h: Tensor) -> Tensor:
        return functional.linear(self.norm(h), self.embed.weight)


class tied_thrice(tied_by_hand):
    """Every other block looks at the embedding too, and the head scales it and uses it a second time as it is."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        for block in self.blocks[::2]:
            block.look = Look(self.embed)

    def head(self, h: Tensor) -> Tensor:
        return functional.linear(self.norm(h), 0.5 * self.embed.weight) + h @ self.embed.weight.t().detach()


class Look(nn.Module):
    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x.argmax(-1)) + (x @ self.embed.weight.t()).softmax(-1) @ self.embed.weight


def _look_too(block: nn.Module, args: Any, y: Tensor) -> Tensor:
    return y + block.look(y) if hasattr(block, "look") else y


class tied_in_blocks(tied_thrice):
    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        for block in self.blocks:
            block.register_forward_hook(_look_too)


def one_block(depth: int) -> nn.Module:
    """One block at every place."""
    block = Mlp()
    return Net(depth, lambda: block)


def two_blocks_in_turn(depth: int) -> nn.Module:
    blocks = [Mlp(), Mlp()]
    return Net(depth, lambda: blocks.append(blocks.pop(0)) or blocks[-1])


def pieces_shared(depth: int) -> nn.Module:
    """All blocks share a norm and a Linear; the first and the last a bias as well."""
    model = Net(depth)
    for block in model.blocks[1:]:
        block.norm, block.up = model.blocks[0].norm, model.blocks[0].up
    model.blocks[-1].down.bias = model.blocks[0].down.bias
    return model


class Table(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(LENGTH, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.linspace(0.5, 1.5, LENGTH)[:, None])


def buffer_shared(depth: int) -> nn.Module:
    """All blocks hold the same module with a table, as with rotary positions."""
    table = Table()

    class Scaled(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.positions = table

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.positions.table)

    return Net(depth, Scaled)


# Frozen.


class Initialised(Net):
    """Says how its modules start, frozen ones too."""

    def init_module(self, module: nn.Module) -> None:
        module.reset_parameters()


def frozen_embedding(depth: int) -> nn.Module:
    model = Initialised(depth)
    model.embed.requires_grad_(False)
    return model


def frozen_tied(depth: int) -> nn.Module:
    model = frozen_embedding(depth)
    model.head.weight = model.embed.weight
    return model


def frozen_beginning(depth: int) -> nn.Module:
    """The embedding and all blocks but the last: whole chunks without a gradient."""
    model = frozen_embedding(depth)
    model.blocks[:-1].requires_grad_(False)
    return model


def frozen_end(depth: int) -> nn.Module:
    """All but the embedding: its gradient comes through frozen blocks and the frozen head."""
    model = Initialised(depth)
    model.blocks.requires_grad_(False)
    model.head.requires_grad_(False)
    return model


def frozen_matrices(depth: int) -> nn.Module:
    """Biases and norms alone are trained."""
    model = Initialised(depth)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim < 2)
    return model


def frozen_positions(depth: int) -> nn.Module:
    """A frozen table that only the constructor knows: such a model is built whole."""

    class Positions(Net):
        def __init__(self) -> None:
            super().__init__(depth)
            steps = torch.arange(LENGTH)[:, None] / 10.0 ** torch.linspace(0, 2, WIDTH)
            self.positions = nn.Embedding.from_pretrained(steps.sin(), freeze=True)
            self.tokens = nn.Embedding(VOCAB, WIDTH)
            del self.embed

        def embed(self, ids: Tensor) -> Tensor:
            return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))

    return Positions()


class Adapter(nn.Module):
    """A frozen Linear and the product of two thin ones that are trained (Hu et al., LoRA, 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapters(depth: int) -> nn.Module:
    model = Initialised(depth).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapter(block.up), Adapter(block.down)
    return model


def adapters_tied(depth: int) -> nn.Module:
    """The embedding is trained as well, and is the head's."""
    model = adapters(depth)
    model.head.weight = model.embed.requires_grad_(True).weight
    return model


# Linears and weights of every kind.


class Doubled(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * functional.linear(x, self.weight.tanh(), self.bias)


def _with_up(change: Callable[[nn.Linear], nn.Module]) -> Callable[[int], nn.Module]:
    """A model whose blocks have another layer in the place of `up`."""

    def block() -> nn.Module:
        mlp = Mlp()
        mlp.up = change(mlp.up)
        return mlp

    return lambda depth: Net(depth, block)


def _old_weight_norm(linear: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return weight_norm(linear)


def _replaced(linear: nn.Linear) -> nn.Module:
    linear.forward = lambda x: functional.linear(x, linear.weight) * 3 + linear.bias
    return linear


def _hooked(linear: nn.Linear) -> nn.Module:
    linear.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    linear.register_forward_hook(lambda module, args, y: y + 0.1 * y.square())
    linear.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 0.9,))
    return linear


def _masked(linear: nn.Linear) -> nn.Module:
    linear.weight.register_hook(lambda gradient: gradient * (torch.arange(WIDTH, device=gradient.device) % 3))
    return linear


def _accumulating(linear: nn.Linear) -> nn.Module:
    linear.weight.register_post_accumulate_grad_hook(lambda weight: None)
    return linear


overridden = _with_up(lambda linear: Doubled(WIDTH, 2 * WIDTH))
parametrized = _with_up(parametrizations.weight_norm)
old_weight_norm = _with_up(_old_weight_norm)
replaced_forward = _with_up(_replaced)
hooked = _with_up(_hooked)
masked = _with_up(_masked)
bilinear = _with_up(lambda linear: Square())


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Bilinear(WIDTH, WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.pairs(x, x.flip(-1))


class Twice(Mlp):
    """Each Linear is called twice, used by hand, and used transposed."""

    def forward(self, x: Tensor) -> Tensor:
        y = functional.gelu(self.up(self.norm(x)) + self.up(x))
        y = self.down(y) + functional.linear(y, self.down.weight) + x @ self.up.weight.t() @ self.up.weight
        return x + self.down(y @ self.down.weight)


class ByHand(Mlp):
    """Its Linears are never called."""

    def forward(self, x: Tensor) -> Tensor:
        y = functional.gelu(torch.addmm(self.up.bias, self.norm(x).flatten(0, 1), self.up.weight.t()))
        return x + torch.einsum("ni,oi->no", y, self.down.weight).view_as(x) + self.down.bias


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        return x + self.up(self.attention(y, y, y, attn_mask=mask)[0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x)[0]


class Turned(Mlp):
    """Gives a tensor that is not contiguous, and its Linears take such ones, and of fewer dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x).transpose(0, 1)).transpose(0, 1)
        y = self.down(functional.gelu(y.flatten(0, 1))).view_as(x) + self.down(y[0, 0].tanh())
        return (x.mT.contiguous() + y.mT).mT


class InPlace(Mlp):
    """Works on its input in place."""

    def forward(self, h: Tensor) -> Tensor:
        h *= 0.9
        h += self.down.bias
        return h + self.down(functional.gelu(self.up(self.norm(h))))


class Saved(Mlp):
    """Ends in what autograd saves."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


def twice(depth: int) -> nn.Module:
    return Net(depth, Twice)


def by_hand(depth: int) -> nn.Module:
    return Net(depth, ByHand)


def attention(depth: int) -> nn.Module:
    return Net(depth, Attention)


def encoder_layer(depth: int) -> nn.Module:
    return Net(depth, lambda: nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True))


def encoder_layer_in_eval_mode(depth: int) -> nn.Module:
    """Which torch runs by another kernel where no gradient is wanted."""
    return encoder_layer(depth).eval()


def in_bf16_alone(depth: int) -> nn.Module:
    """Hands on bf16 whatever its weights are in, so that it cannot be tried in fp32."""
    model = Net(depth)
    model.embed = nn.Sequential(model.embed, Narrow())
    return model


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


def recurrent(depth: int) -> nn.Module:
    return Net(depth, Recurrent)


def turned(depth: int) -> nn.Module:
    return Net(depth, Turned)


def in_place(depth: int) -> nn.Module:
    return Net(depth, InPlace)


def saved(depth: int) -> nn.Module:
    return Net(depth, Saved)


class Overwritten(Mlp):
    """Works in place on what a Linear with a bias gave."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        y += 1
        return x + self.down(y.relu_())


def overwritten(depth: int) -> nn.Module:
    return Net(depth, Overwritten)


class Projected(Mlp):
    """A Linear of a table and of a part of it: what it multiplies is a parameter, which is released before W."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        table = self.positions.weight
        first = functional.pad(self.up(table[:3]), (0, 0, 0, LENGTH - 3))
        return super().forward(x) + self.down(self.up(table) + first)


def projected(depth: int) -> nn.Module:
    return Net(depth, Projected)


class Cast(Mlp):
    """Autocast inside a block."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.down(self.up(self.norm(x)))
        return x + y.to(x.dtype)


def cast(depth: int) -> nn.Module:
    return Net(depth, Cast)


def no_parameters(depth: int) -> nn.Module:
    """Every other block has none."""
    model = Net(depth)
    for i in range(0, depth, 2):
        model.blocks[i] = nn.Tanh()
    return model


def padding(depth: int) -> nn.Module:
    """The embedding has a row that is not trained; the head shares it, and trains it."""
    model = Net(depth)
    model.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=3, scale_grad_by_freq=False)
    model.head.weight = model.embed.weight
    return model


def by_frequency(depth: int) -> nn.Module:
    model = Net(depth)
    model.embed = nn.Embedding(VOCAB, WIDTH, scale_grad_by_freq=True)
    return model


class Checkpointed(Mlp):
    """Runs its forward again in the backward, by its own means."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def checkpointed(depth: int) -> nn.Module:
    return Net(depth, Checkpointed)


# Refused.


class Reentrant(Checkpointed):
    reentrant = True


def reentrant(depth: int) -> nn.Module:
    return Net(depth, Reentrant)


def reentrant_from_the_start(depth: int) -> nn.Module:
    """The first block gets what needs no gradient, so that nothing of it is in the graph."""
    model = Initialised(depth)
    model.blocks = nn.ModuleList(Reentrant() for _ in range(depth))
    model.embed.requires_grad_(False)
    return model


def renormed(depth: int) -> nn.Module:
    model = Net(depth)
    model.embed = nn.Embedding(VOCAB, WIDTH, max_norm=1.0)
    return model


accumulating = _with_up(_accumulating)
spectral = _with_up(parametrizations.spectral_norm)
lazy = _with_up(lambda linear: nn.LazyLinear(2 * WIDTH))


def two_in_one_memory(depth: int) -> nn.Module:
    model = Net(depth)
    model.head.weight = nn.Parameter(model.embed.weight)
    return model


def whole_numbers(depth: int) -> nn.Module:
    model = Net(depth)
    model.table = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    return model


def all_frozen(depth: int) -> nn.Module:
    return Initialised(depth).requires_grad_(False)


class carried_over(Net):
    """The head uses what the embedding made, beside h."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        del self.embed, self.head
        self.tokens, self.out = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def embed(self, ids: Tensor) -> Tensor:
        self.scale = self.tokens.weight.mean()
        return self.tokens(ids)

    def head(self, h: Tensor) -> Tensor:
        return self.out(h) * self.scale
