"""Files in, columns out: schema, prepare, store, split, length profile, named sources."""
