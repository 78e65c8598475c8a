"""Code that starts, stores, shows and compares runs, without effect on their numbers."""
