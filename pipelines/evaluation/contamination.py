"""How many evaluation prompts of a run stand in what it is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from opd.config import Recipe
from opd.data.contamination import Index, said, text_of, training_texts
from opd.data.demonstrations import demonstrations
from opd.pipelines.stages.sft import asked_in_evaluation, is_held_out
from opd.progress import doing
from opd.rollout.prompts import Domain


def contamination(
    recipe: Recipe, domains: Mapping[str, Domain], sets: Mapping[str, Domain]
) -> dict[str, Any]:
    """`ngram`, how many training texts were looked at (`texts`), and what `Index.found` says of the held-out
    prompts of each domain and set (`found`); nothing where the recipe asks for no comparison.
    """
    config = recipe.evaluation.contamination
    if config is None:
        return {}
    held_out = {
        name: domain.held_out[: recipe.evaluation.prompts_per_domain] for name, domain in domains.items()
    }
    held_out |= {name: domain.held_out for name, domain in sets.items()}
    with doing("comparing evaluation prompts with what is trained on"):
        index = Index(
            {name: [text_of(p) for p in prompts] for name, prompts in held_out.items()}, config.ngram
        )
        for name, domain in domains.items():
            for text, where in training_texts(domain.train, name):
                index.look(text, where)
        for asked, answer, where in _demonstrated(recipe, asked_in_evaluation(domains)):
            index.look(asked, where, answer)
    return {"ngram": config.ngram, "texts": index.seen, "found": index.found()}


def _demonstrated(recipe: Recipe, evaluated: set[str]) -> Iterator[tuple[str, str, str]]:
    """Question, answer and place of every demonstration that is learnt from, one at a time."""
    for domain, config in recipe.demonstrated().items():
        for row in demonstrations(config.source, domain or None, set()):
            if is_held_out(row, config, evaluated):
                continue
            asked = text_of(row.prompt)
            answer = row.completion if row.completion is not None else said(row.messages or [])
            yield asked, answer, row.prompt.where
