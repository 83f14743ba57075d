"""What is known of a recipe before it runs: `opd doctor` says what would go wrong, `opd plan` what a step
would do.

`examine` runs the checks. Without torch: `checks` of settings, sizes, extras and places to publish, `domains`
with their rewards and environments, `servers`, workers and clusters. With the libraries of models: `models`
and their `tokenizers`, their `shapes`, `memory` part by part, `resources` (does it fit, on disk too). With
weights: `measured` (the KL between the base and the teachers, what rewards say of the base, and `--pairs`:
how often a reward prefers the better answer). `--parity` asks every back end for the same scores: `parity`,
with `parity_ranks` for those that need two ranks.

`plan` is a step of a recipe or of samples on disk; `simulate` is a step on a `cluster` that one does not
have.
"""
