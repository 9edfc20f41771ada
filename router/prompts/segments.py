"""Cuts text into segments that can be tokenised separately, and caches their token ids.

A tokenizer first splits a text at its added tokens, such as <|im_end|>, and then processes each
piece between them separately. So a text can be cut where an added token starts: the joined token
ids of the segments are those of the whole text. The segments of a chat are its messages, which
every later turn repeats exactly.
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

CACHE_BYTES = 64 << 20  # size of the cache: about 7 million tokens of English with their text
# Shortest segment, in characters. A shorter one would take longer to cache than to tokenise again.
SHORTEST_SEGMENT = 64
# Bytes of a cache entry besides the text and the ids: object headers and the links of the dict.
ENTRY_BYTES = 256

# White space as the tokenizers library defines it. Python's also has \x1c to \x1f.
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"  # noqa: E501

# Steps of a tokenizer that are known to process one piece at a time. Metaspace and ByteLevel may
# treat a piece at the start of the text differently. But a segment that is not the first one starts
# with an added token, so none of its pieces is at the start.
PIECEWISE = {
    *("Sequence", "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
    *("Precompiled", "Prepend", "Replace", "Strip", "StripAccents"),
    *("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace"),
    *("Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    *("BertProcessing", "RobertaProcessing", "TemplateProcessing"),
    *("BPE", "Unigram", "WordLevel", "WordPiece"),
}
# Texts between the added tokens of the probe, to check that cutting does not change the token ids.
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

    Raises:
        ValueError: the ids of a segment may depend on other text with this tokenizer.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        tokens = tokenizer.get_added_tokens_decoder().values()
        # Text is cut only at added tokens that match it verbatim. All others match normalised text,
        # and the tokenizer finds them within a segment.
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
        """Return the text's segments in order. Each but the first starts with an added token.

        Args:
            shortest_characters: a segment ends at the first cut after this many characters.
        """
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
            ValueError: cutting changes the ids.
        """
        for gap in PROBE_GAPS:
            text = gap + "".join(token + gap for token in tokens)
            whole, *segments = _ids(tokenizer, [text, *self.cut(text, shortest_characters=1)])
            if whole != [token_id for segment in segments for token_id in segment]:
                raise ValueError(f"added tokens with {gap!r} between them cannot be cut apart")


class SegmentCache:
    """A cache of the token ids of the most recently used segments. Not thread-safe."""

    def __init__(self, capacity_bytes: int = CACHE_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[str, TokenIds] = OrderedDict()  # least recently used first

    def get(self, segment: str) -> TokenIds | None:
        """Return the ids of a segment; None: they are not stored."""
        token_ids = self._entries.get(segment)
        if token_ids is not None:
            self._entries.move_to_end(segment)
        return token_ids

    def put(self, segment: str, token_ids: TokenIds) -> None:
        """Store the ids of a segment. Ids that exceed the capacity alone are not stored."""
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
    except Exception as error:  # the library raises it for a word that the model does not have
        raise ValueError(f"the tokenizer refuses the probe {texts[0]!r}") from error
    return [encoding.ids for encoding in encodings]


def _require_piecewise(tokenizer: "Tokenizer") -> None:
    """Check that the tokenizer processes texts piece by piece.

    Raises:
        ValueError: a step is unknown or random, or it processes the text as a whole.
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
    """Return a part of a tokenizer, as in tokenizer.json, and all parts inside it."""
    if part is None:
        return []
    try:
        state = json.loads(part.__getstate__())
    except Exception as error:  # the library raises it for a part that is written in Python
        raise ValueError(f"the {type(part).__name__} cannot be inspected") from error
    return list(_nested(state))


def _nested(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield step
    for name in ("normalizers", "pretokenizers", "processors"):
        for part in step.get(name, ()):
            yield from _nested(part)


def any_of(words: Collection[str]) -> str:
    """Return a pattern that matches the longest of the words at a position.

    The pattern is a tree of common prefixes. Some tokenizers have thousands of added tokens, and
    with a plain list of alternatives, a search in a page of HTML would take half a second.
    """
    branches = []
    for _, group in groupby(sorted(filter(None, words)), key=itemgetter(0)):
        similar = list(group)
        stem = commonprefix(similar)  # noqa: RUF071 (compares characters, as intended)
        branches.append(re.escape(stem) + any_of([word[len(stem) :] for word in similar]))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in words else "")
