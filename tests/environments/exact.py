"""The tokens that are learnt from are those that were written: an engine that keeps them, and a check."""


class Near(list):
    """Log-probabilities that equal others within what rounds: batches of other sizes round differently."""

    def __eq__(self, other):
        return len(self) == len(other) and all(abs(a - b) < 1e-4 for a, b in zip(self, other, strict=True))

    def __ne__(self, other):
        return not self == other

    __hash__ = None


class KilledError(Exception):
    """The process would be gone."""


class Recorded:
    """Stands before an engine and keeps what was asked and written, in order, by request."""

    def __init__(self, engine, die_after: int | None = None) -> None:
        self.engine, self.asked, self.written, self.left = engine, {}, {}, die_after

    def generate(self, requests, more=None):
        def noted(idle):
            asked = more(idle)
            self.asked |= {one.uid: one for one in asked or ()}
            return asked

        for chunk in self.engine.generate(requests, noted):
            for uid, token, logprob in zip(chunk.uids, chunk.token_ids, chunk.logprobs, strict=True):
                self.written.setdefault(uid, []).append((int(token), float(logprob)))
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise KilledError
            yield chunk


def check_exact(groups, engine: Recorded, limit: int = 400) -> None:
    """Every token that the loss counts is one that was written, in its place and with its log-probability."""
    for sample in (sample for group in groups for sample in group.samples):
        turns: list[list[tuple[int, float]]] = []
        while f"{sample.uid}/{len(turns)}" in engine.asked:
            turns.append(engine.written[f"{sample.uid}/{len(turns)}"])
        written = [one for turn in turns for one in turn]
        mask = sample.loss_mask
        assert sample.response_ids[mask].tolist() == [token for token, _ in written]
        assert sample.rollout_logprobs[mask].tolist() == [logprob for _, logprob in written]
        assert not sample.rollout_logprobs[~mask].any()
        # Each turn was asked for behind exactly the tokens that are learnt from.
        whole, place = sample.token_ids, len(sample.prompt_ids)
        for number, turn in enumerate(turns):
            request = engine.asked[f"{sample.uid}/{number}"]
            place = len(request.prompt_ids)
            assert whole[:place].tolist() == request.prompt_ids.tolist()
            assert whole[place : place + len(turn)].tolist() == [token for token, _ in turn]
        assert len(sample.response_ids) <= limit
