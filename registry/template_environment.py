"""The sandbox that chat templates run in, which keeps their own text apart from content."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from string import Formatter
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from millrace.registry.template_text import TemplateText, joined, literal


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it adds nothing."""

    tags = {"generation"}  # noqa: RUF012  declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(CodeGenerator):
    """Compiles each string that the template's source holds to a ``TemplateText``."""

    environment: TemplateEnvironment

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802  (its name there)
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(self.environment.name_of(value))
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self.environment.name_of("".join(group))


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one model's templates, with the conventions of the hub.

    What a template writes is a ``TemplateText``: its spans are the strings of the template's
    source. Values that the template is given are content unless they are such texts themselves.
    """

    code_generator_class = _CodeGenerator
    concat = staticmethod(joined)

    def __init__(self, now: Callable[[], datetime.datetime]) -> None:
        # The optimizer would fold lists of literals to plain strings, which count as content.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_GenerationBlock, loopcontrols],
        )
        self.literals: list[str] = []
        self.filters |= {"tojson": _tojson, "join": _join, "replace": _replace}
        self.filters |= {"safe": _safe, "title": _title, "indent": _indent}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    def name_of(self, text: str) -> str:
        """The expression that stands for a string of the source in compiled code."""
        self.literals.append(literal(text))
        return f"environment.literals[{len(self.literals) - 1}]"

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Make methods of content return ``TemplateText``, so that literals passed to them stay
        marked."""
        return super().getattr(TemplateText(obj) if type(obj) is str else obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's version of ``str.format``. The literal parts of a template's own format
        stay marked."""
        formatted = super().wrap_str_format(value)
        form = getattr(value, "__self__", None)
        if formatted is None or not (isinstance(form, TemplateText) and form.spans):
            return formatted

        def wrapper(*args: Any, **kwargs: Any) -> str:
            text = formatted(*args, **kwargs)
            if value.__name__ == "format_map":
                parts = joined(self._formatted(form, (), args[0]))
            else:
                parts = joined(self._formatted(form, args, kwargs))
            # Fields of other kinds give another text, which counts as content.
            return parts if parts == text else text

        return wrapper

    def _formatted(
        self, form: TemplateText, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[str]:
        """The parts of a format with fields of a number, a name, or neither."""
        number = 0
        for before, field, _, _ in Formatter().parse(str.__getitem__(form, slice(None))):
            # A form with content in it is not taken apart any further.
            yield literal(before) if form.spans == ((0, len(form)),) else before
            if field is not None:
                key = field or str(number)
                number += not field
                value = kwargs[key] if key in kwargs else args[int(key)] if key.isdigit() else ""
                yield value if isinstance(value, str) else format(value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja's own filter would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@jinja2.pass_eval_context
def _join(
    context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None
) -> str:
    text: str = FILTERS["join"](context, value, _as_text(d), attribute)
    return text


@jinja2.pass_eval_context
def _replace(
    context: nodes.EvalContext, s: str, old: str, new: str, count: int | None = None
) -> str:
    text: str = FILTERS["replace"](context, _as_text(s), old, new, count)
    return text


def _safe(value: Any) -> str:
    """Nothing is escaped here: it has no effect on what the template wrote."""
    is_written = isinstance(value, TemplateText) and value.spans
    text: str = value if is_written else FILTERS["safe"](value)
    return text


def _title(value: Any) -> str:
    text: str = FILTERS["title"](value)
    if isinstance(value, TemplateText) and len(value) == len(text):
        return TemplateText(text, value.spans)
    return text


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """As jinja's filter, which joins lines by a method of plain strings."""
    if not (isinstance(s, TemplateText) and s.spans):
        text: str = FILTERS["indent"](s, width, first, blank)
        return text
    margin = width if isinstance(width, str) else " " * width
    top, *lines = joined((s, "\n")).splitlines()
    indented = [joined((margin, line)) if line or blank else line for line in lines]
    return TemplateText("\n").join([joined((margin, top)) if first else top, *indented])


def _as_text(value: Any) -> Any:
    return TemplateText(value) if type(value) is str else value
