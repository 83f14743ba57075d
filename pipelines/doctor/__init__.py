"""`opd doctor`: what would go wrong with a recipe, before it does.

`examine` runs the checks: `checks` of domains, rewards and settings, `models` and their tokenizers, `served`
teachers and workers, `estimate` of memory and disk, `kl` between the base and the teachers. `--parity` asks
every back end for the same scores: `parity` has the back ends, `parity_ranks` two ranks for those that need
them, `parity_table` what is compared and shown.
"""
