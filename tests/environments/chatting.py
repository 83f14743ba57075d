"""A small byte-level tokenizer with the chat templates of the common families, and a model of its size."""

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from opd.models.causal_lm import CausalLM

CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n"
    "{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "thinking": THINKING}
TEXT = ["the cat sat on the mat and said hello to the other cat", "go north, take the red key, open the door"]


@functools.cache
def tokenizer(template: str = "chatml", lossy: bool = False) -> Any:
    """Byte-level BPE of 300 tokens, in which most texts have several encodings. `lossy`: capitals are read as
    small letters, so that no encoding leads back to a text that holds one.
    """
    made = Tokenizer(models.BPE())
    if lossy:
        made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    found = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    found.chat_template = TEMPLATES[template]
    return found


def model(seed: int = 0, **changes: Any) -> CausalLM:
    """A random one-layer model that writes its tokens."""
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    }
    return CausalLM.from_config(config | changes, tokenizer=tokenizer(), seed=seed)
