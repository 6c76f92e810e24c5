"""Columns to RaggedBatch: the planned epoch, the sampler over it, negatives, collate and the loader.

Nothing is imported here, so that the config section of this room can be read without numba or torchrec.
"""
