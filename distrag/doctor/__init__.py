"""this machine -> what can train on it, and what to mend."""
