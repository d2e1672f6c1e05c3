"""``docs/configuration.md``, made from the fields.

``python -m zeropp_ray.config_reference > docs/configuration.md`` writes it anew.
"""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import tomli_w

from zeropp_ray.config import SECTIONS

_KINDS = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    int | str: 'whole number, or `"auto"`',
}

_INTRODUCTION = """\
# Configuration

<!-- Made from the fields by `python -m zeropp_ray.config_reference`; a test holds it up to date. -->

A run is described by a TOML file, or by nothing at all: what is left out has its default.

```sh
zeropp config init run.toml     # a file to start from, with comments
zeropp config check run.toml    # what the run would be: units, global batch, members, memory, data
zeropp config show run.toml     # all settings, those left out too
zeropp train run.toml --set train.steps=500
```

Every command that takes such a file takes `--set section.key=value` too, as often as needed; the last one wins. A
value is TOML, or else text as it stands: `--set train.lr=1e-3 --set data.path=book.txt`. An unknown name is refused
with the nearest known one, and a value that cannot work with one that can.

Where 0 or an empty text means *automatic*, `runs/NAME/config.toml` has the value that was taken. `examples/` has
complete files, each of which is run by a test.

Symbols: P = stages, V = chunks, F = shards, R = replicas, N = microbatches, U = unit, b = microbatch_size.
"""

_NOTES = {
    "parallel": """\
A run has P·F·R members. A step takes N·b·F·R sequences of `model.seq_len` tokens. The layout changes neither the
weights at the start nor the samples of a step: with the same global batch, every layout gives the same losses, up
to rounding.

**Activations.** With `recompute` a chunk's forward keeps its input alone, and runs once more for the backward: `full`
of every chunk, `selective` of all but the last chunk of a stage, whose backwards follow closely, so that keeping it
costs little memory. Gradients are the same to the last bit, if the model's forward is the same with and without a
graph. Such forwards, and those of an evaluation, run without gradients.

**Gradients.** `reduce = "unit"` takes the least memory: one chunk's unsharded gradients at a time. `reduce = "step"`
moves the least: each chunk's are reduced once in the step, so those of all V chunks exist until then. Results are equal
up to rounding.

**Policy.** ZeroPP's order follows from the costs of the chunks. The other policies are known schedules, for comparison;
some take one chunk, or two, and their order fixes the unit and the live activations ([schedules.md](schedules.md)).

**Unit.** With `unit = "auto"` the schedule is replayed for every number of units under `memory_limit`, by default 2P
then. The fewest units that are within 0.5% of the fastest are taken, and the least limit that loses them no time. Both
are written out in `runs/NAME/config.toml`. `costs` names a file of `zeropp profile`, with times of a step as they
were measured; else their FLOPs are the costs ([schedules.md](schedules.md)).

**Replicas** repeat the mesh and add up their gradients. With `zero1` they share the optimizer's work too: each updates
one of R pieces of its shard and hands the others its new weights. The result is the same; each member keeps 1/R of its
moments, and of fp32 weights beside bf16 ones. In fp32, R = 2 sends as much as without it; more replicas send less,
and so does bf16.
""",
    "data": """\
[data.md](data.md) tells of token stores.
""",
    "train": """\
**Learning rate.** It rises linearly to `lr` over `warmup_steps`. Then `cosine` and `linear` go down to `lr ·
min_lr_ratio` at the last step; `constant` stays; `wsd` (warm-up, stable, decay) stays, and goes down linearly over
the last `decay_steps`, so that a run can be extended from before its decay.

**A budget in tokens.** With `tokens_per_step`, N is what the budget comes to: `tokens_per_step / (b · F · R ·
seq_len)`. A layout with more members then makes fewer micro-batches of the same step. A budget that does not
divide, or that leaves fewer micro-batches than stages, is refused with the nearest that work.
`parallel.microbatches` is left out, or says the same.

**Precision.** With `dtype = "bfloat16"`, forward and backward compute in bf16, and gathers and messages are half as
large. Weights, their moments and all sums of gradients stay fp32, and so do checkpoints. A model's buffers are fp32
too; what is between two parts of it must be bf16 then, see [models.md](models.md). It pays where the processor has
instructions for bf16 (AVX512-BF16, AMX); a run says so if it has none.
""",
}


def reference() -> str:
    """The whole page, in Markdown."""
    pages = [_INTRODUCTION]
    for name, kind in SECTIONS.items():
        rows = ["| setting | kind | default | |", "| --- | --- | --- | --- |"]
        hints = get_type_hints(kind)
        for item in dataclasses.fields(kind):
            value = getattr(kind(), item.name)
            default = "" if isinstance(value, dict) else f"`{tomli_w.dumps({'x': value}).strip()[4:]}`"
            unit = f" [{item.metadata['unit']}]" if item.metadata["unit"] else ""
            rows.append(
                f"| `{name}.{item.name}` | {_KINDS.get(hints[item.name], 'table')} | {default} |"
                f" {item.metadata['help'].replace('*', '·')}{unit} |"
            )
        pages.append("\n".join([f"## [{name}]", "", *rows, ""]))
        if name in _NOTES:
            pages.append(_NOTES[name])
    return "\n".join(pages)


if __name__ == "__main__":
    print(reference(), end="")
