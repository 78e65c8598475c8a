"""What the observing callbacks measure."""
