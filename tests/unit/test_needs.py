"""Options that need another option are refused with the reason."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.local.before_start import home_problems
from kvroute.settings.help import SettingsError
from kvroute.settings.needs import NEEDS
from kvroute.settings.options.model import ModelOptions
from kvroute.settings.serve import load


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_cache": "/x"}, "--disk-cache is '/x', which needs .* --host-cache-gb"),
        ({"disk_cache_gb": 5}, "--disk-cache-gb is .* which needs --disk-cache"),
        ({"own_replicas": 2}, "--own-replicas is '2', which needs .* --attach"),
        ({"attach": ["http://a:1"], "replicas": 3}, "--replicas is '3', .* --own-replicas"),
        ({"shrink_delay_s": 5}, "--max-replicas"),
        ({"metrics": False, "metrics_port_range": "9400-9499"}, "leave out --no-metrics"),
        ({"simulated_blocks": 9}, "--engine simulated"),
    ],
)
def test_an_option_that_has_no_effect_is_refused_with_what_it_needs(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load(options)


def test_an_option_with_what_it_needs_is_accepted() -> None:
    load({"host_cache_gb": 4, "disk_cache": "/x", "disk_cache_gb": 5})
    load({"attach": ["http://a:1"], "own_replicas": 1, "max_model_len": 4096})


def test_an_option_for_all_models_needs_an_effect_on_one_of_them() -> None:
    with_adapters = {"model": "a", "lora_root": "/tmp"}
    load({"max_loras": 3, "models": [with_adapters, {"model": "b"}]})
    with pytest.raises(SettingsError, match="--max-loras is '3'"):
        load({"max_loras": 3, "models": [{"model": "a"}, {"model": "b"}]})
    with pytest.raises(SettingsError, match=r"models\[1\]: --max-loras is '3'"):
        load({"models": [with_adapters, {"model": "b", "max_loras": 3}]})


def test_each_need_names_options_that_exist_and_its_remedy_is_one() -> None:
    for need in NEEDS:
        assert {*need.options} <= ModelOptions.model_fields.keys()
        assert "--" in need.text


def test_the_doctor_refuses_such_options_with_the_same_words() -> None:
    examined = CliRunner().invoke(app, ["doctor", "--before-start", "--", "--disk-cache", "/x"])
    assert examined.exit_code == 1
    assert "which needs host memory for blocks" in " ".join(examined.output.split())


def test_a_home_folder_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    blocked = tmp_path / "file"
    blocked.touch()
    for home in (tmp_path, blocked):
        monkeypatch.setenv("HOME", str(home))
        problems = list(home_problems(load({})))
    assert [problem.is_final for problem in problems] == [True]
    assert f"the home folder is {str(blocked)!r}, and it cannot be written" in problems[0].text
    assert "\n" not in problems[0].text


def test_without_anything_to_write_the_home_folder_is_not_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    assert not list(home_problems(load({"model": "another/model"})))
