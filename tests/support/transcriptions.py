"""Forms for the routes of recordings, and what is compared of their answers."""

import json
import re
from collections.abc import Mapping, Sequence

from tests.support.bodies import comparable
from tests.support.tiny_audio import CLIP_S, RATE, sound

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
Fields = Mapping[str, str | Sequence[str]]

SHORT: Fields = {"language": "en", "max_completion_tokens": "8"}
LONG: Fields = {"language": "en", "max_completion_tokens": "40"}
VERBOSE = {"response_format": "verbose_json"}
FORMATS = ("json", "text", "verbose_json", "srt", "vtt", "diarized_json", "roman")
FORMS: list[Fields] = [
    *({**SHORT, "response_format": name} for name in FORMATS),
    {**LONG, **VERBOSE},
    {**SHORT, "stream": "true"},
    {**SHORT, "stream": "true", "stream_include_usage": "true"},
    {**SHORT, "prompt": "a cat", "temperature": "0.8", "seed": "3"},
    {**SHORT, **VERBOSE, "timestamp_granularities[]": ["word", "segment"]},
    {**SHORT, "use_beam_search": "true", "n": "2"},
    {},  # vLLM finds out the language
    {"stream": "true"},
    # refused
    {**SHORT, "language": "xx"},
    {**SHORT, "prompt": "a" * 200},
    {**SHORT, "temperature": "hot"},
    {**SHORT, "stream_include_usage": "true"},
]
SOUNDS = {
    "short": sound(1),
    "of several clips": sound(2, seconds=2.5 * CLIP_S),
    "at another rate": sound(3, rate=RATE // 2),
    "not a recording": b"no sound",
    "empty": b"",
}


def plain(data: bytes) -> str:
    """Return an answer without ids, and a stream without the borders of its events.

    These depend on how fast the tokens were read.
    """
    events = re.findall(r"data: (\{.*\})", data.decode())
    if not events:
        return comparable(data)
    parsed = list(map(json.loads, events))
    choices = [choice for event in parsed for choice in event.get("choices", ())]
    text = "".join(choice["delta"]["content"] for choice in choices)
    ends = [choice.get("finish_reason") for choice in choices if choice.get("finish_reason")]
    return json.dumps([text, ends, parsed[-1].get("usage"), parsed[0]["object"]])
