"""The clients of a communication round as an axis: their stacked state."""
