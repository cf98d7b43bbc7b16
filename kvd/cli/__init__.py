"""The kvd command."""
