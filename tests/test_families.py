"""The built-in families and the published sizes: what they are, and that any layout trains them as one process does."""

from __future__ import annotations

import pytest
import torch

from tests import harness, reference
from tests.test_parity import TOLERANCE, assert_equal, plain, samples_of
from zeropp_ray.config import ModelSection, RunConfig, load_config
from zeropp_ray.errors import ConfigError
from zeropp_ray.models import describe, resolve_factory
from zeropp_ray.presets import FAMILIES, PARAMETERS, PRESETS

# --- presets


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = resolve_factory(ModelSection(preset=name))()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_every_preset_is_of_a_known_family_and_has_a_context() -> None:
    assert PRESETS.keys() == PARAMETERS.keys()
    for preset in PRESETS.values():
        assert preset["family"] in FAMILIES
        assert preset["context"] >= 1024


def test_a_preset_gives_what_the_configuration_leaves_out() -> None:
    model = load_config(None, ["model.preset=gpt2", "model.layers=6", "model.seq_len=64"]).model
    assert (model.family, model.layers, model.dim, model.context, model.seq_len) == ("gpt2", 6, 768, 1024, 64)
    assert model.tie_embeddings
    assert model.label == "gpt2 with layers 6"
    assert ModelSection(preset="gpt2").label == "gpt2"
    assert (ModelSection().label, ModelSection(factory="a:b").label) == ("llama", "a:b")


def test_what_was_given_stays_given() -> None:
    """Through a file, a replacement and a copy, also where it is the default of the field."""
    import copy
    import dataclasses
    import pickle

    config = load_config(None, ["model.preset=llama3-8b", "model.layers=4", "model.dim=128"])
    assert (config.model.layers, config.model.dim, config.model.heads) == (4, 128, 32)
    assert RunConfig.from_dict(config.to_dict()) == config
    for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert again == config
        assert vars(again.model).keys() == {field.name for field in dataclasses.fields(ModelSection)}


def test_a_family_brings_its_defaults() -> None:
    gpt2 = ModelSection(family="gpt2", dim=96)
    assert gpt2.tie_embeddings
    assert not ModelSection(family="gpt2", tie_embeddings=False).tie_embeddings
    assert not ModelSection().tie_embeddings
    resolved = gpt2.resolved()
    assert (resolved.ffn_dim, resolved.kv_heads, resolved.head_dim, resolved.context) == (384, 4, 24, 128)
    assert ModelSection(dim=96).resolved().ffn_dim == 256


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "gpt3"}, r"model\.preset = 'gpt3': unknown; did you mean gpt2\?"),
        ({"preset": 7}, r"model\.preset = 7: expected text"),
        ({"preset": "gpt2", "factory": "a:b"}, r"model\.preset = 'gpt2': a model of your own brings its sizes"),
        ({"init_from": "x", "factory": "a:b"}, r"model\.init_from = 'x': a model of your own"),
        ({"family": "gpt"}, r"model\.family = 'gpt': unknown; did you mean gpt2\?"),
        ({"family": "gpt2", "heads": 3}, r"model\.heads = 3: must cut model\.dim = 128 into equal parts; use 2"),
        ({"family": "gpt2", "kv_heads": 2}, r"model\.kv_heads = 2: gpt2 has no choice here; use 4"),
        ({"family": "gpt2", "head_dim": 16}, r"model\.head_dim = 16: gpt2 has no choice here; use 32"),
        ({"family": "gpt2", "rope_factor": 8.0}, r"model\.rope_factor = 8\.0: gpt2 has no choice here; use 1"),
        ({"head_dim": 15}, r"model\.head_dim = 15: rotary positions need an even width; use 16"),
        ({"rope_factor": 0.5}, r"model\.rope_factor = 0\.5: must be at least 1"),
        (
            {"preset": "gpt2", "seq_len": 2048},
            r"model\.context = 1024: must hold model\.seq_len = 2048; lower that one",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        ModelSection(**settings)


# --- GPT-2, and tied embeddings


def test_gpt2_starts_at_the_entropy_of_the_vocabulary_and_trains_every_position() -> None:
    factory = resolve_factory(ModelSection(family="gpt2", layers=2, dim=32, vocab_size=32, context=16, seq_len=16))
    model, ids = factory(), torch.randint(0, 32, (4, 16))
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), torch.randint(0, 32, (64,)))
    assert loss.item() == pytest.approx(torch.tensor(32.0).log().item(), rel=0.05)
    loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert (model.embed.positions.weight.grad.abs().sum(1) > 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_has_no_weights_of_its_own(family: str) -> None:
    section = ModelSection(family=family, layers=2, dim=32, vocab_size=64, tie_embeddings=True, seq_len=16)
    tied, untied = (resolve_factory(s)() for s in (section, ModelSection(**{**vars(section), "tie_embeddings": False})))
    assert len(dict(untied.named_parameters())) == len(dict(tied.named_parameters())) + 1
    description = describe(resolve_factory(section), 16)
    assert description.elements == sum(parameter.numel() for parameter in tied.parameters())
    name = "embed.weight" if family == "llama" else "embed.tokens.weight"
    assert name in description.embed.parameters
    assert name in description.head.parameters


def configuration(family: str, tied: bool, *layout: int) -> RunConfig:
    sizes = {"layers": 4, "dim": 32, "heads": 4, "vocab_size": 32, "seq_len": 16}
    names = ("stages", "chunks", "shards", "microbatches")
    return RunConfig.from_dict(
        {
            "model": {"family": family, "tie_embeddings": tied, **sizes},
            "parallel": {**dict(zip(names, layout, strict=True)), "microbatch_size": 2},
            "train": {"steps": 6, "lr": 1e-2, "warmup_steps": 2},
        }
    )


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(configuration("gpt2", True, 2, 2, 2, 4), id="gpt2"),
        pytest.param(configuration("gpt2", False, 2, 1, 1, 4), id="gpt2-untied", marks=pytest.mark.full),
        pytest.param(configuration("llama", True, 2, 2, 1, 4), id="llama-tied", marks=pytest.mark.full),
        pytest.param(configuration("gpt2", True, 4, 1, 1, 4), id="gpt2-4111", marks=pytest.mark.full),
    ],
)
def test_any_layout_trains_a_family_as_one_process_does(config: RunConfig) -> None:
    samples = samples_of(config)
    ours = harness.train(config, samples)
    assert_equal(ours, plain(config, samples), TOLERANCE["float32"])
    assert ours.losses[-1] < ours.losses[0]


def test_the_reference_ties_what_the_model_ties() -> None:
    factory = resolve_factory(ModelSection(family="gpt2", layers=1, dim=32, vocab_size=32, seq_len=16))
    model = reference.build(factory, 0)
    assert model.head.output.weight is model.embed.tokens.weight


def test_the_documentation_lists_every_preset_with_its_sizes() -> None:
    from pathlib import Path

    text = (Path(__file__).parent.parent / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    assert [row[0].strip("`") for row in rows] == list(PRESETS)
    for name, parameters, sizes, heads, context in rows:
        model = ModelSection(preset=name.strip("`"))
        kv_heads = f", {model.kv_heads}" if model.kv_heads not in (0, model.heads) else ""
        assert parameters == f"{PARAMETERS[model.preset]:,}"
        assert sizes == f"{model.layers} × {model.dim}"
        assert heads == f"{model.heads}{kv_heads}"
        assert context == str(model.context)
