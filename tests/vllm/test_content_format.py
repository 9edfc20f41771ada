"""kvroute sees in a chat template the same form of messages as vLLM does."""

from pathlib import Path

import pytest

from kvroute.replica.attached_engine.content_format import content_format

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

TEMPLATES = sorted((Path(__file__).parents[1] / "templates").glob("*.jinja"))
OTHERS = {
    "loop": "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
    "filter": "{% for m in messages %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}",
    "variable": "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{% endfor %}"
    "{% endfor %}",
    "macro": "{% macro show(c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "text": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "slice": "{% for m in messages[1:] %}{% for p in m.content[1:] %}{% endfor %}{% endfor %}",
}


def of_vllm(template: str) -> str:
    from vllm.renderers.hf import _detect_content_format

    return str(_detect_content_format(template, default="string"))


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
def test_templates_of_known_models(file: Path) -> None:
    template = file.read_text()
    assert content_format(template) == of_vllm(template)


@pytest.mark.parametrize("template", OTHERS.values(), ids=OTHERS)
def test_each_way_to_loop_over_content(template: str) -> None:
    assert content_format(template) == of_vllm(template)


def test_a_model_without_a_template_has_no_format() -> None:
    assert content_format("") == ""


def test_a_broken_template_is_taken_for_one_of_text() -> None:
    assert content_format("{% for %}") == "string"
