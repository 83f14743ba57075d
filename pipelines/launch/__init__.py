"""Who runs a stage: this process, ranks and workers beside it on this machine, or actors on a Ray cluster."""
