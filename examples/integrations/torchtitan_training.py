"""torchtitan on local checkpoints. Run it twice, alone or with `torchrun`: it resumes."""

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

if not torch.cuda.is_available():
    from examples.integrations import torchtitan_on_cpu

    torchtitan_on_cpu.prepare()

from datasets import Dataset
from torchtitan import train
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from localckpt.integrations.torchtitan import LocalCheckpoint


class Characters(BaseTokenizer):
    """A tokenizer that needs no files."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        return [1, *text.encode(), 2]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


DATASETS["numbers"] = DatasetConfig(
    path="",
    loader=lambda _: Dataset.from_dict({"text": [str(n**5) * (1 + n % 4) for n in range(500)]}),
    sample_processor=lambda sample: sample["text"],
)


def small() -> Trainer.Config:
    """torchtitan's debug model with one layer, and checkpoints on the node in every fifth step."""
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    config.tokenizer = Characters.Config()
    config.dataloader.dataset = "numbers"
    config.training.seq_len, config.training.local_batch_size = 32, 2
    config.validator.enable = config.debug.enable_structured_logging = False
    config.checkpoint = LocalCheckpoint.Config(
        enable=True, local="/tmp/localckpt-torchtitan", local_interval=5, save_to_folder=False
    )
    return config if torch.cuda.is_available() else torchtitan_on_cpu.on_cpu(config)


def main(options: list[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29517"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    os.environ.setdefault("MASTER_ADDR", "localhost")
    with tempfile.TemporaryDirectory() as folder:
        here = ["--module", __spec__.name, "--config", "small", "--hf-assets-path", folder]
        sys.argv[1:] = [*here, "--dump-folder", folder, *options]
        train.main()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="/tmp/localckpt-torchtitan")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    main(["--checkpoint.local", arguments.directory, "--training.steps", str(arguments.steps)])
