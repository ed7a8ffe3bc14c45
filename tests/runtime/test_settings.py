"""Configuration: every mistake is named before anything starts."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest

from millrace.runtime.settings import load_config
from millrace.schemas.config import Config, NatsConfig
from millrace.schemas.errors import ConfigError
from millrace.schemas.redaction import redact_urls


def test_defaults() -> None:
    assert load_config(None, {"HOME": "/", "PATH": ""}) == Config()


def test_a_file_and_variables_above_it(tmp_path: Path) -> None:
    toml = tmp_path / "millrace.toml"
    toml.write_text('log_level = "debug"\n[nats]\nurl = "nats://a"\nack_wait_s = 3\n')
    env = {
        "MILLRACE_NATS__URL": "nats://b",
        "MILLRACE_WORKER__ENGINE__MAX_NUM_SEQUENCES": "7",
        "MILLRACE_SCHEDULER__MODELS": "demo, other",
        "MILLRACE_WORKER__FLUSH_INTERVAL_MS": "2.5",
    }
    config = load_config(str(toml), env)
    assert config.log_level == "debug"
    assert config.nats.url == "nats://b"
    assert config.nats.ack_wait_s == 3.0
    assert config.worker.engine.max_num_sequences == 7
    assert config.worker.flush_interval_ms == 2.5
    assert config.scheduler.models == ("demo", "other")


def test_a_budget_in_several_currencies(tmp_path: Path) -> None:
    name = "MILLRACE_GATEWAY__TIERS__FREE__MONTHLY_BUDGET"
    assert load_config(None, {name: "50"}).gateway.tiers.free.monthly_budget == 50
    assert load_config(None, {name: "null"}).gateway.tiers.free.monthly_budget is None
    named = load_config(None, {name: '{"EUR": 50, "USD": 12.5}'})
    assert named.gateway.tiers.free.monthly_budget == {"EUR": 50, "USD": Decimal("12.5")}
    yaml = tmp_path / "millrace.yaml"
    yaml.write_text("gateway: {tiers: {free: {monthly_budget: {EUR: 50}}}}\n")
    assert load_config(str(yaml), {}).gateway.tiers.free.monthly_budget == {"EUR": 50}
    for text, complaint in (
        ('{"EUR": ', "not a table in JSON"),
        ('{"euro": 1}', "three capital letters"),
        ('{"EUR": -1}', "between 0 and 9000000 EUR"),
        ("50 EUR", name),
    ):
        with pytest.raises(ConfigError, match=complaint):
            load_config(None, {name: text})


def test_yaml_and_the_file_variable(tmp_path: Path) -> None:
    yaml = tmp_path / "millrace.yaml"
    yaml.write_text("gateway:\n  port: 9000\nscheduler:\n  models: [demo]\n")
    config = load_config(None, {"MILLRACE_CONFIG": str(yaml)})
    assert config.gateway.port == 9000
    assert config.scheduler.models == ("demo",)
    (tmp_path / "empty.yml").write_text("")
    assert load_config(str(tmp_path / "empty.yml"), {}) == Config()


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("MILLRACE_NATS__ULR", "x", "ulr"),
        ("MILLRACE_NAST__URL", "x", "nast"),
        ("MILLRACE_NATS", "x", "nats is a section"),
        ("MILLRACE_LOG_LEVEL__X", "x", "log_level has nothing below it"),
        ("MILLRACE_GATEWAY__PORT", "many", "MILLRACE_GATEWAY__PORT"),
        ("MILLRACE_NATS__ACK_WAIT_S", "-1", "nats.ack_wait_s"),
        ("MILLRACE_NATS__ACK_WAIT_S", "inf", "nats.ack_wait_s"),
    ],
)
def test_bad_variables(name: str, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, {name: text})
    assert named in refused.value.message


@pytest.mark.parametrize(
    ("file_name", "text", "named"),
    [
        ("a.toml", "[nats]\nulr = 1\n", "ulr"),
        ("a.toml", '[gateway]\nport = "x"\n', "gateway.port"),
        ("a.toml", "nats", "a.toml"),
        ("a.yaml", "a: [", "a.yaml"),
        ("a.yaml", "- 1\n", "table"),
        ("a.json", "{}", ".toml, .yaml"),
    ],
)
def test_bad_files(tmp_path: Path, file_name: str, text: str, named: str) -> None:
    path = tmp_path / file_name
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(str(path), {})
    assert named in refused.value.message


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(str(tmp_path / "none.toml"), {})


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"NATS__USER": "a", "NATS__PASSWORD": "b", "NATS__TOKEN": "c"}, "nats.token"),
        ({"NATS__URL": "nats://a:b@c", "NATS__NKEY_SEED": "SU"}, "user data in nats.url"),
        ({"NATS__CREDS_FILE": "a", "NATS__NKEY_SEED": "SU"}, "nats.creds_file"),
        ({"NATS__PASSWORD": "b"}, "nats.password also needs nats.user"),
        ({"NATS__USER": "b"}, "nats.user also needs nats.password"),
        ({"NATS__KEY_FILE": "k"}, "nats.key_file also needs nats.certificate_file"),
        ({"NATS__CERTIFICATE_FILE": "k"}, "nats.certificate_file also needs nats.key_file"),
        ({"REDIS__URL": "redis://a:b@c", "REDIS__PASSWORD": "d"}, "user data in redis.url"),
        ({"REDIS__USER": "a"}, "redis.user also needs redis.password"),
        ({"REDIS__SENTINELS": "a:1,b:2"}, "redis.sentinel_master"),
        ({"REDIS__SENTINELS": "a", "REDIS__SENTINEL_MASTER": "m"}, "redis.sentinels: a"),
        ({"REDIS__SENTINELS": "a:99999", "REDIS__SENTINEL_MASTER": "m"}, "redis.sentinels: a"),
        ({"REDIS__SENTINEL_MASTER": "m"}, "redis.sentinel_master also needs redis.sentinels"),
        ({"REDIS__SENTINEL_PASSWORD": "m"}, "redis.sentinel_password also needs redis.sentinels"),
        (
            {"KAFKA__USER": "a", "KAFKA__PASSWORD": "b"},
            "kafka.user also needs kafka.sasl_mechanism",
        ),
        ({"KAFKA__SASL_MECHANISM": "PLAIN", "KAFKA__USER": "a"}, "kafka.password"),
        ({"KAFKA__SASL_MECHANISM": "GSSAPI"}, "KAFKA__SASL_MECHANISM"),
        ({"KAFKA__CERTIFICATE_FILE": "a"}, "kafka.certificate_file also needs kafka.key_file"),
        ({"CLICKHOUSE__URL": "https://a:b@c"}, "clickhouse.url must have no user data"),
        ({"CLICKHOUSE__URL": "http://c", "CLICKHOUSE__CA_FILE": "a"}, "must begin with https://"),
    ],
)
def test_settings_of_connections_that_do_not_go_together(
    variables: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, {f"MILLRACE_{name}": text for name, text in variables.items()})
    assert named in refused.value.message


def test_secrets_are_not_shown() -> None:
    url = "nats://root:hunter2@one:4222,nats://two"
    config = Config(
        nats=NatsConfig(
            url=url, user="someone", password="s3cr3t/@", token="t0ken", nkey_seed="SU1"
        )
    )
    shown = f"{config!r} {config}"
    for secret in ("hunter2", "s3cr3t", "t0ken", "SU1", "root"):
        assert secret not in shown
    assert "someone" in shown
    assert "nats://***@one:4222,nats://two" in shown
    assert "password=''" in repr(NatsConfig())


def test_values_from_files(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("  s3cr3t with spaces \r\n\n")
    models = tmp_path / "models"
    models.write_text("demo, other\n")
    port = tmp_path / "port"
    port.write_text("9000\n")
    config = load_config(
        None,
        {
            "MILLRACE_REDIS__PASSWORD_FILE": str(password),
            "MILLRACE_SCHEDULER__MODELS_FILE": str(models),
            "MILLRACE_GATEWAY__PORT_FILE": str(port),
            # A setting of its own, whose value is a path.
            "MILLRACE_REDIS__CA_FILE": "/etc/ca.pem",
        },
    )
    assert config.redis.password == "  s3cr3t with spaces "
    assert config.scheduler.models == ("demo", "other")
    assert config.gateway.port == 9000
    assert config.redis.ca_file == "/etc/ca.pem"


def test_every_setting_may_come_from_a_file(tmp_path: Path) -> None:
    """The file of every setting is read before its text is parsed."""
    nowhere = str(tmp_path / "nowhere")
    for name in _settings(Config):
        variable = f"MILLRACE_{name.upper().replace('.', '__')}_FILE"
        with pytest.raises(ConfigError, match=f"{variable}: .*nowhere cannot be read"):
            load_config(None, {variable: nowhere})


def _settings(section: type[msgspec.Struct]) -> list[str]:
    names = []
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            names += [f"{field.name}.{below}" for below in _settings(field.type)]
        else:
            names.append(field.name)
    return names


@pytest.mark.parametrize("kind", ["missing", "a folder", "empty", "no text", "a bad value"])
def test_files_of_values_that_cannot_be_used(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "value"
    if kind == "a folder":
        path.mkdir()
    elif kind != "missing":
        content = {"empty": b"\n", "no text": b"\xff\xfe", "a bad value": b"many\n"}[kind]
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        load_config(None, {"MILLRACE_GATEWAY__PORT_FILE": str(path)})
    named = "MILLRACE_GATEWAY__PORT" if kind == "a bad value" else "MILLRACE_GATEWAY__PORT_FILE"
    assert named in refused.value.message
    assert kind == "a bad value" or str(path) in refused.value.message


def test_a_value_and_its_file_are_one_too_many(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_text("a")
    env = {"MILLRACE_NATS__TOKEN_FILE": str(path), "MILLRACE_NATS__TOKEN": "b"}
    with pytest.raises(ConfigError, match="MILLRACE_NATS__TOKEN and MILLRACE_NATS__TOKEN_FILE"):
        load_config(None, env)


@pytest.mark.parametrize("by_file", [True, False])
def test_a_setting_that_was_renamed_says_what_took_its_place(
    tmp_path: Path, *, by_file: bool
) -> None:
    path = tmp_path / "millrace.yaml"
    path.write_text("worker: {prefixes_per_tenant: true}" if by_file else "")
    env = {} if by_file else {"MILLRACE_WORKER__PREFIXES_PER_TENANT": "true"}
    with pytest.raises(ConfigError, match=r'worker\.prefix_scope, which is "tenant".*"shared"'):
        load_config(str(path), env)


_SERVICES = {
    "MILLRACE": "10.96.0.1",
    "MILLRACE_GATEWAY": "fd00::1",
    "MILLRACE_GATEWAY_HTTP2": "10.96.0.1",
    # A Service may have two dashes in its name.
    "MILLRACE__GATEWAY": "10.96.0.1",
    "MILLRACE_NATS": "10.96.0.1",
}


@pytest.mark.parametrize(("service", "host"), _SERVICES.items())
def test_variables_of_kubernetes_services_are_ignored(service: str, host: str) -> None:
    variables = {
        f"{service}_SERVICE_HOST": host,
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_SERVICE_PORT_HTTP": "8000",
        f"{service}_SERVICE_PORT_GRPC_WEB": "8001",
        f"{service}_PORT": f"tcp://{host}:8000",
        f"{service}_PORT_8000_TCP": f"tcp://{host}:8000",
        f"{service}_PORT_8000_TCP_PROTO": "tcp",
        f"{service}_PORT_8000_TCP_PORT": "8000",
        f"{service}_PORT_8000_TCP_ADDR": host,
        f"{service}_PORT_53_UDP": f"udp://{host}:53",
        f"{service}_PORT_53_UDP_PROTO": "udp",
    }
    config = load_config(None, variables | {"MILLRACE_GATEWAY__PORT": "9000"})
    assert config == load_config(None, {"MILLRACE_GATEWAY__PORT": "9000"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MILLRACE_GATEWAY_PORT", "8000"),  # for MILLRACE_GATEWAY__PORT
        ("MILLRACE_PORT", "8000"),
        ("MILLRACE_METRICS_PORT", "9464"),
        ("MILLRACE_CLICKHOUSE_SERVE_PORT", "8123"),
        ("MILLRACE_SERVICE_HOST", "gateway"),
        ("MILLRACE_GATEWAY_HOST", "0.0.0.0"),
        ("MILLRACE_GATEWAY__PORTS", "tcp://10.0.0.1:8000"),
        ("MILLRACE_NATS_URL", "nats://10.0.0.1:4222"),
        # A Service named millrace-clickhouse--serve would set it: the setting wins.
        ("MILLRACE_CLICKHOUSE__SERVE_PORT", "tcp://10.0.0.1:8123"),
    ],
)
def test_what_only_resembles_them_is_an_error(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config(None, {name: value})


_MASTER = {"MILLRACE_REDIS__SENTINELS": {"MILLRACE_REDIS__SENTINEL_MASTER": "m"}}
_URLS = {
    "nats.url": "nats://user:{}@n1:4222",
    "redis.url": "redis://user:{}@r1:6379/0",
    "tracing.endpoint": "https://user:{}@collector:4318",
    "worker.engine.url": "http://user:{}@engine:8000/v1",
}


@pytest.mark.parametrize("end", ["#", "?", "/", "[", "]", "\t"])
@pytest.mark.parametrize(("setting", "url"), _URLS.items())
def test_a_password_in_an_address_has_to_be_encoded(setting: str, url: str, end: str) -> None:
    password = f"xq7{end}zw9"
    variable = f"MILLRACE_{setting.upper().replace('.', '__')}"
    with pytest.raises(ConfigError, match="Percent-encode the user name and the password") as told:
        load_config(None, {variable: url.format(password)})
    assert setting in told.value.message
    assert "xq7" not in told.value.message
    assert "zw9" not in told.value.message
    assert load_config(None, {variable: url.format(quote(password, safe=""))})


@pytest.mark.parametrize("password", ["p@ss", "p:ss", "p%ss", "p&ss=", "p+ss", "100%25", "pä ss"])
@pytest.mark.parametrize(("setting", "url"), _URLS.items())
def test_what_ends_no_password_is_left_alone(setting: str, url: str, password: str) -> None:
    load_config(None, {f"MILLRACE_{setting.upper().replace('.', '__')}": url.format(password)})


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MILLRACE_NATS__URL", "nats://user:xq7,zw9@n1:4222", "comma in a password"),
        ("MILLRACE_NATS__URL", "nats://user:99,zw9@n1,nats://n2", "comma in a password"),
        ("MILLRACE_NATS__URL", "nats://n1:4222,nats://user:xq7#zw9@n2", "nats.url has '#'"),
        ("MILLRACE_CLICKHOUSE__URL", "http://user:xq7#zw9@c1:8123", "clickhouse.username and"),
        ("MILLRACE_KAFKA__BOOTSTRAP_SERVERS", "user:xq7#zw9@k1:9092", "kafka.user and"),
        ("MILLRACE_REDIS__SENTINELS", "user:zw9@s1:26379", "is not host:port"),
    ],
)
def test_other_places_of_a_password(variable: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as told:
        load_config(None, {variable: value, **_MASTER.get(variable, {})})
    assert "zw9" not in told.value.message
    assert "99" not in told.value.message


def test_several_servers_need_no_scheme() -> None:
    for url in ("n1:4222,n2:4222", "n1:4222,user:secret@n2:4222", "nats://n1,nats://u:p@n2"):
        assert load_config(None, {"MILLRACE_NATS__URL": url}).nats.url == url


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nats://u:p@n1:4222,nats://n2", "nats://***@n1:4222,nats://n2"),
        ("nats://u:p,q@n1:4222,nats://n2", "nats://***@n1:4222,nats://n2"),
        ("redis://:p#w@r1:6379/0", "redis://***@r1:6379/0"),
        ("n1:4222,u:p@n2:4222", "***@n2:4222"),
        ("n1:4222,n2:4222", "n1:4222,n2:4222"),
    ],
)
def test_addresses_are_shown_without_user_data(text: str, shown: str) -> None:
    assert redact_urls(text) == shown
