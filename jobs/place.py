"""Arguments that name a folder on a disk or a URI of an object store."""

from __future__ import annotations

from typing import Any

import click

from zeropp_ray.uri import Place, place


class PlaceType(click.ParamType):
    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        return place(value)


PLACE = PlaceType()
