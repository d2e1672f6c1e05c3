"""The run configuration: what it refuses and how it says so, and that it survives the way to TOML and back."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from zeropp_ray.config import SECTIONS, ModelSection, ParallelSection, RunConfig, load_config, starter, tomllib
from zeropp_ray.config_reference import reference
from zeropp_ray.errors import ConfigError


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_selective_recomputation_needs_a_chunk_that_is_not_the_last() -> None:
    assert refusal("parallel.recompute=selective", "parallel.chunks=1") == (
        "parallel.recompute = 'selective': keeps the last chunk of a stage, and with parallel.chunks = 1 there is no "
        "other; use parallel.recompute = 'full' or 'none', or parallel.chunks = 2 or more"
    )


@pytest.mark.parametrize(
    ("override", "field", "works"),
    [
        ("parallel.microbatches=1", "parallel.microbatches = 1", "parallel.microbatches=2"),
        ("parallel.unit=1", "parallel.unit = 1", "parallel.unit=2"),
        ("parallel.unit=9", "parallel.unit = 9", "parallel.unit=8"),
        ("parallel.unit=-1", "parallel.unit = -1", "parallel.unit=2"),
        ("parallel.memory_limit=1", "parallel.memory_limit = 1", "parallel.memory_limit=2.5"),
        ("parallel.recompute=ful", "parallel.recompute = 'ful'", "parallel.recompute=full"),
        ("parallel.reduce=", "parallel.reduce = ''", "parallel.reduce=step"),
        ("parallel.microbatch_size=0", "parallel.microbatch_size = 0", "parallel.microbatch_size=1"),
        ("parallel.stages=0", "parallel.stages = 0", "parallel.stages=1"),
        ("model.layers=3", "model.layers = 3", "model.layers=4"),
        ("model.heads=3", "model.heads = 3", "model.heads=2"),
        ("model.heads=128", "model.heads = 128", "model.heads=64"),
        ("model.kv_heads=3", "model.kv_heads = 3", "model.kv_heads=2"),
        ("model.dim=127", "model.dim = 127", "model.dim=128"),
        ("model.seq_len=0", "model.seq_len = 0", "model.seq_len=1"),
        ("model.family=lama", "model.family = 'lama'", "model.family=llama"),
        ("model.factory=mymodel", "model.factory = 'mymodel'", "model.factory=mymodel:build"),
        ("model.args.width=3", "model.args = {'width': 3}", "model.args={}"),
        ("train.steps=0", "train.steps = 0", "train.steps=1"),
        ("train.lr=0", "train.lr = 0.0", "train.lr=3e-3"),
        ("train.lr=nan", "train.lr = nan", "train.lr=1"),
        ("train.beta2=1", "train.beta2 = 1.0", "train.beta2=0.9"),
        ("train.schedule=cosin", "train.schedule = 'cosin'", "train.schedule=wsd"),
        ("train.decay_steps=20", "train.decay_steps = 20", "train.schedule=wsd"),
        ("train.tokens_per_step=5000", "train.tokens_per_step = 5000", "train.tokens_per_step=4608"),
        ("train.min_lr_ratio=2", "train.min_lr_ratio = 2.0", "train.min_lr_ratio=1"),
        ("train.dtype=float16", "train.dtype = 'float16'", "train.dtype=float64"),
        ("data.validation_fraction=1", "data.validation_fraction = 1.0", "data.validation_fraction=0.05"),
        ("run.seed=-1", "run.seed = -1", "run.seed=0"),
        ("run.name=../up", "run.name = '../up'", "run.name=up"),
        ("run.name=.hidden", "run.name = '.hidden'", "run.name=hidden-1.0"),
        ("run.dir=", "run.dir = ''", "run.dir=."),
        ("resources.cpus=0", "resources.cpus = 0.0", "resources.cpus=0.5"),
    ],
)
def test_a_value_that_cannot_run_is_refused_with_one_that_can(override: str, field: str, works: str) -> None:
    message = refusal(override)
    assert message.startswith(f"{field}: "), message
    load_config(None, [works])


@pytest.mark.parametrize(
    ("overrides", "works"),
    [
        ((), ["train.tokens_per_step=4608", "train.tokens_per_step=5120"]),
        (("parallel.stages=4",), ["train.tokens_per_step=4608", "train.tokens_per_step=5120"]),
        (("parallel.replicas=3",), ["train.tokens_per_step=4608", "train.tokens_per_step=6144"]),
        (("parallel.shards=7",), ["train.tokens_per_step=3584", "train.tokens_per_step=5376"]),
        (("parallel.shards=9",), ["train.tokens_per_step=4608", "train.tokens_per_step=6912"]),
        (("parallel.shards=16",), ["train.tokens_per_step=8192"]),  # N = 2 = P at least
    ],
)
def test_a_budget_that_does_not_divide_names_the_nearest_that_do(overrides: tuple[str, ...], works: list[str]) -> None:
    overrides = (*overrides, "model.layers=8")
    message = refusal(*overrides, "train.tokens_per_step=5000")
    assert message.startswith("train.tokens_per_step = 5000: a step takes a whole number of micro-batches of ")
    assert message.endswith("; use " + " or ".join(work.partition("=")[2] for work in works))
    for work in works:
        parallel = load_config(None, [*overrides, work]).parallel
        assert parallel.global_batch * 128 == int(work.partition("=")[2])


def test_the_micro_batches_follow_from_the_budget() -> None:
    assert RunConfig().parallel.microbatches == 8
    budget = ["train.tokens_per_step=8192"]
    config = load_config(None, budget)
    assert config.parallel.microbatches == 16
    assert load_config(None, [*budget, "parallel.shards=1"]).parallel.microbatches == 32
    assert load_config(None, [*budget, "parallel.microbatches=16"]) == config
    assert RunConfig.from_dict(config.resolved().to_dict()) == config.resolved()
    assert refusal(*budget, "parallel.microbatches=8") == (
        "parallel.microbatches = 8: train.tokens_per_step = 8192 asks for 16 micro-batches of 512 tokens; use 16, or 0 "
        "for what the budget says, or train.tokens_per_step=0 to go without one"
    )
    assert refusal("train.tokens_per_step=512").endswith("at least parallel.stages = 2 of them; use 1024")


def test_a_decay_fits_into_the_run() -> None:
    long = ["train.schedule=wsd", "train.steps=100", "train.warmup_steps=20"]
    assert "use 80 or less" in refusal(*long, "train.decay_steps=81")
    load_config(None, [*long, "train.decay_steps=80"])
    assert load_config(None, long).resolved().train.decay_steps == 10
    assert load_config(None, ["train.steps=30"]).resolved().train.decay_steps == 0


def test_a_file_to_start_from_is_the_defaults(tmp_path: Path) -> None:
    assert RunConfig.from_dict(tomllib.loads(starter())) == RunConfig()
    lines = starter().splitlines()
    assert "stages = 2                    # P: pipeline stages" in lines
    assert any(line.startswith("# weight_decay = 0.1") for line in lines)
    for kind in SECTIONS.values():
        for item in dataclasses.fields(kind):
            assert item.metadata["help"] in starter()
    uncommented = "\n".join(line.removeprefix("# ") if " = " in line else line for line in lines)
    assert RunConfig.from_dict(tomllib.loads(uncommented)) == RunConfig()


def test_the_message_names_the_number_that_works() -> None:
    assert "2.5" in refusal("parallel.memory_limit=1")
    assert "use 2" in refusal("model.heads=3")
    assert "4 or more" in refusal("model.layers=3")
    assert "use 128" in refusal("model.dim=127")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.stages=two", "parallel.stages = 'two': expected a whole number"),
        ("parallel.stages=2.0", "parallel.stages = 2.0: expected a whole number"),
        ("parallel.stages=true", "parallel.stages = true: expected a whole number"),
        ("parallel.prefetch=1", "parallel.prefetch = 1: expected true or false"),
        ("train.lr=fast", "train.lr = 'fast': expected a number"),
        ("model.args=3", "model.args = 3: expected a table"),
    ],
)
def test_wrong_types_are_refused(override: str, message: str) -> None:
    assert refusal(override) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.stage=3", "parallel.stage: unknown key; did you mean parallel.stages?"),
        ("train.seed=3", "train.seed: unknown key; did you mean run.seed?"),
        ("modle.dim=3", "[modle]: unknown section; did you mean model?"),
        ("data.quux=3", "data.quux: unknown key; [data] knows path, cache, validation_fraction, tokenizer"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(override: str, message: str) -> None:
    assert refusal(override) == message


@pytest.mark.parametrize("override", ["parallel.stages", "stages=4", "parallel..stages=4", "=4", "parallel.stages.x=4"])
def test_malformed_overrides_are_refused(override: str) -> None:
    refusal(override)


def test_overrides_are_toml_or_text_and_the_last_wins() -> None:
    numbers = ["parallel.chunks=1", "parallel.stages=1", "parallel.stages = 4", "train.lr=1"]
    config = load_config(None, [*numbers, "run.name=7", "data.path=a b.txt", "run.dir='x'"])
    assert config.parallel.stages == 4
    assert isinstance(config.train.lr, float)
    assert (config.run.name, config.data.path, config.run.dir) == ("7", "a b.txt", "x")
    own = load_config(None, ["model.factory=my.models:build", "model.args.width=3", "model.args.kind=tall"])
    assert own.model.args == {"width": 3, "kind": "tall"}


def test_a_file_is_read_and_overridden(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[parallel]\nstages = 4\nchunks = 1\n", encoding="utf-8")
    config = load_config(file, ["parallel.chunks=3", "model.layers=12"])
    assert (config.parallel.stages, config.parallel.chunks) == (4, 3)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such configuration file"),
        (b"[parallel\n", "not TOML"),
        (b"\xff", "cannot be read"),
        (b"run = 3", "section"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: bytes | None, problem: str) -> None:
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        load_config(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_toml_and_back() -> None:
    config = load_config(
        None, ["run.name=trial", "model.factory=my.models:build", "model.args.sizes=[1, 2]", "train.eps=1e-7"]
    )
    assert RunConfig.from_dict(tomllib.loads(config.to_toml())) == config
    assert RunConfig.from_dict(config.to_dict()) == config
    assert RunConfig.from_dict(tomllib.loads(RunConfig().to_toml())) == RunConfig()


def test_every_setting_has_a_meaning() -> None:
    for kind in SECTIONS.values():
        for item in dataclasses.fields(kind):
            assert item.metadata["help"], f"{kind.SECTION}.{item.name}"
            assert "unit" in item.metadata


def test_resolved_writes_out_what_is_automatic() -> None:
    resolved = load_config(None, ["model.dim=128", "parallel.microbatches=7"]).resolved()
    assert (resolved.model.kv_heads, resolved.model.ffn_dim) == (4, 352)
    assert (resolved.parallel.unit, resolved.parallel.memory_limit) == (4, 8.0)  # 7 = one unit of 7
    assert resolved.resolved() == resolved
    assert resolved.parallel.schedule() == load_config(None, ["parallel.microbatches=7"]).parallel.schedule()


def test_sizes_of_a_run() -> None:
    parallel = ParallelSection(stages=3, shards=2, replicas=4, microbatches=5, microbatch_size=7)
    assert (parallel.members, parallel.global_batch) == (24, 280)


def test_built_in_python_it_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"model\.dim = '128': expected a whole number"):
        ModelSection(dim="128")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model\.layers = 2"):
        RunConfig(model=ModelSection(layers=2))


def test_a_users_own_model_is_not_checked_as_a_family() -> None:
    load_config(None, ["model.factory=my.models:build", "model.layers=1", "model.heads=7", "model.family="])


def test_reading_a_configuration_needs_neither_torch_nor_ray() -> None:
    code = "import sys, zeropp_ray.config; assert not {'torch', 'ray'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_reference_is_made_from_the_fields() -> None:
    page = Path(__file__).parent.parent / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference(), (
        "python -m zeropp_ray.config_reference > docs/configuration.md"
    )
    for kind in SECTIONS.values():
        for item in dataclasses.fields(kind):
            assert f"| `{kind.SECTION}.{item.name}` |" in reference()
