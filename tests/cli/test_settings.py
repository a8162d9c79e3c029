"""Where settings come from, and what a wrong one says."""

import pytest

from kvrail.config.settings import DecodeSettings, PrefillSettings, RouterSettings, UpSettings
from kvrail.errors import ConfigError


def write(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path, monkeypatch):
    path = write(tmp_path, "[prefill]\nport = 1\nmax_running = 2\npage_size = 3\nmax_batch_tokens = 4\n")
    monkeypatch.setenv("KVRAIL_PREFILL_PORT", "11")
    monkeypatch.setenv("KVRAIL_PREFILL_MAX_RUNNING", "12")
    settings = PrefillSettings.load({"port": "21", "max_batch_tokens": "24"}, path)
    assert (settings.port, settings.max_running, settings.page_size) == (21, 12, 3)
    assert settings.max_batch_tokens == 24  # with no variable between flag and file
    assert settings.max_waiting == PrefillSettings.model_fields["max_waiting"].default


def test_a_table_beats_the_top_of_the_file_and_concerns_one_process_alone(tmp_path):
    path = write(tmp_path, 'page_size = 16\nlog_level = "debug"\n[decode]\npage_size = 32\n[up]\ndecode_workers = 2\n')
    assert DecodeSettings.load({}, path).page_size == 32
    assert PrefillSettings.load({}, path).page_size == 16
    assert RouterSettings.load({}, path).log_level == "debug"  # and it does not choke on page_size
    assert UpSettings.load({}, path).decode_workers == 2


def test_lists_are_written_with_commas(monkeypatch):
    assert RouterSettings.load({"decode_workers": "a:1, b:2"}).decode_workers == ("a:1", "b:2")
    monkeypatch.setenv("KVRAIL_ROUTER_PREFILL_WORKERS", "")
    monkeypatch.setenv("KVRAIL_ROUTER_API_KEYS", "one,two")
    settings = RouterSettings.load()
    assert settings.prefill_workers == ()
    assert settings.api_keys == ("one", "two")


def test_plain_construction_takes_python_values_and_the_environment(monkeypatch):
    monkeypatch.setenv("KVRAIL_ROUTER_DECODE_WORKERS", "d:9")
    settings = RouterSettings(port=0, prefill_workers=("p:1",))
    assert (settings.port, settings.prefill_workers, settings.decode_workers) == (0, ("p:1",), ("d:9",))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": "70000"}, ["--port", "'70000'", "65535"]),
        ({"port": "http"}, ["--port", "'http'", "integer"]),
        ({"kv_dtype": "int4"}, ["--kv-dtype", "'int4'", "'bfloat16'", "'float8_e5m2'"]),
        ({"device": "gpu"}, ["--device", "'gpu'", "cuda:N"]),
        ({"page_size": "0"}, ["--page-size", "'0'", "greater than 0"]),
        ({"prefix_cache": "perhaps"}, ["--prefix-cache", "'perhaps'", "boolean"]),
        ({"transfer_timeout_s": "inf"}, ["--transfer-timeout-s", "'inf'", "1000000000"]),
        ({"step_timeout_s": "nan"}, ["--step-timeout-s", "'nan'"]),
        ({"max_runing": 3}, ["--max-runing", "kvrail prefill", "max_running"]),
    ],
)
def test_a_wrong_flag_is_named_with_its_value_and_the_remedy(flags, words):
    with pytest.raises(ConfigError) as raised:
        PrefillSettings.load(flags)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("address", ["decode", "decode:", ":7002", "decode:0", "decode:70000", "decode:x"])
def test_an_address_needs_host_and_port(address):
    with pytest.raises(ConfigError, match="host:port"):
        RouterSettings.load({"decode_workers": f"good:1,{address}"})


def test_a_router_needs_a_decode_worker():
    with pytest.raises(ConfigError, match="--decode-workers"):
        RouterSettings.load({"decode_workers": ""})


def test_no_workers_of_both_roles_leave_the_others_as_they_are(tmp_path):
    assert RouterSettings.load({}, write(tmp_path, "[router]\nworkers = []\n")) == RouterSettings.load({})


@pytest.mark.parametrize("name", [name for name in RouterSettings.model_fields if name.endswith(("_s", "_ms"))])
def test_a_duration_has_an_end(name):
    """Peers and timers refuse longer ones, once for each request."""
    assert getattr(RouterSettings.load({name: "1e9"}), name) == 1e9
    for value in ("inf", "1.1e9", "nan"):
        with pytest.raises(ConfigError, match=f"'{value}' is not accepted"):
            RouterSettings.load({name: value})


def test_a_wrong_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("KVRAIL_DECODE_PAGE_SIZE", "many")
    with pytest.raises(ConfigError, match=r"KVRAIL_DECODE_PAGE_SIZE.*'many'"):
        DecodeSettings.load({})
    assert DecodeSettings.load({"page_size": 8}).page_size == 8  # the flag wins, so the variable does not matter
    assert PrefillSettings.load({}).page_size == 64


def test_an_unknown_environment_variable_is_refused(monkeypatch):
    monkeypatch.setenv("KVRAIL_DECODE_PAGESIZE", "16")
    with pytest.raises(ConfigError, match=r"KVRAIL_DECODE_PAGESIZE.*did you mean KVRAIL_DECODE_PAGE_SIZE"):
        DecodeSettings.load({})


@pytest.mark.parametrize(("mib", "frame"), [(1, 1 << 17), (8, 1 << 20), (512, 64 << 20), (4096, 64 << 20)])
def test_transfer_memory_holds_several_frames(mib, frame):
    assert DecodeSettings.load({"transfer_memory_mib": mib}).max_frame_bytes == frame
    assert PrefillSettings.load({"transfer_memory_mib": mib}).max_frame_bytes == 64 << 20


def test_variables_that_kubernetes_makes_of_services_are_explained(monkeypatch):
    monkeypatch.setenv("KVRAIL_ROUTER_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ConfigError, match="enableServiceLinks: false"):
        RouterSettings.load({})


def test_an_api_key_is_not_repeated_in_errors_and_logs(tmp_path):
    path = write(tmp_path, "[router]\napi_keys = 12345678\n")
    with pytest.raises(ConfigError) as raised:
        RouterSettings.load({}, path)
    assert "12345678" not in str(raised.value)
    assert "12345678" not in repr(RouterSettings.load({"api_keys": "12345678"}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[prefill]\nport = 'x'\n", ["port in", "cluster.toml", "'x'"]),
        ("[prefill]\nprt = 1\n", ["prt", "port"]),
        ("page_sizes = 1\n", ["page_sizes", "page_size"]),
        ("local_prefill_tokens = 1\n", ["local_prefill_tokens", "[decode]"]),
        ("[prefil]\nport = 1\n", ["prefil", "[prefill]"]),
        ("prefill = 3\n", ["prefill = 3", "[prefill]"]),
        ("port = = 1\n", ["not TOML", "line 1"]),
    ],
)
def test_a_wrong_file_is_named_with_the_key(tmp_path, text, words):
    with pytest.raises(ConfigError) as raised:
        PrefillSettings.load({}, write(tmp_path, text))
    for word in words:
        assert word in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        PrefillSettings.load({}, tmp_path / "none.toml")


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        PrefillSettings.load({}).port = 3
