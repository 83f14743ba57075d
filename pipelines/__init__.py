"""Wire the package: command line, run folder, stages and report. Nothing imports it."""
