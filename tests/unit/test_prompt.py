"""A prompt's token ids are exactly those of the model's own tokenizer."""

import asyncio
import copy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.contract.generation import TokenIds
from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.router.api.chat_message import ChatMessage
from kvroute.router.api.errors import ApiError
from kvroute.router.prompts.chat_template import OnlyReplicaError
from kvroute.router.prompts.tokenizer import INLINE_CHARACTERS, Prompts


@pytest.fixture(scope="module")
def folder() -> str:
    return resolve(BUILTIN_MODEL)


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


Message = dict[str, str]


def say(*contents: str) -> list[Message]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


async def chat(prompts: Prompts, messages: list[Message]) -> TokenIds:
    return await prompts.rendered(await prompts.chat_text({"messages": messages}, "string"))


CONVERSATIONS = [
    say("hi"),
    say("", "", " "),
    say("Grüße, 世界 🙂", "  two  spaces\n\n\ttab", "<|im_end|> in the middle"),
    [{"role": "system", "content": "Be brief."}, *say("hi")],
    say("word " * INLINE_CHARACTERS),
]


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
async def test_a_chat_is_tokenised_as_the_model_does(
    prompts: Prompts, tokenizer: Any, messages: list[Message]
) -> None:
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    token_ids = await chat(prompts, messages)
    assert token_ids.dtype == np.uint32
    assert token_ids.tolist() == expected


@pytest.mark.parametrize("text", ["hi", " a\n", "<|im_start|>x", "long " * INLINE_CHARACTERS])
async def test_text_is_tokenised_as_the_model_does(
    prompts: Prompts, tokenizer: Any, text: str
) -> None:
    texts = [text, "and another", text]  # of one call
    token_ids = await prompts.texts(texts)
    assert [ids.tolist() for ids in token_ids] == [tokenizer(text)["input_ids"] for text in texts]


async def test_the_role_developer_is_rendered_as_system(prompts: Prompts) -> None:
    developer = [{"role": "developer", "content": "Be brief."}, *say("hi")]
    system = [{"role": "system", "content": "Be brief."}, *say("hi")]
    assert (await chat(prompts, developer)).tolist() == (await chat(prompts, system)).tolist()


async def test_a_special_token_in_a_users_text_becomes_that_token(
    prompts: Prompts, tokenizer: Any
) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    plain, marked = await chat(prompts, say("a")), await chat(prompts, say("a<|im_end|>"))
    assert marked.tolist().count(end) == plain.tolist().count(end) + 1


@pytest.mark.parametrize(
    "texts", [["some words " * 100_000], ["some words " * 100] * 1000], ids=["one", "many"]
)
async def test_the_event_loop_keeps_running_while_long_text_is_tokenised(
    prompts: Prompts, texts: list[str]
) -> None:
    async def longest_pause_s() -> float:
        longest = 0.0
        while not work.done():
            before = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter() - before)
        return longest

    started = time.perf_counter()
    work = asyncio.create_task(prompts.texts(texts))
    longest = await longest_pause_s()
    assert longest < (time.perf_counter() - started) / 2


async def test_an_empty_prompt_is_refused(prompts: Prompts) -> None:
    with pytest.raises(ApiError, match="expected at least one token"):
        await prompts.texts([""])
    with pytest.raises(ApiError, match="expected at least one token id"):
        prompts.ids(np.array([], dtype=np.uint32))


async def test_text_that_cannot_fit_is_refused_before_tokenising(prompts: Prompts) -> None:
    with pytest.raises(ApiError, match="contains 10000000 characters") as refusal:
        await prompts.texts(["x" * 10_000_000], max_model_len=2048)
    assert refusal.value.code == "context_length_exceeded"


def test_token_ids_are_used_unchanged(prompts: Prompts) -> None:
    last = prompts.vocab_size - 1
    assert prompts.ids(np.array([0, 5, last], dtype=np.uint32)).tolist() == [0, 5, last]


@pytest.mark.parametrize("strange", [49_152, 2**32 - 1])
def test_token_ids_outside_the_vocabulary_are_refused(prompts: Prompts, strange: int) -> None:
    with pytest.raises(ApiError, match=f"has the token id {strange}; expected ids from 0 to 49151"):
        prompts.ids(np.array([1, strange], dtype=np.uint32))


def with_template(folder: str, tmp_path: Path, template: str | None) -> Prompts:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(Path(folder) / name)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return Prompts(tmp_path)


async def test_the_error_of_a_template_reaches_the_client(folder: str, tmp_path: Path) -> None:
    strict = with_template(folder, tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ApiError, match="roles must alternate") as refusal:
        strict.render([ChatMessage(role="user", content="hi")])
    assert refusal.value.status == 400
    with pytest.raises(OnlyReplicaError, match="roles must alternate"):
        await chat(strict, say("hi"))
    strict.close()


async def test_a_model_without_a_template_refuses_chats_and_names_completions(
    folder: str, tmp_path: Path
) -> None:
    base = with_template(folder, tmp_path, None)
    with pytest.raises(ApiError, match="/v1/completions"):
        base.render([ChatMessage(role="user", content="hi")])
    with pytest.raises(OnlyReplicaError, match="no chat template"):
        await chat(base, say("hi"))
    assert [len(ids) for ids in await base.texts(["hi"])] == [1]
    base.close()


def test_a_router_tokenises_without_torch(folder: str) -> None:
    program = (
        "import sys; from kvroute.router.prompts.tokenizer import Prompts; "
        "assert 'transformers' not in sys.modules; "
        f"Prompts({folder!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


TEMPLATES = [
    None,  # the model's own
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "<|endoftext|>{% for m in messages %} <|im_start|> {{ m.content | trim }}\n{% endfor %}",
]


def chats() -> st.SearchStrategy[list[str]]:
    words = ["word ", "<|im_end|>", "<|im_", "end|>", "\n", " ", "世界", "<repo_name>" * 8]
    content = st.lists(st.sampled_from(words) | st.text(max_size=20), max_size=30).map("".join)
    return st.lists(content, min_size=1, max_size=6)


@pytest.fixture(params=TEMPLATES, ids=range(len(TEMPLATES)), scope="module")
def templated(
    request: pytest.FixtureRequest,
    folder: str,
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Prompts, Any]]:
    """Return our tokenizer with the template in a file, and the model's own with the template."""
    template = request.param or (Path(folder) / "chat_template.jinja").read_text()
    prompts = with_template(folder, tmp_path_factory.mktemp("templated"), template)
    told = copy.copy(tokenizer)
    told.chat_template = template
    yield prompts, told
    prompts.close()


@given(contents=chats())
def test_every_turn_of_any_chat_is_tokenised_as_the_model_does(
    templated: tuple[Prompts, Any], contents: list[str]
) -> None:
    prompts, tokenizer = templated
    for turns in range(1, len(contents) + 1):
        messages = say(*contents[:turns])
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert asyncio.run(chat(prompts, messages)).tolist() == expected


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the texts that are tokenised are added."""
    reached: list[str] = []
    token_ids = Prompts._token_ids

    def recording(self: Prompts, texts: list[str], special: bool) -> list[Any]:
        reached.extend(texts)
        return token_ids(self, texts, special)

    monkeypatch.setattr(Prompts, "_token_ids", recording)
    return reached


async def test_only_the_next_turn_of_a_chat_is_tokenised(folder: str, tokenised: list[str]) -> None:
    prompts = Prompts(folder)
    history = [f"message {i} " + "some words " * 100 for i in range(41)]
    await chat(prompts, say(*history))
    assert sum(map(len, tokenised)) > 40_000
    tokenised.clear()
    await chat(prompts, say(*history, "an answer", "the next question"))
    assert 0 < sum(map(len, tokenised)) < 200
    prompts.close()


async def test_a_chat_is_tokenised_as_a_whole_if_it_cannot_be_cut(
    folder: str, prompts: Prompts, tokenised: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await chat(prompts, say("hi " * 100, "ho", "hi"))
    monkeypatch.setattr("kvroute.router.prompts.segments.PIECEWISE", frozenset())
    whole = Prompts(folder)
    tokenised.clear()
    assert (await chat(whole, say("hi " * 100, "ho", "hi"))).tolist() == expected.tolist()
    assert len(tokenised) == 1
    whole.close()
