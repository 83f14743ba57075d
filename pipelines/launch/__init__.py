"""Run stages in this process, in ranks and workers on this machine, or in actors on a Ray cluster."""
