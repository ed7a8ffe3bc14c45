"""The file of tools, and the list that callers see."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import yaml

from millrace.gateway.tools.catalogue import Origin, ToolCatalogue, load_tools
from millrace.schemas.errors import ConfigError, ParameterError
from tests.support.running_gateway import running_gateway

FILE = """
tools:
  weather:
    description: The weather of a city, today
    url: https://api.example.com/v1/weather
    parameters:
      type: object
      properties: {city: {type: string}}
      required: [city]
    strict: true
    timeout_s: 2.5
    max_response_bytes: 1000
    headers: {X-Units: metric}
    secret_header: {name: Authorization, env: WEATHER_KEY}
  clock:
    url: http://tools.internal:8080/now
    method: GET
    allow_private: true
"""
ENV = {"WEATHER_KEY": "Bearer abc"}


def load(folder: Path, text: str) -> ToolCatalogue:
    file = folder / "tools.yaml"
    file.write_text(text)
    return load_tools(str(file), ENV)


def test_no_file_is_no_tools() -> None:
    catalogue = load_tools("", {})
    assert list(catalogue) == []
    with pytest.raises(ParameterError, match="There are: none"):
        catalogue.definitions(["f"])


def test_every_key(tmp_path: Path) -> None:
    weather, clock = load(tmp_path, FILE)
    assert (weather.name, weather.definition.strict) == ("weather", True)
    assert weather.definition.description == "The weather of a city, today"
    assert weather.origin == Origin("https", "api.example.com", 443)
    assert (weather.method, weather.timeout_s, weather.max_response_bytes) == ("POST", 2.5, 1_000)
    assert weather.headers == ((b"x-units", b"metric"),)
    assert weather.secret == (b"authorization", b"Bearer abc")
    assert not weather.allow_private
    assert clock.origin == Origin("http", "tools.internal", 8080)
    assert (clock.method, clock.secret, clock.allow_private) == ("GET", None, True)
    assert clock.definition.parameters is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": None}, "Expected `str`, got `null` - at `$.url`"),
        ({"url": "ftp://x/"}, "url must be http:// or https://"),
        ({"url": "https:///x"}, "url must be http:// or https://"),
        ({"url": "https://a:b@x/"}, "without a user"),
        ({"url": "https://x:99999/"}, "Port out of range"),
        ({"url": "https://x/a b"}, "in ASCII"),
        ({"uri": "https://x/"}, "unknown field `uri`"),
        ({"method": "BREW"}, "Invalid enum value 'BREW' - at `$.method`"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
        ({"max_response_bytes": 0}, "max_response_bytes must be at least 1"),
        ({"parameters": {"type": "string"}}, "parameters.type must be object"),
        ({"parameters": {"properties": 7}}, "parameters is not a JSON Schema: 7 is not of type"),
        ({"headers": {"X Y": "z"}}, "headers: 'X Y' is not a header"),
        ({"headers": {"Host": "z"}}, "headers: 'Host' is not a header"),
        ({"headers": {"X": "a\r\nY: b"}}, "headers: the value of X must be one line"),
        ({"secret_header": {"name": "X", "env": "NONE"}}, "secret_header.env: the environment has"),
        ({"secret_header": {"name": "X"}}, "missing required field `env` - at `$.secret_header`"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, object], words: str) -> None:
    tools = yaml.safe_load(FILE)
    tools["tools"]["weather"] |= change
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, yaml.safe_dump(tools))
    assert caught.value.message.startswith(f"{tmp_path / 'tools.yaml'}: tool weather: ")
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tools: [", "is not valid YAML"),
        ("[]", "must hold a mapping `tools`"),
        ("tools: []", "must hold a mapping `tools`"),
        ("tools: {}\nextra: 1", "unknown keys: extra"),
        ("tools: {a b: {url: 'http://x'}}", "a tool's name must be"),
        ("tools: {7: {url: 'http://x'}}", "its name must be text"),
        ("tools: {f: 7}", "Expected `object`, got `int`"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert words in caught.value.message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_tools(str(tmp_path / "none.yaml"), {})


async def test_the_list(tmp_path: Path) -> None:
    async with (
        running_gateway(tools=load(tmp_path, FILE)) as front,
        httpx.AsyncClient(base_url=front.url) as client,
    ):
        answer = await client.get("/v1/tools")
    weather, clock = answer.json()["data"]
    assert weather["name"] == "weather"
    assert weather["parameters"]["required"] == ["city"]
    assert clock == {"name": "clock", "object": "tool", "description": "", "parameters": None}
    assert not any(word in answer.text for word in ("http", "abc", "WEATHER_KEY"))
