"""Reads rows with pictures through slime's own data set, and prints what its processor makes of them as JSON.

Usage, in the harness: read_pictures.py CHECKPOINT ROWS
"""

import json
import sys

import torch
import zstandard
from slime.utils import accelerator
from slime.utils.data import Dataset
from slime.utils.processing_utils import load_processor
from transformers import AutoTokenizer


def main() -> None:
    """Load tokenizer, processor and rows as slime's data source does."""
    checkpoint, rows = sys.argv[1:]
    processor = load_processor(checkpoint)
    data = Dataset(
        rows,
        AutoTokenizer.from_pretrained(checkpoint),
        processor,
        None,
        prompt_key="prompt",
        multimodal_keys={"image": "images"},
        apply_chat_template=True,
    )
    accelerator.current_stream().synchronize()
    packed = zstandard.ZstdCompressor(level=1).compress(b"weights")
    found = [
        processor.image_processor(images=sample.multimodal_inputs["images"], return_tensors="pt") for sample in data
    ]
    shapes = [list(inputs["pixel_values"].shape) for inputs in found]
    sums = [float(inputs["pixel_values"].double().sum()) for inputs in found]
    assert zstandard.ZstdDecompressor().decompress(packed) == b"weights"
    assert isinstance(found[0]["pixel_values"], torch.Tensor)
    print(json.dumps({"shapes": shapes, "sums": sums, "prompts": [sample.prompt for sample in data]}))


main()
