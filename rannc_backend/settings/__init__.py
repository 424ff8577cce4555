"""Options, where they come from, and files that users name."""
