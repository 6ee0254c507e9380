"""`make demo`: the same pictures through real vLLM twice, with and without the pool."""
