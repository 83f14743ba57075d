"""Extension points as they go wrong: named by a path, called by `test_wrong_code.py`."""

import itertools
import sys

import numpy as np
import torch

from opd.types import RolloutBatch, SampleGroup


def raises(first, *_):
    return {}["no such key"]


def too_few():
    return None


def too_many(a, b, c, d, e, f, g):
    return None


def gives_none(first, *_):
    return None


def gives_text(first, *_):
    return "text"


def gives_number(first, *_):
    return 3


def gives_empty_list(first, *_):
    return []


def gives_list_of_none(first, *_):
    return [None, None, None]


def gives_nan(*arguments):
    first = arguments[0]
    if isinstance(first, SampleGroup):
        return [np.full(len(sample.response_ids), np.nan) for sample in first.samples]
    first.terms[0].advantages[:] = np.nan
    return first


def gives_short_arrays(*arguments):
    first = arguments[0]
    if isinstance(first, SampleGroup):
        return [np.zeros(len(sample.response_ids) - 1) for sample in first.samples]
    first.terms[0].kl_weight = first.terms[0].kl_weight[1:]
    return first


def gives_fewer(*arguments):
    first = arguments[0]
    if isinstance(first, SampleGroup):
        return [np.zeros(len(sample.response_ids)) for sample in first.samples[1:]]
    return RolloutBatch(first.samples, first.terms[1:])


def gives_scalar(first, *_):
    return torch.tensor(1.0)


def gives_integers(logprobs, *_):
    return torch.zeros(logprobs.shape, dtype=torch.int64)


def gives_no_gradient(logprobs, *_):
    return logprobs.detach()


def exits(first, *_):
    sys.exit(0)


class Mute(BaseException):
    """Has no words for itself."""

    def __str__(self):
        raise Mute


def raises_mute(first, *_):
    raise Mute


class Fights:
    """Answers no question."""

    def _refuse(self, *_):
        raise Mute

    __class__ = property(_refuse)
    __getattr__ = __iter__ = __len__ = __repr__ = __bool__ = __float__ = __array__ = _refuse


def gives_what_fights(first, *_):
    return Fights()


def gives_list_of_fights(first, *_):
    return [Fights(), Fights(), Fights()]


class Endless(list):
    def __iter__(self):
        return itertools.repeat(1.0)


def gives_no_end(first, *_):
    return Endless()


class Number(float):
    def __float__(self):
        raise Mute


def gives_number_that_raises(first, *_):
    return Number(1.0)


class Parts(dict):
    def items(self):
        raise Mute

    def __iter__(self):
        raise Mute


def gives_parts(first, *_):
    return Parts(a="text")


class Short(list):
    def __len__(self):
        return 3


def gives_a_list_that_lies(completions, **_):
    return Short([1.0])


def gives_endless_list(completions, **_):
    return Endless()


def gives_huge(first, *_):
    if isinstance(first, SampleGroup):
        return [np.full(len(sample.response_ids), -1e30) for sample in first.samples]
    return 1e308


def gives_huge_parts(first, *_):
    return {"a": 1e9, "b": 1e9}


def gives_infinite(logprobs, *_):
    return logprobs / 0


class Abstract:
    def __init__(self, needed):
        self.needed = needed


not_callable = 3
