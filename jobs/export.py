"""``zeropp export``: hand a trained model to other programs."""

from __future__ import annotations

import re
from pathlib import Path

import click

from jobs.place import PLACE
from zeropp_ray.errors import ConfigError
from zeropp_ray.uri import Place

_UNITS = {"": 1} | {f"{prefix}B": 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T"))}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}


@click.command(context_settings={"show_default": True}, short_help="Write a trained model for other programs.")
@click.argument("run", type=PLACE)
@click.option("--to", "form", type=click.Choice(["hf"]), default="hf", help="Layout: Hugging Face.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--max-shard-size", default="5GB", help="Most bytes of a file; more of them get an index.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", help="How weights are stored."
)
def export(run: Place, form: str, folder: Path, max_shard_size: str, dtype: str) -> None:
    """Write the newest good checkpoint of RUN to FOLDER as `transformers` reads it: config.json, safetensors, and the
    tokenizer. RUN is a run's folder or name, or a checkpoint's folder; a model of your own has no such layout.

    \b
    Example:
      zeropp export first --to hf exported
      python -c "import transformers; transformers.AutoModelForCausalLM.from_pretrained('exported')"
    """
    limit = _bytes(max_shard_size)
    from jobs.report import size
    from zeropp_ray.checkpoint.reader import find
    from zeropp_ray.data.text import tokenizer_of
    from zeropp_ray.models.hf import export_model
    from zeropp_ray.models.hf.export import byte_tokenizer

    checkpoint = find(run, lambda text: click.echo(f"warning: {text}", err=True))
    config = checkpoint.config
    tokenizer, file = tokenizer_of(config, checkpoint.run or checkpoint.path)
    files = export_model(
        checkpoint.tensor,
        config.model,
        folder,
        max_shard_bytes=limit,
        dtype=dtype,
        end=tokenizer.end,
        tokenizer=file.read_text(encoding="utf-8") if file else byte_tokenizer(),
        end_token=tokenizer.end_token if file else "",
    )
    click.echo(f"{checkpoint.path} to {folder}:")
    for written in files:
        click.echo(f"  {written.name}  {size(written.stat().st_size)}")


def _bytes(text: str) -> int:
    """``5GB`` is 5e9, ``5GiB`` 5 * 2^30."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B?)\s*", text)
    unit = match[2].replace("k", "K") if match else None
    if match is None or unit not in _UNITS or not int(float(match[1]) * _UNITS[unit]):
        raise ConfigError(f"--max-shard-size {text}: expected a size, such as 5GB or 500MB")
    return int(float(match[1]) * _UNITS[unit])
