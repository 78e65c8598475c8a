"""YAML configurations: one per method and data set."""
