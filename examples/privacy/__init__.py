"""Private training from public weights: see docs/privacy.md."""
