"""The example: decoder layers of `transformers`, unmodified, train under the pipeline as they do in a plain loop."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests import harness, reference
from tests.test_parity import TOLERANCE, assert_equal, plain, samples_of
from zeropp_ray.config import RunConfig, load_config
from zeropp_ray.models import describe, resolve_factory

transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra dev")


def configuration(kind: str, **parallel: int) -> RunConfig:
    sizes = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "vocab": 32, "positions": 16}
    return RunConfig.from_dict(
        {
            "model": {"factory": "examples.hf_layers:Model", "seq_len": 16, "args": {"kind": kind, **sizes}},
            "parallel": {"stages": 2, "chunks": 2, "shards": 1, "microbatches": 4, "microbatch_size": 2, **parallel},
            "train": {"steps": 4, "lr": 1e-2, "warmup_steps": 2},
        }
    )


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("qwen2", {}),
        pytest.param("gpt2", {}, marks=pytest.mark.full),
        pytest.param("llama", {"shards": 2}, marks=pytest.mark.full),
    ],
)
def test_layers_of_transformers_train_as_in_a_plain_loop(kind: str, parallel: dict[str, int]) -> None:
    config = configuration(kind, **parallel)
    samples = samples_of(config)
    ours = harness.train(config, samples)
    assert_equal(ours, plain(config, samples), TOLERANCE["float32"])
    assert ours.losses[-1] < ours.losses[0]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_layers_of_transformers_need_not_be_built_whole(kind: str) -> None:
    description = describe(resolve_factory(configuration(kind).model), 16)
    assert not description.whole
    assert (description.blocks[0].linear_flops > 0) == (kind != "gpt2"), "GPT-2's Conv1D is no Linear"


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_example_computes_what_transformers_does(kind: str) -> None:
    """The same weights in their own model give the same logits: the thin block feeds the layers what they expect."""
    model = reference.build(resolve_factory(configuration(kind).model), 0)
    config = model.blocks[0].rotary.config
    config.vocab_size, config.tie_word_embeddings = 32, False
    theirs = {"llama": transformers.LlamaForCausalLM, "qwen2": transformers.Qwen2ForCausalLM}[kind](config).eval()
    places = {"tokens": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    state = {}
    for name, parameter in model.named_parameters():
        head, _, rest = name.partition(".")
        inside = f"model.layers.{rest.replace('.layer.', '.', 1)}"
        state[f"{places[head]}.{rest}" if head in places else inside] = parameter.detach()
    assert not theirs.load_state_dict(state, strict=False).unexpected_keys
    ids = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
    h = model.embed(ids)
    for block in model.blocks:
        h = block(h)
    torch.testing.assert_close(model.head(h), theirs(ids).logits, rtol=1e-5, atol=1e-6)


def test_the_example_is_one_that_can_run() -> None:
    model = load_config("examples/hf_layers.toml").model  # type: ignore[arg-type]
    assert describe(partial(resolve_factory(model)), model.seq_len).hidden == model.args["width"]
