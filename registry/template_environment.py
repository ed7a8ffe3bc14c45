"""Sandbox of chat templates, which separates the templates' own text from content."""

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
    """``{% generation %}`` block, which marks the assistant's text for training.

    Serving needs no mark, so only the block's text is rendered.
    """

    tags = {"generation"}  # noqa: RUF012  declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(CodeGenerator):
    """Code generator that compiles each string in the template's source to a ``TemplateText``."""

    environment: TemplateEnvironment

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802  (jinja's name)
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
    """Environment of one model's templates, with the conventions of the hub.

    Strings of the template's source are ``TemplateText`` with spans. Values given to the template
    are content, unless they are such texts themselves.
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
        """Return the expression for a string of the source in compiled code."""
        self.literals.append(literal(text))
        return f"environment.literals[{len(self.literals) - 1}]"

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute. Methods of content return ``TemplateText``, so that literals passed
        to them stay marked.
        """
        return super().getattr(TemplateText(obj) if type(obj) is str else obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandbox's version of ``str.format``. The literal parts of a template's own
        format stay marked.
        """
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
            # Other kinds of fields give another text, which counts as content.
            return parts if parts == text else text

        return wrapper

    def _formatted(
        self, form: TemplateText, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield the parts of a format whose fields have a number, a name, or neither."""
        number = 0
        for before, field, _, _ in Formatter().parse(str.__getitem__(form, slice(None))):
            # A format with content in it is not split any further.
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
    """Return plain JSON; jinja's own filter would escape it for HTML."""
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
    """Return the value. Nothing is escaped here, so it has no effect on the template's text."""
    is_written = isinstance(value, TemplateText) and value.spans
    text: str = value if is_written else FILTERS["safe"](value)
    return text


def _title(value: Any) -> str:
    text: str = FILTERS["title"](value)
    if isinstance(value, TemplateText) and len(value) == len(text):
        return TemplateText(text, value.spans)
    return text


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Indent like jinja's filter, which joins lines by a method of plain strings."""
    if not (isinstance(s, TemplateText) and s.spans):
        text: str = FILTERS["indent"](s, width, first, blank)
        return text
    margin = width if isinstance(width, str) else " " * width
    top, *lines = joined((s, "\n")).splitlines()
    indented = [joined((margin, line)) if line or blank else line for line in lines]
    return TemplateText("\n").join([joined((margin, top)) if first else top, *indented])


def _as_text(value: Any) -> Any:
    return TemplateText(value) if type(value) is str else value
