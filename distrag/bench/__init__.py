"""THIS MACHINE -> RATIOS: distrag's training step and data path against the padded way of working, measured side by side."""
