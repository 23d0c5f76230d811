"""Settings: where they come from, who wins, and what is refused."""

import pytest

from shared.errors import StartError
from shared.settings import (
    ExecutorSettings,
    GatewaySettings,
    SchedulerSettings,
    UpSettings,
    flags_of,
    load,
    secrets_of,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("SPLITFLAP_CONFIG", raising=False)
    monkeypatch.delenv("SPLITFLAP_API_KEY", raising=False)


def gateway(*flags):
    return load(GatewaySettings, flags, "splitflap gateway")


def test_a_flag_wins_over_the_environment_and_that_over_the_file(monkeypatch, tmp_path):
    file = tmp_path / "splitflap.toml"
    file.write_text("port = 1001\nhost = '127.0.0.2'\nping_interval_s = 3")
    monkeypatch.setenv("SPLITFLAP_PORT", "1002")
    monkeypatch.setenv("SPLITFLAP_HOST", "127.0.0.3")
    settings = gateway("--config", str(file), "--port", "1003")
    assert (settings.port, settings.host, settings.ping_interval_s) == (1003, "127.0.0.3", 3)


def test_one_file_serves_all_processes(monkeypatch, tmp_path):
    file = tmp_path / "splitflap.toml"
    file.write_text("port = 1001\nblock_size = 4")
    monkeypatch.setenv("SPLITFLAP_CONFIG", str(file))
    assert gateway().port == 1001
    assert load(ExecutorSettings, [], "splitflap executor").block_size == 4


@pytest.mark.parametrize("settings_class", [GatewaySettings, SchedulerSettings, ExecutorSettings])
def test_what_up_tells_its_children_is_what_they_take(settings_class):
    """Every default, said aloud, is a legal flag."""
    told = {name: value for name, value in load(settings_class, [], "x") if value is not None}
    settings = settings_class.model_construct(_fields_set=set(told), **told)
    assert load(settings_class, flags_of(settings, settings_class), "x") == settings


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--port", "0"], "--port '0': .*must be at least 1"),
        (["--port", "many"], "--port 'many'"),
        (["--prot", "1"], "--prot"),
        (["--por", "1"], "--por"),
        (["--block-size", "16"], "--block-size"),
        (["--config", "/nowhere.toml"], "nowhere.toml: cannot be read"),
    ],
)
def test_what_is_wrong_is_named(flags, complaint):
    with pytest.raises(StartError, match=complaint):
        gateway(*flags)


def test_an_unknown_name_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("SPLITFLAP_PROT", "1")
    with pytest.raises(StartError, match="no setting is called prot"):
        gateway()


def test_an_unknown_name_in_the_file_is_refused(tmp_path):
    file = tmp_path / "splitflap.toml"
    file.write_text("prot = 1")
    with pytest.raises(StartError, match="no setting is called prot"):
        gateway("--config", str(file))


def test_up_has_a_metrics_port_for_each_and_refuses_one_for_both():
    with pytest.raises(StartError, match="--metrics-port"):
        load(UpSettings, ["--metrics-port", "9000"], "up")


def test_metrics_are_for_this_machine_unless_told_otherwise():
    assert gateway().metrics_address is None
    assert gateway("--metrics-port", "9000").metrics_address == ("127.0.0.1", 9000)
    told = gateway("--metrics-port", "9000", "--metrics-host", "0.0.0.0")
    assert told.metrics_address == ("0.0.0.0", 9000)


def test_up_hands_each_process_what_is_its_own():
    settings = load(UpSettings, ["--model", "toy", "--block-size", "4", "--port", "1001"], "up")
    assert flags_of(settings, ExecutorSettings) == ["--model=toy", "--block-size=4"]
    assert flags_of(settings, GatewaySettings) == ["--model=toy", "--port=1001"]


def test_a_switch_reaches_a_child_process_either_way():
    for switch, is_on in (("--enable-prefix-caching", True), ("--no-enable-prefix-caching", False)):
        told = load(UpSettings, [switch], "splitflap up")
        passed_on = flags_of(told, SchedulerSettings)
        assert passed_on == [switch]
        scheduler = load(SchedulerSettings, passed_on, "splitflap scheduler")
        assert scheduler.enable_prefix_caching is is_on


# ------------------------------------------------------------------ API keys


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ([], ()),
        (["--api-key", "a"], ("a",)),
        (["--api-key", "a", "--api-key=b~"], ("a", "b~")),
        (["--api-key", "a,b"], ("a", "b")),
        (["--api-key", '["a,b", "c"]'], ("a,b", "c")),
        (["--api-key", "a,a"], ("a",)),
    ],
)
def test_keys_by_flags(flags, keys):
    assert gateway(*flags).api_key == keys


@pytest.mark.parametrize(("given", "keys"), [("a", ("a",)), ("a,b", ("a", "b")), ('["a"]', ("a",))])
def test_keys_by_the_environment(monkeypatch, given, keys):
    monkeypatch.setenv("SPLITFLAP_API_KEY", given)
    assert gateway().api_key == keys


@pytest.mark.parametrize(("line", "keys"), [("'a'", ("a",)), ("['a', 'b,c']", ("a", "b,c"))])
def test_keys_by_the_file(tmp_path, line, keys):
    file = tmp_path / "splitflap.toml"
    file.write_text(f"api_key = {line}")
    assert gateway("--config", str(file)).api_key == keys


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("", "key 1 of 1 is empty"),
        ("secret,", "key 2 of 2 is empty"),
        ("secret key", "key 1 of 1 is no token"),
        ("secret\x7f", "key 1 of 1 is no token"),
        ("s\u00e9cret", "key 1 of 1 is no token"),
        ('["secret"', "begins as a JSON list and is none"),
        ('["secret", 5]', "takes one key, or a list of keys"),
    ],
)
@pytest.mark.parametrize("by", ["flag", "environment"])
def test_a_key_that_is_none_is_refused_and_not_repeated(monkeypatch, by, given, complaint):
    if by == "environment":
        monkeypatch.setenv("SPLITFLAP_API_KEY", given)
    with pytest.raises(StartError, match=complaint) as caught:
        gateway(*([f"--api-key={given}"] if by == "flag" else []))
    assert "--api-key" in str(caught.value)
    assert "cret" not in str(caught.value)


def test_keys_are_in_no_command_line_but_reach_the_gateway(monkeypatch):
    settings = load(UpSettings, ["--api-key", "a,b", "--port", "1001"], "up")
    assert flags_of(settings, GatewaySettings) == ["--port=1001"]
    assert secrets_of(settings, ExecutorSettings) == {}
    ((name, value),) = secrets_of(settings, GatewaySettings).items()
    monkeypatch.setenv(name, value)
    assert gateway().api_key == ("a", "b")
    assert "'a'" not in repr(settings)


# ------------------------------------------------------------------ origins


def test_origins_reach_the_gateway():
    flags = ["--allowed-origins", "https://a.example,http://b:3000", "--allowed-origins", "*"]
    settings = load(UpSettings, flags, "up")
    assert settings.allowed_origins == ("https://a.example", "http://b:3000", "*")
    handed_on = flags_of(settings, GatewaySettings)
    assert gateway(*handed_on).allowed_origins == settings.allowed_origins


@pytest.mark.parametrize("origin", ["example.org", "https://a/path", "https://a/", "", "* "])
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(StartError, match=r"--allowed-origins .*write https://example\.org"):
        gateway(f"--allowed-origins={origin}")
