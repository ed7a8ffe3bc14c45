"""Which modules a config means: by a name, a pattern or a class."""

from __future__ import annotations

import re
from collections.abc import Iterable

from millrace.registry.checkpoints.json_fields import JsonFields

_PATTERN = "re:"


def rank(target: str, module_name: str) -> int | None:
    """0 if ``target`` is the module's name, 1 if it is a pattern that the name begins with, 2 if it
    is the module's class, which the name tells; None if it is none of these."""
    if target == module_name:
        return 0
    if target.startswith(_PATTERN):
        return 1 if re.match(target.removeprefix(_PATTERN), module_name) else None
    is_embedding = module_name.endswith("embed_tokens")
    return 2 if target == ("Embedding" if is_embedding else "Linear") else None


def read_targets(fields: JsonFields, name: str) -> tuple[str, ...]:
    """The targets in the list ``name``, none if it is absent. Raises CheckpointError naming the
    field for a list of anything else, or a pattern that is none."""
    targets = fields.strings(name)
    for target in targets:
        pattern = target.removeprefix(_PATTERN)
        if pattern != target and not is_pattern(pattern):
            raise fields.bad(name, f"names and patterns, of which {target} is none")
    return targets


def read_modules(fields: JsonFields, *names: str) -> tuple[str, ...]:
    """The lists ``names`` as targets. Their elements stand for whole components of a module's name,
    as ``lm_head``, ``mlp.gate`` or ``model.layers.0`` do, unless they are patterns already."""
    listed: Iterable[str] = (name for field in names for name in read_targets(fields, field))
    return tuple(
        name if name.startswith(_PATTERN) else pattern(rf"(.*\.)?{re.escape(name)}(\.|$)")
        for name in listed
    )


def pattern(regular_expression: str) -> str:
    """The target that matches names which begin with ``regular_expression``."""
    return _PATTERN + regular_expression


def is_pattern(regular_expression: str) -> bool:
    """Whether it is one."""
    try:
        re.compile(regular_expression)
    except re.error:
        return False
    return True
