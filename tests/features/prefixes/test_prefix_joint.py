"""A prompt with a named prefix begins with exactly the prefix's tokens, whatever follows."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from kvroute.blocks.fingerprint import Fingerprint, fingerprints, root
from kvroute.contract.generation import TokenIds
from kvroute.features.prefixes.composer import PrefixComposer
from kvroute.features.prefixes.named_prefix import Prefix
from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.router.api.errors import ApiError
from kvroute.router.prompts.tokenizer import Prompts

BLOCK = 4
SYSTEM = {"role": "system", "content": "You are a lawyer. Rule 1: be brief. " * 5}
SOURCES: list[dict[str, Any]] = [
    {"prompt": "You are a lawyer. Rule 1: be brief. " * 5},
    {"prompt": "你是律师。请简短回答。" * 9},
    {"messages": [SYSTEM]},
    {"messages": [SYSTEM, {"role": "user", "content": "Hi"}]},
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(resolve(BUILTIN_MODEL))


@pytest.fixture(scope="module")
def composer(prompts: Prompts) -> PrefixComposer:
    return PrefixComposer(prompts)


@pytest.fixture
def altered(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Prompts]]:
    """Yield a function that makes prompts with another chat template or a BOS token."""
    made: list[Prompts] = []

    def alter(template: str | None = None, bos: str | None = None) -> Prompts:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if bos is not None:
            special = [(bos, tokenizer.token_to_id(bos))]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=special
            )
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        own = (folder / "chat_template.jinja").read_text()
        (tmp_path / "chat_template.jinja").write_text(template or own)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        made.append(Prompts(tmp_path))
        return made[-1]

    yield alter
    for prompts in made:
        prompts.close()


async def declared(composer: PrefixComposer, source: dict[str, Any]) -> Prefix:
    return Prefix("law", 1, await composer.prefix_tokens(source), source)


async def follow(composer: PrefixComposer, prefix: Prefix, endpoint: str, text: str) -> TokenIds:
    if endpoint == "chat":
        body = {"messages": [{"role": "user", "content": text}]}
        return await composer.chat(body, prefix, "string", max_model_len=8192)
    (token_ids,) = await composer.completions([text], prefix, max_model_len=8192)
    return token_ids


async def alone(prompts: Prompts, endpoint: str, text: str) -> TokenIds:
    """Return the tokens of a prompt without a prefix."""
    if endpoint == "chat":
        body = {"messages": [{"role": "user", "content": text}]}
        return await prompts.chat(body, "string", max_model_len=8192)
    (token_ids,) = await prompts.completions([text], max_model_len=8192)
    return token_ids


def blocks(token_ids: TokenIds) -> list[Fingerprint]:
    return fingerprints(token_ids, block_size=BLOCK, parent=root(model="m", block_size=BLOCK))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("source", SOURCES, ids=range(len(SOURCES)))
@given(text=st.text() | st.sampled_from(["", " ", "\n", "\u0301", "<|im_end|>", "s", "。"]))
def test_the_prefixs_blocks_are_the_same_before_any_text(
    composer: PrefixComposer, source: dict[str, Any], endpoint: str, text: str
) -> None:
    async def both() -> tuple[Prefix, TokenIds]:
        prefix = await declared(composer, source)
        return prefix, await follow(composer, prefix, endpoint, text)

    prefix, token_ids = asyncio.run(both())
    full = prefix.full_blocks(BLOCK)
    assert full >= 10
    assert blocks(token_ids)[:full] == blocks(prefix.token_ids)


@given(text=st.text())
def test_a_chat_after_messages_has_the_tokens_of_the_whole_chat(
    composer: PrefixComposer, prompts: Prompts, text: str
) -> None:
    async def both() -> tuple[TokenIds, TokenIds]:
        prefix = await declared(composer, {"messages": [SYSTEM]})
        body = {"messages": [SYSTEM, {"role": "user", "content": text}]}
        whole = await prompts.chat(body, "string", max_model_len=8192)
        return await follow(composer, prefix, "chat", text), whole

    joined, whole = asyncio.run(both())
    assert joined.tolist() == whole.tolist()


async def test_token_ids_follow_unchanged(composer: PrefixComposer) -> None:
    prefix = await declared(composer, SOURCES[0])
    (token_ids,) = await composer.completions(
        [np.array([5, 6], dtype=np.uint32)], prefix, max_model_len=8192
    )
    assert token_ids.tolist() == [*prefix.token_ids.tolist(), 5, 6]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_a_bos_token_is_there_once_and_first(
    altered: Callable[..., Prompts], endpoint: str
) -> None:
    template = "<|endoftext|>{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    prompts = altered(template, bos="<|endoftext|>")
    composer = PrefixComposer(prompts)
    prefix = await declared(composer, SOURCES[0])
    joined = await follow(composer, prefix, endpoint, "Hello there")
    for token_ids in (joined, await alone(prompts, endpoint, "Hello there")):
        assert token_ids[0] == 0
        assert token_ids.tolist().count(0) == 1


async def test_a_template_that_renders_a_prefix_differently_later_is_refused(
    altered: Callable[..., Prompts],
) -> None:
    template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    composer = PrefixComposer(altered(template))
    with pytest.raises(ApiError, match="differently when other messages follow") as refusal:
        await composer.prefix_tokens({"messages": [SYSTEM]})
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


async def test_messages_that_change_the_prefix_before_them_are_refused(
    altered: Callable[..., Prompts],
) -> None:
    template = "{% if messages[-1].content == 'shout' %}!{% endif %}"
    messages = "{% for m in messages %}{{ m.content }}{% endfor %}"
    composer = PrefixComposer(altered(template + messages))
    prefix = await declared(composer, {"messages": [SYSTEM]})
    assert len(await follow(composer, prefix, "chat", "say")) > len(prefix.token_ids)
    with pytest.raises(ApiError, match="put its messages into the request instead"):
        await follow(composer, prefix, "chat", "shout")


@pytest.mark.parametrize("source", [SOURCES[0], SOURCES[2]], ids=["prompt", "messages"])
async def test_a_prefix_leaves_room_for_a_request(
    composer: PrefixComposer, source: dict[str, Any]
) -> None:
    tokens = len(await composer.prefix_tokens(source))
    assert len(await composer.prefix_tokens(source, max_model_len=tokens + 1)) == tokens
    with pytest.raises(ApiError, match="leaves no room for a request") as refusal:
        await composer.prefix_tokens(source, max_model_len=tokens)
    assert refusal.value.code == "context_length_exceeded"


async def test_a_prefix_that_cannot_fit_is_refused_before_tokenising(
    composer: PrefixComposer,
) -> None:
    with pytest.raises(ApiError, match="contains 10000000 characters"):
        await composer.prefix_tokens({"prompt": "x" * 10_000_000}, max_model_len=2048)


async def test_the_joint_is_as_wide_as_the_prompt(
    composer: PrefixComposer, prompts: Prompts
) -> None:
    prefix = await declared(composer, {"prompt": "hello wor"})
    (joined,) = await composer.completions(["ld"], prefix, max_model_len=8192)
    begin, end, whole = await prompts.texts(["hello wor", "ld", "hello world"])
    assert joined.tolist() == np.concatenate([begin, end]).tolist()
    assert joined.tolist() != whole.tolist()
