"""Streams of a busy engine and of an idle one are compared by what is in them."""

from tests.support.bodies import joined_events


def chat(*texts: str) -> str:
    """An event for each text, with its log-probabilities."""
    entries = ['{"token":"' + '"},{"token":"'.join(text.split()) + '"}' for text in texts]
    return "\n\n".join(
        f'data: {{"delta":{{"content":"{text}"}},"logprobs":{{"content":[{entry}]}},'
        f'"finish_reason":null,"sequence_number":{number}}}'
        for number, (text, entry) in enumerate(zip(texts, entries, strict=True))
    )


def test_it_is_the_same_however_tokens_were_joined() -> None:
    assert joined_events(chat("a ", "b ", "c ")) == joined_events(chat("a b ", "c "))


def test_it_differs_where_a_text_or_a_token_does() -> None:
    assert joined_events(chat("a ", "b ")) != joined_events(chat("a ", "c "))
    other = chat("a ", "b ").replace('"token":"b"', '"token":"x"')
    assert joined_events(chat("a ", "b ")) != joined_events(other)
