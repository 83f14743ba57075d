"""Write the tokenizer of the teachers: byte-level BPE that joins digits, where the student reads characters.

Usage: python examples/other_tokenizer/tokenizer.py FOLDER
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TAGS = ("<sort>", "<add3>")


def main() -> None:
    """Train it on random digits and the names of the two tasks, and save it."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("0123456789=", k=rng.randint(2, 9))) for _ in range(20_000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(set("0123456789=<>sortad"))
    trainer = trainers.BpeTrainer(
        vocab_size=60, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*texts, *TAGS * 500], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False
    ).save_pretrained(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
