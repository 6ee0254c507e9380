"""A simulator of vLLM's step loop around the real connector, its real region and its real native
module.
"""
