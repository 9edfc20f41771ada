"""Errors of vLLM name the options of kvroute. These are messages of vLLM 0.32."""

from argparse import ArgumentParser

import pytest

from kvroute.replica.vllm_engine.http import option_names

OPTIONS = (  # of `vllm serve`
    "--enable-mm-embeds",
    "--max-logprobs",
    "--pooler-config",
    "--stream-interval",
    "--tensor-parallel-size",
    "--trust-request-chat-template",
)


@pytest.mark.parametrize(
    ("vllms", "ours"),
    [
        ("set `--enable-mm-embeds` to", "set `--engine-arg enable_mm_embeds=true` to"),
        (
            "but --trust-request-chat-template is not set.",
            "but --engine-arg trust_request_chat_template=true is not set.",
        ),
        ("Set max_logprobs (--max-logprobs)", "Set max_logprobs (--engine-arg max_logprobs=VALUE)"),
        (
            "with --pooler-config.task.",
            r"with --engine-arg 'pooler_config={\"task\": \"VALUE\"}'.",
        ),
        ("`--tensor-parallel-size`", "`--gpus-per-replica`"),
        ("the server's `--stream-interval`", "the server's `--stream-interval`"),
        ("your text has --no-such-option", "your text has --no-such-option"),
    ],
)
def test_an_option_of_vllm_becomes_ours(vllms: str, ours: str) -> None:
    parser = ArgumentParser()
    for option in OPTIONS:
        parser.add_argument(option)
    option_names.learn(parser)
    assert option_names.replaced(vllms.encode()).decode() == ours
