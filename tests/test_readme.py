"""What the README says is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from replica.model import BUILTIN_MODEL
from tests.metrics_table import metrics_table
from tests.serving import Cluster
from tests.settings_table import settings_table

README = (Path(__file__).parent.parent / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


def block(language: str, containing: str) -> str:
    """The README's block of that language that has the text in it."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return next(str(found) for found in blocks if containing in found)


def test_every_setting_stands_in_the_readme_as_it_is() -> None:
    assert settings_table() in README


def test_every_metric_stands_in_the_readme_as_it_is() -> None:
    assert metrics_table() in README


def test_the_built_in_model_is_named_as_it_is() -> None:
    assert f'"model": "{BUILTIN_MODEL}"' in README


def test_the_two_commands_exist() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", block("sh", "make serve"), flags=re.MULTILINE)
    assert targets == ["serve", "test"]
    assert all(f"\n{target}:" in makefile for target in targets)


@pytest.mark.timeout(240)
def test_the_curl_example_is_answered(simulated_cluster: Cluster) -> None:
    command = block("sh", "curl").replace(ADDRESS, simulated_cluster.url)
    shown = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert '"finish_reason":' in shown.stdout


@pytest.mark.timeout(240)
def test_the_client_example_finds_the_document_cached(simulated_cluster: Cluster) -> None:
    program = block("python", "OpenAI").replace(ADDRESS, simulated_cluster.url)
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    cached = [int(count) for count in re.findall(r"(\d+) of them cached", shown)]
    assert cached[0] == 0
    assert cached[1] > 1000


@pytest.mark.timeout(240)
def test_the_prefix_examples_work_one_after_the_other(simulated_cluster: Cluster) -> None:
    declare = block("sh", "/v1/prefixes").replace(ADDRESS, simulated_cluster.url)
    shown = subprocess.run(declare, shell=True, capture_output=True, text=True, timeout=60)
    assert '"id":"legal-v3"' in shown.stdout
    program = block("python", "prefix_id").replace(ADDRESS, simulated_cluster.url)
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
