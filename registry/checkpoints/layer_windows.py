"""Which layers of a checkpoint attend through a sliding window, and how wide it is."""

from __future__ import annotations

from millrace.registry.checkpoints.families import Family, Windows
from millrace.registry.checkpoints.json_fields import JsonFields

_SLIDING = "sliding_attention"
_FULL = "full_attention"
_MAX_WINDOW_LAYERS = 28  # of a Qwen file that does not name it


def read_windows(
    fields: JsonFields, family: Family, num_layers: int
) -> tuple[int | None, tuple[int, ...]]:
    """(window in tokens, the layers that have it); (None, ()) if none has.

    Raises CheckpointError naming the field for a window that the family would not compute.
    """
    window = _window(fields, family)
    if window is None:
        layers: tuple[int, ...] = ()
    elif family.windows is Windows.SWITCHED_BY_LAYER:
        first = fields.get("max_window_layers")
        if first != 0:  # zero layers without a window is a fair answer, and no positive integer
            first = fields.positive_int("max_window_layers", _MAX_WINDOW_LAYERS)
        layers = tuple(range(first, num_layers))
    else:
        layers = tuple(range(num_layers))
    kinds = fields.get("layer_types")
    if kinds is not None:
        layers = _listed_layers(fields, family, layers, window, num_layers)
    return (window, layers) if layers else (None, ())


def _window(fields: JsonFields, family: Family) -> int | None:
    switched = family.windows in (Windows.SWITCHED_ALL_LAYERS, Windows.SWITCHED_BY_LAYER)
    if switched and not fields.boolean("use_sliding_window", default=False):
        return None
    if family.windows is Windows.NONE:
        if fields.boolean("use_sliding_window", default=False):
            raise fields.bad("use_sliding_window", "false: this architecture has no windows")
        return None
    if family.sliding_window is None and fields.get("sliding_window") is None:
        return None
    if fields.is_null("sliding_window"):
        return None
    return fields.positive_int("sliding_window", family.sliding_window)


def _listed_layers(
    fields: JsonFields,
    family: Family,
    implied: tuple[int, ...],
    window: int | None,
    num_layers: int,
) -> tuple[int, ...]:
    kinds = fields.get("layer_types")
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in (_SLIDING, _FULL) for kind in kinds)
    ):
        raise fields.bad("layer_types", f"{num_layers} of {_FULL} and {_SLIDING}, one a layer")
    listed = tuple(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)
    if listed and window is None:
        raise fields.bad("layer_types", f"{_FULL} in every layer, as there is no sliding window")
    if family.windows is not Windows.SWITCHED_BY_LAYER and listed != implied:
        raise fields.bad("layer_types", "the same in every layer for this architecture")
    return listed
