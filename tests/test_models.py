"""Models: starting weights that no layout changes, what a description says, and what is refused."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import parameter_kinds, reference, user_models
from zeropp_ray.config import ModelSection
from zeropp_ray.errors import ConfigError
from zeropp_ray.models import build_owned, cut_model, describe, resolve_factory
from zeropp_ray.models.llama import Llama, default_ffn_dim

LENGTH = 16
LLAMA = partial(Llama, layers=5, dim=32, heads=4, kv_heads=2, vocab_size=32)
SHARING = ("tied", "tied_to_the_head", "tied_in_blocks", "pieces_shared", "buffer_shared", "adapters", "frozen_tied")
ON_META = [
    LLAMA,
    user_models.own_model,
    *(partial(getattr(parameter_kinds, name), depth=5) for name in SHARING),
]
WHOLE = {
    user_models.Concrete: "Cannot copy out of meta tensor",
    user_models.NoReset: "mask (Module) has parameters or buffers of its own and no reset_parameters()",
    user_models.PlainTensor: "the model (PlainTensor) keeps a tensor that is neither a parameter nor a buffer",
    user_models.Recursive: "reset_parameters() of the model (Recursive) writes to other modules too",
    user_models.Forgetful: "reset_parameters() of the model (Forgetful) leaves its shift as it was",
}


def forward(model: Any, ids: torch.Tensor) -> torch.Tensor:
    h = model.embed(ids)
    for block in model.blocks:
        h = block(h)
    return model.head(h)


@pytest.mark.parametrize("factory", [*ON_META, *WHOLE])
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_starting_weights_do_not_depend_on_the_layout(factory: Any, chunks: int) -> None:
    description = describe(factory, LENGTH)
    assert bool(description.whole) == (factory in WHOLE)
    assert WHOLE.get(factory, "") in description.whole
    expected = dict(reference.build(factory, 7, whole=factory in WHOLE).named_parameters())
    ranges = cut_model(description, chunks)
    found = {}
    for owned in ([0], [chunks - 1], range(chunks), range(1, chunks, 2)):
        torch.manual_seed(len(found))  # the state of the global generator must not matter
        built = build_owned(factory, description, ranges, owned, seed=7)
        assert list(built.chunks) == sorted(owned)
        mine = dict(pair for chunk in built.chunks.values() for pair in chunk.parameters)
        parameters = dict(built.model.named_parameters())
        assert parameters.keys() == expected.keys()  # what is tied has stayed tied
        for name, parameter in parameters.items():
            assert parameter.device.type == ("cpu" if name in mine else "meta")
        for name, parameter in mine.items():
            assert parameter.requires_grad == expected[name].requires_grad
            assert parameter.detach().numpy().tobytes() == expected[name].detach().numpy().tobytes(), name
        found.update(mine)
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("factory", [*ON_META, *WHOLE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_in_a_row_are_the_model(factory: Any, dtype: torch.dtype) -> None:
    description = describe(factory, LENGTH)
    ranges = cut_model(description, 4)
    x = ids = torch.randint(0, 32, (3, LENGTH))
    for c in range(4):  # each chunk from a model of its own, as a stage has it
        x = build_owned(factory, description, ranges, [c], seed=3, dtype=dtype).chunks[c](x)
    assert x.dtype == dtype
    assert torch.equal(x, forward(reference.build(factory, 3, whole=factory in WHOLE).to(dtype), ids))


def test_the_seed_and_the_name_make_the_weights() -> None:
    description = describe(LLAMA, LENGTH)
    ranges = cut_model(description, 1)
    a, b = (dict(build_owned(LLAMA, description, ranges, [0], seed=s).chunks[0].parameters) for s in (1, 2))
    assert not torch.equal(a["blocks.0.attention.q.weight"], b["blocks.0.attention.q.weight"])
    assert not torch.equal(a["blocks.0.attention.q.weight"], a["blocks.1.attention.q.weight"])


def test_global_generators_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for factory in (LLAMA, user_models.NoReset):
        description = describe(factory, LENGTH)
        build_owned(factory, description, cut_model(description, 1), [0], seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_description_of_methods_and_bare_parameters() -> None:
    d = describe(user_models.own_model, LENGTH)
    assert d.embed.parameters == {"positions": (16, 24), "tokens.weight": (32, 24)}
    assert list(d.head.parameters) == ["temperature", "norm.weight", "norm.bias", "out.weight", "out.bias"]
    assert d.blocks[0].parameters["blocks.0.mix.weight"] == (4, 6, 6)
    assert (d.hidden, d.vocab, d.seq_len, len(d.blocks)) == (24, 32, LENGTH, 5)
    assert d.elements == sum(p.numel() for p in user_models.own_model().parameters())
    assert d.blocks[0].linear_flops == 0 < d.blocks[0].flops  # nothing that is deferred
    assert d.blocks[1].flops == d.blocks[1].linear_flops == 2 * LENGTH * 2 * 24 * 48
    assert pickle.loads(pickle.dumps(d)) == d


@pytest.mark.parametrize("kv_heads", [0, 1, 2])
def test_flops_of_llama_are_the_closed_formula(kv_heads: int) -> None:
    d, heads, s, vocab = 64, 4, 24, 48
    description = describe(partial(Llama, layers=2, dim=d, heads=heads, kv_heads=kv_heads, vocab_size=vocab), s)
    weights = 2 * d * d + 2 * d * (d // heads) * (kv_heads or heads) + 3 * d * default_ffn_dim(d)
    block = description.blocks[1]
    assert block.linear_flops == 2 * s * weights
    assert block.flops == 2 * s * weights + 4 * s * s * d  # scores and values, the masked half included
    assert block.cost == (block.flops, block.linear_flops + 2 * 4 * s * s * d, block.linear_flops)
    assert description.head.cost == (2 * s * d * vocab,) * 3
    assert description.embed.cost == (0, 0, 0)
    assert block.elements == weights + 2 * d


def test_llama_against_attention_written_out() -> None:
    torch.manual_seed(0)
    model = Llama(layers=1, dim=16, heads=4, kv_heads=2, vocab_size=8).double()
    attention, x = model.blocks[0].attention, torch.randn(2, 5, 16, dtype=torch.float64)
    q, k, v = (f(x).unflatten(-1, (-1, 4)) for f in (attention.q, attention.k, attention.v))
    turn = torch.polar(
        torch.ones(5, 2, dtype=torch.float64),
        torch.outer(torch.arange(5.0).double(), 10000.0 ** -torch.tensor([0.0, 0.5]).double()),
    )
    expected = torch.zeros(2, 5, 4, 4, dtype=torch.float64)
    for head in range(4):
        q_, k_ = (torch.complex(y[..., :2], y[..., 2:]) * turn for y in (q[:, :, head], k[:, :, head // 2]))
        scores = (q_ @ k_.mH).real / 2
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        expected[:, :, head] = scores.softmax(-1) @ v[:, :, head // 2]
    torch.testing.assert_close(attention(x), attention.o(expected.flatten(2)))


def test_llama_starts_at_the_entropy_of_the_vocabulary_and_forward_is_the_parts() -> None:
    model = reference.build(LLAMA, 0)
    ids = torch.randint(0, 32, (4, LENGTH))
    logits = model(ids)
    assert torch.equal(logits, forward(model, ids))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).item()
    assert loss == pytest.approx(torch.tensor(32.0).log().item(), rel=0.02)
    assert model.blocks[0].attention.o.weight.std().item() == pytest.approx(0.02 / 10**0.5, rel=0.1)
    assert not list(model.buffers())


def test_llama_trains_after_inference() -> None:
    model = Llama(layers=1, dim=8, heads=2)
    ids = torch.randint(0, 256, (1, 37))  # a length that no other test has put in the cache of rotary tables
    with torch.inference_mode():
        model(ids)
    model(ids).sum().backward()


def test_reference_learns_and_skips_a_step_without_tokens() -> None:
    ids = torch.arange(LENGTH).repeat(2, 1)
    nothing = torch.full_like(ids, reference.IGNORED)
    batch = [(ids, ids), (ids, nothing)]
    result = reference.train(LLAMA, [batch, [(ids, nothing)], *[batch] * 8])
    assert result.losses[1] != result.losses[1]
    assert result.losses[-1] < result.losses[0] - 0.5
    assert result.gradients.keys() == result.weights.keys()


REFUSED = {
    "none": "returns NoneType",
    "NoBlocks": "has no blocks",
    "EmptyBlocks": "has no blocks",
    "ListedBlocks": "not registered in the model",
    "NoHead": "has no head",
    "narrowing": "blocks.1 turns .* a block must keep shape and dtype",
    "tuples": "blocks.0 returns tuple",
    "dropout": "blocks.1 draws random numbers.*set dropout to 0",
    "running_statistics": "blocks.0 changes its buffer",
    "unused": "no part uses spare.weight",
    "raising": "RuntimeError: two lines; check model.args",
    "HalfInitialised": "init_module, called with blocks.0 .LayerNorm., leaves its weight as it was",
    "Greedy": "init_module, called with embed .Embedding., writes to other modules too",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_run_is_refused(name: str) -> None:
    factory = resolve_factory(ModelSection(factory=f"tests.user_models:{name}"))
    with pytest.raises(ConfigError, match=f"^model.factory.*{REFUSED[name]}") as caught:
        describe(factory, LENGTH)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nowhere:build", "there is no module nowhere"),
        ("tests.nowhere.build", "there is no module tests.nowhere"),
        ("tests.user_models:nothing", "user_models.py has no nothing"),
        ("tests.user_models:not_callable", "not_callable is a int"),
        ("broken_model:build", "importing broken_model failed, ZeroDivisionError"),
        ("needy_model:build", "importing needy_model failed, ModuleNotFoundError: No module named 'not_installed'"),
    ],
)
def test_a_factory_that_cannot_be_found_is_refused(
    path: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_model.py").write_text("1 / 0")
    (tmp_path / "needy_model.py").write_text("import not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        resolve_factory(ModelSection(factory=path))
    message = str(caught.value)
    assert message.startswith(f"model.factory = '{path}': ")
    assert text in message
    assert "\n" not in message


def test_a_factory_of_the_current_folder_gets_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model_in_cwd.py").write_text(
        "from tests.user_models import Own\ndef build(**args): return Own(**args)"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
    for path in ("model_in_cwd:build", "model_in_cwd.build"):
        model = resolve_factory(ModelSection(factory=path, args={"width": 16, "depth": 3}))()
        assert (len(model.blocks), model.out.in_features) == (3, 16)
    with pytest.raises(ConfigError, match=r"unexpected keyword.*check model.args"):
        describe(resolve_factory(ModelSection(factory="model_in_cwd:build", args={"widht": 16})), LENGTH)


def test_the_family_takes_its_fields() -> None:
    section = ModelSection(layers=3, dim=64, heads=4, kv_heads=2, ffn_dim=96, vocab_size=100)
    model = resolve_factory(section)()
    assert (len(model.blocks), model.embed.weight.shape) == (3, (100, 64))
    assert model.blocks[0].ffn.up.weight.shape == (96, 64)
    assert model.blocks[0].attention.k.weight.shape == (32, 64)
