"""Check a recipe before it runs. `opd doctor` reports problems, and `opd plan` estimates a step.

`examine` runs the checks. These need no torch: `checks` of settings, sizes, extras and publishing, `domains`
with their rewards and environments, `servers`, workers and clusters. These need the libraries of models:
`models` and their `tokenizers`, their `shapes`, `memory` by item, `resources` (does it fit, on disk too).
`measured` loads weights: the KL between the base and the teachers, rewards of the base, and `--pairs`, which
counts how often a reward prefers the better answer. `--parity` compares the scores of all back ends:
`parity`, and `parity_ranks` for those on two ranks.

`plan` estimates a step of a recipe or of samples on disk. `simulate` runs a step on a `cluster` that you do
not have.
"""
