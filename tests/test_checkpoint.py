"""Checkpoints: every parameter once, any layout, exact, and never silently damaged."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from actors.run import run_training
from jobs.cli import zeropp
from tests import harness
from tests.saved import saved_run
from tests.test_parity import configuration, samples_of
from zeropp_ray.checkpoint.manifest import NAME
from zeropp_ray.checkpoint.reader import find, latest, load_model, open_checkpoint
from zeropp_ray.checkpoint.resume import check_same_data, check_same_parameters, identity_of, resumed
from zeropp_ray.config import load_config
from zeropp_ray.data.corpus import Corpus, load_corpus
from zeropp_ray.data.prepare import prepare
from zeropp_ray.errors import ConfigError
from zeropp_ray.models import resolve_factory
from zeropp_ray.vote import decide

STEPS = 4


def steps(run: harness.Run, first: int, last: int) -> list[float]:
    decision, losses = None, []
    for step in range(first, last + 1):
        decision = decide(step, run.call("advance", step, decision), 1.0)
        losses.append(decision.loss)
    run.call("flush", decision)
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of P=2, V=2, F=2, saved after steps 2 and 4; its losses of steps 3 and 4, and its last weights."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    config = configuration(2, 2, 2, N=4, b=1, steps=STEPS)
    with harness.members(config, samples_of(config)) as run:
        steps(run, 1, 2)
        run.save(folder, 2, 2)
        losses = steps(run, 3, 4)
        run.save(folder, 4, 4)
        return folder, config, losses, run.whole("weights")


def test_every_parameter_is_in_the_files_once(saved):
    folder, config, _, weights = saved
    tensors = {}
    for path in (folder / "checkpoints" / "step-00000004").glob("weights-*.safetensors"):
        found = load_file(path)
        assert not found.keys() & tensors.keys()
        tensors |= found
    model = resolve_factory(config.model)()
    model.load_state_dict(tensors)  # strict: the same names, the same shapes
    assert all(torch.equal(tensors[name].flatten(), weights[name]) for name in weights)
    ids = torch.arange(16)[None]
    assert torch.equal(model(ids), load_model(latest(folder))(ids))


def test_the_same_layout_goes_on_bit_for_bit(saved, tmp_path):
    folder, config, losses, _ = saved
    with harness.members(config, samples_of(config)) as run:
        run.call("load", folder / "checkpoints" / "step-00000002")
        assert steps(run, 3, 4) == losses
        again = open_checkpoint(run.save(tmp_path / "again", 4, 4))
    straight = latest(folder)
    assert again.digest(state=True) == straight.digest(state=True)
    assert open_checkpoint(folder / "checkpoints" / "step-00000002").digest() != straight.digest()


def test_a_skipped_step_is_no_update_after_a_resume_either(saved, tmp_path):
    """Step 2 is skipped: the moments have seen one update less than there were steps, which Adam corrects by."""
    _, config, _, _ = saved
    with harness.members(config, samples_of(config)) as run:
        decision = decide(1, run.call("advance", 1, None), 1.0)
        skip = dataclasses.replace(decide(2, run.call("advance", 2, decision), 1.0), commit=False)
        run.call("flush", skip)
        middle = run.save(tmp_path / "run", 2, 1)
        losses = steps(run, 3, 4)
    other = configuration(1, 1, 1, N=8, b=1, layers=4, steps=STEPS)
    with harness.members(other, samples_of(other)) as run:
        run.call("load", middle)
        assert steps(run, 3, 4) == pytest.approx(losses, rel=1e-6)


def test_a_later_epoch_goes_on_bit_for_bit(saved):
    """All members leave their groups after step 3, form new ones on the same store, and take step 4."""
    folder, config, losses, _ = saved
    with harness.members(config, samples_of(config)) as run:
        run.call("load", folder / "checkpoints" / "step-00000002")
        first = steps(run, 3, 3)
        run.call("rejoin", dataclasses.replace(run.at, epoch=1))
        assert first + steps(run, 4, 4) == losses


@pytest.mark.parametrize("layout", [(1, 1, 1, 1, 8), (1, 2, 3, 1, 0), (4, 1, 1, 2, 4)], ids=str)
def test_another_layout_goes_on(saved, layout):
    folder, _, losses, weights = saved
    P, V, F, R, N = layout
    if not N:  # 3 shards: the batch of 8 does not divide, so only the state is compared
        other = configuration(P, V, F, R, N=4, b=1, layers=4, steps=STEPS)
        with harness.members(other, samples_of(other)) as run:
            run.call("load", folder / "checkpoints" / "step-00000004")
            loaded = run.whole("weights")
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)
        return
    other = configuration(P, V, F, R, N=N, b=1, layers=4, steps=STEPS)
    with harness.members(other, samples_of(other)) as run:
        run.call("load", folder / "checkpoints" / "step-00000002")
        assert steps(run, 3, 4) == pytest.approx(losses, rel=1e-5)


def damage_truncate(checkpoint):
    path = checkpoint / "optimizer-001-000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return "optimizer-001-000"


def damage_flip(checkpoint):
    path = checkpoint / "weights-000-001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    return "weights-000-001.safetensors has been altered"


def damage_delete(checkpoint):
    (checkpoint / "weights-001-001.safetensors").unlink()
    return "weights-001-001.safetensors is missing"


def damage_foreign(checkpoint):
    path = checkpoint / "weights-000-000.safetensors"
    size = path.stat().st_size
    save_file({"x": torch.zeros(2)}, path)
    with path.open("ab") as file:
        file.write(bytes(size - path.stat().st_size))
    return "weights-000-000"


def damage_manifest(checkpoint):
    (checkpoint / NAME).write_text((checkpoint / NAME).read_text()[:300])
    return "manifest.json cannot be read"


def damage_version(checkpoint):
    manifest = json.loads((checkpoint / NAME).read_text())
    (checkpoint / NAME).write_text(json.dumps(manifest | {"version": 99}))
    return "version 99 is newer"


def damage_cursor(checkpoint):
    text = (checkpoint / NAME).read_text()
    (checkpoint / NAME).write_text(text.replace('"commits": 4', '"commits": 3'))
    return "its checksum differs, it has been altered"


def damage_no_manifest(checkpoint):
    (checkpoint / NAME).unlink()
    return "manifest.json is missing"


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_newest_good_one_taken(saved, tmp_path, damage):
    run = tmp_path / "run"
    shutil.copytree(saved[0], run)
    newest = run / "checkpoints" / "step-00000004"
    said = damage(newest)
    warnings = []
    assert latest(run, warnings.append).step == 2
    assert len(warnings) == 1
    assert str(newest) in warnings[0]
    assert said in warnings[0]
    if damage is not damage_no_manifest:
        with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
            find(newest)
    result = CliRunner().invoke(zeropp, ["checkpoint", "verify", str(run)])
    assert result.exit_code == 1
    assert "1 of 2 checkpoints damaged" in result.output


def test_resume_refuses_another_run(saved):
    checkpoint = latest(saved[0])
    with pytest.raises(ConfigError, match=r"model\.dim: 32 there, 64 here.*sequences per step: 8 there, 4 here"):
        resumed(checkpoint, ["model.dim=64", "parallel.shards=1", "train.steps=9"])
    with pytest.raises(ConfigError, match=r"all 4 steps are done; go on with --set train\.steps=8"):
        resumed(checkpoint, [])
    config = resumed(checkpoint, ["train.steps=9", "parallel.stages=4", "parallel.chunks=1"])
    assert (config.parallel.stages, config.parallel.unit, config.train.steps) == (4, 4, 9)


def test_with_a_budget_in_tokens_the_micro_batches_follow_the_new_layout(tmp_path):
    config = load_config(None, ["train.tokens_per_step=4096", "model.dim=16"])
    saved_run(tmp_path, config)
    changed = resumed(latest(tmp_path), ["parallel.shards=1"])
    assert (config.parallel.microbatches, changed.parallel.microbatches) == (8, 16)
    assert changed.parallel.global_batch == config.parallel.global_batch


def test_recomputation_may_change_and_the_automatic_limit_changes_with_it(tmp_path):
    saved_run(tmp_path, load_config(None, ["parallel.microbatches=8", "model.dim=16"]).resolved())
    checkpoint = latest(tmp_path)
    changed = resumed(checkpoint, ["parallel.recompute=full", "parallel.reduce=step", "parallel.prefetch=true"])
    assert (checkpoint.config.parallel.memory_limit, changed.parallel.memory_limit) == (5, 2)  # u + P/V, then 2P/V
    assert changed.parallel.unit == checkpoint.config.parallel.unit
    given = resumed(checkpoint, ["parallel.recompute=full", "parallel.memory_limit=3"])
    assert given.parallel.memory_limit == 3


def test_a_changed_model_is_refused_with_what_differs(saved):
    checkpoint = latest(saved[0])
    shapes = dict(checkpoint.manifest.shapes)
    shapes["head.output.weight"] = (64, 32)
    shapes["new"] = shapes.pop("embed.weight")
    with pytest.raises(
        ConfigError, match=r"new is new; embed\.weight is gone; head\.output\.weight was \[32, 32\] and is \[64, 32\]"
    ):
        check_same_parameters(checkpoint, shapes)


def test_a_parameter_that_is_frozen_or_trained_since_is_named(saved, tmp_path):
    checkpoint = latest(saved[0])
    shapes = checkpoint.manifest.shapes
    check_same_parameters(checkpoint, shapes, frozen=())
    with pytest.raises(ConfigError, match=r"model has changed: embed\.weight was trained and is frozen;"):
        check_same_parameters(checkpoint, shapes, frozen={"embed.weight"})
    saved_run(tmp_path, load_config(None, ["model.dim=32", "model.heads=2"]))
    frozen = latest(tmp_path)  # without moments
    shapes = frozen.manifest.shapes
    check_same_parameters(frozen, shapes, frozen=shapes.keys())
    check_same_parameters(frozen, shapes)
    with pytest.raises(ConfigError, match=r"embed\.weight was frozen and is trained; .* and \d+ more"):
        run_training(frozen.config, address=None, run_dir=tmp_path, on_event=print, resume=frozen)


def test_another_text_is_refused(tmp_path):
    """A token store is told by the checksums of all its parts, raw text by its ends and its middle."""
    config = load_config(None, [f"data.path={tmp_path}", "model.dim=16", "model.heads=2"])
    saved_run(tmp_path / "run", config)
    text = (b"a line of text\n" * 500_000)[: 7 << 20]
    other = text[: 2 << 20] + b"A" + text[(2 << 20) + 1 :]  # where no sample of raw text is taken
    found = []
    for name, content in (("one", text), ("two", other), ("again", text)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_bytes(content)
        prepare([tmp_path / name / "text.txt"], tmp_path / name / "store", workers=1)
        for path in (tmp_path / name / "text.txt", tmp_path / name / "store"):
            corpus = load_corpus(dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(path))))
            found.append(identity_of(corpus))
    raw, stored = found[::2], found[1::2]
    assert raw[0] == raw[2]
    assert stored[0] == stored[2] != stored[1]
    assert identity_of(Corpus(np.zeros(9), np.zeros(9), "")) != identity_of(Corpus(np.zeros(9), np.ones(9), ""))

    checkpoint = latest(tmp_path / "run")
    checkpoint = dataclasses.replace(checkpoint, manifest=dataclasses.replace(checkpoint.manifest, data=stored[0]))
    check_same_data(checkpoint, stored[2])
    with pytest.raises(ConfigError, match="the text has changed since"):
        check_same_data(checkpoint, stored[1])


def test_find_by_what_a_person_names(saved, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="neither the folder of a run or checkpoint nor the name of a run"):
        find("nothing")
    shutil.copytree(saved[0], tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    assert find("mine").step == find("runs/mine").step == 4
    assert find("runs/mine/checkpoints/step-00000002").step == 2
