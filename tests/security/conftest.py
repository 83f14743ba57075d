"""Makes this folder's own helpers importable."""

from __future__ import annotations
