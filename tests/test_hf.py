"""Hugging Face folders: equal logits against `transformers` in both directions, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from jobs.cli import zeropp
from tests import harness, reference
from zeropp_ray.config import ModelSection, RunConfig, load_config
from zeropp_ray.errors import ConfigError
from zeropp_ray.models import resolve_factory
from zeropp_ray.models.hf import export_model, foreign_tokenizer, initial_weights, read_sizes, weights_of
from zeropp_ray.models.hf.export import byte_tokenizer
from zeropp_ray.vote import decide

transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra dev")
transformers.utils.logging.disable_progress_bar()

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
THEIRS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "llama-wide-heads": LLAMA | {"head_dim": 12, "num_key_value_heads": 4},
    "llama-3.1": LLAMA | {"rope_parameters": LLAMA3, "head_dim": 16},
    "gpt2": GPT2,
    "gpt2-untied": GPT2 | {"tie_word_embeddings": False, "n_inner": 80, "layer_norm_epsilon": 1e-3},
}
OURS = {
    "llama": ModelSection(layers=3, dim=32, heads=4, kv_heads=2, vocab_size=96, seq_len=64),
    "llama-3.1": ModelSection(
        layers=2, dim=32, heads=2, head_dim=16, vocab_size=96, rope_theta=5e5, rope_factor=32.0, tie_embeddings=True
    ),
    "gpt2": ModelSection(family="gpt2", layers=3, dim=32, heads=4, vocab_size=96, context=150, norm_eps=1e-3),
    "gpt2-untied": ModelSection(
        family="gpt2", layers=2, dim=32, heads=4, ffn_dim=48, vocab_size=96, tie_embeddings=False
    ),
}  # fmt: skip
IDS = torch.randint(96, (2, 100), generator=torch.Generator().manual_seed(0))


def their_model(name: str, seed: int = 0) -> Any:
    kind = "GPT2" if name.startswith("gpt2") else "Llama"
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**THEIRS[name])
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else "LlamaForCausalLM")(config).eval()
    with torch.no_grad():  # biases start at 0 and norms at 1: a wrong place would not show
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def saved(folder: Path, name: str = "llama", **options: Any) -> Path:
    their_model(name).save_pretrained(folder, **options)
    return folder


def our_model(section: ModelSection, weights: Any) -> torch.nn.Module:
    model = resolve_factory(section)()
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(weights[key])
    return model.eval()


def random_weights(section: ModelSection) -> dict[str, torch.Tensor]:
    model = reference.build(resolve_factory(section), 3)
    return {name: p.detach() + torch.randn_like(p) * 0.05 for name, p in model.named_parameters()}


@torch.no_grad()
def assert_equal_logits(ours: torch.nn.Module, theirs: Any) -> None:
    a, b = ours(IDS), theirs(IDS).logits
    assert b.std() > 0.1
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# --- theirs to ours


@pytest.mark.parametrize("name", THEIRS)
def test_a_published_model_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    config = load_config(None, [f"model.init_from={saved(tmp_path, name)}", "parallel.chunks=1"])
    weights = initial_weights(config)
    assert weights is not None
    assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in weights.values())
    assert_equal_logits(our_model(config.model, weights), their_model(name))


def test_without_a_folder_there_is_nothing_to_start_from() -> None:
    assert initial_weights(RunConfig()) is None


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_files_in_many_shards_and_in_half_precision(name: str, tmp_path: Path) -> None:
    their_model(name).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    section = ModelSection(**read_sizes(tmp_path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_equal_logits(our_model(section, weights_of(tmp_path, section)), theirs)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_files_without_a_prefix_and_with_constants(name: str, tmp_path: Path) -> None:
    """As the first GPT-2 on the hub has them: no `transformer.`, masks beside the weights, and a head that is tied."""
    file = saved(tmp_path, name) / "model.safetensors"
    prefix = "transformer." if name == "gpt2" else "model."
    tensors = {key.removeprefix(prefix): tensor for key, tensor in load_file(file).items()}
    constants = (
        ["h.0.attn.bias", "h.1.attn.masked_bias"] if name == "gpt2" else ["layers.0.self_attn.rotary_emb.inv_freq"]
    )
    tensors |= {key: torch.zeros(1) for key in constants}
    tensors["lm_head.weight"] = tensors["wte.weight" if name == "gpt2" else "embed_tokens.weight"].clone()
    save_file(tensors, file)
    section = ModelSection(**read_sizes(tmp_path))
    assert_equal_logits(our_model(section, weights_of(tmp_path, section)), their_model(name))


def test_a_config_of_transformers_4(tmp_path: Path) -> None:
    config = json.loads((saved(tmp_path, "llama-3.1") / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    for kind in ("rope_type", "type"):
        config["rope_scaling"] = {kind if key == "rope_type" else key: value for key, value in rope.items()}
        (tmp_path / "config.json").write_text(json.dumps(config))
        sizes = read_sizes(tmp_path)
        assert (sizes["rope_theta"], sizes["rope_factor"]) == (500000.0, 8.0)
    config["rope_scaling"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_sizes(tmp_path)["rope_factor"] == 1.0


def test_dropout_of_a_published_model_is_left_out(tmp_path: Path) -> None:
    assert json.loads((saved(tmp_path, "gpt2") / "config.json").read_text())["resid_pdrop"] > 0
    read_sizes(tmp_path)


def test_a_tokenizer_that_did_not_make_the_text_is_noticed(tmp_path: Path) -> None:
    assert not foreign_tokenizer(tmp_path, "bytes"), "a folder without one does not say"
    file = tmp_path / "tokenizer.json"
    file.write_text(byte_tokenizer())
    assert not foreign_tokenizer(tmp_path, "bytes")
    assert foreign_tokenizer(tmp_path, "0" * 64)
    assert not foreign_tokenizer(tmp_path, hashlib.sha256(file.read_bytes()).hexdigest())
    file.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    assert foreign_tokenizer(tmp_path, "bytes")


# --- sizes


def test_sizes_come_from_the_folder_unless_the_configuration_has_them(tmp_path: Path) -> None:
    saved(tmp_path / "a", "llama-3.1")
    override = f"model.init_from={tmp_path / 'a'}"
    model = load_config(None, [override, "parallel.chunks=1", "model.seq_len=32"]).model
    assert (model.layers, model.kv_heads, model.context, model.seq_len, model.rope_factor) == (2, 2, 128, 32, 8.0)
    assert load_config(None, [override, "parallel.chunks=1", "model.layers=2"]).model.layers == 2
    assert ModelSection(**vars(model)) == model
    with pytest.raises(ConfigError, match=r"tie_embeddings False there, True here; layers 2 there, 3 here; leave") as e:
        load_config(None, [override, "model.layers=3", "model.tie_embeddings=true", "parallel.chunks=1"])
    assert "\n" not in str(e.value)
    with pytest.raises(ConfigError, match=r"dim 32 there, 2048 here"):
        load_config(None, [override, "model.preset=llama3.2-1b", "parallel.chunks=1"])


def changed(key: str, value: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return change


def without(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def tensors(change: Any) -> Any:
    def write(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return write


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index(content: str) -> Any:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(content)


REFUSED = {
    "architecture": (changed("model_type", "mamba"), "model_type is 'mamba'; llama and gpt2"),
    "biases": (changed("attention_bias", True), "attention_bias is True; only False"),
    "activation": (changed("hidden_act", "gelu"), "hidden_act is 'gelu'"),
    "yarn": (changed("rope_parameters", {"rope_type": "yarn", "factor": 4.0}), "rope scaling with rope_type yarn"),
    "other stretch": (changed("rope_parameters", LLAMA3 | {"high_freq_factor": 8.0}), "high_freq_factor 8.0"),
    "quantized": (changed("quantization_config", {"bits": 4}), "quantized"),
    "no size": (changed("hidden_size", None), "no number for hidden_size"),
    "no config": (without("config.json"), "holds no config.json"),
    "no json": (lambda folder: (folder / "config.json").write_text("{"), "is no JSON"),
    "no weights": (without("model.safetensors"), "no weights: expected model.safetensors"),
    "pickle": (pickled, "pytorch_model.bin is not loaded, because a pickle can run code"),
    "truncated": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 50), "cannot be read"),
    "other sizes": (changed("intermediate_size", 64), r"mlp.gate_proj.weight is \[48, 32\] instead of \[64, 32\]"),
    "more layers": (changed("num_hidden_layers", 3), "layers.2.self_attn.q_proj.weight is missing"),
    "fewer layers": (changed("num_hidden_layers", 1), "layers.1.* belongs to no parameter.*and 1 more"),
    "extra": (tensors(lambda t: t.update(extra=torch.zeros(1))), "model.extra belongs to no parameter"),
    "broken index": (index("[]"), "model.safetensors.index.json cannot be used"),
    "index that leads out": (index('{"weight_map": {"a": "../a"}}'), "names '../a', which is not in the folder"),
    "index without its file": (index('{"weight_map": {"lm_head.weight": "gone"}}'), "gone cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_cannot_be_started_from_is_refused(name: str, tmp_path: Path) -> None:
    break_it, message = REFUSED[name]
    break_it(saved(tmp_path))
    with pytest.raises(ConfigError, match=message) as caught:
        initial_weights(load_config(None, [f"model.init_from={tmp_path}", "parallel.stages=1", "parallel.chunks=1"]))
    assert str(caught.value).startswith(f"model.init_from = '{tmp_path}': ")
    assert "\n" not in str(caught.value)


def test_weights_of_other_sizes_name_what_differs(tmp_path: Path) -> None:
    section = ModelSection(**read_sizes(saved(tmp_path)) | {"vocab_size": 100})
    with pytest.raises(ConfigError, match=r"embed_tokens.weight is \[96, 32\] instead of \[100, 32\]; lm_head"):
        weights_of(tmp_path, section)


# --- ours to theirs


@pytest.mark.parametrize("name", OURS)
def test_an_exported_model_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    section, weights = OURS[name], random_weights(OURS[name])
    export_model(weights.__getitem__, section, tmp_path / "out")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert_equal_logits(our_model(section, weights), theirs)
    back = ModelSection(**read_sizes(tmp_path / "out"), seq_len=section.seq_len)
    assert back.resolved() == section.resolved()
    again = weights_of(tmp_path / "out", back)
    assert all(torch.equal(again[key], tensor) for key, tensor in weights.items())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_export_in_shards_has_an_index(name: str, tmp_path: Path) -> None:
    section, weights = OURS[name], random_weights(OURS[name])
    files = export_model(weights.__getitem__, section, tmp_path / "out", max_shard_bytes=30_000)
    shards = [file for file in files if file.suffix == ".safetensors"]
    assert len(shards) > 2
    assert all(file.stat().st_size < 30_000 + 4096 for file in shards)
    listed = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert listed["metadata"]["total_size"] == 4 * sum(tensor.numel() for tensor in weights.values())
    for file in shards:
        with safe_open(file, "pt") as opened:
            assert {listed["weight_map"].pop(key) for key in opened.keys()} == {file.name}  # noqa: SIM118
    assert not listed["weight_map"]
    assert_equal_logits(
        our_model(section, weights), transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    )


def test_export_in_half_precision(tmp_path: Path) -> None:
    section, weights = OURS["llama"], random_weights(OURS["llama"])
    export_model(weights.__getitem__, section, tmp_path / "out", dtype="bfloat16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
    assert_equal_logits(our_model(section, rounded), theirs.float())


def test_export_brings_the_tokenizer_and_the_end_token(tmp_path: Path) -> None:
    section = OURS["gpt2"]
    export_model(random_weights(section).__getitem__, section, tmp_path / "out", end=0, tokenizer=byte_tokenizer())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Bytes: é, 语 and\n\t\x00\x7f­ too"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == 0


def test_export_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    weights = random_weights(OURS["llama"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(ConfigError, match="there is something already"):
        export_model(weights.__getitem__, OURS["llama"], tmp_path / "full")
    with pytest.raises(ConfigError, match=r"model\.factory = 'a:b'.*only the families llama and gpt2"):
        export_model(weights.__getitem__, ModelSection(factory="a:b"), tmp_path / "own")
    with pytest.raises(KeyError):
        export_model({}.__getitem__, OURS["llama"], tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


# --- training from there


def test_training_starts_from_the_folder_in_any_layout(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    parallel = {"stages": 2, "chunks": 1, "shards": 2, "microbatches": 2, "microbatch_size": 2}
    settings = [f"parallel.{name}={value}" for name, value in parallel.items()]
    config = load_config(None, [f"model.init_from={tmp_path}", "model.seq_len=16", "train.steps=1", *settings])
    samples = harness.Samples(vocab=96, seq_len=16, per_step=config.parallel.global_batch)
    with harness.members(config, samples) as run:
        run.call("start_from_the_folder")
        weights = run.whole("weights")
        loss = decide(1, run.call("advance", 1, None), 1.0).loss
    expected = initial_weights(config)
    assert expected is not None
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor.flatten()) for name, tensor in expected.items())
    theirs, total = their_model("gpt2"), 0.0
    for ids, labels in samples.step(0, 2):
        total += torch.nn.functional.cross_entropy(theirs(ids).logits.flatten(0, 1), labels.flatten()).item()
    assert loss == pytest.approx(total / len(samples.step(0, 2)), rel=1e-5)


@pytest.mark.ray
def test_a_command_that_starts_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A published model goes through the whole of it: train a little, evaluate, export, and load again."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))  # for Ray's processes, which start elsewhere
    monkeypatch.chdir(tmp_path)
    THEIRS["bytes"] = LLAMA | {"vocab_size": 256, "tie_word_embeddings": True}
    saved(tmp_path / "there", "bytes")
    settings = ["parallel.chunks=1", "parallel.shards=1", "model.seq_len=32", "train.steps=2", "train.lr=1e-12"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    result = CliRunner().invoke(zeropp, ["train", "--name", "a", "--init-from", "there", *arguments])
    assert result.exit_code == 0, result.output + capfd.readouterr().out
    assert CliRunner().invoke(zeropp, ["export", "a", "--to", "hf", "back"]).exit_code == 0
    before, after = (load_file(Path(place) / "model.safetensors") for place in ("there", "back"))
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], tensor, atol=1e-9) for name, tensor in after.items())
    refused = CliRunner().invoke(zeropp, ["train", "--init-from", "nowhere", "--dry-run"])
    assert refused.exit_code == 2
    assert "holds no config.json; name the folder of a model" in refused.output
