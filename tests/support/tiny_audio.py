"""A tiny model for speech: Whisper with random weights, and sounds for it.

The tokenizer has a token for each byte, and the special tokens of Whisper's own tokenizer.
"""

import io
import string
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np

RATE = 16_000  # samples per second that the model expects
CLIP_S = 2  # longest sound in seconds that the model hears at once; Whisper's own models hear 30 s
HOP = 160  # samples between two frames of the spectrogram
POSITIONS = 64  # context length of the decoder in tokens
WIDTH = 32
STRENGTH = 1.0  # standard deviation of the weights; with less, all recordings would be the same
TIMESTAMPS = CLIP_S * 50 + 1  # number of special tokens for times, one for each 20 ms


def hearing_model(folder: Path) -> Path:
    """Write the model into a folder, and return the folder. The weights are always the same."""
    import torch
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    vocabulary = _vocabulary()
    end = vocabulary["<|endoftext|>"]
    start = vocabulary["<|startoftranscript|>"]
    config = WhisperConfig(
        vocab_size=len(vocabulary),
        num_mel_bins=80,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_source_positions=CLIP_S * RATE // HOP // 2,
        max_target_positions=POSITIONS,
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(std=STRENGTH)
        model.model.decoder.layer_norm.weight.normal_()  # else each token would follow itself
        # Tokens are as likely as their embeddings are long. Most of the text are letters and times.
        lengths = torch.full((len(vocabulary), 1), 0.3)
        lengths[-TIMESTAMPS:] = 0.75
        lengths[[vocabulary[letter] for letter in string.ascii_lowercase]] = 1.0
        model.model.decoder.embed_tokens.weight *= lengths
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=end, decoder_start_token_id=start)
    model.save_pretrained(folder)
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=[])
    marks = [token for token in vocabulary if token.startswith("<|")]
    times = [mark for mark in marks if mark[2].isdigit()]
    tokenizer.add_special_tokens({"extra_special_tokens": [m for m in marks if m not in times]})
    tokenizer.add_tokens(times)
    extractor = WhisperFeatureExtractor(
        feature_size=80, sampling_rate=RATE, hop_length=HOP, chunk_length=CLIP_S
    )
    WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder


def _vocabulary() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from vllm.model_executor.models.whisper_utils import ISO639_1_SUPPORTED_LANGS

    tokens = [
        *bytes_to_unicode().values(),
        "<|endoftext|>",
        "<|startoftranscript|>",
        *(f"<|{language}|>" for language in ISO639_1_SUPPORTED_LANGS),
        *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"),
        *("<|nospeech|>", "<|notimestamps|>"),
        *(f"<|{index * 0.02:.2f}|>" for index in range(TIMESTAMPS)),
    ]
    return {token: id_ for id_, token in enumerate(tokens)}


def sound(seed: int = 0, seconds: float = 1.0, rate: int = RATE) -> bytes:
    """Return a WAV file with noise."""
    samples = np.random.default_rng(seed).integers(-8192, 8192, int(seconds * rate), np.int16)
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return data.getvalue()


def form(fields: Mapping[str, str | Sequence[str]], file: bytes | None) -> tuple[bytes, str]:
    """Return a multipart form with these fields and a file, and its content type."""
    files = {"file": ("sound.wav", file, "audio/wav")} if file is not None else {"": ("", b"")}
    request = httpx.Request("POST", "http://x", data=dict(fields), files=files)
    return request.read(), request.headers["content-type"]
