"""Writes what the recipe reads to a folder: games, tasks, demonstrations of mixed quality, and a tokenizer.

The demonstrations are what a base has seen before anyone trains it for a task: half of what they show is
wrong. Nothing that the recipe holds out is in them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from opd.config.recipe import DomainConfig
from opd.data.load import load_file
from opd.environments.textworld import walkthrough

Messages = list[dict[str, str]]

GAMES = 360
DEMONSTRATIONS = 2000
RIGHT = 0.5
RIGHT_COMMANDS = 0.8
"""Of a game, whose end takes two to four of them."""
ITEMS = ("apple", "bread", "candle", "drum", "egg", "glove", "hat", "ink", "jar", "kettle", "lamp", "mug")
TABLE = '<tool_call>{"name": "table", "arguments": {"file": "prices.csv", "column": "item", "value": "'
CALCULATOR = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
END = '"}}</tool_call>'
ROLES = ["<|user|>", "<|assistant|>", "<|tool|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def said(*turns: str, world: str = "user") -> Messages:
    """A conversation: the question, then the model and its world in turn."""
    roles = ["user"] + ["assistant", world] * len(turns)
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]


def make_games(folder: Path) -> list[Path]:
    """TextWorld's coin collector: the task says a way of one to three rooms; at its end a coin is taken."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"game-{number}.z8" for number in range(GAMES)]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for number, _ in enumerate(pool.imap(make_game, enumerate(paths)), 1):
            print(f"game {number}/{GAMES}", flush=True)
    return paths


def make_game(numbered: tuple[int, Path]) -> None:
    """One of them, if it is not there."""
    import textworld
    from textworld.challenges.tw_coin_collector import coin_collector

    number, path = numbered
    if not path.is_file():
        options = textworld.GameOptions()
        options.seeds, options.path = number, str(path)
        game = coin_collector.make({"level": 102 + number % 3}, options)
        textworld.generator.compile_game(game, options)


def coin_tasks(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        yield {"prompt": walkthrough(path, turns=1)[:1], "label": path.name}


def coin_demonstrations(paths: Sequence[Path], draw: random.Random) -> Iterator[Messages]:
    def choose(commands: Sequence[str], best: str) -> str:
        return best if draw.random() < RIGHT_COMMANDS else draw.choice(commands)

    for number in range(DEMONSTRATIONS):
        yield walkthrough(paths[number % len(paths)], show_commands=True, choose=choose, turns=5)


class Question:
    """About the prices of a shop, whose table is another one each time."""

    def __init__(self, draw: random.Random) -> None:
        items = draw.sample(ITEMS, 5)
        prices = {item: draw.randrange(10, 50) for item in items}
        self.item, number = draw.choice(items), draw.randrange(10, 50)
        self.price = prices[self.item]
        self.files = {"prices.csv": "item,price\n" + "".join(f"{k},{v}\n" for k, v in prices.items())}
        self.kind = draw.choice(("price", "sum", "both"))
        self.first = draw.randrange(10, 50) if self.kind == "sum" else self.price
        self.sum = f"{self.first}+{number}"
        self.text = {
            "price": f"price of {self.item}?",
            "sum": f"{self.sum}?",
            "both": f"price of {self.item}, plus {number}?",
        }[self.kind]
        self.answer = str(self.price if self.kind == "price" else self.first + number)

    def solved(self, draw: random.Random) -> Messages:
        """A conversation that ends with the answer, or with another number, with or without a call."""
        look_up = [f"{TABLE}{self.item}{END}", f"item: {self.item}; price: {self.price}\n1 rows\n"]
        add = [f"{CALCULATOR}{self.sum}{END}", f"{self.first + int(self.sum.split('+')[1])}\n"]
        calls = {"price": look_up, "sum": add, "both": [*look_up, *add]}[self.kind]
        if draw.random() < RIGHT:
            return said(self.text, *calls, self.answer, world="tool")
        kept = 2 * draw.randrange(len(calls) // 2 + 1)
        return said(self.text, *calls[:kept], str(draw.randrange(10, 99)), world="tool")


def shop_tasks(draw: random.Random) -> Iterator[dict[str, Any]]:
    known: set[str] = set()
    for _ in range(2000):
        made = Question(draw)
        if made.text not in known:
            known.add(made.text)
            yield {"prompt": said(made.text), "label": made.answer, "files": made.files}


def digits(draw: random.Random) -> str:
    return "".join(str(draw.randrange(10)) for _ in range(6))


def sort_tasks(draw: random.Random) -> Iterator[dict[str, Any]]:
    for text in sorted({digits(draw) for _ in range(1500)}):
        yield {"prompt": said(f"sort {text}"), "label": "".join(sorted(text))}


def sort_demonstration(draw: random.Random) -> Messages:
    text = digits(draw)
    return said(f"sort {text}", "".join(sorted(text, reverse=draw.random() > RIGHT)))


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def make_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Byte pairs of `texts`; the frame of a call is one token, and every digit."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<pad>", "<eos>", *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in (TABLE, CALCULATOR, END)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=ROLES,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def main(folder: Path) -> None:
    """Write everything; the same files every time."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    paths = make_games(folder / "games")
    write(folder / "coins.jsonl", coin_tasks(paths))
    write(folder / "shop.jsonl", shop_tasks(draw))
    write(folder / "sort.jsonl", sort_tasks(draw))

    config = DomainConfig(source=str(folder / "coins.jsonl"), held_out=HELD_OUT)
    known = load_file("coins", config, held_out_prompts=GAMES).train
    trained = [folder / "games" / str(prompt.label) for prompt in known]
    demonstrations = list(coin_demonstrations(trained, draw))
    demonstrations += [Question(draw).solved(draw) for _ in range(DEMONSTRATIONS)]
    demonstrations += [sort_demonstration(draw) for _ in range(DEMONSTRATIONS)]
    write(folder / "demonstrations.jsonl", ({"messages": one} for one in demonstrations))
    texts = (one["content"] for messages in demonstrations for one in messages)
    make_tokenizer(texts).save_pretrained(folder / "tokenizer")


HELD_OUT = 0.25
"""Share of the games that nobody learns from, as in the recipe."""

if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path, help="where all of it is written")
    main(options.parse_args().folder)
