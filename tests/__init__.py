"""The tests mirror the rooms; `ranks.py` starts real ranks for those that need more than one."""
