"""Cuts text into segments whose token ids, joined, are the token ids of the whole text.

A tokenizer first takes its added tokens, such as <|im_end|>, out of the text, and then works on
each piece between them separately. So text can be cut where an added token starts: a chat's
messages become segments, which every later turn repeats exactly.
"""

import json
import re
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby, pairwise
from operator import itemgetter
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from kvroute.contract.generation import TokenIds

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CACHE_BYTES = 64 << 20  # about 7 million tokens of English with their text
SHORTEST_SEGMENT = 64  # characters; a shorter one costs more to cache than to tokenise again
ENTRY_BYTES = 256  # overhead of an entry without its text and ids: two headers, a slot and a link

# White space as the tokenizers library defines it. Python adds \x1c to \x1f.
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"  # noqa: E501

# Steps that are known to process one piece at a time. Metaspace and ByteLevel may treat a piece at
# the very start of the text differently. A segment that is not at the start begins with an added
# token, so this never happens to its pieces.
PIECEWISE = {
    *("Sequence", "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
    *("Precompiled", "Prepend", "Replace", "Strip", "StripAccents"),
    *("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace"),
    *("Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    *("BertProcessing", "RobertaProcessing", "TemplateProcessing"),
    *("BPE", "Unigram", "WordLevel", "WordPiece"),
}
PROBE_GAPS = (
    "",
    " ",
    "\n",
    "a",
    " Two words ",
    "\n\n \t",
    "\u0301e\u0301",
    "\x1c\x85",
    "1 +\u2581",
)


class Cutter:
    """Cuts text where a tokenizer's added tokens start.

    Raises ValueError for a tokenizer whose ids may depend on text outside the segment.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        tokens = tokenizer.get_added_tokens_decoder().values()
        # The others match normalised text; the tokenizer finds these inside a segment.
        verbatim = [token for token in tokens if not token.normalized]
        if not verbatim:
            raise ValueError("no added token is matched verbatim; there is nowhere to cut")
        if any(token.single_word for token in tokens):
            raise ValueError("an added token depends on the characters beside it (single_word)")
        if any(token.lstrip and token.content[0] in WHITE_SPACE for token in tokens):
            raise ValueError("an added token can be swallowed by the one before it (lstrip)")
        _require_piecewise(tokenizer)
        self._tokens = re.compile(any_of([token.content for token in verbatim]))
        self._lstrip = {token.content for token in verbatim if token.lstrip}
        self._probe(tokenizer, [token.content for token in tokens])

    def cut(self, text: str, *, shortest_characters: int = SHORTEST_SEGMENT) -> list[str]:
        """Return the text's segments, in order; all but the first start with an added token."""
        starts, end = [0], 0
        for match in self._tokens.finditer(text):
            start = match.start()
            if match[0] in self._lstrip:  # the white space before it belongs to the token
                start = end + len(text[end:start].rstrip(WHITE_SPACE))
            end = match.end()
            if start - starts[-1] >= shortest_characters:
                starts.append(start)
        return [text[a:b] for a, b in pairwise([*starts, len(text)])]

    def _probe(self, tokenizer: "Tokenizer", tokens: list[str]) -> None:
        """Check that cutting does not change this tokenizer's ids for a probe text.

        Raises:
            ValueError: it does.
        """
        for gap in PROBE_GAPS:
            text = gap + "".join(token + gap for token in tokens)
            whole, *segments = _ids(tokenizer, [text, *self.cut(text, shortest_characters=1)])
            if whole != [token_id for segment in segments for token_id in segment]:
                raise ValueError(f"added tokens with {gap!r} between them cannot be cut apart")


class SegmentCache:
    """The token ids of the most recently used segments. Without a lock, so for one thread only."""

    def __init__(self, capacity_bytes: int = CACHE_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[str, TokenIds] = OrderedDict()  # least recently used first

    def get(self, segment: str) -> TokenIds | None:
        token_ids = self._entries.get(segment)
        if token_ids is not None:
            self._entries.move_to_end(segment)
        return token_ids

    def put(self, segment: str, token_ids: TokenIds) -> None:
        """Store the ids, unless they alone exceed the cache's capacity."""
        size = _size_bytes(segment, token_ids)
        if segment in self._entries or size > self._capacity_bytes:
            return
        self._entries[segment] = token_ids
        self._used_bytes += size
        while self._used_bytes > self._capacity_bytes:
            self._used_bytes -= _size_bytes(*self._entries.popitem(last=False))


def _size_bytes(segment: str, token_ids: TokenIds) -> int:
    return sys.getsizeof(segment) + token_ids.nbytes + ENTRY_BYTES


def _ids(tokenizer: "Tokenizer", texts: list[str]) -> list[list[int]]:
    try:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # the library raises no narrower one: a word unknown to the model
        raise ValueError(f"the tokenizer refuses the probe {texts[0]!r}") from error
    return [encoding.ids for encoding in encodings]


def _require_piecewise(tokenizer: "Tokenizer") -> None:
    """Check that the tokenizer processes texts piece by piece.

    Raises:
        ValueError: a step is unknown or random, or it processes the whole text.
    """
    if tokenizer.encode_special_tokens:
        raise ValueError("special tokens are tokenised as text; there is nowhere to cut")
    if getattr(tokenizer.model, "dropout", None):
        raise ValueError("the model is random (BPE dropout)")
    steps: list[Mapping[str, Any]] = [{"type": type(tokenizer.model).__name__}]
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor):
        steps += _steps(part)
    for step in steps:
        if step["type"] not in PIECEWISE:
            raise ValueError(f"the step {step['type']} is not known to work piece by piece")


def _steps(part: Any) -> list[Mapping[str, Any]]:
    """Return a tokenizer's part as in tokenizer.json, followed by its nested parts."""
    if part is None:
        return []
    try:
        state = json.loads(part.__getstate__())
    except Exception as error:  # the library raises no narrower one: a part written in Python
        raise ValueError(f"the {type(part).__name__} cannot be inspected") from error
    return list(_nested(state))


def _nested(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield step
    for name in ("normalizers", "pretokenizers", "processors"):
        for part in step.get(name, ()):
            yield from _nested(part)


def any_of(words: Collection[str]) -> str:
    """Return a pattern that matches the longest of the words at a position.

    Common beginnings are tried only once: some tokenizers add thousands of tokens, and a plain list
    of alternatives takes half a second for a page of HTML.
    """
    branches = []
    for _, group in groupby(sorted(filter(None, words)), key=itemgetter(0)):
        alike = list(group)
        stem = commonprefix(alike)  # noqa: RUF071 (by character is what we want)
        branches.append(re.escape(stem) + any_of([word[len(stem) :] for word in alike]))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in words else "")
