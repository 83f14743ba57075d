"""Extension points as they go wrong: named by a path, called by `test_wrong_code.py`."""

import numpy as np
import torch

from opd.types import RolloutBatch, SampleGroup


def raises(first, *_):
    return {}["no such key"]


def too_few():
    return None


def too_many(a, b, c, d, e, f, g):
    return None


def gives_none(*_):
    return None


def gives_text(*_):
    return "text"


def gives_number(*_):
    return 3


def gives_empty_list(*_):
    return []


def gives_list_of_none(*_):
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


def gives_scalar(*_):
    return torch.tensor(1.0)


def gives_integers(logprobs, *_):
    return torch.zeros(logprobs.shape, dtype=torch.int64)


def gives_no_gradient(logprobs, *_):
    return logprobs.detach()


class Abstract:
    def __init__(self, needed):
        self.needed = needed


not_callable = 3
