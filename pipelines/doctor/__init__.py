"""`opd doctor`: what would go wrong with a recipe, before it does.

`examine` runs the checks: `checks` of domains, settings, sizes, places to publish and kinds of teachers, of
`rewards`, of `servers` and workers, of Ray's `cluster` (all without torch), `models` and their tokenizers,
`estimate` of memory and disk, `kl` between the base and the teachers and what the rewards say of the base.
`--parity` asks every back end for the same scores: `parity` has the back ends, `parity_ranks` two ranks for
those that need them, `parity_table` what is compared and shown. `--pairs` asks how often a reward prefers the
better answer: `calibration`.
"""
