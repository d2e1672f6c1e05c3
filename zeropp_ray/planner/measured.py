"""What the parts of a model take, from a file of ``zeropp profile``: what was measured of one cut, for any other."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from zeropp_ray.config import RunConfig
from zeropp_ray.errors import ConfigError
from zeropp_ray.planner.cost_file import CUT, identity, read_costs, refuse_another
from zeropp_ray.planner.sizes import Measured


def measured(path: str | Path, config: RunConfig, name: str) -> Measured:
    """Seconds of the embedding, of one block and of the head, of the model and dtype of ``config``.

    A block takes what it does in the chunks between the first and the last one; what these take beyond their blocks is
    that of embedding and head. ``name``: how an error calls the setting. Raises ConfigError for a file of something
    else, or of less than three chunks.
    """
    of, costs = read_costs(path, name)
    layout = [key for key in of if key.startswith("parallel.") or key == CUT]  # what was measured of one serves any
    there = {key: value for key, value in of.items() if key not in layout}
    here = {key: value for key, value in identity(config, ()).items() if key not in layout}
    refuse_another(there, here, f"{name} = {str(path)!r}")
    blocks, size = of.get(CUT), of.get("parallel.microbatch_size")
    if not (isinstance(size, int) and isinstance(blocks, list) and len(blocks) == len(costs.F) and all(blocks)):
        raise ConfigError(f"{name} = {str(path)!r}: is damaged: not of what cut; measure anew with: zeropp profile")
    if len(blocks) < 3:
        raise ConfigError(
            f"{name} = {str(path)!r}: of {len(blocks)} chunks, and what a block takes shows from the third on; measure "
            "with: zeropp profile --set parallel.chunks=2, or more"
        )

    def parts(seconds: tuple[float, ...]) -> tuple[float, float, float]:
        block = fmean(seconds[c] / blocks[c] for c in range(1, len(blocks) - 1))
        return max(0.0, seconds[0] - blocks[0] * block), block, max(0.0, seconds[-1] - blocks[-1] * block)

    embed, block, head = zip(*map(parts, (costs.F, costs.B, costs.W)), strict=True)
    return Measured(size, embed, block, head)
