"""``zeropp sample``: let a trained model go on with a text."""

from __future__ import annotations

import secrets
import sys
import time

import click

from jobs.place import PLACE
from zeropp_ray.errors import ConfigError
from zeropp_ray.uri import Place

_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Signs for the control characters, which would change the terminal's state."""


@click.command(context_settings={"show_default": True}, short_help="Let a trained model go on with a text.")
@click.argument("run", type=PLACE)
@click.option("--prompt", default="\n", show_default="a line break", help="The text to go on with.")
@click.option("--tokens", type=click.IntRange(1), default=200, help="Most tokens to make.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.8,
    help="Above 1 more surprising, below less; 0: the likeliest.",
)
@click.option("--top-k", type=click.IntRange(0), default=0, help="Draw from so many of the likeliest tokens; 0: all.")
@click.option("--seed", type=int, show_default="another each time", help="Gives the same text again.")
def sample(run: Place, prompt: str, tokens: int, temperature: float, top_k: int, seed: int | None) -> None:
    """Go on with a text, with the newest good checkpoint of RUN: its folder, its name, or a checkpoint's folder.

    One process does it, without Ray. Text appears as it is made; Ctrl-C ends it. Tokens that were read are not read
    again, except by a model of your own without a cache. A text that outgrows the model's context goes on from its last
    half.

    \b
    Examples:
      zeropp sample first --prompt 'The '
      zeropp sample runs/first --tokens 500 --temperature 0.5 --top-k 40 --seed 7
    """
    from zeropp_ray.checkpoint.reader import find, load_model
    from zeropp_ray.data.text import tokenizer_of
    from zeropp_ray.generate import TextStream, generate, has_cache

    checkpoint = find(run, lambda text: click.echo(f"warning: {text}", err=True))
    config = checkpoint.config
    tokenizer, _ = tokenizer_of(config, checkpoint.run or checkpoint.path)
    if not prompt:
        raise ConfigError("--prompt: holds no text; leave it out to begin with a line break")
    seed = secrets.randbelow(2**31) if seed is None else seed
    model = load_model(checkpoint)
    again = "" if has_cache(model) else "; the model has no cache and reads all of the text for each token"
    click.echo(f"{checkpoint.path}, seed {seed}{again}", err=True)

    read = tokenizer.encode([prompt])[0].tolist()
    stream, begin, made = TextStream(tokenizer, read), time.monotonic(), 0
    _show(prompt)
    try:
        for token in generate(
            model,
            read,
            tokens=tokens,
            window=max(config.model.context, config.model.seq_len),
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            vocabulary=tokenizer.vocabulary,
            end=tokenizer.end,
        ):
            made += 1
            _show(stream.add(token))
        _show(stream.end())
    except KeyboardInterrupt:
        pass
    seconds = time.monotonic() - begin
    _show("\n")
    click.echo(f"{made} tokens, {made / max(seconds, 1e-9):.0f} tok/s", err=True)


def _show(text: str) -> None:
    out = sys.stdout
    text = text.translate(_CONTROLS) if out.isatty() else text
    out.write(text.encode(out.encoding or "utf-8", "replace").decode(out.encoding or "utf-8"))
    out.flush()
