"""What the process that stages are forked from has imported, once for all of them."""

from opd.imports import uncollected

with uncollected():  # a stage then looks for garbage among its own objects alone
    import opd.pipelines.run  # noqa: F401
