"""Tiny vision models: Idefics 3 with random weights.

They have the built-in model's tokenizer and a chat template with images. Some special tokens of the
tokenizer are renamed to special tokens for images. Idefics 3 is used because vLLM's Gemma 3, LLaVA,
Qwen2-VL and PaliGemma import torchvision, which vLLM's CPU build otherwise does not need.
"""

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from tests.support.tiny_models import SHARED, WINDOW

SIDE = 112  # width and height of a piece of an image, in pixels
PIECE = 16  # number of tokens of a piece, in addition to its special tokens
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 14,
}
SHARED_TEXT = {"model_type": "llama", "num_hidden_layers": 2, **SHARED}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
TEXTS: Mapping[str, Mapping[str, Any]] = {
    "idefics3": SHARED_TEXT,
    "idefics3 with windows": SHARED_TEXT | WINDOWS,
}
MARKS = {  # special tokens of the tokenizer -> special tokens that replace them
    "<repo_name>": "<image>",
    "<file_sep>": "<fake_token_around_image>",
    "<filename>": "<end_of_utterance>",
}
IMAGE_ID = 3
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\
{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PROCESSOR = {"processor_class": "Idefics3Processor", "image_seq_len": PIECE}
PIXELS = {
    "image_processor_type": "Idefics3ImageProcessor",
    # An image has four pieces, and a fifth piece that shows the whole image.
    "size": {"longest_edge": 2 * SIDE},
    "max_image_size": {"longest_edge": SIDE},
}


def seeing_model(name: str, folder: Path) -> Path:
    """Write the model with this name in TEXTS into a folder, and return the folder.

    The weights are always the same.
    """
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    config = Idefics3Config(
        vision_config=dict(VISION),
        text_config=dict(TEXTS[name]),
        image_token_id=IMAGE_ID,
        scale_factor=2,
        pad_token_id=SHARED["pad_token_id"],
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | PIXELS))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (Path(resolve(BUILTIN_MODEL)) / file).read_text()
        for old, new in MARKS.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        (folder / file).write_text(text)
    return folder


def picture(seed: int, width: int = SIDE, height: int = SIDE) -> str:
    """Return a data URL of a random image. Squares of all sizes have the same number of tokens."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return _url(Image.fromarray(pixels))


def blank(side: int) -> str:
    """Return a data URL of a black square. The URL is short."""
    from PIL import Image

    return _url(Image.new("1", (side, side)))


def _url(image: Any) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def image(url: str) -> dict[str, Any]:
    """Return an image as a part of a chat's message."""
    return {"type": "image_url", "image_url": {"url": url}}
