"""`rannc verify`: the user's own script on its ranks beside one process. See docs/verify.md."""
