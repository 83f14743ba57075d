"""Commands beside a run: `opd wal`, `opd publish`, `opd push`, `opd sample`; and how every command ends."""
