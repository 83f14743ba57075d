"""Commands beside a run: `opd wal`, `opd publish`, `opd push`, `opd sample`. And every command's exit."""
