"""What the tests, the demo and the benches share: a local model, images, and engines in processes
of their own.
"""
