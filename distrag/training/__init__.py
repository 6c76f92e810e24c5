"""BATCHES -> A MODEL: the exact step, the loop around it and what it writes."""
