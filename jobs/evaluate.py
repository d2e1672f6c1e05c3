"""``zeropp eval``: the loss of a trained model on a text."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.place import PLACE
from zeropp_ray.uri import Place, absolute

if TYPE_CHECKING:
    from zeropp_ray.checkpoint.reader import Checkpoint
    from zeropp_ray.config import RunConfig
    from zeropp_ray.evaluation import Loss, Request, Windows


@click.command(name="eval", short_help="The loss of a trained model on a text.")
@click.argument("run", type=PLACE)
@click.option("--data", default="", metavar="PATH", help="Text or token store; left out: the run's own, held out.")
@click.option(
    "--split", type=click.Choice(["validation", "train"]), default="validation", help="Part of a token store."
)
@click.option("--sequences", type=click.IntRange(0), default=0, help="Read so many from the start of the text; 0: all.")
@click.option("--one-process", is_flag=True, help="Here, without Ray, with the whole model in memory.")
@click.option(
    "--stages", type=click.IntRange(1), help="Pipeline stages; left out, as all of these: as the run had them."
)
@click.option("--chunks", type=click.IntRange(1), help="Model chunks per stage.")
@click.option("--shards", type=click.IntRange(1), help="Members of a stage.")
@click.option("--replicas", type=click.IntRange(1), help="Copies of the whole mesh.")
@click.option("--address", metavar="ADDRESS", help="Join the Ray cluster at HOST:PORT, or 'auto'; else start one here.")
@click.option("--json", "as_json", is_flag=True, help="For a program.")
def evaluate(
    run: Place,
    data: str,
    split: str,
    sequences: int,
    one_process: bool,
    address: str | None,
    as_json: bool,
    **layout: int | None,
) -> None:
    """The loss of the newest good checkpoint of RUN (its folder, its name, or a checkpoint's folder) on a text.

    Runs under the pipeline, in any layout, or in one process: with the same result. The text is cut in sequences that
    lie side by side, and each token but the first is predicted once from those before it in its sequence. Text and
    folders of it are read whole.

    \b
    Examples:
      zeropp eval first
      zeropp eval first --data other.txt --one-process
      zeropp eval first --stages 4 --chunks 1 --shards 1
    """
    from zeropp_ray.checkpoint.reader import find
    from zeropp_ray.evaluation import Request

    checkpoint = find(run, lambda text: click.echo(f"warning: {text}", err=True))
    config = _laid_out(checkpoint.config, {name: value for name, value in layout.items() if value is not None})
    request = Request(absolute(data) if data else "", split, sequences)
    windows, text = request.windows(config)
    if one_process:
        loss = _here(checkpoint, windows, config.parallel.microbatch_size)
    else:
        loss = _pipeline(checkpoint, config, request, address)
    result = {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "text": text.source,
        "sequences": windows.count,
        "tokens": loss.tokens,
        "loss": loss.per_token,
        "perplexity": loss.perplexity,
        "bits_per_byte": loss.bits_per_token if text.bytes else None,
    }
    click.echo(json.dumps(result) if as_json else _table(result))


def _laid_out(config: RunConfig, layout: dict[str, int]) -> RunConfig:
    """The run's configuration on another layout; what was resolved for the old one is automatic again."""
    from zeropp_ray.config import RunConfig

    values = config.to_dict()
    values["model"]["init_from"] = ""  # weights come from the checkpoint
    parallel = values["parallel"] | layout
    parallel["microbatches"] = max(parallel["microbatches"], parallel["stages"])
    values["parallel"] = parallel | {"unit": 0, "memory_limit": 0.0, "policy": "zeropp", "costs": ""}
    values["train"]["tokens_per_step"] = 0
    return RunConfig.from_dict(values).resolved()


def _here(checkpoint: Checkpoint, windows: Windows, batch: int) -> Loss:
    from zeropp_ray.checkpoint.reader import load_model
    from zeropp_ray.evaluation import evaluate
    from zeropp_ray.precision import Precision

    model = load_model(checkpoint, Precision.of(checkpoint.config.train.dtype))  # as under the pipeline
    with click.progressbar(length=windows.count, label="evaluating", file=sys.stderr) as bar:
        return evaluate(model, windows, batch, bar.update)


def _pipeline(checkpoint: Checkpoint, config: RunConfig, request: Request, address: str | None) -> Loss:
    from actors.run import run_evaluation
    from jobs.quiet import quiet

    with tempfile.TemporaryDirectory(prefix="zeropp-") as folder, quiet(Path(folder) / "log.txt"):
        return run_evaluation(config, checkpoint, request, address=address)


def _table(result: dict[str, Any]) -> str:
    from jobs.report import aligned

    bits = result["bits_per_byte"]
    return aligned(
        ("checkpoint", f"{result['checkpoint']}, step {result['step']}"),
        ("text", f"{result['text']}: {result['tokens']:,} tokens predicted in {result['sequences']:,} sequences"),
        ("loss", f"{result['loss']:.4f} nats per token"),
        ("perplexity", f"{result['perplexity']:.3f} per token"),
        *([("bits", f"{bits:.4f} per byte")] if bits is not None else []),
    )
