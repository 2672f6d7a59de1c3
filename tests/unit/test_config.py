"""Settings: where a value comes from, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from descant.config import Settings, leaves, load_settings
from descant.errors import UserError

KEY = "tml-0123456789"


def test_defaults_are_valid_and_serve_on_loopback():
    settings = load_settings()
    assert settings.server.host == "127.0.0.1"
    assert settings.owners_by_key() == {}


def test_overrides_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path):
    config = tmp_path / "descant.toml"
    config.write_text('models = ["smollm2"]\n[server]\nport = 9000\n[http]\nlong_poll_s = 20\n')
    settings = load_settings(config, ["server.port=0", "service.seq_gap_timeout_s=5"])
    assert settings.models == ("smollm2",)
    assert settings.server.port == 0
    assert settings.http.long_poll_s == 20.0
    assert isinstance(settings.http.long_poll_s, float)
    assert settings.service.seq_gap_timeout_s == 5.0
    assert settings.server.host == Settings().server.host


def test_keys_come_from_the_file_the_table_and_the_command_line(tmp_path: Path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'alice = "{KEY}a"\n')
    config = tmp_path / "descant.toml"
    config.write_text(f'[auth]\nkeys_file = "{keys}"\n[auth.keys]\nbob = "{KEY}b"\n')
    settings = load_settings(config, [f"auth.keys.carol={KEY}c", "server.host=0.0.0.0"])
    assert settings.owners_by_key() == {f"{KEY}a": "alice", f"{KEY}b": "bob", f"{KEY}c": "carol"}
    assert KEY not in repr(settings)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        pytest.param("server.prot=1", "no setting 'server.prot'; the nearest is 'server.port'", id="a typing error"),
        pytest.param("port=1", "the nearest is 'server.port'", id="without its table"),
        pytest.param("rank.max_num_seqs=1", "the nearest is 'sample.max_num_seqs'", id="of another table"),
        pytest.param("rank.kv_cache_byte=1", "the nearest is 'sample.kv_cache_bytes'", id="of another table, nearly"),
        pytest.param(
            "rank.version_byte=1",
            "the nearest is 'quota.version_bytes' or 'offload.version_bytes'",
            id="of two other tables, nearly",
        ),
        pytest.param("server.port=many", "'many' is not a whole number", id="not a number"),
        pytest.param("server.port", "expected KEY=VALUE", id="no value"),
        pytest.param("server=1", "expected one of server.host, server.port", id="a table"),
        pytest.param("server.port.x=1", "no setting 'server.port.x'", id="too deep"),
        pytest.param("auth.keys=x", "expected auth.keys.NAME=VALUE", id="a map without a name"),
        pytest.param("server.port=70000", "expected 0 to 65535", id="port"),
        pytest.param("service.seq_gap_timeout_s=nan", "expected a finite number", id="NaN"),
        pytest.param("service.seq_gap_timeout_s=0", "expected a number above 0", id="zero seconds"),
        pytest.param("http.long_poll_s=50", "at most 40", id="longer than the SDK waits"),
        pytest.param("http.trusted_proxies=10.0.0.0/8,here", "'here' is no address", id="no network"),
        pytest.param("server.host=0.0.0.0", "there are no API keys", id="open to the world"),
        pytest.param("server.host=example.org", "there are no API keys", id="open by name"),
        pytest.param("auth.keys.alice=short", "auth.keys.alice: expected 'tml-'", id="a key the SDK refuses"),
        pytest.param("models=a,b,a", "names a model twice", id="twice"),
        pytest.param("losses.stable_reinforce=gspo", "expected one of 'importance_sampling', 'ppo'", id="other inputs"),
        pytest.param("losses.ppo=cispo", "no setting 'losses.ppo'", id="a loss with a definition"),
        pytest.param("auth.keys_file=/nonexistent/keys", "cannot read /nonexistent/keys", id="no such file"),
    ],
)
def test_a_wrong_override_says_where_and_what_was_expected(override: str, says: str):
    with pytest.raises(UserError) as caught:
        load_settings(None, [override])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("[sever]\nport = 1", "the nearest is 'server.port'", id="unknown table"),
        pytest.param('[server]\nport = "1"', "server.port is text, expected a whole number", id="text for a number"),
        pytest.param("[server]\nport = true", "server.port is true or false, expected a whole number", id="a bool"),
        pytest.param("server = 3", "server is a whole number, expected a table", id="a number for a table"),
        pytest.param("models = [1]", "models is a list, expected a list of texts", id="a list of numbers"),
        pytest.param("[auth.keys]\na = 1", "auth.keys.a is a whole number, expected text", id="a key as number"),
        pytest.param(f'[auth.keys]\na = "{KEY}"\nb = "{KEY}"', "'a' and 'b' have the same key", id="one key, two"),
        pytest.param("server = [", "is not TOML", id="not TOML"),
    ],
)
def test_a_wrong_file_says_where_and_what_was_expected(tmp_path: Path, text: str, says: str):
    config = tmp_path / "descant.toml"
    config.write_text(text)
    with pytest.raises(UserError) as caught:
        load_settings(config)
    assert says in str(caught.value)
    assert KEY not in str(caught.value)


def test_every_setting_can_be_set_from_the_command_line():
    for key, value in leaves(Settings()):
        if isinstance(value, bool | int | float | str):
            settings = load_settings(None, [f"{key}={value}"])
            assert dict(leaves(settings))[key] == value


def test_a_loss_without_a_definition_is_computed_as_the_operator_says():
    assert load_settings().losses.computed_as() == {}
    settings = load_settings(overrides=["losses.stable_reinforce=cispo"])
    assert settings.losses.computed_as() == {"stable_reinforce": "cispo"}


def test_replicas_of_one_role_are_asked_for_in_pairs():
    with pytest.raises(UserError, match=r"parallel\.train_replicas is set and parallel\.sample_replicas is not"):
        load_settings(None, ["parallel.train_replicas=1"])
    with pytest.raises(UserError, match=r"parallel\.replicas is set beside"):
        load_settings(None, ["parallel.train_replicas=1", "parallel.sample_replicas=1", "parallel.replicas=2"])
    parallel = load_settings(None, ["parallel.train_replicas=1", "parallel.sample_replicas=3"]).parallel
    assert parallel.num_replicas == 4


def test_speculation_and_batch_invariance_exclude_each_other():
    with pytest.raises(UserError, match=r"speculative\.method is 'ngram' and sample\.batch_invariant is true"):
        load_settings(None, ["speculative.method=ngram", "sample.batch_invariant=true"])
    assert load_settings(None, ["speculative.method=ngram", "speculative.num_tokens=6"]).speculative.num_tokens == 6
