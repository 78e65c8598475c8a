"""The hooks of methods, what a method reports, and bases that several methods share."""
