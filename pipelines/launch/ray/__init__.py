"""`launch: ray`: the trainer, its rollout engines and its teachers as actors.

`trainer` has both ends of a stage: what runs it, and what the process that was started does to keep it going;
`engine` and `teacher` compute for it. All are `actors` of a `cluster`.
"""
