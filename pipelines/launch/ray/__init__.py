"""Run the trainer, its rollout engines and its teachers as actors: `launch: ray`.

`trainer` runs a stage, and keeps it going from the process that was started. `engine` and `teacher` compute
for it. All are `actors` of a `cluster`.
"""
