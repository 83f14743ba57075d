"""Commands beside a run: `opd wal`, `opd publish`; and how every command ends."""
