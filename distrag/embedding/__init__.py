"""IDS -> VECTORS: the tables of a model and where their rows lie."""
