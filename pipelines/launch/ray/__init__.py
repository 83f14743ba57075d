"""`launch: ray`: the trainer, its rollout engines and its teachers as actors.

`supervise` runs in the process that was started and keeps the stages going; `trainer` runs a stage;
`engine` (behind `ray_engine`) and `teacher` compute for it. All are `actors` of a `cluster`.
"""
