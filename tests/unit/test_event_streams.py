"""Streams of a busy engine and of an idle one are compared by what is in them."""

from tests.support.event_streams import Joined


def chat(*texts: str) -> str:
    """An event for each text, with its log-probabilities."""
    entries = ['{"token":"' + '"},{"token":"'.join(text.split()) + '"}' for text in texts]
    return "\n\n".join(
        f'data: {{"delta":{{"content":"{text}"}},"logprobs":{{"content":[{entry}]}},'
        f'"finish_reason":null,"sequence_number":{number}}}'
        for number, (text, entry) in enumerate(zip(texts, entries, strict=True))
    )


def test_it_is_the_same_however_tokens_were_joined() -> None:
    assert Joined(chat("a ", "b ", "c ")) == Joined(chat("a b ", "c "))


def test_it_differs_where_a_text_or_a_token_does() -> None:
    assert Joined(chat("a ", "b ")) != Joined(chat("a ", "c "))
    other = chat("a ", "b ").replace('"token":"b"', '"token":"x"')
    assert Joined(chat("a ", "b ")) != Joined(other)


def test_numbers_of_tokens_and_of_events_count() -> None:
    event = 'data: {"choices":[{"text":"a","logprobs":{"text_offset":[7]}}]}'
    assert Joined(event) != Joined(event.replace("7", "8"))
    assert Joined(chat("a ", "b ")) != Joined(chat("a ", "b ").replace('number":1', 'number":2'))
