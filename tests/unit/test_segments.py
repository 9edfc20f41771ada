"""Text cut at added tokens has the ids of the whole text, or its tokenizer is refused."""

import itertools
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, Trainer, UnigramTrainer, WordPieceTrainer

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.router.prompts.segments import ENTRY_BYTES, Cutter, SegmentCache

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n\treturn x  + 1\n\n",
    "Grüße 12",
]
NAMES = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|im_end|>\n",
    "<|im",
    "\n\n",
    "\n\n\n",
    "END",
]
WHITE = ["", " ", "  ", "\n", "\t", "\x85", "\x1c", "\u3000", "\u200b"]


def tokenizer(
    model: models.Model,
    *,
    normalizer: normalizers.Normalizer | None = None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
) -> Tokenizer:
    """Return a BPE model trained on a few words, so that it has merges within and across words."""
    bare = Tokenizer(model)
    if normalizer:
        bare.normalizer = normalizer
    if pre_tokenizer:
        bare.pre_tokenizer = pre_tokenizer
    bare.train_from_iterator(CORPUS, trainer(model))
    return bare


def trainer(model: models.Model) -> Trainer:
    if isinstance(model, models.BPE):
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        return BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    unknown = AddedToken("[UNK]", special=True, normalized=False)
    if isinstance(model, models.Unigram):
        return UnigramTrainer(
            vocab_size=60, unk_token="[UNK]", special_tokens=[unknown], show_progress=False
        )
    return WordPieceTrainer(vocab_size=100, special_tokens=[unknown], show_progress=False)


def byte_level(*, add_prefix_space: bool = False) -> Tokenizer:
    split = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return tokenizer(models.BPE(), pre_tokenizer=split)


def metaspace(scheme: str) -> Tokenizer:
    split = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme == "always")
    return tokenizer(models.Unigram(), pre_tokenizer=split)


def llama_like() -> Tokenizer:
    normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return tokenizer(models.BPE(), normalizer=normalizer)


def stripping() -> Tokenizer:
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    return tokenizer(models.BPE(), normalizer=normalizer, pre_tokenizer=pre_tokenizers.Whitespace())


def word_piece() -> Tokenizer:
    return tokenizer(
        models.WordPiece(unk_token="[UNK]"),
        normalizer=normalizers.BertNormalizer(lowercase=True),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )


BARE: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level with a prefix space": lambda: byte_level(add_prefix_space=True),
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "llama-like": llama_like,
    "stripping": stripping,
    "word piece": word_piece,
}
# Added tokens: (lstrip, rstrip, normalized) of each of NAMES in turn.
FLAGS: dict[str, list[tuple[bool, bool, bool]]] = {
    "plain": [(False, False, False)],
    "rstrip": [(False, True, False)],
    "lstrip and rstrip": [(True, True, False)],
    "mixed": [(True, False, False), (False, False, True), (False, True, False), (False,) * 3],
}


@cache
def complete(bare: str, flags: str) -> Tokenizer:
    made = BARE[bare]()
    for name, (lstrip, rstrip, normalized) in zip(NAMES, itertools.cycle(FLAGS[flags])):
        lstrip = lstrip and not name[0].isspace()  # would be refused
        made.add_tokens([AddedToken(name, lstrip=lstrip, rstrip=rstrip, normalized=normalized)])
    return made


@cache
def builtin() -> Tokenizer:
    return Tokenizer.from_file(str(Path(resolve(BUILTIN_MODEL)) / "tokenizer.json"))


@cache
def cutter(tokenizer: Tokenizer) -> Cutter:
    return Cutter(tokenizer)


def texts(names: list[str]) -> st.SearchStrategy[str]:
    """Return texts with many added tokens, parts of tokens, and white space around them."""
    names = sorted(set(names))
    almost = [part for name in names for part in (name[:-1], name[1:], name.upper(), name[::-1])]
    pieces = st.one_of(
        st.sampled_from(names),
        st.sampled_from(almost),
        st.sampled_from(WHITE),
        st.sampled_from(
            ["the fox", "Lazy", "12", "\u0301", "\ufb01", "\u2581", "世界", "🙂", "'s"]
        ),
        st.text(max_size=8),
    )
    return st.lists(pieces, max_size=24).map("".join)


def ids(tokenizer: Tokenizer, parts: list[str]) -> list[int]:
    encodings = tokenizer.encode_batch_fast(parts, add_special_tokens=False)
    return [token_id for encoding in encodings for token_id in encoding.ids]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("bare", BARE)
@given(text=texts(NAMES), shortest=st.sampled_from([1, 1, 5, 20]))
def test_segments_have_the_ids_of_the_whole_text(
    bare: str, flags: str, text: str, shortest: int
) -> None:
    made = complete(bare, flags)
    segments = cutter(made).cut(text, shortest_characters=shortest)
    assert "".join(segments) == text
    assert ids(made, segments) == ids(made, [text])


@given(text=texts(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<filename>", "<repo_name>"]))
def test_segments_of_the_builtin_model_have_the_ids_of_the_whole_text(text: str) -> None:
    made = builtin()
    segments = cutter(made).cut(text, shortest_characters=1)
    assert ids(made, segments) == ids(made, [text])


def test_text_is_cut_where_added_tokens_start() -> None:
    cut = cutter(builtin()).cut("a<|im_end|>\n<|im_start|>user", shortest_characters=1)
    assert cut == ["a", "<|im_end|>\n", "<|im_start|>user"]


def test_a_short_segment_stays_with_the_next() -> None:
    text = "<|im_start|>" + "word " * 20 + "<|im_end|>\n<|im_start|>assistant\n"
    assert cutter(builtin()).cut(text) == [text[:112], text[112:]]


@pytest.mark.parametrize("text", ["", "no token here"])
def test_text_without_an_added_token_is_one_segment(text: str) -> None:
    assert cutter(builtin()).cut(text) == [text]


def test_an_earlier_segment_does_not_depend_on_what_follows() -> None:
    turn = "<|im_start|>user\n" + "some words " * 10 + "<|im_end|>\n"
    before, after = cutter(builtin()).cut(turn * 3), cutter(builtin()).cut(turn * 4)
    assert after[: len(before) - 1] == before[:-1]


def with_token(made: Tokenizer, **flags: bool) -> Tokenizer:
    made.add_tokens([AddedToken("<s>", **{"normalized": False, **flags})])
    return made


def nowhere_to_cut() -> Tokenizer:
    return with_token(byte_level(), normalized=True)


def beside_a_word() -> Tokenizer:
    return with_token(byte_level(), single_word=True)


def swallowed_by_another() -> Tokenizer:
    made = with_token(byte_level(), rstrip=True)
    made.add_tokens([AddedToken("\n\n", lstrip=True, normalized=False)])
    return made


def dropping_merges() -> Tokenizer:
    made = with_token(byte_level())
    made.model.dropout = 0.1
    return made


def blind_to_special_tokens() -> Tokenizer:
    made = with_token(byte_level())
    made.encode_special_tokens = True
    return made


def written_in_python() -> Tokenizer:
    class Whole:
        def pre_tokenize(self, text: object) -> None: ...

    made = with_token(byte_level())
    made.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Whole())
    return made


def saying_all_twice() -> Tokenizer:
    made = with_token(byte_level())
    made.post_processor = processors.TemplateProcessing(single="$A $A", pair="$A $B")
    return made


def without_an_unknown() -> Tokenizer:
    return with_token(Tokenizer(models.WordLevel({"a": 0}, unk_token="?")))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (nowhere_to_cut, "nowhere to cut"),
        (beside_a_word, "single_word"),
        (swallowed_by_another, "lstrip"),
        (dropping_merges, "dropout"),
        (blind_to_special_tokens, "tokenised as text"),
        (written_in_python, "cannot be inspected"),
        (saying_all_twice, "cannot be cut apart"),
        (without_an_unknown, "refuses the probe"),
    ],
)
def test_a_tokenizer_whose_ids_depend_on_other_segments_is_refused(
    make: Callable[[], Tokenizer], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Cutter(make())


def test_a_tokenizer_with_an_unknown_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = frozenset({"BPE", "Sequence", "Digits"})
    monkeypatch.setattr("kvroute.router.prompts.segments.PIECEWISE", known)
    with pytest.raises(ValueError, match="the step ByteLevel is not known"):
        Cutter(builtin())


def size_bytes(segment: str, count: int) -> int:
    return sys.getsizeof(segment) + 4 * count + ENTRY_BYTES


def token_ids(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.arange(count, dtype=np.uint32)


def test_the_least_recently_used_segment_is_evicted_first() -> None:
    known = SegmentCache(capacity_bytes=2 * size_bytes("a", 10))
    known.put("a", token_ids(10))
    known.put("b", token_ids(10))
    assert known.get("a") is not None
    known.put("c", token_ids(10))
    assert known.get("b") is None
    assert known.get("a") is not None
    assert known.get("c") is not None


@given(st.lists(st.tuples(st.text(max_size=300), st.integers(0, 300)), max_size=60))
def test_the_cache_stays_within_its_bytes(puts: list[tuple[str, int]]) -> None:
    known = SegmentCache(capacity_bytes=4_096)
    for segment, count in puts:
        known.put(segment, token_ids(count))
        held = {text: ids for text, _ in puts if (ids := known.get(text)) is not None}
        assert sum(size_bytes(text, len(ids)) for text, ids in held.items()) <= 4_096


def test_a_segment_larger_than_the_cache_evicts_nothing() -> None:
    known = SegmentCache(capacity_bytes=1_000)
    known.put("a", token_ids(10))
    known.put("b", token_ids(1_000))
    assert known.get("a") is not None
    assert known.get("b") is None
