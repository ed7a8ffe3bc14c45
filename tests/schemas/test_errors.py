"""Messages of errors show values by their beginning."""

from __future__ import annotations

import pytest

from millrace.schemas.errors import MillraceError, ParameterError, shown


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("There is no model.", "There is no model."),
        ("There is no model " + "m" * 300, "There is no model " + "m" * 199 + "…"),
        ("No '" + "a b " * 100 + "' here.", "No '" + "a b " * 49 + "a …' here."),
        ("No \"it's " + "a b " * 100 + '" here.', "No \"it's " + "a b " * 48 + 'a…" here.'),
        ("No `" + "ü" * 3_000_000 + "`: x", "No `" + "ü" * 198 + "…`: x"),
        (
            "It's one of " + "a, " * 99 + "and it's none.",
            "It's one of " + "a, " * 99 + "and it's none.",
        ),
    ],
)
def test_a_value_is_shortened_and_what_is_said_of_it_is_not(message: str, told: str) -> None:
    error = MillraceError(message)
    assert (error.message, str(error)) == (told, told)


def test_a_message_has_its_beginning_and_its_end() -> None:
    error = MillraceError("The models are: " + "a model, " * 10_000 + "that is all.")
    assert len(error.message) == 4_000
    assert error.message.startswith("The models are: a model, ")
    assert error.message.endswith("that is all.")


def test_a_parameter_is_shown_by_its_beginning() -> None:
    name = "a name " * 100
    error = ParameterError(name, f"{name} is not a field of this request; leave it out.")
    assert error.param == shown(name) == name[:199] + "…"
    assert error.message == f"{error.param} is not a field of this request; leave it out."
