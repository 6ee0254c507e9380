"""Naive models of ecpool's native classes, against which the real ones are tested."""
