"""Processes that share a region and are killed at any moment, and what must be true afterwards."""
